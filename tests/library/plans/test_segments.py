"""A segment's rows are the order specification's, for any mixture, batch size, lanes and place to start."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.plans.segments import Segment, SegmentTask

# docs/order.md#plans-segments-rows: shares a 1, b 2, c 5, B=16, M=4, first units a 0, b 100, c 0.
GOLDEN_ROWS = [
  (0, 0, "c0 c4 b100 c8 c1 c5 b101 c9 c2 c6 b102 c10 c3 c7 b103 c11"),
  (0, 3, "a4 c32 b112 c36 a5 c33 b113 c37 a6 c34 b114 c38 a7 c35 b115 c39"),
  (5, 0, "c0 b100 c4 c8 c1 b101 c5 c9 c2 b102 c6 c10 c3 b103 c7 c11"),
]


def segment_of(
  quotas, *, batch_size=16, lanes=4, start_step=0, first_stripe=0, first_units=None, reason="start"
):
  first_units = first_units or {}
  return Segment(
    start_step=start_step,
    batch_size=batch_size,
    lanes=lanes,
    first_stripe=first_stripe,
    tasks={
      name: SegmentTask(rate=str(quota), quota=quota, first_unit=first_units.get(name, 0))
      for name, quota in quotas.items()
    },
    reason=reason,
  )


def rows_of(segment, step, wanted=None):
  names, rows = segment.mixing.names, segment.rows(step, wanted)
  return [(names[task], unit) for task, unit in zip(rows.task.tolist(), rows.unit.tolist(), strict=True)]


def oracle_rows(segment, step):
  return oracle.batch_rows(dataclasses.asdict(segment), step)


def in_stripe_order(segment, rows):
  """Rows of a batch by stripe, then lane: the order in which the mixture hands out units."""
  stripes = segment.stripes_per_step
  return [rows[lane * stripes + stripe] for stripe in range(stripes) for lane in range(segment.lanes)]


@st.composite
def segments(draw):
  """Names that sort otherwise by bytes than by case; quotas of 0; first stripes beyond the period too."""
  names = st.sampled_from(["a", "b", "C", "a:b", "ab", "é", "\ue000", "\U0001f600"])
  quotas = draw(st.dictionaries(names, st.integers(0, 9), min_size=1, max_size=6).filter(_some_positive))
  lanes, stripes = draw(st.integers(1, 8)), draw(st.integers(1, 12))
  return segment_of(
    quotas,
    batch_size=lanes * stripes,
    lanes=lanes,
    start_step=draw(st.integers(0, 10**9)),
    first_stripe=draw(st.integers(0, 100)),
    first_units={name: draw(st.integers(0, 1000) | st.integers(0, 10**15)) for name in quotas},
  )


def _some_positive(quotas):
  return any(quotas.values())


STEPS = st.one_of(st.integers(0, 50), st.integers(0, 10**12))


@pytest.mark.parametrize(("first_stripe", "step", "golden"), GOLDEN_ROWS)
def test_rows_are_the_specifications(first_stripe, step, golden):
  segment = segment_of({"a": 1, "b": 2, "c": 5}, first_stripe=first_stripe, first_units={"b": 100})
  assert [f"{name}{unit}" for name, unit in rows_of(segment, step)] == golden.split()


@given(segments(), STEPS)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_rows_are_the_oracles(segment, steps):
  step = segment.start_step + steps
  assert rows_of(segment, step) == oracle_rows(segment, step)


@given(segments(), STEPS, st.lists(st.integers(0, 95), max_size=20))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_wanted_rows_are_those_of_the_whole_batch(segment, steps, numbers):
  step = segment.start_step + steps
  wanted = np.array([number % segment.batch_size for number in numbers], np.int64)
  whole = segment.rows(step)
  for all_rows, own_rows in zip(whole, segment.rows(step, wanted), strict=True):
    assert np.array_equal(own_rows, all_rows[wanted])
  assert whole.stripe.tolist() == [row % segment.stripes_per_step for row in range(segment.batch_size)]


@given(segments())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_each_task_gives_its_units_in_order_and_none_twice(segment):
  given_units = {name: [] for name in segment.tasks}
  for step in range(segment.start_step, segment.start_step + 12):
    expected_next = {name: task.first_unit + len(given_units[name]) for name, task in segment.tasks.items()}
    assert segment.units_at(step) == expected_next
    for name, unit in in_stripe_order(segment, rows_of(segment, step)):
      given_units[name].append(unit)
  for name, units in given_units.items():
    first = segment.tasks[name].first_unit
    assert units == list(range(first, first + len(units)))
    assert segment.tasks[name].quota or not units


def test_inserting_a_task_reorders_no_other_tasks_units():
  one, other = segment_of({"a": 3, "c": 5}), segment_of({"a": 3, "b": 11, "c": 5})
  given_units = [
    [row for step in range(40) for row in in_stripe_order(segment, rows_of(segment, step))]
    for segment in (one, other)
  ]
  for name in ("a", "c"):
    alone, beside = ([unit for task, unit in units if task == name] for units in given_units)
    assert alone == list(range(len(alone)))
    assert beside == list(range(len(beside)))
    assert beside


@given(segments(), STEPS, st.integers(0, 10**9), st.integers(0, 20))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_a_segment_that_stands_at_a_later_step_gives_that_steps_rows(segment, steps, start_step, later):
  step = segment.start_step + steps
  standing = segment.standing_at(step, start_step=start_step, reason="moved")
  assert rows_of(standing, start_step + later) == rows_of(segment, step + later)
  assert standing.units_at(start_step + later) == segment.units_at(step + later)
  assert (standing.start_step, standing.reason, standing.quotas) == (start_step, "moved", segment.quotas)
  assert standing.first_stripe < standing.mixing.period


@given(segments(), STEPS, st.integers(0, 95))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_when_says_the_step_and_row_of_a_unit(segment, steps, number):
  step, row = segment.start_step + steps, number % segment.batch_size
  name, unit = rows_of(segment, step)[row]
  assert segment.when(name, unit) == (step, row)
  assert segment.when(name, segment.tasks[name].first_unit - 1) is None


def test_units_of_other_tasks_and_of_quota_zero_have_no_when():
  segment = segment_of({"a": 0, "b": 2}, first_units={"a": 7, "b": 5})
  assert [segment.when("a", unit) for unit in (0, 7, 8)] == [None, None, None]
  assert segment.when("c", 7) is None
  assert (segment.when("b", 4), segment.when("b", 5)) == (None, (0, 0))


@given(segments(), st.integers(1, 4), st.data())
@settings(deadline=None, max_examples=200, derandomize=True)
def test_a_segment_ends_where_the_oracle_says(segment, num_epochs, data):
  units_per_epoch = {
    name: max(1, task.first_unit // num_epochs + data.draw(st.integers(0, 40)))
    for name, task in segment.tasks.items()
  }
  last_units = {name: num_epochs * units for name, units in units_per_epoch.items()}
  stripes = oracle.stripes_until_end(dataclasses.asdict(segment), units_per_epoch, num_epochs)
  steps, stripe = divmod(stripes, segment.stripes_per_step)
  assert segment.end(last_units) == (segment.start_step + steps, stripe)


def test_a_segment_ends_with_the_first_stripe_that_exhausts_a_task():
  """Stripes of four units go to c c b | c a c | b c c | ..., three a step."""
  segment = segment_of({"a": 1, "b": 2, "c": 5}, batch_size=12, start_step=7)
  plenty = 10**9
  for last_units, end in [
    ({"a": plenty, "b": plenty, "c": 4}, (7, 1)),
    ({"a": plenty, "b": plenty, "c": 5}, (7, 2)),
    ({"a": plenty, "b": 1, "c": plenty}, (8, 0)),
    ({"a": plenty, "b": 4, "c": 9}, (8, 0)),
    ({"a": 4, "b": 5, "c": plenty}, (8, 2)),
    ({"a": 5, "b": 5, "c": plenty}, (9, 1)),
    ({"a": 5, "b": plenty, "c": plenty}, (11, 1)),
  ]:
    expected = oracle.stripes_until_end(dataclasses.asdict(segment), last_units, 1)
    assert divmod(expected, 3) == (end[0] - 7, end[1])
    assert segment.end(last_units) == end


def test_a_task_of_quota_zero_ends_nothing_unless_it_was_exhausted_before():
  segment = segment_of({"a": 0, "b": 1}, batch_size=8, lanes=4, first_units={"a": 10})
  assert segment.end({"a": 11, "b": 20}) == (2, 1)
  assert segment.end({"a": 10, "b": 20}) == (0, 0)


def test_the_largest_periods_and_numbers_stay_exact():
  """A quota of 0 among 2**24 stripes, at units and steps where every example on earth was read."""
  segment = segment_of(
    {"a": 0, "b": 1, "c": 2**24 - 1}, batch_size=4096, lanes=64, first_stripe=5, first_units={"c": 10**17}
  )
  step = 2**24 * 1000 + 3
  task = segment.rows(step).task
  assert set(task.tolist()) <= {1, 2}
  # 64 periods a 2**24 steps, and b has one stripe in each, far from where it ends.
  given_b = 64 * 1000
  assert segment.units_at(step) == {"a": 0, "b": 64 * given_b, "c": 10**17 + 64 * (64 * step - given_b)}
  whole = rows_of(segment, step)
  for row in (0, 1, 63, 64, 4095):
    assert segment.when(*whole[row]) == (step, row)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("start_step", value) for value in (-1, 1.0, True, None, "0")],
    *[("batch_size", value) for value in (0, -16, 16.0, True)],
    *[("lanes", value) for value in (0, -4, 3, 32, 4.0, True, None)],
    *[("first_stripe", value) for value in (-1, 0.0, False, None)],
    ("tasks", {}),
    ("tasks", {"a": SegmentTask(rate="0", quota=0, first_unit=0)}),
    ("reason", None),
  ],
)
def test_a_segment_that_cannot_be_is_refused_by_the_name_of_the_field(field, value):
  segment = segment_of({"a": 1})
  with pytest.raises(ValueError, match=f"wrong .*{field}"):
    dataclasses.replace(segment, **{field: value})


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("quota", value) for value in (-1, 1.5, True, None)],
    *[("first_unit", value) for value in (-1, 0.0, False, float("nan"))],
    *[("rate", value) for value in (1, 0.5, None)],
  ],
)
def test_a_task_of_a_segment_that_cannot_be_is_refused_by_the_name_of_the_field(field, value):
  with pytest.raises(ValueError, match=f"wrong {field}"):
    SegmentTask(**{"rate": "1", "quota": 1, "first_unit": 0, field: value})


@pytest.mark.parametrize("quotas", [{"a": 2**24, "b": 1}, {"a": 2**24 + 1}])
def test_quotas_that_no_rates_give_are_refused(quotas):
  with pytest.raises(ValueError, match="a sum of 1 to 16777216"):
    segment_of(quotas)
