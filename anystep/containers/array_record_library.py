"""array_record's own reader and writer: the reader for other programs' files, the writer for all files.

The library keeps a lock, and a thread that empties its pools. A forked process has a copy of the lock in any
state, and no such thread: reading or writing through the library hangs or crashes it. So that is refused.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

from array_record.python import array_record_module
from etils import epath

from anystep.containers.file_ranges import FileStamp, block_range, check_places, corrupt, wrong_records
from anystep.forks import UnforkableLibrary, start_anew_in_children
from anystep.stores.local_copies import fetch


class UnknownChunkError(Exception):
  """A file that only this library reads: `array_record_blocks` does not know its chunks."""


_library = UnforkableLibrary("the array_record library")
_READ_HERE = "read a cache that anystep-cache has written, with numba installed"


class _Objects:
  """Open readers and writers of the library in this process."""

  def __init__(self) -> None:
    self.opened: weakref.WeakSet[Any] = weakref.WeakSet()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    for library_object in list(self.opened):
      # One more reference, so that it is never destroyed: that would take the library's locks.
      ctypes.pythonapi.Py_IncRef(ctypes.py_object(library_object))


_objects = _Objects()


def open_reader(path: epath.PathLike, options: str = "") -> Any:
  """Open an `ArrayRecordReader` of the library, of a store's file on a local copy.

  Raises:
    AnystepError: 78 `forked_process`.
    ValueError, RuntimeError: as the library raises them.
  """
  return _open(array_record_module.ArrayRecordReader, fetch(path), options)


def open_writer(path: epath.PathLike, options: str) -> Any:
  """Open an `ArrayRecordWriter` of the library.

  Raises:
    AnystepError: 78 `forked_process`.
  """
  return _open(array_record_module.ArrayRecordWriter, path, options)


def _open(kind: Any, path: epath.PathLike, options: str) -> Any:
  _library.use(_READ_HERE, path=path)
  opened = kind(str(path), options)
  _objects.opened.add(opened)
  return opened


class LibraryBlocks:
  """A `BlockReader` of any ArrayRecord file.

  Args:
    path: the file.
    num_records: the manifest's number of records in the file.
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
      # Blocks are read one at a time, so the library's own read-ahead would only read too much.
      self._reader = open_reader(self._path, "readahead_buffer_size:0,max_parallelism:0")
      stored_records = self._reader.num_records()
    except (ValueError, RuntimeError, OSError) as error:
      raise corrupt(self._path, error) from error
    if stored_records != num_records:
      raise wrong_records(self._path, num_records, stored_records)
    # A file of another format has no records either, which would be right for an empty shard.
    if not self._reader.ok():
      raise corrupt(self._path, "no ArrayRecord file")

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block."""
    start, stop = block_range(block, self._block_records, self._num_records)
    return self._read(stop - start, start, stop)

  def read_records(self, places: Sequence[int]) -> list[bytes]:
    """Return single records by place; each costs reading its chunk."""
    places = check_places(places, self._num_records)
    return self._read(len(places), places)

  def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
    """Return nothing: the library reads the file itself."""
    return []

  def stamp(self) -> FileStamp | None:
    """The stamp of the file that is at the path now, if any: the library does not give its open file."""
    try:
      return FileStamp.at(self._path)
    except OSError:
      return None

  def close(self) -> None:
    """Close the file; do nothing in a forked process, where closing would take the library's locks."""
    if not _library.is_forked:
      self._reader.close()

  def _read(self, expected: int, *selection: Any) -> list[bytes]:
    _library.use(_READ_HERE, path=self._path)
    try:
      records = self._reader.read(*selection)
    except (ValueError, RuntimeError, IndexError) as error:
      raise corrupt(self._path, error) from error
    if len(records) != expected:
      raise corrupt(self._path, f"{len(records)} records instead of {expected}")
    # If the file became shorter after it was opened, the library (0.8.6) gives empty records.
    if not all(records) and self.stamp() != self._stamp:
      raise corrupt(self._path, "not the file that was opened")
    return records
