"""The rows that a reader wants of every batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.whole_numbers import is_whole_number, whole_numbers

_FIX = "give rows as a slice, row numbers, a bool for each row of a batch, or (host, host count)"


def rows_by_batch_size(
  rows: slice | Iterable[int] | tuple[int, int], batch_sizes: Iterable[int]
) -> dict[int, np.ndarray]:
  """Return the row numbers wanted of a batch, `(rows,) int64`, by batch size.

  Raises:
    AnystepError: 78 `rows`.
  """
  sizes = sorted(batch_sizes)
  if isinstance(rows, slice):
    try:
      return {size: np.arange(size)[rows] for size in sizes}
    except (TypeError, ValueError) as error:
      raise _wrong_rows(rows, expected="a slice of row numbers") from error
  if not isinstance(rows, tuple):
    # An iterator gives its rows only once.
    listed = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, np.ndarray) else rows
    return {size: check_rows(listed, size) for size in sizes}
  if len(rows) != 2 or not all(map(is_whole_number, rows)):
    raise _wrong_rows(rows, expected="(host, host count), two whole numbers")
  host, host_count = map(int, rows)
  common = math.gcd(*sizes)
  if host_count < 1 or common % host_count or not 0 <= host < host_count:
    batches = " and of ".join(map(str, sizes))
    raise _wrong_rows(
      rows,
      expected=f"(host, host count) with a count that divides batches of {batches} rows",
      fix=f"use a number of hosts among {[n for n in range(1, common + 1) if common % n == 0]}",
    )
  return {size: np.arange(size).reshape(host_count, -1)[host] for size in sizes}


def check_rows(rows: np.ndarray | Iterable[int], batch_size: int) -> np.ndarray:
  """Return row numbers of a batch as `int64`; for a mask with a bool for each row, where it is true.

  Raises:
    AnystepError: 78 `rows` for a row that a batch does not have, and for other values.
  """
  expected = f"0 to {batch_size - 1}"
  try:
    listed = rows if isinstance(rows, np.ndarray) else list(rows)
    if isinstance(listed, list) and listed and all(isinstance(row, (bool, np.bool_)) for row in listed):
      listed = np.array(listed)
    if isinstance(listed, np.ndarray) and listed.dtype == bool:
      if listed.shape != (batch_size,):
        raise _wrong_rows(listed.tolist(), expected=f"a mask of {batch_size} rows")
      return np.flatnonzero(listed)
    numbers = whole_numbers(listed, "rows")
  except (TypeError, IndexError) as error:
    raise _wrong_rows(rows, expected=f"{expected}, or a mask of {batch_size} rows") from error
  outside = numbers[(numbers < 0) | (numbers >= batch_size)]
  if outside.size:
    raise _wrong_rows(repr(outside.tolist()), expected=expected)
  if len(numbers) == batch_size > 2 and numbers.max() <= 1:
    # Probably a mask of 0 and 1: as row numbers they would be the first two rows again and again.
    raise _wrong_rows(repr(numbers.tolist()[:20]), expected="row numbers, or a mask of bools")
  return numbers


def _wrong_rows(rows: object, *, expected: str, fix: str = _FIX) -> AnystepError:
  return AnystepError(ExitCode.CONFIG, "rows", expected=expected, got=rows, fix=fix)
