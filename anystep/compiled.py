"""Loops over numpy arrays that run as machine code where numba is installed, else as they stand."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any


def is_fast() -> bool:
  """Whether numba is installed, so that loops run as machine code."""
  return importlib.util.find_spec("numba") is not None


class compiled:
  """Compiles a function of arrays and numbers, without Python's lock, when it is first called.

  What numba compiled is kept on disk for later processes. Where numba is not installed the function gives
  the same result, slowly.
  """

  def __init__(self, function: Callable[..., Any]):
    self.plain = function
    functools.update_wrapper(self, function)

  @functools.cached_property
  def _run(self) -> Callable[..., Any]:
    if not is_fast():
      return self.plain
    import numba

    try:
      return numba.njit(self.plain, nogil=True, cache=True)
    except RuntimeError:
      # There is no place on disk to keep it.
      return numba.njit(self.plain, nogil=True)

  def __call__(self, *arguments: Any) -> Any:
    return self._run(*arguments)
