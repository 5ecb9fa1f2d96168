"""Record files, read in whole blocks or by single records, and written.

Caches are written in two containers: ArrayRecord, whose chunks are blocks, and TFRecord, whose records' byte
offsets stand in a table beside the file (https://www.tensorflow.org/tutorials/load_data/tfrecord). Parquet
files are read where they are (`anystep.parquet_blocks`).
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from etils import epath
from google_crc32c import value as checksum

from anystep.compiled import is_fast
from anystep.containers.array_record_library import LibraryBlocks, UnknownChunkError, open_writer
from anystep.containers.file_ranges import (
  RESTORE,
  FileRanges,
  FileStamp,
  block_range,
  corrupt,
  inside,
  unreadable,
  wrong_records,
)
from anystep.errors import AnystepError, ExitCode

ARRAY_RECORD = "array_record"
TFRECORD = "tfrecord"
# Those that a cache can be written in.
CONTAINERS = (ARRAY_RECORD, TFRECORD)
# Of files that were there before; nothing is written in it.
PARQUET = "parquet"

# Before a TFRecord's data: its length in 8 bytes and their checksum; after it: the data's checksum.
_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_FRAME_BYTES = _HEADER_BYTES + _FOOTER_BYTES


class BlockReader(Protocol):
  """A shard's records. Reads may run in several threads; none may run while the reader is closed.

  Attributes:
    index_bytes: what the open reader holds in memory to find records, an estimate.
  """

  index_bytes: int

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block.

    Raises:
      AnystepError: 65 `shard_corrupt`; 74 `shard_unreadable`.
      IndexError: for a block that the shard does not have.
    """

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Single records by their places in the shard, in any order; a place may come twice.

    Raises:
      AnystepError: 65 `shard_corrupt`; 74 `shard_unreadable`.
      IndexError: for a place that the shard does not have.
    """

  def stamp(self) -> FileStamp | None:
    """What the file that is read is known by; None where it is gone."""

  def close(self) -> None:
    """Closes the file."""


def container_options(container: str, block_records: int) -> str:
  """What the writer of a cache's shards is told.

  >>> container_options("array_record", 32)
  'group_size:32,zstd:1'
  >>> container_options("tfrecord", 32)
  ''
  """
  # A block is one chunk. Zstandard's fastest level: token ids shrink to a third at a cost below parsing's.
  return f"group_size:{block_records},zstd:1" if _known(container) == ARRAY_RECORD else ""


def open_blocks(
  container: str,
  path: epath.PathLike,
  *,
  num_records: int,
  block_records: int,
  offsets: np.ndarray | None = None,
  columns: Sequence[str] = (),
) -> BlockReader:
  """Opens a shard.

  Args:
    container: `array_record`, `tfrecord` or `parquet`.
    path: the file.
    num_records: what the manifest says it holds.
    block_records: g.
    offsets: of a TFRecord file, where each record's framing starts: `(records,) uint64`; of a Parquet file,
      its parts and their checksums: `(parts, 2) uint64`. It is not copied, so it may be a memory map.
    columns: of a Parquet file, those that a record has.

  Raises:
    AnystepError: 65 `shard_corrupt`, `shard_records` or `offsets_invalid`; 74 `shard_unreadable`.
  """
  if container == PARQUET:
    # It needs manifests' features, and manifests need this module.
    from anystep.containers.parquet_blocks import ParquetBlocks

    if offsets is None:
      raise ValueError("a Parquet file is opened with the offsets and checksums of its parts")
    return ParquetBlocks(
      path, num_records=num_records, block_records=block_records, offsets=offsets, columns=columns
    )
  if _known(container) == ARRAY_RECORD:
    return _open_array_record(path, num_records=num_records, block_records=block_records)
  if offsets is None:
    raise ValueError("a TFRecord file is opened with its offsets")
  return TFRecordBlocks(path, num_records=num_records, block_records=block_records, offsets=offsets)


def _open_array_record(path: epath.PathLike, *, num_records: int, block_records: int) -> BlockReader:
  """A reader of our own for blocks as the cache job writes them, the library's for any other file."""
  size = {"num_records": num_records, "block_records": block_records}
  if is_fast():
    from anystep.containers.array_record_blocks import ArrayRecordBlocks

    with contextlib.suppress(UnknownChunkError):
      return ArrayRecordBlocks(str(path), FileRanges(path), **size)
  return LibraryBlocks(path, **size)


def write_shard(
  container: str, path: epath.PathLike, records: Sequence[bytes], *, options: str
) -> np.ndarray | None:
  """Writes a shard; its bytes depend on the container, the records and the options alone.

  Args:
    container: `array_record` or `tfrecord`.
    path: the file.
    records: in their order.
    options: as `container_options` gives them.

  Returns:
    The offsets of a TFRecord file's records, `(records,) uint64`; None for ArrayRecord.
  """
  if _known(container) == ARRAY_RECORD:
    write_array_record(path, records, options=options)
    return None
  if options:
    raise ValueError(f"a TFRecord file has no options, got {options!r}")
  return write_tfrecord(path, records)


