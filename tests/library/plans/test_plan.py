"""A plan's batches are the order specification's, row for row, up to and with the last."""

import dataclasses
import json
import math
import pickle
from collections import Counter

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.errors import AnystepError
from anystep.order.epochs import EpochPolicy, Places
from anystep.plans.plan import PADDING_TASK, Plan
from anystep.plans.planned_task import PlannedTask
from anystep.plans.segments import Segment, SegmentTask, default_lanes

PADDING_ROW = (PADDING_TASK, 0, 0, 0, 0)


def plan_of(*, num_examples=50, num_shards=4, block_records=4, batch_size=8, **settings):
  cache = caches.cache_without_files(
    num_examples=num_examples, num_shards=num_shards, block_records=block_records
  )
  return Plan.start(cache, batch_size=batch_size, **settings)


def mixture_of(rates, *, batch_size=16, sizes=None, **settings):
  """The plan of tasks of 60 examples in 4 shards, or of (N, S, g) by name, or of the sizes of their files."""
  sizes = sizes or {}
  tasks = [mixed_cache(task, sizes.get(task, (60, 4, 4))) for task in rates]
  return Plan.start(tasks, rates=rates, batch_size=batch_size, **settings)


def mixed_cache(task, size):
  if isinstance(size, list):
    return caches.cache_without_files(task=task, shard_sizes=size, block_records=4)
  num_examples, num_shards, block_records = size
  return caches.cache_without_files(
    task=task, num_examples=num_examples, num_shards=num_shards, block_records=block_records
  )


def planned_rows(plan, step, rows=None):
  return [tuple(int(v) for v in row) for row in zip(*plan.batch(step, rows), strict=True)]


def named_rows(plan, step):
  """[(task name, unit)] of a step's rows that are no padding."""
  return [
    (plan.task_names[task], unit) for task, unit, *_ in planned_rows(plan, step) if task != PADDING_TASK
  ]


def oracle_rows(plan, step):
  """The rows of a step by the oracle, which takes the plan's own JSON and, as it must, the files' sizes."""
  document = json.loads(plan.to_json())
  names = sorted(document["tasks"], key=str.encode)
  units_per_epoch = {name: task["num_units"] for name, task in document["tasks"].items()}
  expected = []
  for name, unit in oracle.rows(document["segments"], step, units_per_epoch, document["num_epochs"]):
    if name is None:
      expected.append(PADDING_ROW)
    else:
      place = oracle.locate(
        unit,
        shard_sizes(plan, name),
        document["tasks"][name]["block_records"],
        name,
        document["split"],
        document["seed"],
        document["epoch_policy"],
      )
      expected.append((names.index(name), unit, *place))
  return expected


def shard_sizes(plan, name):
  if name in plan.shard_units:
    return plan.shard_units[name].tolist()
  num_units, num_shards = plan.tasks[name].num_units, plan.tasks[name].num_shards
  return [(num_units - shard + num_shards - 1) // num_shards for shard in range(num_shards)]


def oracle_last_step(plan):
  document = json.loads(plan.to_json())
  units_per_epoch = {name: task["num_units"] for name, task in document["tasks"].items()}
  return oracle.last_step(document["segments"], units_per_epoch, document["num_epochs"])


def divisors(number):
  return [m for m in range(1, number + 1) if number % m == 0]


@st.composite
def single_plans(draw):
  batch_size = draw(st.integers(1, 48))
  return plan_of(
    num_examples=draw(st.integers(1, 150)),
    num_shards=draw(st.integers(1, 24)),
    block_records=draw(st.integers(1, 20)),
    batch_size=batch_size,
    lanes=draw(st.none() | st.sampled_from(divisors(batch_size))),
    seed=draw(st.integers(0, 2**32)),
    epoch_policy=draw(st.sampled_from(EpochPolicy)),
    num_epochs=draw(st.none() | st.integers(1, 4)),
  )


SHARD_SIZES = st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=8).filter(any)
SIZES = st.tuples(st.integers(1, 150), st.integers(1, 24), st.integers(1, 20)) | SHARD_SIZES
RATES = st.integers(0, 9) | st.sampled_from([0.25, 0.3, "1/3", 1.5])


@st.composite
def mixture_plans(draw):
  names = st.sampled_from(["a", "b", "B", "c:x", "c", "_"])
  rates = draw(st.dictionaries(names, RATES, min_size=2, max_size=5).filter(lambda r: any(r.values())))
  batch_size = draw(st.integers(1, 48) | st.sampled_from([64, 96, 128]))
  return mixture_of(
    rates,
    sizes={name: draw(SIZES) for name in rates},
    batch_size=batch_size,
    lanes=draw(st.none() | st.sampled_from(divisors(batch_size))),
    seed=draw(st.integers(0, 2**32)),
    epoch_policy=draw(st.sampled_from(EpochPolicy)),
    num_epochs=draw(st.none() | st.integers(1, 4)),
  )


def plans():
  return single_plans() | mixture_plans()


# (N, S, g, B): ragged ends, shards shorter than a block, fewer examples than shards, one shard, B above E·U.
SHAPES = [
  (50, 4, 4, 8),
  (50, 4, 4, 12),
  (30, 8, 32, 7),
  (3, 5, 2, 4),
  (41, 1, 8, 6),
  (10, 2, 2, 64),
  (1, 1, 1, 1),
]


@given(plans(), st.data())
@settings(deadline=None, max_examples=120, derandomize=True)
def test_batches_are_the_oracles(plan, data):
  last = plan.num_steps - 1 if plan.num_steps else 60
  steps = {0, last, data.draw(st.integers(0, last))}
  for step in steps:
    assert planned_rows(plan, step) == oracle_rows(plan, step)


@given(plans())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_data_ends_after_the_oracles_last_step(plan):
  last_step = oracle_last_step(plan)
  assert plan.num_steps == (None if last_step is None else last_step + 1)


