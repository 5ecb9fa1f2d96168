"""What the operating system refuses, as errors that say what was refused and what to do about it."""

from __future__ import annotations

import errno
import os

from etils import epath

from anystep.errors import AnystepError, ExitCode

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SUCH_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def os_failure(error: OSError) -> AnystepError:
  """The error for a failure of the operating system's that nobody nearer to it knew more of.

  Its kinds: 66 `input_missing`, `file_unreadable`; 64 `path_invalid`; 73 `cannot_create`; 74 `disk_full`,
  `too_many_files`, `io_failed`.
  """
  path = error.filename
  if isinstance(error, PermissionError) and path is not None and not _may_read(path):
    return unreadable(error, path)
  if isinstance(error, FileNotFoundError):
    code, kind = ExitCode.NO_INPUT, "input_missing"
    fix = "correct the path; where it was there before, see what removed it, and run it again"
  elif isinstance(error, (NotADirectoryError, IsADirectoryError, FileExistsError)):
    code, kind = ExitCode.CANNOT_CREATE, "cannot_create"
    fix = "name a path where no file stands in a directory's place, nor a directory in a file's"
  elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
    code, kind, fix = ExitCode.CANNOT_CREATE, "cannot_create", "choose a place that can be written to"
  elif error.errno in FULL:
    code, kind, fix = ExitCode.IO, "disk_full", "make room, and run it again"
  elif error.errno in _NO_SUCH_PATH and path is not None:
    code, kind, fix = ExitCode.USAGE, "path_invalid", "name a path that the file system has, or shorten it"
  elif error.errno in _TOO_MANY_FILES:
    code, kind, fix = ExitCode.IO, "too_many_files", "let the process have more files open: ulimit -n"
  else:
    code, kind, fix = ExitCode.IO, "io_failed", "see to the disk or store, and run it again"
  # Where the system's call had only an open file, nobody knows its name.
  where = {} if path is None else {"path": path}
  return AnystepError(code, kind, **where, got=f"{type(error).__name__}: {error.strerror or error}", fix=fix)


def unreadable(error: OSError, path: epath.PathLike) -> AnystepError:
  """The error for a file or directory that this user may not read."""
  return AnystepError(
    ExitCode.NO_INPUT,
    "file_unreadable",
    path=error.filename or path,
    expected="a file that this user may read, in directories that it may enter",
    got=f"{type(error).__name__}: {error.strerror}",
    fix="let the program's user read it (chmod, chown), or run as one who may",
  )


def _may_read(path: object) -> bool:
  """Whether a failure at a path was of writing: what is there may be read, and so may what it lies in."""
  try:
    place = os.fspath(path)  # type: ignore[call-overload]
    if os.path.exists(place):
      return os.access(place, os.R_OK)
    # What is not seen for want of leave to enter a directory above it could be there.
    above = os.path.dirname(os.path.abspath(place))
    while not os.path.exists(above) and above != os.path.dirname(above):
      above = os.path.dirname(above)
    return os.access(above, os.X_OK)
  except (TypeError, ValueError):
    return True
