"""Mixtures give each task its share at every stripe, by the order specification, in any order of asking."""

import math
import pickle
import random
import sys
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.errors import AnystepError
from anystep.order import mixing
from anystep.order.mixing import Mixing

GOLDEN = [
  ({"a": 0.3, "b": 0.7}, [3, 7], 10, "babbabbbab"),
  ({"a": 1, "b": 2, "c": 5}, [1, 2, 5], 8, "ccbcacbc"),
  ({"c4": 364868892, "wiki": 7000003, "code": 12345}, [1028804, 35, 19737], 1048576, ""),
]
PARTS = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]
# The last three have periods of several chunks of 65,536 stripes; their ends do not fall on one's.
QUOTAS = [
  [1],
  [6],
  [1, 1],
  [2, 4, 10],
  [0, 3],
  [0, 3, 5, 0],
  [1, 1, 1, 1, 96],
  [7] * 20,
  [1] * 300,
  [1, 1500, 2],
  [1000, 24],
  [1, 65535],
  [65537 * part for part in (1, 2)],
  [650 * part + 1 for part in PARTS],
  [0, 1, 3, 70001, 90001],
]
RATES = st.one_of(
  st.integers(0, 40),
  st.integers(0, 400).map(lambda n: n / 20),
  st.integers(0, 400).map(lambda n: str(n / 20)),
  st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 3, 4, 6])).map(lambda pair: Fraction(*pair)),
  st.sampled_from(["1/3", "2e0", 0.0, -0.0, 1, 1.0, "1"]),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


def some_positive(shares):
  return any(oracle.exact_rate(share) for share in shares.values())


def named(quotas):
  return {f"t{k:04}": a for k, a in enumerate(quotas)}


def anew(quotas):
  """A mixture of which no stripe is computed yet."""
  mixing._share_period.cache_clear()
  return Mixing.of_quotas(named(quotas))


