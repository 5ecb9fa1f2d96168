"""Long work says now and then how far it is: plain lines in a log, a bar on a terminal."""

import io

import pytest

from anystep.programs import progress as progress_module
from anystep.programs.progress import (
  Progress,
  format_duration,
  library_progress,
  log_notice,
  show_library_work,
)


class Clock:
  """Stands in for the time module."""

  def __init__(self):
    self.seconds = 1000.0

  def monotonic(self):
    return self.seconds


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(progress_module, "time", clock)
  return clock


def lines_of(clock, updates, **settings):
  """What is printed by updates (seconds since the start, done, facts), and when the work ends."""
  stream = io.StringIO()
  with Progress("verify demo", stream=stream, **settings) as progress:
    for seconds, done, facts in updates:
      clock.seconds = 1000.0 + seconds
      progress.update(done, **facts)
  return stream.getvalue().splitlines()


def test_a_line_has_count_rate_time_left_and_facts(clock):
  assert lines_of(clock, [(10, 250, {"examples": "1,000"})], total=1000, unit="shards")[0] == (
    "verify demo: 250/1,000 shards, 25.0 shards/s, ETA 0:30, examples 1,000"
  )


def test_the_last_line_says_how_long_it_took(clock):
  lines = lines_of(clock, [(3725.4, 7000, {})], total=7000, unit="bytes")
  assert lines[-1] == "verify demo: 7,000/7,000 bytes, 1.9 bytes/s, took 1:02:05"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_work_of_less_than_two_seconds_shows_nothing(clock, stream):
  stream = stream()
  with Progress("verify demo", total=3, unit="files", stream=stream) as progress:
    progress.update(1)
    clock.seconds += 1.9
    progress.update(3)
  assert stream.getvalue() == ""


def test_the_end_of_two_seconds_of_work_is_shown(clock):
  assert lines_of(clock, [(2, 3, {})], total=3, unit="files") == [
    "verify demo: 3/3 files, 1.5 files/s, took 0:02"
  ]


def test_work_of_unknown_size_has_no_time_left(clock):
  assert lines_of(clock, [(10, 50, {})], total=None, unit="steps")[0] == (
    "verify demo: 50 steps, 5.0 steps/s, took 0:10"
  )


def test_what_was_done_before_is_counted_but_not_timed(clock):
  assert lines_of(clock, [(10, 120, {})], total=220, unit="steps", start=100)[0] == (
    "verify demo: 120/220 steps, 2.0 steps/s, ETA 0:50"
  )


def test_lines_come_every_five_seconds_and_at_the_end(clock):
  lines = lines_of(clock, [(second / 10, second, {}) for second in range(201)], total=200, unit="steps")
  assert [line.split(",")[0] for line in lines] == [
    "verify demo: 50/200 steps",
    "verify demo: 100/200 steps",
    "verify demo: 150/200 steps",
    "verify demo: 200/200 steps",
  ]


def test_facts_are_named_in_words(clock):
  (line,) = lines_of(clock, [(5, 1, {"loss_scale": 2, "lr": "1e-3"})], total=None, unit="steps")
  assert line.endswith(", loss scale 2, lr 1e-3")


def test_lines_go_to_stderr_by_default(clock, capsys):
  with Progress("verify demo", total=1, unit="files") as progress:
    clock.seconds += 5
    progress.update(1)
  captured = capsys.readouterr()
  assert captured.out == ""
  assert captured.err.startswith("verify demo: 1/1 files")


def test_the_end_is_shown_when_the_work_fails(clock):
  stream = io.StringIO()
  with pytest.raises(KeyError), Progress("verify", total=3, unit="files", stream=stream) as progress:  # noqa: PT012
    progress.update(2)
    clock.seconds += 3
    raise KeyError
  assert stream.getvalue().startswith("verify: 2/3 files")


def test_a_terminal_gets_one_bar_with_the_same_words(clock, monkeypatch):
  monkeypatch.setenv("COLUMNS", "120")
  stream = Terminal()
  with Progress("verify demo", total=1000, unit="bytes", stream=stream) as progress:
    clock.seconds += 2
    progress.update(400, file="a")
    progress.update(1000)
  shown = stream.getvalue()
  assert "verify demo" in shown
  assert "━" in shown
  assert "1,000/1,000 bytes" in shown
  assert "took 0:0" in shown


def test_the_librarys_work_is_shown_by_programs_alone(clock, capsys):
  def work():
    with library_progress("units of demo", total=2, unit="examples") as progress:
      clock.seconds += 10
      progress.update(2)
    log_notice("a copy is used")

  work()
  assert capsys.readouterr() == ("", "")
  with show_library_work():
    work()
  shown = capsys.readouterr()
  assert shown.out == ""
  first, *_, last = shown.err.splitlines()
  assert (first.startswith("units of demo: 2/2 examples"), last) == (True, "a copy is used")
  work()
  assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (0, "0:00"),
    (0.4, "0:00"),
    (59.6, "1:00"),
    (65, "1:05"),
    (3599, "59:59"),
    (3600, "1:00:00"),
    (90061, "25:01:01"),
  ],
)
def test_durations_are_hours_minutes_and_seconds(seconds, text):
  assert format_duration(seconds) == text


def test_an_end_that_was_shown_already_is_not_shown_again(clock):
  assert len(lines_of(clock, [(10, 7, {})], total=7, unit="shards")) == 1
