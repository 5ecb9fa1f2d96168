"""Location of a unit: its epoch, shard and place (docs/order.md#units-and-epochs)."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anystep.order.permutation import permute, round_keys, sub_keys, unpermute
from anystep.order.round_robin import RoundRobin

# Cached round keys: two purposes for each task and epoch that neighbouring steps need.
_HELD_KEYS = 4096


class EpochPolicy(enum.StrEnum):
  """Order of a task's units in later epochs.

  Attributes:
    SAME: that of the first epoch.
    RESHUFFLE: blocks in a new order, and a new order within each block.
    GLOBAL: a new order of the whole split.
  """

  SAME = "same"
  RESHUFFLE = "reshuffle"
  GLOBAL = "global"


class Places(NamedTuple):
  """Locations of units, `(units,) int64` each; a place is a unit's number within its shard."""

  epochs: np.ndarray
  shards: np.ndarray
  places: np.ndarray


class Turns(NamedTuple):
  """Turns of units, `(units,) int64` each; a turn is q, the number of units that the shard gave before."""

  epochs: np.ndarray
  shards: np.ndarray
  turns: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TaskUnits:
  """Sizes of a task that determine its order.

  Attributes:
    task: the name.
    num_units: U, units per epoch. num_shards: S. block_records: g.
    shard_units: R_s, `(S,) int64`; None if unit u is in shard u mod S, as in a preshuffled cache.
  """

  task: str
  num_units: int
  num_shards: int
  block_records: int
  shard_units: np.ndarray | None = None


