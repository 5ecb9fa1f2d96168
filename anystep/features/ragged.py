"""Features of several examples: arrays, and rows whose lengths differ."""

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
  """A feature of several rows whose lengths differ.

  Where an example is itself a sequence of rows whose lengths differ, the values of a batch are a `Ragged` as
  well: its rows are those of all examples, and an example, a row of the batch, is a `Ragged` of its own.

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
      "A Ragged is no array, for its rows' lengths differ: rows() lists them, to_padded fills them."
    )

  def __getitem__(self, rows: slice) -> Ragged:
    """Rows that stand side by side, as views."""
    if not isinstance(rows, slice) or rows.step not in (None, 1):
      raise TypeError(f"A Ragged is cut by slices without steps, not by {rows!r}: rows() lists its rows.")
    first, stop, _ = rows.indices(len(self))
    stop = max(first, stop)
    return Ragged(self.values[self._bounds[first] : self._bounds[stop]], self.lengths[first:stop])

  @cached_property
  def _bounds(self) -> np.ndarray:
    """Where each row begins, and the last ends: `(rows + 1,) int64`."""
    return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

  @property
  def dtype(self) -> np.dtype:
    """The values'."""
    return self.values.dtype

  @property
  def shape(self) -> tuple[int | None, ...]:
    """The number of rows, None for their lengths, and what dimensions the values have besides."""
    return (len(self), None, *self.values.shape[1:])

  @property
  def ndim(self) -> int:
    """How many dimensions there are, the rows among them."""
    return len(self.shape)

  @classmethod
  def of_rows(cls, rows: Sequence[Any], dtype: np.dtype, inner_shape: tuple[Any, ...] = ()) -> Ragged:
    """Joins rows, which are `Ragged` where inner_shape begins with None.

    Otherwise dtype and inner_shape matter where there is no row.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    if inner_shape[:1] == (None,):
      return cls(cls.of_rows([part for row in rows for part in row.rows()], dtype, inner_shape[1:]), lengths)
    values = np.concatenate(rows) if len(rows) else np.zeros((0, *inner_shape), dtype)
    return cls(values.astype(dtype, copy=False), lengths)

  def sums(self) -> np.ndarray:
    """The sum of each row's values, where they are numbers: `(rows,) int64`."""
    return np.diff(np.concatenate([[0], np.cumsum(self.values, dtype=np.int64)])[self._bounds])

  def rows(self) -> list[Any]:
    """The rows, as views: arrays, or `Ragged` ones where the values are."""
    bounds = self._bounds.tolist()
    return [self.values[start:stop] for start, stop in itertools.pairwise(bounds)]

  def to_padded(self, length: int) -> np.ndarray:
    """`(rows, length, ...)`: each row cut or filled with zeros, texts with empty ones, at its end.

    Raises:
      AnystepError: 78 `feature_ragged` for rows of rows whose lengths differ.
    """
    if isinstance(self.values, Ragged):
      raise AnystepError(
        ExitCode.CONFIG,
        "feature_ragged",
        expected="a feature whose first dimension alone varies",
        got=f"{self.dtype} of shape (rows, None, {', '.join(map(str, self.values.shape[1:]))})",
        fix="make it dense in a preprocessor after the cache, or give no length of it",
      )
    padded = padding((len(self), length, *self.values.shape[1:]), self.values.dtype)
    starts = np.zeros(len(self), np.int64)
    self.write(padded, rows=np.arange(len(self)), starts=starts, lengths=np.minimum(self.lengths, length))
    return padded

  def write(self, out: np.ndarray, *, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
    """Writes the first values of each sequence into a row.

    Args:
      out: contiguous, `(rows, length, ...)`, of the values' dtype and inner shape.
      rows, starts, lengths: of each sequence, the row of `out`, the first place in it, and how many values.
    """
    size = math.prod(self.values.shape[1:])
    values, flat = self.values.reshape(-1), out.reshape(out.shape[0], out.shape[1] * size)
    places = (self.lengths * size, rows, starts * size, lengths * size)
    if len(self) < FEWEST_TO_COMPILE_FOR or values.dtype.hasobject:
      _write.plain(values, *places, flat)
    else:
      # As unsigned words: numba compiles for a few sizes, and need not know the dtype.
      words = np.dtype(f"u{values.itemsize}")
      _write(values.view(words), *places, flat.view(words))


@compiled
def _write(values, sizes, rows, starts, lengths, out):
  first = 0
  for k in range(len(sizes)):
    out[rows[k], starts[k] : starts[k] + lengths[k]] = values[first : first + lengths[k]]
    first += sizes[k]


def padding(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
  """What stands where there is no data: zeros, for objects empty bytes, as TensorFlow pads."""
  return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


def as_sequences(feature: Ragged | np.ndarray) -> Ragged | np.ndarray:
  """Rows of sequences of one length, `(rows, length, ...)`, as a `Ragged` like any others."""
  if isinstance(feature, Ragged) or feature.ndim < 2:
    return feature
  rows, length, *inner = feature.shape
  return Ragged(feature.reshape(rows * length, *inner), np.full(rows, length, np.int64))


def selected(feature: Ragged | np.ndarray, kept: np.ndarray) -> Ragged | np.ndarray:
  """The rows for which `kept`, `(rows,) bool`, is true."""
  if isinstance(feature, Ragged):
    return Ragged(selected(feature.values, np.repeat(kept, feature.lengths)), feature.lengths[kept])
  return feature[kept]


Batch = Mapping[str, Ragged | np.ndarray]
"""Features of several examples: a `Ragged` for a sequence, else an array of shape `(rows,)`."""
