"""What a forked process does to what it was given of its parent's threads, locks and open files.

A fork copies memory as it is, and one thread. What other threads held or were about to do stays so for ever.
So what has locks, threads or a state that another thread may be changing starts anew in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class StartsAnew(Protocol):
  """An object that a forked process has a copy of."""

  def start_anew(self) -> None:
    """Makes new locks, and forgets threads and what they were doing; called by the child's only thread."""


_objects: weakref.WeakSet[StartsAnew] = weakref.WeakSet()
_registered = False


def start_anew_in_children(new: StartsAnew) -> None:
  """Has `new.start_anew` called in every process that is forked from now on, as long as the object lives."""
  global _registered
  if not _registered:
    _registered = True
    os.register_at_fork(after_in_child=_start_all)
  _objects.add(new)


def _start_all() -> None:
  for each in list(_objects):
    each.start_anew()
