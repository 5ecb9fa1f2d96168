"""Shared parts of all containers' readers: ranges of a file's bytes, checks of places, errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, NamedTuple, Protocol

from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.stores.addresses import is_remote, parse_address
from anystep.stores.failures import ObjectChangedError
from anystep.stores.objects import ObjectStatus, head
from anystep.stores.range_fetcher import FetchBudget, ObjectContent, RangeFetcher, Span

RESTORE = "restore the file from where the cache was made, or cache the task again with --overwrite"


class FileStamp(NamedTuple):
  """Properties of a file that change if it is replaced or written to.

  Attributes:
    size_bytes: its size.
    modified_ns: time of the last change, in nanoseconds since 1970; 0 on a store.
    inode: its number in a local file system; 0 on a store.
    etag: a store's name for the content; empty in a local file system.
  """

  size_bytes: int
  modified_ns: int
  inode: int
  etag: str = ""

  @classmethod
  def at(cls, path: epath.PathLike) -> FileStamp:
    """Return the stamp of the file that is at a path now.

    Raises:
      OSError: if there is no file.
    """
    if is_remote(path):
      return cls.of_object(head(parse_address(path)))
    return cls._of(os.stat(path))

  @classmethod
  def of_object(cls, status: ObjectStatus) -> FileStamp:
    """Return the stamp of an object; its time is left out, for objects that are merely copied keep ETags."""
    return cls(status.size_bytes, 0, 0, status.etag)

  @classmethod
  def _of(cls, status: os.stat_result) -> FileStamp:
    return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class Ranges(Protocol):
  """Ranges of a file's bytes, read by any number of threads.

  Attributes:
    size: the file's, in bytes.
  """

  size: int

  def read(self, start: int, stop: int) -> bytes:
    """Read bytes [start, stop); fewer only at the file's end."""

  def stamp(self) -> FileStamp:
    """Return the stamp of the file that is read, though another may be at its path by now."""

  def close(self) -> None:
    """Closes the file."""


class FileRanges:
  """`Ranges` of a local file.

  Args:
    path: the file.

  Raises:
    AnystepError: 65 `shard_corrupt` if there is no such file; 74 `shard_unreadable`.
  """

  def __init__(self, path: epath.PathLike):
    try:
      self._file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115
    except FileNotFoundError as error:
      raise corrupt(str(path), error) from error
    except OSError as error:
      raise unreadable(str(path), error) from error
    self.size = self._file.seek(0, os.SEEK_END)

  def read(self, start: int, stop: int) -> bytes:
    """Read bytes [start, stop); fewer only at the file's end."""
    content = os.pread(self._file.fileno(), stop - start, start)
    # One system call reads at most 2 GiB.
    while len(content) < stop - start and (more := self._read_some(start + len(content), stop)):
      content += more
    return content

  def stamp(self) -> FileStamp:
    """Return the size, time and inode of the open file, though another file may be at its path by now."""
    return FileStamp._of(os.fstat(self._file.fileno()))

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _read_some(self, start: int, stop: int) -> bytes:
    return os.pread(self._file.fileno(), stop - start, start)


class ObjectRanges:
  """`Ranges` of an object on a store: of one content, and of no other that replaces it.

  Args:
    content: the content.
    fetcher: fetches ranges.
  """

  def __init__(self, content: ObjectContent, fetcher: RangeFetcher):
    self._content = content
    self._fetcher = fetcher
    self._held, self._held_start = b"", 0
    self.size = content.size_bytes

  def hold(self, start: int, stop: int) -> None:
    """Read bytes [start, stop) and hold them for later reads, until another range is held.

    Raises:
      OSError: as `read`.
    """
    self._held, self._held_start = self.read(start, stop), start

  def read(self, start: int, stop: int) -> bytes:
    """Read bytes [start, stop); fewer only at the object's end.

    Raises:
      OSError: as `RangeFetcher.read`; ObjectChangedError if the object has another content by now.
    """
    if self._held and self._held_start <= start and stop <= self._held_start + len(self._held):
      return self._held[start - self._held_start : stop - self._held_start]
    return self._fetcher.read(Span(self._content, start, stop))

  def stamp(self) -> FileStamp:
    """Return the content's stamp: no other content is read."""
    return FileStamp(self.size, 0, 0, self._content.etag)

  def close(self) -> None:
    """Do nothing: an object is not kept open."""


def open_ranges(path: epath.PathLike) -> Ranges:
  """Open a local file, or the content that an object has now.

  Raises:
    AnystepError: as `FileRanges`.
  """
  if not is_remote(path):
    return FileRanges(path)
  try:
    stamp = FileStamp.at(path)
  except FileNotFoundError as error:
    raise corrupt(str(path), error) from error
  except OSError as error:
    raise unreadable(str(path), error) from error
  return ObjectRanges(content_at(path, stamp), RangeFetcher(FetchBudget()))


def content_at(path: epath.PathLike, stamp: FileStamp) -> ObjectContent:
  """Return the content of an object that has a stamp."""
  return ObjectContent(parse_address(path), stamp.size_bytes, stamp.etag)


def is_replaced(error: AnystepError) -> bool:
  """Return whether an error comes from an object that is gone or has another content by now."""
  return isinstance(error.__cause__, (ObjectChangedError, FileNotFoundError))


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
