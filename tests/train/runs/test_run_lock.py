"""One run at a time is at a MODEL_DIR."""

import datetime
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from train_runs import ENVIRONMENT, train_until

from anystep.errors import AnystepError
from anystep.streams.stream import Stream
from anystep.train import main
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.runs.run_lock import locked_run

HOLD = """
import sys, time
from anystep.train.runs.run_lock import locked_run
with locked_run(sys.argv[1]):
  print("held", flush=True)
  time.sleep(600)
"""


def stamps_of(directory):
  return {path: path.lstat().st_mtime_ns for path in directory.rglob("*") if path.name != ".lock"}


def test_a_second_run_is_told_who_trains_there_and_since_when_and_changes_nothing(stopped, command):
  before = stamps_of(stopped)
  with locked_run(stopped), pytest.raises(AnystepError) as refused:
    main.main(command())
  error = refused.value
  assert (error.code, error.kind) == (73, "run_active")
  assert error.fields["path"] == str(stopped / ".lock")
  assert (error.fields["host"], error.fields["pid"]) == (socket.gethostname(), os.getpid())
  assert datetime.datetime.fromisoformat(error.fields["since"]).tzinfo
  # A dry run only looks.
  with locked_run(stopped):
    assert main.main([*command(), "--dry_run"]) == 0
  assert stamps_of(stopped) == before


@pytest.fixture
def holder(stopped):
  """Another process that trains in that directory, until it is killed."""
  process = subprocess.Popen([sys.executable, "-c", HOLD, stopped], env=ENVIRONMENT, stdout=subprocess.PIPE)
  assert process.stdout.readline() == b"held\n"
  yield process
  process.kill()
  process.wait()
  process.stdout.close()


def test_a_killed_run_s_lock_is_taken_over_and_a_living_one_s_is_not(holder, reference, stopped, command):
  with pytest.raises(AnystepError) as refused:
    main.main(command())
  assert (refused.value.kind, refused.value.fields["pid"]) == ("run_active", holder.pid)
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  assert json.loads((stopped / ".lock").read_text())["pid"] == holder.pid
  main.main(command())
  assert not (stopped / ".lock").exists()
  comparison = compare_runs(reference, stopped)
  assert comparison.identical, comparison.verdict


def test_another_host_s_lock_is_believed(stopped, command):
  held = {"host": "elsewhere", "pid": os.getpid(), "since": "2020-01-01T00:00:00+00:00"}
  (stopped / ".lock").write_text(json.dumps(held))
  with pytest.raises(AnystepError) as refused:
    main.main(command())
  assert {name: refused.value.fields[name] for name in held} == held
  assert str(stopped / ".lock") in str(refused.value)


def test_a_run_holds_its_directory_to_its_end_however_that_comes(command, tmp_path, monkeypatch):
  held = []

  def next_batch(stream, original=Stream.__next__):
    with pytest.raises(AnystepError, match="run_active"), locked_run(tmp_path / "model"):
      pytest.fail("two runs hold one directory")
    held.append(stream.step)
    return original(stream)

  monkeypatch.setattr(Stream, "__next__", next_batch)
  train_until(2, command(), monkeypatch)
  assert held == [0, 1]
  assert not (tmp_path / "model" / ".lock").exists()
  with locked_run(tmp_path / "model"):
    pass


def test_a_directory_that_only_the_lock_made_is_gone_with_it(tmp_path):
  with locked_run(tmp_path / "new"):
    assert (tmp_path / "new" / ".lock").exists()
  assert not (tmp_path / "new").exists()
  (tmp_path / "empty").mkdir()
  with locked_run(tmp_path / "empty"):
    pass
  assert (tmp_path / "empty").exists()


def test_a_place_without_locks_is_told(capsys):
  with locked_run("gs://bucket/run"):
    pass
  assert "gs://bucket/run is not locked" in capsys.readouterr().err
