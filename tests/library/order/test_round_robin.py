"""Units take turns over shards of any sizes, as the order specification says, a million shards included."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.order.round_robin import RoundRobin

GOLDEN = [(0, 0), (1, 0), (3, 0), (0, 1), (3, 1), (0, 2)]

# Zeros in front, within and behind; one shard; equal ones; a power of two and its neighbours; one that lasts.
SHAPES = [
  [3, 1, 0, 2],
  [1],
  [7],
  [0, 0, 5, 0],
  [4] * 6,
  [0, 4, 4, 0, 4],
  [2] * 15,
  [1] * 16 + [3],
  [5] * 17,
  [1000, 1, 1, 0, 1000, 2],
  [1, 2, 3, 4, 5, 6, 7, 8],
  [8, 7, 6, 5, 4, 3, 2, 1],
]
FEW_UNITS = st.lists(
  st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=40
).filter(any)
MANY_UNITS = st.lists(
  st.one_of(st.just(0), st.integers(0, 100), st.integers(0, 10**6), st.integers(0, 10**12)),
  min_size=1,
  max_size=40,
).filter(any)


def located(sizes, units):
  shards, turns = RoundRobin(np.array(sizes)).locate(np.asarray(units, np.int64))
  return list(zip(shards.tolist(), turns.tolist(), strict=True))


def turn_by_turn(sizes):
  """[(shard, turn)] of an epoch's units, by asking every shard in every turn."""
  return [(shard, turn) for turn in range(max(sizes)) for shard, size in enumerate(sizes) if size > turn]


def test_the_specifications_shards_take_turns_as_it_says():
  assert located([3, 1, 0, 2], range(6)) == GOLDEN


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shards_take_turns_until_they_run_out(sizes):
  expected = turn_by_turn(sizes)
  assert located(sizes, range(sum(sizes))) == expected
  assert [oracle.round_robin(sizes, unit) for unit in range(sum(sizes))] == expected


@given(FEW_UNITS)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_shards_of_any_sizes_take_turns_until_they_run_out(sizes):
  assert located(sizes, range(sum(sizes))) == turn_by_turn(sizes)


@given(MANY_UNITS, st.lists(st.integers(0, 10**14), max_size=8))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_units_of_large_shards_lie_where_the_oracle_says(sizes, numbers):
  units = [0, sum(sizes) - 1, *(number % sum(sizes) for number in numbers)]
  assert located(sizes, units) == [oracle.round_robin(sizes, unit) for unit in units]


@given(st.one_of(FEW_UNITS, MANY_UNITS), st.lists(st.integers(0, 10**14), max_size=20))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_shard_and_turn_say_which_unit_it_was(sizes, numbers):
  units = np.array([number % sum(sizes) for number in numbers], np.int64)
  round_robin = RoundRobin(np.array(sizes))
  assert np.array_equal(round_robin.unit_of(*round_robin.locate(units)), units)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_every_shard_and_turn_is_one_unit(sizes):
  shards, turns = map(np.array, zip(*turn_by_turn(sizes), strict=True))
  assert RoundRobin(np.array(sizes)).unit_of(shards, turns).tolist() == list(range(sum(sizes)))


def test_a_units_turn_does_not_depend_on_what_else_is_asked():
  sizes = [9, 0, 4, 4, 30, 1]
  expected = turn_by_turn(sizes)
  asked = np.random.default_rng(0).integers(0, sum(sizes), 500).tolist()
  assert located(sizes, asked) == [expected[unit] for unit in asked]
  assert [located(sizes, [unit])[0] for unit in range(sum(sizes))] == expected
  assert located(sizes, []) == []


# A million shards

MILLION = 10**6


def million_sizes(kind):
  rng = np.random.default_rng(1)
  return {
    "any": lambda: rng.integers(0, 10**6, MILLION),
    "of all magnitudes": lambda: (10 ** rng.uniform(-1, 9, MILLION)).astype(np.int64),
    "mostly empty": lambda: rng.integers(1, 10**9, MILLION) * (rng.random(MILLION) < 0.001),
    "two sizes": lambda: np.where(rng.random(MILLION) < 0.5, 10**6, 10**6 - 1),
    "equal": lambda: np.full(MILLION, 10**6),
    "all different": lambda: rng.permutation(MILLION),
  }[kind]()


@pytest.mark.parametrize(
  "kind", ["any", "of all magnitudes", "mostly empty", "two sizes", "equal", "all different"]
)
def test_a_million_shards_take_turns_by_arithmetic(kind):
  sizes = million_sizes(kind)
  round_robin, num_units = RoundRobin(sizes), int(sizes.sum())
  rng = np.random.default_rng(2)

  # Turn q starts after min(R_s, q) units of each shard, with the first of the shards that have more.
  for turn in (0, 1, int(rng.integers(0, sizes.max())), int(sizes.max()) - 1):
    start, sharing = int(np.minimum(sizes, turn).sum()), np.flatnonzero(sizes > turn)
    places = np.unique(np.append(rng.integers(0, len(sharing), 20_000), [0, len(sharing) - 1]))
    shards, turns = round_robin.locate(start + places)
    assert np.array_equal(shards, sharing[places])
    assert (turns == turn).all()

  units = np.append(rng.integers(0, num_units, 50), [0, num_units - 1])
  shards, turns = round_robin.locate(units)
  assert (turns < sizes[shards]).all()
  assert np.array_equal(round_robin.unit_of(shards, turns), units)
