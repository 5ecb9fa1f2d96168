"""Mixtures: the assignment of a stream's stripes to tasks (docs/order.md#mixtures)."""

from __future__ import annotations

import functools
import heapq
import math
import re
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.forks import start_anew_in_children
from anystep.limits import MAX_RATE_CHARACTERS, MAX_RATE_EXPONENT
from anystep.whole_numbers import INT64_MAX, whole_number

_EXACT_PERIOD_LIMIT = 65536
_EXPONENT = re.compile(r"[eE]([+-]?[\d_]+)\s*\Z")
# The specification's largest period. With at most _MAX_TASKS tasks, all arithmetic on stripes fits in int64.
_PERIOD_LIMIT = 1 << 24
_MAX_TASKS = 1 << 13
# Stripes computed at a time; positions within a chunk fit in uint16, which numpy sorts in linear time.
_CHUNK_STRIPES = 65536
# Stripes between two stored counts of each task's stripes; divides _CHUNK_STRIPES.
_BLOCK_STRIPES = 1024


class Mixing:
  """Endless sequence of tasks in which a mixture hands out stripes.

  At every n, each task's count x_k among the first n stripes has |x_k - a_k n / P| < 1, and after each period
  of P stripes it is exactly the task's quota a_k more. The rule is that of Tijdeman, "The chairman assignment
  problem", Discrete Mathematics 32 (1980); docs/order.md#mixtures.

  >>> mixing = Mixing({"b": 0.7, "a": 0.3})
  >>> mixing.names, mixing.quotas.tolist(), mixing.period
  (['a', 'b'], [3, 7], 10)
  >>> "".join(mixing.names[task] for task in mixing.draws(0, 10))
  'babbabbbab'
  >>> mixing.counts(10**12 + 2).tolist()
  [300000000001, 700000000001]

  Args:
    shares: each task's share of stripes, in any common unit; read as written, so 0.3 is 3/10 and "1/3" a
      third. Zero drops a task.

  Attributes:
    names: the tasks in the order of their UTF-8 bytes; `counts` and `draws` use this order.
    quotas: stripes of each task in a period, `(tasks,) int64`.
    period: P, the sum of the quotas.

  Raises:
    AnystepError: 78 `rates` for a share that is not a finite number >= 0, if no share is positive, or if
      more than 8192 shares are.
  """

  def __init__(self, shares: Mapping[str, int | float | str | Fraction]):
    exact = {name: exact_share(name, share) for name, share in shares.items()}
    names = [name for name in sorted(exact, key=str.encode) if exact[name]]
    if not 1 <= len(names) <= _MAX_TASKS:
      raise AnystepError(
        ExitCode.CONFIG,
        "rates",
        expected=f"1 to {_MAX_TASKS} tasks with a rate above zero",
        got=f"{len(names)} of {len(exact)} tasks",
        fix="give at least one task a rate above zero, and no more tasks than expected",
      )
    self._hold(names, _choose_quotas([exact[name] for name in names]))

  @classmethod
  def of_quotas(cls, quotas: Mapping[str, int]) -> Mixing:
    """Return the mixture with these quotas, as a plan stores them; quotas of 0 are kept.

    Raises:
      ValueError: for quotas that no shares give: a negative one, a sum of 0 or above 2**24, or more than
        8192 tasks.
    """
    names = sorted(quotas, key=str.encode)
    mixing = cls.__new__(cls)
    mixing._hold(names, [whole_number(quotas[name], "quotas") for name in names])
    return mixing

  def _hold(self, names: list[str], quotas: Sequence[int]) -> None:
    self._stripes = _share_period(tuple(quotas))
    self.names = names
    self.quotas = self._stripes.quotas
    self.period = self._stripes.period

  def __reduce__(self):
    # Locks cannot be pickled; the stripes are computed again.
    return type(self).of_quotas, (dict(zip(self.names, self.quotas.tolist(), strict=True)),)

  def counts(self, n: int) -> np.ndarray:
    """Return the stripes of each task among the first n < 2**63, `(tasks,) int64`."""
    periods, within = divmod(_check_stripe(n), self.period)
    self._stripes.extend(within)
    block = within // _BLOCK_STRIPES
    in_block = np.bincount(self._stripes.draws[block * _BLOCK_STRIPES : within], minlength=self.quotas.size)
    return periods * self.quotas + self._stripes.counts[block] + in_block

  def draws(self, start: int, stop: int) -> np.ndarray:
    """Return the tasks of stripes [start, stop) as positions in `names`: `(stop - start,) int64`."""
    start = _check_stripe(start)
    first = start % self.period
    last = first + _check_stripe(stop, least=start) - start
    self._stripes.extend(min(last, self.period))
    within = slice(first, last) if last <= self.period else np.arange(first, last) % self.period
    return self._stripes.draws[within].astype(np.int64)

  def stripe_of(self, task: int, i: int) -> int:
    """Return the number of a task's i-th stripe, counted from 0.

    Raises:
      ValueError: for a task with quota 0, and for i < 0.
    """
    quota = int(self.quotas[task])
    if not quota:
      raise ValueError(f"{self.names[task]} has quota 0, so no stripes")
    periods, within = divmod(_check_least(0, i), quota)
    # The task has had more than `within` stripes by the stripe n where a_k n / P reaches within + 1.
    self._stripes.extend(-(-(within + 1) * self.period // quota))
    block = (
      int(np.searchsorted(self._stripes.counts[: self._stripes.known_blocks, task], within, "right")) - 1
    )
    start = block * _BLOCK_STRIPES
    of_task = np.flatnonzero(self._stripes.draws[start : start + _BLOCK_STRIPES] == task)
    return periods * self.period + start + int(of_task[within - self._stripes.counts[block, task]])


class _Period:
  """Stripes of one period, computed from its start up to the last one needed so far.

  Thread-safe.

  Attributes:
    quotas, period: as in `Mixing`.
    draws: the task of each stripe.
    counts: `(blocks + 1, tasks) int32`, row b for the first b blocks of stripes.
    known_blocks: number of computed blocks; values of `draws` and `counts` after them have no meaning.
  """

  def __init__(self, quotas: tuple[int, ...]):
    self.period = sum(quotas)
    if min(quotas, default=0) < 0 or not 1 <= self.period <= _PERIOD_LIMIT or len(quotas) > _MAX_TASKS:
      raise ValueError(
        f"expected at most {_MAX_TASKS} quotas >= 0 with a sum of 1 to {_PERIOD_LIMIT}, "
        f"got {len(quotas)} with a sum of {self.period}, the smallest {min(quotas, default=None)}"
      )
    self.quotas = np.array(quotas, np.int64)
    self.quotas.flags.writeable = False
    # Pages of memory that are not written yet take no room.
    self.draws = np.empty(self.period, np.min_scalar_type(len(quotas) - 1))
    self.counts = np.zeros((-(-self.period // _BLOCK_STRIPES) + 1, len(quotas)), np.int32)
    self.known_blocks = 0
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Make a new lock, as a forked process must: another thread may have held the old one."""
    self._lock = threading.Lock()

  def extend(self, stop: int) -> None:
    """Compute stripes until [0, stop) are known."""
    if stop <= self.known_blocks * _BLOCK_STRIPES:
      return
    with self._lock:
      while stop > self.known_blocks * _BLOCK_STRIPES:
        start = self.known_blocks * _BLOCK_STRIPES
        counts = self.counts[self.known_blocks].astype(np.int64)
        chunk_stop = min(start + _CHUNK_STRIPES, self.period)
        drawn = _draw_chunk(self.quotas, self.period, counts, start, chunk_stop)
        self.draws[start : start + drawn.size] = drawn
        for first in range(0, drawn.size, _BLOCK_STRIPES):
          counts += np.bincount(drawn[first : first + _BLOCK_STRIPES], minlength=counts.size)
          self.counts[(start + first) // _BLOCK_STRIPES + 1] = counts
        # Last, because other threads read the known blocks without the lock.
        self.known_blocks += -(-drawn.size // _BLOCK_STRIPES)


@functools.lru_cache(maxsize=8)
def _share_period(quotas: tuple[int, ...]) -> _Period:
  """Return the period of some quotas, shared by all mixtures that have them."""
  return _Period(quotas)


def _draw_chunk(quotas: np.ndarray, period: int, counts: np.ndarray, start: int, end: int) -> np.ndarray:
  """Return the tasks of at most _CHUNK_STRIPES stripes [start, end), `(end - start,) int64`.

  Before `start` task k had counts[k] stripes.

  Tijdeman's rule is earliest deadline first. A task's x-th stripe (from 0) is a job, released at the first
  n >= P (1 + D x) / (D a_k). Of the jobs released and not yet served, stripe n serves the one with the
  smallest ((D - 1) P - D (a_k n - x P)) / (D a_k), that is, as all have the same -n in it, the one with the
  smallest deadline P (D - 1 + D x) / (D a_k). Some job is always waiting: that is Tijdeman's theorem.
  """
  if quotas.size == 1:
    return np.zeros(end - start, np.int64)
  d = 2 * quotas.size - 2
  released = (d * quotas * end + (d - 1) * period) // (d * period)
  jobs = released - counts
  task = np.repeat(np.arange(quotas.size), jobs)
  x = np.arange(task.size) + np.repeat(released - jobs.cumsum(), jobs)
  a = quotas[task]
  # The rule's n counts from 1. Jobs released before the chunk are waiting at its first stripe.
  releases = np.maximum(-(-(period * (1 + d * x)) // (d * a)) - 1 - start, 0).astype(np.uint16)
  by_release = np.argsort(releases, kind="stable")
  # Jobs are in task order, so a stable sort gives ties to the earlier name.
  by_deadline = np.argsort(_scale_deadlines(d - 1 + d * x, a), kind="stable")
  ranks = np.empty_like(by_deadline)
  ranks[by_deadline] = np.arange(ranks.size)
  stripes_to_next = np.diff(releases[by_release].astype(np.int64), append=end - start)
  served: list[int] = []
  waiting: list[int] = []
  for rank, stripes in zip(ranks[by_release].tolist(), stripes_to_next.tolist(), strict=True):
    if not stripes:
      heapq.heappush(waiting, rank)
      continue
    served.append(heapq.heappushpop(waiting, rank))
    for _ in range(stripes - 1):
      served.append(heapq.heappop(waiting))
  return task[by_deadline[served]]


def _scale_deadlines(numerators: np.ndarray, quotas: np.ndarray) -> np.ndarray:
  """Return floor(2**48 numerator / quota), which orders as the fractions do.

  Distinct fractions with quotas a, b <= 2**24 differ by at least 1 / (a b) >= 2**-48. By long division, in
  digits of 24 bits.
  """
  result, remainder = np.divmod(numerators, quotas)
  for _ in range(2):
    digit, remainder = np.divmod(remainder << 24, quotas)
    result = (result << 24) + digit
  return result


def exact_share(name: str, share: object) -> Fraction:
  """Return a task's share as a fraction of exactly the value that was written.

  Raises:
    AnystepError: 78 `rates` for a share that is not a finite number >= 0.
  """
  exact = _parse_share(share)
  if exact is None:
    raise AnystepError(
      ExitCode.CONFIG,
      "rates",
      task=name,
      expected="a finite number >= 0",
      got=repr(share),
      fix="give the task a rate like 0.3, 2 or 1/3, or one with an exponent"
      f" from -{MAX_RATE_EXPONENT} to {MAX_RATE_EXPONENT}, or 0 to leave it out",
    )
  return exact


def is_rate(value: object) -> bool:
  """Return whether a value is the text of a share, as plans hold it."""
  return isinstance(value, str) and _parse_share(value) is not None


def _parse_share(share: object) -> Fraction | None:
  """Return a share as a fraction; None if it is no finite number >= 0, or its exponent is too large."""
  try:
    # The text of a bool is no number.
    text = str(share)
    exponent = _EXPONENT.search(text)
    # Checked before conversion: a large exponent makes an integer of as many digits.
    if len(text) > MAX_RATE_CHARACTERS or (exponent and abs(int(exponent[1])) > MAX_RATE_EXPONENT):
      return None
    exact = Fraction(text)
  except (ValueError, ZeroDivisionError):
    return None
  return exact if exact >= 0 else None


def _choose_quotas(shares: list[Fraction]) -> list[int]:
  """Return quotas: shares as coprime integers if their sum is small, else the nearest ones.

  The nearest are for the smallest period that keeps each share to within 1%.
  """
  denominator = math.lcm(*(share.denominator for share in shares))
  integers = [int(share * denominator) for share in shares]
  divisor = math.gcd(*integers)
  coprime = [integer // divisor for integer in integers]
  total = sum(coprime)
  if total <= _EXACT_PERIOD_LIMIT:
    return coprime
  period = _EXACT_PERIOD_LIMIT
  while True:
    quotas = _round_by_largest_remainders(coprime, period)
    close = all(
      100 * abs(a * total - share * period) <= share * period
      for a, share in zip(quotas, coprime, strict=True)
    )
    if close or period >= _PERIOD_LIMIT:
      return quotas
    period *= 2


def _round_by_largest_remainders(shares: list[int], period: int) -> list[int]:
  """Round exact shares of the period down, and the largest remainders up; ties go to the first."""
  total = sum(shares)
  quotas = [share * period // total for share in shares]
  by_remainder = sorted(range(len(shares)), key=lambda k: (-(shares[k] * period % total), k))
  for k in by_remainder[: period - sum(quotas)]:
    quotas[k] += 1
  return quotas


def _check_stripe(number: int, *, least: int = 0) -> int:
  """Return a number of stripes as an int that int64 holds."""
  number = _check_least(least, number)
  if number > INT64_MAX:
    raise ValueError(f"expected at most {INT64_MAX}, got {number}")
  return number


def _check_least(least: int, number: int) -> int:
  number = whole_number(number, "stripes")
  if number < least:
    raise ValueError(f"expected at least {least}, got {number}")
  return number
