"""The schedule: units of rows of steps, computed from segments alone (docs/order.md#plans-segments-rows)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from anystep.cached import cached_property
from anystep.errors import AnystepError, ExitCode
from anystep.plans.segments import Segment
from anystep.plans.wanted_rows import check_rows
from anystep.whole_numbers import INT64_MAX, whole_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """Segments that follow each other, until the data of some task ends.

  Attributes:
    segments: by start_step; of those that start at one step the last counts.
    task_names: every segment's tasks; arrays number tasks by their place here.
    end_units: by task, its number of units in all epochs together; None where the data never ends.
  """

  segments: Sequence[Segment]
  task_names: Sequence[str]
  end_units: Mapping[str, int] | None

  def segment_at(self, step: int) -> Segment:
    """Return the segment that a step belongs to; raises as `checked_step`."""
    step = checked_step(step)
    return next(s for s in reversed(self.segments) if s.start_step <= step)

  @cached_property
  def end(self) -> tuple[int, int] | None:
    """(step, its stripe) right after the data's last stripe; None where the data never ends."""
    if self.end_units is None:
      return None
    for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
      next_start = math.inf if following is None else following.start_step
      if segment.start_step < next_start and (end := segment.end(self.end_units)) <= (next_start, 0):
        return end
    raise AssertionError("the last segment has no next one, so the data ends in it")

  @property
  def num_steps(self) -> int | None:
    """Number of steps until the data ends; None where it never does."""
    if self.end is None:
      return None
    step, stripe = self.end
    return step + bool(stripe)

  def units(
    self, step: int, rows: np.ndarray | None = None
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return what the rows of a step are: see `Plan.units`."""
    step = self.readable_step(step)
    segment = self.segment_at(step)
    in_segment = segment.rows(step, None if rows is None else check_rows(rows, segment.batch_size))
    task = self._task_numbers[segment.start_step][in_segment.task]
    if self.end is None:
      return task, in_segment.unit, None
    end_step, end_stripe = self.end
    is_in_data = in_segment.unit < self._end_units_by_number[task]
    is_before_end = in_segment.stripe < end_stripe if step == end_step else True
    return task, in_segment.unit, is_in_data & is_before_end

  def readable_step(self, step: int) -> int:
    """Return a step that has a batch, as an int.

    Raises:
      AnystepError: 78 `data_ended`, `step_too_large`.
      TypeError, ValueError: as `checked_step`.
    """
    step = checked_step(step)
    self.check_before_end(step)
    self.segment_at(step).check_step(step)
    return step

  def check_before_end(self, step: int) -> None:
    """Refuse a step after the end of the data.

    Raises:
      AnystepError: 78 `data_ended`.
    """
    if self.num_steps is not None and step >= self.num_steps:
      raise AnystepError(
        ExitCode.CONFIG,
        "data_ended",
        expected=f"a step below {self.num_steps}",
        got=step,
        fix="train for fewer steps or for more epochs",
      )

  def when(self, task: str, unit: int) -> tuple[int, int] | None:
    """Return (step, row) of a task's unit; None where no step up to the largest one has it."""
    unit = whole_number(unit, "unit")
    for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
      step_and_row = segment.when(task, unit)
      if step_and_row is None or (following is not None and step_and_row[0] >= following.start_step):
        continue
      return step_and_row if self.is_real(*step_and_row) else None
    return None

  def is_real(self, step: int, row: int) -> bool:
    """Return whether a row exists and is no padding; only the last step of the data has padding."""
    if self.num_steps is None or step + 1 < self.num_steps:
      return True
    if step >= self.num_steps:
      return False
    _, _, real = self.units(step, np.array([row]))
    return real is None or bool(real[0])

  def next_units(self, step: int) -> dict[str, int]:
    """Return the next unit of every task that has a segment before or at a step."""
    units: dict[str, int] = {}
    starts = [segment.start_step for segment in self.segments[1:]]
    for segment, stop in zip(self.segments, [*starts, step], strict=True):
      if segment.start_step <= step:
        units |= segment.units_at(min(stop, step))
    return units

  @cached_property
  def _task_numbers(self) -> dict[int, np.ndarray]:
    """By start step, the numbers of a segment's tasks."""
    number = {name: k for k, name in enumerate(self.task_names)}
    return {s.start_step: np.array([number[name] for name in s.mixing.names]) for s in self.segments}

  @cached_property
  def _end_units_by_number(self) -> np.ndarray:
    end_units = self.end_units or {}
    return np.array([min(end_units.get(name, 0), INT64_MAX) for name in self.task_names], np.int64)


def checked_step(step: int) -> int:
  """Return a step as an int.

  Raises:
    TypeError: for a value that is no whole number.
    ValueError: for a step below 0.
  """
  step = whole_number(step, "step")
  if step < 0:
    raise ValueError(f"step must be at least 0, not {step}")
  return step