@given(plans(), st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_any_rows_are_those_of_the_whole_batch(plan, data):
  batch_size = plan.segments[0].batch_size
  rows = data.draw(st.lists(st.integers(0, batch_size - 1), max_size=20))
  step = plan.num_steps - 1 if plan.num_steps else 7
  whole = planned_rows(plan, step)
  assert planned_rows(plan, step, np.array(rows, np.int64)) == [whole[row] for row in rows]


@pytest.mark.parametrize("policy", EpochPolicy)
@pytest.mark.parametrize(("num_examples", "num_shards", "block_records", "batch_size"), SHAPES)
def test_every_epoch_gives_each_example_once_and_the_rest_is_padding(
  policy, num_examples, num_shards, block_records, batch_size
):
  plan = plan_of(
    num_examples=num_examples,
    num_shards=num_shards,
    block_records=block_records,
    batch_size=batch_size,
    epoch_policy=policy,
    num_epochs=3,
  )
  rows = [row for step in range(plan.num_steps) for row in planned_rows(plan, step)]
  records = Counter((epoch, shard, place) for task, _, epoch, shard, place in rows if task != PADDING_TASK)
  expected = {
    (epoch, index % num_shards, index // num_shards) for epoch in range(3) for index in range(num_examples)
  }
  assert records == Counter(dict.fromkeys(expected, 1))
  padding = [row for row in rows if row[0] == PADDING_TASK]
  assert set(padding) <= {PADDING_ROW}
  assert len(padding) == -3 * num_examples % batch_size


@pytest.mark.parametrize("num_shards", range(1, 25))
def test_default_lanes_are_the_oracles(num_shards):
  for batch_size in range(1, 65):
    expected = oracle.default_lanes(batch_size, [num_shards])
    assert default_lanes(batch_size, [num_shards]) == expected
    plan = plan_of(batch_size=batch_size, num_shards=num_shards)
    assert plan.segments[0].lanes == expected


@given(st.integers(1, 4096), st.lists(st.sampled_from([1, 2, 6, 16, 48, 64, 1024]), min_size=1, max_size=4))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_default_lanes_of_mixtures_are_the_oracles(batch_size, shard_counts):
  assert default_lanes(batch_size, shard_counts) == oracle.default_lanes(batch_size, shard_counts)


@pytest.mark.parametrize(
  ("batch_size", "shard_counts", "lanes"),
  [
    (256, {"a": 64, "b": 48}, 8),
    (1024, {"a": 64, "b": 48}, 16),
    (256, {"a": 64, "b": 64, "c": 1}, 8),
    (256, {"a": 64, "b": 1}, 64),
    (256, {"a": 1, "b": 1}, 1),
    (63, {"a": 64, "b": 64}, 1),
    (64, {"a": 64, "b": 64}, 2),
    (4096, {"a": 64, "b": 9}, 1),
  ],
)
def test_a_mixture_has_by_default_the_lanes_that_all_its_tasks_shards_allow(batch_size, shard_counts, lanes):
  sizes = {name: (1000, shards, 4) for name, shards in shard_counts.items()}
  plan = mixture_of(dict.fromkeys(sizes, 1), sizes=sizes, batch_size=batch_size)
  assert plan.segments[0].lanes == lanes
  # Not counted: a task that is left out.
  beside = mixture_of(
    {**dict.fromkeys(sizes, 1), "z": 0}, sizes={**sizes, "z": (5, 5, 1)}, batch_size=batch_size
  )
  assert beside.segments == plan.segments


def test_hosts_that_divide_the_lanes_read_files_of_their_own():
  plan = plan_of(num_examples=96, num_shards=8, batch_size=16)
  for hosts in (1, 2, 4, 8):
    files = [set() for _ in range(hosts)]
    for step in range(12):
      for host, own_rows in enumerate(np.arange(16).reshape(hosts, -1)):
        files[host] |= {shard for _, _, _, shard, _ in planned_rows(plan, step, own_rows)}
    assert sum(len(shards) for shards in files) == len(set.union(*files)) == 8


def test_lanes_reorder_rows_within_a_step_and_nothing_else():
  steps = {
    lanes: [sorted(planned_rows(plan_of(batch_size=8, lanes=lanes), step)) for step in range(9)]
    for lanes in (1, 2, 4, 8)
  }
  assert steps[1] == steps[2] == steps[4] == steps[8]
  assert planned_rows(plan_of(batch_size=8, lanes=1), 0) != planned_rows(plan_of(batch_size=8, lanes=4), 0)


@pytest.mark.parametrize("policy", ["same", "reshuffle"])
def test_hosts_that_divide_the_lanes_read_files_of_their_own_of_every_task_in_every_epoch(policy):
  sizes = {"a": (192, 64, 2), "b": (200, 16, 4), "c": (96, 48, 32)}
  plan = mixture_of({"a": 3, "b": 1, "c": 2}, sizes=sizes, batch_size=512, epoch_policy=policy, seed=3)
  assert plan.segments[0].lanes == 16
  batches = [plan.batch(step) for step in range(12)]
  for hosts in (2, 4, 8, 16):
    readers = {}
    for batch in batches:
      own = [column.reshape(hosts, -1) for column in (batch.task, batch.epoch, batch.shard)]
      for host in range(hosts):
        for file in zip(*(column[host].tolist() for column in own), strict=True):
          readers.setdefault(file, set()).add(host)
    assert all(len(files_readers) == 1 for files_readers in readers.values())
    later_epochs = {(task, epoch, shard) for task, epoch, shard in readers if epoch}
    assert len(later_epochs) > 100


# Mixtures


def test_a_mixtures_rows_are_the_specifications():
  plan = mixture_of({"a": 1, "b": 2, "c": 5}, lanes=4)
  rows = [" ".join(f"{name}{unit}" for name, unit in named_rows(plan, step)) for step in (0, 3)]
  assert rows[0] == "c0 c4 b0 c8 c1 c5 b1 c9 c2 c6 b2 c10 c3 c7 b3 c11"
  assert rows[1] == "a4 c32 b12 c36 a5 c33 b13 c37 a6 c34 b14 c38 a7 c35 b15 c39"


@pytest.mark.parametrize(
  "rates", [{"a": 0.3, "b": 0.7}, {"a": "3/10", "b": "7/10"}, {"b": 7, "a": 3, "c": 0}]
)
def test_rates_in_the_same_proportions_are_the_same_mixture(rates):
  plan = mixture_of(rates)
  assert plan.segments[0].quotas == {"a": 3, "b": 7}
  assert {name: task.rate for name, task in plan.segments[0].tasks.items()} == {
    name: str(rates[name]) for name in "ab"
  }
  assert plan.task_names == ["a", "b"]
  assert named_rows(plan, 9) == named_rows(mixture_of({"a": 3, "b": 7}), 9)


@pytest.mark.parametrize("rate_unit", ["examples", "units"])
def test_where_units_are_examples_rates_of_both_are_the_same(rate_unit):
  plan = mixture_of({"a": 1, "b": 2}, sizes={"a": (10, 2, 1)}, rate_unit=rate_unit)
  assert (plan.rate_unit, plan.segments[0].quotas) == (rate_unit, {"a": 1, "b": 2})
  assert json.loads(plan.to_json())["rate_unit"] == rate_unit


@pytest.mark.parametrize("lanes", [1, 4])
def test_inserting_a_task_reorders_no_other_tasks_units(lanes):
  without, beside = (
    mixture_of({"a": 1, "c": 2}, lanes=lanes),
    mixture_of({"a": 1, "b": 9, "c": 2}, lanes=lanes),
  )
  places = []
  for plan in (without, beside):
    stripes = plan.segments[0].stripes_per_step
    given_units = {name: [] for name in plan.task_names}
    for step in range(60):
      rows = planned_rows(plan, step)
      for task, unit, *place in [rows[lane * stripes + k] for k in range(stripes) for lane in range(lanes)]:
        assert unit == len(given_units[plan.task_names[task]])
        given_units[plan.task_names[task]].append(place)
    places.append(given_units)
  for name in ("a", "c"):
    fewest = min(len(given_units[name]) for given_units in places)
    assert fewest > 60
    assert places[0][name][:fewest] == places[1][name][:fewest]


def test_a_task_whose_rate_is_next_to_nothing_is_in_the_plan_and_in_no_batch():
  plan = mixture_of({"a": 1, "b": 10**12}, sizes={"a": (5, 1, 1)}, num_epochs=3)
  assert plan.segments[0].quotas == {"a": 0, "b": 2**24}
  assert plan.task_names == ["a", "b"]
  assert plan.num_steps == -(-3 * 60 // 16)
  assert {name for step in range(plan.num_steps) for name, _ in named_rows(plan, step)} == {"b"}
  assert plan.when("a", 0) is None


@pytest.mark.parametrize("policy", EpochPolicy)
@pytest.mark.parametrize("num_epochs", [1, 3])
@pytest.mark.parametrize(
  "sizes",
  [
    {"a": (50, 4, 4), "b": (37, 8, 3)},
    {"a": (30, 8, 32), "b": (3, 5, 2), "c": (41, 1, 8)},
    {"a": (60, 6, 1), "b": [9, 0, 4, 0, 21, 1], "c": [0, 17]},
    {"a": [3, 1, 0, 2], "b": [40]},
  ],
  ids=str,
)
def test_every_task_of_a_mixture_gives_each_example_once_an_epoch(policy, num_epochs, sizes):
  plan = mixture_of(
    {name: k + 1 for k, name in enumerate(sizes)},
    sizes=sizes,
    batch_size=12,
    lanes=2,
    epoch_policy=policy,
    num_epochs=num_epochs,
  )
  rows = [row for step in range(plan.num_steps) for row in planned_rows(plan, step) if row[0] != PADDING_TASK]
  assert max(Counter(rows).values()) == 1
  exhausted = 0
  for k, name in enumerate(plan.task_names):
    files = shard_sizes(plan, name)
    every_record = {(shard, place) for shard, size in enumerate(files) for place in range(size)}
    own = [row for row in rows if row[0] == k]
    epochs, rest = divmod(len(own), sum(files))
    assert epochs <= num_epochs
    exhausted += epochs == num_epochs
    for epoch in range(epochs + bool(rest)):
      records = [(shard, place) for _, _, e, shard, place in own if e == epoch]
      assert len(set(records)) == len(records) == (sum(files) if epoch < epochs else rest)
      assert set(records) <= every_record
  assert exhausted >= 1


@pytest.mark.parametrize("policy", ["reshuffle", "global"])
def test_every_epoch_of_every_task_of_a_mixture_has_its_own_order(policy):
  sizes = {"a": (40, 4, 4), "b": (40, 4, 4), "c": [20, 4, 16]}
  plan = mixture_of(dict.fromkeys(sizes, 1), sizes=sizes, batch_size=30, lanes=1, epoch_policy=policy)
  rows = [planned_rows(plan, step) for step in range(20)]
  orders = {}
  for task, _, epoch, shard, place in (row for batch in rows for row in batch):
    orders.setdefault((task, epoch), []).append((shard, place))
  assert len(orders) == 15
  for task in range(3):
    of_task = [tuple(order) for (k, _), order in orders.items() if k == task]
    assert len(set(of_task)) == 5
    assert len({frozenset(order) for order in of_task}) == 1


# When


@given(plans(), st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_when_says_the_step_and_row_of_a_unit(plan, data):
  step = data.draw(st.integers(0, plan.num_steps - 1 if plan.num_steps else 10**6))
  for row, (task, unit, *_) in enumerate(planned_rows(plan, step)[:20]):
    if task != PADDING_TASK:
      assert plan.when(plan.task_names[task], unit) == (step, row)


@given(mixture_plans().filter(lambda plan: plan.num_epochs))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_units_that_no_step_trains_on_have_no_when(plan):
  trained = {row for step in range(plan.num_steps) for row in named_rows(plan, step)}
  for name, task in plan.tasks.items():
    units = range(plan.num_epochs * task.num_units + 50)
    assert {(name, unit) for unit in units if plan.when(name, unit)} == {
      row for row in trained if row[0] == name
    }
  assert plan.when("nobody", 0) is None


# Plans of caches that are too large to have


def large_plan(*, num_units, num_epochs, batch_size, lanes, policy):
  return Plan(
    split="train",
    seed=7,
    num_epochs=num_epochs,
    feature_lengths={},
    epoch_policy=EpochPolicy(policy),
    tasks={
      name: PlannedTask(
        fingerprint="f", manifest_sha256="m", num_shards=num_shards, block_records=32, num_units=units
      )
      for name, (units, num_shards) in num_units.items()
    },
    segments=[
      Segment(
        start_step=0,
        batch_size=batch_size,
        lanes=lanes,
        first_stripe=0,
        tasks={
          name: SegmentTask(rate=str(quota), quota=quota, first_unit=0)
          for quota, name in enumerate(num_units, 1)
        },
        reason="start",
      )
    ],
  )


@pytest.mark.parametrize("policy", EpochPolicy)
@pytest.mark.parametrize("lanes", [1, 48, 96])
def test_steps_of_a_trillion_examples_are_the_oracles(policy, lanes):
  plan = large_plan(
    num_units={"demo": (10**12 + 1, 1024)}, num_epochs=30, batch_size=96, lanes=lanes, policy=policy
  )
  assert plan.num_steps == oracle_last_step(plan) + 1 == -(-30 * (10**12 + 1) // 96)
  crossing = (10**12 + 1) // 96
  for step in (0, 123_456_789, crossing, 17 * crossing + 5, plan.num_steps - 1):
    assert planned_rows(plan, step) == oracle_rows(plan, step)


@pytest.mark.parametrize("policy", EpochPolicy)
def test_mixtures_of_trillions_of_examples_are_the_oracles(policy):
  sizes = {"a": (10**12, 1000), "b": (10**10 + 7, 1), "c": (7 * 10**11 + 5, 64)}
  plan = large_plan(num_units=sizes, num_epochs=9, batch_size=60, lanes=4, policy=policy)
  assert plan.num_steps == oracle_last_step(plan) + 1
  for step in (0, 1, 10**9, 3 * 10**9 + 1, plan.num_steps // 2, plan.num_steps - 1):
    assert planned_rows(plan, step) == oracle_rows(plan, step)


# More hosts than lanes, as 10**6 = 2**6 * 5**6 shards allow no more that divide B; and more lanes than hosts.
@pytest.mark.parametrize(("num_shards", "lanes"), [(10**6, 64), (2**20, 8192)])
@pytest.mark.parametrize("policy", EpochPolicy)
def test_four_thousand_hosts_share_the_rows_of_a_million_shards(policy, num_shards, lanes):
  sizes = {"a": (10**12, num_shards), "b": (3 * 10**11 + 64, num_shards)}
  hosts, batch_size = 4096, 32768
  plan = large_plan(num_units=sizes, num_epochs=None, batch_size=batch_size, lanes=lanes, policy=policy)
  rng = np.random.default_rng(0)
  for step in (10**9 + 3, 10**12 + 1):
    whole = np.stack(plan.batch(step))
    assert len(set(zip(*whole[:2].tolist(), strict=True))) == batch_size
    for host in rng.integers(0, hosts, 40):  # Eight rows each.
      own = np.arange(batch_size).reshape(hosts, -1)[host]
      assert np.array_equal(np.stack(plan.batch(step, own)), whole[:, own])

    task, unit, epoch, shard, place = whole
    for k, name in enumerate(plan.task_names):
      order, own = plan.unit_order, task == k
      assert np.array_equal(order.unit_of(k, Places(epoch[own], shard[own], place[own])), unit[own])
      assert ((shard[own] < num_shards) & (place[own] < -(-sizes[name][0] // num_shards))).all()
      for row in np.flatnonzero(own)[rng.integers(0, own.sum(), 5)]:
        assert plan.when(name, int(unit[row])) == (step, row)


@pytest.mark.parametrize(("num_shards", "lanes"), [(10**6, 64), (2**20, 8192)])
@pytest.mark.parametrize("policy", ["same", "reshuffle"])
def test_a_lane_reads_one_residue_class_of_a_tasks_shards_within_an_epoch(policy, num_shards, lanes):
  sizes = {"a": (10**12, num_shards), "b": (3 * 10**11 + 64, num_shards)}
  plan = large_plan(num_units=sizes, num_epochs=None, batch_size=32768, lanes=lanes, policy=policy)
  classes = {}
  for step in (10**9, 10**9 + 1, 10**9 + 10**6, 7 * 10**11, 7 * 10**11 + 1):
    task, _, epoch, shard, _ = plan.batch(step)
    lane = np.arange(32768) // plan.segments[0].stripes_per_step
    for *reader, residue in set(
      zip(*map(np.ndarray.tolist, (task, epoch, lane, shard % lanes)), strict=True)
    ):
      assert classes.setdefault(tuple(reader), residue) == residue
  of_epochs = {(task, epoch) for task, epoch, _ in classes}
  assert len(of_epochs) >= 4
  for each in of_epochs:
    assert len({residue for (*reader, _), residue in classes.items() if tuple(reader) == each}) == lanes


def test_more_epochs_than_anyone_counts_are_as_good_as_endless():
  plan, endless = plan_of(num_epochs=10**18), plan_of()
  assert plan.num_steps == 50 * 10**18 // 8
  assert planned_rows(plan, 10**12) == planned_rows(endless, 10**12)


# A segment need not start at step 0, at the first stripe or at the first unit.


@pytest.mark.parametrize("num_epochs", [None, 3])
def test_a_segment_goes_on_from_its_first_unit_and_step(num_epochs):
  plan = plan_of(batch_size=8, num_epochs=num_epochs, seed=3)
  (segment,) = plan.segments
  later = dataclasses.replace(
    plan,
    segments=(
      segment,
      dataclasses.replace(
        segment, start_step=10, first_stripe=0, tasks={"demo": SegmentTask(rate="1", quota=1, first_unit=37)}
      ),
    ),
  )
  steps = range(12) if num_epochs is None else range(later.num_steps)
  assert num_epochs is None or later.num_steps == oracle_last_step(later) + 1
  for step in steps:
    assert planned_rows(later, step) == oracle_rows(later, step)


# End of data


@given(mixture_plans().filter(lambda plan: plan.num_epochs))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_mixtures_last_step_is_known_without_caches_and_padded_as_the_oracles(plan):
  fresh = Plan.from_json(plan.to_json())
  assert fresh.num_steps == plan.num_steps == oracle_last_step(plan) + 1
  for step in {0, max(0, plan.num_steps - 2), plan.num_steps - 1}:
    assert planned_rows(plan, step) == oracle_rows(plan, step)
  rows = [planned_rows(plan, step) for step in range(plan.num_steps)]
  assert all(PADDING_ROW not in batch for batch in rows[:-1])
  assert any(row != PADDING_ROW for row in rows[-1])


def test_rows_beyond_the_last_stripe_and_units_beyond_the_last_epoch_are_padding():
  """a gives its 12th unit with stripe 5 of 4 a step; in the stripe before, b gives none that is beyond."""
  plan = mixture_of({"a": 1, "b": 1}, sizes={"a": (5, 1, 1), "b": (60, 4, 4)}, lanes=4, num_epochs=2)
  # a: stripes 0, 2, 4 give units 0-3, 4-7, 8-11, of which 10 and 11 are beyond 2 epochs of 5.
  assert plan.num_steps == 2
  assert [row[:2] for row in planned_rows(plan, 1)] == [
    *[(0, 8), (-1, 0), (-1, 0), (-1, 0)],
    *[(0, 9), (-1, 0), (-1, 0), (-1, 0)],
    *[(-1, 0), (-1, 0), (-1, 0), (-1, 0)],
    *[(-1, 0), (-1, 0), (-1, 0), (-1, 0)],
  ]
  assert PADDING_ROW not in planned_rows(plan, 0)
  assert (plan.when("a", 9), plan.when("a", 10), plan.when("b", 8)) == ((1, 4), None, None)


@pytest.mark.parametrize(("start_step", "num_steps"), [(4, 11), (5, 5), (6, 5)])
def test_data_that_ends_where_a_segment_starts_has_ended(start_step, num_steps):
  """a's 40 units last for 5 steps of 8, b's 56 for 7."""
  plan = mixture_of({"a": 1}, sizes={"a": (40, 4, 4)}, batch_size=8, num_epochs=1)
  beside = mixture_of({"b": 1}, sizes={"b": (56, 4, 4)}, batch_size=8)
  later = dataclasses.replace(beside.segments[0], start_step=start_step)
  plan = dataclasses.replace(plan, tasks={**plan.tasks, **beside.tasks}, segments=(*plan.segments, later))
  assert plan.num_steps == oracle_last_step(plan) + 1 == num_steps


def test_data_that_ends_with_a_steps_last_stripe_leaves_no_step_of_padding():
  plan = mixture_of({"a": 1, "b": 1}, sizes={"a": (8, 1, 1), "b": (60, 4, 4)}, lanes=4, num_epochs=2)
  assert plan.num_steps == 2
  assert len(named_rows(plan, 1)) == 12
  plan = mixture_of({"a": 1, "b": 1}, sizes={"a": (60, 1, 1), "b": (8, 4, 4)}, lanes=4, num_epochs=2)
  assert plan.num_steps == 2
  assert len(named_rows(plan, 1)) == 16


# JSON


@given(plans(), st.dictionaries(st.text(max_size=5), st.integers(0, 10**6), max_size=3))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_plan_comes_back_from_its_json_to_the_byte(plan, feature_lengths):
  plan = dataclasses.replace(plan, feature_lengths=feature_lengths)
  again = Plan.from_json(plan.to_json())
  assert again == plan
  assert again.to_json() == plan.to_json()
  assert again.sha256 == plan.sha256
  again = dataclasses.replace(again, shard_units=plan.shard_units)
  assert planned_rows(again, 0) == planned_rows(plan, 0)


def test_json_does_not_depend_on_the_order_in_which_lengths_are_named():
  lengths = {"targets": 114, "inputs": 512}
  one, other = plan_of(feature_lengths=lengths), plan_of(feature_lengths=dict(reversed(lengths.items())))
  assert one.to_json().encode("ascii") == other.to_json().encode("ascii")


@pytest.mark.parametrize(
  "other",
  [
    {"seed": 1},
    {"num_epochs": 2},
    {"epoch_policy": "same"},
    {"lanes": 2},
    {"batch_size": 16},
    {"feature_lengths": {"inputs": 1}},
    {"num_examples": 51},
  ],
)
def test_plans_that_differ_have_different_names(other):
  assert plan_of(**other).sha256 != plan_of().sha256


def changed(*path, to):
  """A change of the JSON document at a path."""

  def change(document):
    for key in path[:-1]:
      document = document[key]
    document[path[-1]] = to

  return change


def removed(*path):
  def change(document):
    for key in path[:-1]:
      document = document[key]
    del document[path[-1]]

  return change


@pytest.mark.parametrize(
  "change",
  [
    changed("version", to=2),
    changed("version", to="1"),
    removed("version"),
    changed("epoch_policy", to="shuffle"),
    changed("unknown", to=1),
    changed("tasks", "demo", "unknown", to=1),
    changed("segments", 0, "unknown", to=1),
    changed("segments", 0, "tasks", "demo", "unknown", to=1),
    changed("tasks", to=[]),
    changed("segments", to=[3]),
    removed("seed"),
    removed("tasks", "demo", "manifest_sha256"),
    removed("segments", 0, "lanes"),
    removed("segments", 0, "tasks", "demo", "first_unit"),
    changed("version", to=True),
    changed("version", to=1.0),
    changed("version", to=None),
    changed("shard_units", to={}),
    changed("shard_units", to={"demo": [13, 13, 12, 12]}),
    changed("segments", to=None),
    changed("segments", 0, "tasks", to=[]),
    changed("segments", 0, "tasks", "demo", to=1),
    changed("feature_lengths", to=[]),
    changed("feature_lengths", to=None),
    changed("epoch_policy", to=None),
    *[
      removed(name)
      for name in ("split", "num_epochs", "feature_lengths", "epoch_policy", "tasks", "segments")
    ],
    *[removed("tasks", "demo", name) for name in ("fingerprint", "num_shards", "block_records", "num_units")],
    *[
      removed("segments", 0, name) for name in ("start_step", "batch_size", "first_stripe", "tasks", "reason")
    ],
    *[removed("segments", 0, "tasks", "demo", name) for name in ("rate", "quota")],
  ],
)
def test_json_that_is_no_plan_is_refused(change):
  document = json.loads(plan_of().to_json())
  change(document)
  with pytest.raises(AnystepError) as refused:
    Plan.from_json(json.dumps(document), path="run/data_plan.json")
  assert (refused.value.code, refused.value.kind) == (65, "plan_invalid")
  assert refused.value.fields["path"] == "run/data_plan.json"


@pytest.mark.parametrize(
  "text",
  [
    *["", "null", "3", "[]", "{}", '"plan"', "NaN"],
    plan_of().to_json()[:-20],
    plan_of().to_json()[20:],
    plan_of().to_json().replace("demo", "\\ud800"),
    plan_of().to_json().replace('"demo"', "demo"),
  ],
)
def test_text_that_is_no_plan_is_refused(text):
  with pytest.raises(AnystepError) as refused:
    Plan.from_json(text)
  assert (refused.value.code, refused.value.kind) == (65, "plan_invalid")


@pytest.mark.parametrize(
  "change",
  [
    changed("segments", to=[]),
    changed("segments", 0, "batch_size", to=0),
    changed("segments", 0, "lanes", to=3),
    changed("segments", 0, "lanes", to=0),
    changed("segments", 0, "start_step", to=-1),
    changed("segments", 0, "tasks", to={}),
    changed("segments", 0, "tasks", "demo", "first_unit", to=-1),
    changed("tasks", "demo", "num_units", to=0),
    changed("tasks", "demo", "num_shards", to=0),
    changed("num_epochs", to=0),
    changed("seed", to=None),
    changed("segments", 0, "start_step", to=1),
    changed("segments", 0, "tasks", "demo", "quota", to=0),
    changed("segments", 0, "tasks", "demo", "quota", to=-1),
    changed("segments", 0, "tasks", "demo", "quota", to=2**24 + 1),
    changed("segments", 0, "tasks", "other", to={"rate": "1", "quota": 1, "first_unit": 0}),
    changed("segments", 0, "tasks", "demo", "rate", to=1),
    changed("segments", 0, "reason", to=None),
    changed("packing", to="greedy"),
    changed("rate_unit", to="tokens"),
    changed("split", to=None),
    changed("tasks", "demo", "layout", to="shuffled"),
    changed("tasks", "demo", "unit_table", to="f" * 63),
    changed("tasks", "demo", "unit_table", to="../units"),
    changed("tasks", "demo", "fingerprint", to=None),
    changed("tasks", "demo", "manifest_sha256", to=None),
    changed("feature_lengths", to={"inputs": -1}),
    changed("feature_lengths", to={"inputs": None}),
    *[
      changed(*path, to=value)
      for value in (True, False, 1.0, math.nan, math.inf, "1")
      for path in [
        ("seed",),
        ("num_epochs",),
        ("feature_lengths", "inputs"),
        *[("tasks", "demo", name) for name in ("num_shards", "block_records", "num_units")],
        *[("segments", 0, name) for name in ("start_step", "batch_size", "lanes", "first_stripe")],
        *[("segments", 0, "tasks", "demo", name) for name in ("quota", "first_unit")],
      ]
    ],
  ],
)
def test_a_plan_that_contradicts_itself_is_refused(change):
  document = json.loads(plan_of(batch_size=8).to_json())
  change(document)
  with pytest.raises(AnystepError) as refused:
    Plan.from_json(json.dumps(document))
  assert (refused.value.code, refused.value.kind) == (65, "plan_invalid")


@pytest.mark.parametrize("starts", [[0, 10, 9], [10, 20, 30], [0, -1, 3], [5, 0, 10]])
def test_segments_out_of_order_or_with_none_at_step_0_are_refused(starts):
  document = json.loads(plan_of().change(10, batch_size=4).change(20, batch_size=2).to_json())
  for segment, start in zip(document["segments"], starts, strict=True):
    segment["start_step"] = start
  with pytest.raises(AnystepError) as refused:
    Plan.from_json(json.dumps(document))
  assert (refused.value.code, refused.value.kind) == (65, "plan_invalid")


def test_a_plans_order_needs_the_sizes_of_files_that_were_there_before():
  cache = caches.cache_without_files(shard_sizes=(3, 0, 7, 5))
  plan = Plan.start(cache, batch_size=4)
  again = Plan.from_json(plan.to_json())
  assert "shard_units" not in json.loads(plan.to_json())
  assert (again, again.to_json()) == (plan, plan.to_json())
  with pytest.raises(AnystepError) as refused:
    again.batch(0)
  assert (refused.value.code, refused.value.kind) == (78, "plan_caches")
  assert refused.value.fields == {
    "expected": "a plan that knows its caches: plan.on_caches(caches)",
    "got": "['demo']",
  }
  assert planned_rows(again.on_caches({"demo": cache}), 3) == planned_rows(plan, 3)


# What is refused


@pytest.mark.parametrize(
  ("kind", "settings", "got"),
  [
    ("batch_size", {"batch_size": 0}, "0"),
    ("batch_size", {"batch_size": -8}, "-8"),
    ("batch_size", {"batch_size": True}, "True"),
    ("batch_size", {"batch_size": 1.5}, "1.5"),
    ("batch_size", {"batch_size": None}, "None"),
    ("num_epochs", {"num_epochs": 0}, "0"),
    ("num_epochs", {"num_epochs": -1}, "-1"),
    ("num_epochs", {"num_epochs": True}, "True"),
    ("num_epochs", {"num_epochs": 1.5}, "1.5"),
    ("seed", {"seed": None}, "None"),
    ("seed", {"seed": True}, "True"),
    ("seed", {"seed": 0.5}, "0.5"),
    ("rate_unit", {"rate_unit": "tokens"}, "'tokens'"),
    ("feature_lengths", {"feature_lengths": {"inputs": -1}}, "{'inputs': -1}"),
    ("feature_lengths", {"feature_lengths": {"inputs": 1.5}}, "{'inputs': 1.5}"),
    ("epoch_policy", {"epoch_policy": "shuffle"}, "'shuffle'"),
    ("epoch_policy", {"epoch_policy": ""}, "''"),
    ("epoch_policy", {"epoch_policy": 0}, "0"),
    ("lanes", {"lanes": 3}, "3"),
    ("lanes", {"lanes": 0}, "0"),
    ("lanes", {"lanes": -2}, "-2"),
    ("lanes", {"lanes": 16}, "16"),
    ("lanes", {"lanes": True}, "True"),
    ("lanes", {"lanes": 2.0}, "2.0"),
  ],
)
def test_settings_that_make_no_plan_are_refused(kind, settings, got):
  with pytest.raises(AnystepError) as refused:
    plan_of(**settings)
  assert (refused.value.code, refused.value.kind) == (78, kind)
  assert refused.value.fields["got"] == got
  assert refused.value.fields["expected"]
  assert kind in refused.value.fix


def test_lanes_that_are_refused_come_with_those_that_are_not():
  with pytest.raises(AnystepError) as refused:
    plan_of(batch_size=12, lanes=5)
  assert refused.value.fields["expected"] == "a divisor of 12: [1, 2, 3, 4, 6, 12]"


def test_a_cache_without_examples_makes_no_plan():
  with pytest.raises(AnystepError) as refused:
    plan_of(num_examples=0, num_shards=1)
  assert (refused.value.code, refused.value.kind) == (66, "cache_empty")
  assert refused.value.fields["task"] == "demo"
  assert refused.value.fields["split"] == "train"
  assert str(refused.value.fields["path"]) == "/nowhere/demo"


@pytest.mark.parametrize(
  ("kind", "rates", "fields"),
  [
    (
      "task_unknown",
      {"wikipedia": 1, "c4_en": 1, "wikipedla": 2},
      {"expected": "tasks whose caches are given: wikipedia", "got": "wikipedla"},
    ),
    (
      "task_unknown",
      {"books": 0},
      {"expected": "tasks whose caches are given: c4_en, wikipedia", "got": "books"},
    ),
    ("rates", None, {"expected": "rates of c4_en, wikipedia", "got": "None"}),
    ("rates", {}, {"expected": "1 to 8192 tasks with a rate above zero", "got": "0 of 0 tasks"}),
    (
      "rates",
      {"c4_en": 0, "wikipedia": "0/3"},
      {"expected": "1 to 8192 tasks with a rate above zero", "got": "0 of 2 tasks"},
    ),
    *[
      (
        "rates",
        {"c4_en": 1, "wikipedia": rate},
        {"task": "wikipedia", "expected": "a finite number >= 0", "got": repr(rate)},
      )
      for rate in (-1, -0.5, "-1/3", math.nan, math.inf, "1/0", "many", None, True)
    ],
  ],
)
def test_rates_that_make_no_mixture_are_refused(kind, rates, fields):
  with pytest.raises(AnystepError) as refused:
    Plan.start(
      [caches.cache_without_files(task=task) for task in ("c4_en", "wikipedia")], batch_size=8, rates=rates
    )
  assert (refused.value.code, refused.value.kind) == (64 if kind == "task_unknown" else 78, kind)
  assert refused.value.fields == fields


@pytest.mark.parametrize(
  ("kind", "tasks", "fields"),
  [
    ("caches", [{}, {"num_examples": 9}], {"expected": "one cache a task", "got": "['demo', 'demo']"}),
    (
      "split",
      [{}, {"task": "other", "split": "validation"}],
      {"expected": "caches of one split", "got": "['train', 'validation']"},
    ),
    ("split", [], {"expected": "caches of one split", "got": "[]"}),
    (
      "epoch_policy",
      [{}, {"task": "other", "shard_sizes": (3, 4)}],
      {
        "expected": "a policy by name, for a mixture of layouts preshuffled and as_is",
        "got": "None",
      },
    ),
  ],
)
def test_caches_that_make_no_mixture_are_refused(kind, tasks, fields):
  found = [caches.cache_without_files(**task) for task in tasks]
  with pytest.raises(AnystepError) as refused:
    Plan.start(found, rates={cache.manifest.task: 1 for cache in found}, batch_size=8)
  assert (refused.value.code, refused.value.kind) == (78, kind)
  assert refused.value.fields == fields


@pytest.mark.parametrize(
  ("tasks", "policy"),
  [
    ([{}], "reshuffle"),
    ([{"shard_sizes": (3, 4)}], "global"),
    ([{}, {"task": "other"}], "reshuffle"),
    ([{"shard_sizes": (3, 4)}, {"task": "other", "shard_sizes": (9,)}], "global"),
  ],
)
def test_the_default_policy_is_that_of_the_layout(tasks, policy):
  found = [caches.cache_without_files(**task) for task in tasks]
  plan = Plan.start(found, rates={cache.manifest.task: 1 for cache in found}, batch_size=8)
  assert plan.epoch_policy == policy


@pytest.mark.parametrize("policy", EpochPolicy)
def test_a_mixture_of_layouts_takes_any_policy_by_name(policy):
  plan = mixture_of({"a": 1, "b": 2}, sizes={"b": [3, 0, 7, 5]}, epoch_policy=policy)
  for step in (0, 7, 30):
    assert planned_rows(plan, step) == oracle_rows(plan, step)


@pytest.mark.parametrize("rates", [None, {"demo": 0.5}])
def test_one_task_needs_no_rate(rates):
  assert plan_of(rates=rates).segments[0].quotas == {"demo": 1}


@pytest.mark.parametrize("after", [0, 1, 10**9])
def test_a_step_after_the_last_is_refused(after):
  plan = plan_of(batch_size=8, num_epochs=2)
  plan.batch(12)
  with pytest.raises(AnystepError) as refused:
    plan.batch(13 + after)
  assert (refused.value.code, refused.value.kind) == (78, "data_ended")
  assert refused.value.fields == {"expected": "a step below 13", "got": 13 + after}


def test_a_step_before_the_first_is_refused():
  with pytest.raises(ValueError, match="-1"):
    plan_of().batch(-1)


@pytest.mark.parametrize("row", [-1, 8, 100])
def test_a_row_outside_the_batch_is_refused(row):
  with pytest.raises(AnystepError) as refused:
    plan_of(batch_size=8).batch(3, np.array([0, row]))
  assert (refused.value.code, refused.value.kind) == (78, "rows")
  assert refused.value.fields == {"expected": "0 to 7", "got": repr([row])}


@pytest.mark.parametrize(
  ("field", "planned"),
  [
    ("fingerprint", "another"),
    ("manifest_sha256", "another"),
    ("num_shards", 5),
    ("block_records", 5),
    ("num_units", 51),
    ("layout", "as_is"),
  ],
)
def test_another_cache_than_the_plans_is_refused_with_both_sides(field, planned):
  cache = caches.cache_without_files()
  found = PlannedTask.of(cache)
  plan = dataclasses.replace(plan_of(), tasks={"demo": dataclasses.replace(found, **{field: planned})})
  with pytest.raises(AnystepError) as refused:
    plan.on_caches({"demo": cache})
  assert (refused.value.code, refused.value.kind) == (76, "plan_cache")
  got = getattr(found, field)
  assert refused.value.fields == {"task": "demo", "field": field, "expected": planned, "got": got}


@pytest.mark.parametrize(
  ("other", "fields"),
  [
    ({"fingerprint": caches.fingerprint_of("renamed")}, {"fingerprint", "manifest_sha256"}),
    ({"seed": 1}, {"manifest_sha256"}),
    ({"num_shards": 5}, {"num_shards", "manifest_sha256"}),
    ({"block_records": 5}, {"block_records", "manifest_sha256"}),
    ({"num_examples": 61}, {"num_units", "manifest_sha256"}),
    ({"shard_sizes": (20, 20, 10, 10)}, {"layout", "block_records", "manifest_sha256"}),
  ],
)
def test_a_mixture_refuses_a_cache_that_was_made_otherwise(other, fields):
  plan = mixture_of({"a": 1, "b": 1})
  mine = mixed_cache("a", (60, 4, 4))
  size = {} if "shard_sizes" in other else {"num_examples": 60, "num_shards": 4, "block_records": 4}
  theirs = caches.cache_without_files(**{"task": "b", **size, **other})
  with pytest.raises(AnystepError) as refused:
    plan.on_caches({"a": mine, "b": theirs})
  assert (refused.value.code, refused.value.kind) == (76, "plan_cache")
  field = refused.value.fields["field"]
  assert field in fields
  assert refused.value.fields == {
    "task": "b",
    "field": field,
    "expected": getattr(plan.tasks["b"], field),
    "got": getattr(PlannedTask.of(theirs), field),
  }
  assert refused.value.fields["expected"] != refused.value.fields["got"]


def test_the_plans_own_caches_are_taken_and_others_are_none_of_its_business():
  plan_of().on_caches({"demo": caches.cache_without_files()})
  plan = mixture_of({"a": 1, "b": 1})
  others = {"c": mixed_cache("c", (7, 1, 1)), "b": mixed_cache("b", (60, 4, 4))}
  assert plan.on_caches(others) == plan


def test_a_task_that_was_cached_for_other_lengths_is_refused():
  cached_for = {"inputs": 512, "targets": 114}
  cache = caches.cache_without_files(cache_at="end", task_feature_lengths=cached_for)
  for lengths in ({}, {"inputs": 512}, {**cached_for, "weights": 3}):
    assert Plan.start(cache, batch_size=8, feature_lengths=lengths).feature_lengths == lengths
  resumed = dataclasses.replace(Plan.start(cache, batch_size=8), feature_lengths={"targets": 115})
  for refusing in (
    lambda: Plan.start(cache, batch_size=8, feature_lengths={"inputs": 512, "targets": 115}),
    lambda: resumed.on_caches({"demo": cache}),
  ):
    with pytest.raises(AnystepError) as refused:
      refusing()
    assert (refused.value.code, refused.value.kind) == (78, "feature_lengths")
    assert refused.value.fields == {"task": "demo", "feature": "targets", "expected": 115, "got": 114}


def test_a_plan_that_was_used_travels_to_other_processes():
  plan = mixture_of({"a": 1, "b": 2}, sizes={"b": [3, 0, 7]}, epoch_policy="reshuffle", num_epochs=3)
  expected = planned_rows(plan, 1)
  again = pickle.loads(pickle.dumps(plan))
  assert again == plan
  assert planned_rows(again, 1) == expected
