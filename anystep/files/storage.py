"""Files that appear as a whole or not at all (docs/architecture.md#stores).

A small file that is written last marks something as complete. A rename never does: not every store has
renames, and an object store's objects appear whole without them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import IO

from etils import epath

from anystep.stores import objects
from anystep.stores.addresses import is_remote, parse_address

__all__ = [
  "attempt_path",
  "find_absolute",
  "find_real",
  "find_version",
  "is_attempt",
  "is_remote",
  "is_writable",
  "list_sizes",
  "local_directory",
  "move",
  "new_file",
  "put",
  "remove_unfinished_uploads",
  "size_of",
  "sync",
  "upload",
]

_COPIED_BYTES = 1 << 20


def put(path: epath.PathLike, content: bytes) -> None:
  """Replace a file's content: readers, also after a crash, see all of the old or all of the new content."""
  path = epath.Path(path)
  if is_remote(path):
    path.write_bytes(content)
    return
  attempt = attempt_path(path)
  try:
    with new_file(attempt) as file:
      file.write(content)
    os.replace(attempt, path)
  except BaseException as error:
    _add_path(error, path)
    attempt.unlink(missing_ok=True)
    raise
  sync(path.parent)


def attempt_path(path: epath.PathLike) -> epath.Path:
  """A unique name beside `path`, for a file that two programs may write at once, such as retried workers."""
  path = epath.Path(path)
  return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")


def is_attempt(name: str, *, at: str) -> bool:
  """Return whether a file's name is one that `attempt_path` gives for the name `at`.

  >>> is_attempt(attempt_path("folder/COMPLETED").name, at="COMPLETED"), is_attempt("a.json", at="a")
  (True, False)
  """
  return re.fullmatch(re.escape(at) + r"\.[0-9a-f]{12}", name) is not None


@contextlib.contextmanager
def new_file(path: epath.PathLike) -> Iterator[IO[bytes]]:
  """Write a new file: durable when the body ends, and removed if the body fails."""
  try:
    with epath.Path(path).open("wb") as file:
      yield file
      if not is_remote(path):
        file.flush()
        os.fsync(file.fileno())
  except BaseException as error:
    _add_path(error, path)
    # A store's object appears at the end alone; one that is there is another writer's.
    if not is_remote(path):
      epath.Path(path).unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def local_directory(directory: epath.PathLike) -> Iterator[epath.Path]:
  """Yield a directory for writers that write to local files alone: for a store, a temporary one."""
  if is_remote(directory):
    with tempfile.TemporaryDirectory(prefix="anystep-") as temporary:
      yield epath.Path(temporary)
  else:
    yield epath.Path(directory)


def upload(local: epath.PathLike, path: epath.PathLike) -> str:
  """Copy a local file to a store in parts, and compare what is read back; return the object's version.

  Raises:
    OSError: EIO where other bytes are read back.
  """
  with open(local, "rb") as source, new_file(path) as target:
    shutil.copyfileobj(source, target, _COPIED_BYTES)
  version = find_version(path)
  with open(local, "rb") as source, epath.Path(path).open("rb") as target:
    sent, read_back = (hashlib.file_digest(file, "sha256").digest() for file in (source, target))
  if sent != read_back:
    raise OSError(errno.EIO, "other bytes are read back than were written", os.fspath(path))
  return version


def find_absolute(path: epath.PathLike) -> str:
  """Return a local path from the root, or a store's without a slash at its end."""
  return os.fspath(path).rstrip("/") if is_remote(path) else os.path.abspath(path)


def find_real(path: epath.PathLike) -> str:
  """Return an absolute path without links; stores have none."""
  return find_absolute(path) if is_remote(path) else os.path.realpath(path)


def find_version(path: epath.PathLike) -> str:
  """Return what changes when a store's object is replaced, or an empty string for a local file."""
  return objects.head(parse_address(path)).etag if is_remote(path) else ""


def list_sizes(directory: epath.PathLike) -> dict[str, int]:
  """Return the sizes in bytes of a directory's files by name, by one listing; none where there is none."""
  if is_remote(directory):
    listing = objects.list_directory(parse_address(directory))
    return {name: status.size_bytes for name, status in listing.objects.items()}
  try:
    with os.scandir(directory) as entries:
      return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
  except FileNotFoundError:
    return {}


def size_of(path: epath.PathLike) -> int | None:
  """Return a file's size in bytes; None where there is no file."""
  try:
    status = epath.Path(path).stat()
  except FileNotFoundError:
    return None
  return None if status.is_directory else status.length


def is_writable(directory: epath.PathLike) -> bool:
  """Return whether this program may write files in a directory; on a store it tries."""
  if not is_remote(directory):
    return os.access(directory, os.W_OK)
  probe = attempt_path(epath.Path(directory) / "probe")
  try:
    put(probe, b"")
    probe.unlink(missing_ok=True)
  except PermissionError:
    return False
  return True


def remove_unfinished_uploads(directory: epath.PathLike) -> None:
  """Remove what killed programs left of files that they were writing to a store, below a directory."""
  if is_remote(directory):
    objects.remove_unfinished_uploads(parse_address(directory))


def _add_path(error: BaseException, path: epath.PathLike) -> None:
  """Add the file's path to an error: a system call on an open file does not know it."""
  # An OSError without a number is not the system's, and has no field for a name.
  if isinstance(error, OSError) and error.errno is not None:
    error.filename, error.filename2 = os.fspath(path), None


def sync(path: epath.PathLike) -> None:
  """Make a file's content, or a directory's list of names, durable."""
  if is_remote(path):
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def move(source: epath.PathLike, target: epath.PathLike) -> None:
  """Rename a file; replace the file that has the new name. On a store it is copied, then removed."""
  epath.Path(source).replace(target)
