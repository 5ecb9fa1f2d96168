"""Lock on a task's directory, which lets one job at a time in."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.files.directory_lock import LOCK, DirectoryLock, locked_directory
from anystep.files.object_lock import is_lost, refresh_lock
from anystep.stores.addresses import parse_address

if TYPE_CHECKING:
  from anystep.cache_job.state.split_job import SplitJob

__all__ = ["LOCK", "check_lock", "keep_lock", "lock_task_directory"]

_REFRESH_SECONDS = 10.0
# By lock, when this process refreshes it next.
_next_refreshes: dict[str, float] = {}


def lock_task_directory(directory: epath.PathLike) -> AbstractContextManager[DirectoryLock]:
  """Keep other jobs out of a task's directory; make the directory where there is none.

  Raises:
    AnystepError: 73 `job_running`.
  """
  fix = "wait for that job; where it is gone from its host, remove the file that path names"
  return locked_directory(directory, kind="job_running", fix=fix)


def keep_lock(job: SplitJob) -> None:
  """Keep the job's lock on a store alive from a worker: its program may be gone while the engine goes on."""
  now = time.monotonic()
  if job.lock_id and now >= _next_refreshes.get(job.lock_id, 0):
    _next_refreshes[job.lock_id] = now + _REFRESH_SECONDS
    # The next refresh may reach the store again.
    with contextlib.suppress(OSError):
      refresh_lock(parse_address(epath.Path(job.directory).parent.parent / LOCK), job.lock_id)


def check_lock(job: SplitJob) -> None:
  """Check on a worker that the job's lock on a store is not another program's, before the cache changes.

  Raises:
    AnystepError: 73 `job_running`.
  """
  path = epath.Path(job.directory).parent.parent / LOCK
  if job.lock_id and is_lost(parse_address(path), job.lock_id):
    raise AnystepError(
      ExitCode.CANNOT_CREATE,
      "job_running",
      path=path,
      expected="the lock that this job took",
      got="another job's",
      fix="wait for that job",
    )
