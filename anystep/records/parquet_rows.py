"""Rows of Parquet files, as features and as records (https://parquet.apache.org/docs/file-format)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
from etils import epath

from anystep.errors import AnystepError, ExitCode, make_package_error, one_line
from anystep.features.ragged import Ragged
from anystep.records.arrow_columns import DECODED_ROWS, column_features, columns_of, flat_values, wrong_form
from anystep.records.writing import serialize_examples

# Bytes of the rows that are decoded at a time, by the file's own count for their row group.
_DECODED_BYTES = 1 << 24
# Bytes of a column's chunk that are read at a time: the chunk may be as large as the file.
_READ_BYTES = 1 << 22
# Dtypes that tf.train.Example, with its float32 and int64, cannot hold exactly.
_INEXACT = ("float64", "uint64")


def parquet() -> Any:
  """Import `pyarrow.parquet`, which only readers of Parquet files need.

  Raises:
    AnystepError: 78 `package_missing`.
  """
  try:
    import pyarrow.parquet
  except ModuleNotFoundError as error:
    raise make_package_error(error, expected="PyArrow, for Parquet files", package="pyarrow") from error
  return pyarrow.parquet


class ParquetRows:
  """Rows of a Parquet file; it is read by row groups, and decoded some rows at a time.

  Thread-safe.

  Args:
    open_file: opens the file for reading in binary; each call opens it again.
    path: the file's path, for errors.
    columns: names of the columns to read; None for all.

  Attributes:
    features: the columns' features, sorted by name.
    group_rows: number of rows in each row group, `(row groups,) int64`.

  Raises:
    AnystepError: 78 `feature_form` for a column whose type no feature has, `column_missing`,
      `package_missing`.
    pyarrow.ArrowException: if the file is no Parquet file.
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
    self.features = column_features(schema, path, columns)
    self._groups = [self._metadata.row_group(k) for k in range(self._metadata.num_row_groups)]
    self.group_rows = np.array([group.num_rows for group in self._groups], np.int64)

  def __len__(self) -> int:
    return int(self.group_rows.sum())

  def batches(self, groups: Iterable[int] | None = None) -> Iterator[dict[str, Ragged | np.ndarray]]:
    """Yield all rows, or those of some row groups, in batches of features by name.

    Raises:
      AnystepError: 65 `column_null`.
    """
    starts = np.cumsum(self.group_rows) - self.group_rows
    for group in range(len(self.group_rows)) if groups is None else groups:
      start = int(starts[group])
      for batch in self._decode_group(group):
        yield columns_of(batch, self.features, self._path, rows=range(start, start + len(batch)))
        start += len(batch)

  def read_records(self, places: np.ndarray) -> list[bytes]:
    """Return rows as serialized `tf.train.Example`; each row group is decoded once, up to the last such row.

    Args:
      places: numbers of the rows in the file, `(records,) int64`, ascending.

    Raises:
      AnystepError: 65 `column_null`.
    """
    records: list[bytes] = []
    stops = np.cumsum(self.group_rows)
    for group in np.unique(np.searchsorted(stops, places, side="right")).tolist():
      start = stops[group] - self.group_rows[group]
      first, last = np.searchsorted(places, [start, stops[group]]).tolist()
      for batch in self._decode_group(group, places[first:last] - start):
        rows = places[len(records) : len(records) + len(batch)]
        records += _serialize(columns_of(batch, self.features, self._path, rows=rows))
    return records

  def column_spans(self, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of the file's bytes that hold the columns of rows [start, stop), by row group."""
    stops = np.cumsum(self.group_rows)
    first, last = np.searchsorted(stops, [start, stop - 1], side="right").tolist()
    chunks = [
      group.column(k)
      for group in self._groups[first : last + 1]
      for k in range(group.num_columns)
      if group.column(k).path_in_schema.partition(".")[0] in self.features
    ]
    begins = [min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))) for chunk in chunks]
    return [(begin, begin + chunk.total_compressed_size) for begin, chunk in zip(begins, chunks, strict=True)]

  def check_records(self) -> None:
    """Refuse columns with values that a record cannot hold exactly.

    A column is read to look for nulls if the file's statistics do not rule them out. For lists the statistics
    also count empty lists as nulls, so such a column may have to be read.

    Raises:
      AnystepError: 78 `feature_form`; 65 `column_null`.
    """
    for name, feature in self.features.items():
      if feature.dtype in _INEXACT:
        raise wrong_form(self._path, name, feature.dtype)
    doubtful = [name for name in self.features if self._may_have_nulls(name)]
    start = 0
    for group in range(len(self.group_rows) if doubtful else 0):
      for batch in self._decode_group(group, columns=doubtful):
        for name in doubtful:
          flat_values(batch.column(name), name, self._path, rows=range(start, start + len(batch)))
        start += len(batch)

  def _may_have_nulls(self, name: str) -> bool:
    chunks = [group.column(k) for group in self._groups for k in range(group.num_columns)]
    of_column = [chunk.statistics for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{name}.")]
    return any(statistics is None or statistics.null_count != 0 for statistics in of_column)

  def _decode_group(
    self, group: int, positions: np.ndarray | None = None, *, columns: Sequence[str] | None = None
  ) -> Iterator[Any]:
    """Yield rows of a row group as Arrow record batches.

    Args:
      group: the row group.
      positions: which of its rows, ascending; None for all.
      columns: names of the columns; None for all features.
    """
    import pyarrow as pa

    rows, start = int(self.group_rows[group]), 0
    fitting = _DECODED_BYTES * rows // max(self._groups[group].total_byte_size, 1)
    with self._open_file() as opened:
      file = parquet().ParquetFile(opened, metadata=self._metadata, buffer_size=_READ_BYTES, pre_buffer=False)
      batches = file.iter_batches(
        max(min(fitting, DECODED_ROWS), 1),
        row_groups=[group],
        columns=list(self.features if columns is None else columns),
        use_threads=False,
      )
      for batch in batches:
        stop = start + len(batch)
        if positions is None:
          yield batch
        else:
          first, last = np.searchsorted(positions, [start, stop]).tolist()
          if last - first == len(batch):
            yield batch
          elif first < last:
            yield batch.take(pa.array(positions[first:last] - start))
          if last == len(positions):
            return
        start = stop
    if start != rows:
      raise ValueError(f"row group {group} has {start} rows instead of {rows}")


def open_parquet(path: epath.PathLike, columns: Sequence[str] | None = None) -> ParquetRows:
  """Open a Parquet file.

  Raises:
    AnystepError: 65 `file_container` if it is no complete Parquet file; 78 as `ParquetRows`.
  """
  try:
    return ParquetRows(lambda: epath.Path(path).open("rb"), path, columns=columns)
  except ValueError as error:
    raise AnystepError(
      ExitCode.DATA,
      "file_container",
      path=path,
      expected="a complete Parquet file",
      got=one_line(error, with_type=False),
      fix="fetch or write the file anew",
    ) from error


def _serialize(columns: Mapping[str, Ragged | np.ndarray]) -> list[bytes]:
  data, ends = serialize_examples(columns)
  content, stops = data.tobytes(), ends.tolist()
  return [content[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
