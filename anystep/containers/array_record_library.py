"""array_record's own reader and writer: for files that others wrote, and to write.

The library keeps a thread that empties its pools, and a lock. A forked process has the lock as it was and no
such thread: what it reads or writes through the library hangs or crashes it. So it is refused there.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

from array_record.python import array_record_module
from etils import epath

from anystep.containers.file_ranges import FileStamp, block_range, corrupt, inside, wrong_records
from anystep.forks import UnforkableLibrary, start_anew_in_children


class UnknownChunkError(Exception):
  """A file that this library alone reads: its chunks are others than `array_record_blocks` knows."""


_library = UnforkableLibrary("the array_record library")
_READ_HERE = "read a cache that anystep-cache has written, with numba installed"


class _Objects:
  """The library's objects in this process."""

  def __init__(self) -> None:
    self.opened: weakref.WeakSet[Any] = weakref.WeakSet()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    for each in list(self.opened):
      # Never destroyed: that would take the library's locks.
      ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


_objects = _Objects()


def open_reader(path: epath.PathLike, options: str = "") -> Any:
  """An `ArrayRecordReader` of the library.

  Raises:
    AnystepError: 78 `forked_process`.
    ValueError, RuntimeError: as the library raises them.
  """
  return _opened(array_record_module.ArrayRecordReader, path, options)


def open_writer(path: epath.PathLike, options: str) -> Any:
  """An `ArrayRecordWriter` of the library.

  Raises:
    AnystepError: 78 `forked_process`.
  """
  return _opened(array_record_module.ArrayRecordWriter, path, options)


def _opened(kind: Any, path: epath.PathLike, options: str) -> Any:
  _library.use(_READ_HERE, path=path)
  opened = kind(str(path), options)
  _objects.opened.add(opened)
  return opened


class LibraryBlocks:
  """A `BlockReader` of any ArrayRecord file.

  Args:
    path: the file.
    num_records: what the manifest says it holds.
    block_records: g.

  Raises:
    AnystepError: 65 `shard_corrupt` or `shard_records`; 78 `forked_process`.
  """

  def __init__(self, path: epath.PathLike, *, num_records: int, block_records: int):
    self._path = str(path)
    self._block_records = block_records
    self._num_records = num_records
    # The library keeps a position of 8 bytes for each chunk.
    self.index_bytes = 8 * -(-num_records // block_records)
    try:
      self._stamp = self.stamp()
      # Blocks are asked for one at a time: the reader's own read-ahead would only read what is not wanted.
      self._reader = open_reader(self._path, "readahead_buffer_size:0,max_parallelism:0")
      found = self._reader.num_records()
    except (ValueError, RuntimeError, OSError) as error:
      raise corrupt(self._path, error) from error
    if found != num_records:
      raise wrong_records(self._path, num_records, found)
    # A file that is none has no records either, which for an empty shard would be right.
    if not self._reader.ok():
      raise corrupt(self._path, "no ArrayRecord file")

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block."""
    start, stop = block_range(block, self._block_records, self._num_records)
    return self._read(stop - start, start, stop)

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Single records by place; each costs the reading of its chunk."""
    places = inside(places, self._num_records)
    return self._read(len(places), places)

  def stamp(self) -> FileStamp | None:
    """What the file that has the path now is known by, if any: the library does not tell its open file."""
    try:
      return FileStamp.at(self._path)
    except OSError:
      return None

  def close(self) -> None:
    """Closes the file; not in a forked process, where that would take the library's locks."""
    if not _library.is_forked:
      self._reader.close()

  def _read(self, expected: int, *which: Any) -> list[bytes]:
    _library.use(_READ_HERE, path=self._path)
    try:
      records = self._reader.read(*which)
    except (ValueError, RuntimeError, IndexError) as error:
      raise corrupt(self._path, error) from error
    if len(records) != expected:
      raise corrupt(self._path, f"{len(records)} records in place of {expected}")
    # Where a file ends that was longer when it was opened, the library (0.8.6) gives empty records.
    if not all(records) and self.stamp() != self._stamp:
      raise corrupt(self._path, "another file than the one that was opened")
    return records