def _known(container: str) -> str:
  if container not in CONTAINERS:
    raise ValueError(f"expected a container of {CONTAINERS}, got {container!r}")
  return container


def write_array_record(path: epath.PathLike, records: Sequence[bytes], *, options: str) -> None:
  """Writes an ArrayRecord file; its bytes depend on the records and options alone."""
  writer = open_writer(path, options)
  for record in records:
    writer.write(record)
  writer.close()


def write_tfrecord(path: epath.PathLike, records: Sequence[bytes]) -> np.ndarray:
  """Writes a TFRecord file, the same bytes as TensorFlow would, and returns its offsets."""
  with epath.Path(path).open("wb") as file:
    for record in records:
      file.write(b"".join((_header(len(record)), record, _masked(checksum(record)))))
  return np.cumsum([0, *(len(record) + _FRAME_BYTES for record in records)], dtype=np.uint64)[:-1]


class TFRecordBlocks:
  """A `BlockReader` of a TFRecord file: a block is one read of a range of bytes, checked to the bit.

  Args:
    path: the file.
    num_records: what the manifest says it holds.
    block_records: g.
    offsets: where each record's framing starts, `(records,) uint64`; held, not copied.

  Raises:
    AnystepError: 65 `shard_corrupt`, `shard_records` or `offsets_invalid`; 74 `shard_unreadable`.
  """

  def __init__(self, path: epath.PathLike, *, num_records: int, block_records: int, offsets: np.ndarray):
    self._path = str(path)
    self._block_records = block_records
    self._num_records = num_records
    self._offsets = offsets
    self.index_bytes = offsets.nbytes
    if offsets.dtype != np.uint64 or offsets.ndim != 1:
      raise self._wrong_offsets("(records,) uint64", f"{offsets.shape} {offsets.dtype}")
    if len(offsets) != num_records:
      raise wrong_records(self._path, num_records, len(offsets))
    self._ranges = FileRanges(path)
    self._size = self._ranges.size
    try:
      self._check_offsets()
    except AnystepError:
      self.close()
      raise

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block."""
    return self._read(*block_range(block, self._block_records, self._num_records))

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Single records by place; each costs one read of its bytes."""
    return [self._read(place, place + 1)[0] for place in inside(places, self._num_records)]

  def stamp(self) -> FileStamp:
    """What the open file is known by."""
    return self._ranges.stamp()

  def close(self) -> None:
    """Closes the file."""
    self._ranges.close()

  def _check_offsets(self) -> None:
    """Refuses offsets by which bytes would be read that are no record's, or some not at all."""
    offsets, size = self._offsets, self._size
    expected = f"records from 0 on, one after the other, to the file's end at {size}"
    if not len(offsets):
      if size:
        raise self._wrong_offsets(expected, "no records")
      return
    if offsets[0] != 0:
      raise self._wrong_offsets(expected, f"the first at {offsets[0]}")
    if offsets.max() >= size:
      raise self._wrong_offsets(expected, f"one at {offsets.max()}")
    # Below the file's size they are no large numbers, so no difference wraps around.
    short = np.diff(offsets.view(np.int64), append=size) < _FRAME_BYTES
    if short.any():
      raise self._wrong_offsets(expected, f"no room for record {short.argmax()} at {offsets[short.argmax()]}")

  def _wrong_offsets(self, expected: str, got: str) -> AnystepError:
    return AnystepError(
      ExitCode.DATA, "offsets_invalid", path=self._path, expected=expected, got=got, fix=RESTORE
    )

  def _read(self, start: int, stop: int) -> list[bytes]:
    """Records [start, stop), at least one."""
    begin = int(self._offsets[start])
    end = self._size if stop == self._num_records else int(self._offsets[stop])
    try:
      content = self._ranges.read(begin, end)
    except OSError as error:
      raise unreadable(self._path, error) from error
    header, stops = 0, (self._offsets[start + 1 : stop] - self._offsets[start]).tolist()
    records: list[bytes] = []
    # Reading TFRecord files spends its time in this loop: three slices and a checksum for each record. What
    # a file cut short lacks fails the comparisons of the first record that lacks it.
    for next_header in (*stops, end - begin):
      data, footer = header + _HEADER_BYTES, next_header - _FOOTER_BYTES
      record = content[data:footer]
      if content[header:data] != _header(footer - data):
        raise corrupt(self._path, "another length or a wrong checksum of it", place=start + len(records))
      if content[footer:next_header] != _masked(checksum(record)):
        raise corrupt(self._path, "a wrong checksum of the data", place=start + len(records))
      records.append(record)
      header = next_header
    return records


# Lengths recur, so a record's header is made once and compared as a whole.
@functools.lru_cache(maxsize=1 << 14)
def _header(length: int) -> bytes:
  """What stands before a record's data: its length as uint64 and the masked CRC of these bytes."""
  encoded = struct.pack("<Q", length)
  return encoded + _masked(checksum(encoded))


def _masked(crc: int) -> bytes:
  """A CRC-32C as TFRecord files hold it: rotated right by 15 bits, plus a constant."""
  return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
