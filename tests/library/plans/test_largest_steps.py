"""Up to the largest step that int64 can number, rows are the oracle's; steps after it are refused."""

import dataclasses

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.errors import AnystepError
from anystep.order.epochs import EpochPolicy, TaskUnits, UnitOrder
from anystep.order.mixing import Mixing
from anystep.plans.plan import Plan
from anystep.plans.segments import Segment, SegmentTask
from anystep.streams.stream import open_stream

LARGEST = 2**63 - 1


def plan_of(**settings):
  cache = caches.cache_without_files(num_examples=50, num_shards=4, block_records=4)
  return Plan.start(cache, batch_size=8, **settings)


def refusal_of(action, *arguments, **settings):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **settings)
  return refused.value


@st.composite
def segments(draw):
  names = st.sampled_from(["a", "b", "C", "é"])
  quotas = draw(st.dictionaries(names, st.integers(0, 9), min_size=1).filter(lambda q: any(q.values())))
  lanes, stripes = draw(st.integers(1, 8)), draw(st.integers(1, 12))
  near = st.integers(0, 10**6) | st.integers(2**62 - 10**6, 2**62 - 1)
  return Segment(
    start_step=draw(near),
    batch_size=lanes * stripes,
    lanes=lanes,
    first_stripe=draw(st.integers(0, 100)),
    tasks={
      name: SegmentTask(rate=str(quota), quota=quota, first_unit=draw(near)) for name, quota in quotas.items()
    },
    reason="start",
  )


@given(segments(), st.integers(0, 3) | st.integers(0, 10**9), st.data())
@settings(max_examples=300, deadline=None)
def test_rows_are_the_oracles_up_to_the_largest_step(segment, before, data):
  step = max(segment.largest_step - before, segment.start_step)
  expected = oracle.batch_rows(dataclasses.asdict(segment), step)
  names, rows = segment.mixing.names, segment.rows(step)
  found = [(names[task], unit) for task, unit in zip(rows.task.tolist(), rows.unit.tolist(), strict=True)]
  assert found == expected
  row = data.draw(st.integers(0, segment.batch_size - 1))
  assert segment.when(*expected[row]) == (step, row)
  after = oracle.batch_rows(dataclasses.asdict(segment), step + 1)
  for name, unit in segment.units_at(step + 1).items():
    assert unit <= LARGEST
    assert unit == min([own for task, own in after if task == name], default=unit)


@given(segments(), st.integers(1, 10**30))
@settings(max_examples=100, deadline=None)
def test_steps_after_the_largest_are_refused_by_its_name(segment, more):
  step = segment.largest_step + more
  for refused in (refusal_of(segment.rows, step), refusal_of(segment.units_at, step + 1)):
    assert (refused.code, refused.kind) == (78, "step_too_large")
    assert str(segment.largest_step) in refused.fields["expected"]
    assert refused.fields["got"] == step


@given(segments())
@settings(max_examples=100, deadline=None)
def test_the_largest_step_is_not_far_below_what_int64_holds(segment):
  """By six periods at most, and the rest of a step."""
  names, quotas, period = oracle.mixture_of(dataclasses.asdict(segment))
  stripes = segment.batch_size // segment.lanes
  step = segment.largest_step + 3 + 6 * period // stripes
  last_stripe = segment.first_stripe + (step + 1 - segment.start_step) * stripes
  pairs = zip(*(oracle.counts(quotas, period, n) for n in (segment.first_stripe, last_stripe)), strict=True)
  units = [
    segment.tasks[name].first_unit + (now - then) * segment.lanes
    for name, (then, now) in zip(names, pairs, strict=True)
  ]
  assert max(step, last_stripe, *units) > LARGEST


@pytest.mark.parametrize("policy", list(EpochPolicy))
@pytest.mark.parametrize("seed", [0, -(2**63), 2**64 - 1])
def test_units_lie_where_the_oracle_says_up_to_the_largest(policy, seed):
  plan = plan_of(epoch_policy=policy, seed=seed)
  for step in (plan.largest_step, plan.largest_step - 12345):
    batch = plan.batch(step)
    assert batch.unit.max() > LARGEST - 10**6
    for unit, *where in zip(*(column.tolist() for column in batch[1:]), strict=True):
      assert tuple(where) == oracle.locate(unit, [13, 13, 12, 12], 4, "demo", "train", seed, str(policy))
      assert plan.when("demo", unit)[0] == step


def test_the_last_units_of_int64_have_places_and_their_inverse():
  tasks = [TaskUnits(task="demo", num_units=2**62 - 1, num_shards=7, block_records=32)]
  for policy in EpochPolicy:
    order = UnitOrder(tasks, split="train", seed=0, policy=policy)
    units = np.array([LARGEST, LARGEST - 1, 2**62, 2**62 - 1, 0])
    assert order.unit_of(0, order.locate(0, units)).tolist() == units.tolist()


def test_a_unit_beyond_int64_has_no_step():
  plan = plan_of()
  for unit in (LARGEST, LARGEST + 1, 2**64, 10**30):
    assert plan.when("demo", unit) is None


@pytest.mark.parametrize("step", [10**18 * 2, LARGEST, 2**63, 2**64, 10**30])
def test_every_way_to_a_step_that_is_too_large_is_refused(step, shared_cache):
  plan = Plan.start(shared_cache.open(), batch_size=8)
  with open_stream(plan, shared_cache.root) as stream:
    ways = [
      plan.batch,
      plan.units,
      stream.batch,
      stream.seek,
      lambda step: stream.set_state({"version": 1, "step": step}),
      lambda step: plan.change(step, batch_size=4),
      lambda step: plan.skip(step, step + 1),
      lambda step: plan.skip(3, step),
      lambda step: plan.tombstone(step, []),
    ]
    for way in ways:
      assert (refusal_of(way, step).code, refusal_of(way, step).kind) == (78, "step_too_large")
    assert stream.step == 0
    largest = stream.batch(plan.largest_step)
    indices = [
      oracle.locate(unit, [13, 13, 12, 12], 4, "demo", "train", 0, "reshuffle")
      for unit in plan.batch(plan.largest_step).unit.tolist()
    ]
    expected = [shared_cache.examples[place * 4 + shard]["number"] for _, shard, place in indices]
    assert largest["number"].tolist() == [int(number) for number in expected]


def test_a_plan_changed_at_its_largest_steps_goes_on_as_json():
  plan = plan_of()
  step = 2**59 - 10**6
  changed = plan.change(step, batch_size=4).skip(step + 5, step + 9)
  again = Plan.from_json(changed.to_json())
  # 5 steps of 4 rows are kept and 4 are left out.
  assert again.batch(step + 5).unit.tolist() == list(range(8 * step + 36, 8 * step + 40))


def test_a_plan_of_very_many_epochs_has_a_last_step_beyond_those_that_can_be_read():
  plan = plan_of(num_epochs=2**61)
  assert plan.num_steps == -(-50 * 2**61 // 8)
  assert refusal_of(plan.batch, plan.num_steps - 1).kind == "step_too_large"
  assert plan.batch(plan.largest_step).task.tolist() == [0] * 8


@pytest.mark.parametrize("n", [2**63, 10**30])
def test_stripes_beyond_int64_are_refused(n):
  mixing = Mixing({"a": 1, "b": 2})
  with pytest.raises(ValueError, match=f"at most {LARGEST}"):
    mixing.counts(n)
  with pytest.raises(ValueError, match=f"at most {LARGEST}"):
    mixing.draws(n - 1, n)
  assert mixing.counts(LARGEST).tolist() == oracle.counts([1, 2], 3, LARGEST)