def decimal_shares(num_tasks, num_tiny):
  """Multiples of 1e-6 that sum to 1.048576, so exact with P = 2**20 and no less; a few are 1e-6, or 0."""
  rng = random.Random(num_tasks)
  millionths = [1] * num_tiny + [rng.randint(2, 2**20 // num_tasks) for _ in range(num_tasks - num_tiny - 1)]
  millionths.append(2**20 - sum(millionths))
  rng.shuffle(millionths)
  return {"zero": 0} | {name: part / 10**6 for name, part in named(millionths).items()}


def assert_equals_oracle(mixture, quotas, ns):
  period = sum(quotas)
  assert (mixture.quotas.tolist(), mixture.period) == (quotas, period)
  assert mixture.draws(0, period).tolist() == list(oracle.one_period(tuple(quotas)))
  assert mixture.draws(period // 2, 2 * period + 1).tolist() == oracle.draws(
    quotas, period, period // 2, 2 * period + 1
  )
  for n in ns:
    assert mixture.counts(n).tolist() == oracle.counts(quotas, period, n)
    task = n % len(quotas)
    if quotas[task]:
      assert mixture.stripe_of(task, n) == oracle.stripe_of(quotas, task, n)


@pytest.mark.parametrize(("shares", "quotas", "period", "stripes"), GOLDEN)
def test_quotas_and_stripes_are_the_specifications(shares, quotas, period, stripes):
  mixture = Mixing(shares)
  assert mixture.names == sorted(shares)
  assert (mixture.quotas.tolist(), mixture.period) == (quotas, period)
  assert "".join(mixture.names[k] for k in mixture.draws(0, len(stripes))) == stripes


@given(st.dictionaries(NAMES, RATES, min_size=1, max_size=6).filter(some_positive))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_small_mixtures_equal_the_oracles(shares):
  names, quotas, period = oracle.quotas(shares)
  mixture = Mixing(shares)
  assert mixture.names == names
  assert_equals_oracle(mixture, quotas, [0, 1, period - 1, period, 3 * period + 2, 10**15 + 7])


@pytest.mark.parametrize("quotas", QUOTAS, ids=lambda quotas: f"{len(quotas)} tasks, {sum(quotas)} stripes")
def test_fixed_mixtures_equal_the_oracles(quotas):
  period = sum(quotas)
  ns = {0, 1, 1023, 1024, 1025, 65535, 65536, 65537, period - 1, period, 7 * period // 3, 10**15 + 11}
  assert_equals_oracle(anew(quotas), quotas, sorted(ns))


def test_the_golden_mixture_of_a_long_period_equals_the_oracles():
  shares, quotas, period, _ = GOLDEN[-1]
  assert Mixing(shares).draws(0, period).tolist() == list(oracle.one_period(tuple(quotas)))


@given(
  st.dictionaries(
    NAMES,
    st.one_of(st.floats(0, 1e9), st.floats(0, 1), st.integers(0, 10**12), st.fractions(0, 100)),
    min_size=1,
    max_size=12,
  ).filter(some_positive)
)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_quotas_of_any_shares_equal_the_oracles_and_keep_to_1_percent(shares):
  names, quotas, period = oracle.quotas(shares)
  mixture = Mixing(shares)
  assert (mixture.names, mixture.quotas.tolist(), mixture.period) == (names, quotas, period)
  assert mixture.quotas.dtype == np.int64
  exact = {name: Fraction(str(shares[name])) for name in names}
  total = sum(exact.values())
  assert sum(quotas) == period
  assert period == 2**24 or all(
    abs(a - exact[name] / total * period) <= exact[name] / total * period / 100
    for name, a in zip(names, quotas, strict=True)
  )


@pytest.mark.parametrize(
  ("shares", "quotas"),
  [
    ({"a": 1, "b": 65535}, [1, 65535]),
    ({"a": 1, "b": 1, "c": 65535}, [1, 1, 65534]),
    ({"a": 4045, "b": 6549555}, [81, 130991]),
    ({"a": 3001, "b": 3001, "c": 125070}, [1501, 1500, 62535]),
    ({"a": 100, "b": 101 * 65536 - 100}, [1, 65535]),
    ({"a": 99, "b": 100 * 65536 - 99}, [63, 2**22 - 63]),
    ({"a": 1, "b": 10**12}, [0, 2**24]),
    ({"a": 1e-300, "b": 1e300}, [0, 2**24]),
    ({"a": 10**40, "b": 10**40}, [1, 1]),
    ({"only": 0.1}, [1]),
    ({"a": 0.1, "b": np.float64(0.2), "c": np.float32(0.3), "d": np.int64(1)}, [1, 2, 3, 10]),
    ({"a": "1/3", "b": Fraction(1, 6), "c": "0.5"}, [2, 1, 3]),
  ],
)
def test_quotas_of_ties_limits_and_kinds_of_numbers(shares, quotas):
  mixture = Mixing(shares)
  assert (mixture.quotas.tolist(), mixture.period) == (quotas, sum(quotas))


@pytest.mark.parametrize(("num_tasks", "num_tiny"), [(2, 1), (12, 3), (100, 20)])
@pytest.mark.parametrize("with_zero_quotas", [False, True])
def test_no_task_is_ever_a_whole_stripe_from_its_share(num_tasks, num_tiny, with_zero_quotas):
  """Between a task's stripes a_k n - x_k P only grows: so it is least at them and most right before them."""
  mixture = Mixing(decimal_shares(num_tasks, num_tiny))
  assert (len(mixture.names), mixture.period, mixture.quotas.min()) == (num_tasks, 2**20, 1)
  if with_zero_quotas:
    stored = dict(zip(mixture.names, mixture.quotas, strict=True))
    mixture = Mixing.of_quotas({"a": 0, **stored, "t0000b": 0, "z": 0})
  period = mixture.period
  drawn = mixture.draws(0, period)
  assert np.array_equal(np.bincount(drawn, minlength=len(mixture.names)), mixture.quotas)
  ns = np.argsort(drawn.astype(np.uint8), kind="stable") + 1
  task = drawn[ns - 1]
  before = np.arange(period) - (np.cumsum(mixture.quotas) - mixture.quotas)[task]
  assert (mixture.quotas[task] * ns - (before + 1) * period > -period).all()
  assert (mixture.quotas[task] * (ns - 1) - before * period < period).all()


@pytest.mark.parametrize("quotas", [[1, 2, 5], [1], [0, 3, 5], [650 * part + 1 for part in PARTS]], ids=str)
def test_counts_are_those_of_the_draws(quotas):
  mixture = anew(quotas)
  period = mixture.period
  ns = {0, 1, 2, 1023, 1024, 1025, 65535, 65536, 65537, period - 1, period, period + 1, 2 * period + 3}
  for n in sorted(ns, reverse=True):
    counts = mixture.counts(n)
    assert counts.dtype == np.int64
    assert np.array_equal(counts, np.bincount(mixture.draws(0, n), minlength=len(quotas)))
    later = mixture.counts(10**15 // period * period + n)
    assert np.array_equal(later, counts + 10**15 // period * mixture.quotas)


@pytest.mark.parametrize("quotas", QUOTAS, ids=lambda quotas: f"{len(quotas)} tasks, {sum(quotas)} stripes")
def test_far_away_the_period_repeats(quotas):
  mixture = anew(quotas)
  period = mixture.period
  once = mixture.draws(0, period)
  for start in (10**12, 10**12 // period * period - 3, 10**15 + 1):
    for width in (0, 1, 64, period, 2 * period + 5):
      window = mixture.draws(start, start + width)
      assert window.dtype == np.int64
      assert np.array_equal(window, once[np.arange(start, start + width) % period])


def test_stripe_of_finds_each_stripe_of_each_task():
  quotas = [0, 1, 17, 900, 1400]
  mixture = anew(quotas)
  seen = [0] * len(quotas)
  for stripe, task in enumerate(mixture.draws(0, 2 * mixture.period).tolist()):
    assert mixture.stripe_of(task, seen[task]) == stripe
    seen[task] += 1


def test_stripe_of_computes_as_far_as_it_needs():
  quotas = [0, 1, 3, 70001, 90001]
  for task, i in [(1, 0), (2, 0), (2, 1), (2, 2), *((4, i) for i in range(36860, 36868))]:
    assert anew(quotas).stripe_of(task, i) == oracle.stripe_of(quotas, task, i)
  # The first chunk ends among those of the last task.
  assert oracle.stripe_of(quotas, 4, 36860) < 65536 < oracle.stripe_of(quotas, 4, 36867)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_asking_does_not_matter(seed):
  quotas = [1500 * part + 1 for part in PARTS]
  whole = anew(quotas)
  period, tasks = whole.period, range(len(quotas))
  drawn = whole.draws(0, period)
  questions = [("draws", (start, start + 64)) for start in range(0, period, period // 7)]
  questions += [("counts", (n,)) for n in range(0, period, period // 6)]
  questions += [("stripe_of", (task, quotas[task] // 3)) for task in tasks]
  questions += [("stripe_of", (task, quotas[task] - 1)) for task in tasks]
  random.Random(seed).shuffle(questions)
  asked = anew(quotas)
  for method, arguments in questions:
    assert np.array_equal(getattr(asked, method)(*arguments), getattr(whole, method)(*arguments))
  assert np.array_equal(asked.draws(0, period), drawn)


def test_what_is_asked_early_in_a_long_period_waits_for_no_more_than_a_chunk(monkeypatch):
  mixture = anew([1, 2**23, 2**23 - 1])
  chunks = []
  chunk = mixing._draw_chunk
  monkeypatch.setattr(mixing, "_draw_chunk", lambda *arguments: chunks.append(arguments) or chunk(*arguments))
  assert mixture.draws(10**6 * 2**24, 10**6 * 2**24 + 64).tolist() == oracle_start(mixture, 64)
  assert mixture.counts(65536).sum() == 65536
  assert mixture.stripe_of(1, 1000) < 65536
  assert len(chunks) == 1
  assert mixture.counts(65537).sum() == 65537
  assert len(chunks) == 2


def oracle_start(mixture, stripes):
  sequence = oracle.stripes(tuple(mixture.quotas.tolist()))
  return [next(sequence) for _ in range(stripes)]


@pytest.mark.parametrize("num_tasks", [2, 257, 8192])
def test_the_longest_periods_and_the_most_tasks_start_as_the_oracles(num_tasks):
  quotas = [1] * (num_tasks - 1) + [2**24 - num_tasks + 1]
  mixture = anew(quotas)
  assert mixture.draws(0, 300).tolist() == oracle_start(mixture, 300)


def test_threads_that_ask_at_once_get_what_one_gets_alone():
  quotas = [1500 * part + 1 for part in PARTS]
  whole = anew(quotas)
  period = whole.period
  drawn = whole.draws(0, period)
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-5)
  try:
    for _ in range(5):
      asked, start = anew(quotas), threading.Barrier(4)
      answers = [None] * 4

      def ask(thread, asked=asked, start=start, answers=answers):
        start.wait()
        begins = range(thread * 1000, period, period // 9)
        answers[thread] = [asked.draws(begin, begin + 500) for begin in begins]

      threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      for thread in range(4):
        for begin, answer in zip(range(thread * 1000, period, period // 9), answers[thread], strict=True):
          assert np.array_equal(answer, drawn[np.arange(begin, begin + 500) % period])
      assert np.array_equal(asked.draws(0, period), drawn)
      assert asked.counts(period - 1).tolist() == np.bincount(drawn[:-1], minlength=len(quotas)).tolist()
  finally:
    sys.setswitchinterval(interval)


def test_names_sort_by_their_bytes():
  names = ["Z", "_", "a", "a:b", "ab", "z", "é", "\ue000", "\U0001f600"]
  assert names == sorted(names, key=str.encode) != sorted(names, key=lambda name: name.encode("utf-16-be"))
  assert Mixing(dict.fromkeys(reversed(names), 1)).names == names
  assert Mixing.of_quotas(dict.fromkeys(reversed(names), 1)).names == names


def test_stored_quotas_are_taken_as_they_are():
  mixture = Mixing.of_quotas({"c": 4, "b": 0, "a": np.int64(2)})
  assert (mixture.names, mixture.quotas.tolist(), mixture.period) == (["a", "b", "c"], [2, 0, 4], 6)
  assert mixture.draws(0, 6).tolist() == oracle_start(mixture, 6)
  made = Mixing({"a": 0.3, "b": 0.7})
  again = Mixing.of_quotas(dict(zip(made.names, made.quotas, strict=True)))
  assert again.draws(0, 30).tolist() == made.draws(0, 30).tolist()


def test_a_task_of_quota_zero_counts_in_the_rule():
  """With K = 3 another sequence follows than with K = 2."""
  alone, beside = Mixing.of_quotas({"a": 2, "b": 5}), Mixing.of_quotas({"a": 2, "b": 5, "c": 0})
  assert alone.draws(0, 7).tolist() != beside.draws(0, 7).tolist()


def test_what_it_holds_cannot_be_changed_by_accident():
  mixture = Mixing({"a": 1, "b": 2})
  with pytest.raises(ValueError, match="read-only"):
    mixture.quotas[0] = 5
  mixture.draws(0, 3)[:] = 9
  mixture.counts(2)[:] = 9
  assert mixture.draws(0, 3).tolist() == oracle_start(mixture, 3)
  assert mixture.counts(2).tolist() == [1, 1]


def test_it_travels_to_other_processes():
  mixture = Mixing({"a": 1, "b": 2})
  again = pickle.loads(pickle.dumps(mixture))
  assert (again.names, again.quotas.tolist(), again.period) == (["a", "b"], [1, 2], 3)
  assert again.draws(0, 9).tolist() == mixture.draws(0, 9).tolist()


@pytest.mark.parametrize(
  "share",
  [
    *(-1, -0.5, "-1/3", math.nan, np.float32("nan"), math.inf, -math.inf, "nan", "1/0", "many", "", None),
    *(True, False, np.True_, "True", 1j, [1]),
  ],
)
def test_a_share_that_is_not_a_finite_number_is_refused(share):
  with pytest.raises(AnystepError) as refused:
    Mixing({"good": 1, "bad": share})
  assert (refused.value.code, refused.value.kind) == (78, "rates")
  assert refused.value.fields == {"task": "bad", "expected": "a finite number >= 0", "got": repr(share)}


@pytest.mark.parametrize(
  ("shares", "got"),
  [
    ({}, "0 of 0 tasks"),
    ({"a": 0}, "0 of 1 tasks"),
    ({"a": 0, "b": 0.0, "c": "0/5"}, "0 of 3 tasks"),
    (named([0] + [1] * 8193), "8193 of 8194 tasks"),
  ],
)
def test_a_mixture_of_no_task_or_of_too_many_is_refused(shares, got):
  with pytest.raises(AnystepError) as refused:
    Mixing(shares)
  assert (refused.value.code, refused.value.kind) == (78, "rates")
  assert refused.value.fields == {"expected": "1 to 8192 tasks with a rate above zero", "got": got}


@pytest.mark.parametrize(
  "quotas", [{}, {"a": 0}, {"a": 3, "b": -1}, {"a": 2**24, "b": 1}, dict.fromkeys(map(str, range(8193)), 1)]
)
def test_quotas_that_no_shares_give_are_refused(quotas):
  with pytest.raises(ValueError, match="expected at most 8192 quotas >= 0 with a sum of 1 to 16777216"):
    Mixing.of_quotas(quotas)


@pytest.mark.parametrize(
  ("method", "arguments", "message"),
  [
    ("counts", (-1,), "expected at least 0, got -1"),
    ("draws", (-1, 3), "expected at least 0, got -1"),
    ("draws", (5, 3), "expected at least 5, got 3"),
    ("stripe_of", (0, -1), "expected at least 0, got -1"),
    ("stripe_of", (1, 0), "b has quota 0, so no stripes"),
  ],
)
def test_stripes_that_there_are_not_are_refused(method, arguments, message):
  with pytest.raises(ValueError, match=message):
    getattr(Mixing.of_quotas({"a": 1, "b": 0}), method)(*arguments)
