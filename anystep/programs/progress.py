"""How far long work is: a bar on a terminal, plain lines elsewhere. Who imports the library sees nothing.

Programs make a `Progress` of their own work. Of the library's they show what `shown_library_work` lets
through; without it `library_progress` does nothing, and what the logger "anystep" is told goes nowhere but
to handlers that somebody gave it or its parents.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol, TextIO

_PLAIN_PERIOD_SECONDS = 5.0
# What is done by then was not long enough to be worth a line.
_SHORT_SECONDS = 2.0

_shows_library_work = False
_log = logging.getLogger("anystep")
# Without any handler Python would print warnings.
_log.addHandler(logging.NullHandler())


@contextlib.contextmanager
def shown_library_work() -> Iterator[None]:
  """Lets a program's users see what the library does for long, and what it did otherwise than was asked."""
  global _shows_library_work
  handler = logging.StreamHandler(sys.stderr)
  before = _shows_library_work, _log.propagate
  # Its lines are not told once more by who has set up logging, as TensorFlow's and Beam's users do.
  _shows_library_work, _log.propagate = True, False
  _log.addHandler(handler)
  try:
    yield
  finally:
    _log.removeHandler(handler)
    _shows_library_work, _log.propagate = before


def library_progress(
  description: str, *, total: int, unit: str
) -> contextlib.AbstractContextManager[Updated]:
  """The progress of work that the library does: shown by programs, and nothing elsewhere."""
  if _shows_library_work:
    return Progress(description, total=total, unit=unit)
  return contextlib.nullcontext(_Unseen())


def library_notice(text: str) -> None:
  """A line about what the library did otherwise than was asked: programs print it on stderr."""
  _log.warning("%s", text)


class Updated(Protocol):
  """What is told how far some work is."""

  def update(self, done: int, **facts: object) -> None:
    """Says that `done` units are done."""


class _Unseen:
  def update(self, done: int, **facts: object) -> None:
    pass


class Progress:
  """A line with a count, a rate and the time left, and whatever else is worth watching.

  Work that takes less than two seconds shows nothing.

  Args:
    description: what is being done.
    total: how many units the work has; None where that is not known yet.
    unit: what is counted, in the plural.
    start: units that were done before, which no time of this run went into.
    stream: where to; stderr by default.
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
    self._bar: Any = None

  def update(self, done: int, **facts: object) -> None:
    """Says that `done` units are done; facts are shown after the rate."""
    self._last = (done, facts)
    now_seconds = time.monotonic()
    if self._stream.isatty():
      if self._bar is None and now_seconds >= self._begin_seconds + _SHORT_SECONDS:
        self._start_bar()
      self._update_bar()
    elif now_seconds >= self._next_line_seconds:
      self._print_line()

  def close(self) -> None:
    """Shows where the work ended, unless it was short."""
    if self._bar is not None:
      self._update_bar()
      self._bar.stop()
      self._bar = None
    elif time.monotonic() >= self._begin_seconds + _SHORT_SECONDS:
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

    # Where the line is too long for the terminal, what stands last is cut.
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
      self._bar.update(self._bar_task, completed=self._last[0], text=self._text())

  def _print_line(self) -> None:
    self._next_line_seconds = time.monotonic() + _PLAIN_PERIOD_SECONDS
    print(f"{self._description}: {self._text()}", file=self._stream, flush=True)

  def _text(self) -> str:
    done, facts = self._last
    seconds = time.monotonic() - self._begin_seconds
    rate = (done - self._start) / seconds if seconds > 0 else 0.0
    parts = [f"{done:,}" + (f"/{self._total:,}" if self._total is not None else "") + f" {self._unit}"]
    parts.append(f"{rate:,.1f} {self._unit}/s")
    if self._total is not None and rate > 0 and done < self._total:
      parts.append(f"ETA {duration((self._total - done) / rate)}")
    else:
      parts.append(f"took {duration(seconds)}")
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in facts.items()]
    return ", ".join(parts)


def duration(seconds: float) -> str:
  """Hours, minutes and seconds.

  >>> duration(3725.4)
  '1:02:05'
  >>> duration(65)
  '1:05'
  """
  minutes, whole_seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
