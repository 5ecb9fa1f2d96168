"""A stream of batches: the plan's rows, read, transformed and converted."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from etils import epath

from anystep.caches.cache import Cache, find_cache
from anystep.errors import AnystepError, ExitCode
from anystep.features.converters import FeatureConverter, PassThroughConverter, Rows
from anystep.features.ragged import Batch, Ragged, make_padding
from anystep.forks import start_anew_in_children
from anystep.plans.plan import PADDING_TASK, BatchRows, Plan
from anystep.plans.schedule import checked_step
from anystep.plans.tombstones import without_loss
from anystep.plans.wanted_rows import rows_by_batch_size
from anystep.streams.gathering import UnitRecords
from anystep.streams.memory import keep_freed_memory
from anystep.streams.read_ahead import Making, ReadAhead, run_uninterrupted
from anystep.streams.record_reader import join_steps
from anystep.streams.task_examples import TaskExamples
from anystep.transforms.transform import Transform, Transforms, transforms_by_task

__all__ = ["Stream", "find_cache", "open_stream"]

STATE_VERSION = 1
# Rows that are read and parsed at a time ahead of need: 1,024 cost a quarter less each than 256.
_ROWS_AT_A_TIME = 1024
_CLOSING_SECONDS = 0.8
# Steps, their rows that are no padding as a mask each, `(rows,) bool`, and the records of these rows.
_Read: TypeAlias = tuple[range, list[np.ndarray], UnitRecords]


def open_stream(
  plan: Plan,
  cache_dirs: epath.PathLike | Iterable[epath.PathLike] | Mapping[str, Cache],
  *,
  rows: slice | Iterable[int] | tuple[int, int] = slice(None),
  feature_converter: FeatureConverter | None = None,
  transforms: Transforms | None = None,
  prefetch_batches: int = 16,
) -> Stream:
  """Open the batches of a plan.

  Args:
    plan: which units are in which row of which step.
    cache_dirs: directories that are searched for each task's cache, in this order; or the caches themselves,
      by task.
    rows: the rows wanted of every batch: a slice, row numbers, a mask with a bool for each row of a batch, or
      (host, host count) for a contiguous share.
    feature_converter: makes the model's features; by default features stay as the transforms leave them,
      those that the plan has a length for cut and filled to it.
    transforms: by task name, what its examples go through at reading, one or several in order; what the
      plan was started with, where it has unit tables. A table that is not there is made anew.
    prefetch_batches: batches made ahead in background threads, several at a time; 0 makes each when it is
      asked for.

  Raises:
    AnystepError: 66 and 65 as `open_cache`; 76 where caches or transforms are not those the plan was made
      for; 78 as `transforms_by_task`, `feature_converter`, `prefetch_batches`, `rows` where hosts cannot
      share a batch, `mixture_features` where tasks have no features in common.
  """
  if isinstance(cache_dirs, Mapping):
    caches = dict(cache_dirs)
  else:
    roots = [cache_dirs] if isinstance(cache_dirs, (str, os.PathLike)) else list(cache_dirs)
    caches = {name: find_cache(roots, name, plan.split) for name in plan.tasks}
  missing = sorted(plan.tasks.keys() - caches.keys())
  if missing:
    raise AnystepError(
      ExitCode.USAGE,
      "task_unknown",
      expected=f"caches of {', '.join(plan.task_names)}",
      got=", ".join(sorted(caches)),
      fix=f"give the caches of {', '.join(missing)} too",
    )
  if type(prefetch_batches) is not int or prefetch_batches < 0:
    raise AnystepError(
      ExitCode.CONFIG,
      "prefetch_batches",
      expected="a whole number >= 0",
      got=repr(prefetch_batches),
      fix="give the number of batches that are made ahead, or 0",
    )
  _check_converter(feature_converter)
  by_task = transforms_by_task(transforms, plan.tasks, others=caches)
  plan_transforms = {name: transform for name, transform in by_task.items() if name in plan.tasks}
  return Stream(
    plan.on_caches(caches, plan_transforms),
    {name: caches[name] for name in plan.tasks},
    rows=rows_by_batch_size(rows, {segment.batch_size for segment in plan.segments}),
    feature_converter=feature_converter or PassThroughConverter(),
    transforms=plan_transforms,
    prefetch_batches=prefetch_batches,
  )


def _check_converter(converter: object) -> None:
  """Refuse objects that are no converters of this library, SeqIO's converters among them."""
  is_seqios = hasattr(converter, "get_model_feature_lengths")
  if converter is not None and (is_seqios or isinstance(converter, type) or not callable(converter)):
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_converter",
      expected="a converter of this library, such as EncoderDecoderConverter()",
      got=repr(converter),
      fix="wrap SeqIO's: anystep.tasks.converters.native_converter(converter)"
      if is_seqios
      else "give an instance",
    )


