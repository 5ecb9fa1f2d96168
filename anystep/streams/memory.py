"""Memory of batches: freed memory is kept for the next ones."""

from __future__ import annotations

import ctypes
import functools
import os

_MAX_KEPT_BYTES = 256 << 20
# The most that glibc allows.
_MAX_HEAP_ARRAY_BYTES = 32 << 20
# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SET_BY_USERS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


@functools.cache
def keep_freed_memory() -> bool:
  """Make glibc keep up to 256 MiB that the process freed, for later batches; return whether it does.

  By default glibc gives a batch's memory back to the system and takes new pages for the next one, which costs
  a quarter of the time to read a batch. Environment variables that set the same are left as they are.
  """
  if any(name in os.environ for name in _SET_BY_USERS):
    return False
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return False
  return bool(
    mallopt(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_ARRAY_BYTES)
  )
