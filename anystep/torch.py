"""A plan's batches as PyTorch datasets. Needs torch, which the library does not install.

    loader = DataLoader(StreamDataset(plan, "cache"), batch_size=None, num_workers=4)

The datasets' items are whole batches, so loaders take `batch_size=None`. docs/pytorch.md has the rest.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode, make_package_error
from anystep.features.converters import Rows
from anystep.plans.plan import Plan
from anystep.plans.schedule import checked_step
from anystep.plans.wanted_rows import rows_by_batch_size
from anystep.streams.stream import Stream, open_stream

try:
  import torch
  from torch import distributed
  from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ModuleNotFoundError as error:
  if error.name != "torch":
    raise
  expected = "PyTorch, for anystep.torch"
  raise make_package_error(error, expected=expected, package="'anystep[torch]'") from error

__all__ = ["StepDataset", "StreamDataset", "StreamIterator", "rank_rows", "to_tensors"]

# torch computes little with the unsigned ones, and its losses and indexing take no int32.
_BECOME_INT64 = (np.dtype(np.int32), np.dtype(np.uint16), np.dtype(np.uint32))


class StreamDataset(IterableDataset):
  """A plan's batches in the order of steps, as dictionaries of tensors.

  Worker processes of a `DataLoader` divide the steps among them: of n workers, the one that the loader asks
  first makes the first step and every n-th after it. So any number of workers gives the same batches in the
  same order. Iterators have the `state_dict` and `load_state_dict` that torchdata's `StatefulDataLoader` asks
  for.

  Args:
    plan, cache_dirs: as `anystep.open_stream` takes them.
    start_step: the first step. All that a resumed run needs: it may have another number of workers and ranks.
    rows: as `open_stream` takes them; by default `rank_rows()`, found when the dataset is made.
    options: further keyword arguments of `open_stream`.

  Raises:
    AnystepError: 78 `rows`, `process_group`; as `anystep.open_stream` when batches are read.
    ValueError, TypeError: for a start_step that is no step.
  """

  def __init__(self, plan: Plan, cache_dirs: Any, *, start_step: int = 0, rows: Any = None, **options: Any):
    super().__init__()
    self._plan = plan
    self._cache_dirs = cache_dirs
    self._start_step = checked_step(start_step)
    self._options = {**options, "rows": _checked_rows(rows, plan)}

  def __len__(self) -> int:
    """Return the number of steps from `start_step` on.

    Raises:
      TypeError: if the plan has no end.
    """
    return max(_count_steps(self._plan) - self._start_step, 0)

  def __iter__(self) -> StreamIterator:
    worker = get_worker_info()
    number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
    stream = open_stream(self._plan, self._cache_dirs, **self._options)
    return StreamIterator(stream, first_step=self._start_step + number, num_workers=num_workers)


class StreamIterator(Iterator[dict[str, Any]]):
  """Iterator of a worker's batches, whose state is the stream's: the next step."""

  def __init__(self, stream: Stream, *, first_step: int, num_workers: int):
    self._stream = stream
    self._num_workers = num_workers
    self._stream.seek(first_step)

  def __next__(self) -> dict[str, Any]:
    return to_tensors(self._stream.next_in_turn(self._num_workers))

  def state_dict(self) -> dict[str, int]:
    """Return the stream's state."""
    return self._stream.get_state()

  def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
    """Set the stream's state.

    Raises:
      AnystepError: 76 `stream_state`.
    """
    self._stream.set_state(state_dict)

  def close(self) -> None:
    """Stop the stream's threads."""
    self._stream.close()


class StepDataset(Dataset):
  """A plan's batches by step: item s is the batch of step s, as a dictionary of tensors.

  A loader's `sampler` says which steps, such as `range(start_step, len(dataset))`.

  Args:
    plan, cache_dirs, rows, options: as for `StreamDataset`.

  Raises:
    AnystepError: as `StreamDataset`.
  """

  def __init__(self, plan: Plan, cache_dirs: Any, *, rows: Any = None, **options: Any):
    self._plan = plan
    self._cache_dirs = cache_dirs
    self._options = {"prefetch_batches": 0, **options, "rows": _checked_rows(rows, plan)}
    self._stream: Stream | None = None

  def __len__(self) -> int:
    """Return the number of steps.

    Raises:
      TypeError: if the plan has no end.
    """
    return _count_steps(self._plan)

  def __getitem__(self, step: int) -> dict[str, Any]:
    """Return the batch of a step.

    Raises:
      IndexError: if the plan has no such step.
    """
    step, num_steps = operator.index(step), self._plan.num_steps
    if step < 0 or (num_steps is not None and step >= num_steps):
      steps = "without an end" if num_steps is None else f"of {num_steps} steps"
      raise IndexError(f"step {step} of a plan {steps}")
    if self._stream is None:
      self._stream = open_stream(self._plan, self._cache_dirs, **self._options)
    return to_tensors(self._stream.batch(step))

  def __getstate__(self) -> dict[str, Any]:
    # Each worker process opens a stream of its own.
    return {**self.__dict__, "_stream": None}


def rank_rows() -> tuple[int, int] | slice:
  """Return (rank, number of ranks) of this process in torch.distributed's default group; else all rows.

  Ranks that share a batch, as those of tensor parallelism do, take explicit `rows` instead: (rank, number of
  ranks) among those that have data of their own.

  Raises:
    AnystepError: 78 `process_group` if the environment names several ranks (WORLD_SIZE, as torchrun sets it)
      and there is no group yet: every rank would read all rows.
  """
  if distributed.is_available() and distributed.is_initialized():
    return distributed.get_rank(), distributed.get_world_size()
  world_size = os.environ.get("WORLD_SIZE", "1")
  if world_size != "1":
    raise AnystepError(
      ExitCode.CONFIG,
      "process_group",
      expected="torch.distributed's process group, which tells each rank its rows",
      got=f"WORLD_SIZE={world_size} and no group",
      fix="call torch.distributed.init_process_group before, or give rows=(rank, number of ranks)",
    )
  return slice(None)


def to_tensors(batch: Rows) -> dict[str, Any]:
  """Return a batch with tensors in place of its arrays.

  int32, uint16 and uint32 become int64, and every other dtype is the same in torch. Features that no tensor
  holds stay as they are: texts, which are arrays of objects, and `Ragged` features.

  Args:
    batch: features by name, as a stream gives them.

  Returns:
    Features by name. Tensors share the arrays' memory where the dtype is the same.
  """
  return {name: _to_tensor(values) for name, values in batch.items()}


def _to_tensor(values: Any) -> Any:
  if not isinstance(values, np.ndarray) or values.dtype.hasobject:
    return values
  if values.dtype in _BECOME_INT64:
    return torch.from_numpy(values.astype(np.int64))
  if values.dtype.name == "bfloat16":
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
  return torch.from_numpy(values)


def _checked_rows(rows: Any, plan: Plan) -> Any:
  """Return the rows to read of each batch, refused here rather than in a worker process."""
  if rows is None:
    rows = rank_rows()
  elif not isinstance(rows, (slice, tuple, np.ndarray)):
    # An iterator gives its rows only once, and no iterator goes to a worker process.
    rows = list(rows)
  rows_by_batch_size(rows, {segment.batch_size for segment in plan.segments})
  return rows


def _count_steps(plan: Plan) -> int:
  """Return a plan's number of steps."""
  if plan.num_steps is None:
    raise TypeError(
      "a plan without num_epochs has no last step and so no len(): iterate it, or give a sampler of steps"
      " such as itertools.count(start_step)"
    )
  return plan.num_steps
