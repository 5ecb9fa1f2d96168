"""Round robin over shards that hold different numbers of units (docs/order.md#units-and-epochs)."""

from __future__ import annotations

import numpy as np


class RoundRobin:
  """Order of units: every shard's unit 0, then unit 1 of every shard that has one, and so on.

  The shards that take turns stay the same until one of them runs out. Between two such points, a *level*, a
  division gives a unit's turn and its rank among the sharing shards. A wavelet matrix (Claude, Navarro &
  Ordóñez 2015) finds the shard of that rank, for all units at once: a million shards of different sizes cost
  only as many steps as their number has bits.

  Args:
    shard_units: R_s, `(S,)` integers >= 0, at least one of them positive.

  >>> shards, turns = RoundRobin(np.array([3, 1, 0, 2])).locate(np.arange(6))
  >>> list(zip(shards.tolist(), turns.tolist()))
  [(0, 0), (1, 0), (3, 0), (0, 1), (3, 1), (0, 2)]
  """

  def __init__(self, shard_units: np.ndarray):
    self._shard_units = np.asarray(shard_units, np.int64)
    by_size = np.argsort(-self._shard_units, kind="stable")
    level_ends, dropouts = np.unique(self._shard_units[self._shard_units > 0], return_counts=True)
    sharing = np.cumsum(dropouts[::-1])[::-1]
    self._level_turns = np.concatenate([[0], level_ends[:-1]])
    self._sharing = sharing
    level_units = (level_ends - self._level_turns) * sharing
    self._level_units = np.cumsum(level_units) - level_units
    self._largest = _PrefixSelect(by_size)

  def locate(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the shard of each unit, and which turn of that shard it is, `(units,) int64` each.

    Args:
      units: positions in the epoch, `(units,) int64`.
    """
    level = np.searchsorted(self._level_units, units, side="right") - 1
    sharing = self._sharing[level]
    turns, ranks = np.divmod(units - self._level_units[level], sharing)
    return self._largest.select(sharing, ranks), turns + self._level_turns[level]

  def unit_of(self, shards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Invert `locate`, `(units,) int64`; costs one pass over all shards for each unit."""
    return np.array(
      [
        np.minimum(self._shard_units, turn).sum() + np.count_nonzero(self._shard_units[:shard] > turn)
        for shard, turn in zip(shards.tolist(), turns.tolist(), strict=True)
      ],
      np.int64,
    )


class _PrefixSelect:
  """Wavelet matrix of an order of [0, n), highest bit first; finds the j-th smallest of its first values."""

  def __init__(self, order: np.ndarray):
    self._bits = range(max(len(order) - 1, 0).bit_length() - 1, -1, -1)
    self._zeros_before = []
    for bit in self._bits:
      zero = (order >> bit) & 1 == 0
      self._zeros_before.append(np.concatenate([[0], np.cumsum(zero)]).astype(np.int32))
      order = np.concatenate([order[zero], order[~zero]])

  def select(self, counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the j-th smallest of the first c values for each pair (c, j), j < c: `(pairs,) int64`."""
    start, stop = np.zeros_like(counts), counts
    values = np.zeros_like(counts)
    for bit, zeros_before in zip(self._bits, self._zeros_before, strict=True):
      zeros_start, zeros_stop = zeros_before[start], zeros_before[stop]
      zeros = zeros_stop - zeros_start
      is_one = ranks >= zeros
      start = np.where(is_one, zeros_before[-1] + start - zeros_start, zeros_start)
      stop = np.where(is_one, zeros_before[-1] + stop - zeros_stop, zeros_stop)
      ranks = np.where(is_one, ranks - zeros, ranks)
      values |= is_one.astype(np.int64) << bit
    return values
