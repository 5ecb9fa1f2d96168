"""Gathering: records that were read window by window, put in the order of the rows that want them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from anystep.plans.plan import BatchRows
from anystep.streams.windows import Window

_NO_NUMBERS = np.zeros(0, np.int64)


class UnitRecords(NamedTuple):
  """Serialized records of units, unit by unit.

  Attributes:
    records: every record.
    where: task, unit, epoch, shard and place of each record; the place is the record's in its shard.
    counts: records of each unit, `(units,) int64`; None where each unit is a record.
    lengths: tokens that the plan counts on, `(records, packed features) int64`; None without unit tables.
  """

  records: list[bytes]
  where: BatchRows
  counts: np.ndarray | None = None
  lengths: np.ndarray | None = None


class WindowRows(NamedTuple):
  """Rows whose units are in one window, `(rows,) int64` each: their numbers, and positions of their units."""

  rows: np.ndarray
  window: Window
  units: np.ndarray


def split_by_window(windows: Sequence[Window], window_of: np.ndarray, within: np.ndarray) -> list[WindowRows]:
  """Return the rows of each window.

  Args:
    windows: each one has some row.
    window_of: number of each row's window, `(rows,)`.
    within: position of each row's unit in its window, `(rows,)`.
  """
  if not windows:
    return []
  order = np.argsort(window_of, kind="stable")
  rows_by_window = np.split(order, np.cumsum(np.bincount(window_of))[:-1])
  return [WindowRows(r, window, within[r]) for r, window in zip(rows_by_window, windows, strict=True)]


def gather_single_records(
  where: BatchRows, windows: Sequence[Window], window_of: np.ndarray, within: np.ndarray
) -> UnitRecords:
  """Return the records of units that are one record each; other arguments are those of `split_by_window`.

  Row by row: a mixture of many shards has about one row of each window in a batch.
  """
  row_windows, positions = [windows[k] for k in window_of.tolist()], within.tolist()
  records = [window.records[position] for window, position in zip(row_windows, positions, strict=True)]
  places = [window.places[position] for window, position in zip(row_windows, positions, strict=True)]
  return UnitRecords(records, where._replace(place=np.array(places, np.int64)))


def gather_units(where: BatchRows, parts: Sequence[WindowRows], *, num_features: int | None) -> UnitRecords:
  """Return the records of units, with all arrays that `UnitRecords` has.

  Args:
    where: of each unit, `(rows,)`; its places are not used.
    parts: together they have every row once.
    num_features: packed features; None without unit tables.
  """
  entries = [part.window.entries(part.units) for part in parts]
  members = [part.window.members for part in parts if part.window.members is not None]
  rows = np.concatenate([_NO_NUMBERS, *(part.rows for part in parts)])
  counts, lengths = None, None
  if num_features is not None:
    part_counts = [m.counts[part.units] for m, part in zip(members, parts, strict=True)]
    unit_counts = np.concatenate([_NO_NUMBERS, *part_counts])
    counts = np.empty_like(unit_counts)
    counts[rows] = unit_counts
    rows = np.repeat(rows, unit_counts)
    where = BatchRows(*(np.repeat(column, counts) for column in where))
  order = np.argsort(rows, kind="stable")

  def join(empty: np.ndarray, columns: Iterable[np.ndarray]) -> np.ndarray:
    selected_columns = [column[numbers] for column, numbers in zip(columns, entries, strict=True)]
    return np.concatenate([empty, *selected_columns])[order]

  if num_features is not None:
    lengths = join(np.zeros((0, num_features), np.int64), (m.lengths for m in members))
  return UnitRecords(
    records=join(_NO_NUMBERS.astype(object), (part.window.records for part in parts)).tolist(),
    where=where._replace(place=join(_NO_NUMBERS, (part.window.places for part in parts))),
    counts=counts,
    lengths=lengths,
  )
