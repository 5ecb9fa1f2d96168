"""A stream of batches: what the plan says, read, transformed and converted."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from etils import epath

from anystep.cache import Cache, open_cache
from anystep.converters import FeatureConverter, PassThroughConverter, Rows
from anystep.errors import AnystepError, ExitCode
from anystep.examples import Batch, parse_examples
from anystep.plan import PADDING_TASK, BatchRows, Plan, checked_rows

STATE_VERSION = 1


class Records(NamedTuple):
  """Which records a batch of one task's examples are: `(rows,) int64` each."""

  epochs: np.ndarray
  indices: np.ndarray


class Transform(Protocol):
  """What a task's examples go through at reading: one example to one, whatever stands beside it."""

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """Transforms the examples of some rows; their random draws follow from `records`."""
    ...


def open_stream(
  plan: Plan,
  cache_dirs: epath.PathLike | Iterable[epath.PathLike] | Mapping[str, Cache],
  *,
  rows: slice | Iterable[int] | tuple[int, int] = slice(None),
  feature_converter: FeatureConverter | None = None,
  transforms: Mapping[str, Transform] | None = None,
  prefetch_batches: int = 2,
) -> Stream:
  """Opens the batches of a plan.

  Args:
    plan: which units are in which row of which step.
    cache_dirs: roots to look for the tasks' caches in, the first that has one is taken; or the caches
      themselves, by task.
    rows: the rows wanted of every batch: a slice, row numbers, or (host, host count) for a contiguous share.
    feature_converter: makes the model's features; by default features stay as the transforms leave them.
    transforms: by task name, what its examples go through at reading.
    prefetch_batches: batches made ahead in a background thread; 0 makes each when it is asked for.

  Raises:
    AnystepError: 66 and 65 as `open_cache`; 76 where a cache is not the one the plan was made for;
      78 `rows` where hosts cannot share a batch.
  """
  if isinstance(cache_dirs, Mapping):
    caches = dict(cache_dirs)
  else:
    roots = [cache_dirs] if isinstance(cache_dirs, (str, os.PathLike)) else list(cache_dirs)
    caches = {name: find_cache(roots, name, plan.split) for name in plan.tasks}
  plan.check_caches(caches)
  return Stream(
    plan,
    caches,
    rows=_row_numbers(rows, plan.segments[0].batch_size),
    feature_converter=feature_converter or PassThroughConverter(),
    transforms=transforms or {},
    prefetch_batches=prefetch_batches,
  )


def find_cache(roots: Iterable[epath.PathLike], task: str, split: str) -> Cache:
  """The task's cache in the first root that has one.

  Raises:
    AnystepError: as `open_cache`; where no root has one, that of the first root.
  """
  missing: AnystepError | None = None
  for root in roots:
    try:
      return open_cache(root, task, split)
    except AnystepError as error:
      if error.kind != "cache_missing":
        raise
      missing = missing or error
  raise missing or AnystepError(
    ExitCode.CONFIG, "cache_dirs", expected="at least one directory", got="none", fix="name a cache directory"
  )


