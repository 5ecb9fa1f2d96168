"""Rows that hold several examples: where each example stands, and the ids that tell them apart."""

from __future__ import annotations

import dataclasses

import numpy as np

from anystep.compiled import compiled
from anystep.errors import AnystepError, ExitCode
from anystep.features.ragged import Ragged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
  """A stretch of a row for each example.

  Attributes:
    rows, starts, lengths: `(examples,) int64` each: the row, the first place in it, and the places taken.
    shape: of the rows, `(rows, length)`.
  """

  rows: np.ndarray
  starts: np.ndarray
  lengths: np.ndarray
  shape: tuple[int, int]

  def write(self, feature: Ragged, rows: np.ndarray) -> None:
    """Writes each example's first tokens, as many as its span has places, into `(rows, length)`."""
    values = feature.values.astype(rows.dtype, copy=False)
    Ragged(values, feature.lengths).write(rows, rows=self.rows, starts=self.starts, lengths=self.lengths)

  def filled(self, values: np.ndarray) -> np.ndarray:
    """One value all over each span, `(rows, length) int32`; 0 elsewhere."""
    filled = np.zeros(self.shape, np.int32)
    _fill(values, self.rows, self.starts, self.lengths, filled)
    return filled

  def marked(self) -> np.ndarray:
    """Where spans are, `(rows, length) int32`."""
    return self.filled(np.ones(len(self.rows), np.int64))

  def positions(self) -> np.ndarray:
    """Places counted from each span's start, `(rows, length) int32`; 0 elsewhere."""
    positions = np.zeros(self.shape, np.int32)
    _count_up(np.arange(self.shape[1], dtype=np.int32), self.rows, self.starts, self.lengths, positions)
    return positions


def packed_spans(lengths: np.ndarray, counts: np.ndarray, length: int) -> Spans:
  """Spans of examples that stand one behind the other, row after row.

  >>> packed_spans(np.array([2, 1, 3]), np.array([2, 1]), 4).positions()
  array([[0, 1, 0, 0],
         [0, 1, 2, 0]], dtype=int32)

  Args:
    lengths: `(examples,) int64`, tokens of each.
    counts: `(rows,) int64`, examples of each row.
    length: tokens that a row holds.

  Raises:
    AnystepError: 78 `pack_counts` where counts are of another number of examples; 65 `pack_length` where
      a row does not hold its examples.
  """
  if counts.sum() != len(lengths):
    raise AnystepError(
      ExitCode.CONFIG,
      "pack_counts",
      expected=f"counts of {len(lengths)} examples in all",
      got=int(counts.sum()),
      fix="give the number of examples of each row",
    )
  stops = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
  row_stops = stops[np.cumsum(counts)]
  row_starts = np.concatenate([stops[:1], row_stops[:-1]])[: len(counts)]
  too_long = np.flatnonzero(row_stops - row_starts > length)
  if len(too_long):
    row = int(too_long[0])
    raise AnystepError(
      ExitCode.DATA,
      "pack_length",
      row=row,
      expected=f"at most {length} tokens in a row",
      got=int(row_stops[row] - row_starts[row]),
      fix="convert with the feature lengths that the rows were packed for",
    )
  rows = np.repeat(np.arange(len(counts)), counts)
  return Spans(rows=rows, starts=stops[:-1] - row_starts[rows], lengths=lengths, shape=(len(counts), length))


def segment_numbers(counts: np.ndarray) -> np.ndarray:
  """Each example's number in its row, from 1, `(examples,) int64`.

  >>> segment_numbers(np.array([2, 0, 3]))
  array([1, 2, 1, 2, 3])
  """
  return np.arange(1, counts.sum() + 1) - np.repeat(np.cumsum(counts) - counts, counts)


@compiled
def _fill(values, span_rows, starts, span_lengths, rows):
  for k in range(len(values)):
    rows[span_rows[k], starts[k] : starts[k] + span_lengths[k]] = values[k]


@compiled
def _count_up(ascending, span_rows, starts, span_lengths, rows):
  for k in range(len(starts)):
    rows[span_rows[k], starts[k] : starts[k] + span_lengths[k]] = ascending[: span_lengths[k]]
