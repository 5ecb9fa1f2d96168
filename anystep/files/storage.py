"""Files that appear as a whole or not at all (docs/architecture.md#stores).

A small file that is written last marks something as complete. A rename never does: not every store has
renames, and an object store's objects appear whole without them.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from typing import IO

from etils import epath

from anystep.stores.addresses import is_remote


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
    epath.Path(path).unlink(missing_ok=True)
    raise


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
  """Rename a file; replace the file that has the new name."""
  epath.Path(source).replace(target)
