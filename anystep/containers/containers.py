"""Record files, read in whole blocks or by single records, and written.

Caches are written in two containers: ArrayRecord, whose chunks are blocks, and TFRecord. Parquet files are
read where they are. `FORMATS` is the table of them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from etils import epath

from anystep.compiled import is_fast
from anystep.containers.array_record_library import LibraryBlocks, UnknownChunkError, open_writer
from anystep.containers.checked_file import num_parts
from anystep.containers.file_ranges import FileStamp, Ranges, open_ranges
from anystep.containers.tfrecord import TFRecordBlocks, write_tfrecord

ARRAY_RECORD = "array_record"
TFRECORD = "tfrecord"
PARQUET = "parquet"
# PyArrow reads 64 KiB at once, which are in two parts with a checksum each.
_PARQUET_FOOTER_BYTES = 2 << 16


class BlockReader(Protocol):
  """Reader of a shard's records. Several threads may read, but none while the reader is closed.

  Attributes:
    index_bytes: estimated memory of the open reader's index of records.
  """

  index_bytes: int

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block.

    Raises:
      AnystepError: 65 `shard_corrupt`; 74 `shard_unreadable`.
      IndexError: for a block that the shard does not have.
    """

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Return single records by their places in the shard, in any order; a place may occur twice.

    Raises:
      AnystepError: 65 `shard_corrupt`; 74 `shard_unreadable`.
      IndexError: for a place that the shard does not have.
    """

  def spans(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
    """Return the ranges of the file's bytes, [start, stop) each, that hold records [start, stop).

    Whoever fetches these first reads the records without waiting for the file.
    """

  def stamp(self) -> FileStamp | None:
    """The stamp of the file that is read; None if the file is gone."""

  def close(self) -> None:
    """Closes the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerFormat:
  """A format of record files.

  Attributes:
    open: opens a shard, as `open_blocks` does.
    write: writes records to a file with options, and returns its offsets if it has any; None for a format
      that is only read, of files that existed before their cache.
    options: the writer's options for blocks of so many records.
    offsets_shape: the shape of the table of offsets beside a file, by the file's bytes and records; None
      where a file needs no table.
    index_span: the range of bytes that opening a file mostly reads, by the file's bytes and blocks.
  """

  open: Callable[..., BlockReader]
  write: Callable[[epath.PathLike, Sequence[bytes], str], np.ndarray | None] | None = None
  options: Callable[[int], str] = lambda block_records: ""
  offsets_shape: Callable[[int, int], tuple[int, ...]] | None = None
  index_span: Callable[[int, int], tuple[int, int]] = lambda num_bytes, num_blocks: (0, 0)


def container_options(container: str, block_records: int) -> str:
  """Return the options for the writer of a cache's shards.

  >>> container_options("array_record", 32)
  'group_size:32,zstd:1'
  >>> container_options("tfrecord", 32)
  ''
  """
  return _written(container).options(block_records)


def open_blocks(
  container: str,
  path: epath.PathLike,
  *,
  num_records: int,
  block_records: int,
  offsets: np.ndarray | None = None,
  columns: Sequence[str] = (),
  open_ranges: Callable[[epath.PathLike], Ranges] = open_ranges,
) -> BlockReader:
  """Open a shard.

  Args:
    container: a name in `FORMATS`.
    path: the file.
    num_records: the manifest's number of records in the file.
    block_records: g.
    offsets: the table beside the file, `uint64` of the container's `offsets_shape`. It is not copied.
    columns: for a Parquet file, names of the columns of a record.
    open_ranges: opens the file.

  Raises:
    AnystepError: 65 `shard_corrupt`, `shard_records` or `offsets_invalid`; 74 `shard_unreadable`.
  """
  form = find_format(container)
  if form.offsets_shape is not None and offsets is None:
    raise ValueError(f"a file in {container} is opened with its offsets")
  return form.open(
    path,
    num_records=num_records,
    block_records=block_records,
    offsets=offsets,
    columns=columns,
    open_ranges=open_ranges,
  )