class Stream(Iterator[Rows]):
  """An iterator of batches that starts anywhere; made by `open_stream`.

  The batch of a step depends on the plan and the step alone, so the state is the step. After an interrupt,
  wherever it comes, the batches that follow are those from `step` on. Threads may share a stream: each step
  goes to one of them.

  Attributes:
    plan: the plan.
    step: the step of the batch that `next` gives.
  """

  def __init__(
    self,
    plan: Plan,
    caches: Mapping[str, Cache],
    *,
    rows: Mapping[int, np.ndarray],
    feature_converter: FeatureConverter,
    transforms: Mapping[str, Transform],
    prefetch_batches: int,
  ):
    keep_freed_memory()
    self.plan = plan
    self.step = 0
    self._rows = rows
    self._feature_converter = feature_converter
    self._examples = TaskExamples(plan, caches, transforms, shards_touched=_shards_touched(plan, rows))
    self._prefetch_batches = prefetch_batches
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Forget the threads and the batches that they make ahead, as a forked process must."""
    # Held while a batch is taken and `step` moves on. Reentrant, for a signal's handler may run in between.
    self._lock = threading.RLock()
    self._ahead = ReadAhead(self._prefetch_batches) if self._prefetch_batches else None
    plan, rows = self.plan, self._rows
    # Without the stream: it would hold itself.
    self._fetch_ahead = self._examples.fetch_ahead(
      lambda step: plan.units(step, rows[plan.segment_at(step).batch_size])
    )

  def __next__(self) -> Rows:
    if self._lock._is_owned():  # type: ignore[attr-defined]
      raise ValueError("next() within next(): a signal's handler may seek or close a stream, not read it")
    taken_step = None
    try:
      with self._lock:
        batch, sought = None, None
        while sought != self.step:
          # Repeat if a signal's handler sought another step meanwhile.
          sought = self.step
          batch = self._next_at(sought)
        if batch is not None:
          taken_step, self.step = sought, sought + 1
      if batch is not None:
        # Inside the try: an interrupt before the return means that the caller has no batch.
        return batch
    except BaseException as error:
      # The batch was taken, but the caller has not got it: its step is the next one again.
      with self._lock:
        if taken_step is not None and self.step == taken_step + 1:
          self.step = taken_step
      if isinstance(error, StopIteration):
        # A transform or a converter raised it: a loop would end as if the data had ended.
        raise RuntimeError(f"making the batch of step {self.step} raised StopIteration") from error
      raise
    self.close()
    raise StopIteration

  def next_in_turn(self, num_workers: int) -> Rows:
    """Return the next step's batch, and move on by as many steps as there are workers that take turns.

    Raises:
      StopIteration: after the last step.
    """
    if num_workers == 1:
      return next(self)
    step, num_steps = self.step, self.plan.num_steps
    if num_steps is not None and step >= num_steps:
      raise StopIteration
    batch = self.batch(step)
    self.seek(step + num_workers)
    return batch

  def _next_at(self, step: int) -> Rows | None:
    """Return the batch of a step, the one made ahead if it is there; None after the last step."""
    num_steps = self.plan.num_steps
    if num_steps is not None and step >= num_steps:
      return None
    self.plan.schedule.readable_step(step)
    batch = None
    if self._ahead:
      making = Making(self._read_next, self._convert_steps, self._steps_together)
      batch = self._ahead.take(step, num_steps, making)
    return self.batch(step) if batch is None else batch

  def batch(self, step: int) -> Rows:
    """Return the batch of any step, whatever was read before.

    Raises:
      AnystepError, ValueError, TypeError: as `Plan.batch`; 65 and 74 for damaged or unreadable files.
    """
    step = self.plan.schedule.readable_step(step)
    (batch,) = self._make(range(step, step + 1))
    return batch

  def _make(self, steps: range) -> list[Rows]:
    """Return the batches of some steps, read and parsed together."""
    return self._convert_steps(self._read(steps))

  def _read_next(self, steps: range) -> _Read:
    """Read records in the order of the steps; those of later steps are fetched from stores meanwhile."""
    self._fetch_ahead.advance(steps, self.plan.num_steps)
    return self._read(steps)

  def _read(self, steps: range) -> _Read:
    task, unit, real = join_steps([self._fetch_ahead.units(step) for step in steps])
    return steps, real, self._examples.read(task, unit)

  def _steps_together(self, step: int) -> int:
    """Return the number of steps that are made together ahead of need, from a step on."""
    rows = max(len(self.rows_at(step)), 1)
    return max(min(_ROWS_AT_A_TIME // rows, self._prefetch_batches // 2), 1)

  def _convert_steps(self, read: _Read) -> list[Rows]:
    """Return the batches that records were read for."""
    steps, real, records = read
    examples, counts = self._examples.examples(records)
    example_stops = row_stops = np.cumsum([np.count_nonzero(mask) for mask in real])
    step_counts: Sequence[np.ndarray | None] = [None] * len(real)
    if counts is not None:
      step_counts = np.split(counts, row_stops[:-1])
      example_stops = np.append(0, np.cumsum(counts))[row_stops]
    parts = {name: _split(feature, example_stops) for name, feature in examples.items()}
    silent: Sequence[np.ndarray | None] = [None] * len(real)
    if self.plan.tombstones:
      since = np.split(self._examples.silent_since(records.where), example_stops[:-1])
      silent = [first <= step for first, step in zip(since, steps, strict=True)]
    return [
      self.convert({name: part[k] for name, part in parts.items()}, real[k], step_counts[k], silent[k])
      for k in range(len(real))
    ]

  def rows_at(self, step: int) -> np.ndarray:
    """Return the rows of a step's batch that this stream makes, `(rows,) int64`."""
    return self._rows[self.plan.segment_at(step).batch_size]

  def examples(self, planned: BatchRows) -> tuple[Batch, np.ndarray | None]:
    """Return the examples of planned rows after the transforms, without padding rows.

    Returns:
      The examples, and how many each row has, `(real rows,) int64`; None where rows are not packed.
    """
    real = planned.task != PADDING_TASK
    return self._examples.examples(self._examples.read(planned.task[real], planned.unit[real]))

  def convert(
    self,
    examples: Batch,
    real: np.ndarray,
    counts: np.ndarray | None = None,
    silent: np.ndarray | None = None,
  ) -> Rows:
    """Convert examples to the model's features, in a row each; padding rows are zeros.

    Args:
      examples: of the real rows. counts: how many each has, as `examples` gives them.
      real: which rows are no padding, `(rows,) bool`.
      silent: which examples have no loss weight, `(examples,) bool`; None for none.
    """
    converted = self._feature_converter(examples, self.plan.feature_lengths, counts)
    if silent is not None:
      converted = without_loss(converted, silent, counts)
    return converted if real.all() else {name: _spread(values, real) for name, values in converted.items()}

  def seek(self, step: int) -> None:
    """Make `step` the next one; at or after the end of the data, `next` ends the iteration.

    Raises:
      AnystepError: 78 `step_too_large`.
      ValueError, TypeError: as `Plan.segment_at`.
    """
    step = checked_step(step)
    self.plan.segment_at(step).check_step(step)
    with self._lock:
      if self._ahead:
        self._ahead.forget()
      self.step = step

  def get_state(self) -> dict[str, int]:
    """Return the state: the next step."""
    return {"version": STATE_VERSION, "step": self.step}

  def set_state(self, state: Mapping[str, int]) -> None:
    """Go to the step of a state, which another stream of the same plan returned.

    Raises:
      AnystepError: 76 `stream_state` for a state of another form.
    """
    is_state = isinstance(state, Mapping) and state.keys() == {"version", "step"}
    step = state["step"] if is_state and state["version"] == STATE_VERSION else None
    if type(step) is not int or step < 0:
      raise AnystepError(
        ExitCode.MISMATCH,
        "stream_state",
        expected={"version": STATE_VERSION, "step": "an int >= 0"},
        got=state,
        fix="restore a state that this version's get_state made",
      )
    self.seek(step)

  def close(self) -> None:
    """Stop the background threads and drop what was read ahead; `next` would start them again.

    Takes a second at most: a read that lasts longer ends later by itself, and its results are dropped then.
    """
    join = self._ahead.close() if self._ahead else None

    def finish() -> None:
      if join:
        join()
      self._examples.close()

    # `finish` may have to wait for locks that a slow read holds.
    run_uninterrupted(finish, seconds=_CLOSING_SECONDS)

  def __enter__(self) -> Stream:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()


