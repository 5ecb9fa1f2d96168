"""The reader of a plan's records, which reads each block once where the budget allows, and fetches ahead."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from anystep.caches.cache import Cache
from anystep.errors import AnystepError
from anystep.forks import start_anew_in_children
from anystep.order.epochs import EpochPolicy, Turns, number_rows
from anystep.plans.plan import BatchRows, Plan
from anystep.streams.gathering import (
  UnitRecords,
  WindowRows,
  gather_single_records,
  gather_units,
  split_by_window,
)
from anystep.streams.window_sizes import WindowSizes
from anystep.streams.windows import Window, WindowKey, WindowReader

# A stream fetches so many rows ahead from stores at most, and so many chunks: half a second of the fastest
# stream, or what the budget has room for.
_MAX_ROWS_AHEAD = 1 << 17
_CHUNKS_AHEAD = 4
_NO_NUMBERS = np.zeros(0, np.int64)
_owners = itertools.count()
# Tasks and units of a step's rows, and which rows are no padding; None where all are.
StepUnits: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray | None]


class RecordReader:
  """Reads units of a plan, ahead by *windows*: turns of one shard that follow each other in an epoch.

  A shard gives its records in its own order, turn by turn. So the block that is read for one turn serves the
  turns that follow; a window is held until each of its turns was asked for. `WindowSizes` chooses how long
  windows are. Under the policy `global` a shard's turns do not follow each other: whole blocks are held if
  they all fit, else single records are read.

  Thread-safe.

  Args:
    plan: on its caches.
    caches: by task name; of several pools, the first task's holds what is read ahead.
    shards_touched: by task name, how many shards the wanted rows come from within an epoch; by default all.

  Attributes:
    features: names of the features that some task's units are packed by, the columns of
      `UnitRecords.lengths`.
    is_remote: whether some cache is on a store.
    fetcher: fetches from stores, for all readers of a pool; None on local disks.
  """

  def __init__(
    self, plan: Plan, caches: Mapping[str, Cache], *, shards_touched: Mapping[str, int] | None = None
  ):
    in_order = [caches[name] for name in plan.task_names]
    touched = {name: cache.manifest.num_shards for name, cache in caches.items()} | dict(shards_touched or {})
    self._order = plan.unit_order
    self._pool = in_order[0].pool
    self._is_global = plan.epoch_policy is EpochPolicy.GLOBAL
    self._owner = next(_owners)
    self._sizes = WindowSizes(plan, in_order, shards_touched=[touched[name] for name in plan.task_names])
    self._windows = WindowReader(plan, in_order, owner=self._owner)
    self.features = self._windows.features
    self.is_remote = self._windows.is_remote
    self.fetcher = self._pool.fetcher if self.is_remote else None
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Forget what was read and nobody asked for yet, as a forked process must."""
    self._lock = threading.Lock()
    self._windows.forget()

  def read(self, task: np.ndarray, unit: np.ndarray) -> UnitRecords:
    """Return the records of units, in their order.

    Args:
      task: places among the plan's task names, `(rows,)`.
      unit: `(rows,)`.

    Raises:
      AnystepError: 65 where a file is not what was written, 74 where it cannot be read.
    """
    turns = self._order.turns(task, unit)
    where = BatchRows(task, unit, *turns)
    with self._lock:
      self._choose_sizes(task, turns)
      if self._is_global:
        parts = list(self._read_global(task, turns))
      else:
        windows, window_of, within = self._read_turns(task, turns)
        if not self._windows.has_tables:
          return gather_single_records(where, windows, window_of, within)
        parts = split_by_window(windows, window_of, within)
    return gather_units(where, parts, num_features=len(self.features) if self._windows.has_tables else None)

  def fetch(self, task: np.ndarray, unit: np.ndarray) -> int:
    """Have the records of units fetched from stores ahead of need; do nothing on local disks.

    Returns:
      The number of bytes that were not fetched before.

    Raises:
      AnystepError, OSError: as `read`, for what has to be opened.
    """
    if not self.is_remote or not len(task):
      return 0
    turns = self._order.turns(task, unit)
    with self._lock:
      self._choose_sizes(task, turns)
      if self._is_global:
        return self._fetch_global(task, turns, self._order.places(task, turns))
      keys, stops, *_ = self._find_windows(task, turns)
      unread = [number for number, key in enumerate(keys) if self._pool.get((self._owner, key)) is None]
      return self._windows.fetch([keys[number] for number in unread], stops[unread]) if unread else 0

  def close(self) -> None:
    """Let go of what is held; a read that is going on is waited for."""
    with self._lock:
      self._windows.close()
    self._windows.release_tables()

  def _choose_sizes(self, task: np.ndarray, turns: Turns) -> None:
    """Choose the window sizes of tasks that are read for the first time, from one block of each."""
    first_turns = {}
    for k in np.unique(task[self._sizes.turns[task] == 0]).tolist():
      row = np.nonzero(task == k)[0][:1]
      first_turns[k] = Turns(*(column[row] for column in turns))
    if not first_turns:
      return
    blocks = self._windows.read_first_blocks(first_turns)
    self._sizes.choose(blocks)
    for k in blocks if self._is_global else ():
      if self._sizes.turns[k] == 1:
        self._windows.forget_task(k)

  def _read_turns(self, task: np.ndarray, turns: Turns) -> tuple[list[Window], np.ndarray, np.ndarray]:
    """Return the windows of units, and for each unit its window's number and its position there.

    The windows are taken from the pool or read; those of which no unit is left are dropped from it.
    """
    if not len(task):
      return [], _NO_NUMBERS, _NO_NUMBERS
    keys, stops, window_of, start = self._find_windows(task, turns)
    windows = [self._pool.get((self._owner, key)) for key in keys]
    missing = [k for k, window in enumerate(windows) if window is None]
    if missing:
      read = self._windows.read([keys[k] for k in missing], stops[missing])
      for k, window in zip(missing, read, strict=True):
        windows[k] = window
    read_now = set(missing)
    for k, count in enumerate(np.bincount(window_of).tolist()):
      window = windows[k]
      window.left -= count
      if window.left <= 0:
        self._pool.drop((self._owner, keys[k]))
      elif k in read_now:
        # Not sooner: windows that one batch uses up would push out those that later ones need.
        self._pool.hold((self._owner, keys[k]), window, window.held_bytes)
    return windows, window_of, turns.turns - start

  def _find_windows(
    self, task: np.ndarray, turns: Turns
  ) -> tuple[list[WindowKey], np.ndarray, np.ndarray, np.ndarray]:
    """Return the windows of units.

    Returns:
      Keys of the windows; for each the turn after its last, `(windows,) int64`; for each unit the number of
      its window and the window's first turn, `(rows,) int64` each.
    """
    start, stop = self._sizes.bounds(task, turns, self._order.shard_sizes(task, turns.shards))
    columns = (task, turns.epochs, turns.shards, start)
    _, first, window_of = np.unique(number_rows(*columns), return_index=True, return_inverse=True)
    keys: list[WindowKey] = list(zip(*(column[first].tolist() for column in columns), strict=True))
    return keys, stop[first], window_of, start

  def _read_global(self, task: np.ndarray, turns: Turns) -> Iterator[WindowRows]:
    """Read units whose places follow no order, shard by shard."""
    places = self._order.places(task, turns)
    self._fetch_global(task, turns, places)
    for k in np.unique(task).tolist():
      task_rows = np.nonzero(task == k)[0]
      hold_blocks = bool(self._sizes.turns[k] > 1)
      for shard in np.unique(turns.shards[task_rows]).tolist():
        rows = task_rows[turns.shards[task_rows] == shard]
        window = self._windows.read_units(k, shard, places[rows], hold_blocks=hold_blocks)
        yield WindowRows(rows, window, np.arange(len(rows)))

  def _fetch_global(self, task: np.ndarray, turns: Turns, places: np.ndarray) -> int:
    """Have units whose places follow no order fetched from stores; return the number of new bytes."""
    num_bytes = 0
    for k in np.unique(task).tolist() if self.is_remote else ():
      of_task, hold_blocks = task == k, bool(self._sizes.turns[k] > 1)
      by_shard = {
        shard: places[of_task & (turns.shards == shard)]
        for shard in np.unique(turns.shards[of_task]).tolist()
      }
      num_bytes += self._windows.fetch_units(k, by_shard, hold_blocks=hold_blocks)
    return num_bytes


