"""Chunks of Riegeli files, of which ArrayRecord files consist, fully checked. Needs numba.

The format is that of https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md: simple
chunks, uncompressed or compressed with Zstandard.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import zstandard

from anystep.containers import riegeli_loops
from anystep.containers.array_record_library import UnknownChunkError
from anystep.containers.file_ranges import Ranges
from anystep.containers.riegeli_loops import SIMPLE, UNCOMPRESSED, ZSTANDARD
from anystep.limits import MAX_CHUNK_BYTES, MAX_CHUNK_RECORDS

BLOCK_BYTES = 1 << 16
_BLOCK_HEADER_BYTES = 24
_WRONG = {
  riegeli_loops.CUT_OFF: "the file ends within a chunk",
  riegeli_loops.HEADER_HASH: "a wrong hash of a chunk's header",
  riegeli_loops.DATA_HASH: "a wrong hash of a chunk's data",
  riegeli_loops.SIZES: "buffers of other sizes than the chunk's",
}
# Kinds of chunks that only array_record's own reader knows: transposed, or compressed by Brotli or Snappy.
_TRANSPOSED, _COMPRESSED_OTHERWISE = ord("t"), b"bs"
# zstandard's size of a frame that does not state it.
_SIZE_NOT_STATED = -1


class ChunkError(ValueError):
  """A chunk whose content is not what a writer wrote."""


class SimpleChunk(NamedTuple):
  """Records of a chunk.

  Attributes:
    values: the records' bytes, one after the other.
    stops: the end of each record, `(records,) int64`.
  """

  values: bytes
  stops: np.ndarray

  def records(self, limit: int | None = None) -> list[bytes]:
    """Return all records, or the first few."""
    values, start, records = self.values, 0, []
    for stop in self.stops[:limit].tolist():
      records.append(values[start:stop])
      start = stop
    return records


def read_chunk(ranges: Ranges, begin: int, end: int) -> SimpleChunk:
  """Read the chunk at [begin, end) of a file; padding may follow it there.

  Raises:
    ChunkError: if a hash, a size or a number of records is wrong.
    UnknownChunkError: for a transposed chunk, or another compression.
    OSError: if the file cannot be read.
  """
  if end - begin > MAX_CHUNK_BYTES:
    raise ChunkError(f"a chunk of {end - begin:,} bytes, more than {MAX_CHUNK_BYTES:,}")
  content = _strip_block_headers(ranges.read(begin, end), begin)
  wrong, kind, num_records, decoded_bytes, compression, *buffers = riegeli_loops.read_header(
    np.frombuffer(content, np.uint8)
  )
  if wrong:
    raise ChunkError(_WRONG[wrong])
  if kind == _TRANSPOSED or (kind == SIMPLE and compression in _COMPRESSED_OTHERWISE):
    raise UnknownChunkError(f"a chunk of type {kind:#x}, compressed as {compression:#x}")
  if kind != SIMPLE or compression not in (UNCOMPRESSED, ZSTANDARD):
    raise ChunkError(f"a chunk of type {kind:#x}, compressed as {compression:#x}, where records should be")
  if num_records > MAX_CHUNK_RECORDS or decoded_bytes > MAX_CHUNK_BYTES:
    raise ChunkError(f"a chunk of {num_records:,} records with {decoded_bytes:,} bytes, beyond the limits")
  sizes_begin, sizes_stop, sizes_size, values_begin, values_stop, values_size = buffers
  sizes, values = content[sizes_begin:sizes_stop], content[values_begin:values_stop]
  if compression == ZSTANDARD:
    sizes, values = _decompress(sizes, sizes_size), _decompress(values, values_size)
  if num_records > len(sizes):
    raise ChunkError(f"{len(sizes)} bytes that are the sizes of {num_records} records")
  stops = np.empty(num_records, np.int64)
  right = riegeli_loops.read_stops(np.frombuffer(sizes, np.uint8), stops)
  if not right or (stops[-1] if num_records else 0) != decoded_bytes:
    raise ChunkError(f"sizes that are not those of {num_records} records, {decoded_bytes} bytes together")
  return SimpleChunk(values, stops)


def _strip_block_headers(content: bytes, begin: int) -> bytes:
  """Remove the block headers, which interrupt chunks at each multiple of 64 KiB of the file."""
  header = -begin % BLOCK_BYTES
  if header >= len(content):
    return content
  parts = [content[:header]]
  for start in range(header, len(content), BLOCK_BYTES):
    parts.append(content[start + _BLOCK_HEADER_BYTES : start + BLOCK_BYTES])
  return b"".join(parts)


# Making a decompressor takes half as long as decompressing a block; only one thread at a time may use it.
_thread_local = threading.local()


def _decompress(content: bytes, size: int) -> bytes:
  if not size and not content:
    return b""
  if size > MAX_CHUNK_BYTES:
    raise ChunkError(f"a buffer of {size:,} bytes, more than {MAX_CHUNK_BYTES:,}")
  if not hasattr(_thread_local, "decompressor"):
    _thread_local.decompressor = zstandard.ZstdDecompressor()
  try:
    # Frames of large buffers do not state their size. If one does, it must be the expected size.
    if zstandard.frame_content_size(content) not in (size, _SIZE_NOT_STATED):
      raise ChunkError(f"a compressed buffer of another size than {size} bytes")
    decompressed = _thread_local.decompressor.decompress(content, max_output_size=size)
  except (zstandard.ZstdError, MemoryError, OverflowError) as error:
    raise ChunkError(f"a compressed buffer that cannot be read: {error}") from error
  if len(decompressed) != size:
    raise ChunkError(f"{len(decompressed)} bytes of a compressed buffer of {size}")
  return decompressed


def read_varint(content: memoryview, at: int) -> tuple[int, int]:
  """Return the number below 2^70 that is encoded from `at` on, and the index after it.

  Raises:
    ChunkError: if no number ends there.
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
