"""What a plan says of a run's data, as tables: its segments, and how it differs from another plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from anystep.order.epochs import EpochPolicy
from anystep.plans.plan import Plan
from anystep.plans.plan_json import CACHE_FIELDS
from anystep.plans.segments import Segment

# Rows of two plans that are compared at a time.
_ROWS_AT_A_TIME = 1 << 18


class Difference(NamedTuple):
  """A field in which two plans differ, and what each says; None where one has no such field."""

  field: str
  one: Any
  other: Any


def history(plan: Plan) -> list[dict[str, Any]]:
  """The plan's segments in order, as JSON objects.

  `percent` is the part of rows that a task has, its quota over all quotas; `epoch` that of its first
  unit; `stop_step` None where the segment has no end.
  """
  starts: list[int | None] = [segment.start_step for segment in plan.segments]
  return [
    {
      "start_step": segment.start_step,
      "stop_step": stop,
      "batch_size": segment.batch_size,
      "lanes": segment.lanes,
      "first_stripe": segment.first_stripe,
      "tasks": {
        name: {
          "rate": task.rate,
          "quota": task.quota,
          "percent": 100 * task.quota / sum(segment.quotas.values()),
          "first_unit": task.first_unit,
          "epoch": task.first_unit // plan.tasks[name].num_units,
        }
        for name, task in sorted(segment.tasks.items(), key=lambda item: item[0].encode())
      },
      "reason": segment.reason,
    }
    for segment, stop in zip(plan.segments, [*starts[1:], plan.num_steps], strict=True)
  ]


def totals(plan: Plan, trained_steps: int | None = None) -> dict[str, Any]:
  """What holds for the whole plan, as a JSON object; `num_steps` is None where the data never ends."""
  return {
    "sha256": plan.sha256,
    "split": plan.split,
    "seed": plan.seed,
    "num_epochs": plan.num_epochs,
    "num_steps": plan.num_steps,
    "trained_steps": trained_steps,
    "epoch_policy": plan.epoch_policy.value,
    "rate_unit": plan.rate_unit,
    "packing": plan.packing.value,
    "feature_lengths": dict(plan.feature_lengths),
    "tasks": {
      name: {
        "num_units": plan.tasks[name].num_units,
        "num_shards": plan.tasks[name].num_shards,
        "block_records": plan.tasks[name].block_records,
        "layout": plan.tasks[name].layout,
        "unit_table": plan.tasks[name].unit_table,
      }
      for name in plan.task_names
    },
    "tombstones": [
      {
        "start_step": entry.start_step,
        "examples": {name: len(indices) for name, indices in entry.indices.items()},
        "reason": entry.reason,
      }
      for entry in plan.tombstones
    ],
  }


def differences(one: Plan, other: Plan) -> list[Difference]:
  """The fields in which two plans differ; segments go by the step that they start at."""
  return list(_differences("", _document(one), _document(other)))


def first_different_step(one: Plan, other: Plan) -> int | None:
  """The first step at which two plans' batches are of different rows; None where they never are.

  Where a task has another cache, or later epochs another order, that is the first step which needs it; where
  tombstones differ, the first from which an example has no loss in one of the plans alone.
  """
  if one.split != other.split:
    return 0
  steps = [_units_differ(one, other), _ends_differ(one, other), _tombstones_differ(one, other)]
  steps += [
    _first_step_from(one, name, unit)
    for name in one.tasks.keys() & other.tasks.keys()
    if (unit := _order_differs(one, other, name)) is not None
  ]
  return min((step for step in steps if step is not None), default=None)


def _document(plan: Plan) -> dict[str, Any]:
  """The plan by field; of several segments that start at one step, all but the last are empty."""
  named: dict[str, Any] = {}
  for segment in plan.segments:
    name = f"[{segment.start_step}]"
    while name in named:
      name += "'"
    named[name] = dataclasses.asdict(segment)
  fields = dataclasses.fields(plan)
  document = {f.name: getattr(plan, f.name) for f in fields if f.name not in {*CACHE_FIELDS, "segments"}}
  document["tasks"] = {name: dataclasses.asdict(task) for name, task in plan.tasks.items()}
  tombstones: dict[str, dict[str, list[int]]] = {}
  for task, index, step in plan.silent_steps.items():
    tombstones.setdefault(task, {}).setdefault(f"[{step}]", []).append(index)
  return document | {"segments": named, "tombstones": tombstones}


def _differences(name: str, one: Any, other: Any) -> Iterator[Difference]:
  if isinstance(one, Mapping) and isinstance(other, Mapping):
    for key in dict.fromkeys([*one, *other]):
      dot = "" if not name or key.startswith("[") else "."
      yield from _differences(f"{name}{dot}{key}", one.get(key), other.get(key))
  elif one != other:
    yield Difference(name, one, other)


def _units_differ(one: Plan, other: Plan) -> int | None:
  """The first step at which the tasks or units of rows differ, were the data endless."""
  starts = sorted({segment.start_step for plan in (one, other) for segment in plan.segments})
  for start, stop in zip(starts, [*starts[1:], None], strict=True):
    pair = [_standing(plan.segment_at(start), start) for plan in (one, other)]
    step = _segments_differ(pair[0], pair[1], stop)
    if step is not None:
      return step
  return None


def _standing(segment: Segment, step: int) -> Segment:
  """What a segment gives from a step on, without the tasks that it gives nothing of."""
  standing = segment.standing_at(step, start_step=step, reason="")
  tasks = {name: dataclasses.replace(t, rate="1") for name, t in standing.tasks.items() if t.quota}
  return dataclasses.replace(standing, tasks=tasks)


def _segments_differ(one: Segment, other: Segment, stop: int | None) -> int | None:
  """The first step before `stop` at which two segments that start together differ.

  Two sequences with periods p and q that agree in p + q places agree everywhere (Fine & Wilf 1965).
  """
  if one == other:
    return None
  if one.batch_size != other.batch_size:
    return one.start_step
  if one.lanes == other.lanes:
    # Lane c has the units of lane 0 plus c: one lane tells of all.
    one, other = (dataclasses.replace(s, lanes=1, batch_size=s.stripes_per_step) for s in (one, other))
  periods = [s.mixing.period // math.gcd(s.mixing.period, s.stripes_per_step) for s in (one, other)]
  last = one.start_step + sum(periods) + 1
  last = last if stop is None else min(last, stop)
  names = sorted({*one.tasks, *other.tasks})
  steps_at_a_time = max(1, _ROWS_AT_A_TIME // one.batch_size)
  for start in range(one.start_step, last, steps_at_a_time):
    steps = min(steps_at_a_time, last - start)
    rows = [_rows_of_steps(segment, start, steps, names) for segment in (one, other)]
    differ = (rows[0] != rows[1]).any(axis=(1, 2))
    if differ.any():
      return start + int(np.argmax(differ))
  return None


def _rows_of_steps(segment: Segment, start: int, steps: int, names: list[str]) -> np.ndarray:
  """Task, by its place in names, and unit of the rows of some steps: `(steps, rows, 2) int64`."""
  standing = segment.standing_at(start, start_step=start, reason="")
  # A batch that is `steps` times as large holds their stripes, every lane's together.
  rows = dataclasses.replace(standing, batch_size=segment.batch_size * steps).rows(start)
  task = np.array([names.index(name) for name in segment.mixing.names])[rows.task]
  columns = np.stack([task, rows.unit], axis=-1).reshape(segment.lanes, steps, -1, 2)
  return columns.swapaxes(0, 1).reshape(steps, segment.batch_size, 2)


def _tombstones_differ(one: Plan, other: Plan) -> int | None:
  """The first step from which an example has no loss in one plan alone."""
  only_one = set(one.silent_steps.items()) ^ set(other.silent_steps.items())
  return min((step for _, _, step in only_one), default=None)


def _ends_differ(one: Plan, other: Plan) -> int | None:
  """The first step that one plan pads or does not have, where the other's rows go on."""
  ends = [math.inf if plan.num_steps is None else plan.num_steps for plan in (one, other)]
  if min(ends) == math.inf:
    return None
  last = int(min(ends)) - 1
  if last >= 0 and not np.array_equal(_real_rows(one, last), _real_rows(other, last)):
    return last
  return None if ends[0] == ends[1] else last + 1


