"""Loops over numpy arrays: compiled to machine code if numba is installed, else run by Python."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

# Plain Python finishes fewer rows before numba is imported, which takes 0.4 s.
FEWEST_TO_COMPILE_FOR = 16


def is_fast() -> bool:
  """Return whether numba is installed, so that loops run as machine code."""
  return importlib.util.find_spec("numba") is not None


# Held while numba is imported and a function prepared.
_preparing = threading.RLock()


def _get_compiler_locks() -> list[Any]:
  """Locks that a fork must not copy while they are held; the outer one first."""
  numba = sys.modules.get("numba.core.compiler_lock")
  return [_preparing, *([numba.global_compiler_lock] if numba else [])]


_held_locks: list[Any] = []


def _acquire_locks() -> None:
  for lock in _get_compiler_locks():
    lock.acquire()
    _held_locks.append(lock)


def _release_locks() -> None:
  while _held_locks:
    _held_locks.pop().release()


os.register_at_fork(before=_acquire_locks, after_in_parent=_release_locks, after_in_child=_release_locks)


class compiled:
  """Function of arrays and numbers that numba compiles at its first call, and runs without Python's lock.

  The machine code is kept on disk for later processes. Without numba the function gives the same result,
  slowly.
  """

  def __init__(self, function: Callable[..., Any]):
    self.plain = function
    self._run: Callable[..., Any] | None = None
    functools.update_wrapper(self, function)

  def _prepare(self) -> Callable[..., Any]:
    if not is_fast():
      return self.plain
    import numba

    try:
      return numba.njit(self.plain, nogil=True, cache=True)
    except RuntimeError:
      # There is no directory that numba can write to.
      return numba.njit(self.plain, nogil=True)

  def __call__(self, *arguments: Any) -> Any:
    if self._run is None:
      with _preparing:
        self._run = self._run or self._prepare()
    return self._run(*arguments)
