"""Files that others wrote, opened without waiting for a writer and read whole within a limit."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import IO

from etils import epath

from anystep.files import storage
from anystep.files.os_failures import os_failure, unreadable


@contextlib.contextmanager
def open_file(path: epath.PathLike) -> Iterator[IO[bytes]]:
  """A regular file, open for reading.

  A FIFO or a device would keep its reader waiting without end, or give it bytes without end.

  Raises:
    AnystepError: 66 `file_unreadable` for a file that this user may not read; as `os_failure` for any other
      failure than those below.
    ValueError: for what is there and no regular file, and for a path that no file can have.
    FileNotFoundError, NotADirectoryError, IsADirectoryError: as `open` does, and with the path.
  """
  try:
    with epath.Path(path).open("rb") if storage.is_remote(path) else _open_local(path) as file:
      yield file
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
    error.filename = error.filename or os.fspath(path)
    raise
  except PermissionError as error:
    raise unreadable(error, path) from error
  except OSError as error:
    error.filename = error.filename or os.fspath(path)
    raise os_failure(error) from error


def read_file(path: epath.PathLike, *, limit_bytes: int) -> bytes:
  """A regular file's bytes.

  Raises:
    AnystepError, OSError, ValueError: as `open_file`; ValueError for more than limit_bytes.
  """
  with open_file(path) as file:
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    # A file may grow, and some of the system's have no size.
    content = file.read(limit_bytes + 1) if size_bytes <= limit_bytes else b""
  if max(size_bytes, len(content)) > limit_bytes:
    raise ValueError(f"more than {limit_bytes:,} bytes")
  return content


def _open_local(path: epath.PathLike) -> IO[bytes]:
  # Looked at before it is opened, for opening a device can do something to it; and after, for it may change.
  _check_regular(os.stat(path))
  # The file object has the descriptor at once: nothing is left to close, or is closed twice, by an interrupt.
  file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
  try:
    _check_regular(os.fstat(file.fileno()))
  except BaseException:
    file.close()
    raise
  return file


def _open_without_waiting(path: str, flags: int) -> int:
  return os.open(path, flags | os.O_NONBLOCK)


def _check_regular(found: os.stat_result) -> None:
  if stat.S_ISDIR(found.st_mode):
    raise IsADirectoryError(21, "Is a directory")
  if not stat.S_ISREG(found.st_mode):
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    raise ValueError(f"{kinds.get(stat.S_IFMT(found.st_mode), 'a device')}, not a regular file")
