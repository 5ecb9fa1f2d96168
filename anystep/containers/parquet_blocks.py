"""Shards that are Parquet files, read by row groups and fully checked.

Parquet's own checksums are optional, and few writers write them. So a table beside the file has the checksum
of each 64 KiB, and each part is compared with it before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from etils import epath

from anystep.containers.checked_file import CheckedFile, whole_parts
from anystep.containers.file_ranges import (
  FileStamp,
  Ranges,
  block_range,
  check_places,
  corrupt,
  wrong_records,
)
from anystep.errors import AnystepError
from anystep.records.parquet_rows import ParquetRows, parquet

# An open file also holds its decoded footer in memory: about this much for each chunk of a column.
_CHUNK_BYTES = 512


class ParquetBlocks:
  """A `BlockReader` of a Parquet file: a record is a row, a serialized `tf.train.Example` of its columns.

  A block costs reading the row groups that it overlaps. If `block_records` is the number of rows of the
  largest row group, that is one row group if all are equally large.

  Args:
    path: the file.
    num_records: the manifest's number of records in the file.
    block_records: g.
    offsets: the result of `checked_file.part_table`; not copied.
    columns: names of the columns of a record.
    open_ranges: opens the file.

  Raises:
    AnystepError: 65 `shard_corrupt`, `shard_records` or `offsets_invalid`; 74 `shard_unreadable`; 78
      `feature_form`, `column_missing`, `package_missing`.
  """

  def __init__(
    self,
    path: epath.PathLike,
    *,
    num_records: int,
    block_records: int,
    offsets: np.ndarray,
    columns: Sequence[str],
    open_ranges: Callable[[epath.PathLike], Ranges],
  ):
    self._path = str(path)
    self._num_records = num_records
    self._block_records = block_records
    # Before the file is opened, so that a missing package is not reported as a fault of the file.
    parquet()
    self._ranges = open_ranges(path)
    try:
      self._rows = self._open_rows(offsets, columns)
    except AnystepError:
      self.close()
      raise
    self.index_bytes = offsets.nbytes + _CHUNK_BYTES * len(columns) * len(self._rows.group_rows)

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block."""
    start, stop = block_range(block, self._block_records, self._num_records)
    return self._read(np.arange(start, stop))

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Return single records by place; each row group with some of them is read once."""
    checked = np.array(check_places(places, self._num_records), np.int64)
    distinct, inverse = np.unique(checked, return_inverse=True)
    records = self._read(distinct)
    return [records[k] for k in inverse.tolist()]

  def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of the columns' chunks in the row groups that hold records [start, stop)."""
    spans = self._rows.column_spans(start, stop)
    return [whole_parts(begin, end, size=self._ranges.size) for begin, end in spans]

  def stamp(self) -> FileStamp:
    """The stamp of the open file."""
    return self._ranges.stamp()

  def close(self) -> None:
    """Closes the file."""
    self._ranges.close()

  def _open_rows(self, offsets: np.ndarray, columns: Sequence[str]) -> ParquetRows:
    def open_file() -> CheckedFile:
      return CheckedFile(self._path, self._ranges, offsets)

    try:
      rows = ParquetRows(open_file, self._path, columns=columns)
    except _failures() as error:
      raise corrupt(self._path, error) from error
    if len(rows) != self._num_records:
      raise wrong_records(self._path, self._num_records, len(rows))
    return rows

  def _read(self, places: np.ndarray) -> list[bytes]:
    try:
      return self._rows.read_records(places)
    except _failures() as error:
      raise corrupt(self._path, error) from error


def _failures() -> tuple[type[Exception], ...]:
  """Exceptions that Arrow raises on bytes that are no Parquet file's."""
  import pyarrow as pa

  return pa.ArrowException, OSError
