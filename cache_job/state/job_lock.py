"""One job at a time: the lock on a task's directory."""

from __future__ import annotations

from contextlib import AbstractContextManager

from etils import epath

from anystep.files.directory_lock import LOCK, locked_directory

__all__ = ["LOCK", "locked"]


def locked(directory: epath.PathLike) -> AbstractContextManager[None]:
  """Keeps other jobs out of a task's directory, which it makes where there is none.

  Raises:
    AnystepError: 73 `job_running`.
  """
  fix = "wait for that job; where it is gone from its host, remove the file that path names"
  return locked_directory(directory, kind="job_running", fix=fix)
