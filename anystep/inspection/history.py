"""Plans as tables: a plan's segments, and the differences of two plans."""

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
  """Field in which two plans differ, with both values; None for a plan without the field."""

  field: str
  one: Any
  other: Any


def history(plan: Plan) -> list[dict[str, Any]]:
  """Return the plan's segments in order, as JSON objects.

  `percent` is a task's share of the rows: its quota over the sum of quotas. `epoch` is the epoch of its first
  unit. `stop_step` is None if the segment has no end.
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
  """Return the fields of the whole plan as a JSON object; `num_steps` is None if the data never ends."""
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
  """Return the fields in which two plans differ; segments are compared by their first step."""
  return list(_compare("", _to_document(one), _to_document(other)))


def first_different_step(one: Plan, other: Plan) -> int | None:
  """Return the first step whose batch has different rows in two plans; None if there is none.

  If a task's caches differ, or the orders of later epochs, that is the first step which needs them. If
  tombstones differ, it is the first step from which an example has no loss in only one of the plans.
  """
  if one.split != other.split:
    return 0
  steps = [
    _find_different_units(one, other),
    _find_different_end(one, other),
    _find_different_tombstones(one, other),
  ]
  steps += [
    _find_step_of_unit(one, name, unit)
    for name in one.tasks.keys() & other.tasks.keys()
    if (unit := _find_different_order(one, other, name)) is not None
  ]
  return min((step for step in steps if step is not None), default=None)


def _to_document(plan: Plan) -> dict[str, Any]:
  """Return the plan's fields by name; of several segments with one first step all but the last are empty."""
  segments: dict[str, Any] = {}
  for segment in plan.segments:
    name = f"[{segment.start_step}]"
    while name in segments:
      name += "'"
    segments[name] = dataclasses.asdict(segment)
  fields = dataclasses.fields(plan)
  document = {f.name: getattr(plan, f.name) for f in fields if f.name not in {*CACHE_FIELDS, "segments"}}
  document["tasks"] = {name: dataclasses.asdict(task) for name, task in plan.tasks.items()}
  tombstones: dict[str, dict[str, list[int]]] = {}
  for task, index, step in plan.silent_steps.items():
    tombstones.setdefault(task, {}).setdefault(f"[{step}]", []).append(index)
  return document | {"segments": segments, "tombstones": tombstones}


def _compare(name: str, one: Any, other: Any) -> Iterator[Difference]:
  if isinstance(one, Mapping) and isinstance(other, Mapping):
    for key in dict.fromkeys([*one, *other]):
      dot = "" if not name or key.startswith("[") else "."
      yield from _compare(f"{name}{dot}{key}", one.get(key), other.get(key))
  elif one != other:
    yield Difference(name, one, other)


def _find_different_units(one: Plan, other: Plan) -> int | None:
  """Return the first step at which the tasks or units of rows differ, as if the data never ended."""
  starts = sorted({segment.start_step for plan in (one, other) for segment in plan.segments})
  for start, stop in zip(starts, [*starts[1:], None], strict=True):
    pair = [_restrict_to_step(plan.segment_at(start), start) for plan in (one, other)]
    step = _find_different_rows(pair[0], pair[1], stop)
    if step is not None:
      return step
  return None


def _restrict_to_step(segment: Segment, step: int) -> Segment:
  """Return a segment from a step on, without the tasks that it gives no rows to."""
  standing = segment.standing_at(step, start_step=step, reason="")
  tasks = {name: dataclasses.replace(t, rate="1") for name, t in standing.tasks.items() if t.quota}
  return dataclasses.replace(standing, tasks=tasks)


