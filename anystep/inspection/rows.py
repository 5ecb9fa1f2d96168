"""Rows of any step, and the steps of any example, by arithmetic (docs/order.md#seeing-it)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.order.epochs import Places
from anystep.order.preshuffle import preshuffle
from anystep.plans.plan import PADDING_TASK, Plan
from anystep.plans.segments import Segment
from anystep.units.tables import UnitTable

_EPOCHS_AT_A_TIME = 1024


def what_was_at(
  plan: Plan, caches: Mapping[str, Cache], step: int, rows: np.ndarray | None = None
) -> Iterator[dict[str, Any]]:
  """Yield the rows of a step's batch with the keys of docs/order.md#seeing-it; padding rows are left out.

  An example without loss weight at this step also has the key `tombstone`.

  Args:
    plan: one that knows its caches (`Plan.on_caches`).
    caches: caches of the plan's tasks, by name.
    step: any step before the data's end.
    rows: row numbers, `(rows,)`; all by default.

  Raises:
    AnystepError: as `Plan.batch`.
  """
  batch = plan.batch(step, rows)
  numbers = np.arange(len(batch.task)) if rows is None else np.asarray(rows)
  examples: dict[int, list[dict[str, Any]]] = {}
  for position in np.unique(batch.task[batch.task != PADDING_TASK]).tolist():
    name = plan.task_names[position]
    of_task = np.flatnonzero(batch.task == position)
    units = _describe_units(
      caches[name], plan.unit_tables.get(name), batch.shard[of_task], batch.place[of_task]
    )
    examples |= dict(zip(of_task.tolist(), units, strict=True))
  for k in sorted(examples):
    location = {name: int(getattr(batch, name)[k]) for name in ("epoch", "unit", "shard", "place")}
    yield _describe_row(
      plan, step, int(numbers[k]), plan.task_names[int(batch.task[k])], location, examples[k]
    )


def when_was(
  plan: Plan, caches: Mapping[str, Cache], task: str, index: int, steps: range
) -> Iterator[dict[str, Any]]:
  """Yield the rows of steps that train on an example, in order, with the keys of `what_was_at`.

  Costs one inverse permutation for each epoch of the steps, however many steps there are. An example that is
  dropped after the cache is in no row.

  Args:
    plan: one that knows its caches (`Plan.on_caches`).
    caches: caches of the plan's tasks, by name.
    task: the example's task, one of the plan's. index: its index in the cache.
    steps: the steps; those after the data's end have no rows.

  Raises:
    IndexError: for an index that the split does not have.
  """
  shard, record = (int(number[0]) for number in caches[task].locate(np.array([index])))
  table = plan.unit_tables.get(task)
  place = record if table is None else table.unit_of(shard, record)
  if place is None:
    return
  (examples,) = _describe_units(caches[task], table, np.array([shard]), np.array([place]))
  rows = _find_rows(plan, task, shard, place, steps)
  for step, rows_of_step in itertools.groupby(rows, operator.itemgetter(0)):
    for _, row, epoch, unit in sorted(rows_of_step):
      location = {"epoch": epoch, "unit": unit, "shard": shard, "place": place}
      yield _describe_row(plan, step, row, task, location, examples)


def index_of_source(cache: Cache, source_shard: int, source_place: int) -> int:
  """Return the index of a source shard's example: the inverse of `Cache.source_of`.

  Raises:
    IndexError: for a shard or a place that the source does not have.
  """
  m = cache.manifest
  if not 0 <= source_shard < len(m.source_shards):
    raise IndexError(f"source shard {source_shard} of {len(m.source_shards)}")
  if not 0 <= source_place < m.source_shards[source_shard].examples:
    raise IndexError(f"place {source_place} of {m.source_shards[source_shard].examples} in its source shard")
  ordinal = sum(shard.examples for shard in m.source_shards[:source_shard]) + source_place
  if m.layout == AS_IS:
    return ordinal
  return int(preshuffle(m.num_examples, task=m.task, split=m.split, seed=m.seed)(ordinal))


def split_by_segment(plan: Plan, steps: range) -> Iterator[tuple[Segment, range]]:
  """Yield the plan's segments that contain any of the steps, each with its part of the steps."""
  starts = [segment.start_step for segment in plan.segments]
  for segment, next_start in zip(plan.segments, [*starts[1:], steps.stop], strict=True):
    stop = min(steps.stop, next_start, steps.stop if plan.num_steps is None else plan.num_steps)
    stretch = range(max(steps.start, segment.start_step), stop)
    if stretch:
      yield segment, stretch


def _find_rows(
  plan: Plan, task: str, shard: int, place: int, steps: range
) -> Iterator[tuple[int, int, int, int]]:
  """Yield (step, row, epoch, unit) for each row with the unit at a place, steps ascending."""
  position, num_units = plan.task_names.index(task), plan.tasks[task].num_units
  for segment, stretch in split_by_segment(plan, steps):
    if task not in segment.tasks:
      continue
    first, stop = segment.units_at(stretch.start)[task], segment.units_at(stretch.stop)[task]
    epochs = range(first // num_units, -(-stop // num_units))
    for start in range(epochs.start, epochs.stop, _EPOCHS_AT_A_TIME):
      chunk = np.arange(start, min(start + _EPOCHS_AT_A_TIME, epochs.stop))
      places = Places(chunk, np.full_like(chunk, shard), np.full_like(chunk, place))
      units = plan.unit_order.unit_of(position, places)
      for epoch, unit in zip(chunk.tolist(), units.tolist(), strict=True):
        step_and_row = segment.when(task, unit) if first <= unit < stop else None
        if step_and_row is not None and plan.schedule.is_real(*step_and_row):
          yield *step_and_row, epoch, unit


def _describe_row(
  plan: Plan, step: int, row: int, task: str, location: Mapping[str, int], examples: list[dict[str, Any]]
) -> dict[str, Any]:
  since = plan.silent_steps.since(task, np.array([example["index"] for example in examples]))
  marked_examples = [
    {**example, "tombstone": True} if first <= step else dict(example)
    for example, first in zip(examples, since.tolist(), strict=True)
  ]
  return {
    "step": step,
    "row": row,
    "task": task,
    "split": plan.split,
    **location,
    "examples": marked_examples,
  }


def _describe_units(
  cache: Cache, table: UnitTable | None, shards: np.ndarray, places: np.ndarray
) -> list[list[dict[str, Any]]]:
  """Describe the examples of units, given by shard and place, `(units,)` each."""
  if table is None:
    return [[example] for example in _describe_examples(cache, cache.index_of(shards, places))]
  units: list[list[dict[str, Any]]] = [[]] * len(places)
  for shard in np.unique(shards).tolist():
    of_shard = np.flatnonzero(shards == shard)
    members = table.members(shard, places[of_shard])
    indices = cache.index_of(np.full_like(members.places, shard), members.places)
    examples = iter(_describe_examples(cache, indices))
    for k, count in zip(of_shard.tolist(), members.counts.tolist(), strict=True):
      units[k] = list(itertools.islice(examples, count))
  return units


def _describe_examples(cache: Cache, indices: np.ndarray) -> list[dict[str, Any]]:
  """Describe examples by index: their record and their origin in the source."""
  sources = cache.manifest.source_shards
  columns = (indices, cache.locate(indices)[1], *cache.source_of(indices))
  return [
    {
      "index": index,
      "record": record,
      "source_shard": source_shard,
      "source_name": sources[source_shard].name,
      "source_place": source_place,
    }
    for index, record, source_shard, source_place in zip(*(c.tolist() for c in columns), strict=True)
  ]
