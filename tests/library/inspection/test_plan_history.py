"""A plan's history says what its segments are; two plans differ from the step at which their rows do."""

import contextlib
import dataclasses
import random

import caches
import pytest

from anystep.errors import AnystepError
from anystep.inspection.history import differences, first_different_step, history, totals
from anystep.plans.plan import Plan

A = caches.cache_without_files(task="a", num_examples=23)
B = caches.cache_without_files(task="b:inner", num_examples=10, num_shards=2)
OTHER_A = caches.cache_without_files(task="a", num_examples=23, seed=1)


def start(*, rates=None, opened=(A, B), batch_size=8, **settings):
  return Plan.start(opened, rates=rates or {"a": 3, "b:inner": 1}, batch_size=batch_size, **settings)


def even(**settings):
  """A plan whose epochs are three whole batches."""
  cache = caches.cache_without_files(task="a", num_examples=24)
  return Plan.start(cache, batch_size=8, **settings)


def rows_at(plan, step):
  """What is in every row, by task name; None after the data's end."""
  if plan.num_steps is not None and step >= plan.num_steps:
    return None
  columns = [column.tolist() for column in plan.batch(step)]
  return [(plan.task_names[k] if k >= 0 else None, *row) for k, *row in zip(*columns, strict=True)]


# History


def test_segments_are_told_with_shares_and_where_their_tasks_begin():
  plan = start(lanes=2).change(5, rates={"a": 1}, reason="b is read").change(20, batch_size=4)
  one, two, three = history(plan)
  assert one == {
    "start_step": 0,
    "stop_step": 5,
    "batch_size": 8,
    "lanes": 2,
    "first_stripe": 0,
    "tasks": {
      "a": {"rate": "3", "quota": 3, "percent": 75.0, "first_unit": 0, "epoch": 0},
      "b:inner": {"rate": "1", "quota": 1, "percent": 25.0, "first_unit": 0, "epoch": 0},
    },
    "reason": "start",
  }
  assert (two["start_step"], two["stop_step"], two["reason"]) == (5, 20, "b is read")
  assert two["tasks"] == {"a": {"rate": "1", "quota": 1, "percent": 100.0, "first_unit": 30, "epoch": 1}}
  assert (three["batch_size"], three["stop_step"]) == (4, None)
  assert three["tasks"]["a"]["first_unit"] == 30 + 15 * 8


def test_the_last_segment_stops_where_the_data_ends():
  plan = start(num_epochs=2)
  assert history(plan)[-1]["stop_step"] == plan.num_steps


def test_totals_tell_what_holds_for_the_whole_plan():
  plan = start(seed=7, num_epochs=2, feature_lengths={"inputs": 5})
  preshuffled = {"layout": "preshuffled", "unit_table": None}
  assert totals(plan, 3) == {
    "sha256": plan.sha256,
    "split": "train",
    "seed": 7,
    "num_epochs": 2,
    "num_steps": plan.num_steps,
    "trained_steps": 3,
    "epoch_policy": "reshuffle",
    "rate_unit": "examples",
    "packing": "none",
    "feature_lengths": {"inputs": 5},
    "tasks": {
      "a": {"num_units": 23, "num_shards": 4, "block_records": 4, **preshuffled},
      "b:inner": {"num_units": 10, "num_shards": 2, "block_records": 4, **preshuffled},
    },
    "tombstones": [],
  }
  assert totals(start())["num_steps"] is None


# Differences


def test_plans_that_are_the_same_differ_in_nothing():
  assert differences(start(), start()) == []


def test_differences_name_fields_tasks_and_segments():
  one = start()
  other = start(seed=1, rates={"a": 1}, feature_lengths={"inputs": 4}).change(3, batch_size=4)
  found = {field: (left, right) for field, left, right in differences(one, other)}
  segment = dataclasses.asdict(other.segments[1])
  assert found == {
    "seed": (0, 1),
    "feature_lengths.inputs": (None, 4),
    "tasks.b:inner": (dataclasses.asdict(one.tasks["b:inner"]), None),
    "segments[0].tasks.a.rate": ("3", "1"),
    "segments[0].tasks.a.quota": (3, 1),
    "segments[0].tasks.b:inner": (dataclasses.asdict(one.segments[0].tasks["b:inner"]), None),
    "segments[3]": (None, segment),
    "segments[0].lanes": (one.segments[0].lanes, other.segments[0].lanes),
  }