def join_steps(units: Sequence[StepUnits]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
  """Return tasks and units of some steps' rows that are no padding, and by step which those are."""
  real = [np.ones(len(task), bool) if is_real is None else is_real for task, _, is_real in units]
  all_real = np.concatenate(real)
  task, unit = (np.concatenate([columns[k] for columns in units])[all_real] for k in range(2))
  return task, unit, real


class FetchAhead:
  """Has the records of later steps fetched from stores, as far as the budget has room.

  Calls must not overlap.

  Args:
    reader: the stream's.
    units: returns tasks and units of the rows of a step, and which of them are no padding, `(rows,)` each;
      None where all are.
  """

  def __init__(self, reader: RecordReader, units: Callable[[int], StepUnits]):
    self._reader = reader
    self._find_units = units
    # By step, those that were found ahead.
    self._found: dict[int, StepUnits] = {}
    # Steps whose records were fetched, those that were read since among them.
    self._fetched = range(0)
    self._chunk_steps, self._chunk_bytes, self._step_rows = 1, 0, 1

  def units(self, step: int) -> StepUnits:
    """Return the units of a step, which may have been found ahead."""
    return self._found.pop(step, None) or self._find_units(step)

  def advance(self, steps: range, num_steps: int | None) -> None:
    """Have the records of some steps fetched, which are read now, and of some of the steps after these.

    Each call fetches a chunk at most, and chunks grow: the first steps wait for nothing else.

    Args:
      steps: the steps.
      num_steps: none from this step on.
    """
    fetcher = self._reader.fetcher
    if fetcher is None:
      return
    if not self._fetched.start <= steps.start <= self._fetched.stop:
      self._fetched, self._chunk_steps, self._chunk_bytes = range(steps.start, steps.start), len(steps), 0
      self._found.clear()
    self._fetched = range(steps.start, self._fetched.stop)
    if self._fetched.stop < steps.stop:
      self._fetch(steps.stop)
    rows_ahead = (self._fetched.stop - steps.stop) * self._step_rows
    if rows_ahead >= _MAX_ROWS_AHEAD or fetcher.free_bytes <= 2 * self._chunk_bytes:
      return
    stop = self._fetched.stop + self._chunk_steps
    self._chunk_bytes = self._fetch(stop if num_steps is None else min(stop, num_steps))
    # The part of the limits that the chunk took: of the number of rows or of the bytes.
    taken_part = max(
      self._chunk_steps * self._step_rows / _MAX_ROWS_AHEAD,
      self._chunk_bytes / max(fetcher.budget.ahead_bytes, 1),
    )
    if taken_part <= 0.5 / _CHUNKS_AHEAD:
      self._chunk_steps *= 2
    elif taken_part > 1 / _CHUNKS_AHEAD:
      self._chunk_steps = max(self._chunk_steps // 2, 1)

  def _fetch(self, stop: int) -> int:
    """Have the records fetched up to a step; return the number of bytes."""
    steps = range(self._fetched.stop, stop)
    self._fetched = range(self._fetched.start, stop)
    if not steps:
      return 0
    # Whoever reads these records gets the error.
    with contextlib.suppress(AnystepError, OSError):
      self._found |= {step: self._find_units(step) for step in steps}
      task, unit, _ = join_steps([self._found[step] for step in steps])
      self._step_rows = max(len(task) // len(steps), 1)
      return self._reader.fetch(task, unit)
    return 0
