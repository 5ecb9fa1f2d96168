"""Signals that end a run: SIGTERM, which clusters send before they take a machine, and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType

from anystep.errors import AnystepError, ExitCode


class _Terminated(BaseException):
  """SIGTERM while there was nothing to save; a BaseException, so that no handler of errors catches it."""


def preempted(**fields: object) -> AnystepError:
  """Return the error with which a program ends after SIGTERM."""
  return AnystepError(
    ExitCode.PREEMPTED, "preempted", **fields, got="SIGTERM", fix="run the same command again"
  )


class Termination:
  """Handler of SIGTERM and Ctrl-C while its body runs in the main thread; in other threads it does nothing.

  At first a SIGTERM ends the body at once, with 75 `preempted`. Between `defer` and `resume` it only sets
  `requested`, and the training loop reads this after each step. A second SIGTERM kills the process.

  Ctrl-C raises KeyboardInterrupt. A callback of a library may lose the exception; then the next `defer` or
  `resume` raises it again.

  Attributes:
    requested: whether a SIGTERM came.
  """

  def __init__(self) -> None:
    self.requested = False
    self._deferred = self._interrupted = False
    self._before: dict[int, object] = {}

  def __enter__(self) -> Termination:
    if threading.current_thread() is threading.main_thread():
      self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)
      if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
      self._hook = sys.unraisablehook
      sys.unraisablehook = self._ignore_own
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
  ) -> None:
    del traceback
    for number, handler in self._before.items():
      signal.signal(number, handler)  # type: ignore[arg-type]
    if self._before:
      sys.unraisablehook = self._hook
    failed = kind is not None and not isinstance(error, KeyboardInterrupt)
    # Libraries may have turned the handlers' exceptions into others.
    if failed and self._interrupted:
      raise KeyboardInterrupt from None
    if failed and self.requested and not self._deferred:
      raise preempted() from None

  def _ignore_own(self, unraisable: sys.UnraisableHookArgs) -> None:
    # Python prints exceptions of destructors; ours are noted in the attributes already.
    if unraisable.exc_type not in (_Terminated, KeyboardInterrupt):
      self._hook(unraisable)

  def defer(self) -> None:
    """Only note a SIGTERM from now on."""
    self._deferred = True
    self._raise_interrupt()

  def resume(self) -> None:
    """End the body at a SIGTERM from now on, and now if one was noted."""
    self._deferred = False
    self._raise_interrupt()
    if self.requested:
      raise _Terminated

  def _raise_interrupt(self) -> None:
    if self._interrupted:
      raise KeyboardInterrupt

  def _interrupt(self, number: int, frame: FrameType | None) -> None:
    self._interrupted = True
    signal.default_int_handler(number, frame)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.requested = True
    signal.signal(number, signal.SIG_DFL)
    if not self._deferred:
      raise _Terminated