def test_segments_that_start_at_one_step_are_told_apart():
  plan = start().change(4, rates={"a": 1}).change(6, rates={"b:inner": 1}).skip(5, 7)
  starts = [segment.start_step for segment in plan.segments]
  assert len(set(starts)) < len(starts)
  (difference,) = differences(plan, dataclasses.replace(plan, segments=plan.segments[:-1]))
  assert difference.field == f"segments[{starts[-1]}]'"


def random_plan(draw):
  plan = start(
    batch_size=draw.choice([4, 8]),
    rates={"a": draw.choice([0, 1, 2]), "b:inner": draw.choice([1, 2])},
    num_epochs=draw.choice([None, 9, 9]),
    lanes=draw.choice([1, 2, None, 4]),
    seed=draw.choice([0, 0, 1]),
    epoch_policy=draw.choice(["same", "reshuffle", "reshuffle", "global"]),
  )
  return random_change(plan, draw)


def random_change(plan, draw):
  for _ in range(draw.choice([0, 1, 2])):
    step = draw.randrange(9)
    with contextlib.suppress(AnystepError):  # The data may have ended before.
      if draw.random() < 0.3:
        plan = plan.skip(step, step + 2)
      else:
        rates = {"a": draw.choice([1, 2]), "b:inner": 1}
        plan = plan.change(step, rates=rates, batch_size=draw.choice([None, 4]), caches=[A, B])
  return plan


@pytest.mark.parametrize("seed", range(150))
def test_rows_differ_from_the_step_that_is_named(seed):
  draw = random.Random(seed)
  one = random_plan(draw)
  other = random_change(one, draw) if seed % 2 else random_plan(draw)
  # Differences that there are show before: the data ends, or both plans are in their last segments.
  expected = next((step for step in range(120) if rows_at(one, step) != rows_at(other, step)), None)
  assert first_different_step(one, other) == first_different_step(other, one) == expected
  assert bool(differences(one, other)) == (one.to_json() != other.to_json())


def with_quotas(plan, **quotas):
  (segment,) = plan.segments
  tasks = {name: dataclasses.replace(task, quota=quotas[name[0]]) for name, task in segment.tasks.items()}
  return dataclasses.replace(plan, segments=(dataclasses.replace(segment, tasks=tasks),))


@pytest.mark.parametrize(
  ("one", "other"),
  [
    (start(lanes=1), with_quotas(start(lanes=1), a=6, b=2)),
    (start(rates={"a": 1}, lanes=1), start(rates={"a": 1}, lanes=8)),
    (start(epoch_policy="same", seed=1), start(epoch_policy="same", seed=2)),
    (start(feature_lengths={"inputs": 3}), start(feature_lengths={"inputs": 4})),
    (start(), start().change(9, rates={"a": 6, "b:inner": 2}, reason="as before")),
  ],
  ids=["quotas", "lanes of one task", "unused seed", "feature lengths", "no change"],
)
def test_plans_of_the_same_rows_differ_at_no_step(one, other):
  assert differences(one, other)
  assert first_different_step(one, other) is None


@pytest.mark.parametrize(
  ("one", "other", "step"),
  [
    (start(), dataclasses.replace(start(), split="validation"), 0),
    (start(), start(batch_size=4), 0),
    (start(), start(opened=(OTHER_A, B)), 0),
    (start(rates={"a": 1}).change(6, rates={"b:inner": 1}, caches=[B]), start(rates={"a": 1}), 6),
    (start(num_epochs=1), start(num_epochs=2), None),
    (even(num_epochs=2), even(num_epochs=None), 6),
  ],
  ids=["split", "batch size", "cache", "a task that comes later", "epochs", "an end without padding"],
)
def test_what_rows_are_of_shows_where_it_is_first_needed(one, other, step):
  expected = (one.num_steps or 0) - 1 if step is None else step
  assert first_different_step(one, other) == expected


def test_shares_that_are_nearly_equal_are_told_apart_at_the_stripe():
  one, other = (start(rates={"a": rate, "b:inner": 1}, batch_size=4, lanes=1) for rate in (5000, 5001))
  step = first_different_step(one, other)
  assert step > 100
  assert rows_at(one, step) != rows_at(other, step)
  assert all(rows_at(one, before) == rows_at(other, before) for before in range(step))
