"""ArrayRecord files whose chunks are a cache's blocks, read by ranges of bytes.

array_record's own reader keeps threads, and locks that a fork copies as they are: after one record was read,
a forked process crashed or hung. What the cache job writes is read here instead, in any process. Needs numba.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anystep.containers.array_record_library import UnknownChunkError
from anystep.containers.file_ranges import (
  FileRanges,
  FileStamp,
  block_range,
  corrupt,
  inside,
  unreadable,
  wrong_records,
)
from anystep.containers.riegeli_chunks import BLOCK_BYTES, ChunkError, SimpleChunk, read_chunk, read_varint
from anystep.containers.riegeli_loops import read_footers

# The last block of a file says where the footer is, in less than this.
_POSTSCRIPT_BYTES = 1 << 10
# What compresses the chunks that are read here, as writers' options name it.
_READ_HERE = (b"uncompressed", b"zstd:")
_MAGIC = 0x71930E704FDAE05E
_VERSION_READ = 1
# Fields of the messages in array_record's layout.proto: of the postscript, of the footer's first record, and
# of the metadata in that.
_FOOTER_OFFSET, _POSTSCRIPT_MAGIC = 1, 2
_METADATA = 1
_VERSION, _NUM_CHUNKS, _NUM_RECORDS, _WRITER_OPTIONS = 1, 2, 3, 4
# Protobuf's wire type of fields that have a length.
_HAS_LENGTH = 2


class ArrayRecordBlocks:
  """A `BlockReader` of an ArrayRecord file, each of whose chunks is a block.

  Args:
    path: what errors call it.
    ranges: the file; closed with the reader, and where it is refused.
    num_records: what the manifest says it holds.
    block_records: g.

  Raises:
    UnknownChunkError: for a file with other chunks than blocks, or in an encoding that is not read here.
    AnystepError: 65 `shard_corrupt` or `shard_records`; 74 `shard_unreadable`.
  """

  def __init__(self, path: str, ranges: FileRanges, *, num_records: int, block_records: int):
    self._path = path
    self._ranges = ranges
    self._block_records = block_records
    self._num_records = num_records
    try:
      self._begins = self._read_index()
    except BaseException:
      self.close()
      raise
    self.index_bytes = 8 * (len(self._begins) - 1)

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block."""
    return self._block(block)

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Single records by place; each block that has some of them is read once."""
    places = inside(places, self._num_records)
    blocks = {block: self._block(block) for block in {place // self._block_records for place in places}}
    return [blocks[place // self._block_records][place % self._block_records] for place in places]

  def stamp(self) -> FileStamp:
    """What the open file is known by."""
    return self._ranges.stamp()

  def close(self) -> None:
    """Closes the file."""
    self._ranges.close()

  def _block(self, block: int) -> list[bytes]:
    start, stop = block_range(block, self._block_records, self._num_records)
    try:
      records = self._chunk(int(self._begins[block]), int(self._begins[block + 1])).records()
    except UnknownChunkError as error:
      # Not what the file's own options say.
      raise corrupt(self._path, error, block=block) from error
    if len(records) != stop - start:
      raise corrupt(self._path, f"{len(records)} records in place of {stop - start}", block=block)
    return records

  def _chunk(self, begin: int, end: int) -> SimpleChunk:
    try:
      return read_chunk(self._ranges, begin, end)
    except ChunkError as error:
      raise corrupt(self._path, error, offset=begin) from error
    except OSError as error:
      raise unreadable(self._path, error) from error

  def _read_index(self) -> np.ndarray:
    """Where each block begins, and where the footer does, behind the last: `(blocks + 1,) uint64`."""
    last = self._ranges.size - BLOCK_BYTES
    if last < 0 or last % BLOCK_BYTES:
      raise corrupt(self._path, f"{self._ranges.size} bytes, which no ArrayRecord file has")
    try:
      postscript = _Message(self._chunk(last, last + _POSTSCRIPT_BYTES).records())
      footer = postscript.number(_FOOTER_OFFSET)
      if postscript.number(_POSTSCRIPT_MAGIC) != _MAGIC or not 0 < footer < last:
        raise ChunkError("no ArrayRecord file")
      index = self._chunk(footer, last)
      metadata = _Message([_Message(index.records(1)).content(_METADATA)])
      chunks = _chunks_of(index)
    except ChunkError as error:
      raise corrupt(self._path, error) from error
    _check_read_here(metadata)
    found = int(chunks[:, 1].sum())
    if found != self._num_records or metadata.number(_NUM_RECORDS) != found:
      raise wrong_records(self._path, self._num_records, found)
    if metadata.number(_NUM_CHUNKS) != len(chunks):
      raise corrupt(self._path, f"{len(chunks)} chunks in place of {metadata.number(_NUM_CHUNKS)}")
    begins = np.append(chunks[:, 0], footer)
    if (np.diff(begins) <= 0).any() or begins[0] < 0:
      raise corrupt(self._path, "chunks that do not follow each other")
    sizes = chunks[:, 1]
    if (sizes[:-1] != self._block_records).any() or (sizes[-1:] > self._block_records).any():
      raise UnknownChunkError(f"chunks of other sizes than {self._block_records} records")
    return begins


def _chunks_of(index: SimpleChunk) -> np.ndarray:
  """Where each chunk begins and how many records it has, `(chunks, 2) int64`, of a footer."""
  chunks = np.zeros((len(index.stops) - 1, 2), np.int64)
  if not read_footers(np.frombuffer(index.values, np.uint8), index.stops, chunks):
    raise ChunkError("a footer that is none")
  return chunks


def _check_read_here(metadata: _Message) -> None:
  """Refuses a file whose chunks are encoded in a way that is not read here.

  Raises:
    UnknownChunkError
  """
  options = metadata.content(_WRITER_OPTIONS).split(b",")
  if metadata.number(_VERSION) != _VERSION_READ:
    raise UnknownChunkError(f"version {metadata.number(_VERSION)} of ArrayRecord")
  if b"transpose:false" not in options or not any(option.startswith(_READ_HERE) for option in options):
    raise UnknownChunkError(f"a file that was written with {options}")


class _Message:
  """The first of some records as a protobuf message of numbers and contents.

  Raises:
    ChunkError: where it is none.
  """

  def __init__(self, records: Sequence[bytes]):
    if not records:
      raise ChunkError("a chunk without records")
    message, at = memoryview(records[0]), 0
    self._fields: dict[int, int | bytes] = {}
    while at < len(message):
      tag, at = read_varint(message, at)
      value, at = read_varint(message, at)
      self._fields[tag >> 3] = value
      if tag & 7 == _HAS_LENGTH:
        if value > len(message) - at:
          raise ChunkError("a field that is cut off")
        self._fields[tag >> 3], at = bytes(message[at : at + value]), at + value
      elif tag & 7:
        raise ChunkError(f"a field of wire type {tag & 7}")

  def number(self, field: int) -> int:
    """A field that is a number; 0 where it is not there."""
    value = self._fields.get(field, 0)
    if not isinstance(value, int):
      raise ChunkError(f"a field {field} that is no number")
    return value

  def content(self, field: int) -> bytes:
    """A field that has a length; empty where it is not there."""
    value = self._fields.get(field, b"")
    if not isinstance(value, bytes):
      raise ChunkError(f"a field {field} that is a number")
    return value