class Stream(Iterator[Rows]):
  """An iterator of batches that starts anywhere; made by `open_stream`.

  The batch of a step depends on the plan and the step alone, so the state is the step.

  Attributes:
    plan: the plan.
    rows: the rows of each batch that this stream makes, `(rows,) int64`.
    step: the step of the batch that `next` gives.
  """

  def __init__(
    self,
    plan: Plan,
    caches: Mapping[str, Cache],
    *,
    rows: np.ndarray,
    feature_converter: FeatureConverter,
    transforms: Mapping[str, Transform],
    prefetch_batches: int,
  ):
    self.plan = plan
    self.rows = rows
    self.step = 0
    self._caches = caches
    self._feature_converter = feature_converter
    self._transforms = transforms
    self._prefetch_batches = prefetch_batches
    self._pending: collections.deque[concurrent.futures.Future[Rows]] = collections.deque()
    self._executor: concurrent.futures.ThreadPoolExecutor | None = None

  def __next__(self) -> Rows:
    num_steps = self.plan.num_steps
    if num_steps is not None and self.step >= num_steps:
      self.close()
      raise StopIteration
    batch = self._next_prefetched(num_steps) if self._prefetch_batches else self.batch(self.step)
    self.step += 1
    return batch

  def _next_prefetched(self, num_steps: int | None) -> Rows:
    if self._executor is None:
      self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="anystep-stream")
    stop = self.step + self._prefetch_batches + 1
    for step in range(self.step + len(self._pending), stop if num_steps is None else min(stop, num_steps)):
      self._pending.append(self._executor.submit(self.batch, step))
    try:
      batch = self._pending[0].result()
    except BaseException:
      # Who asks again gets this step, made anew, and none of those behind it in its place.
      self.seek(self.step)
      raise
    self._pending.popleft()
    return batch

  def batch(self, step: int) -> Rows:
    """The batch of any step, whatever was read before."""
    planned = self.plan.batch(step, self.rows)
    return self.convert(self.examples(planned), planned)

  def examples(self, planned: BatchRows) -> Batch:
    """The examples of planned rows as the transforms leave them, padding rows left out."""
    real = BatchRows(*(column[planned.task != PADDING_TASK] for column in planned))
    ((name, cache),) = self._caches.items()
    batch: Batch = parse_examples(cache.read_records(real.shard, real.place), cache.manifest.features)
    if name in self._transforms:
      indices = real.place * cache.manifest.num_shards + real.shard
      batch = self._transforms[name](batch, Records(real.epoch, indices))
    return batch

  def convert(self, examples: Batch, planned: BatchRows) -> Rows:
    """The model's features of those rows, with zeros in padding rows."""
    converted = self._feature_converter(examples, self.plan.feature_lengths)
    real = planned.task != PADDING_TASK
    return converted if real.all() else {name: _spread(values, real) for name, values in converted.items()}

  def seek(self, step: int) -> None:
    """Makes `step` the next one."""
    for future in self._pending:
      future.cancel()
    self._pending.clear()
    self.step = step

  def get_state(self) -> dict[str, int]:
    """Where the stream stands."""
    return {"version": STATE_VERSION, "step": self.step}

  def set_state(self, state: Mapping[str, int]) -> None:
    """Goes where another stream of the same plan stood.

    Raises:
      AnystepError: 76 `stream_state` for a state of another form.
    """
    step = state.get("step")
    known = state.keys() == {"version", "step"} and state["version"] == STATE_VERSION
    if not known or type(step) is not int or step < 0:
      raise AnystepError(
        ExitCode.MISMATCH,
        "stream_state",
        expected={"version": STATE_VERSION, "step": "an int >= 0"},
        got=dict(state),
        fix="restore a state that this version's get_state made",
      )
    self.seek(step)

  def close(self) -> None:
    """Stops the background thread; asking for another batch would start one again."""
    self.seek(self.step)
    if self._executor is not None:
      self._executor.shutdown(wait=True)
      self._executor = None

  def __enter__(self) -> Stream:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()


def _spread(values: np.ndarray, real: np.ndarray) -> np.ndarray:
  spread = np.zeros((len(real), *values.shape[1:]), values.dtype)
  spread[real] = values
  return spread


def _row_numbers(rows: slice | Iterable[int] | tuple[int, int], batch_size: int) -> np.ndarray:
  every_row = np.arange(batch_size)
  if isinstance(rows, slice):
    return every_row[rows]
  if isinstance(rows, tuple):
    host, host_count = rows
    if host_count < 1 or batch_size % host_count or not 0 <= host < host_count:
      raise AnystepError(
        ExitCode.CONFIG,
        "rows",
        expected=f"(host, host count) with a count that divides {batch_size} rows",
        got=rows,
        fix=f"use a number of hosts among {[n for n in range(1, batch_size + 1) if batch_size % n == 0]}",
      )
    return every_row.reshape(host_count, -1)[host]
  return checked_rows(np.asarray(list(rows), np.int64), batch_size)
