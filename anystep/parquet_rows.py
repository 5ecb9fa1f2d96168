"""Rows of Parquet files, as features and as records (https://parquet.apache.org/docs/file-format)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
from etils import epath

from anystep.errors import AnystepError, ExitCode, nearest
from anystep.example_writing import serialize_examples
from anystep.examples import Ragged
from anystep.manifest import Feature

# Rows that are decoded at a time: so many, and of so many bytes by what the file says of their row group.
_DECODED_ROWS = 1024
_DECODED_BYTES = 1 << 24
# What is read at a time of a column's chunk, which may be as large as the file.
_READ_BYTES = 1 << 22
# Arrow's names of what numpy names otherwise.
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
# What tf.train.Example, which has float32 and int64, would not give back as it was.
_INEXACT = ("float64", "uint64")


def parquet() -> Any:
  """The module `pyarrow.parquet`, imported for those alone who read Parquet files.

  Raises:
    AnystepError: 78 `package_missing`.
  """
  try:
    import pyarrow.parquet
  except ModuleNotFoundError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "package_missing",
      expected="PyArrow, for Parquet files",
      got=str(error),
      fix="pip install pyarrow",
    ) from error
  return pyarrow.parquet


class ParquetRows:
  """The rows of a Parquet file. A row group is read at a time, and some rows of it are decoded at once.

  Thread-safe.

  Args:
    open_file: opens the file, for reading in binary, anew at each call.
    path: what errors call it.
    columns: those wanted; None for all.

  Attributes:
    features: the columns by name, sorted.
    group_rows: of each row group, `(row groups,) int64`.

  Raises:
    AnystepError: 78 `feature_form` for a column that is no feature, `column_missing`, `package_missing`.
    pyarrow.ArrowException: where the file is no Parquet file.
  """

  def __init__(
    self,
    open_file: Callable[[], IO[bytes] | io.RawIOBase],
    path: object,
    *,
    columns: Sequence[str] | None = None,
  ):
    self._open_file = open_file
    self._path = path
    with open_file() as file:
      self._metadata = parquet().read_metadata(file)
    schema = self._metadata.schema.to_arrow_schema()
    names = schema.names if columns is None else columns
    self.features = {name: self._feature(schema, name) for name in sorted(names)}
    self._groups = [self._metadata.row_group(k) for k in range(self._metadata.num_row_groups)]
    self.group_rows = np.array([group.num_rows for group in self._groups], np.int64)

  def __len__(self) -> int:
    return int(self.group_rows.sum())

  def batches(self) -> Iterator[dict[str, Ragged | np.ndarray]]:
    """All rows, some at a time, each column as one batch.

    Raises:
      AnystepError: 65 `column_null`.
    """
    for group in range(len(self.group_rows)):
      for batch in self._decoded(group):
        yield self._columns(batch)

  def read_records(self, places: np.ndarray) -> list[bytes]:
    """Rows as serialized `tf.train.Example`; a row group with some of them is decoded once, to the last.

    Args:
      places: in the file, `(records,) int64`, ascending.

    Raises:
      AnystepError: 65 `column_null`.
    """
    records: list[bytes] = []
    stops = np.cumsum(self.group_rows)
    for group in np.unique(np.searchsorted(stops, places, side="right")).tolist():
      start = stops[group] - self.group_rows[group]
      first, last = np.searchsorted(places, [start, stops[group]]).tolist()
      for batch in self._decoded(group, places[first:last] - start):
        records += _serialized(self._columns(batch))
    return records

  def check_records(self) -> None:
    """Refuses columns of which a record would not give every value back as it is.

    Nulls are looked for where the file's statistics do not rule them out. For a column of lists these count
    empty lists as well, so such a column may have to be read.

    Raises:
      AnystepError: 78 `feature_form`; 65 `column_null`.
    """
    for name, feature in self.features.items():
      if feature.dtype in _INEXACT:
        raise self._wrong_form(name, feature.dtype)
    doubtful = [name for name in self.features if self._may_have_nulls(name)]
    for group in range(len(self.group_rows) if doubtful else 0):
      for batch in self._decoded(group, columns=doubtful):
        for name in doubtful:
          self._flat(name, batch.column(name))

  def _may_have_nulls(self, name: str) -> bool:
    chunks = [group.column(k) for group in self._groups for k in range(group.num_columns)]
    own = [chunk.statistics for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{name}.")]
    return any(statistics is None or statistics.null_count != 0 for statistics in own)

  def _feature(self, schema: Any, name: str) -> Feature:
    import pyarrow as pa

    if schema.get_field_index(name) < 0:
      raise AnystepError(
        ExitCode.CONFIG,
        "column_missing",
        path=self._path,
        feature=name,
        expected=f"one column of this name among {', '.join(schema.names)}",
        got=f"{schema.names.count(name)}",
        fix=f"name one of the columns that the file has, such as {nearest(name, schema.names)}",
      )
    kind, shape = schema.field(name).type, []
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
      shape, kind = [None], kind.value_type
    while pa.types.is_fixed_size_list(kind) and kind.list_size:
      shape, kind = [*shape, kind.list_size], kind.value_type
    if _is_text(kind):
      return Feature(dtype="string", shape=tuple(shape))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
      return Feature(dtype=_FLOATS.get(str(kind), str(kind)), shape=tuple(shape))
    raise self._wrong_form(name, schema.field(name).type)

  def _wrong_form(self, name: str, got: object) -> AnystepError:
    return AnystepError(
      ExitCode.CONFIG,
      "feature_form",
      path=self._path,
      feature=name,
      expected="integers that int64 holds, bool, float16, float32 or texts, or lists of them",
      got=str(got),
      fix="leave the column out of those that are read, or write it anew in one of these types",
    )

  def _decoded(
    self, group: int, wanted: np.ndarray | None = None, *, columns: Sequence[str] | None = None
  ) -> Iterator[Any]:
    """A row group's rows as Arrow's record batches: all, or those at some places in it, ascending."""
    import pyarrow as pa

    rows, start = int(self.group_rows[group]), 0
    fitting = _DECODED_BYTES * rows // max(self._groups[group].total_byte_size, 1)
    with self._open_file() as opened:
      file = parquet().ParquetFile(opened, metadata=self._metadata, buffer_size=_READ_BYTES, pre_buffer=False)
      batches = file.iter_batches(
        max(min(fitting, _DECODED_ROWS), 1),
        row_groups=[group],
        columns=list(self.features if columns is None else columns),
        use_threads=False,
      )
      for batch in batches:
        stop = start + len(batch)
        if wanted is None:
          yield batch
        else:
          first, last = np.searchsorted(wanted, [start, stop]).tolist()
          if first < last:
            yield batch if last - first == len(batch) else batch.take(pa.array(wanted[first:last] - start))
          if last == len(wanted):
            return
        start = stop
    if start != rows:
      raise ValueError(f"row group {group} has {start} rows in place of {rows}")

  def _columns(self, batch: Any) -> dict[str, Ragged | np.ndarray]:
    columns: dict[str, Ragged | np.ndarray] = {}
    for name, feature in self.features.items():
      values = _numpy(self._flat(name, batch.column(name)))
      if not feature.sequence:
        columns[name] = values
        continue
      length, *inner = feature.shape
      if length is None:
        lengths = batch.column(name).value_lengths().to_numpy().astype(np.int64)
      else:
        lengths = np.full(len(batch), length, np.int64)
      columns[name] = Ragged(values.reshape(lengths.sum(), *inner), lengths)
    return columns

  def _flat(self, name: str, column: Any) -> Any:
    """A column's values without its lists, none of which is missing."""
    while not column.null_count and hasattr(column, "flatten"):
      column = column.flatten()
    if column.null_count:
      raise AnystepError(
        ExitCode.DATA,
        "column_null",
        path=self._path,
        feature=name,
        expected="a value in every row: records have no nulls",
        got=f"{column.null_count} nulls among {len(column)} values",
        fix="write the file anew with a value in their place, or leave the column out of those that are read",
      )
    return column


