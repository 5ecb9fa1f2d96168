"""Shards that are Parquet files, read by row groups and checked to the bit.

Parquet's own checksums are optional, and few writers write them. So a table beside the file has the checksum
of each 64 KiB of it, and whatever is read of the file is compared with that first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from etils import epath

from anystep.containers.checked_file import CheckedFile
from anystep.containers.file_ranges import FileRanges, FileStamp, block_range, corrupt, inside, wrong_records
from anystep.errors import AnystepError
from anystep.records.parquet_rows import ParquetRows, parquet

# Beside the table of parts an open file holds its footer, decoded: about so much for a chunk of a column.
_CHUNK_BYTES = 512


class ParquetBlocks:
  """A `BlockReader` of a Parquet file: a record is a row, a serialized `tf.train.Example` of its columns.

  A block costs the reading of the row groups that it overlaps; `block_records` of the largest row group's
  rows make that one where all are of a size, and at most two of each elsewhere.

  Args:
    path: the file.
    num_records: what the manifest says it holds.
    block_records: g.
    offsets: as `checked_file.part_table` gives them; held, not copied.
    columns: those that a record has.

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
  ):
    self._path = str(path)
    self._num_records = num_records
    self._block_records = block_records
    # Before the file is opened: what is not installed is no fault of it.
    parquet()
    self._ranges = FileRanges(path)
    try:
      self._rows = self._opened(offsets, columns)
    except AnystepError:
      self.close()
      raise
    self.index_bytes = offsets.nbytes + _CHUNK_BYTES * len(columns) * len(self._rows.group_rows)

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block."""
    start, stop = block_range(block, self._block_records, self._num_records)
    return self._read(np.arange(start, stop))

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Single records by place; each row group that has some of them is read once."""
    own, which = np.unique(np.array(inside(places, self._num_records), np.int64), return_inverse=True)
    records = self._read(own)
    return [records[k] for k in which.tolist()]

  def stamp(self) -> FileStamp:
    """What the open file is known by."""
    return self._ranges.stamp()

  def close(self) -> None:
    """Closes the file."""
    self._ranges.close()

  def _opened(self, offsets: np.ndarray, columns: Sequence[str]) -> ParquetRows:
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
  """What Arrow raises of bytes that are no Parquet file's."""
  import pyarrow as pa

  return pa.ArrowException, OSError
