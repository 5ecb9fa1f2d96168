"""What a forked process does with what it was given of its parent's threads, locks and open files.

A fork copies memory as it is, and one thread. What other threads held, or were about to do, stays so for
ever. So what has locks, threads, or a state that another thread may be changing, starts anew in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from anystep.errors import AnystepError, ExitCode


class StartsAnew(Protocol):
  """An object that a forked process has a copy of."""

  def start_anew(self) -> None:
    """Makes new locks, and forgets threads and what they were doing; called by the child's only thread."""


# In the order in which they came.
_objects: dict[weakref.ref[StartsAnew], None] = {}


def start_anew_in_children(new: StartsAnew) -> None:
  """Has `new.start_anew` called in every process that is forked from now on, as long as the object lives.

  Objects that came first start anew first: what others let go of may be theirs to keep.
  """
  _objects[weakref.ref(new, lambda reference: _objects.pop(reference, None))] = None


def _start_all() -> None:
  for reference in list(_objects):
    each = reference()
    if each is not None:
      each.start_anew()


os.register_at_fork(after_in_child=_start_all)


class UnforkableLibrary:
  """A library with threads of its own, in which a fork of a process that used it hangs or crashes.

  Args:
    name: the library's.
  """

  def __init__(self, name: str):
    self._name = name
    self._was_used = False
    self.is_forked = False
    start_anew_in_children(self)

  def start_anew(self) -> None:
    self.is_forked = self.is_forked or self._was_used

  def use(self, fix: str, **where: object) -> None:
    """Remembers that the process uses the library.

    Args:
      fix: how to do without a fork, besides other ways to start processes.
      where: fields of the error.

    Raises:
      AnystepError: 78 `forked_process` where a parent of the process had used it.
    """
    if self.is_forked:
      raise AnystepError(
        ExitCode.CONFIG,
        "forked_process",
        **where,
        expected=f"a process that was not forked from one that had used {self._name}",
        got="such a fork",
        fix=f"start processes by spawn or forkserver (multiprocessing.get_context('spawn')); or {fix}",
      )
    self._was_used = True
