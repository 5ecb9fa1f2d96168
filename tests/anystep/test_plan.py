"""A plan's batches are the order specification's, row for row, up to and with the last."""

import dataclasses
import json
from collections import Counter

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.epochs import EpochPolicy
from anystep.errors import AnystepError
from anystep.plan import PADDING_TASK, Plan, PlannedTask, Segment, SegmentTask, default_lanes

PADDING_ROW = (PADDING_TASK, 0, 0, 0, 0)


def plan_of(*, num_examples=50, num_shards=4, block_records=4, batch_size=8, **settings):
  cache = caches.cache_without_files(
    num_examples=num_examples, num_shards=num_shards, block_records=block_records
  )
  return Plan.start(cache, batch_size=batch_size, **settings)


def planned_rows(plan, step, rows=None):
  return [tuple(int(v) for v in row) for row in zip(*plan.batch(step, rows), strict=True)]


def oracle_rows(plan, step):
  """The rows of a step by the oracle, which takes the plan's own JSON."""
  document = json.loads(plan.to_json())
  ((name, task),) = document["tasks"].items()
  sizes = [
    (task["num_units"] - shard + task["num_shards"] - 1) // task["num_shards"]
    for shard in range(task["num_shards"])
  ]
  expected = []
  for row_task, unit in oracle.rows(
    document["segments"], step, {name: task["num_units"]}, document["num_epochs"]
  ):
    if row_task is None:
      expected.append(PADDING_ROW)
    else:
      place = oracle.locate(
        unit,
        sizes,
        task["block_records"],
        name,
        document["split"],
        document["seed"],
        document["epoch_policy"],
      )
      expected.append((0, unit, *place))
  return expected


def oracle_last_step(plan):
  document = json.loads(plan.to_json())
  units_per_epoch = {name: task["num_units"] for name, task in document["tasks"].items()}
  return oracle.last_step(document["segments"], units_per_epoch, document["num_epochs"])


@st.composite
def plans(draw):
  batch_size = draw(st.integers(1, 48))
  divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
  return plan_of(
    num_examples=draw(st.integers(1, 150)),
    num_shards=draw(st.integers(1, 24)),
    block_records=draw(st.integers(1, 20)),
    batch_size=batch_size,
    lanes=draw(st.none() | st.sampled_from(divisors)),
    seed=draw(st.integers(0, 2**32)),
    epoch_policy=draw(st.sampled_from(EpochPolicy)),
    num_epochs=draw(st.none() | st.integers(1, 4)),
  )


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
    assert default_lanes(batch_size, num_shards) == expected
    plan = plan_of(batch_size=batch_size, num_shards=num_shards)
    assert plan.segments[0].lanes == expected


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


# Plans of caches that are too large to have


def large_plan(*, num_units, num_epochs, batch_size, lanes, policy):
  return Plan(
    split="train",
    seed=7,
    num_epochs=num_epochs,
    feature_lengths={},
    epoch_policy=EpochPolicy(policy),
    tasks={
      "demo": PlannedTask(
        fingerprint="f", manifest_sha256="m", num_shards=1024, block_records=32, num_units=num_units
      )
    },
    segments=[
      Segment(
        start_step=0,
        batch_size=batch_size,
        lanes=lanes,
        first_stripe=0,
        tasks={"demo": SegmentTask(rate="1", quota=1, first_unit=0)},
        reason="start",
      )
    ],
  )


