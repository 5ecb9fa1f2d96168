"""TFRecord files, read by ranges of bytes and written; offsets of records stand in a table beside a file.

Source: https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath
from google_crc32c import value as checksum

from anystep.containers.file_ranges import (
  RESTORE,
  FileStamp,
  Ranges,
  block_range,
  check_places,
  corrupt,
  unreadable,
  wrong_records,
)
from anystep.error_kinds.exit_codes import ExitCode
from anystep.errors import AnystepError

# A TFRecord's data come after their length in 8 bytes and its checksum, and before the data's checksum.
_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_FRAME_BYTES = _HEADER_BYTES + _FOOTER_BYTES


def write_tfrecord(path: epath.PathLike, records: Sequence[bytes]) -> np.ndarray:
  """Write a TFRecord file, with the bytes that TensorFlow would write, and return its offsets."""
  with epath.Path(path).open("wb") as file:
    for record in records:
      file.write(b"".join((_encode_header(len(record)), record, _mask_crc(checksum(record)))))
  return np.cumsum([0, *(len(record) + _FRAME_BYTES for record in records)], dtype=np.uint64)[:-1]


class TFRecordBlocks:
  """A `BlockReader` of a TFRecord file: a block is one read of a range of bytes, fully checked.

  Args:
    path: the file.
    num_records: the manifest's number of records in the file.
    block_records: g.
    offsets: the offset of each record's framing, `(records,) uint64`; not copied.
    open_ranges: opens the file.

  Raises:
    AnystepError: 65 `shard_corrupt`, `shard_records` or `offsets_invalid`; 74 `shard_unreadable`.
  """

  def __init__(
    self,
    path: epath.PathLike,
    *,
    num_records: int,
    block_records: int,
    offsets: np.ndarray,
    open_ranges: Callable[[epath.PathLike], Ranges],
  ):
    self._path = str(path)
    self._block_records = block_records
    self._num_records = num_records
    self._offsets = offsets
    self.index_bytes = offsets.nbytes
    if offsets.dtype != np.uint64 or offsets.ndim != 1:
      raise self._wrong_offsets("(records,) uint64", f"{offsets.shape} {offsets.dtype}")
    if len(offsets) != num_records:
      raise wrong_records(self._path, num_records, len(offsets))
    self._ranges = open_ranges(path)
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
    """Return single records by place; each costs one read of its bytes."""
    return [self._read(place, place + 1)[0] for place in check_places(places, self._num_records)]

  def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the range of records [start, stop)."""
    return [(self._begin(start), self._begin(stop))]

  def stamp(self) -> FileStamp:
    """The stamp of the open file."""
    return self._ranges.stamp()

  def close(self) -> None:
    """Closes the file."""
    self._ranges.close()

  def _check_offsets(self) -> None:
    """Refuse offsets by which bytes between records would be read, or some bytes never."""
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
    # Offsets below the file's size are so small that no difference overflows.
    short = np.diff(offsets.view(np.int64), append=size) < _FRAME_BYTES
    if short.any():
      raise self._wrong_offsets(expected, f"no room for record {short.argmax()} at {offsets[short.argmax()]}")

  def _wrong_offsets(self, expected: str, got: str) -> AnystepError:
    return AnystepError(
      ExitCode.DATA, "offsets_invalid", path=self._path, expected=expected, got=got, fix=RESTORE
    )

  def _begin(self, place: int) -> int:
    """Return the begin of a record, or the file's size after the last."""
    return self._size if place == self._num_records else int(self._offsets[place])

  def _read(self, start: int, stop: int) -> list[bytes]:
    """Read records [start, stop), at least one."""
    begin, end = self._begin(start), self._begin(stop)
    try:
      content = self._ranges.read(begin, end)
    except OSError as error:
      raise unreadable(self._path, error) from error
    header, stops = 0, (self._offsets[start + 1 : stop] - self._offsets[start]).tolist()
    records: list[bytes] = []
    # Reading TFRecord files spends its time in this loop: three slices and a checksum for each record. If the
    # file is cut short, the comparisons fail at the first incomplete record.
    for next_header in (*stops, end - begin):
      data, footer = header + _HEADER_BYTES, next_header - _FOOTER_BYTES
      record = content[data:footer]
      if content[header:data] != _encode_header(footer - data):
        raise corrupt(self._path, "a wrong length, or a wrong checksum of it", place=start + len(records))
      if content[footer:next_header] != _mask_crc(checksum(record)):
        raise corrupt(self._path, "a wrong checksum of the data", place=start + len(records))
      records.append(record)
      header = next_header
    return records


# Lengths recur, so headers are cached and compared as a whole.
@functools.lru_cache(maxsize=1 << 14)
def _encode_header(length: int) -> bytes:
  """Return the header of a record's data: its length as uint64 and the masked CRC of these bytes."""
  encoded = struct.pack("<Q", length)
  return encoded + _mask_crc(checksum(encoded))


def _mask_crc(crc: int) -> bytes:
  """Mask a CRC-32C as TFRecord files do: rotate it right by 15 bits, and add a constant."""
  return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