def open_parquet(path: epath.PathLike, columns: Sequence[str] | None = None) -> ParquetRows:
  """The rows of a Parquet file.

  Raises:
    AnystepError: 65 `file_container` where it is none, or not all of one; 78 as `ParquetRows`.
  """
  try:
    return ParquetRows(lambda: epath.Path(path).open("rb"), path, columns=columns)
  except ValueError as error:
    raise AnystepError(
      ExitCode.DATA,
      "file_container",
      path=path,
      expected="a Parquet file, and all of it",
      got=str(error),
      fix="fetch or write the file anew",
    ) from error


def check_same_columns(
  path: object, found: Mapping[str, Feature], *, expected: Mapping[str, Feature]
) -> None:
  """Refuses a file whose columns are not those of another.

  Raises:
    AnystepError: 78 `files_differ`.
  """
  for name in sorted({*found, *expected}):
    if found.get(name) != expected.get(name):
      raise AnystepError(
        ExitCode.CONFIG,
        "files_differ",
        path=path,
        feature=name,
        expected=_shown(expected.get(name)),
        got=_shown(found.get(name)),
        fix="write the files anew with the same columns, or name those that are read",
      )


def _shown(feature: Feature | None) -> str:
  return "no column" if feature is None else f"{feature.dtype}{list(feature.shape)}"


def _is_text(kind: Any) -> bool:
  import pyarrow as pa

  return pa.types.is_fixed_size_binary(kind) or kind in (
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
  )


def _numpy(values: Any) -> np.ndarray:
  """Arrow's values; texts as bytes, for a record has no others."""
  import pyarrow as pa

  if _is_text(values.type):
    return np.fromiter(values.cast(pa.large_binary()).to_pylist(), object, len(values))
  return values.to_numpy(zero_copy_only=False)


def _serialized(columns: Mapping[str, Ragged | np.ndarray]) -> list[bytes]:
  data, ends = serialize_examples(columns)
  content, stops = data.tobytes(), ends.tolist()
  return [content[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
