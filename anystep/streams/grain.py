"""Streams and plans as Grain datasets. Needs grain, which the library does not install."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np
from grain.transforms import DatasetSelectionMap

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.features.converters import Rows
from anystep.plans.plan import PADDING_TASK, Plan
from anystep.streams.stream import Stream, open_stream

_HELD_STEPS = 8


class StreamDataset(grain.IterDataset):
  """A plan's batches as a Grain dataset: `.map`, `.mp_prefetch` and Grain's checkpoints work on it.

  Worker processes of `mp_prefetch` divide the steps among them, so any number of them gives the same batches.

  Args:
    plan, cache_dirs: as `anystep.open_stream` takes them.
    options: its keyword arguments.
  """

  def __init__(self, plan: Plan, cache_dirs: Any, **options: Any):
    super().__init__()
    self._plan = plan
    self._cache_dirs = cache_dirs
    self._options = options
    self._first_step, self._stride = 0, 1

  def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
    """Make this copy of the dataset give one worker's steps: `sl.start`, and every `sl.step`-th after it.

    Grain calls this in each worker process: `sl.step` is the number of workers.
    """
    if sequential_slice:
      raise ValueError("workers take turns at steps: Grain's sequential slices cannot be used here")
    self._first_step, self._stride = sl.start or 0, sl.step or 1

  def __iter__(self) -> StreamIterator:
    stream = open_stream(self._plan, self._cache_dirs, **self._options)
    return StreamIterator(stream, first_step=self._first_step, stride=self._stride)


class StreamIterator(grain.DatasetIterator):
  """A stream as a Grain iterator, whose state is the stream's."""

  def __init__(self, stream: Stream, *, first_step: int, stride: int):
    super().__init__()
    self._stream = stream
    self._stride = stride
    self._stream.seek(first_step)

  def __next__(self) -> Rows:
    self._assert_not_closed()
    return self._stream.next_in_turn(self._stride)

  def get_state(self) -> dict[str, Any]:
    """Return the stream's state."""
    return self._stream.get_state()

  def set_state(self, state: dict[str, Any]) -> None:
    """Set the stream's state."""
    self._stream.set_state(state)

  def close(self) -> None:
    """Stop the stream's threads."""
    super().close()
    self._stream.close()


class PlanSelectionMap(DatasetSelectionMap):
  """The example and cache of each row of a plan's batches, with rows numbered through the steps.

  For `grain.MapDataset.select_from_datasets(datasets, PlanSelectionMap(plan, caches))`, where dataset k
  is `grain.MapDataset.source(caches[k])` or made of it one to one.

  Args:
    plan: the plan.
    caches: in the order of the datasets.
    num_steps: number of the dataset's steps; by default all whole batches of a plan that ends.

  Raises:
    AnystepError: 78 `num_steps` where it is needed and not given, or the plan ends before; `unit_tables` for
      a plan that packs or filters.
  """

  def __init__(self, plan: Plan, caches: list[Cache], *, num_steps: int | None = None):
    whole_steps = plan.num_steps
    if whole_steps and (plan.batch(whole_steps - 1).task == PADDING_TASK).any():
      whole_steps -= 1
    if num_steps is None:
      num_steps = whole_steps
    if num_steps is None or (whole_steps is not None and num_steps > whole_steps):
      raise AnystepError(
        ExitCode.CONFIG,
        "num_steps",
        expected="a number of steps" if whole_steps is None else f"at most {whole_steps} whole batches",
        got=num_steps,
        fix="give num_steps, or a plan with num_epochs",
      )
    by_name: Mapping[str, Cache] = {cache.manifest.task: cache for cache in caches}
    self._plan = plan.on_caches(by_name)
    if self._plan.unit_tables:
      raise AnystepError(
        ExitCode.CONFIG,
        "unit_tables",
        expected="a plan whose rows are the caches' examples, each one",
        got=f"packing {plan.packing}, unit tables of {', '.join(sorted(self._plan.unit_tables))}",
        fix="use StreamDataset, which packs and filters too",
      )
    self._caches = [by_name[name] for name in plan.task_names]
    self._dataset_of = np.array([caches.index(by_name[name]) for name in plan.task_names])
    starts = [min(segment.start_step, num_steps) for segment in plan.segments] + [num_steps]
    sizes = [segment.batch_size for segment in plan.segments]
    self._start_steps, self._sizes = np.array(starts), np.array(sizes)
    self._first_rows = np.concatenate([[0], np.cumsum(np.diff(self._start_steps) * self._sizes)])
    self._at = functools.lru_cache(_HELD_STEPS)(self._batch)

  def __reduce__(self) -> tuple[Any, ...]:
    caches = [self._caches[k] for k in np.argsort(self._dataset_of)]
    return functools.partial(type(self), num_steps=int(self._start_steps[-1])), (self._plan, caches)

  def __repr__(self) -> str:
    return f"PlanSelectionMap(plan_sha256={self._plan.sha256!r}, rows={len(self)})"

  def __len__(self) -> int:
    return int(self._first_rows[-1])

  def __getitem__(self, index: int) -> tuple[int, int]:
    """Return (dataset, index in it) of a row."""
    if not 0 <= index < len(self):
      raise IndexError(f"{self} has no row {index}")
    segment = int(np.searchsorted(self._first_rows, index, side="right")) - 1
    steps, row = divmod(index - int(self._first_rows[segment]), int(self._sizes[segment]))
    datasets, indices = self._at(int(self._start_steps[segment]) + steps)
    return int(datasets[row]), int(indices[row])

  def _batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    batch = self._plan.batch(step)
    indices = np.empty_like(batch.task)
    for k in np.unique(batch.task).tolist():
      of_task = batch.task == k
      indices[of_task] = self._caches[k].index_of(batch.shard[of_task], batch.place[of_task])
    return self._dataset_of[batch.task], indices
