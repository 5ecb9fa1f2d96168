"""Windows: units of a shard that are read together, and their reading from blocks of the shard's file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.read_pool import held_bytes
from anystep.order.epochs import Turns
from anystep.plans.plan import Plan
from anystep.units.tables import Members, ranges

WindowKey = tuple[int, int, int, int]  # task, epoch, shard, first turn
# Windows whose blocks are fetched together, before the budget is looked at.
_WINDOWS_TOGETHER = 32


class Window:
  """Units in the order of their turns, and how many of them nobody asked for yet.

  Args:
    records: of all units, one after the other.
    places: of the records in the shard, `(records,) int64`.
    members: the records of each unit; None without unit tables, where each unit is a record.

  Attributes:
    records: `(records,)` objects.
    left: number of units that nobody asked for yet.
  """

  __slots__ = ("_starts", "left", "members", "places", "records")

  def __init__(self, records: Sequence[bytes] | np.ndarray, places: np.ndarray, members: Members | None):
    self.records = records if isinstance(records, np.ndarray) else _to_objects(records)
    self.places = places
    self.members = members
    self.left = len(records) if members is None else len(members.counts)
    if members is not None:
      self._starts = np.cumsum(members.counts) - members.counts

  def entries(self, units: np.ndarray) -> np.ndarray:
    """Return positions of the records of some units, unit by unit, `(records,) int64`."""
    return units if self.members is None else ranges(self._starts[units], self.members.counts[units])

  @property
  def held_bytes(self) -> int:
    """Memory that the records take."""
    return held_bytes(self.records.tolist())


class _SharedBlock:
  """A block whose records are in several windows, and how many of those nobody asked for yet."""

  __slots__ = ("left", "records")

  def __init__(self, records: list[bytes], left: int):
    self.records = records
    self.left = left


class WindowReader:
  """Reads windows of a plan's units; units of a unit table may have records in one block or in several.

  A block of which a window uses a part is held by the pool for the windows beside it. Calls must not overlap.

  Args:
    plan: on its caches.
    caches: of the plan's tasks, in name order; the first one's pool holds blocks.
    owner: begins the pool's keys; no other object has it.

  Attributes:
    has_tables: whether some task has a unit table.
    is_remote: whether some cache is on a store.
    features: names of the features that some task's units are packed by, the columns of `Members.lengths`.
  """

  def __init__(self, plan: Plan, caches: Sequence[Cache], *, owner: int):
    self._order = plan.unit_order
    self._caches = caches
    self._pool = caches[0].pool
    self._owner = owner
    self._tables = [plan.unit_tables.get(name) for name in plan.task_names]
    self.has_tables = any(self._tables)
    self.features = sorted({name for table in self._tables if table for name in table.features})
    self._columns = [
      [self.features.index(name) for name in table.features] if table else [] for table in self._tables
    ]
    self._block_records = [cache.manifest.block_records for cache in caches]
    self.is_remote = any(cache.files.are_remote for cache in caches)
    self._records_in_units: dict[tuple[int, int], np.ndarray] = {}
    self.forget()

  def forget(self) -> None:
    """Forget the first blocks that were read and not used yet."""
    self._first_blocks: dict[tuple[int, int, int], list[bytes]] = {}

  def forget_task(self, k: int) -> None:
    """Forget the first block of a task that reads no blocks."""
    self._first_blocks = {key: block for key, block in self._first_blocks.items() if key[0] != k}

  def close(self) -> None:
    """Let go of what is held."""
    self.forget()
    self._pool.drop_where(lambda key: key[0] == self._owner)
    for cache in self._caches:
      cache.files.forget_fetched()

  def release_tables(self) -> None:
    """Let go of what unit tables hold; they read it again where it is asked for."""
    for table in self._tables:
      if table is not None:
        table.let_go()

  def read_first_blocks(self, turns: Mapping[int, Turns]) -> dict[int, list[bytes]]:
    """Return, by task, the block of its first record among some turns; `read` uses it too."""
    numbers = {}
    for k, of_task in turns.items():
      places = self._order.places(k, of_task)
      shard = int(of_task.shards[0])
      members = self._members(k, shard, places)
      numbers[k] = shard, int((places if members is None else members.places)[0]) // self._block_records[k]
    self._fetch({k: {shard: [number]} for k, (shard, number) in numbers.items()})
    blocks = {}
    for k, (shard, number) in numbers.items():
      (blocks[k],) = self._caches[k].read_blocks(shard, [number])
      self._first_blocks[k, shard, number] = blocks[k]
    return blocks

  def read(self, keys: Sequence[WindowKey], stops: np.ndarray) -> list[Window]:
    """Read windows from their files.

    Args:
      keys: of the windows.
      stops: the turn after each one's last, `(windows,) int64`.
    """
    places = self._locate(keys, stops)
    num_fetched, windows = 0, []
    for number, ((k, epoch, shard, _), of_window) in enumerate(zip(keys, places, strict=True)):
      if self.is_remote and number == num_fetched:
        # As many as half of the budget holds; the rest once these are read.
        limit_bytes = self._pool.fetcher.budget.ahead_bytes // 2
        windows_fetched, _ = self._fetch_windows(keys[number:], places[number:], limit_bytes=limit_bytes)
        num_fetched += windows_fetched
      windows.append(self._read_window(k, epoch, shard, of_window))
    return windows

  def fetch(self, keys: Sequence[WindowKey], stops: np.ndarray) -> int:
    """Have the blocks of windows fetched from stores ahead of need, as far as the budget has room.

    Args:
      keys: of the windows.
      stops: as those of `read`.

    Returns:
      The number of bytes that were not fetched before.
    """
    free_bytes = self._pool.fetcher.free_bytes
    return self._fetch_windows(keys, self._locate(keys, stops), limit_bytes=free_bytes)[1]

  def _fetch_windows(
    self, keys: Sequence[WindowKey], places: Sequence[np.ndarray], *, limit_bytes: int
  ) -> tuple[int, int]:
    """Have the blocks of windows fetched, until they are more than so many bytes.

    Returns:
      How many windows' blocks were fetched, at least one, and the number of bytes that were new.
    """
    shards: dict[int, dict[int, None]] = {}
    for k, _, shard, _ in keys:
      shards.setdefault(k, {})[shard] = None
    # Indexes of all shards first, side by side.
    for k, of_task in shards.items():
      self._caches[k].files.fetch_indexes(of_task)
    num_windows = num_bytes = 0
    while num_windows < len(keys) and (not num_windows or num_bytes < limit_bytes):
      stop = num_windows + _WINDOWS_TOGETHER
      num_bytes += self._fetch_blocks(keys[num_windows:stop], places[num_windows:stop])
      num_windows = min(stop, len(keys))
    return num_windows, num_bytes

  def fetch_units(self, k: int, places: Mapping[int, np.ndarray], *, hold_blocks: bool) -> int:
    """Have units at places by shard fetched ahead of need, as `fetch`; see `read_units`."""
    spans: dict[int, list[tuple[int, int]]] = {}
    blocks: dict[int, list[int]] = {}
    for shard, of_shard in places.items():
      members = self._members(k, shard, of_shard)
      records = of_shard if members is None else members.places
      if hold_blocks:
        numbers = np.unique(records // self._block_records[k]).tolist()
        blocks[shard] = [n for n in numbers if self._pool.get((self._owner, (k, shard, n))) is None]
      else:
        spans[shard] = [(place, place + 1) for place in records.tolist()]
    return self._caches[k].files.fetch_blocks(blocks) + self._caches[k].files.fetch(spans)

  def _locate(self, keys: Sequence[WindowKey], stops: np.ndarray) -> list[np.ndarray]:
    """Return the places of each window's units, `(units,) int64` each."""
    task, epochs, shards, starts = np.array(keys, np.int64).T
    sizes = stops - starts
    ends = np.cumsum(sizes)
    turns = Turns(
      np.repeat(epochs, sizes),
      np.repeat(shards, sizes),
      np.arange(sizes.sum()) - np.repeat(ends - stops, sizes),
    )
    places = self._order.places(np.repeat(task, sizes), turns)
    return [places[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

  def _fetch_blocks(self, keys: Sequence[WindowKey], places: Sequence[np.ndarray]) -> int:
    """Have the blocks of windows fetched that the pool does not hold."""
    blocks: dict[int, dict[int, list[int]]] = {}
    for (k, epoch, shard, _), of_window in zip(keys, places, strict=True):
      if not self._caches[k].files.are_remote:
        continue
      members = self._members(k, shard, of_window)
      numbers = (of_window if members is None else members.places) // self._block_records[k]
      # Most windows are in one block, and that is told faster.
      first = int(numbers[0])
      for block in [first] if (numbers == first).all() else np.unique(numbers).tolist():
        is_held = self.has_tables and self._pool.get((self._owner, (k, epoch, shard, "part", block)))
        if not is_held and (k, shard, block) not in self._first_blocks:
          blocks.setdefault(k, {}).setdefault(shard, []).append(block)
    return self._fetch(blocks)

  def _fetch(self, blocks: Mapping[int, Mapping[int, Sequence[int]]]) -> int:
    """Have blocks fetched, by task and shard; indexes of all tasks' shards first, side by side."""
    for k, by_shard in blocks.items():
      self._caches[k].files.fetch_indexes(by_shard)
    return sum(self._caches[k].files.fetch_blocks(by_shard) for k, by_shard in blocks.items())

  def read_units(self, k: int, shard: int, places: np.ndarray, *, hold_blocks: bool) -> Window:
    """Read units of a shard at any places, as a window.

    Args:
      k: number of the task.
      shard: the shard.
      places: of the units, `(units,) int64`.
      hold_blocks: read whole blocks, which the pool holds from now on, rather than single records.
    """
    members = self._members(k, shard, places)
    if members is not None:
      places = members.places
    if hold_blocks:
      records = self._read_held(k, shard, places)
    else:
      records = self._caches[k].read_single(shard, places.tolist())
    return Window(records, places, members)

  def _read_window(self, k: int, epoch: int, shard: int, places: np.ndarray) -> Window:
    """Read units of a shard, by the blocks that they are in."""
    members = self._members(k, shard, places)
    if members is not None:
      places = members.places
    blocks, within = np.divmod(places, self._block_records[k])
    first = int(blocks[0])
    if members is None and (blocks == first).all():
      (records,) = self._read_blocks(k, shard, [first]).values()
      return Window(_to_objects(records)[within], places, None)
    if members is None:
      records_by_block = self._read_blocks(k, shard, np.unique(blocks).tolist())
    else:
      records_by_block = self._read_shared_blocks(k, epoch, shard, blocks)
    return Window(_select(records_by_block, blocks, within), places, members)

  def _members(self, k: int, shard: int, places: np.ndarray) -> Members | None:
    """Return the records of units of a shard, lengths by `features`; None without unit tables."""
    if not self.has_tables:
      return None
    table = self._tables[k]
    if table is None:
      return Members(np.ones_like(places), places, np.zeros((len(places), len(self.features)), np.int64))
    members = table.members(shard, places)
    lengths = np.zeros((len(members.places), len(self.features)), np.int64)
    lengths[:, self._columns[k]] = members.lengths
    return members._replace(lengths=lengths)

  def _read_shared_blocks(self, k: int, epoch: int, shard: int, blocks: np.ndarray) -> dict[int, list[bytes]]:
    """Read the blocks of some records; those with records that the epoch did not yet ask for are held."""
    numbers, used = np.unique(blocks, return_counts=True)
    keys = {block: (self._owner, (k, epoch, shard, "part", block)) for block in numbers.tolist()}
    shared_blocks = {block: self._pool.get(key) for block, key in keys.items()}
    read = self._read_blocks(k, shard, [block for block, shared in shared_blocks.items() if shared is None])
    num_in_units = self._count_records_in_units(k, shard)
    records_by_block = {}
    for block, count in zip(numbers.tolist(), used.tolist(), strict=True):
      shared = shared_blocks[block] or _SharedBlock(read[block], int(num_in_units[block]))
      shared.left -= count
      records_by_block[block] = shared.records
      if shared.left <= 0:
        self._pool.drop(keys[block])
      elif shared_blocks[block] is None:
        self._pool.hold(keys[block], shared, held_bytes(shared.records))
    return records_by_block

  def _count_records_in_units(self, k: int, shard: int) -> np.ndarray:
    """Return how many records of each block of a shard are in some unit, `(blocks,) int64`."""
    if (k, shard) not in self._records_in_units:
      table, records = self._tables[k], int(self._caches[k].manifest.shard_records[shard])
      places = np.arange(records) if table is None else table.kept(shard)
      num_blocks = -(-records // self._block_records[k])
      counts = np.bincount(places // self._block_records[k], minlength=num_blocks)
      self._records_in_units[k, shard] = counts
    return self._records_in_units[k, shard]

  def _read_held(self, k: int, shard: int, places: np.ndarray) -> list[bytes]:
    """Read records of blocks that are held from now on, as long as the pool has room."""
    blocks, within = np.divmod(places, self._block_records[k])
    records_by_block = {}
    for block in np.unique(blocks).tolist():
      key = (self._owner, (k, shard, block))
      records = self._pool.get(key)
      if records is None:
        records = self._read_blocks(k, shard, [block])[block]
        self._pool.hold(key, records, held_bytes(records))
      records_by_block[block] = records
    return _select(records_by_block, blocks, within)

  def _read_blocks(self, k: int, shard: int, blocks: Iterable[int]) -> dict[int, list[bytes]]:
    """Read blocks of a shard, by number; first blocks were read before."""
    keys = [(k, shard, block) for block in blocks]
    read = {key[2]: self._first_blocks.pop(key) for key in keys if key in self._first_blocks}
    rest = [block for _, _, block in keys if block not in read]
    return read | dict(zip(rest, self._caches[k].read_blocks(shard, rest), strict=True))


def _select(records_by_block: dict[int, list[bytes]], blocks: np.ndarray, within: np.ndarray) -> list[bytes]:
  """Return the records at places within blocks, `(records,)` each."""
  pairs = zip(blocks.tolist(), within.tolist(), strict=True)
  return [records_by_block[block][place] for block, place in pairs]


def _to_objects(items: Sequence[Any]) -> np.ndarray:
  return np.fromiter(items, object, len(items))
