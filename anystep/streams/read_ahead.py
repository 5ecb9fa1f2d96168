"""Batches that background threads make ahead of need."""

from __future__ import annotations

import _thread
import atexit
import collections
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from anystep.features.converters import Rows

# While one thread reads, step after step, the others parse, transform and convert.
_MAX_THREADS = 3


class Making(NamedTuple):
  """Functions that make batches.

  Attributes:
    read: reads the records of some steps. Threads take turns at it, in the order of the steps.
    convert: makes batches of these records, one for each step.
    steps_together: number of steps to make together, from a step on.
  """

  read: Callable[[range], Any]
  convert: Callable[[Any], list[Rows]]
  steps_together: Callable[[int], int]


class ReadAhead:
  """Makes the batches of the steps that follow, several at a time, in background threads.

  For one caller at a time, which may be interrupted anywhere and go on: a batch is found by its step, never
  by its position, and work that an interrupt left half done is given up and done again. Errors are not kept:
  the caller makes the batch again, and gets the error itself.

  Args:
    num_batches: how many to make ahead.
  """

  def __init__(self, num_batches: int):
    self._num_batches = num_batches
    # Of consecutive steps. `close` and `forget` replace the deque, and do not change it while others use it.
    self._groups: collections.deque[_Group] = collections.deque()
    self._workers: _Workers | None = None

  def take(self, step: int, num_steps: int | None, making: Making) -> Rows | None:
    """Return the batch of a step, and have the batches after it made.

    Args:
      step: the step.
      num_steps: no batches are made from this step on.
      making: makes batches. It is held until they are made, and no longer.

    Returns:
      The batch, once; None where it failed, was given up or was taken before: the caller must make it again.
    """
    group = self._group_of(step, num_steps, making)
    if not group.is_done:
      group.made.acquire()
    batches = group.batches
    position = step - group.steps.start
    batch = batches[position] if batches else None
    if batch is None:
      self.forget()
    else:
      batches[position] = None
    return batch

  def _group_of(self, step: int, num_steps: int | None, making: Making) -> _Group:
    """Return the group of a step, after adding the groups that are to be made ahead."""
    # A signal's handler may call `close` between any two lines: workers that have ended give groups up.
    workers = self._workers
    if workers is None:
      workers = self._workers = _Workers(min(_MAX_THREADS, self._num_batches + 1))
    groups = self._groups
    while groups and groups[0].steps.stop <= step:
      groups.popleft()
    if groups and step < groups[0].steps.start:
      self.forget()
      groups = self._groups
    start = groups[-1].steps.stop if groups else step
    stop = step + self._num_batches + 1
    if num_steps is not None:
      stop = min(stop, num_steps)
    while start < stop:
      # The first batch is made alone, so that the caller waits for nothing else.
      size = 1 if start == step else making.steps_together(start)
      if start > step and start + size > stop and stop != num_steps:
        break
      group = _Group(range(start, min(start + size, stop)), making)
      workers.add(group)
      groups.append(group)
      start = group.steps.stop
    return groups[0]

  def forget(self) -> None:
    """Give up batches that were made ahead, and those that are being made."""
    groups, self._groups = self._groups, collections.deque()
    for group in tuple(groups):
      group.given_up = True

  def close(self) -> Callable[[], None]:
    """Let the threads end after their current work; `take` starts new ones.

    Returns:
      What waits for their end.
    """
    self.forget()
    workers, self._workers = self._workers, None
    if workers is None:
      return lambda: None
    workers.end()
    return workers.join


