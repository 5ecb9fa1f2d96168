"""Packs are those of the order specification to the bit, compiled or not, whatever the sizes."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from anystep.order import packing
from anystep.order.packing import PackingPolicy, pack

ONE_FEATURE = [(6,), (5,), (4,), (3,), (7,), (2,), (3,)]
TWO_FEATURES = [(6, 1), (5, 9), (4, 4), (3, 2), (7, 1), (2, 8), (3, 3)]
ORACLES = {"greedy": oracle.pack_greedy, "best_fit": oracle.pack_best_fit}
# No two have a common factor. Twice the product of the first two is the last that int64 holds.
HUGE_LIMITS = [2**31 - 1, 2**31, 2**31 + 1, 2**31 + 3]


def packs_of(lengths, limits, policy):
  """Each pack's records."""
  starts, records = pack(np.array(lengths, np.uint32).reshape(-1, len(limits)), limits, policy)
  assert starts.dtype == records.dtype == np.int64
  assert starts[0] == 0
  assert starts[-1] == len(records) == len(lengths)
  return [records[start:stop].tolist() for start, stop in itertools.pairwise(starts.tolist())]


@contextlib.contextmanager
def loops_as_they_stand():
  """As where numba is not installed."""
  with pytest.MonkeyPatch.context() as patch:
    for loop in (packing._greedy, packing._best_fit):
      patch.setattr(loop, "_run", loop.plain)
    yield


LOOPS = {"compiled": contextlib.nullcontext, "plain": loops_as_they_stand}


@st.composite
def few_records(draw):
  """Lengths and limits where much is equal, zero, or the limit."""
  limits = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
  return draw(st.lists(st.tuples(*(st.integers(0, limit) for limit in limits)), max_size=30)), limits


@st.composite
def several_windows(draw):
  """Lengths and limits of records around the ends of windows; the larger the power, the shorter they are."""
  limits = tuple(draw(st.lists(st.sampled_from([1, 7, 12, 114, 512, 2**20]), min_size=1, max_size=3)))
  num_records = draw(st.sampled_from([255, 256, 257, 511, 512, 513, 600]))
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  shares = rng.random((num_records, len(limits))) ** draw(st.sampled_from([0.3, 1, 4, 16]))
  return [tuple(row) for row in np.floor(shares * (np.array(limits) + 1)).astype(int).tolist()], limits


@st.composite
def almost_equal_weights(draw):
  """Lengths and limits of weights that differ by little, of sizes around what int64 holds, and above."""
  limits = tuple(draw(st.lists(st.sampled_from(HUGE_LIMITS), min_size=1, max_size=4, unique=True)))
  length = st.builds(
    lambda parts, more: parts * 2**28 + more, st.integers(0, 7), st.integers(0, 3)
  ) | st.sampled_from([0, 2**31 - 1])
  return draw(st.lists(st.tuples(*[length] * len(limits)), max_size=30)), limits


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize(
  ("lengths", "limits", "policy", "golden"),
  [
    (ONE_FEATURE, (10,), "none", [[0], [1], [2], [3], [4], [5], [6]]),
    (ONE_FEATURE, (10,), "greedy", [[0], [1, 2], [3, 4], [5, 6]]),
    (ONE_FEATURE, (10,), "best_fit", [[0, 2], [1, 5, 6], [3, 4]]),
    (TWO_FEATURES, (10, 12), "greedy", [[0], [1], [2, 3], [4, 5], [6]]),
    (TWO_FEATURES, (10, 12), "best_fit", [[0, 2], [1, 6], [3], [4, 5]]),
  ],
)
def test_packs_are_the_specifications(lengths, limits, policy, golden, loops):
  with LOOPS[loops]():
    assert packs_of(lengths, limits, policy) == golden


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("policy", ORACLES)
@given(few_records())
@settings(deadline=None, max_examples=150, derandomize=True)
def test_packs_of_few_records_are_the_oracles(loops, policy, case):
  with LOOPS[loops]():
    assert packs_of(*case, policy) == ORACLES[policy](*case)


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("policy", ORACLES)
@given(several_windows())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_packs_of_several_windows_are_the_oracles(loops, policy, case):
  with LOOPS[loops]():
    assert packs_of(*case, policy) == ORACLES[policy](*case)


