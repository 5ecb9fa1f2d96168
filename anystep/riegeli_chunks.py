"""Chunks of Riegeli files, checked to the bit: what ArrayRecord files consist of.

The format is that of https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md: simple
chunks, uncompressed or compressed with Zstandard.
"""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

import numpy as np
import zstandard

from anystep.compiled import compiled
from anystep.highway_hash import highway_hash
from anystep.shard_files import FileRanges

BLOCK_BYTES = 1 << 16
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER = struct.Struct(
  "<QQQQQ"
)  # hash of the rest, data bytes, data hash, type and records, decoded bytes
_HASH_KEY = np.frombuffer(b"Riegeli/records\n" * 2, np.uint64)
_SIMPLE, _UNCOMPRESSED, _ZSTANDARD = ord("r"), 0, ord("z")
# What zstandard calls the size of a frame that does not say it.
_UNSAID = -1


class ChunkError(ValueError):
  """A chunk that is not what a writer wrote."""


class UnknownChunkError(Exception):
  """A chunk that is encoded in another way than is read here."""


class SimpleChunk(NamedTuple):
  """The records of a chunk.

  Attributes:
    values: the records' bytes, one after the other.
    stops: where each ends, `(records,) int64`.
  """

  values: bytes
  stops: np.ndarray

  def records(self) -> list[bytes]:
    """The records one by one."""
    values, start, records = self.values, 0, []
    for stop in self.stops.tolist():
      records.append(values[start:stop])
      start = stop
    return records


def read_chunk(ranges: FileRanges, begin: int, end: int) -> SimpleChunk:
  """Reads the chunk at [begin, end) of a file; there may be padding behind it.

  Raises:
    ChunkError: where a hash, a size or a number of records is wrong.
    UnknownChunkError: for a transposed chunk, or another compression.
    OSError: where the file cannot be read.
  """
  content = _without_block_headers(ranges.read(begin, end), begin)
  if len(content) < _CHUNK_HEADER.size:
    raise ChunkError("the file ends within a chunk")
  header_hash, data_bytes, data_hash, kind, decoded_bytes = _CHUNK_HEADER.unpack_from(content)
  array = np.frombuffer(content, np.uint8)
  if highway_hash(array[8 : _CHUNK_HEADER.size], _HASH_KEY) != header_hash:
    raise ChunkError("a wrong hash of a chunk's header")
  if data_bytes > len(content) - _CHUNK_HEADER.size:
    raise ChunkError(f"a chunk of {data_bytes} bytes where there is room for {len(content)}")
  stop = _CHUNK_HEADER.size + data_bytes
  if highway_hash(array[_CHUNK_HEADER.size : stop], _HASH_KEY) != data_hash:
    raise ChunkError("a wrong hash of a chunk's data")
  if kind & 0xFF != _SIMPLE:
    raise UnknownChunkError(f"a chunk of type {kind & 0xFF:#x}")
  return _decoded(memoryview(content)[_CHUNK_HEADER.size : stop], kind >> 8, decoded_bytes)


def _without_block_headers(content: bytes, begin: int) -> bytes:
  """What stands between the headers that interrupt chunks at each multiple of 64 KiB of the file."""
  header = -begin % BLOCK_BYTES
  if header >= len(content):
    return content
  parts = [content[:header]]
  for start in range(header, len(content), BLOCK_BYTES):
    parts.append(content[start + _BLOCK_HEADER_BYTES : start + BLOCK_BYTES])
  return b"".join(parts)


def _decoded(data: memoryview, num_records: int, decoded_bytes: int) -> SimpleChunk:
  if not len(data):
    raise ChunkError("a chunk without data")
  compression = data[0]
  if compression not in (_UNCOMPRESSED, _ZSTANDARD):
    raise UnknownChunkError(f"compression {compression:#x}")
  sizes_bytes, at = read_varint(data, 1)
  sizes: memoryview | bytes = data[at : at + sizes_bytes]
  values: memoryview | bytes = data[at + sizes_bytes :]
  if compression == _ZSTANDARD:
    sizes, values = _decompressed(memoryview(sizes)), _decompressed(memoryview(values))
  stops = np.empty(num_records, np.int64) if num_records <= len(sizes) else None
  if stops is None or not _read_stops(np.frombuffer(sizes, np.uint8), stops):
    raise ChunkError(f"other sizes than those of {num_records} records")
  if len(values) != decoded_bytes or (stops[-1] if num_records else 0) != decoded_bytes:
    raise ChunkError(f"records of other sizes than {decoded_bytes} bytes together")
  return SimpleChunk(values if isinstance(values, bytes) else bytes(values), stops)


def _decompressed(content: memoryview) -> bytes:
  """A buffer behind its size."""
  size, at = read_varint(content, 0)
  frame = content[at:]
  if not size and not len(frame):
    return b""
  try:
    # Frames of large buffers do not say how large. One that says so is not trusted with more than its size.
    if zstandard.frame_content_size(frame) not in (size, _UNSAID):
      raise ChunkError("another size than a compressed buffer's own")
    content_bytes = _decompressor().decompress(frame, max_output_size=size)
  except (zstandard.ZstdError, MemoryError, OverflowError) as error:
    raise ChunkError(f"a compressed buffer that cannot be read: {error}") from error
  if len(content_bytes) != size:
    raise ChunkError(f"{len(content_bytes)} bytes of a compressed buffer of {size}")
  return content_bytes


# To make one takes half as long as to decompress a block; a thread at a time may use it.
_of_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
  if not hasattr(_of_thread, "decompressor"):
    _of_thread.decompressor = zstandard.ZstdDecompressor()
  return _of_thread.decompressor


def read_varint(content: memoryview, at: int) -> tuple[int, int]:
  """The number below 2^70 that is encoded from a place on, and the place behind it.

  Raises:
    ChunkError: where none is.
  """
  value = 0
  for shift in range(0, 70, 7):
    if at >= len(content):
      break
    byte = content[at]
    at += 1
    value |= (byte & 127) << shift
    if byte < 128:
      return value, at
  raise ChunkError("a number that does not end")


@compiled
def _read_stops(sizes: np.ndarray, stops: np.ndarray) -> bool:
  """Sums up encoded sizes into `stops`; returns whether they are as many, and no bytes are left."""
  at, stop = 0, np.int64(0)
  for record in range(len(stops)):
    size = np.int64(0)
    shift = 0
    while True:
      if at >= len(sizes) or shift > 56:
        return False
      byte = np.int64(sizes[at])
      at += 1
      size |= (byte & 127) << shift
      shift += 7
      if byte < 128:
        break
    stop += size
    if stop < 0:
      return False
    stops[record] = stop
  return at == len(sizes)
