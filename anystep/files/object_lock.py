"""Lock on a store's directory: an object that only one program can make, and that its holder refreshes."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import threading
import time
import uuid
from typing import Any

from anystep.files.json_files import canonical_json, parse_json
from anystep.stores import objects
from anystep.stores.addresses import Address
from anystep.stores.failures import ObjectChangedError

# The holder writes its lock anew so often. One that is older than `_STALE_SECONDS` is watched for
# `_WATCH_SECONDS`, for clocks differ: who still refreshes it holds it.
_REFRESH_SECONDS = 10.0
_STALE_SECONDS = 60.0
_WATCH_SECONDS = 25.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PID_SPACE = "/proc/self/ns/pid"


class LockHeld(Exception):
  """Another program holds the lock.

  Attributes:
    holder: its host, pid and since, as the lock file has them.
  """

  def __init__(self, holder: dict[str, Any]):
    super().__init__(holder)
    self.holder = holder


class ObjectLock:
  """A lock's object, refreshed by a thread while this process holds it.

  The object names the holder: host, pid, start time, and the engine's job once `name_job` tells it. It is
  taken over where its holder does not refresh it any more, at once where the holder was a process of this
  machine that has ended.

  Args:
    address: the object's.

  Attributes:
    id: of this taking of the lock; `refresh_lock` keeps it alive from other processes.
  """

  def __init__(self, address: Address):
    self.id = uuid.uuid4().hex
    self._address = address
    self._version: str | None = None
    self._job: str | None = None
    self._since = _now()
    self._mutex = threading.Lock()
    self._released = threading.Event()
    self._thread = threading.Thread(target=self._refresh_until_released, name="anystep-lock", daemon=True)

  def acquire(self) -> None:
    """Make the lock's object, or take over one whose holder is gone.

    Raises:
      LockHeld: if another program holds it.
    """
    while self._version is None:
      try:
        self._version = objects.put_if_absent(self._address, self._content())
      except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
          self._version = self._take_over()
    self._thread.start()

  def release(self) -> None:
    """Remove the object, if it is still ours."""
    self._released.set()
    with self._mutex:
      if self._version is not None:
        self._version = None
        # One that cannot be removed now is taken over once it is old.
        with contextlib.suppress(OSError):
          if _parse(objects.read(self._address)[0]).get("id") == self.id:
            objects.delete([self._address])

  def leave(self) -> None:
    """Leave the lock to the workers of the engine's job, which refresh it."""
    self._released.set()
    with self._mutex:
      self._version = None

  def check(self) -> None:
    """Check that the lock is still ours, before a change that one program alone may make.

    Raises:
      LockHeld: if another program took it over.
    """
    self._refresh()

  def name_job(self, job: str) -> None:
    """Name the engine's job in the lock, for whoever finds it held."""
    self._job = job
    self._refresh()

  def _refresh_until_released(self) -> None:
    while not self._released.wait(_REFRESH_SECONDS):
      try:
        self._refresh()
      except LockHeld:
        return
      except OSError:
        # `check` meets it again; a store that comes back finds the lock refreshed.
        continue

  def _refresh(self) -> None:
    with self._mutex:
      while self._version is not None:
        try:
          self._version = objects.put_if_match(self._address, self._content(), self._version)
          return
        except ObjectChangedError:
          self._version = self._find_own_version()

  def _find_own_version(self) -> str:
    """Return the version that a worker's refresh made."""
    try:
      content, version = objects.read_version(self._address)
    except FileNotFoundError:
      raise LockHeld({}) from None
    if _parse(content).get("id") != self.id:
      raise LockHeld(_parse(content))
    return version

  def _take_over(self) -> str:
    content, version = objects.read_version(self._address)
    holder = _parse(content)
    if not _is_process_gone(holder):
      age_seconds = time.time() - objects.head(self._address).modified_ns / 1e9
      if age_seconds < _STALE_SECONDS:
        raise LockHeld(holder)
      time.sleep(_WATCH_SECONDS)
    try:
      return objects.put_if_match(self._address, self._content(), version)
    except ObjectChangedError:
      # The holder has refreshed it meanwhile, or another program took it over.
      raise LockHeld(_parse(objects.read(self._address)[0])) from None

  def _content(self) -> bytes:
    document = {
      "id": self.id,
      "host": socket.gethostname(),
      "pid": os.getpid(),
      "process": _describe_process(str(os.getpid())),
      "since": self._since,
      "refreshed": _now(),
      **({} if self._job is None else {"job": self._job}),
    }
    return canonical_json(document).encode()


def refresh_lock(address: Address, lock_id: str) -> None:
  """Keep a lock alive for the program that holds it, from a process that works for it.

  A lock that another program holds by now is left as it is.
  """
  with contextlib.suppress(FileNotFoundError, ObjectChangedError):
    content, version = objects.read_version(address)
    document = _parse(content)
    if document.get("id") == lock_id:
      refreshed = canonical_json({**document, "refreshed": _now()}).encode()
      objects.put_if_match(address, refreshed, version)


def is_lost(address: Address, lock_id: str) -> bool:
  """Return whether another program holds a lock by now; one that was released is not lost."""
  try:
    content, _ = objects.read_version(address)
  except FileNotFoundError:
    return False
  return _parse(content).get("id") != lock_id


def _parse(content: bytes) -> dict[str, Any]:
  try:
    document = parse_json(content)
  except ValueError:
    return {}
  return document if isinstance(document, dict) else {}


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat()


def _describe_process(pid: str) -> list[str] | None:
  """Return what tells a process from all others: boot, pid space, pid and start; None where nobody knows."""
  try:
    with open(_BOOT_ID) as boot, open(f"/proc/{pid}/stat") as status:
      # The start is the twentieth field after the name, which may have spaces.
      start = status.read().rpartition(")")[2].split()[19]
      return [boot.read().strip(), os.readlink(_PID_SPACE), pid, start]
  except (OSError, IndexError):
    return None


def _is_process_gone(holder: dict[str, Any]) -> bool:
  """Return whether the holder was a process of this machine that has ended."""
  process, ours = holder.get("process"), _describe_process(str(os.getpid()))
  if not isinstance(process, list) or len(process) != 4 or ours is None or process[:2] != ours[:2]:
    return False
  return re.fullmatch(r"\d+", str(process[2])) is not None and _describe_process(process[2]) != process
