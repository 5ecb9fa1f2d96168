"""Sizes of windows: the number of turns that are read together, chosen to fit in the read budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.read_pool import held_bytes
from anystep.order.epochs import EpochPolicy, Turns
from anystep.order.packing import WINDOW_RECORDS, PackingPolicy
from anystep.plans.plan import Plan

_log = logging.getLogger("anystep")

# Share of the pool's budget that one reader plans to hold; indexes of open files and other readers need some.
_PLANNED_SHARE = 0.7
# Blocks of a window where not all files stay open: opening a file then serves several blocks.
_MAX_BLOCKS_AHEAD = 16
# Packs of a window lie in parts of blocks and cost arithmetic of their own: larger windows take a fifth less.
_PACKED_BLOCKS_AHEAD = 4


class WindowSizes:
  """Number of turns in the windows of each task.

  A window is a block. It is several where not all files can stay open or units are packs. It is a part of a
  block, which is then read again for each part, where the budget does not hold a block of every shard. Under
  the policy `global` a size is either a block, if all blocks of the task fit in the budget, or 1: single
  records are read.

  Args:
    plan: on its caches.
    caches: of the plan's tasks, in name order; the first one's pool has the budget.
    shards_touched: for each task, how many shards the wanted rows come from within an epoch.

  Attributes:
    turns: for each task, `(tasks,) int64`; 0 until `choose` is called for it.
    shards_touched: the argument, at least 1 each.
  """

  def __init__(self, plan: Plan, caches: Sequence[Cache], *, shards_touched: Sequence[int]):
    manifests = [cache.manifest for cache in caches]
    tables = [plan.unit_tables.get(name) for name in plan.task_names]
    self.turns = np.zeros(len(caches), np.int64)
    self._task_names = plan.task_names
    self._pool = caches[0].pool
    self._are_local = np.array([not cache.files.are_remote for cache in caches])
    self._is_global = plan.epoch_policy is EpochPolicy.GLOBAL
    self._has_table = [table is not None for table in tables]
    self.shards_touched = np.maximum(shards_touched, 1)
    self._block_records = np.array([m.block_records for m in manifests], np.int64)
    shard_units = [t.shard_units if t else m.shard_records for t, m in zip(tables, manifests, strict=True)]
    self._block_turns = np.minimum(self._block_records, [units.max() for units in shard_units])
    num_examples = np.array([m.num_examples for m in manifests], np.int64)
    # A window of units holds further records of the blocks that it uses a part of; with best fit, which takes
    # records from anywhere among 256, at least as many.
    unit_records = np.array([t.shard_records.sum() / t.num_units if t else 1 for t in tables])
    part_records = np.where(self._has_table, self._block_records, 0)
    if plan.packing is PackingPolicy.BEST_FIT:
      part_records = np.maximum(part_records, WINDOW_RECORDS)
    # Records to hold so that no block is read twice.
    self._wanted_records = num_examples
    if not self._is_global:
      shard_records = self._block_turns * unit_records + part_records
      self._wanted_records = np.minimum(self.shards_touched * shard_records, num_examples)
    # Bytes of a record: in its file, and in memory once a block was seen.
    file_bytes = np.array([sum(file.bytes for file in m.record_files) for m in manifests])
    self._file_bytes = file_bytes / num_examples + held_bytes([b""])
    self._record_bytes = np.zeros(len(manifests))

  def choose(self, blocks: Mapping[int, Sequence[bytes]]) -> None:
    """Choose the sizes of tasks, from one block of records of each."""
    for k, records in blocks.items():
      self._record_bytes[k] = held_bytes(records) / len(records)
    planned_bytes = self._pool.budget_bytes * _PLANNED_SHARE
    # Tasks without a block so far are taken to grow in memory as the others do.
    is_measured = self._record_bytes > 0
    measured_bytes = (self._record_bytes * self._wanted_records)[is_measured].sum()
    growth = measured_bytes / (self._file_bytes * self._wanted_records)[is_measured].sum()
    needed = np.where(is_measured, self._record_bytes, growth * self._file_bytes) * self._wanted_records
    ahead = planned_bytes / needed.sum()
    room = needed if ahead >= 1 else _share_out(planned_bytes, needed)
    for k in blocks:
      if self._is_global:
        self.turns[k] = self._block_records[k] if room[k] == needed[k] else 1
      elif room[k] == needed[k]:
        self.turns[k] = self._block_records[k] * self._count_blocks(k, ahead)
      else:
        self.turns[k] = self._count_turns_of_part(k, room_bytes=room[k], needed_bytes=needed[k])

  def bounds(self, task: np.ndarray, turns: Turns, shard_units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first turn, and the one after the last, of the windows that turns are in: `(rows,) int64`.

    Args:
      task: number of the task, `(rows,)`.
      turns: `(rows,)` each.
      shard_units: units of the shard, `(rows,)`.
    """
    size, block_records = self.turns[task], self._block_records[task]
    block_start = turns.turns - turns.turns % block_records
    in_block = size < block_records
    origin = np.where(in_block, block_start, 0)
    start = turns.turns - (turns.turns - origin) % size
    stop = np.minimum(start + size, shard_units)
    return start, np.where(in_block, np.minimum(stop, block_start + block_records), stop)

  def _count_blocks(self, k: int, ahead: float) -> int:
    """Return how many blocks a window has, where the budget holds `ahead` times what is needed."""
    few_files = self.shards_touched[self._are_local].sum() > self._pool.open_files
    most_blocks = _MAX_BLOCKS_AHEAD if few_files else _PACKED_BLOCKS_AHEAD if self._has_table[k] else 1
    blocks = int(ahead * self._block_turns[k]) // int(self._block_records[k])
    return max(min(blocks, most_blocks), 1)

  def _count_turns_of_part(self, k: int, *, room_bytes: float, needed_bytes: float) -> int:
    """Return the turns of a window that is a part of a block: the fewest that need no further reading."""
    block_turns = int(self._block_turns[k])
    readings = -(-block_turns // max(int(block_turns * room_bytes / needed_bytes), 1))
    if readings > 1:
      _log.warning(
        "%s: a block of each of %d shards, %d bytes or so, does not fit in the task's %d bytes of the read"
        " budget of %d: every block is read %d times. Raise it, or cache with a smaller --block_records.",
        self._task_names[k],
        self.shards_touched[k],
        needed_bytes,
        room_bytes,
        self._pool.budget_bytes,
        readings,
      )
    return -(-block_turns // readings)


def _share_out(total: float, needs: np.ndarray) -> np.ndarray:
  """Return shares of a total that is less than all needs: small needs are met, the rest is shared equally.

  >>> _share_out(90, np.array([10, 100, 50])).tolist()
  [10.0, 40.0, 40.0]
  """
  shares = np.zeros(len(needs))
  for num_shared, k in enumerate(np.argsort(needs).tolist()):
    shares[k] = min(needs[k], (total - shares.sum()) / (len(needs) - num_shared))
  return shares
