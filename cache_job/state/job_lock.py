"""Lock on a task's directory, which lets one job at a time in."""

from __future__ import annotations

from contextlib import AbstractContextManager

from etils import epath

from anystep.files.directory_lock import LOCK, locked_directory

__all__ = ["LOCK", "lock_task_directory"]


def lock_task_directory(directory: epath.PathLike) -> AbstractContextManager[None]:
  """Keep other jobs out of a task's directory; make the directory where there is none.

  Raises:
    AnystepError: 73 `job_running`.
  """
  fix = "wait for that job; where it is gone from its host, remove the file that path names"
  return locked_directory(directory, kind="job_running", fix=fix)
