"""The records of a plan's rows, each block read once where the budget allows."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.read_pool import held_bytes
from anystep.forks import start_anew_in_children
from anystep.order.epochs import EpochPolicy, Turns, number_rows
from anystep.order.packing import WINDOW_RECORDS, PackingPolicy
from anystep.plans.plan import BatchRows, Plan
from anystep.units.tables import Members, ranges

_log = logging.getLogger("anystep")
_owners = itertools.count()

# Of the pool's budget, what one reader plans to hold; the rest is for the indexes of open files and others.
_PLANNED_SHARE = 0.7
# Where not all files stay open, a file that is opened gives several blocks.
_MAX_BLOCKS_AHEAD = 16
# Packs of a window lie in parts of blocks and cost arithmetic of their own: larger windows take a fifth less.
_PACKED_BLOCKS_AHEAD = 4


_WindowKey = tuple[int, int, int, int]  # task, epoch, shard, first turn
_NONE = np.zeros(0, np.int64)


class UnitRecords(NamedTuple):
  """Serialized records of units, unit by unit.

  Attributes:
    records: every record.
    where: what each record is, with its place in its shard.
    counts: records of each unit, `(units,) int64`; None where each unit is a record.
    lengths: tokens that the plan counts on, `(records, packed features) int64`; None without unit tables.
  """

  records: list[bytes]
  where: BatchRows
  counts: np.ndarray | None = None
  lengths: np.ndarray | None = None


class _Window:
  """Units in the order of their turns, and how many of them nobody asked for yet.

  Attributes:
    records: of all units, `(records,)` objects.
    members: what the units consist of; None without unit tables, where each is a record.
    places: of the records in the shard, `(records,) int64`.
  """

  __slots__ = ("left", "members", "places", "records", "starts")

  def __init__(self, records: np.ndarray, places: np.ndarray, members: Members | None = None):
    self.records = records
    self.places = places
    self.members = members
    self.left = len(records) if members is None else len(members.counts)
    if members is not None:
      self.starts = np.cumsum(members.counts) - members.counts

  def entries(self, units: np.ndarray) -> np.ndarray:
    """Which of the records are those of some units, unit by unit."""
    return units if self.members is None else ranges(self.starts[units], self.members.counts[units])

  @property
  def held_bytes(self) -> int:
    return held_bytes(self.records.tolist())


class _Part:
  """A block whose records are in several windows, and how many of those nobody asked for yet."""

  __slots__ = ("left", "records")

  def __init__(self, records: list[bytes], left: int):
    self.records = records
    self.left = left


# Rows of a batch, where their units are, and which of the units there they are.
_RowsOfWindow = tuple[np.ndarray, _Window, np.ndarray]


class RecordReader:
  """Reads units of a plan, ahead by *windows*: turns of one shard that follow each other in an epoch.

  A shard gives its records in its own order, turn by turn. So what is read for one turn, a block, serves
  the turns that follow; it is held until each was asked for. A window is a block; several, where not all
  files can stay open or units are packs; a part of one, read again for each part, where the budget does not
  hold a block of every shard. Under the policy `global` a shard's turns do not follow each other: whole
  blocks are held if they all fit, else single records are read.

  With unit tables turns count units, whose records are in one block or in several. A block of which a
  window uses a part is held for the windows beside it.

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
    self._order = plan.unit_order
    self._caches = [caches[name] for name in plan.task_names]
    self._pool = self._caches[0].pool
    self._owner = next(_owners)
    self.start_anew()
    start_anew_in_children(self)
    self._in_units: dict[tuple[int, int], np.ndarray] = {}
    manifests = [cache.manifest for cache in self._caches]
    self._tables = [plan.unit_tables.get(name) for name in plan.task_names]
    self.features = sorted({name for table in self._tables if table for name in table.features})
    self._columns = [
      [self.features.index(name) for name in table.features] if table else [] for table in self._tables
    ]
    self._is_global = plan.epoch_policy is EpochPolicy.GLOBAL
    touched = [m.num_shards if shards_touched is None else shards_touched[m.task] for m in manifests]
    self._shards_touched = np.maximum(touched, 1)
    self._block_records = np.array([m.block_records for m in manifests], np.int64)
    shard_units = [
      t.shard_units if t else m.shard_records for t, m in zip(self._tables, manifests, strict=True)
    ]
    self._block_turns = np.minimum(self._block_records, [units.max() for units in shard_units])
    # Records to be held so that no block is read twice, and the bytes of one, in its file and in memory.
    num_examples = np.array([m.num_examples for m in manifests], np.int64)
    # A window's units have records besides in blocks that it uses a part of, best fit's anywhere in 256.
    unit_records = np.array([t.shard_records.sum() / t.num_units if t else 1 for t in self._tables])
    part_records = np.where([t is not None for t in self._tables], self._block_records, 0)
    if plan.packing is PackingPolicy.BEST_FIT:
      part_records = np.maximum(part_records, WINDOW_RECORDS)
    held_records = self._block_turns * unit_records + part_records
    self._wanted = np.minimum(self._shards_touched * held_records, num_examples)
    if self._is_global:
      self._wanted = num_examples
    file_bytes = np.array([sum(file.bytes for file in m.record_files) for m in manifests])
    self._file_bytes = file_bytes / num_examples + held_bytes([b""])
    self._record_bytes = np.zeros(len(manifests))
    # Turns in a window, by task; 0 where no record was seen yet, 1 for single records.
    self._window_turns = np.zeros(len(manifests), np.int64)

  def start_anew(self) -> None:
    """Forgets what was read and nobody asked for yet, as a forked process must."""
    self._lock = threading.Lock()
    self._first_blocks: dict[tuple[int, int, int], list[bytes]] = {}

  def read(self, task: np.ndarray, unit: np.ndarray) -> UnitRecords:
    """The records of units, in their order.

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
        parts = list(self._read_global(task, turns))
      else:
        windows, window_of, within = self._read_turns(task, turns)
        if not any(self._tables):
          return self._gathered(BatchRows(task, unit, *turns), windows, window_of, within)
        order = np.argsort(window_of, kind="stable")
        by_window = np.split(order, np.cumsum(np.bincount(window_of))[:-1]) if windows else []
        parts = [(rows, window, within[rows]) for rows, window in zip(by_window, windows, strict=True)]
    rows, held, units = zip(*parts, strict=True) if parts else ((), (), ())
    entries = [window.entries(own) for window, own in zip(held, units, strict=True)]
    members = [window.members for window in held if window.members is not None]
    order, counts = np.concatenate([_NONE, *rows]), None
    if any(self._tables):
      own_counts = [of_window.counts[own] for of_window, own in zip(members, units, strict=True)]
      of_units = np.concatenate([_NONE, *own_counts])
      counts = np.empty_like(of_units)
      counts[order] = of_units
      order = np.repeat(order, of_units)
    order = np.argsort(order, kind="stable")

    def joined(empty: np.ndarray, columns: Iterable[np.ndarray]) -> np.ndarray:
      taken = [column[own] for column, own in zip(columns, entries, strict=True)]
      return np.concatenate([empty, *taken])[order]

    where, lengths = BatchRows(task, unit, *turns), None
    if counts is not None:
      where = BatchRows(*(np.repeat(column, counts) for column in where))
      no_lengths = np.zeros((0, len(self.features)), np.int64)
      lengths = joined(no_lengths, (of_window.lengths for of_window in members))
    return UnitRecords(
      records=joined(_NONE.astype(object), (window.records for window in held)).tolist(),
      where=where._replace(place=joined(_NONE, (window.places for window in held))),
      counts=counts,
      lengths=lengths,
    )

  def _gathered(
    self, where: BatchRows, windows: list[_Window], window_of: np.ndarray, within: np.ndarray
  ) -> UnitRecords:
    """Units that are records; a mixture of many shards has about one of each window in a batch."""
    of_rows, own = [windows[k] for k in window_of.tolist()], within.tolist()
    records = [window.records[place] for window, place in zip(of_rows, own, strict=True)]
    places = [window.places[place] for window, place in zip(of_rows, own, strict=True)]
    return UnitRecords(records, where._replace(place=np.array(places, np.int64)))

  def _read_turns(self, task: np.ndarray, turns: Turns) -> tuple[list[_Window], np.ndarray, np.ndarray]:
    """Windows that hold units, the number of each unit's among them, and its place there, `(units,)` each."""
    if not len(task):
      return [], _NONE, _NONE
    start, stop = self._windows(task, turns)
    columns = (task, turns.epochs, turns.shards, start)
    _, first, window_of = np.unique(number_rows(*columns), return_index=True, return_inverse=True)
    keys: list[_WindowKey] = list(zip(*(column[first].tolist() for column in columns), strict=True))
    windows = [self._pool.get((self._owner, key)) for key in keys]
    missing = [k for k, window in enumerate(windows) if window is None]
    if missing:
      read = self._read_windows([keys[k] for k in missing], stop[first[missing]])
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

  def close(self) -> None:
    """Lets go of what is held; what is read at that moment is waited for."""
    with self._lock:
      self._first_blocks.clear()
      self._pool.drop_where(lambda key: key[0] == self._owner)
    for table in self._tables:
      if table is not None:
        table.let_go()

  def _windows(self, task: np.ndarray, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
    """First turn, and that after the last, of the windows that turns are in, `(rows,)` each."""
    size, block_records = self._window_turns[task], self._block_records[task]
    block_start = turns.turns - turns.turns % block_records
    in_block = size < block_records
    origin = np.where(in_block, block_start, 0)
    start = turns.turns - (turns.turns - origin) % size
    stop = np.minimum(start + size, self._order.shard_sizes(task, turns.shards))
    return start, np.where(in_block, np.minimum(stop, block_start + block_records), stop)

  def _read_windows(self, keys: Sequence[_WindowKey], stops: np.ndarray) -> list[_Window]:
    """Reads windows from their files."""
    task, epochs, shards, starts = np.array(keys, np.int64).T
    sizes = stops - starts
    ends = np.cumsum(sizes)
    turns = Turns(
      np.repeat(epochs, sizes),
      np.repeat(shards, sizes),
      np.arange(sizes.sum()) - np.repeat(ends - stops, sizes),
    )
    places = self._order.places(np.repeat(task, sizes), turns)
    windows = []
    for key, begin, end in zip(keys, (ends - sizes).tolist(), ends.tolist(), strict=True):
      windows.append(self._read_window(*key[:3], places[begin:end]))
    return windows

  def _read_window(self, k: int, epoch: int, shard: int, places: np.ndarray) -> _Window:
    """Units of a shard, by the blocks that they are in."""
    members = self._members(k, shard, places)
    if members is not None:
      places = members.places
    blocks, within = np.divmod(places, self._block_records[k])
    first = int(blocks[0])
    if members is None and (blocks == first).all():
      (records,) = self._read_blocks(k, shard, [first]).values()
      return _Window(_objects(records)[within], places)
    if members is None:
      read = self._read_blocks(k, shard, np.unique(blocks).tolist())
    else:
      read = self._read_parts(k, epoch, shard, blocks)
    records = [read[block][place] for block, place in zip(blocks.tolist(), within.tolist(), strict=True)]
    return _Window(_objects(records), places, members)

  def _members(self, k: int, shard: int, places: np.ndarray) -> Members | None:
    """What units of a shard consist of, lengths by the reader's features; None without unit tables."""
    if not any(self._tables):
      return None
    table = self._tables[k]
    if table is None:
      return Members(np.ones_like(places), places, np.zeros((len(places), len(self.features)), np.int64))
    members = table.members(shard, places)
    lengths = np.zeros((len(members.places), len(self.features)), np.int64)
    lengths[:, self._columns[k]] = members.lengths
    return members._replace(lengths=lengths)

  def _read_parts(self, k: int, epoch: int, shard: int, blocks: np.ndarray) -> dict[int, list[bytes]]:
    """The blocks of some records; those with records that the epoch did not yet ask for are held."""
    numbers, used = np.unique(blocks, return_counts=True)
    keys = {block: (self._owner, (k, epoch, shard, "part", block)) for block in numbers.tolist()}
    held = {block: self._pool.get(key) for block, key in keys.items()}
    read = self._read_blocks(k, shard, [block for block, part in held.items() if part is None])
    in_units = self._records_in_units(k, shard)
    parts = {}
    for block, count in zip(numbers.tolist(), used.tolist(), strict=True):
      part = held[block] or _Part(read[block], int(in_units[block]))
      part.left -= count
      parts[block] = part.records
      if part.left <= 0:
        self._pool.drop(keys[block])
      elif held[block] is None:
        self._pool.hold(keys[block], part, held_bytes(part.records))
    return parts

  def _records_in_units(self, k: int, shard: int) -> np.ndarray:
    """How many records of each block of a shard are in some unit, `(blocks,) int64`."""
    if (k, shard) not in self._in_units:
      table, records = self._tables[k], int(self._caches[k].manifest.shard_records[shard])
      places = np.arange(records) if table is None else table.kept(shard)
      num_blocks = -(-records // int(self._block_records[k]))
      self._in_units[k, shard] = np.bincount(places // self._block_records[k], minlength=num_blocks)
    return self._in_units[k, shard]

  def _read_blocks(self, k: int, shard: int, blocks: Iterable[int]) -> dict[int, list[bytes]]:
    wanted = [(k, shard, block) for block in blocks]
    read = {key[2]: self._first_blocks.pop(key) for key in wanted if key in self._first_blocks}
    rest = [block for _, _, block in wanted if block not in read]
    return read | dict(zip(rest, self._caches[k].read_blocks(shard, rest), strict=True))

  def _read_global(self, task: np.ndarray, turns: Turns) -> Iterator[_RowsOfWindow]:
    """Units whose places follow no order, by shards."""
    places = self._order.places(task, turns)
    for k in np.unique(task).tolist():
      own = np.nonzero(task == k)[0]
      for shard in np.unique(turns.shards[own]).tolist():
        rows = own[turns.shards[own] == shard]
        members = self._members(k, shard, places[rows])
        wanted = places[rows] if members is None else members.places
        if self._window_turns[k] > 1:
          records = self._read_held(k, shard, wanted)
        else:
          records = self._caches[k].read_single(shard, wanted.tolist())
        yield rows, _Window(_objects(records), wanted, members), np.arange(len(rows))

  def _read_held(self, k: int, shard: int, places: np.ndarray) -> list[bytes]:
    """Records of blocks that are held from now on, as long as the pool has room."""
    blocks, within = np.divmod(places, self._block_records[k])
    held = {}
    for block in np.unique(blocks).tolist():
      key = (self._owner, (k, shard, block))
      records = self._pool.get(key)
      if records is None:
        records = self._read_blocks(k, shard, [block])[block]
        self._pool.hold(key, records, held_bytes(records))
      held[block] = records
    return [held[block][place] for block, place in zip(blocks.tolist(), within.tolist(), strict=True)]

  def _see(self, k: int, turns: Turns, task: np.ndarray) -> None:
    """Reads the first block that is wanted of a task, to know how large its records are."""
    row = np.nonzero(task == k)[0][:1]
    places = self._order.places(k, Turns(*(column[row] for column in turns)))
    shard = int(turns.shards[row[0]])
    members = self._members(k, shard, places)
    number = int((places if members is None else members.places)[0]) // int(self._block_records[k])
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
        wanted = _MAX_BLOCKS_AHEAD if few_files else _PACKED_BLOCKS_AHEAD if self._tables[k] else 1
        blocks = int(ahead * self._block_turns[k]) // int(self._block_records[k])
        self._window_turns[k] = self._block_records[k] * max(min(blocks, wanted), 1)
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


def _objects(items: Sequence[Any]) -> np.ndarray:
  return np.fromiter(items, object, len(items))


def _shared_out(total: float, needs: np.ndarray) -> np.ndarray:
  """Shares of less than all need: who needs little gets it, and what that leaves is the others'.

  >>> _shared_out(90, np.array([10, 100, 50])).tolist()
  [10.0, 40.0, 40.0]
  """
  shares = np.zeros(len(needs))
  for place, k in enumerate(np.argsort(needs).tolist()):
    shares[k] = min(needs[k], (total - shares.sum()) / (len(needs) - place))
  return shares