class UnitOrder:
  """The order of the units of a plan's tasks.

  Args:
    tasks: the tasks; `task` arguments are positions in this list.
    split, seed, policy: the plan's.

  >>> demo = TaskUnits(task="demo", num_units=1000, num_shards=8, block_records=16)
  >>> order = UnitOrder([demo], split="train", seed=0, policy=EpochPolicy.RESHUFFLE)
  >>> order.locate(0, np.array([0, 1000, 1001]))
  Places(epochs=array([0, 1, 1]), shards=array([0, 0, 1]), places=array([ 0, 72, 50]))
  """

  def __init__(self, tasks: Sequence[TaskUnits], *, split: str, seed: int, policy: EpochPolicy):
    self._names = [task.task for task in tasks]
    self._num_units = np.array([task.num_units for task in tasks], np.int64)
    self._num_shards = np.array([task.num_shards for task in tasks], np.int64)
    self._block_records = np.array([task.block_records for task in tasks], np.int64)
    self._shard_units = {k: t.shard_units for k, t in enumerate(tasks) if t.shard_units is not None}
    self._round_robins = {k: RoundRobin(units) for k, units in self._shard_units.items()}
    self._policy = policy
    self._keys = functools.lru_cache(_HELD_KEYS)(
      lambda purpose, task, epoch: round_keys(purpose, self._names[task], split, seed, epoch)
    )

  def locate(self, task: np.ndarray | int, units: np.ndarray) -> Places:
    """Return the locations of units v >= 0, in any order and of any epochs and tasks.

    Args:
      task: position of each unit's task, `(units,)` or one for all.
      units: `(units,) int64`.
    """
    turns = self.turns(task, units)
    return Places(turns.epochs, turns.shards, self.places(task, turns))

  def turns(self, task: np.ndarray | int, units: np.ndarray) -> Turns:
    """Return the turns of units, with the same arguments as `locate`."""
    units = np.asarray(units, np.int64)
    task = np.broadcast_to(task, units.shape)
    epochs, within = np.divmod(units, self._num_units[task])
    if self._policy is EpochPolicy.GLOBAL and units.size:
      within = permute(within, self._num_units[task], self._epoch_keys("global", task, epochs))
    turns, shards = np.divmod(within, self._num_shards[task])
    for k, round_robin in self._round_robins.items():
      of_task = task == k
      if of_task.any():
        shards[of_task], turns[of_task] = round_robin.locate(within[of_task])
    return Turns(epochs, shards, turns)

  def places(self, task: np.ndarray | int, turns: Turns) -> np.ndarray:
    """Return the places that turns are for, `(units,) int64`."""
    return self._reshuffle(task, turns.epochs, turns.shards, turns.turns, permute)

  def unit_of(self, task: int, places: Places) -> np.ndarray:
    """Return the units at places of one task, `(units,) int64`: the inverse of `locate`."""
    turns = self._reshuffle(task, places.epochs, places.shards, places.places, unpermute)
    within = turns * self._num_shards[task] + places.shards
    if task in self._round_robins:
      within = self._round_robins[task].unit_of(places.shards, turns)
    if self._policy is EpochPolicy.GLOBAL and within.size:
      tasks = np.broadcast_to(task, within.shape)
      within = unpermute(within, self._num_units[tasks], self._epoch_keys("global", tasks, places.epochs))
    return places.epochs * self._num_units[task] + within

  def _reshuffle(self, task, epochs, shards, turns, permutation) -> np.ndarray:
    """Turn turns into places, or with `unpermute` places into turns.

    The keys of a block's inner order contain the block's number in the file. So `permute` moves blocks
    first, and `unpermute` moves them last.
    """
    if self._policy is not EpochPolicy.RESHUFFLE or not (epochs > 0).any():
      return turns
    if not (epochs > 0).all():
      later = epochs > 0
      task = np.broadcast_to(task, turns.shape)[later]
      result = turns.copy()
      result[later] = self._reshuffle(task, epochs[later], shards[later], turns[later], permutation)
      return result
    task = np.broadcast_to(task, turns.shape)
    blocks, within = np.divmod(turns, self._block_records[task])
    # A shard's turns come block by block, so the work for a block is done once.
    numbers = number_rows(epochs, task, shards, blocks)
    _, first, block_of = np.unique(numbers, return_index=True, return_inverse=True)
    task, epochs, shards, blocks = (column[first] for column in (task, epochs, shards, blocks))
    block_records, sizes = self._block_records[task], self.shard_sizes(task, shards)
    whole_blocks = sizes // block_records
    in_whole = blocks < whole_blocks
    epoch_keys = sub_keys(self._epoch_keys("epoch", task, epochs), shards)
    permuted = permutation(np.where(in_whole, blocks, 0), np.maximum(whole_blocks, 1), epoch_keys)
    permuted = np.where(in_whole, permuted, blocks)
    # b', the block's number in the file, is part of the keys of the order within it.
    in_file = permuted if permutation is permute else blocks
    block_keys = sub_keys(sub_keys(self._epoch_keys("block", task, epochs), shards), in_file)
    block_sizes = np.where(in_whole, block_records, sizes - whole_blocks * block_records)
    starts = permuted * block_records
    return starts[block_of] + permutation(
      within, block_sizes[block_of], block_keys.T.take(block_of, axis=1).T
    )

  def shard_sizes(self, task: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Return R_s for each pair of a task and a shard: `(units,) int64`."""
    num_shards = self._num_shards[task]
    sizes = (self._num_units[task] - shards + num_shards - 1) // num_shards
    for k, units in self._shard_units.items():
      of_task = task == k
      sizes[of_task] = units[shards[of_task]]
    return sizes

  def _epoch_keys(self, purpose: str, task: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """Return the keys of each unit's task and epoch: `(units, 8) uint64`, or `(8,)` if all are equal."""
    first_epoch = int(epochs.min())
    codes = (epochs - first_epoch) * len(self._names) + task
    pairs, pair_of = np.unique(codes, return_inverse=True)
    keys = [
      self._keys(purpose, code % len(self._names), first_epoch + code // len(self._names))
      for code in pairs.tolist()
    ]
    # Stored column by column, as permutations use them.
    return keys[0] if len(keys) == 1 else np.stack(keys, axis=1).take(pair_of, axis=1).T


def number_rows(*columns: np.ndarray) -> np.ndarray:
  """Number the rows of columns, `(rows,) int64` each, so that only equal rows have the same number.

  >>> number_rows(np.array([7, 2**60, 7]), np.array([5, 2**60, 5]))
  array([0, 3, 0])
  """
  numbers = np.zeros_like(columns[0])
  for column in columns:
    column = column - column.min()
    if (int(numbers.max()) + 1) * (int(column.max()) + 1) > 1 << 63:
      # Ranks are below the number of rows, so their products fit.
      numbers, column = (np.unique(values, return_inverse=True)[1] for values in (numbers, column))
    numbers = numbers * (column.max() + 1) + column
  return numbers