def _split(feature: np.ndarray | Ragged, stops: np.ndarray) -> Sequence[np.ndarray | Ragged]:
  """Return views of the rows between stops."""
  if len(stops) == 1:
    return [feature]
  bounds = [0, *stops.tolist()]
  return [feature[start:stop] for start, stop in itertools.pairwise(bounds)]


def _spread(values: np.ndarray | Ragged, real: np.ndarray) -> np.ndarray | Ragged:
  """Return rows with padding put in: zeros, or empty rows of a ragged feature."""
  if isinstance(values, Ragged):
    lengths = np.zeros(len(real), np.int64)
    lengths[real] = values.lengths
    return Ragged(values.values, lengths)
  spread = make_padding((len(real), *values.shape[1:]), values.dtype)
  spread[real] = values
  return spread


def _shards_touched(plan: Plan, rows: Mapping[int, np.ndarray]) -> dict[str, int]:
  """Return the most shards that the rows come from within an epoch of a segment, by task."""
  touched = dict.fromkeys(plan.tasks, 0)
  for segment in plan.segments:
    lanes = np.unique(rows[segment.batch_size] // segment.stripes_per_step)
    for name in segment.tasks:
      # A lane takes every M-th unit: one residue class of shards mod gcd(M, S). Of unequal shards, any.
      num_shards = plan.tasks[name].num_shards
      classes = 1 if name in plan.shard_units else math.gcd(segment.lanes, num_shards)
      lanes_shards = len(np.unique(lanes % classes)) * num_shards // classes
      touched[name] = max(touched[name], lanes_shards)
  return touched
