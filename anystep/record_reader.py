"""The records of a plan's rows, each block read once where the budget allows."""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Mapping

import numpy as np

from anystep.cache import Cache
from anystep.epochs import EpochPolicy, Turns
from anystep.plan import Plan
from anystep.read_pool import held_bytes

_log = logging.getLogger("anystep")
_owners = itertools.count()

# Of the pool's budget, what one reader plans to hold; the rest is for the indexes of open files and others.
_PLANNED_SHARE = 0.7
# Where not all files stay open, a file that is opened gives several blocks.
_MAX_BLOCKS_AHEAD = 16


_WindowKey = tuple[int, int, int, int]  # task, epoch, shard, first turn


class _Window:
  """Records in the order of their turns, and how many of them nobody asked for yet."""

  __slots__ = ("left", "records")

  def __init__(self, records: list[bytes]):
    self.records = records
    self.left = len(records)


class RecordReader:
  """Reads units of a plan, ahead by *windows*: turns of one shard that follow each other in an epoch.

  A shard gives its records in its own order, turn by turn. So what is read for one turn, a block, serves
  the turns that follow; it is held until each was asked for. A window is a block; several, where not all
  files can stay open; a part of one, read again for each part, where the budget does not hold a block of
  every shard. Under the policy `global` a shard's turns do not follow each other: whole blocks are held
  if they all fit, else single records are read.

  Thread-safe.

  Args:
    plan: on its caches.
    caches: by task name; of several pools, the first task's holds what is read ahead.
    shards_touched: by task name, how many shards the wanted rows come from within an epoch; by default all.
  """

  def __init__(
    self, plan: Plan, caches: Mapping[str, Cache], *, shards_touched: Mapping[str, int] | None = None
  ):
    self._order = plan.unit_order
    self._caches = [caches[name] for name in plan.task_names]
    self._pool = self._caches[0].pool
    self._owner = next(_owners)
    self._lock = threading.Lock()
    self._first_blocks: dict[tuple[int, int, int], list[bytes]] = {}
    manifests = [cache.manifest for cache in self._caches]
    self._is_global = plan.epoch_policy is EpochPolicy.GLOBAL
    touched = [m.num_shards if shards_touched is None else shards_touched[m.task] for m in manifests]
    self._shards_touched = np.maximum(touched, 1)
    self._block_records = np.array([m.block_records for m in manifests], np.int64)
    self._block_turns = np.minimum(self._block_records, [m.shard_records.max() for m in manifests])
    # Records to be held so that no block is read twice, and the bytes of one, in its file and in memory.
    num_examples = np.array([m.num_examples for m in manifests], np.int64)
    self._wanted = np.minimum(self._shards_touched * self._block_turns, num_examples)
    if self._is_global:
      self._wanted = num_examples
    file_bytes = np.array([sum(file.bytes for file in m.record_files) for m in manifests])
    self._file_bytes = file_bytes / num_examples + held_bytes([b""])
    self._record_bytes = np.zeros(len(manifests))
    # Turns in a window, by task; 0 where no record was seen yet, 1 for single records.
    self._window_turns = np.zeros(len(manifests), np.int64)

  def read(self, task: np.ndarray, unit: np.ndarray) -> list[bytes]:
    """Serialized records of units, in their order.

    Args:
      task: places among the plan's task names, `(rows,)`.
      unit: `(rows,)`.

    Raises:
      AnystepError: 65 where a file is not what was written, 74 where it cannot be read.
    """
    turns = self._order.turns(task, unit)
    with self._lock:
      new = np.unique(task[self._window_turns[task] == 0]).tolist()
      for k in new:
        self._see(k, turns, task)
      if new:
        self._choose_windows(new)
      if self._is_global:
        return self._read_global(task, turns)
      start, stop = self._windows(task, turns)
      keys = list(
        zip(task.tolist(), turns.epochs.tolist(), turns.shards.tolist(), start.tolist(), strict=True)
      )
      row_of = {key: row for row, key in enumerate(keys)}
      windows = {key: self._pool.get((self._owner, key)) for key in row_of}
      missing = [key for key, window in windows.items() if window is None]
      if missing:
        windows |= self._read_windows(missing, [int(stop[row_of[key]]) for key in missing])
      read_now = set(missing)
      places = (turns.turns - start).tolist()
      records = [windows[key].records[place] for key, place in zip(keys, places, strict=True)]
      for key, count in collections.Counter(keys).items():
        window = windows[key]
        window.left -= count
        if window.left <= 0:
          self._pool.drop((self._owner, key))
        elif key in read_now:
          # Not sooner: windows that one batch uses up would push out those that later ones need.
          self._pool.hold((self._owner, key), window, held_bytes(window.records))
      return records

  def close(self) -> None:
    """Lets go of what is held."""
    with self._lock:
      self._first_blocks.clear()
      self._pool.drop_where(lambda key: key[0] == self._owner)

  def _windows(self, task: np.ndarray, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
    """First turn, and that after the last, of the windows that turns are in, `(rows,)` each."""
    size, block_records = self._window_turns[task], self._block_records[task]
    block_start = turns.turns - turns.turns % block_records
    in_block = size < block_records
    origin = np.where(in_block, block_start, 0)
    start = turns.turns - (turns.turns - origin) % size
    stop = np.minimum(start + size, self._order.shard_sizes(task, turns.shards))
    return start, np.where(in_block, np.minimum(stop, block_start + block_records), stop)

  def _read_windows(self, keys: list[_WindowKey], stops: list[int]) -> dict[_WindowKey, _Window]:
    """Reads windows from their files."""
    task, epochs, shards, starts = (np.array(column, np.int64) for column in zip(*keys, strict=True))
    sizes = np.array(stops) - starts
    first = np.cumsum(sizes) - sizes
    turns = Turns(
      np.repeat(epochs, sizes),
      np.repeat(shards, sizes),
      np.arange(sizes.sum()) - np.repeat(first - starts, sizes),
    )
    places = self._order.places(np.repeat(task, sizes), turns)
    blocks, places_in_block = np.divmod(places, np.repeat(self._block_records[task], sizes))
    windows = {}
    for key, begin, end in zip(keys, first.tolist(), (first + sizes).tolist(), strict=True):
      read = self._read_blocks(key[0], key[2], np.unique(blocks[begin:end]).tolist())
      own = zip(blocks[begin:end].tolist(), places_in_block[begin:end].tolist(), strict=True)
      windows[key] = _Window([read[block][place] for block, place in own])
    return windows

  def _read_blocks(self, k: int, shard: int, blocks: list[int]) -> dict[int, list[bytes]]:
    read = {b: self._first_blocks.pop((k, shard, b)) for b in blocks if (k, shard, b) in self._first_blocks}
    rest = [block for block in blocks if block not in read]
    return read | dict(zip(rest, self._caches[k].read_blocks(shard, rest), strict=True))

  def _read_global(self, task: np.ndarray, turns: Turns) -> list[bytes]:
    places = self._order.places(task, turns)
    records = np.empty(len(task), object)
    for k in np.unique(task).tolist():
      rows = np.nonzero(task == k)[0]
      if self._window_turns[k] > 1:
        records[rows] = self._read_held(k, turns.shards[rows], places[rows])
        continue
      for shard in np.unique(turns.shards[rows]).tolist():
        own = rows[turns.shards[rows] == shard]
        records[own] = self._caches[k].read_single(shard, places[own].tolist())
    return records.tolist()

  def _read_held(self, k: int, shards: np.ndarray, places: np.ndarray) -> list[bytes]:
    """Records of blocks that are held from now on, as long as the pool has room."""
    blocks, places_in_block = np.divmod(places, self._block_records[k])
    keys = list(zip(shards.tolist(), blocks.tolist(), strict=True))
    held = {}
    for shard, block in dict.fromkeys(keys):
      key = (self._owner, (k, shard, block))
      records = self._pool.get(key)
      if records is None:
        records = self._read_blocks(k, shard, [block])[block]
        self._pool.hold(key, records, held_bytes(records))
      held[shard, block] = records
    return [held[key][place] for key, place in zip(keys, places_in_block.tolist(), strict=True)]

  def _see(self, k: int, turns: Turns, task: np.ndarray) -> None:
    """Reads the first block that is wanted of a task, to know how large its records are."""
    row = np.nonzero(task == k)[0][:1]
    (place,) = self._order.places(k, Turns(*(column[row] for column in turns))).tolist()
    shard, number = int(turns.shards[row[0]]), place // int(self._block_records[k])
    (block,) = self._caches[k].read_blocks(shard, [number])
    self._first_blocks[k, shard, number] = block
    self._record_bytes[k] = held_bytes(block) / len(block)

  def _choose_windows(self, tasks: list[int]) -> None:
    """Decides the windows of tasks of which a block was seen."""
    planned_bytes = self._pool.budget_bytes * _PLANNED_SHARE
    # What nothing was seen of yet is to its files as what was seen is to those.
    seen = self._record_bytes > 0
    growth = (self._record_bytes * self._wanted)[seen].sum() / (self._file_bytes * self._wanted)[seen].sum()
    needs = np.where(seen, self._record_bytes, growth * self._file_bytes) * self._wanted
    ahead = planned_bytes / needs.sum()
    room = needs if ahead >= 1 else _shared_out(planned_bytes, needs)
    for k in tasks:
      if self._is_global:
        self._window_turns[k] = self._block_records[k] if room[k] == needs[k] else 1
        if self._window_turns[k] == 1:
          self._first_blocks = {key: block for key, block in self._first_blocks.items() if key[0] != k}
      elif room[k] == needs[k]:
        few_files = self._shards_touched.sum() > self._pool.open_files
        blocks = int(ahead * self._block_turns[k]) // int(self._block_records[k]) if few_files else 1
        self._window_turns[k] = self._block_records[k] * max(min(blocks, _MAX_BLOCKS_AHEAD), 1)
      else:
        self._choose_part(k, room_bytes=room[k], needed_bytes=needs[k])

  def _choose_part(self, k: int, *, room_bytes: float, needed_bytes: float) -> None:
    """Decides a window that is less than a block: of those that fit, the shortest that costs no more."""
    block_turns = int(self._block_turns[k])
    readings = -(-block_turns // max(int(block_turns * room_bytes / needed_bytes), 1))
    self._window_turns[k] = -(-block_turns // readings)
    if readings > 1:
      _log.warning(
        "%s: a block of each of %d shards, %d bytes or so, does not fit in the task's %d bytes of the read"
        " budget of %d: every block is read %d times. Raise it, or cache with a smaller --block_records.",
        self._caches[k].manifest.task,
        self._shards_touched[k],
        needed_bytes,
        room_bytes,
        self._pool.budget_bytes,
        readings,
      )


def _shared_out(total: float, needs: np.ndarray) -> np.ndarray:
  """Shares of less than all need: who needs little gets it, and what that leaves is the others'.

  >>> _shared_out(90, np.array([10, 100, 50])).tolist()
  [10.0, 40.0, 40.0]
  """
  shares = np.zeros(len(needs))
  for place, k in enumerate(np.argsort(needs).tolist()):
    shares[k] = min(needs[k], (total - shares.sum()) / (len(needs) - place))
  return shares
