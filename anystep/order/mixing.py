"""Mixtures: which task each stripe of a stream goes to (docs/order.md#mixtures)."""

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
# Stripes computed at a time; places within a chunk are uint16, which numpy sorts in linear time.
_CHUNK_STRIPES = 65536
# Stripes from one stored count of each task's stripes to the next; divides _CHUNK_STRIPES.
_BLOCK_STRIPES = 1024


class Mixing:
  """The endless sequence of tasks in which a mixture hands out stripes.

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
    names: the tasks in order of their UTF-8 bytes, which `counts` and `draws` count.
    quotas: stripes of each task in a period, `(tasks,) int64`.
    period: P, the sum of the quotas.

  Raises:
    AnystepError: 78 `rates` for a share that is not a finite number >= 0, where none is positive, or where
      more than 8192 are.
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
    self._hold(names, _quotas_of([exact[name] for name in names]))

  @classmethod
  def of_quotas(cls, quotas: Mapping[str, int]) -> Mixing:
    """The mixture with these quotas, as a plan stores them; they are taken as they are, zeros included.

    Raises:
      ValueError: for what no shares give: a negative quota, a sum of 0 or above 2**24, or over 8192 tasks.
    """
    names = sorted(quotas, key=str.encode)
    mixing = cls.__new__(cls)
    mixing._hold(names, [whole_number(quotas[name], "quotas") for name in names])
    return mixing

  def _hold(self, names: list[str], quotas: Sequence[int]) -> None:
    self._once = _period_of(tuple(quotas))
    self.names = names
    self.quotas = self._once.quotas
    self.period = self._once.period

  def __reduce__(self):
    # Locks cannot be pickled, and the stripes need not be.
    return type(self).of_quotas, (dict(zip(self.names, self.quotas.tolist(), strict=True)),)

  def counts(self, n: int) -> np.ndarray:
    """Stripes of each task among the first n < 2**63 of the endless sequence, `(tasks,) int64`."""
    periods, within = divmod(_stripe(n), self.period)
    self._once.extend(within)
    block = within // _BLOCK_STRIPES
    rest = np.bincount(self._once.draws[block * _BLOCK_STRIPES : within], minlength=self.quotas.size)
    return periods * self.quotas + self._once.counts[block] + rest

  def draws(self, start: int, stop: int) -> np.ndarray:
    """Tasks of stripes [start, stop) of the endless sequence: `(stop - start,) int64` places in `names`."""
    start = _stripe(start)
    first = start % self.period
    last = first + _stripe(stop, least=start) - start
    self._once.extend(min(last, self.period))
    within = slice(first, last) if last <= self.period else np.arange(first, last) % self.period
    return self._once.draws[within].astype(np.int64)

  def stripe_of(self, task: int, i: int) -> int:
    """The stripe of the endless sequence that is a task's i-th from 0; the task's quota is not 0."""
    quota = int(self.quotas[task])
    if not quota:
      raise ValueError(f"{self.names[task]} has quota 0, so no stripes")
    periods, within = divmod(_at_least(0, i), quota)
    # By the stripe where a_k n / P reaches within + 1, more than `within` were given.
    self._once.extend(-(-(within + 1) * self.period // quota))
    block = int(np.searchsorted(self._once.counts[: self._once.known_blocks, task], within, "right")) - 1
    start = block * _BLOCK_STRIPES
    own = np.flatnonzero(self._once.draws[start : start + _BLOCK_STRIPES] == task)
    return periods * self.period + start + int(own[within - self._once.counts[block, task]])


class _Period:
  """The stripes of one period, computed from its start up to where they were asked for.

  Threads may share it.

  Attributes:
    quotas, period: as in `Mixing`.
    draws: the task of each stripe.
    counts: `(blocks + 1, tasks) int32`, row b for the first b blocks of stripes.
    known_blocks: how many blocks are computed; what lies beyond in `draws` and `counts` means nothing.
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
    # Pages of these that are not yet written take no memory.
    self.draws = np.empty(self.period, np.min_scalar_type(len(quotas) - 1))
    self.counts = np.zeros((-(-self.period // _BLOCK_STRIPES) + 1, len(quotas)), np.int32)
    self.known_blocks = 0
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Makes a lock that no thread holds, as a forked process must."""
    self._lock = threading.Lock()

  def extend(self, stop: int) -> None:
    """Computes on until stripes [0, stop) are known."""
    if stop <= self.known_blocks * _BLOCK_STRIPES:
      return
    with self._lock:
      while stop > self.known_blocks * _BLOCK_STRIPES:
        start = self.known_blocks * _BLOCK_STRIPES
        given = self.counts[self.known_blocks].astype(np.int64)
        drawn = _chunk(self.quotas, self.period, given, start, min(start + _CHUNK_STRIPES, self.period))
        self.draws[start : start + drawn.size] = drawn
        for first in range(0, drawn.size, _BLOCK_STRIPES):
          given += np.bincount(drawn[first : first + _BLOCK_STRIPES], minlength=given.size)
          self.counts[(start + first) // _BLOCK_STRIPES + 1] = given
        # Only now: other threads read what is known without the lock.
        self.known_blocks += -(-drawn.size // _BLOCK_STRIPES)


@functools.lru_cache(maxsize=8)
def _period_of(quotas: tuple[int, ...]) -> _Period:
  """Plans and their mixtures are made anew often; their stripes are not."""
  return _Period(quotas)


def _chunk(quotas: np.ndarray, period: int, given: np.ndarray, start: int, end: int) -> np.ndarray:
  """Tasks of stripes [start, end), where each task had given[k] of those before; at most _CHUNK_STRIPES.

  Tijdeman's rule is earliest deadline first. A task's x-th stripe (from 0) is a job, released at the first
  n >= P (1 + D x) / (D a_k). Of the jobs released and not yet served, stripe n serves the one with the
  smallest ((D - 1) P - D (a_k n - x P)) / (D a_k), that is, as all have the same -n in it, the one with the
  smallest deadline P (D - 1 + D x) / (D a_k). Some job is always waiting: that is Tijdeman's theorem.
  """
  if quotas.size == 1:
    return np.zeros(end - start, np.int64)
  d = 2 * quotas.size - 2
  released = (d * quotas * end + (d - 1) * period) // (d * period)
  jobs = released - given
  task = np.repeat(np.arange(quotas.size), jobs)
  x = np.arange(task.size) + np.repeat(released - jobs.cumsum(), jobs)
  a = quotas[task]
  # The rule's n counts from 1. Jobs from before the chunk are there at its first stripe.
  releases = np.maximum(-(-(period * (1 + d * x)) // (d * a)) - 1 - start, 0).astype(np.uint16)
  by_release = np.argsort(releases, kind="stable")
  # Jobs stand in task order, so a stable sort gives ties to the earlier name.
  by_deadline = np.argsort(_deadlines(d - 1 + d * x, a), kind="stable")
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


def _deadlines(numerators: np.ndarray, quotas: np.ndarray) -> np.ndarray:
  """floor(2**48 numerator / quota), which compares as the fractions do.

  Distinct fractions with quotas a, b <= 2**24 differ by at least 1 / (a b) >= 2**-48. By long division, in
  digits of 24 bits.
  """
  result, rest = np.divmod(numerators, quotas)
  for _ in range(2):
    digit, rest = np.divmod(rest << 24, quotas)
    result = (result << 24) + digit
  return result


def exact_share(name: str, share: object) -> Fraction:
  """A task's share, read as it is written.

  Raises:
    AnystepError: 78 `rates` where it is not a finite number >= 0.
  """
  exact = _exact(share)
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
  """Whether a value is the text of a share, as plans hold it."""
  return isinstance(value, str) and _exact(value) is not None


def _exact(share: object) -> Fraction | None:
  """A share, read as it is written; None for what is no finite number >= 0, or has too large an exponent."""
  try:
    # A bool is no number to it.
    text = str(share)
    exponent = _EXPONENT.search(text)
    # Looked at first: the integers of a large one are made digit by digit.
    if len(text) > MAX_RATE_CHARACTERS or (exponent and abs(int(exponent[1])) > MAX_RATE_EXPONENT):
      return None
    exact = Fraction(text)
  except (ValueError, ZeroDivisionError):
    return None
  return exact if exact >= 0 else None


def _quotas_of(shares: list[Fraction]) -> list[int]:
  """The shares as coprime integers if their sum is small, else the nearest with a period that keeps 1%."""
  denominator = math.lcm(*(share.denominator for share in shares))
  integers = [int(share * denominator) for share in shares]
  divisor = math.gcd(*integers)
  coprime = [integer // divisor for integer in integers]
  total = sum(coprime)
  if total <= _EXACT_PERIOD_LIMIT:
    return coprime
  period = _EXACT_PERIOD_LIMIT
  while True:
    quotas = _largest_remainders(coprime, period)
    close = all(
      100 * abs(a * total - share * period) <= share * period
      for a, share in zip(quotas, coprime, strict=True)
    )
    if close or period >= _PERIOD_LIMIT:
      return quotas
    period *= 2


def _largest_remainders(shares: list[int], period: int) -> list[int]:
  """Floors of the exact shares of the period, and one more for the largest remainders, ties in order."""
  total = sum(shares)
  quotas = [share * period // total for share in shares]
  by_remainder = sorted(range(len(shares)), key=lambda k: (-(shares[k] * period % total), k))
  for k in by_remainder[: period - sum(quotas)]:
    quotas[k] += 1
  return quotas


def _stripe(number: int, *, least: int = 0) -> int:
  """A number of stripes that int64 holds."""
  number = _at_least(least, number)
  if number > INT64_MAX:
    raise ValueError(f"expected at most {INT64_MAX}, got {number}")
  return number


def _at_least(least: int, number: int) -> int:
  number = whole_number(number, "stripes")
  if number < least:
    raise ValueError(f"expected at least {least}, got {number}")
  return number
