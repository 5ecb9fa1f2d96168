"""What readers of every container share: a file's bytes by range, places within it, what can be wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import IO

from etils import epath

from anystep.errors import AnystepError, ExitCode

RESTORE = "restore the file from where the cache was made, or cache the task again with --overwrite"


class FileRanges:
  """A file's bytes by range, in any number of threads.

  Args:
    file: open for reading; closed with the object.

  Attributes:
    size: the file's, in bytes.
  """

  def __init__(self, file: IO[bytes]):
    self._file = file
    self._lock = threading.Lock()
    self.size = self._seek(0, os.SEEK_END)
    try:
      file.fileno()
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


def size_of(path: epath.PathLike) -> int | None:
  """A file's size in bytes; None where there is none."""
  try:
    return epath.Path(path).stat().length
  except FileNotFoundError:
    return None


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
    got=f"{type(error).__name__}: {error}",
    fix="see to the disk or store and run the same command again",
  )
