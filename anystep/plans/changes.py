"""Requests to start or change a plan: checked, then made into segments and tombstones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.errors import AnystepError, ExitCode, find_nearest, require
from anystep.limits import (
  MAX_BATCH_ROWS,
  MAX_COUNT,
  MAX_FEATURE_LENGTH,
  are_feature_lengths,
  is_count,
  is_seed,
)
from anystep.order.epochs import EpochPolicy
from anystep.order.mixing import Mixing, exact_share
from anystep.order.packing import PackingPolicy
from anystep.plans.planned_tables import plan_tasks
from anystep.plans.planned_task import PlannedTask
from anystep.plans.schedule import Schedule
from anystep.plans.segments import Segment, SegmentTask, default_lanes
from anystep.plans.tombstones import SilentSteps, TombstoneList, Tombstones
from anystep.transforms.transform import Transforms, transforms_by_task
from anystep.units.tables import UnitTable
from anystep.whole_numbers import is_whole_number

Rate = int | float | str | Fraction

NEEDS_CACHES = "a plan that knows its caches: plan.on_caches(caches)"


# By kind of error, what to do about an argument of a plan.
_FIXES = {
  "batch_size": "set batch_size to a whole number of rows in this range",
  "caches": "give one cache of each task",
  "epoch_policy": "name one of these as epoch_policy; global reads every layout",
  "feature_lengths": "give each feature of feature_lengths a whole number in this range",
  "lanes": "give one of these divisors as lanes, or leave it out",
  "num_epochs": "set num_epochs to a number in this range; None reads without end",
  "packing": "name one of these as packing",
  "plan_caches": "call on_caches with the caches of the plan's tasks, and use the plan that it returns",
  "rate_unit": "name one of these as rate_unit",
  "rates": "give a rate for each task",
  "seed": "give a whole number from -2**63 to 2**64 - 1 as seed",
  "skip": "let the steps to skip end after the step that they begin with",
  "split": "give caches and lists of tombstones of this split alone",
  "step": "give the number of a step, counted from 0",
  "task_unknown": "give tombstones of the plan's tasks alone",
}


def check_argument(condition: bool, kind: str, expected: object, got: object) -> None:
  """Refuse an argument for which a condition does not hold.

  Raises:
    AnystepError: of the kind.
  """
  require(condition, kind, expected=expected, got=repr(got), fix=_FIXES[kind])


def group_by_task(caches: Cache | Iterable[Cache]) -> dict[str, Cache]:
  """Return caches by task name.

  Raises:
    AnystepError: 78 `caches` for two of one task.
  """
  several = [caches] if isinstance(caches, Cache) else list(caches)
  names = [cache.manifest.task for cache in several]
  by_task = dict(zip(names, several, strict=True))
  check_argument(len(by_task) == len(names), "caches", "one cache a task", names)
  return by_task


def check_split(caches: Mapping[str, Cache], split: str) -> None:
  """Refuse caches of another split.

  Raises:
    AnystepError: 78 `split`.
  """
  for name, cache in caches.items():
    check_argument(cache.manifest.split == split, "split", split, f"{cache.manifest.split} of {name}")


def start_fields(
  caches: Mapping[str, Cache],
  *,
  batch_size: int,
  rates: Mapping[str, Rate] | None,
  feature_lengths: Mapping[str, int],
  seed: int,
  num_epochs: int | None,
  packing: PackingPolicy | str,
  epoch_policy: EpochPolicy | str | None,
  rate_unit: str,
  lanes: int | None,
  transforms: Transforms | None,
) -> dict[str, Any]:
  """Return the fields of a new plan, by name; arguments and errors are those of `Plan.start`."""
  manifests = [cache.manifest for cache in caches.values()]
  splits = {m.split for m in manifests}
  check_argument(len(splits) == 1, "split", "caches of one split", sorted(splits))
  are_epochs = num_epochs is None or is_count(num_epochs, least=1)
  check_argument(are_epochs, "num_epochs", f"None or 1 to {MAX_COUNT}", num_epochs)
  check_argument(is_seed(seed), "seed", "a whole number of 64 bits", seed)
  length_range = f"whole numbers, 0 to {MAX_FEATURE_LENGTH}"
  check_argument(are_feature_lengths(feature_lengths), "feature_lengths", length_range, feature_lengths)
  check_argument(rate_unit in ("examples", "units"), "rate_unit", "examples or units", rate_unit)
  if epoch_policy is None:
    epoch_policy = _default_epoch_policy(caches)
  packings = [policy.value for policy in PackingPolicy]
  check_argument(packing in packings, "packing", " or ".join(packings), packing)
  policies = [policy.value for policy in EpochPolicy]
  check_argument(epoch_policy in policies, "epoch_policy", " or ".join(policies), epoch_policy)
  if rates is None:
    check_argument(len(caches) == 1, "rates", f"rates of {', '.join(caches)}", None)
    rates = dict.fromkeys(caches, 1)
  check_mixture(caches, rates, batch_size=batch_size, lanes=lanes)
  planned, tables = plan_tasks(
    caches,
    None if transforms is None else transforms_by_task(transforms, caches),
    with_tables=[name for name in caches if exact_share(name, rates.get(name, 0))],
    packing=PackingPolicy(packing),
    feature_lengths=feature_lengths,
  )
  segment = make_segment(
    planned,
    rates,
    units_per_example=units_per_example(planned, tables, rate_unit),
    start_step=0,
    batch_size=batch_size,
    lanes=lanes,
    first_units={},
    reason="start",
  )
  return {
    "split": splits.pop(),
    "seed": seed,
    "num_epochs": num_epochs,
    "feature_lengths": feature_lengths,
    "packing": PackingPolicy(packing),
    "epoch_policy": EpochPolicy(epoch_policy),
    "tasks": {name: planned[name] for name in segment.tasks},
    "segments": (segment,),
    "rate_unit": rate_unit,
    "unit_tables": {name: table for name, table in tables.items() if name in segment.tasks},
  }


def _default_epoch_policy(caches: Mapping[str, Cache]) -> EpochPolicy:
  """Return `global` for caches in layout `as_is`, else `reshuffle`.

  Raises:
    AnystepError: 78 `epoch_policy` for a mixture of both layouts.
  """
  layouts = {cache.manifest.layout for cache in caches.values()}
  expected = "a policy by name, for a mixture of layouts preshuffled and as_is"
  check_argument(len(layouts) == 1, "epoch_policy", expected, None)
  return EpochPolicy.GLOBAL if layouts == {AS_IS} else EpochPolicy.RESHUFFLE


def check_mixture(
  tasks: Collection[str], rates: Mapping[str, Rate], *, batch_size: int, lanes: int | None
) -> None:
  """Refuse a segment that cannot be, before unit tables are made, which may take long.

  Raises:
    AnystepError: 64 `task_unknown`; 78 `batch_size`, `lanes`.
  """
  for name in rates:
    if name not in tasks:
      raise AnystepError(
        ExitCode.USAGE,
        "task_unknown",
        expected=f"tasks whose caches are given: {find_nearest(name, tasks)}",
        got=name,
        fix="correct the name, or give the task's cache too",
      )
  check_argument(type(batch_size) is int and batch_size >= 1, "batch_size", "at least 1 row", batch_size)
  check_argument(batch_size <= MAX_BATCH_ROWS, "batch_size", f"at most {MAX_BATCH_ROWS:,} rows", batch_size)
  if lanes is not None and not (is_count(lanes, least=1) and batch_size % lanes == 0):
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    check_argument(False, "lanes", f"a divisor of {batch_size}: {divisors}", lanes)


def check_changed_step(schedule: Schedule, step: int, *, trained_steps: int) -> int:
  """Return a step from which on the data may change, as an int.

  Raises:
    AnystepError: 78 `step`, `step_trained`, `data_ended`, `step_too_large`.
  """
  check_argument(_is_step(step), "step", "a step, a whole number >= 0", step)
  step = int(step)
  if step < trained_steps:
    raise AnystepError(
      ExitCode.CONFIG,
      "step_trained",
      expected=f"a step not yet trained: {trained_steps} or later",
      got=step,
      fix="change the data from a later step on, or go back to an earlier checkpoint first",
    )
  schedule.check_before_end(step)
  schedule.segment_at(step).check_step(step, limit=MAX_COUNT)
  return step


def make_segment(
  tasks: Mapping[str, PlannedTask],
  rates: Mapping[str, Rate],
  *,
  units_per_example: Mapping[str, Fraction],
  start_step: int,
  batch_size: int,
  lanes: int | None,
  first_units: Mapping[str, int],
  reason: str,
) -> Segment:
  """Return a segment that begins with the mixture's first stripe.

  Args:
    tasks: by name.
    rates: by task name; those of 0 are left out.
    units_per_example: by task name, 1 where there is none: turns rates of examples into rates of units.
    start_step, batch_size, reason: the segment's.
    lanes: the segment's; None for the default.
    first_units: by task name, the unit that it starts with, 0 where there is none.

  Raises:
    AnystepError: 78 `rates`.
  """
  mixing = Mixing({n: exact_share(n, rate) * units_per_example.get(n, 1) for n, rate in rates.items()})
  if lanes is None:
    lanes = default_lanes(batch_size, [tasks[name].num_shards for name in mixing.names])
  return Segment(
    start_step=start_step,
    batch_size=batch_size,
    lanes=lanes,
    first_stripe=0,
    tasks={
      name: SegmentTask(rate=str(rates[name]), quota=int(quota), first_unit=first_units.get(name, 0))
      for name, quota in zip(mixing.names, mixing.quotas, strict=True)
    },
    reason=reason,
  )


def continue_segment(new: Segment, old: Segment, *, keep_lanes: bool) -> Segment:
  """Return a new segment with what it can keep of the one before: lanes, and where the mixture stands."""
  if keep_lanes and new.batch_size == old.batch_size and new.tasks.keys() == old.tasks.keys():
    new = dataclasses.replace(new, lanes=old.lanes)
  if new.quotas == old.quotas:
    standing = old.standing_at(new.start_step, start_step=new.start_step, reason=new.reason)
    new = dataclasses.replace(new, first_stripe=standing.first_stripe)
  return new


def units_per_example(
  tasks: Mapping[str, PlannedTask], tables: Mapping[str, UnitTable], rate_unit: str
) -> dict[str, Fraction]:
  """Return U / N, by which rates of examples become rates of units, of tasks that have a unit table.

  Raises:
    AnystepError: 78 `plan_caches` where a task's table is not there.
  """
  if rate_unit == "units":
    return {}
  unknown = [name for name, task in tasks.items() if task.unit_table and name not in tables]
  check_argument(not unknown, "plan_caches", NEEDS_CACHES, unknown)
  return {name: Fraction(table.num_units, table.num_examples) for name, table in tables.items()}


def skip_steps(
  schedule: Schedule, step: int, until: int, *, trained_steps: int, reason: str | None
) -> list[Segment]:
  """Return segments from `step` on whose rows are those that the schedule has from `until` on.

  Raises:
    AnystepError: as `Plan.skip`.
  """
  step = check_changed_step(schedule, step, trained_steps=trained_steps)
  check_argument(_is_step(until) and until > step, "skip", f"steps [{step}, b) with b > {step}", until)
  until = check_changed_step(schedule, until, trained_steps=0)
  reason = reason or f"skip of [{step}, {until})"
  standing = schedule.segment_at(until).standing_at(until, start_step=step, reason=reason)
  # A task that left before `until` returns where it stood then: a segment of no steps records its unit.
  units_then, units_now = schedule.next_units(until), schedule.next_units(step)
  units_of_left = {
    name: unit
    for name, unit in units_then.items()
    if name not in standing.tasks and units_now.get(name) != unit
  }
  if not units_of_left:
    return [standing]
  position = dataclasses.replace(
    standing,
    first_stripe=0,
    tasks={name: SegmentTask(rate="1", quota=1, first_unit=unit) for name, unit in units_of_left.items()},
    reason=f"{reason}: where tasks stood that had left",
  )
  return [position, standing]


def replace_later_segments(segments: Sequence[Segment], new: Sequence[Segment]) -> tuple[Segment, ...]:
  """Return segments with new ones, which start at one step, in place of those that start later.

  The reason of the last one names the steps at which others were to start.
  """
  start_step, new_names = new[-1].start_step, {name for segment in new for name in segment.tasks}
  earlier = [s for s in segments if s.start_step <= start_step]
  dropped = [s.start_step for s in segments if s.start_step > start_step]
  # A segment that starts at the same step has no steps left. It stays if it alone records a task's unit.
  while earlier and earlier[-1].start_step == start_step and earlier[-1].tasks.keys() <= new_names:
    dropped.insert(0, earlier.pop().start_step)
  last = new[-1]
  if dropped:
    steps = ", ".join(map(str, dropped))
    last = dataclasses.replace(last, reason=f"{last.reason}; dropped what was to start at {steps}")
  return (*earlier, *new[:-1], last)


def select_tasks(tasks: Mapping[str, PlannedTask], segments: Iterable[Segment]) -> dict[str, PlannedTask]:
  """Return those tasks that some segment has."""
  names = {name for segment in segments for name in segment.tasks}
  return {name: task for name, task in tasks.items() if name in names}


def add_tombstones(
  tombstones: Sequence[Tombstones],
  lists: Iterable[TombstoneList],
  *,
  start_step: int,
  tasks: Mapping[str, PlannedTask],
  split: str,
) -> tuple[Tombstones, ...]:
  """Return tombstones with those of some lists that have loss at a step until now.

  Args:
    tombstones: the plan's.
    lists: of examples of the plan's tasks.
    start_step: the first step without their loss.
    tasks, split: the plan's.

  Raises:
    AnystepError: 64 `task_unknown`; 78 `split`; 76 `plan_cache` for a list of another cache's examples.
  """
  extended = list(tombstones)
  for entry in lists:
    check_argument(entry.split == split, "split", split, f"{entry.split} of {entry.task}")
    check_argument(entry.task in tasks, "task_unknown", find_nearest(entry.task, tasks), entry.task)
    tasks[entry.task].check_manifest(entry.task, entry.manifest_sha256)
    indices = np.array(entry.indices, np.int64)
    new = indices[SilentSteps(extended).since(entry.task, indices) > start_step]
    if new.size:
      by_task = {entry.task: new.tolist()}
      extended.append(Tombstones(start_step=start_step, indices=by_task, reason=entry.reason))
  return tuple(extended)


def _is_step(value: object) -> bool:
  return is_whole_number(value) and int(value) >= 0  # type: ignore[call-overload]