def write_shard(
  container: str, path: epath.PathLike, records: Sequence[bytes], *, options: str
) -> np.ndarray | None:
  """Write a shard; its bytes depend only on the container, the records and the options.

  Args:
    container: a name in `CONTAINERS`.
    path: the file.
    records: in their order.
    options: the result of `container_options`.

  Returns:
    The file's offsets, `uint64` of the container's `offsets_shape`; None where it has none.
  """
  write = _written(container).write
  assert write is not None
  return write(path, records, options)


def find_format(name: str) -> ContainerFormat:
  """Return the format of a container, by its name.

  Raises:
    ValueError: for any other name.
  """
  if name not in FORMATS:
    raise ValueError(f"expected a container of {(*FORMATS,)}, got {name!r}")
  return FORMATS[name]


def _written(name: str) -> ContainerFormat:
  if name not in CONTAINERS:
    raise ValueError(f"expected a container of {CONTAINERS}, got {name!r}")
  return FORMATS[name]


def _open_array_record(
  path: epath.PathLike,
  *,
  num_records: int,
  block_records: int,
  open_ranges: Callable[[epath.PathLike], Ranges],
  **unused: object,
) -> BlockReader:
  """Open a file of the cache job by our own reader, and any other file by the library's."""
  size = {"num_records": num_records, "block_records": block_records}
  if is_fast():
    from anystep.containers.array_record_blocks import ArrayRecordBlocks

    with contextlib.suppress(UnknownChunkError):
      return ArrayRecordBlocks(str(path), open_ranges(path), **size)
  return LibraryBlocks(path, **size)


def _array_record_index(num_bytes: int, num_blocks: int) -> tuple[int, int]:
  """Return the range of the index, with up to 20 bytes a block, and of the begin of the file's last 64 KiB.

  The index ends up to 64 KiB before these.
  """
  last = num_bytes - (1 << 16)
  return max(last - (1 << 16) - 20 * num_blocks, 0), max(last + (1 << 10), 0)


def write_array_record(path: epath.PathLike, records: Sequence[bytes], *, options: str) -> None:
  """Write an ArrayRecord file; its bytes depend only on the records and options."""
  writer = open_writer(path, options)
  for record in records:
    writer.write(record)
  writer.close()


def _write_tfrecord(path: epath.PathLike, records: Sequence[bytes], options: str) -> np.ndarray:
  if options:
    raise ValueError(f"a TFRecord file has no options, got {options!r}")
  return write_tfrecord(path, records)


def _open_parquet(path: epath.PathLike, **arguments: Any) -> BlockReader:
  # Imported late: it imports Parquet's reader of records, which other containers do not need.
  from anystep.containers.parquet_blocks import ParquetBlocks

  return ParquetBlocks(path, **arguments)


# By name, as manifests have it. A new container is a file in this room and a row here.
FORMATS: Mapping[str, ContainerFormat] = {
  ARRAY_RECORD: ContainerFormat(
    open=_open_array_record,
    write=lambda path, records, options: write_array_record(path, records, options=options),
    # A block is one chunk. Zstandard's fastest level shrinks token ids to a third, in less time than parsing.
    options=lambda block_records: f"group_size:{block_records},zstd:1",
    index_span=_array_record_index,
  ),
  TFRECORD: ContainerFormat(
    open=lambda path, *, columns, **arguments: TFRecordBlocks(path, **arguments),
    write=_write_tfrecord,
    offsets_shape=lambda num_bytes, num_records: (num_records,),
  ),
  # The offset and the checksum of each part.
  PARQUET: ContainerFormat(
    open=_open_parquet,
    offsets_shape=lambda num_bytes, num_records: (num_parts(num_bytes), 2),
    index_span=lambda num_bytes, num_blocks: (max(num_bytes - _PARQUET_FOOTER_BYTES, 0), num_bytes),
  ),
}
# The containers that a cache can be written in.
CONTAINERS = tuple(name for name, form in FORMATS.items() if form.write)
