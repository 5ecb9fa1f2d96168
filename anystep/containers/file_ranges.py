"""Shared parts of all containers' readers: ranges of a file's bytes, checks of places, errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import IO, NamedTuple

from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files.storage import is_remote

RESTORE = "restore the file from where the cache was made, or cache the task again with --overwrite"


class FileStamp(NamedTuple):
  """Properties of a file that change if it is replaced or written to.

  Attributes:
    size_bytes: its size.
    modified_ns: time of the last change, in nanoseconds since 1970.
    inode: its number in a local file system; 0 on an object store.
  """

  size_bytes: int
  modified_ns: int
  inode: int

  @classmethod
  def at(cls, path: epath.PathLike) -> FileStamp:
    """Return the stamp of the file that is at a path now.

    Raises:
      OSError: if there is no file.
    """
    if is_remote(path):
      status = epath.Path(path).stat()
      return cls(status.length, int(status.mtime * 10**9), 0)
    return cls._of(os.stat(path))

  @classmethod
  def _of(cls, status: os.stat_result) -> FileStamp:
    return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class FileRanges:
  """Ranges of a file's bytes, read by any number of threads.

  Args:
    path: the file.

  Attributes:
    size: the file's, in bytes.

  Raises:
    AnystepError: 65 `shard_corrupt` if there is no such file; 74 `shard_unreadable`.
  """

  def __init__(self, path: epath.PathLike):
    try:
      self._file: IO[bytes] = epath.Path(path).open("rb")
    except FileNotFoundError as error:
      raise corrupt(str(path), error) from error
    except OSError as error:
      raise unreadable(str(path), error) from error
    self._path = path
    self._lock = threading.Lock()
    self.size = self._seek(0, os.SEEK_END)
    try:
      self._file.fileno()
      self._positioned = True
    except (AttributeError, OSError):
      # An object store's file has no descriptor, but one position, which reads move.
      self._positioned = False

  def read(self, start: int, stop: int) -> bytes:
    """Read bytes [start, stop); fewer only at the file's end."""
    content = self._read_some(start, stop)
    # One system call reads at most 2 GiB.
    while len(content) < stop - start and (more := self._read_some(start + len(content), stop)):
      content += more
    return content

  def stamp(self) -> FileStamp:
    """Return the size, time and inode of the open file, though another file may be at its path by now."""
    return FileStamp._of(os.fstat(self._file.fileno())) if self._positioned else FileStamp.at(self._path)

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _read_some(self, start: int, stop: int) -> bytes:
    if self._positioned:
      return os.pread(self._file.fileno(), stop - start, start)
    with self._lock:
      self._seek(start)
      return self._file.read(stop - start)

  def _seek(self, position: int, whence: int = os.SEEK_SET) -> int:
    self._file.seek(position, whence)
    # TensorFlow's files do not return the position from seek.
    return self._file.tell()


def block_range(block: int, block_records: int, num_records: int) -> tuple[int, int]:
  """Return the first record of a block, and the one after its last.

  Raises:
    IndexError: for a block that the shard does not have.
  """
  start = block * block_records
  if not 0 <= start < num_records:
    raise IndexError(f"there is no block {block} of {block_records} records among {num_records}")
  return start, min(start + block_records, num_records)


def check_places(places: Sequence[int], num_records: int) -> list[int]:
  """Return places as plain ints; a negative one is refused, for it would count from the end.

  Raises:
    IndexError: for a place that the shard does not have.
  """
  checked = [int(place) for place in places]
  for place in checked:
    if not 0 <= place < num_records:
      raise IndexError(f"there is no record {place} among {num_records}")
  return checked


def wrong_records(path: str, expected: int, got: int) -> AnystepError:
  """The error for a file whose number of records is not the manifest's."""
  return AnystepError(ExitCode.DATA, "shard_records", path=path, expected=expected, got=got, fix=RESTORE)


def corrupt(path: str, reason: object, **fields: object) -> AnystepError:
  """The error for a file whose content is not what was written."""
  return AnystepError(ExitCode.DATA, "shard_corrupt", path=path, **fields, got=str(reason), fix=RESTORE)


def unreadable(path: str, error: OSError) -> AnystepError:
  """The error for a file that could not be read."""
  return AnystepError(
    ExitCode.IO,
    "shard_unreadable",
    path=path,
    got=one_line(error),
    fix="check the disk or store and run the same command again",
  )