@pytest.mark.parametrize("policy", EpochPolicy)
@pytest.mark.parametrize("lanes", [1, 48, 96])
def test_steps_of_a_trillion_examples_are_the_oracles(policy, lanes):
  plan = large_plan(num_units=10**12 + 1, num_epochs=30, batch_size=96, lanes=lanes, policy=policy)
  assert plan.num_steps == oracle_last_step(plan) + 1 == -(-30 * (10**12 + 1) // 96)
  crossing = (10**12 + 1) // 96
  for step in (0, 123_456_789, crossing, 17 * crossing + 5, plan.num_steps - 1):
    assert planned_rows(plan, step) == oracle_rows(plan, step)


# A segment need not start at step 0, at the first stripe or at the first unit.


@pytest.mark.parametrize("num_epochs", [None, 3])
def test_a_segment_goes_on_from_its_first_unit_and_step(num_epochs):
  plan = plan_of(batch_size=8, num_epochs=num_epochs, seed=3)
  (segment,) = plan.segments
  later = dataclasses.replace(
    plan,
    segments=(
      dataclasses.replace(
        segment, start_step=100, first_stripe=0, tasks={"demo": SegmentTask(rate="1", quota=1, first_unit=37)}
      ),
    ),
  )
  steps = range(100, 112) if num_epochs is None else range(100, later.num_steps)
  assert num_epochs is None or later.num_steps == oracle_last_step(later) + 1
  for step in steps:
    assert planned_rows(later, step) == oracle_rows(later, step)


# JSON


@given(plans(), st.dictionaries(st.text(max_size=5), st.integers(0, 10**6), max_size=3))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_plan_comes_back_from_its_json_to_the_byte(plan, feature_lengths):
  plan = dataclasses.replace(plan, feature_lengths=feature_lengths)
  again = Plan.from_json(plan.to_json())
  assert again == plan
  assert again.to_json() == plan.to_json()
  assert again.sha256 == plan.sha256
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
  ],
)
def test_json_that_is_no_plan_is_refused(change):
  document = json.loads(plan_of().to_json())
  change(document)
  with pytest.raises(AnystepError) as refused:
    Plan.from_json(json.dumps(document), path="run/data_plan.json")
  assert (refused.value.code, refused.value.kind) == (65, "plan_invalid")
  assert refused.value.fields["path"] == "run/data_plan.json"


@pytest.mark.parametrize("text", ["", "null", "3", "[]", "{}", '"plan"', plan_of().to_json()[:-20]])
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
  ],
)
def test_a_plan_that_contradicts_itself_is_refused(change):
  document = json.loads(plan_of(batch_size=8).to_json())
  change(document)
  with pytest.raises(AnystepError) as refused:
    Plan.from_json(json.dumps(document))
  assert (refused.value.code, refused.value.kind) == (65, "plan_invalid")


# What is refused


@pytest.mark.parametrize(
  ("kind", "settings", "got"),
  [
    ("batch_size", {"batch_size": 0}, "0"),
    ("batch_size", {"batch_size": -8}, "-8"),
    ("num_epochs", {"num_epochs": 0}, "0"),
    ("num_epochs", {"num_epochs": -1}, "-1"),
    ("epoch_policy", {"epoch_policy": "shuffle"}, "'shuffle'"),
    ("epoch_policy", {"epoch_policy": None}, "None"),
    ("lanes", {"lanes": 3}, "3"),
    ("lanes", {"lanes": 0}, "0"),
    ("lanes", {"lanes": -2}, "-2"),
    ("lanes", {"lanes": 16}, "16"),
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
  assert str(refused.value.fields["path"]) == "/nowhere"


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
  with pytest.raises((AnystepError, IndexError)):
    plan_of(batch_size=8).batch(3, np.array([0, row]))


@pytest.mark.parametrize(
  ("field", "planned"),
  [
    ("fingerprint", "another"),
    ("manifest_sha256", "another"),
    ("num_shards", 5),
    ("block_records", 5),
    ("num_units", 51),
    ("unit_table", "another"),
  ],
)
def test_another_cache_than_the_plans_is_refused_with_both_sides(field, planned):
  cache = caches.cache_without_files()
  found = PlannedTask.of(cache)
  plan = dataclasses.replace(plan_of(), tasks={"demo": dataclasses.replace(found, **{field: planned})})
  with pytest.raises(AnystepError) as refused:
    plan.check_caches({"demo": cache})
  assert (refused.value.code, refused.value.kind) == (76, "plan_cache")
  got = getattr(found, field)
  assert refused.value.fields == {"task": "demo", "field": field, "expected": planned, "got": got}


def test_the_plans_own_cache_is_taken():
  plan_of().check_caches({"demo": caches.cache_without_files()})
