"""Columns of Arrow's record batches as features (https://arrow.apache.org/docs/format/Columnar.html)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged

# Limits on the rows that are decoded at a time: their number, and their bytes.
DECODED_ROWS = 1024
DECODED_BYTES = 1 << 24
# numpy's names for Arrow's types, where they differ.
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}


def column_features(schema: Any, path: object, columns: Sequence[str] | None = None) -> dict[str, Feature]:
  """Return the features of a file's columns, sorted by name.

  Args:
    schema: a `pyarrow.Schema`.
    path: the file's path, for errors.
    columns: names of the columns to read; None for all.

  Raises:
    AnystepError: 78 `feature_form` for a column whose type no feature has, `column_missing`.
  """
  names = schema.names if columns is None else columns
  return {name: _feature(schema, path, name) for name in sorted(names)}


def columns_of(
  batch: Any, features: Mapping[str, Feature], path: object, *, rows: Sequence[int] | np.ndarray
) -> dict[str, Ragged | np.ndarray]:
  """Return the columns of a record batch as features.

  Args:
    batch: a `pyarrow.RecordBatch`.
    features: the result of `column_features`.
    path: the file's path, for errors.
    rows: the number of each row in the file.

  Raises:
    AnystepError: 65 `column_null`.
  """
  columns: dict[str, Ragged | np.ndarray] = {}
  for name, feature in features.items():
    column = batch.column(name)
    values = _to_numpy(flat_values(column, name, path, rows=rows))
    if not feature.sequence:
      columns[name] = values
      continue
    length, *inner = feature.shape
    if length is None:
      lengths = column.value_lengths().to_numpy().astype(np.int64)
    else:
      lengths = np.full(len(batch), length, np.int64)
    columns[name] = Ragged(values.reshape(lengths.sum(), *inner), lengths)
  return columns


def flat_values(column: Any, name: str, path: object, *, rows: Sequence[int] | np.ndarray) -> Any:
  """Return a column's values without their lists.

  Raises:
    AnystepError: 65 `column_null` if a value or list is missing.
  """
  values = column
  while not values.null_count and hasattr(values, "flatten"):
    values = values.flatten()
  if values.null_count:
    row = next(k for k, value in enumerate(column.to_pylist()) if _has_null(value))
    raise AnystepError(
      ExitCode.DATA,
      "column_null",
      path=path,
      feature=name,
      row=int(rows[row]),
      expected="a value in every row: records have no nulls",
      got=f"{values.null_count} nulls among {len(values)} values",
      fix="write the file anew with values instead of nulls, or do not read this column",
    )
  return values


def small_batches(batch: Any) -> Iterator[Any]:
  """Split a record batch, or a table, into batches that are small enough to be decoded at once."""
  rows = max(min(DECODED_BYTES * len(batch) // max(batch.nbytes, 1), DECODED_ROWS), 1)
  for start in range(0, len(batch), rows):
    part = batch.slice(start, rows)
    yield from part.to_batches() if hasattr(part, "to_batches") else [part]


def check_same_columns(
  path: object, features: Mapping[str, Feature], *, expected: Mapping[str, Feature]
) -> None:
  """Refuse a file whose columns differ from another file's.

  Raises:
    AnystepError: 78 `files_differ`.
  """
  for name in sorted({*features, *expected}):
    if features.get(name) != expected.get(name):
      raise AnystepError(
        ExitCode.CONFIG,
        "files_differ",
        path=path,
        feature=name,
        expected=_format_feature(expected.get(name)),
        got=_format_feature(features.get(name)),
        fix="write the files anew with the same columns, or name the columns to read",
      )


def column_missing(path: object, name: str, columns: Sequence[str]) -> AnystepError:
  """The error for a column that a file does not have, or has several times."""
  return AnystepError(
    ExitCode.CONFIG,
    "column_missing",
    path=path,
    feature=name,
    expected=f"one column of this name among {', '.join(columns)}",
    got=f"{columns.count(name)}",
    fix=f"name one of the columns that the file has, such as {find_nearest(name, columns)}",
  )


def wrong_form(path: object, name: str, got: object) -> AnystepError:
  """The error for a column whose type records cannot hold."""
  return AnystepError(
    ExitCode.CONFIG,
    "feature_form",
    path=path,
    feature=name,
    expected="integers that int64 holds, bool, float16, float32 or texts, or lists of them",
    got=str(got),
    fix="do not read this column, or write it anew in one of these types",
  )


def _feature(schema: Any, path: object, name: str) -> Feature:
  import pyarrow as pa

  if schema.get_field_index(name) < 0:
    raise column_missing(path, name, schema.names)
  kind, shape = schema.field(name).type, []
  if pa.types.is_list(kind) or pa.types.is_large_list(kind):
    shape, kind = [None], kind.value_type
  while pa.types.is_fixed_size_list(kind) and kind.list_size:
    shape, kind = [*shape, kind.list_size], kind.value_type
  if _is_text(kind):
    return Feature(dtype="string", shape=tuple(shape))
  if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
    return Feature(dtype=_FLOATS.get(str(kind), str(kind)), shape=tuple(shape))
  raise wrong_form(path, name, schema.field(name).type)


def _has_null(value: Any) -> bool:
  return value is None or (isinstance(value, list) and any(map(_has_null, value)))


def _format_feature(feature: Feature | None) -> str:
  return "no column" if feature is None else f"{feature.dtype}{list(feature.shape)}"


def _is_text(kind: Any) -> bool:
  import pyarrow as pa

  return pa.types.is_fixed_size_binary(kind) or kind in (
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
  )


def _to_numpy(values: Any) -> np.ndarray:
  """Convert Arrow's values to numpy; texts become bytes, as in records."""
  import pyarrow as pa

  if _is_text(values.type):
    return np.fromiter(values.cast(pa.large_binary()).to_pylist(), object, len(values))
  return values.to_numpy(zero_copy_only=False)
