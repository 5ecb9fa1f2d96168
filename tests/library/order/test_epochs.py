"""Units lie where the order specification says, and every epoch has each of them once."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.order.epochs import EpochPolicy, Places, TaskUnits, UnitOrder

POLICIES = ("same", "reshuffle", "global")


class Order(NamedTuple):
  """An order and what it was made of."""

  tasks: tuple[TaskUnits, ...]
  policy: str
  seed: int

  @property
  def order(self):
    return UnitOrder(self.tasks, split="train", seed=self.seed, policy=EpochPolicy(self.policy))

  def located(self, units, task=0):
    return [tuple(map(int, unit)) for unit in zip(*self.order.locate(task, np.array(units)), strict=True)]

  def oracle_located(self, units, task=0):
    tasks = np.broadcast_to(task, len(units))
    return [self._oracle_located(self.tasks[k], unit) for k, unit in zip(tasks, units, strict=True)]

  def _oracle_located(self, task, unit):
    return oracle.locate(unit, sizes_of(task), task.block_records, task.task, "train", self.seed, self.policy)

  def epoch(self, epoch, task=0):
    """[(shard, place)] of an epoch's units in their order."""
    num_units = self.tasks[task].num_units
    return [(s, q) for _, s, q in self.located(range(epoch * num_units, (epoch + 1) * num_units), task)]


def sizes_of(task):
  """Units of each shard."""
  if task.shard_units is not None:
    return task.shard_units.tolist()
  return [len(range(shard, task.num_units, task.num_shards)) for shard in range(task.num_shards)]


def regular(*, num_units=1000, num_shards=8, block_records=16, task="demo"):
  """A task whose unit u is in shard u mod S."""
  return TaskUnits(task=task, num_units=num_units, num_shards=num_shards, block_records=block_records)


def uneven(sizes, *, block_records=4, task="demo"):
  """A task whose shards have any numbers of units."""
  return TaskUnits(
    task=task,
    num_units=sum(sizes),
    num_shards=len(sizes),
    block_records=block_records,
    shard_units=np.array(sizes, np.int64),
  )


def order_of(policy="reshuffle", *, seed=0, **task):
  return Order((regular(**task),), policy, seed)


REGULAR_TASKS = st.builds(
  regular,
  num_units=st.integers(1, 200),
  num_shards=st.integers(1, 40),
  block_records=st.integers(1, 40),
  task=st.sampled_from(["demo", "a:b", "Zürich"]),
)
UNEVEN_TASKS = st.builds(
  uneven,
  st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=12).filter(any),
  block_records=st.integers(1, 12),
  task=st.sampled_from(["demo", "a:b", "Zürich"]),
)
SEEDS = st.integers(-5, 2**40)
SMALL_ORDERS = st.builds(Order, st.tuples(REGULAR_TASKS | UNEVEN_TASKS), st.sampled_from(POLICIES), SEEDS)
MIXED_ORDERS = st.builds(
  Order,
  st.lists(REGULAR_TASKS | UNEVEN_TASKS, min_size=2, max_size=5).map(tuple),
  st.sampled_from(POLICIES),
  SEEDS,
)
# Shards shorter than a block, no whole number of blocks, fewer units than shards, one shard, blocks of one,
# empty shards, shards of every size beside each other.
TASKS = [
  regular(num_units=1000, num_shards=8, block_records=16),
  regular(num_units=50, num_shards=4, block_records=4),
  regular(num_units=97, num_shards=8, block_records=5),
  regular(num_units=30, num_shards=8, block_records=32),
  regular(num_units=5, num_shards=9, block_records=2),
  regular(num_units=1, num_shards=1, block_records=1),
  regular(num_units=41, num_shards=1, block_records=8),
  regular(num_units=64, num_shards=4, block_records=1),
  uneven([3, 1, 0, 2], block_records=1),
  uneven([0, 0, 37, 0], block_records=4),
  uneven([100, 1, 0, 7, 64, 8], block_records=8),
  uneven([5, 5, 5], block_records=32),
]


def named(task):
  return f"R={','.join(map(str, sizes_of(task)))} g={task.block_records}"


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
  assert order_of(policy).located(units) == golden


@pytest.mark.parametrize("policy", ["same", "reshuffle"])
def test_the_first_epoch_goes_round_robin_as_the_specification_says(policy):
  golden = [(0, 0), (1, 0), (3, 0), (0, 1), (3, 1), (0, 2)]
  assert Order((uneven([3, 1, 0, 2]),), policy, seed=0).epoch(0) == golden


@given(SMALL_ORDERS, st.lists(st.integers(0, 1000), min_size=1, max_size=30))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_places_are_the_oracles(order, units):
  assert order.located(units) == order.oracle_located(units)


