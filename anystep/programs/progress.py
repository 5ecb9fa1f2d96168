"""Progress of long work: a bar on a terminal, plain lines elsewhere.

Programs show their own work by a `Progress`, and the library's inside `show_library_work`. Elsewhere
`library_progress` shows nothing, and the logger "anystep" prints nothing: only handlers that users add to
it or its parents see its messages.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol, TextIO

_PLAIN_PERIOD_SECONDS = 5.0
# Shorter work is not worth a line.
_SHORT_SECONDS = 2.0

_shows_library_work = False
_log = logging.getLogger("anystep")
# A logger without any handler would print warnings.
_log.addHandler(logging.NullHandler())


@contextlib.contextmanager
def show_library_work() -> Iterator[None]:
  """Show the progress of the library's long work, and its notices, on stderr."""
  global _shows_library_work
  handler = logging.StreamHandler(sys.stderr)
  previous = _shows_library_work, _log.propagate
  # Handlers of the root logger, which TensorFlow and Beam set up, would print the lines a second time.
  _shows_library_work, _log.propagate = True, False
  _log.addHandler(handler)
  try:
    yield
  finally:
    _log.removeHandler(handler)
    _shows_library_work, _log.propagate = previous


def library_progress(
  description: str, *, total: int, unit: str
) -> contextlib.AbstractContextManager[Updated]:
  """The progress of the library's work: shown inside `show_library_work`, ignored elsewhere."""
  if _shows_library_work:
    return Progress(description, total=total, unit=unit)
  return contextlib.nullcontext(_Hidden())


def log_notice(text: str) -> None:
  """Log that the library did something other than what was asked; programs print it on stderr."""
  _log.warning("%s", text)


class Updated(Protocol):
  """Receiver of a count of finished units of work."""

  def update(self, done_units: int, **facts: object) -> None:
    """Report that `done_units` units are done."""


class _Hidden:
  def update(self, done_units: int, **facts: object) -> None:
    pass


class Progress:
  """Line with a count, a rate, the time left, and further facts.

  Work that takes less than two seconds shows nothing.

  Args:
    description: the work's name.
    total: number of units of work; None if it is not known yet.
    unit: the unit's name, in the plural.
    start: number of units done before; they do not count in the rate.
    stream: the stream to print to; stderr by default.
  """

  def __init__(
    self, description: str, *, total: int | None, unit: str, start: int = 0, stream: TextIO | None = None
  ):
    self._description = description
    self._total = total
    self._unit = unit
    self._start = start
    self._stream = stream or sys.stderr
    self._begin_seconds = time.monotonic()
    self._next_line_seconds = self._begin_seconds + _PLAIN_PERIOD_SECONDS
    self._last: tuple[int, dict[str, object]] = (start, {})
    self._printed_text: str | None = None
    self._bar: Any = None

  def update(self, done_units: int, **facts: object) -> None:
    """Report that `done_units` units are done; facts are shown after the rate."""
    self._last = (done_units, facts)
    now_seconds = time.monotonic()
    if self._stream.isatty():
      if self._bar is None and now_seconds >= self._begin_seconds + _SHORT_SECONDS:
        self._start_bar()
      self._update_bar()
    elif now_seconds >= self._next_line_seconds:
      self._print_line()

  def close(self) -> None:
    """Show the final count, unless the work was short."""
    if self._bar is not None:
      self._update_bar()
      self._bar.stop()
      self._bar = None
    elif (
      time.monotonic() >= self._begin_seconds + _SHORT_SECONDS and self._format_text() != self._printed_text
    ):
      self._print_line()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  def _start_bar(self) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # A line that is too long for the terminal loses its end.
    words = Column(no_wrap=True, min_width=len(self._description))
    self._bar = Bar(
      TextColumn("{task.description}", table_column=words),
      BarColumn(bar_width=16),
      TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
      console=Console(file=self._stream),
      expand=True,
    )
    self._bar_task = self._bar.add_task(self._description, total=self._total, completed=self._start, text="")
    self._bar.start()

  def _update_bar(self) -> None:
    if self._bar is not None:
      self._bar.update(self._bar_task, completed=self._last[0], text=self._format_text())

  def _print_line(self) -> None:
    self._next_line_seconds = time.monotonic() + _PLAIN_PERIOD_SECONDS
    self._printed_text = self._format_text()
    print(f"{self._description}: {self._printed_text}", file=self._stream, flush=True)

  def _format_text(self) -> str:
    done_units, facts = self._last
    seconds = time.monotonic() - self._begin_seconds
    rate = (done_units - self._start) / seconds if seconds > 0 else 0.0
    total = f"/{self._total:,}" if self._total is not None else ""
    parts = [f"{done_units:,}{total} {self._unit}", f"{rate:,.1f} {self._unit}/s"]
    if self._total is not None and rate > 0 and done_units < self._total:
      parts.append(f"ETA {format_duration((self._total - done_units) / rate)}")
    else:
      parts.append(f"took {format_duration(seconds)}")
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in facts.items()]
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
  """Format a time as hours, minutes and seconds.

  >>> format_duration(3725.4)
  '1:02:05'
  >>> format_duration(65)
  '1:05'
  """
  minutes, whole_seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
