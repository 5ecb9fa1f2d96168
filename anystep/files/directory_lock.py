"""Lock that admits one program at a time to a directory, and names its holder."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from typing import Protocol

from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import canonical_json, parse_json
from anystep.files.object_lock import LockHeld, ObjectLock
from anystep.forks import start_anew_in_children
from anystep.stores.addresses import is_remote, parse_address

LOCK = ".lock"
# Error numbers of opening a symbolic link, a directory, or a socket or device that nobody serves.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)


@contextlib.contextmanager
def locked_directory(directory: epath.PathLike, *, kind: str, fix: str) -> Iterator[DirectoryLock]:
  """Lock a directory against other programs; create a local directory if there is none.

  On a store the lock is an object, as `ObjectLock` says. In a file system, the lock file names the holder:
  host, pid and start time. The kernel's lock on the file tells whether the holder still lives. So a lock
  that a killed program left is taken over on the same host, even if another program has that pid now. A
  lock of another host always counts as held, because not every shared file system passes kernel locks on.

  Args:
    directory: the directory to lock; programs exclude each other only if they pass the same one.
    kind: the error's kind if another program holds the lock.
    fix: the error's fix in that case.

  Yields:
    The lock; `check` it before a change that one program alone may make.

  Raises:
    AnystepError: 73 `kind`, with host, pid and since, and on a store the engine's job; 73 `lock_invalid` if
      the lock is not a regular file.
  """
  path = os.path.join(os.fspath(directory), LOCK)
  lock: ObjectLock | _Lock = ObjectLock(parse_address(path)) if is_remote(path) else _Lock(path)
  try:
    # Inside the `try`, so that an interrupt right after this call releases the lock.
    lock.acquire()
    yield lock
  except LockHeld as error:
    fields = {name: error.holder.get(name, "unknown") for name in ("host", "pid", "since")}
    if "job" in error.holder:
      fields["job"] = error.holder["job"]
    raise AnystepError(ExitCode.CANNOT_CREATE, kind, path=path, **fields, fix=fix) from error
  finally:
    lock.release()


class DirectoryLock(Protocol):
  """Lock that this process holds.

  Attributes:
    id: on a store, what workers refresh it with; empty for a local directory, whose kernel knows.
  """

  id: str

  def check(self) -> None:
    """Check that the lock is still ours.

    Raises:
      LockHeld: if another program took it over, which `locked_directory` makes its error of.
    """


class _Lock:
  """A lock's file, open only in the process that took the lock.

  The kernel's lock lives as long as any process has the file open. A forked child with the file open would
  keep the lock of a killed parent, and a child that ends would release the lock of a living parent.
  """

  id = ""

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
    """Take the lock and write this process as its holder.

    Raises:
      LockHeld: if another program holds it.
      AnystepError: 73 `lock_invalid`.
    """
    while not self._is_held:
      # In each attempt: a holder may have removed the directory that it created, with the lock.
      os.makedirs(os.path.dirname(self._path), exist_ok=True)
      try:
        self._descriptor = _open(self._path)
      except FileNotFoundError:
        continue
      try:
        self._is_held = _try_lock(self._descriptor, self._path)
      finally:
        if not self._is_held:
          self._close()
    assert self._descriptor is not None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
    os.ftruncate(self._descriptor, 0)
    os.pwrite(self._descriptor, canonical_json(holder).encode(), 0)

  def check(self) -> None:
    """Do nothing: the kernel keeps the lock for as long as the process lives."""

  def release(self) -> None:
    """Release the lock; do nothing in a forked child, which does not have it."""
    # Removed while still locked, and only if it is our file: after somebody removes it, another program
    # may create a new one at the same path.
    if self._is_held and self._descriptor is not None and _is_at_path(self._descriptor, self._path):
      os.unlink(self._path)
    self._close()

  def _close(self) -> None:
    self.start_anew()


def _open(path: str) -> int:
  """Open or create a regular file.

  Links and FIFOs are refused: writing through a link would empty another file, and a FIFO keeps no content.
  """
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
  try:
    descriptor = os.open(path, flags, 0o666)
  except OSError as error:
    if error.errno in _NO_FILE:
      raise _lock_invalid(path, os.lstat(path).st_mode) from error
    raise
  mode = os.fstat(descriptor).st_mode
  if not stat.S_ISREG(mode):
    os.close(descriptor)
    raise _lock_invalid(path, mode)
  return descriptor


def _lock_invalid(path: str, mode: int) -> AnystepError:
  kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO"}
  return AnystepError(
    ExitCode.CANNOT_CREATE,
    "lock_invalid",
    path=path,
    expected="a regular file, or none",
    got=kinds.get(stat.S_IFMT(mode), "a device or socket"),
    fix="find out who put it there, and remove it",
  )


def _try_lock(descriptor: int, path: str) -> bool:
  """Lock the file; return False if its holder removed it after we opened it."""
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise LockHeld(_read_holder(descriptor)) from error
  if not _is_at_path(descriptor, path):
    return False
  if _read_holder(descriptor).get("host", socket.gethostname()) != socket.gethostname():
    raise LockHeld(_read_holder(descriptor))
  return True


def _is_at_path(descriptor: int, path: str) -> bool:
  """Return whether the open file is the one at this path."""
  try:
    return os.path.samestat(os.fstat(descriptor), os.lstat(path))
  except FileNotFoundError:
    return False


def _read_holder(descriptor: int) -> dict[str, object]:
  """Return the lock file's JSON object; empty if its writer has not written it yet."""
  try:
    document = parse_json(os.pread(descriptor, 4096, 0))
  except ValueError:
    return {}
  return document if isinstance(document, dict) else {}
