"""One program at a time in a directory: the lock that says who is there, and since when."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import canonical_json, parse_json
from anystep.forks import start_anew_in_children

LOCK = ".lock"
# What opening a symbolic link, a directory, and a socket or device that nobody serves fails with.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)


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
    AnystepError: 73 `kind`, with host, pid and since; 73 `lock_invalid` where the lock is no file.
  """
  path = os.path.join(os.fspath(directory), LOCK)
  lock = _Lock(path)
  try:
    # Within: an interrupt after it was taken gives it back.
    lock.acquire()
    yield
  except _Held as error:
    fields = {name: error.holder.get(name, "unknown") for name in ("host", "pid", "since")}
    raise AnystepError(ExitCode.CANNOT_CREATE, kind, path=path, **fields, fix=fix) from error
  finally:
    lock.release()


class _Held(Exception):
  """Somebody else holds the lock; says who."""

  def __init__(self, holder: dict[str, object]):
    super().__init__(holder)
    self.holder = holder


class _Lock:
  """A lock's file, which only the process has open that took it.

  The kernel's lock lives as long as anybody has the file open: a forked child would hold what its parent,
  killed, does no more; and one that ends by itself would give back what its parent holds.
  """

  def __init__(self, path: str):
    self._path = path
    self._descriptor: int | None = None
    self._is_held = False
    start_anew_in_children(self)

  def start_anew(self) -> None:
    self._is_held = False
    descriptor, self._descriptor = self._descriptor, None
    if descriptor is not None:
      os.close(descriptor)

  def acquire(self) -> None:
    """Takes it, and writes down who has.

    Raises:
      _Held: where somebody else does.
      AnystepError: 73 `lock_invalid`.
    """
    while not self._is_held:
      # Each time anew: a holder may have removed the directory that it had made, with its lock.
      os.makedirs(os.path.dirname(self._path), exist_ok=True)
      try:
        self._descriptor = _open(self._path)
      except FileNotFoundError:
        continue
      try:
        self._is_held = _is_taken(self._descriptor, self._path)
      finally:
        if not self._is_held:
          self._close()
    assert self._descriptor is not None
    me = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
    os.ftruncate(self._descriptor, 0)
    os.pwrite(self._descriptor, canonical_json(me).encode(), 0)

  def release(self) -> None:
    """Gives it back; does nothing in a forked child, which does not have it."""
    # While it is still held, and only its own: somebody may have removed it, and another job come.
    if self._is_held and self._descriptor is not None and _is_at(self._descriptor, self._path):
      os.unlink(self._path)
    self._close()

  def _close(self) -> None:
    # As in a forked child.
    self.start_anew()


def _open(path: str) -> int:
  """Opens or makes a regular file: through a link another one would be emptied, and a FIFO has no content."""
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
  try:
    descriptor = os.open(path, flags, 0o666)
  except OSError as error:
    if error.errno in _NO_FILE:
      raise _invalid(path, os.lstat(path).st_mode) from error
    raise
  mode = os.fstat(descriptor).st_mode
  if not stat.S_ISREG(mode):
    os.close(descriptor)
    raise _invalid(path, mode)
  return descriptor


def _invalid(path: str, mode: int) -> AnystepError:
  kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO"}
  return AnystepError(
    ExitCode.CANNOT_CREATE,
    "lock_invalid",
    path=path,
    expected="a regular file, or none",
    got=kinds.get(stat.S_IFMT(mode), "a device or socket"),
    fix="see who put it there, and remove it",
  )


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
    return os.path.samestat(os.fstat(descriptor), os.lstat(path))
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
