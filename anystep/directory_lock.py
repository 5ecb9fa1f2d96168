"""One program at a time in a directory: the lock that says who is there, and since when."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
from collections.abc import Iterator

from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.json_files import parse_json
from anystep.manifest import canonical_json

LOCK = ".lock"


@contextlib.contextmanager
def locked_directory(directory: epath.PathLike, *, kind: str, fix: str) -> Iterator[None]:
  """Keeps other programs out of a local directory, which it makes where there is none.

  The file says who holds it: host, pid and since when. The kernel's lock on it says whether they still
  live, so what a killed program left is taken over on its host, whatever has its pid by now. Another host's
  word is believed as it stands, for not every shared file system passes locks on.

  Args:
    directory: what to lock; all that do must agree on it.
    kind: of the error where somebody else holds it.
    fix: what to do then.

  Raises:
    AnystepError: 73 `kind`, with host, pid and since.
  """
  path = os.path.join(os.fspath(directory), LOCK)
  try:
    descriptor = _acquire(path)
  except _Held as error:
    fields = {name: error.holder.get(name, "unknown") for name in ("host", "pid", "since")}
    raise AnystepError(ExitCode.CANNOT_CREATE, kind, path=path, **fields, fix=fix) from error
  try:
    yield
  finally:
    # While it is still held, and only its own: somebody may have removed it, and another job come.
    if _is_at(descriptor, path):
      os.unlink(path)
    os.close(descriptor)


class _Held(Exception):
  """Somebody else holds the lock; says who."""

  def __init__(self, holder: dict[str, object]):
    super().__init__(holder)
    self.holder = holder


def _acquire(path: str) -> int:
  while True:
    # Each time anew: a holder may have removed the directory that it had made, with its lock.
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
      descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
      continue
    try:
      if not _is_taken(descriptor, path):
        os.close(descriptor)
        continue
      me = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
      os.ftruncate(descriptor, 0)
      os.pwrite(descriptor, canonical_json(me).encode(), 0)
    except BaseException:
      os.close(descriptor)
      raise
    return descriptor


def _is_taken(descriptor: int, path: str) -> bool:
  """Takes the lock; False where its holder had removed the file after we had opened it."""
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise _Held(_holder(descriptor)) from error
  if not _is_at(descriptor, path):
    return False
  if _holder(descriptor).get("host", socket.gethostname()) != socket.gethostname():
    raise _Held(_holder(descriptor))
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
    document = parse_json(os.pread(descriptor, 4096, 0))
  except ValueError:
    return {}
  return document if isinstance(document, dict) else {}


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
