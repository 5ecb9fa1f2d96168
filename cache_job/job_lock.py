"""One job at a time: the lock on a task's directory."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
from collections.abc import Iterator

from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.manifest import canonical_json

LOCK = ".lock"


@contextlib.contextmanager
def locked(directory: epath.PathLike) -> Iterator[None]:
  """Keeps other jobs out of a task's directory, which it makes where there is none.

  The file says who holds it: host, pid and since when. The kernel's lock on it says whether they still
  live, so what a killed job left is taken over on its host, whatever has its pid by now. Another host's
  word is believed as it stands, for not every shared file system passes locks on.

  Raises:
    AnystepError: 73 `job_running`.
  """
  epath.Path(directory).mkdir(parents=True, exist_ok=True)
  path = os.path.join(os.fspath(directory), LOCK)
  descriptor = _acquire(path)
  try:
    yield
  finally:
    # While it is still held, and only its own: somebody may have removed it, and another job come.
    if _is_at(descriptor, path):
      os.unlink(path)
    os.close(descriptor)


def _acquire(path: str) -> int:
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      if not _held(descriptor, path):
        os.close(descriptor)
        continue
      me = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
      os.ftruncate(descriptor, 0)
      os.pwrite(descriptor, canonical_json(me).encode(), 0)
    except BaseException:
      os.close(descriptor)
      raise
    return descriptor


def _held(descriptor: int, path: str) -> bool:
  """Whether the file is this job's now; not where its holder removed it after we had opened it."""
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise _running(descriptor, path) from error
  if not _is_at(descriptor, path):
    return False
  if _holder(descriptor).get("host", socket.gethostname()) != socket.gethostname():
    raise _running(descriptor, path)
  return True


def _is_at(descriptor: int, path: str) -> bool:
  """Whether the open file is the one of this name."""
  try:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))
  except FileNotFoundError:
    return False


def _holder(descriptor: int) -> dict[str, object]:
  """What the file says; nothing where its writer has not come to that."""
  try:
    document = json.loads(os.pread(descriptor, 4096, 0))
  except ValueError:
    return {}
  return document if isinstance(document, dict) else {}


def _running(descriptor: int, path: str) -> AnystepError:
  holder = _holder(descriptor)
  return AnystepError(
    ExitCode.CANNOT_CREATE,
    "job_running",
    path=path,
    **{name: holder.get(name, "unknown") for name in ("host", "pid", "since")},
    fix="wait for that job; where it is gone from its host, remove the file that path names",
  )


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
