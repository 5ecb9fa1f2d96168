"""How far long work is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_PLAIN_PERIOD_SECONDS = 5.0


class Progress:
  """A line with a count, a rate and the time left, and whatever else is worth watching.

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
    self._bar = None
    if self._stream.isatty():
      from rich.console import Console
      from rich.progress import BarColumn, TextColumn
      from rich.progress import Progress as Bar
      from rich.table import Column

      # Where the line is too long for the terminal, what stands last is cut.
      self._bar = Bar(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len(description))),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=Console(file=self._stream),
        expand=True,
      )
      self._bar_task = self._bar.add_task(description, total=total, completed=start, text="")
      self._bar.start()

  def update(self, done: int, **facts: object) -> None:
    """Says that `done` units are done; facts are shown after the rate."""
    self._last = (done, facts)
    if self._bar is not None:
      self._bar.update(self._bar_task, completed=done, text=self._text())
    elif time.monotonic() >= self._next_line_seconds:
      self._print_line()

  def close(self) -> None:
    """Shows where the work ended."""
    if self._bar is not None:
      self._bar.update(self._bar_task, completed=self._last[0], text=self._text())
      self._bar.stop()
      self._bar = None
    else:
      self._print_line()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

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