@given(MIXED_ORDERS, st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_places_of_several_tasks_asked_at_once_are_the_oracles(order, data):
  pairs = st.tuples(st.integers(0, len(order.tasks) - 1), st.integers(0, 1000))
  tasks, units = zip(*data.draw(st.lists(pairs, min_size=1, max_size=40)), strict=True)
  assert order.located(units, np.array(tasks)) == order.oracle_located(units, np.array(tasks))


@pytest.mark.parametrize("policy", POLICIES)
def test_whole_epochs_of_every_shape_of_task_asked_at_once_are_the_oracles(policy):
  order = Order(tuple(TASKS[1:]), policy, seed=3)
  tasks, units = zip(
    *((k, unit) for k, task in enumerate(order.tasks) for unit in range(3 * task.num_units)), strict=True
  )
  shuffled = np.random.default_rng(0).permutation(len(tasks))
  tasks, units = np.array(tasks)[shuffled], np.array(units)[shuffled].tolist()
  assert order.located(units, tasks) == order.oracle_located(units, tasks)


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
  assert order.located(units) == order.oracle_located(units)


def test_far_epochs_of_a_small_task_beside_a_large_one_are_the_oracles():
  """Where numbers of (epoch, task, shard, block) do not fit in 64 bits, and two of them would be the same."""
  large = regular(num_units=2**40, num_shards=2**20, block_records=1, task="large")
  small = regular(num_units=10, num_shards=1, block_records=1, task="small")
  order = Order((large, small, small), "reshuffle", seed=0)
  far_epoch = 1 + (2**24 - 1) // 3
  tasks, units = [0, 0, 1, 1, 2], [2**40, 2**41 - 1, 10 * far_epoch, 10**17 + 3, 10**17 + 3]
  together = order.located(units, np.array(tasks))
  assert together == [order.located([unit], task)[0] for task, unit in zip(tasks, units, strict=True)]
  assert together[2:] == order.oracle_located(units[2:], np.array(tasks[2:]))
  assert np.array_equal(order.order.unit_of(1, order.order.locate(1, np.array(units))), units)


@given(
  st.sampled_from(POLICIES),
  st.lists(st.integers(0, 10**10) | st.just(0), min_size=1, max_size=20).filter(any),
  st.integers(1, 10**6),
  st.lists(st.integers(0, 10**15), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_places_are_the_oracles_in_large_uneven_caches(policy, sizes, block_records, units):
  order = Order((uneven(sizes, block_records=block_records),), policy, seed=5)
  assert order.located(units) == order.oracle_located(units)


@given(MIXED_ORDERS, st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_a_place_says_which_unit_lies_there(order, data):
  task = data.draw(st.integers(0, len(order.tasks) - 1))
  units = np.array(data.draw(st.lists(st.integers(0, 10**9), max_size=30)), np.int64)
  places = order.order.locate(task, units)
  assert np.array_equal(order.order.unit_of(task, places), units)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("task", TASKS, ids=named)
def test_every_epoch_has_each_record_once(policy, task):
  order = Order((task,), policy, seed=0)
  every_record = {(shard, place) for shard, size in enumerate(sizes_of(task)) for place in range(size)}
  for epoch in range(4):
    units = range(epoch * task.num_units, (epoch + 1) * task.num_units)
    assert {e for e, _, _ in order.located(units)} == {epoch}
    records = order.epoch(epoch)
    assert len(records) == task.num_units
    assert set(records) == every_record


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("task", TASKS, ids=named)
def test_turns_count_what_a_shard_gives_in_an_epoch(policy, task):
  order = Order((task,), policy, seed=0).order
  units = np.arange(2 * task.num_units)
  turns = order.turns(0, units)
  assert np.array_equal(turns.epochs, units // task.num_units)
  pairs = set(zip(turns.epochs.tolist(), turns.shards.tolist(), turns.turns.tolist(), strict=True))
  assert pairs == {(e, s, q) for e in range(2) for s, size in enumerate(sizes_of(task)) for q in range(size)}
  assert np.array_equal(order.places(0, turns), order.locate(0, units).places)
  assert order.shard_sizes(np.zeros_like(units), turns.shards).tolist() == [
    sizes_of(task)[shard] for shard in turns.shards
  ]


@pytest.mark.parametrize("task", TASKS, ids=named)
def test_a_reshuffled_epoch_reads_each_shard_in_whole_blocks_with_the_short_one_last(task):
  order = Order((task,), "reshuffle", seed=0)
  in_order, reshuffled = order.epoch(0), order.epoch(1)
  assert [s for s, _ in reshuffled] == [s for s, _ in in_order]
  for shard in range(task.num_shards):
    turns = [q for s, q in reshuffled if s == shard]
    whole_blocks = len(turns) // task.block_records
    read = [turns[at : at + task.block_records] for at in range(0, len(turns), task.block_records)]
    blocks = [{q // task.block_records for q in places} for places in read]
    assert all(len(block) == 1 for block in blocks)
    assert {b for block in blocks[:whole_blocks] for b in block} == set(range(whole_blocks))
    assert blocks[whole_blocks:] in ([], [{whole_blocks}])


@pytest.mark.parametrize("policy", ["reshuffle", "global"])
@pytest.mark.parametrize("of", [regular, lambda task: uneven([120, 0, 300, 80], task=task)])
def test_every_epoch_seed_and_task_has_an_order_of_its_own(policy, of):
  orders = [
    tuple(Order((of(task="demo"), of(task="demp")), policy, seed).epoch(epoch, task))
    for seed in range(5)
    for task in range(2)
    for epoch in range(1, 6)
  ]
  assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("policy", ["same", "reshuffle"])
def test_the_first_epoch_is_index_order_whatever_the_seed(policy):
  by_index = [(index % 8, index // 8) for index in range(1000)]
  for seed in (0, 1, 2):
    assert order_of(policy, seed=seed).epoch(0) == by_index


def test_the_same_policy_repeats_the_first_epoch_and_global_reorders_it():
  assert order_of("same").epoch(3) == order_of("same").epoch(0)
  assert order_of("global").epoch(0) != order_of("same").epoch(0)
  assert order_of("global", seed=1).epoch(0) != order_of("global").epoch(0)


@given(SMALL_ORDERS, st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.randoms())
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_units_place_does_not_depend_on_what_else_is_asked(order, units, random):
  alone = {unit: order.located([unit])[0] for unit in units}
  random.shuffle(units)
  assert order.located(units) == [alone[unit] for unit in units]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("task", [regular(), uneven([3, 1, 0, 2])], ids=named)
def test_no_units_have_no_places(policy, task):
  order = Order((task,), policy, seed=0)
  assert order.located(np.zeros(0, np.int64)) == []
  assert order.order.unit_of(0, Places(*np.zeros((3, 0), np.int64))).size == 0
