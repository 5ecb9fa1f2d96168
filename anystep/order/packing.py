"""Packing: groups of a shard's records that share a row (docs/order.md#packing)."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from anystep.compiled import compiled

# Number of records that best fit looks at together.
WINDOW_RECORDS = 256


class PackingPolicy(enum.StrEnum):
  """Rule that groups records into packs; a pack fills one row.

  Attributes:
    NONE: every record is its own pack.
    GREEDY: in record order, a record joins the last pack if every feature fits, else starts the next pack.
    BEST_FIT: of 256 records at a time, the heaviest first, each joins the pack that it fills best.
  """

  NONE = "none"
  GREEDY = "greedy"
  BEST_FIT = "best_fit"


def pack(
  lengths: np.ndarray, limits: Sequence[int] | np.ndarray, policy: PackingPolicy | str
) -> tuple[np.ndarray, np.ndarray]:
  """Group one shard's records into packs.

  Args:
    lengths: tokens of each record by feature, `(records, features)` integers, at most the feature's limit.
    limits: tokens of a row by feature, L_f >= 1, in the order of the columns.
    policy: the rule.

  Returns:
    starts, `(packs + 1,) int64`, and records, `(records,) int64`: the k-th pack holds
    `records[starts[k]:starts[k + 1]]`, which ascend.

  Raises:
    ValueError: for a limit below 1, a length below 0 or above its limit, or not one limit for each column.

  >>> lengths = np.array([[6], [5], [4], [3], [7], [2], [3]])
  >>> starts, records = pack(lengths, [10], PackingPolicy.BEST_FIT)
  >>> [part.tolist() for part in np.split(records, starts[1:-1])]
  [[0, 2], [1, 5, 6], [3, 4]]
  """
  lengths, limits = np.asarray(lengths), [operator.index(limit) for limit in limits]
  if lengths.ndim != 2 or lengths.shape[1] != len(limits) or lengths.dtype.kind not in "iu":
    raise ValueError(
      f"expected (records, features) integers and a limit for each feature, "
      f"got {lengths.shape} {lengths.dtype} and {len(limits)} limits"
    )
  for limit, column in zip(limits, lengths.T, strict=True):
    shortest, longest = int(column.min(initial=0)), int(column.max(initial=0))
    if limit < 1 or shortest < 0 or longest > limit:
      raise ValueError(
        f"expected a limit of at least 1 and lengths from 0 to the limit, "
        f"got {limit} and lengths from {shortest} to {longest}"
      )
  # One dtype and memory layout, so that the loops are compiled once.
  lengths, room = np.array(lengths, np.int64, order="C"), np.array(limits, np.int64)
  match PackingPolicy(policy):
    case PackingPolicy.NONE:
      return np.arange(len(lengths) + 1), np.arange(len(lengths))
    case PackingPolicy.GREEDY:
      return _greedy(lengths, room), np.arange(len(lengths))
    case PackingPolicy.BEST_FIT:
      weights, row_weight = _weights(lengths, limits)
      loop = _best_fit if weights.dtype == np.int64 else _best_fit.plain
      return loop(lengths, room, weights, row_weight)


def _weights(lengths: np.ndarray, limits: list[int]) -> tuple[np.ndarray, int]:
  """Return Σ_f l_f·C/L_f of each record, and of a record that fills a row, exactly.

  The values are int64, or Python's ints if int64 is too small.

  C is the least common multiple of the limits. The specification takes their product instead, a multiple of
  C, which gives the same order and the same ties.
  """
  common = math.lcm(*limits)
  factors = [common // limit for limit in limits]
  row_weight = common * len(limits)
  dtype: Any = np.int64 if row_weight < np.iinfo(np.int64).max else object
  return lengths.astype(dtype, copy=False) @ np.array(factors, dtype), row_weight


@compiled
def _greedy(lengths: np.ndarray, limits: np.ndarray) -> np.ndarray:
  """The packs' starts, `(packs + 1,) int64`."""
  num_records, num_features = lengths.shape
  starts = np.empty(num_records + 1, np.int64)
  room = np.zeros(num_features, np.int64)
  num_packs = 0
  for record in range(num_records):
    fits = num_packs > 0
    for feature in range(num_features):
      fits &= lengths[record, feature] <= room[feature]
    if not fits:
      starts[num_packs] = record
      num_packs += 1
      room[:] = limits
    for feature in range(num_features):
      room[feature] -= lengths[record, feature]
  starts[num_packs] = num_records
  return starts[: num_packs + 1].copy()


@compiled
def _best_fit(
  lengths: np.ndarray, limits: np.ndarray, weights: np.ndarray, row_weight: int
) -> tuple[np.ndarray, np.ndarray]:
  """The packs' starts, `(packs + 1,) int64`, and records, `(records,) int64`; weights may be Python ints."""
  num_records, num_features = lengths.shape
  starts = np.zeros(num_records + 1, np.int64)
  records = np.empty(num_records, np.int64)
  num_packs = 0
  # The window's open packs, in the order in which they were opened.
  room = np.empty((WINDOW_RECORDS, num_features), np.int64)
  room_weights = np.empty(WINDOW_RECORDS, weights.dtype)
  sizes = np.empty(WINDOW_RECORDS, np.int64)
  next_positions = np.empty(WINDOW_RECORDS, np.int64)
  chosen_packs = np.empty(WINDOW_RECORDS, np.int64)
  for start in range(0, num_records, WINDOW_RECORDS):
    stop = min(start + WINDOW_RECORDS, num_records)
    num_open = 0
    for position in np.argsort(-weights[start:stop], kind="mergesort"):  # Stable: ties by record.
      record = start + position
      weight = weights[record]
      chosen, least = num_open, row_weight + 1
      for candidate in range(num_open):
        # If the weight does not fit, some feature does not. Of equal room the pack opened first wins.
        if weight <= room_weights[candidate] < least:
          fits = True
          for feature in range(num_features):
            fits &= lengths[record, feature] <= room[candidate, feature]
          if fits:
            chosen, least = candidate, room_weights[candidate]
      if chosen == num_open:
        room[chosen], room_weights[chosen], sizes[chosen], next_positions[chosen] = limits, row_weight, 0, -1
        num_open += 1
      for feature in range(num_features):
        room[chosen, feature] -= lengths[record, feature]
      room_weights[chosen] -= weight
      sizes[chosen] += 1
      chosen_packs[position] = chosen
    # In record order, the first record of a pack is its smallest.
    for position in range(stop - start):
      chosen = chosen_packs[position]
      if next_positions[chosen] < 0:
        next_positions[chosen] = starts[num_packs]
        starts[num_packs + 1] = starts[num_packs] + sizes[chosen]
        num_packs += 1
      records[next_positions[chosen]] = start + position
      next_positions[chosen] += 1
  return starts[: num_packs + 1].copy(), records
