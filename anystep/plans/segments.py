"""A segment: a stretch of steps under one batch size and one mixture (docs/order.md#plans-segments-rows)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from anystep.cached import cached_property
from anystep.errors import AnystepError, ExitCode
from anystep.limits import MAX_BATCH_ROWS, is_count, is_name, refuse_wrong
from anystep.order.mixing import Mixing, is_rate
from anystep.whole_numbers import INT64_MAX


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentTask:
  """A task's part in a segment: its rate, its stripes per period, and its first unit."""

  rate: str
  quota: int
  first_unit: int

  def __post_init__(self):
    refuse_wrong(rate=is_rate(self.rate), quota=is_count(self.quota), first_unit=is_count(self.first_unit))


class SegmentRows(NamedTuple):
  """Rows of a step, `(rows,) int64` each: place among the segment's tasks, unit, stripe of the step."""

  task: np.ndarray
  unit: np.ndarray
  stripe: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
  """A stretch of steps from start_step on.

  Attributes:
    start_step: its first step.
    batch_size: B, rows of a batch over all hosts. lanes: M, a divisor of B.
    first_stripe: the stripe of the mixture's endless sequence that the first step begins with.
    tasks: the mixture, by name.
    reason: why the data changes here, for people.
  """

  start_step: int
  batch_size: int
  lanes: int
  first_stripe: int
  tasks: Mapping[str, SegmentTask]
  reason: str

  def __post_init__(self):
    refuse_wrong(
      start_step=is_count(self.start_step),
      batch_size=is_count(self.batch_size, least=1, most=MAX_BATCH_ROWS),
      lanes=is_count(self.lanes, least=1) and is_count(self.batch_size) and self.batch_size % self.lanes == 0,
      first_stripe=is_count(self.first_stripe),
      tasks=all(map(is_name, self.tasks)) and any(task.quota for task in self.tasks.values()),
      reason=isinstance(self.reason, str),
    )
    # Raises for quotas that no rates give.
    Mixing.of_quotas(self.quotas)

  @property
  def mixing(self) -> Mixing:
    """The sequence of tasks that stripes go to; its names are the segment's tasks in order."""
    return Mixing.of_quotas(self.quotas)

  @property
  def quotas(self) -> dict[str, int]:
    """The tasks' stripes per period."""
    return {name: task.quota for name, task in self.tasks.items()}

  @property
  def stripes_per_step(self) -> int:
    """G, the number of stripes in a batch; a stripe is M units."""
    return self.batch_size // self.lanes

  @cached_property
  def largest_step(self) -> int:
    """The last step whose units and stripes, and those right after them, fit in int64."""
    return self.largest_step_within(INT64_MAX)

  def largest_step_within(self, limit: int) -> int:
    """Return the last step by whose end no stripe, unit or step is above a limit, or a few stripes less.

    A task has at most a m / P + 2 of the first m stripes, wherever the mixture begins.
    """
    mixing, most_stripes = self.mixing, limit - self.first_stripe
    for name, quota in zip(mixing.names, mixing.quotas.tolist(), strict=True):
      task_stripes = (limit - self.tasks[name].first_unit) // self.lanes - 2
      if quota:
        most_stripes = min(most_stripes, task_stripes * mixing.period // quota)
    return min(self.start_step + max(most_stripes, 0) // self.stripes_per_step, limit) - 1

  def check_step(self, step: int, *, limit: int = INT64_MAX) -> None:
    """Refuse a step after the largest.

    Raises:
      AnystepError: 78 `step_too_large`.
    """
    largest = self.largest_step if limit == INT64_MAX else self.largest_step_within(limit)
    if step > largest:
      raise AnystepError(
        ExitCode.CONFIG,
        "step_too_large",
        expected=f"a step up to {largest}, after which the numbers of units are too large",
        got=step,
        fix="name a step that a run can reach",
      )

  def rows(self, step: int, row_numbers: np.ndarray | None = None) -> SegmentRows:
    """Return the rows of a step as if the segment never ended: all of them, or those of row_numbers.

    Raises:
      AnystepError: 78 `step_too_large`.
    """
    self.check_step(step)
    mixing, stripes = self.mixing, self.stripes_per_step
    first = self.first_stripe + (step - self.start_step) * stripes
    task = mixing.draws(first, first + stripes)
    new_stripes = mixing.counts(first) - mixing.counts(self.first_stripe)
    first_units = np.array([self.tasks[name].first_unit for name in mixing.names], np.int64)
    unit = (first_units + new_stripes * self.lanes)[task] + _count_earlier(task) * self.lanes
    if row_numbers is None:
      lane, stripe = np.repeat(np.arange(self.lanes), stripes), np.tile(np.arange(stripes), self.lanes)
    else:
      lane, stripe = np.divmod(row_numbers, stripes)
    return SegmentRows(task[stripe], unit[stripe] + lane, stripe)

  def units_at(self, step: int) -> dict[str, int]:
    """Return the next unit of each task at a step of this segment, or at the start of the next segment.

    Raises:
      AnystepError: 78 `step_too_large`.
    """
    self.check_step(step - 1)
    mixing = self.mixing
    first = self.first_stripe + (step - self.start_step) * self.stripes_per_step
    new_stripes = mixing.counts(first) - mixing.counts(self.first_stripe)
    return {
      name: self.tasks[name].first_unit + int(count) * self.lanes
      for name, count in zip(mixing.names, new_stripes, strict=True)
    }

  def standing_at(self, step: int, *, start_step: int, reason: str) -> Segment:
    """Return a segment from start_step on, whose rows are those of this one from `step` on."""
    units = self.units_at(step)
    stripe = self.first_stripe + (step - self.start_step) * self.stripes_per_step
    return dataclasses.replace(
      self,
      start_step=start_step,
      first_stripe=stripe % self.mixing.period,
      tasks={n: dataclasses.replace(task, first_unit=units[n]) for n, task in self.tasks.items()},
      reason=reason,
    )

  def end(self, last_units: Mapping[str, int]) -> tuple[int, int]:
    """Return (step, its stripe) right after the first stripe that completes the units of some task.

    Args:
      last_units: by task, the unit after its last one.
    """
    mixing = self.mixing
    before = mixing.counts(self.first_stripe)
    stripes = []
    for k, name in enumerate(mixing.names):
      left = last_units[name] - self.tasks[name].first_unit
      if left <= 0:
        return self.start_step, 0
      if mixing.quotas[k]:
        last = mixing.stripe_of(k, int(before[k]) + -(-left // self.lanes) - 1)
        stripes.append(last + 1 - self.first_stripe)
    steps, stripe = divmod(min(stripes), self.stripes_per_step)
    return self.start_step + steps, stripe

  def when(self, name: str, unit: int) -> tuple[int, int] | None:
    """Return (step, row) of a task's unit as if the segment never ended; None for one that it never has."""
    task = self.tasks.get(name)
    if task is None or unit < task.first_unit or not task.quota:
      return None
    mixing = self.mixing
    k = mixing.names.index(name)
    stripes_before, lane = divmod(unit - task.first_unit, self.lanes)
    stripes = (
      mixing.stripe_of(k, int(mixing.counts(self.first_stripe)[k]) + stripes_before) - self.first_stripe
    )
    steps, stripe = divmod(stripes, self.stripes_per_step)
    if self.start_step + steps > self.largest_step:
      return None
    return self.start_step + steps, lane * self.stripes_per_step + stripe


def default_lanes(batch_size: int, shard_counts: Iterable[int]) -> int:
  """Return M, so that a lane reads one residue class of shards of every task with more than one shard.

  >>> default_lanes(256, [64]), default_lanes(256, [64, 48, 1]), default_lanes(16, [64, 48])
  (64, 8, 1)
  """
  sharded = [shards for shards in shard_counts if shards > 1]
  common = math.gcd(batch_size, *sharded)
  if len(sharded) == 1:
    return common
  fitting = [lanes for lanes in range(1, batch_size // 32 + 1) if common % lanes == 0]
  return max(fitting, default=1) if sharded else 1


def _count_earlier(values: np.ndarray) -> np.ndarray:
  """Return how many earlier entries of the array equal each entry: `(n,) int64`.

  >>> _count_earlier(np.array([2, 0, 2, 2]))
  array([0, 0, 1, 2])
  """
  order = np.argsort(values, kind="stable")
  ordered = values[order]
  positions = np.arange(len(values))
  starts = np.maximum.accumulate(np.where(np.diff(ordered, prepend=-1) != 0, positions, 0))
  counts = np.empty_like(positions)
  counts[order] = positions - starts
  return counts
