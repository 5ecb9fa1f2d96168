"""Files from other programs: opened without waiting for a writer, and read within a size limit."""

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
  """Open a regular file for reading.

  Other kinds of files are refused: a FIFO or a device could keep its reader waiting, or supply bytes,
  without end.

  Raises:
    AnystepError: 66 `file_unreadable` for a file that this user may not read; as `os_failure` for failures
      that are not named here.
    ValueError: for a file that is not regular, and for a path that no file can have.
    FileNotFoundError, NotADirectoryError, IsADirectoryError: as `open`, with the path.
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
  """Return the bytes of a regular file.

  Raises:
    AnystepError, OSError, ValueError: as `open_file`; ValueError for more than limit_bytes.
  """
  with open_file(path) as file:
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    # A file may grow meanwhile, and some of the system's files report no size.
    content = file.read(limit_bytes + 1) if size_bytes <= limit_bytes else b""
  if max(size_bytes, len(content)) > limit_bytes:
    raise ValueError(f"more than {limit_bytes:,} bytes")
  return content


def _open_local(path: epath.PathLike) -> IO[bytes]:
  # Checked before opening, because opening a device can change its state; and after, because the path may
  # lead to another file by then.
  _check_regular(os.stat(path))
  # The file object owns the descriptor from the start, so an interrupt cannot leak it or close it twice.
  file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
  try:
    _check_regular(os.fstat(file.fileno()))
  except BaseException:
    file.close()
    raise
  return file


def _open_without_waiting(path: str, flags: int) -> int:
  return os.open(path, flags | os.O_NONBLOCK)


def _check_regular(status: os.stat_result) -> None:
  if stat.S_ISDIR(status.st_mode):
    raise IsADirectoryError(21, "Is a directory")
  if not stat.S_ISREG(status.st_mode):
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    raise ValueError(f"{kinds.get(stat.S_IFMT(status.st_mode), 'a device')}, not a regular file")
