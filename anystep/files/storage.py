"""Files that appear whole: put, made durable, moved and removed (design section 4, Stores).

What says that something is complete is a small file that is put last. It is never a rename: those only swap
files, where the file system has them, and an object store's objects are whole by themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from typing import IO

from etils import epath


def put(path: epath.PathLike, content: bytes) -> None:
  """Gives a file its content: who reads it meanwhile, or after a crash, finds the old content or the new."""
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
    _name(error, path)
    attempt.unlink(missing_ok=True)
    raise
  sync(path.parent)


def attempt_path(path: epath.PathLike) -> epath.Path:
  """A name of its own for what may be written twice at a time, as by workers that are retried."""
  path = epath.Path(path)
  return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")


def is_attempt(name: str, *, at: str) -> bool:
  """Whether a file's name is one of an attempt at another.

  >>> is_attempt(attempt_path("folder/COMPLETED").name, at="COMPLETED"), is_attempt("a.json", at="a")
  (True, False)
  """
  return re.fullmatch(re.escape(at) + r"\.[0-9a-f]{12}", name) is not None


@contextlib.contextmanager
def new_file(path: epath.PathLike) -> Iterator[IO[bytes]]:
  """Writes a file that nobody knows of yet: durable when the body has ended, and gone where it fails."""
  try:
    with epath.Path(path).open("wb") as file:
      yield file
      if not is_remote(path):
        file.flush()
        os.fsync(file.fileno())
  except BaseException as error:
    _name(error, path)
    epath.Path(path).unlink(missing_ok=True)
    raise


def _name(error: BaseException, path: epath.PathLike) -> None:
  """Says in a failure which file was to be written: a call on an open file does not know its name."""
  # One without a number is not the system's, and has no place for a name.
  if isinstance(error, OSError) and error.errno is not None:
    error.filename, error.filename2 = os.fspath(path), None


def sync(path: epath.PathLike) -> None:
  """Makes durable what somebody else wrote to a file, or which names a directory has."""
  if is_remote(path):
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def move(source: epath.PathLike, target: epath.PathLike) -> None:
  """Gives a file another name, in the place of what has it."""
  epath.Path(source).replace(target)


def is_remote(path: epath.PathLike) -> bool:
  """Whether a path is on an object store."""
  return "://" in str(path)