class _Group:
  """Batches that are made together.

  Attributes:
    steps: the steps of the batches.
    is_done: whether they are made or given up.
    made: a lock that is held until then; waiting callers acquire it.
    batches: one for each step, None for one that was taken; empty where they failed or were given up.
    given_up: nobody waits for them any more.
  """

  __slots__ = ("_making", "_records", "batches", "given_up", "is_done", "made", "steps")

  def __init__(self, steps: range, making: Making):
    self.steps = steps
    self.batches: list[Rows | None] = []
    self.given_up = self.is_done = False
    self.made = threading.Lock()
    self.made.acquire()
    self._making: Making | None = making
    self._records: Any = None

  def read(self) -> None:
    """Read the records of the batches."""
    try:
      if self._making and not self.given_up:
        self._records = self._making.read(self.steps)
    except BaseException:
      # The waiting caller makes the batch again, and gets the error.
      self.given_up = True

  def make(self) -> None:
    """Make the batches of the records, and wake the caller that waits for them."""
    try:
      if self._making and not self.given_up:
        self.batches = [*self._making.convert(self._records)]
    except BaseException:
      self.given_up = True
    finally:
      self._making = self._records = None
      self.is_done = True
      # A group that was given up may be made too: the second release finds the lock open.
      with contextlib.suppress(RuntimeError):
        self.made.release()


class _Workers:
  """Threads that make groups in turn.

  Threads hold only the groups that they work on, so they end with this object, even if nobody calls `end`.
  No interrupt reaches them.

  Attributes:
    process: id of the process that started them.
  """

  def __init__(self, num_threads: int):
    self.process = os.getpid()
    self._num_threads = num_threads
    self._groups: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
    self._turn = threading.Lock()
    self._threads: list[threading.Thread] = []
    self._starting = threading.Lock()
    self._ended = False
    _unended.add(self)

  def add(self, group: _Group) -> None:
    """Have a group made after those that were added before; after `end` it is given up.

    Without a lock: a signal's handler may call `end` in between.
    """
    if not self._ended and len(self._threads) < self._num_threads:
      run_uninterrupted(self._start)
    self._groups.put(group)
    if self._ended:
      # It may be behind the end mark, where no thread gets to.
      group.given_up = True
      group.make()

  def _start(self) -> None:
    with self._starting:
      while len(self._threads) < self._num_threads:
        thread = threading.Thread(
          target=_make_groups, args=(self._groups, self._turn), name="anystep-stream", daemon=True
        )
        thread.start()
        self._threads.append(thread)

  def end(self) -> None:
    """Let the threads end after the groups that were added."""
    self._ended = True
    self._groups.put(None)

  def join(self) -> None:
    """Wait until the threads have ended."""
    for thread in tuple(self._threads):
      thread.join()

  def __del__(self) -> None:
    # An interrupt may have stopped __init__.
    if hasattr(self, "_groups"):
      self._groups.put(None)


def _make_groups(groups: queue.SimpleQueue[_Group | None], turn: threading.Lock) -> None:
  while _make_next(groups, turn):
    pass


def _make_next(groups: queue.SimpleQueue[_Group | None], turn: threading.Lock) -> bool:
  """Make the next group; return False where there will be none."""
  with turn:
    group = groups.get()
    if group is None:
      # For the next thread.
      groups.put(None)
      return False
    group.read()
  group.make()
  return True


def run_uninterrupted(function: Callable[[], None], *, seconds: float = -1) -> None:
  """Run a function in a thread of its own, which no signal's handler interrupts, and wait for it.

  Threads and locks of `threading` are Python code: an interrupt inside them can leave them half done.

  Args:
    function: what to run.
    seconds: the longest wait; -1 waits until it ends.
  """
  done = _thread.allocate_lock()
  done.acquire()
  errors: list[BaseException] = []

  def run() -> None:
    try:
      function()
    except BaseException as error:
      errors.append(error)
    finally:
      done.release()

  _thread.start_new_thread(run, ())
  done.acquire(timeout=seconds)
  if errors:
    raise errors[0]


_unended: weakref.WeakSet[_Workers] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
  """End the threads that are left: none may still read when the interpreter ends."""
  # Threads of a parent do not exist in a forked process.
  left = [workers for workers in _unended if workers.process == os.getpid()]
  for workers in left:
    workers.end()
  for workers in left:
    workers.join()
