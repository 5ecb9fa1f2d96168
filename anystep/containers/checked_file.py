"""Files whose parts are compared with checksums while they are read."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from google_crc32c import value as checksum

from anystep.containers.file_ranges import RESTORE, Ranges, corrupt, unreadable
from anystep.errors import AnystepError, ExitCode

PART_BYTES = 1 << 16


def num_parts(size_bytes: int) -> int:
  """Return a file's number of parts of 64 KiB; the last may be shorter.

  >>> num_parts(0), num_parts(65536), num_parts(65537)
  (0, 1, 2)
  """
  return -(-size_bytes // PART_BYTES)


def whole_parts(start: int, stop: int, *, size: int) -> tuple[int, int]:
  """Return the range of the parts that hold bytes [start, stop) of a file.

  >>> whole_parts(70000, 70001, size=100000)
  (65536, 100000)
  """
  return start // PART_BYTES * PART_BYTES, min(-(-stop // PART_BYTES) * PART_BYTES, size)


def part_checksums(content: bytes) -> list[int]:
  """Return the CRC-32C of each part of a file's content, or of a piece of it of whole parts."""
  return [checksum(content[start : start + PART_BYTES]) for start in range(0, len(content), PART_BYTES)]


def part_table(checksums: Sequence[int]) -> np.ndarray:
  """Return the start and the CRC-32C of each part of a file, `(parts, 2) uint64`.

  >>> part_table([11, 22])
  array([[    0,    11],
         [65536,    22]], dtype=uint64)
  """
  starts = np.arange(len(checksums), dtype=np.uint64) * np.uint64(PART_BYTES)
  return np.stack([starts, np.array(checksums, np.uint64)], axis=1)


class CheckedFile(io.RawIOBase):
  """File open for reading; each part is checked before its bytes are returned.

  Args:
    path: the file's path, for errors.
    ranges: the file; several objects may share it, each with its own position, and none closes it.
    parts: the result of `part_table`; not copied.

  Raises:
    AnystepError: 65 `offsets_invalid` for parts that are not the file's.
  """

  def __init__(self, path: str, ranges: Ranges, parts: np.ndarray):
    expected = num_parts(ranges.size)
    right = parts.dtype == np.uint64 and parts.shape == (expected, 2)
    if not right or (parts[:, 0] != np.arange(expected) * PART_BYTES).any():
      raise AnystepError(
        ExitCode.DATA,
        "offsets_invalid",
        path=path,
        expected=f"({expected}, 2) uint64, a row for each {PART_BYTES} bytes of the file's {ranges.size}",
        got=f"{parts.shape} {parts.dtype}",
        fix=RESTORE,
      )
    self._path = path
    self._ranges = ranges
    self._checksums = parts[:, 1]
    self._position = 0

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ranges.size}[whence]
    self._position = origin + offset
    return self._position

  def tell(self) -> int:
    return self._position

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def read(self, size: int = -1) -> bytes:
    """Read the next bytes; fewer at the file's end.

    Raises:
      AnystepError: 65 `shard_corrupt`; 74 `shard_unreadable`.
    """
    end = self._ranges.size
    start = min(self._position, end)
    stop = end if size < 0 else min(start + size, end)
    self._position = stop
    first, last = start // PART_BYTES, -(-stop // PART_BYTES)
    try:
      content = self._ranges.read(*whole_parts(start, stop, size=end))
    except OSError as error:
      raise unreadable(self._path, error) from error
    for part in range(first, last):
      begin = (part - first) * PART_BYTES
      if checksum(content[begin : begin + PART_BYTES]) != self._checksums[part]:
        raise corrupt(self._path, "a wrong checksum of the content", offset=part * PART_BYTES)
    return content[start - first * PART_BYTES : stop - first * PART_BYTES]
