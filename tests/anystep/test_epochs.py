"""Units lie where the order specification says, and every epoch has each of them once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.epochs import EpochPolicy, UnitOrder

POLICIES = ("same", "reshuffle", "global")


def order_of(policy="reshuffle", *, num_units=1000, num_shards=8, block_records=16, seed=0, task="demo"):
  return UnitOrder(
    task=task,
    split="train",
    seed=seed,
    num_units=num_units,
    num_shards=num_shards,
    block_records=block_records,
    policy=EpochPolicy(policy),
  )


def located(order, units):
  return [tuple(int(v) for v in unit) for unit in zip(*order.locate(np.array(units)), strict=True)]


def oracle_located(order, units):
  sizes = [len(range(shard, order.num_units, order.num_shards)) for shard in range(order.num_shards)]
  return [
    oracle.locate(unit, sizes, order.block_records, order.task, order.split, order.seed, order.policy.value)
    for unit in units
  ]


def epoch_of(order, epoch):
  """[(shard, place)] of an epoch's units in their order."""
  return [(s, q) for _, s, q in located(order, range(epoch * order.num_units, (epoch + 1) * order.num_units))]


SMALL_ORDERS = st.builds(
  order_of,
  st.sampled_from(POLICIES),
  num_units=st.integers(1, 200),
  num_shards=st.integers(1, 40),
  block_records=st.integers(1, 40),
  seed=st.integers(-5, 2**40),
  task=st.sampled_from(["demo", "a:b", "Zürich"]),
)
# Shards shorter than a block, no whole number of blocks, fewer units than shards, one shard, blocks of one.
SHAPES = [(1000, 8, 16), (50, 4, 4), (97, 8, 5), (30, 8, 32), (5, 9, 2), (1, 1, 1), (41, 1, 8), (64, 4, 1)]


@pytest.mark.parametrize(
  ("policy", "units", "golden"),
  [
    ("reshuffle", [0, 1, 999], [(0, 0, 0), (0, 1, 0), (0, 7, 124)]),
    (
      "reshuffle",
      [1000, 1001, 1500, 1999, 2000],
      [(1, 0, 72), (1, 1, 50), (1, 4, 96), (1, 7, 117), (2, 0, 89)],
    ),
    ("global", [0, 1, 999, 1000], [(0, 0, 61), (0, 5, 58), (0, 4, 16), (1, 7, 5)]),
    ("same", [0, 1, 999, 1000, 2009], [(0, 0, 0), (0, 1, 0), (0, 7, 124), (1, 0, 0), (2, 1, 1)]),
  ],
)
def test_places_are_the_specifications(policy, units, golden):
  assert located(order_of(policy), units) == golden


@given(SMALL_ORDERS, st.lists(st.integers(0, 1000), min_size=1, max_size=30))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_places_are_the_oracles(order, units):
  assert located(order, units) == oracle_located(order, units)


@given(
  st.sampled_from(POLICIES),
  st.integers(1, 10**12),
  st.integers(1, 64),
  st.integers(1, 10**6),
  st.lists(st.integers(0, 10**15), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_places_are_the_oracles_in_large_caches(policy, num_units, num_shards, block_records, units):
  order = order_of(policy, num_units=num_units, num_shards=num_shards, block_records=block_records)
  assert located(order, units) == oracle_located(order, units)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_units", "num_shards", "block_records"), SHAPES)
def test_every_epoch_has_each_record_once(policy, num_units, num_shards, block_records):
  order = order_of(policy, num_units=num_units, num_shards=num_shards, block_records=block_records)
  every_record = {(index % num_shards, index // num_shards) for index in range(num_units)}
  for epoch in range(4):
    units = range(epoch * num_units, (epoch + 1) * num_units)
    assert {e for e, _, _ in located(order, units)} == {epoch}
    records = epoch_of(order, epoch)
    assert len(records) == num_units
    assert set(records) == every_record


@pytest.mark.parametrize(("num_units", "num_shards", "block_records"), SHAPES)
def test_a_reshuffled_epoch_reads_each_shard_in_whole_blocks_with_the_short_one_last(
  num_units, num_shards, block_records
):
  order = order_of(num_units=num_units, num_shards=num_shards, block_records=block_records)
  in_order, reshuffled = epoch_of(order, 0), epoch_of(order, 1)
  assert [s for s, _ in reshuffled] == [s for s, _ in in_order]
  for shard in range(num_shards):
    turns = [q for s, q in reshuffled if s == shard]
    whole_blocks = len(turns) // block_records
    read = [turns[at : at + block_records] for at in range(0, len(turns), block_records)]
    blocks = [{q // block_records for q in places} for places in read]
    assert all(len(block) == 1 for block in blocks)
    assert {b for block in blocks[:whole_blocks] for b in block} == set(range(whole_blocks))
    assert blocks[whole_blocks:] in ([], [{whole_blocks}])


@pytest.mark.parametrize("policy", ["reshuffle", "global"])
def test_every_epoch_seed_and_task_has_an_order_of_its_own(policy):
  orders = [
    tuple(epoch_of(order_of(policy, seed=seed, task=task), epoch))
    for seed in range(5)
    for task in ("demo", "demp")
    for epoch in range(1, 6)
  ]
  assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("policy", ["same", "reshuffle"])
def test_the_first_epoch_is_index_order_whatever_the_seed(policy):
  by_index = [(index % 8, index // 8) for index in range(1000)]
  for seed in (0, 1, 2):
    assert epoch_of(order_of(policy, seed=seed), 0) == by_index


def test_the_same_policy_repeats_the_first_epoch_and_global_reorders_it():
  assert epoch_of(order_of("same"), 3) == epoch_of(order_of("same"), 0)
  assert epoch_of(order_of("global"), 0) != epoch_of(order_of("same"), 0)
  assert epoch_of(order_of("global", seed=1), 0) != epoch_of(order_of("global"), 0)


@given(SMALL_ORDERS, st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.randoms())
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_units_place_does_not_depend_on_what_else_is_asked(order, units, random):
  alone = {unit: located(order, [unit])[0] for unit in units}
  random.shuffle(units)
  assert located(order, units) == [alone[unit] for unit in units]


def test_no_units_have_no_places():
  assert located(order_of(), np.zeros(0, np.int64)) == []
