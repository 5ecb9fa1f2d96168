"""The reader of a plan's records, which reads each block once where the budget allows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping

import numpy as np

from anystep.caches.cache import Cache
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

_NO_NUMBERS = np.zeros(0, np.int64)
_owners = itertools.count()


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

  def close(self) -> None:
    """Let go of what is held; a read that is going on is waited for."""
    with self._lock:
      self._windows.close()
    self._windows.release_tables()

  def _choose_sizes(self, task: np.ndarray, turns: Turns) -> None:
    """Choose the window sizes of tasks that are read for the first time, from one block of each."""
    blocks = {}
    for k in np.unique(task[self._sizes.turns[task] == 0]).tolist():
      row = np.nonzero(task == k)[0][:1]
      blocks[k] = self._windows.read_first_block(k, Turns(*(column[row] for column in turns)))
    if not blocks:
      return
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
    start, stop = self._sizes.bounds(task, turns, self._order.shard_sizes(task, turns.shards))
    columns = (task, turns.epochs, turns.shards, start)
    _, first, window_of = np.unique(number_rows(*columns), return_index=True, return_inverse=True)
    keys: list[WindowKey] = list(zip(*(column[first].tolist() for column in columns), strict=True))
    windows = [self._pool.get((self._owner, key)) for key in keys]
    missing = [k for k, window in enumerate(windows) if window is None]
    if missing:
      read = self._windows.read([keys[k] for k in missing], stop[first[missing]])
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

  def _read_global(self, task: np.ndarray, turns: Turns) -> Iterator[WindowRows]:
    """Read units whose places follow no order, shard by shard."""
    places = self._order.places(task, turns)
    for k in np.unique(task).tolist():
      task_rows = np.nonzero(task == k)[0]
      for shard in np.unique(turns.shards[task_rows]).tolist():
        rows = task_rows[turns.shards[task_rows] == shard]
        hold_blocks = bool(self._sizes.turns[k] > 1)
        window = self._windows.read_units(k, shard, places[rows], hold_blocks=hold_blocks)
        yield WindowRows(rows, window, np.arange(len(rows)))
