"""ArrayRecord files whose chunks are a cache's blocks, read by ranges of bytes. Needs numba.

array_record's own reader keeps threads and locks, which a fork copies in any state: once a process had read a
record, its forked children crashed or hung. This reader reads files of the cache job in any process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anystep.containers.array_record_library import UnknownChunkError
from anystep.containers.file_ranges import (
  FileStamp,
  Ranges,
  block_range,
  check_places,
  corrupt,
  unreadable,
  wrong_records,
)
from anystep.containers.riegeli_chunks import BLOCK_BYTES, ChunkError, SimpleChunk, read_chunk, read_varint
from anystep.containers.riegeli_loops import read_footers

# The file's last block begins with the footer's offset, in fewer bytes than this.
_POSTSCRIPT_BYTES = 1 << 10
# Compressions of the chunks that are read here, as writers' options name them.
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
    path: the file's path, for errors.
    ranges: the file; closed with the reader, and if it is refused.
    num_records: the manifest's number of records in the file.
    block_records: g.

  Raises:
    UnknownChunkError: for a file whose chunks are not blocks, or have an encoding that is not read here.
    AnystepError: 65 `shard_corrupt` or `shard_records`; 74 `shard_unreadable`.
  """

  def __init__(self, path: str, ranges: Ranges, *, num_records: int, block_records: int):
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
    return self._read_block(block)

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Return single records by place; each block with some of them is read once."""
    places = check_places(places, self._num_records)
    blocks = {block: self._read_block(block) for block in {place // self._block_records for place in places}}
    return [blocks[place // self._block_records][place % self._block_records] for place in places]

  def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the range of the blocks that hold records [start, stop)."""
    last = (stop - 1) // self._block_records
    return [(int(self._begins[start // self._block_records]), int(self._begins[last + 1]))]

  def stamp(self) -> FileStamp:
    """The stamp of the open file."""
    return self._ranges.stamp()

  def close(self) -> None:
    """Closes the file."""
    self._ranges.close()

  def _read_block(self, block: int) -> list[bytes]:
    start, stop = block_range(block, self._block_records, self._num_records)
    try:
      records = self._read_chunk(int(self._begins[block]), int(self._begins[block + 1])).records()
    except UnknownChunkError as error:
      # The chunk contradicts the file's own options.
      raise corrupt(self._path, error, block=block) from error
    if len(records) != stop - start:
      raise corrupt(self._path, f"{len(records)} records instead of {stop - start}", block=block)
    return records

  def _read_chunk(self, begin: int, end: int) -> SimpleChunk:
    try:
      return read_chunk(self._ranges, begin, end)
    except ChunkError as error:
      raise corrupt(self._path, error, offset=begin) from error
    except OSError as error:
      raise unreadable(self._path, error) from error

  def _read_index(self) -> np.ndarray:
    """Return the begin of each block, and of the footer after the last: `(blocks + 1,) uint64`."""
    last = self._ranges.size - BLOCK_BYTES
    if last < 0 or last % BLOCK_BYTES:
      raise corrupt(self._path, f"{self._ranges.size} bytes, which no ArrayRecord file has")
    try:
      postscript = _Message(self._read_chunk(last, last + _POSTSCRIPT_BYTES).records())
      footer = postscript.number(_FOOTER_OFFSET)
      if postscript.number(_POSTSCRIPT_MAGIC) != _MAGIC or not 0 < footer < last:
        raise ChunkError("no ArrayRecord file")
      index = self._read_chunk(footer, last)
      metadata = _Message([_Message(index.records(1)).content(_METADATA)])
      chunks = _parse_footer(index)
    except ChunkError as error:
      raise corrupt(self._path, error) from error
    _check_read_here(metadata)
    num_records = int(chunks[:, 1].sum())
    if num_records != self._num_records or metadata.number(_NUM_RECORDS) != num_records:
      raise wrong_records(self._path, self._num_records, num_records)
    if metadata.number(_NUM_CHUNKS) != len(chunks):
      raise corrupt(self._path, f"{len(chunks)} chunks instead of {metadata.number(_NUM_CHUNKS)}")
    begins = np.append(chunks[:, 0], footer)
    if (np.diff(begins) <= 0).any() or begins[0] < 0:
      raise corrupt(self._path, "chunks that do not follow each other")
    sizes = chunks[:, 1]
    if (sizes[:-1] != self._block_records).any() or (sizes[-1:] > self._block_records).any():
      raise UnknownChunkError(f"chunks of other sizes than {self._block_records} records")
    return begins


def _parse_footer(index: SimpleChunk) -> np.ndarray:
  """Return the begin and number of records of each chunk that a footer lists, `(chunks, 2) int64`."""
  chunks = np.zeros((len(index.stops) - 1, 2), np.int64)
  if not read_footers(np.frombuffer(index.values, np.uint8), index.stops, chunks):
    raise ChunkError("a footer that is none")
  return chunks


def _check_read_here(metadata: _Message) -> None:
  """Refuse a file whose chunks have an encoding that is not read here.

  Raises:
    UnknownChunkError
  """
  options = metadata.content(_WRITER_OPTIONS).split(b",")
  if metadata.number(_VERSION) != _VERSION_READ:
    raise UnknownChunkError(f"version {metadata.number(_VERSION)} of ArrayRecord")
  if b"transpose:false" not in options or not any(option.startswith(_READ_HERE) for option in options):
    raise UnknownChunkError(f"a file that was written with {options}")


class _Message:
  """Protobuf message of numbers and contents, parsed from the first of some records.

  Raises:
    ChunkError: if the record is no such message.
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
    """The value of a field that is a number; 0 if it is missing."""
    value = self._fields.get(field, 0)
    if not isinstance(value, int):
      raise ChunkError(f"a field {field} that is no number")
    return value

  def content(self, field: int) -> bytes:
    """The value of a field with a length; empty if it is missing."""
    value = self._fields.get(field, b"")
    if not isinstance(value, bytes):
      raise ChunkError(f"a field {field} that is a number")
    return value
