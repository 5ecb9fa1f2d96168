"""Rows that hold several examples: each example's span, segment ids and positions."""

from __future__ import annotations

import dataclasses

import numpy as np

from anystep.compiled import compiled
from anystep.errors import AnystepError, ExitCode
from anystep.features.ragged import Ragged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
  """Spans of examples within rows.

  Attributes:
    rows, starts, lengths: `(examples,) int64` each: the row, the span's first position in it, and its length.
    shape: the rows' shape, `(rows, length)`.
  """

  rows: np.ndarray
  starts: np.ndarray
  lengths: np.ndarray
  shape: tuple[int, int]

  def write(self, feature: Ragged, rows: np.ndarray) -> None:
    """Write each example's first tokens into its span of `rows`, `(rows, length)`."""
    values = feature.values.astype(rows.dtype, copy=False)
    Ragged(values, feature.lengths).write(rows, rows=self.rows, starts=self.starts, lengths=self.lengths)

  def fill(self, values: np.ndarray) -> np.ndarray:
    """Return rows, `(rows, length) int32`, with one value throughout each span, and 0 elsewhere."""
    filled = np.zeros(self.shape, np.int32)
    _fill(values, self.rows, self.starts, self.lengths, filled)
    return filled

  def mask(self) -> np.ndarray:
    """Return a mask of the spans, `(rows, length) int32`: 1 inside, 0 elsewhere."""
    return self.fill(np.ones(len(self.rows), np.int64))

  def positions(self) -> np.ndarray:
    """Return positions from each span's start, `(rows, length) int32`; 0 elsewhere."""
    positions = np.zeros(self.shape, np.int32)
    _count_up(np.arange(self.shape[1], dtype=np.int32), self.rows, self.starts, self.lengths, positions)
    return positions


def pack_spans(lengths: np.ndarray, counts: np.ndarray, length: int) -> Spans:
  """Return spans of examples one after the other, row by row.

  >>> pack_spans(np.array([2, 1, 3]), np.array([2, 1]), 4).positions()
  array([[0, 1, 0, 0],
         [0, 1, 2, 0]], dtype=int32)

  Args:
    lengths: `(examples,) int64`, number of tokens of each example.
    counts: `(rows,) int64`, number of examples in each row.
    length: number of tokens that a row holds.

  Raises:
    AnystepError: 78 `pack_counts` if the counts do not add up to the number of examples; 65 `pack_length` if
      a row is too short for its examples.
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


def number_segments(counts: np.ndarray) -> np.ndarray:
  """Number each row's examples from 1, `(examples,) int64`.

  >>> number_segments(np.array([2, 0, 3]))
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
