"""Fresh locks, threads and open files in forked processes.

A fork copies the memory but only one thread. Locks that other threads held stay locked for ever, and their
half-done work stays half done. So objects with locks, threads, or state that another thread may be changing
start anew in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from anystep.errors import AnystepError, ExitCode


class StartsAnew(Protocol):
  """An object that a forked process has a copy of."""

  def start_anew(self) -> None:
    """Make new locks, and forget threads and their work; called by the child's only thread."""


# In the order of registration.
_objects: dict[weakref.ref[StartsAnew], None] = {}


def start_anew_in_children(new: StartsAnew) -> None:
  """Call `new.start_anew` in every process forked from now on, as long as the object lives.

  Objects start anew in the order of registration: later ones may give up what earlier ones have to keep.
  """
  _objects[weakref.ref(new, lambda reference: _objects.pop(reference, None))] = None


def _start_all() -> None:
  for reference in list(_objects):
    registered = reference()
    if registered is not None:
      registered.start_anew()


os.register_at_fork(after_in_child=_start_all)


class UnforkableLibrary:
  """Library with its own threads: a process that is forked after using it hangs or crashes in it.

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

  def use(self, fix: str, **fields: object) -> None:
    """Record that the process uses the library.

    Args:
      fix: another fix for the error, besides starting processes without a fork.
      fields: further fields of the error.

    Raises:
      AnystepError: 78 `forked_process` if a parent process used the library before it forked.
    """
    if self.is_forked:
      raise AnystepError(
        ExitCode.CONFIG,
        "forked_process",
        **fields,
        expected=f"a process that was not forked from one that had used {self._name}",
        got="such a fork",
        fix=f"start processes by spawn or forkserver (multiprocessing.get_context('spawn')); or {fix}",
      )
    self._was_used = True