def _real_rows(plan: Plan, step: int) -> np.ndarray:
  task, _, real = plan.units(step)
  return np.ones(len(task), bool) if real is None else real


def _order_differs(one: Plan, other: Plan, name: str) -> int | None:
  """The first unit of a task that may lie elsewhere in one plan than in the other."""
  pair = [plan.tasks[name] for plan in (one, other)]
  if any(task.transforms is None for task in pair):
    # A plan that does not know them says nothing of them.
    pair = [dataclasses.replace(task, transforms=None) for task in pair]
  if pair[0] != pair[1]:
    return 0
  policies = {one.epoch_policy, other.epoch_policy}
  if policies == {EpochPolicy.SAME} or (len(policies) == 1 and one.seed == other.seed):
    return None
  return 0 if EpochPolicy.GLOBAL in policies else one.tasks[name].num_units


def _first_step_from(plan: Plan, name: str, unit: int) -> int | None:
  """The first step with a unit of a task that is not below `unit`."""
  starts = [segment.start_step for segment in plan.segments]
  for segment, stop in zip(plan.segments, [*starts[1:], plan.num_steps], strict=True):
    task = segment.tasks.get(name)
    found = segment.when(name, max(unit, task.first_unit)) if task else None
    if found is not None and (stop is None or found[0] < stop):
      return found[0]
  return None