@pytest.mark.parametrize("loops", LOOPS)
@given(almost_equal_weights())
# A row weighs a little more than int64 holds. The second record weighs one more than the first, as floats as
# much, and takes the third.
@example(([(2**30 + 1, 2**30 + 3), (2**30 + 2, 2**30 + 2), (1, 1)], (2**31, 2**31 + 1)))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_weights_beyond_int64_are_exact(loops, case):
  with LOOPS[loops]():
    assert packs_of(*case, "best_fit") == oracle.pack_best_fit(*case)


@pytest.mark.parametrize("limits", [[2**20] * 4, [2**20, 2**19, 2**18, 3], HUGE_LIMITS[:2]])
def test_weights_that_int64_holds_are_compiled(limits, monkeypatch):
  lengths = np.zeros((10, len(limits)), np.int64)
  pack(lengths, limits, "best_fit")
  monkeypatch.setattr(packing._best_fit, "plain", None)
  pack(lengths, limits, "best_fit")


@pytest.mark.parametrize("policy", PackingPolicy)
def test_packs_of_many_records_hold_each_once_and_fit(policy):
  rng = np.random.default_rng(0)
  limits = np.array([512, 114])
  lengths = np.clip(rng.lognormal([4, 2], 1, (100_000, 2)), 0, limits).astype(np.uint32)
  starts, records = pack(lengths, limits, policy)
  assert np.array_equal(np.sort(records), np.arange(len(lengths)))
  assert (np.add.reduceat(lengths[records], starts[:-1]) <= limits).all()
  firsts, lasts = records[starts[:-1]], records[starts[1:] - 1]
  within = np.delete(np.diff(records), starts[1:-1] - 1)
  assert (within > 0).all()
  assert (np.diff(firsts) > 0).all()
  if policy is PackingPolicy.BEST_FIT:
    assert np.array_equal(firsts // 256, lasts // 256)
  else:
    assert np.array_equal(records, np.arange(len(lengths)))


@pytest.mark.parametrize("policy", PackingPolicy)
def test_type_and_layout_of_lengths_do_not_matter_and_they_stay_as_they_were(policy):
  lengths = np.array(TWO_FEATURES * 50, np.uint32)
  lengths.setflags(write=False)
  expected = [array.tolist() for array in pack(lengths, (10, 12), policy)]
  several = np.repeat(lengths, 2, axis=0)
  for same in (
    lengths.astype(np.int64),
    lengths.astype(np.uint64),
    lengths.astype(np.uint8),
    np.asfortranarray(lengths),
    several[::2],
  ):
    before = same.copy()
    assert [array.tolist() for array in pack(same, np.array([10, 12]), str(policy))] == expected
    assert np.array_equal(same, before)


@pytest.mark.parametrize("policy", PackingPolicy)
@pytest.mark.parametrize("num_features", [1, 3])
def test_no_records_make_no_packs(num_features, policy):
  starts, records = pack(np.zeros((0, num_features), np.uint32), [5] * num_features, policy)
  assert (starts.tolist(), records.tolist()) == ([0], [])


@pytest.mark.parametrize("policy", PackingPolicy)
@pytest.mark.parametrize(
  ("lengths", "limits", "message"),
  [
    ([[3], [11]], [10], "got 10 and lengths from 0 to 11"),
    ([[3, 1], [10, 2]], [10, 1], "got 1 and lengths from 0 to 2"),
    ([[3], [-1]], [10], "got 10 and lengths from -1 to 3"),
    (np.array([[2**64 - 1]], np.uint64), [10], f"got 10 and lengths from 0 to {2**64 - 1}"),
    ([[0]], [0], "got 0 and lengths from 0 to 0"),
    (np.zeros((0, 1), int), [-1], "got -1 and lengths from 0 to 0"),
    ([[1, 1]], [10], r"got \(1, 2\) int64 and 1 limits"),
    ([1, 1], [10, 10], r"got \(2,\) int64 and 2 limits"),
    ([[1.0]], [10], r"got \(1, 1\) float64 and 1 limits"),
  ],
)
def test_lengths_that_no_row_takes_are_refused(lengths, limits, message, policy):
  with pytest.raises(ValueError, match=f"expected .*{message}$"):
    pack(np.array(lengths), limits, policy)


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="worst_fit"):
    pack(np.zeros((1, 1), int), [1], "worst_fit")
