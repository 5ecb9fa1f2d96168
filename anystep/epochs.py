"""Where a unit lies: its epoch, shard and place (design section 6, Units)."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from anystep.manifest import shard_sizes
from anystep.permutation import permute, round_keys, sub_keys


class EpochPolicy(enum.StrEnum):
  """How later epochs order a task's units: as the first, anew by blocks, or anew over the whole split."""

  SAME = "same"
  RESHUFFLE = "reshuffle"
  GLOBAL = "global"


class Places(NamedTuple):
  """Where units lie: `(units,) int64` each; `places` count units within the shard."""

  epochs: np.ndarray
  shards: np.ndarray
  places: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitOrder:
  """The order of one task's units under a plan, without packing.

  Args:
    task, split: names that key the order.
    seed: the plan's.
    num_units: U, units per epoch. num_shards: S. block_records: g.
    policy: the plan's epoch policy.

  >>> order = UnitOrder(
  ...   task="demo",
  ...   split="train",
  ...   seed=0,
  ...   num_units=1000,
  ...   num_shards=8,
  ...   block_records=16,
  ...   policy=EpochPolicy.RESHUFFLE,
  ... )
  >>> order.locate(np.array([0, 1000, 1001]))
  Places(epochs=array([0, 1, 1]), shards=array([0, 0, 1]), places=array([ 0, 72, 50]))
  """

  task: str
  split: str
  seed: int
  num_units: int
  num_shards: int
  block_records: int
  policy: EpochPolicy

  def locate(self, units: np.ndarray) -> Places:
    """Places of units v >= 0, `(units,) int64`, in any order and of any epochs."""
    epochs, within = np.divmod(np.asarray(units, np.int64), self.num_units)
    shards, places = np.empty_like(within), np.empty_like(within)
    for epoch in np.unique(epochs).tolist():
      rows = epochs == epoch
      shards[rows], places[rows] = self._locate_within(within[rows], epoch)
    return Places(epochs, shards, places)

  def _locate_within(self, within: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    if self.policy is EpochPolicy.GLOBAL:
      within = permute(within, self.num_units, self._keys("global", epoch))
    places, shards = np.divmod(within, self.num_shards)
    if self.policy is EpochPolicy.RESHUFFLE and epoch > 0:
      places = self._reshuffle(shards, places, epoch)
    return shards, places

  def _reshuffle(self, shards: np.ndarray, places: np.ndarray, epoch: int) -> np.ndarray:
    sizes = shard_sizes(self.num_units, self.num_shards)[shards]
    whole_blocks = sizes // self.block_records
    blocks, places = np.divmod(places, self.block_records)
    in_whole = blocks < whole_blocks
    epoch_keys = sub_keys(self._keys("epoch", epoch), shards)
    blocks = np.where(
      in_whole,
      permute(np.where(in_whole, blocks, 0), np.maximum(whole_blocks, 1), epoch_keys),
      blocks,
    )
    block_keys = sub_keys(sub_keys(self._keys("block", epoch), shards), blocks)
    block_sizes = np.where(in_whole, self.block_records, sizes - whole_blocks * self.block_records)
    return blocks * self.block_records + permute(places, block_sizes, block_keys)

  def _keys(self, purpose: str, epoch: int) -> np.ndarray:
    return round_keys(purpose, self.task, self.split, self.seed, epoch)
