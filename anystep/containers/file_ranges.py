"""What readers of every container share: a file's bytes by range, places within it, what can be wrong."""

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
  """What tells without reading a file that it is another one, or was written to.

  Attributes:
    size_bytes: its size.
    modified_ns: when it was last written to, in nanoseconds since 1970.
    inode: its number in a local file system; 0 on an object store.
  """

  size_bytes: int
  modified_ns: int
  inode: int

  @classmethod
  def at(cls, path: epath.PathLike) -> FileStamp:
    """The stamp of the file that has a path now.

    Raises:
      OSError: where there is none.
    """
    if is_remote(path):
      found = epath.Path(path).stat()
      return cls(found.length, int(found.mtime * 10**9), 0)
    return cls._of(os.stat(path))

  @classmethod
  def _of(cls, found: os.stat_result) -> FileStamp:
    return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class FileRanges:
  """A file's bytes by range, in any number of threads.

  Args:
    path: the file's.

  Attributes:
    size: the file's, in bytes.

  Raises:
    AnystepError: 65 `shard_corrupt` where there is no such file; 74 `shard_unreadable`.
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
      # An object store's file has no descriptor, but one position that reads move.
      self._positioned = False

  def read(self, start: int, stop: int) -> bytes:
    """Bytes [start, stop); fewer only where the file ends."""
    content = self._read_some(start, stop)
    # One call to the operating system gives at most 2 GiB.
    while len(content) < stop - start and (more := self._read_some(start + len(content), stop)):
      content += more
    return content

  def stamp(self) -> FileStamp:
    """The stamp of the open file, which may have lost its path to another."""
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
  """First record of a block, and that after its last.

  Raises:
    IndexError: for a block that the shard does not have.
  """
  start = block * block_records
  if not 0 <= start < num_records:
    raise IndexError(f"there is no block {block} of {block_records} records among {num_records}")
  return start, min(start + block_records, num_records)


def inside(places: Sequence[int], num_records: int) -> list[int]:
  """The places as plain ints: a negative one must not count from the end.

  Raises:
    IndexError: for a place that the shard does not have.
  """
  inside = [int(place) for place in places]
  for place in inside:
    if not 0 <= place < num_records:
      raise IndexError(f"there is no record {place} among {num_records}")
  return inside


def wrong_records(path: str, expected: int, got: int) -> AnystepError:
  """A file with another number of records than the manifest says."""
  return AnystepError(ExitCode.DATA, "shard_records", path=path, expected=expected, got=got, fix=RESTORE)


def corrupt(path: str, reason: object, **where: object) -> AnystepError:
  """A file that is not what was written."""
  return AnystepError(ExitCode.DATA, "shard_corrupt", path=path, **where, got=str(reason), fix=RESTORE)


def unreadable(path: str, error: OSError) -> AnystepError:
  """A file that could not be read, whatever is in it."""
  return AnystepError(
    ExitCode.IO,
    "shard_unreadable",
    path=path,
    got=one_line(error),
    fix="see to the disk or store and run the same command again",
  )
