"""Loops over numpy arrays that run as machine code where numba is installed, else as they stand."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

# Of fewer rows, plain Python is done before numba is imported, which takes 0.4 s.
FEWEST_TO_COMPILE_FOR = 16


def is_fast() -> bool:
  """Whether numba is installed, so that loops run as machine code."""
  return importlib.util.find_spec("numba") is not None


# Held while numba is imported and a function prepared.
_preparing = threading.RLock()


def _locks() -> list[Any]:
  """Locks that nobody would release in a child, so nothing is forked under them; the outer one first."""
  numba = sys.modules.get("numba.core.compiler_lock")
  return [_preparing, *([numba.global_compiler_lock] if numba else [])]


_held: list[Any] = []


def _wait_for_compilation() -> None:
  for lock in _locks():
    lock.acquire()
    _held.append(lock)


def _go_on() -> None:
  while _held:
    _held.pop().release()


os.register_at_fork(before=_wait_for_compilation, after_in_parent=_go_on, after_in_child=_go_on)


class compiled:
  """Compiles a function of arrays and numbers, without Python's lock, when it is first called.

  What numba compiled is kept on disk for later processes. Where numba is not installed the function gives
  the same result, slowly.
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
      # There is no place on disk to keep it.
      return numba.njit(self.plain, nogil=True)

  def __call__(self, *arguments: Any) -> Any:
    if self._run is None:
      with _preparing:
        self._run = self._run or self._prepare()
    return self._run(*arguments)
