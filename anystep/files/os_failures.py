"""Failures of the operating system as errors with a path and a fix."""

from __future__ import annotations

import errno
import os

from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.stores.addresses import is_remote

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SUCH_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def os_failure(error: OSError) -> AnystepError:
  """The error for a failure of the operating system that no caller handled more precisely.

  Its kinds: 66 `input_missing`, `file_unreadable`; 64 `path_invalid`; 73 `cannot_create`; 74 `disk_full`,
  `too_many_files`, `io_failed`.
  """
  path = error.filename
  if isinstance(error, PermissionError) and path is not None and not _may_read(path):
    return unreadable(error, path)
  if isinstance(error, FileNotFoundError):
    code, kind = ExitCode.NO_INPUT, "input_missing"
    fix = "correct the path; if the file was there before, find out what removed it, and run it again"
  elif isinstance(error, (NotADirectoryError, IsADirectoryError, FileExistsError)):
    code, kind = ExitCode.CANNOT_CREATE, "cannot_create"
    fix = "choose a path that has no file where a directory must be, and no directory where a file must be"
  elif isinstance(error, PermissionError) and path is not None and is_remote(path):
    code, kind = ExitCode.CANNOT_CREATE, "cannot_create"
    fix = "let the credentials in use list, read, write and delete there, or choose another directory"
  elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
    code, kind, fix = ExitCode.CANNOT_CREATE, "cannot_create", "choose a directory that can be written to"
  elif error.errno in FULL:
    code, kind, fix = ExitCode.IO, "disk_full", "make room, and run it again"
  elif error.errno in _NO_SUCH_PATH and path is not None:
    code, kind, fix = ExitCode.USAGE, "path_invalid", "name a path that the file system has, or shorten it"
  elif error.errno in _TOO_MANY_FILES:
    code, kind, fix = ExitCode.IO, "too_many_files", "let the process have more files open: ulimit -n"
  else:
    code, kind, fix = ExitCode.IO, "io_failed", "check the disk or store, and run it again"
  # A system call on an open file does not know the file's name.
  fields = {} if path is None else {"path": path}
  got = f"{type(error).__name__}: {error.strerror or error}"
  return AnystepError(code, kind, **fields, got=got, fix=fix)


def unreadable(error: OSError, path: epath.PathLike) -> AnystepError:
  """The error for a file or directory that this user may not read."""
  return AnystepError(
    ExitCode.NO_INPUT,
    "file_unreadable",
    path=error.filename or path,
    expected="a file that this user may read, in directories that it may enter",
    got=f"{type(error).__name__}: {error.strerror}",
    fix="let the credentials in use list and read there"
    if is_remote(path)
    else "give this user the right to read it (chmod, chown), or run as a user who has it",
  )


def _may_read(path: object) -> bool:
  """Return whether this user may read the file and enter its directories, so that only writing failed."""
  try:
    file = os.fspath(path)  # type: ignore[call-overload]
    if os.path.exists(file):
      return os.access(file, os.R_OK)
    # The file may exist in a directory that this user may not enter.
    directory = os.path.dirname(os.path.abspath(file))
    while not os.path.exists(directory) and directory != os.path.dirname(directory):
      directory = os.path.dirname(directory)
    return os.access(directory, os.X_OK)
  except (TypeError, ValueError):
    return True
