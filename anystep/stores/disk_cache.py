"""Parts of objects kept in a local directory, for later epochs and for other processes of the machine."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from google_crc32c import value as checksum

from anystep.forks import start_anew_in_children

# An object is kept in parts of this size; ranges that are read are widened to whole parts.
PART_BYTES = 256 << 10
_CHECKSUM_BYTES = 4
# A part that was used is among the newest again, at most this often.
_TOUCH_SECONDS = 60
# After this share of the budget was written, the directory is listed again, for others write there too.
_WRITTEN_SHARE = 1 / 16
# Where there is too much, parts are removed until this share of the budget is left.
_LEFT_SHARE = 7 / 8

_log = logging.getLogger("anystep")


class DiskCache:
  """Parts of objects in a local directory, within a budget; the least recently used are removed first.

  Any number of processes may share the directory, and be killed at any time: a part is a file that appears
  whole. Its name is a hash of the object's address, size and ETag, so another content of an object has other
  parts. Its checksum is compared whenever it is read: a damaged part is fetched anew. A disk that is full or
  broken costs speed alone.

  Args:
    directory: made if there is none.
    budget_bytes: for all parts; several processes that write at once may exceed it by a sixteenth each.
  """

  def __init__(self, directory: str | os.PathLike[str], *, budget_bytes: int):
    if budget_bytes < 1:
      raise ValueError(f"a disk cache of {budget_bytes} bytes")
    self.directory = os.fspath(directory)
    self.budget_bytes = budget_bytes
    # So that the first part that is written lists the directory.
    self._unlisted_bytes = budget_bytes
    self._has_warned = False
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Make a new lock, as a forked process must."""
    self._lock = threading.Lock()

  def read(
    self, name: str, start: int, stop: int, *, size_bytes: int, get: Callable[[int, int], bytes]
  ) -> bytes:
    """Return bytes [start, stop) of an object's content.

    Args:
      name: of the content; another content has another name.
      start: the first byte. stop: the end, at most size_bytes.
      size_bytes: the content's size.
      get: reads a range from the store.
    """
    first, last = start // PART_BYTES, -(-stop // PART_BYTES)
    parts = {part: self._load(name, part, size_bytes) for part in range(first, last)}
    for run in _consecutive(part for part, content in parts.items() if content is None):
      begin, end = run[0] * PART_BYTES, min((run[-1] + 1) * PART_BYTES, size_bytes)
      fetched = get(begin, end)
      for part in run:
        offset = part * PART_BYTES - begin
        parts[part] = content = fetched[offset : offset + PART_BYTES]
        if len(content) == min(PART_BYTES, size_bytes - part * PART_BYTES):
          self._save(name, part, content)
    joined = b"".join(content for content in parts.values() if content is not None)
    return joined[start - first * PART_BYTES : stop - first * PART_BYTES]

  def _path(self, name: str, part: int) -> str:
    digest = hashlib.sha256(f"{name} {part}".encode()).hexdigest()
    return os.path.join(self.directory, digest[:2], digest[2:])

  def _load(self, name: str, part: int, size_bytes: int) -> bytes | None:
    """Return a part's content; None where it is not there, or not as it was written."""
    path = self._path(name, part)
    try:
      with open(path, "rb") as file:
        content = file.read(PART_BYTES + _CHECKSUM_BYTES + 1)
        is_old = time.time() - os.fstat(file.fileno()).st_mtime > _TOUCH_SECONDS
      if is_old:
        os.utime(path)
    except OSError:
      return None
    content, stored = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    expected_bytes = min(PART_BYTES, size_bytes - part * PART_BYTES)
    is_whole = len(content) == expected_bytes and _checksum(content) == stored
    return content if is_whole else None

  def _save(self, name: str, part: int, content: bytes) -> None:
    path = self._path(name, part)
    attempt = f"{path}.{uuid.uuid4().hex[:12]}"
    try:
      os.makedirs(os.path.dirname(path), exist_ok=True)
      try:
        with open(attempt, "wb") as file:
          file.write(content + _checksum(content))
        os.replace(attempt, path)
      except BaseException:
        with contextlib.suppress(OSError):
          os.unlink(attempt)
        raise
    except OSError as error:
      if not self._has_warned:
        self._has_warned = True
        _log.warning("The disk cache %s cannot be written: %s", self.directory, error)
      return
    with self._lock:
      self._unlisted_bytes += len(content)
      if self._unlisted_bytes >= self.budget_bytes * _WRITTEN_SHARE:
        self._unlisted_bytes = 0
        self._make_room()

  def _make_room(self) -> None:
    """Remove the parts that were not used for the longest time, where all together exceed the budget."""
    files = list(_list_files(self.directory))
    total_bytes = sum(size for _, size, _ in files)
    if total_bytes <= self.budget_bytes:
      return
    for _, size, path in sorted(files):
      # Another process may remove it at the same time.
      with contextlib.suppress(OSError):
        os.unlink(path)
      total_bytes -= size
      if total_bytes <= self.budget_bytes * _LEFT_SHARE:
        return


def _checksum(content: bytes) -> bytes:
  return checksum(content).to_bytes(_CHECKSUM_BYTES, "little")


def _list_files(directory: str) -> Iterator[tuple[float, int, str]]:
  """Yield time of the last use, size and path of each file in a disk cache."""
  with contextlib.suppress(OSError):
    for folder in os.scandir(directory):
      with contextlib.suppress(OSError):
        for file in os.scandir(folder.path):
          with contextlib.suppress(OSError):
            status = file.stat(follow_symlinks=False)
            yield status.st_mtime, status.st_size, file.path


def _consecutive(numbers: Iterator[int]) -> Iterator[list[int]]:
  """Yield runs of ascending numbers.

  >>> list(_consecutive(iter([1, 2, 5])))
  [[1, 2], [5]]
  """
  for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
    yield [number for _, number in run]
