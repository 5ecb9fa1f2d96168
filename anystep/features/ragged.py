"""Features of several examples, as arrays or as rows whose lengths differ."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anystep.cached import cached_property
from anystep.compiled import FEWEST_TO_COMPILE_FOR, compiled
from anystep.errors import AnystepError, ExitCode


@dataclasses.dataclass(frozen=True)
class Ragged:
  """Feature of several rows whose lengths differ.

  If an example is itself a sequence of rows whose lengths differ, the values are a `Ragged` as well: its rows
  are those of all examples. A row of the batch is then a `Ragged`, too.

  Attributes:
    values: `(sum of lengths, ...)`, the rows one after the other.
    lengths: `(rows,) int64`.
  """

  values: np.ndarray | Any
  lengths: np.ndarray

  def __post_init__(self):
    if int(self.lengths.sum()) != len(self.values) or self.lengths.min(initial=0) < 0:
      raise ValueError(f"lengths add up to {self.lengths.sum()}, values are {len(self.values)}")

  def __len__(self) -> int:
    return len(self.lengths)

  def __array__(self, *_: Any, **__: Any) -> np.ndarray:
    raise TypeError(
      "A Ragged is not an array: its rows' lengths differ. rows() lists the rows, to_padded() pads them."
    )

  def __getitem__(self, rows: slice) -> Ragged:
    """Return neighbouring rows, as views."""
    if not isinstance(rows, slice) or rows.step not in (None, 1):
      raise TypeError(f"A Ragged takes slices without steps, not {rows!r}: rows() lists its rows.")
    first, stop, _ = rows.indices(len(self))
    stop = max(first, stop)
    return Ragged(self.values[self._bounds[first] : self._bounds[stop]], self.lengths[first:stop])

  @cached_property
  def _bounds(self) -> np.ndarray:
    """Begin of each row, and the end of the last: `(rows + 1,) int64`."""
    return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

  @property
  def dtype(self) -> np.dtype:
    """The values' dtype."""
    return self.values.dtype

  @property
  def shape(self) -> tuple[int | None, ...]:
    """The number of rows, None for their lengths, and the values' further dimensions."""
    return (len(self), None, *self.values.shape[1:])

  @property
  def ndim(self) -> int:
    """The number of dimensions, that of the rows included."""
    return len(self.shape)

  @classmethod
  def of_rows(cls, rows: Sequence[Any], dtype: np.dtype, inner_shape: tuple[Any, ...] = ()) -> Ragged:
    """Join rows, which are arrays, or `Ragged` if inner_shape begins with None.

    Args:
      rows: the rows.
      dtype: the values' dtype.
      inner_shape: the shape of the rows after their first dimension; arrays tell it themselves unless there
        is no row.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    if inner_shape[:1] == (None,):
      return cls(cls.of_rows([part for row in rows for part in row.rows()], dtype, inner_shape[1:]), lengths)
    values = np.concatenate(rows) if len(rows) else np.zeros((0, *inner_shape), dtype)
    return cls(values.astype(dtype, copy=False), lengths)

  def sums(self) -> np.ndarray:
    """Return the sum of each row's values, which must be numbers: `(rows,) int64`."""
    return np.diff(np.concatenate([[0], np.cumsum(self.values, dtype=np.int64)])[self._bounds])

  def rows(self) -> list[Any]:
    """Return the rows, as views: arrays, or `Ragged` if the values are."""
    bounds = self._bounds.tolist()
    return [self.values[start:stop] for start, stop in itertools.pairwise(bounds)]

  def to_padded(self, length: int) -> np.ndarray:
    """Cut or pad each row at its end, with zeros or empty texts: `(rows, length, ...)`.

    Raises:
      AnystepError: 78 `feature_ragged` if the values are `Ragged`.
    """
    if isinstance(self.values, Ragged):
      raise AnystepError(
        ExitCode.CONFIG,
        "feature_ragged",
        expected="a feature of which only the first dimension varies",
        got=f"{self.dtype} of shape (rows, None, {', '.join(map(str, self.values.shape[1:]))})",
        fix="make it dense in a preprocessor after the cache, or give no length for it",
      )
    padded = make_padding((len(self), length, *self.values.shape[1:]), self.values.dtype)
    starts = np.zeros(len(self), np.int64)
    self.write(padded, rows=np.arange(len(self)), starts=starts, lengths=np.minimum(self.lengths, length))
    return padded

  def write(self, out: np.ndarray, *, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
    """Write the first values of each sequence into a row.

    Args:
      out: contiguous, `(rows, length, ...)`, of the values' dtype and inner shape.
      rows, starts, lengths: for each sequence the row of `out`, the first position in it, and the number of
        values to write.
    """
    size = math.prod(self.values.shape[1:])
    values, flat = self.values.reshape(-1), out.reshape(out.shape[0], out.shape[1] * size)
    spans = (self.lengths * size, rows, starts * size, lengths * size)
    if len(self) < FEWEST_TO_COMPILE_FOR or values.dtype.hasobject:
      _write.plain(values, *spans, flat)
    else:
      # As unsigned words, so that numba compiles for a few sizes only and need not know the dtype.
      words = np.dtype(f"u{values.itemsize}")
      _write(values.view(words), *spans, flat.view(words))


@compiled
def _write(values, sizes, rows, starts, lengths, out):
  first = 0
  for k in range(len(sizes)):
    out[rows[k], starts[k] : starts[k] + lengths[k]] = values[first : first + lengths[k]]
    first += sizes[k]


def make_padding(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
  """Return an array of padding: zeros, or empty bytes for objects, as TensorFlow pads."""
  return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


def as_sequences(feature: Ragged | np.ndarray) -> Ragged | np.ndarray:
  """Return a feature of at least two dimensions, `(rows, length, ...)`, as a `Ragged`; others as they are."""
  if isinstance(feature, Ragged) or feature.ndim < 2:
    return feature
  rows, length, *inner = feature.shape
  return Ragged(feature.reshape(rows * length, *inner), np.full(rows, length, np.int64))


def select_rows(feature: Ragged | np.ndarray, is_kept: np.ndarray) -> Ragged | np.ndarray:
  """Return the rows for which `is_kept`, `(rows,) bool`, is true."""
  if isinstance(feature, Ragged):
    values = select_rows(feature.values, np.repeat(is_kept, feature.lengths))
    return Ragged(values, feature.lengths[is_kept])
  return feature[is_kept]


Batch = Mapping[str, Ragged | np.ndarray]
"""Features of several examples by name: a `Ragged` for a sequence, else an array of shape `(rows,)`."""