def _find_different_rows(one: Segment, other: Segment, stop: int | None) -> int | None:
  """Return the first step before `stop` at which two segments with one first step differ.

  Two sequences with periods p and q that agree in p + q positions agree everywhere (Fine & Wilf 1965).
  """
  if one == other:
    return None
  if one.batch_size != other.batch_size:
    return one.start_step
  if one.lanes == other.lanes:
    # Lane c has the units of lane 0 plus c, so comparing one lane is enough.
    one, other = (dataclasses.replace(s, lanes=1, batch_size=s.stripes_per_step) for s in (one, other))
  periods = [s.mixing.period // math.gcd(s.mixing.period, s.stripes_per_step) for s in (one, other)]
  last = one.start_step + sum(periods) + 1
  last = last if stop is None else min(last, stop)
  names = sorted({*one.tasks, *other.tasks})
  steps_at_a_time = max(1, _ROWS_AT_A_TIME // one.batch_size)
  for start in range(one.start_step, last, steps_at_a_time):
    steps = min(steps_at_a_time, last - start)
    rows = [_list_rows(segment, start, steps, names) for segment in (one, other)]
    differ = (rows[0] != rows[1]).any(axis=(1, 2))
    if differ.any():
      return start + int(np.argmax(differ))
  return None


def _list_rows(segment: Segment, start: int, steps: int, names: list[str]) -> np.ndarray:
  """Return the task, as a position in names, and the unit of the rows of steps: `(steps, rows, 2) int64`."""
  standing = segment.standing_at(start, start_step=start, reason="")
  # A batch that is `steps` times as large has the stripes of all these steps, lane by lane.
  rows = dataclasses.replace(standing, batch_size=segment.batch_size * steps).rows(start)
  task = np.array([names.index(name) for name in segment.mixing.names])[rows.task]
  columns = np.stack([task, rows.unit], axis=-1).reshape(segment.lanes, steps, -1, 2)
  return columns.swapaxes(0, 1).reshape(steps, segment.batch_size, 2)


def _find_different_tombstones(one: Plan, other: Plan) -> int | None:
  """Return the first step from which an example has no loss in only one plan."""
  only_one = set(one.silent_steps.items()) ^ set(other.silent_steps.items())
  return min((step for _, _, step in only_one), default=None)


def _find_different_end(one: Plan, other: Plan) -> int | None:
  """Return the first step that is padded or missing in one plan, while the other has rows."""
  ends = [math.inf if plan.num_steps is None else plan.num_steps for plan in (one, other)]
  if min(ends) == math.inf:
    return None
  last = int(min(ends)) - 1
  if last >= 0 and not np.array_equal(_mask_real_rows(one, last), _mask_real_rows(other, last)):
    return last
  return None if ends[0] == ends[1] else last + 1


def _mask_real_rows(plan: Plan, step: int) -> np.ndarray:
  task, _, real = plan.units(step)
  return np.ones(len(task), bool) if real is None else real


def _find_different_order(one: Plan, other: Plan, name: str) -> int | None:
  """Return the first unit of a task whose location may differ between two plans."""
  pair = [plan.tasks[name] for plan in (one, other)]
  if any(task.transforms is None for task in pair):
    # A plan without a hash of transforms cannot be compared in them.
    pair = [dataclasses.replace(task, transforms=None) for task in pair]
  if pair[0] != pair[1]:
    return 0
  policies = {one.epoch_policy, other.epoch_policy}
  if policies == {EpochPolicy.SAME} or (len(policies) == 1 and one.seed == other.seed):
    return None
  return 0 if EpochPolicy.GLOBAL in policies else one.tasks[name].num_units


def _find_step_of_unit(plan: Plan, name: str, unit: int) -> int | None:
  """Return the first step with a unit >= `unit` of a task."""
  starts = [segment.start_step for segment in plan.segments]
  for segment, stop in zip(plan.segments, [*starts[1:], plan.num_steps], strict=True):
    task = segment.tasks.get(name)
    step_and_row = segment.when(name, max(unit, task.first_unit)) if task else None
    if step_and_row is not None and (stop is None or step_and_row[0] < stop):
      return step_and_row[0]
  return None
