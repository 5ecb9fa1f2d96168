"""One job at a time is at a task's directory, and says who it is."""

import contextlib
import datetime
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import small_tasks
from hypothesis import given
from hypothesis import strategies as st
from job_runs import registered, run_job, stamps_of

from anystep.cache_job import job
from anystep.cache_job.state.job_lock import LOCK, lock_task_directory
from anystep.errors import AnystepError

TASK = small_tasks.task("small_locked", sizes={"train": (2, 3)})
HOLD = """
import sys, time
from anystep.cache_job.state.job_lock import lock_task_directory
with lock_task_directory(sys.argv[1]):
  print("held", flush=True)
  time.sleep(600)
"""


@contextlib.contextmanager
def other_process(directory):
  """Another process on this host that holds the directory until it is killed."""
  root = pathlib.Path(__file__).parents[3]
  process = subprocess.Popen([sys.executable, "-c", HOLD, directory], stdout=subprocess.PIPE, cwd=root)
  try:
    assert process.stdout.readline() == b"held\n"
    yield process
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def refusal(directory):
  with pytest.raises(AnystepError) as caught, lock_task_directory(directory):
    pytest.fail("two jobs hold one directory")
  assert (caught.value.code, caught.value.kind) == (73, "job_running")
  assert caught.value.fields["path"] == str(directory / LOCK)
  return caught.value


def test_a_second_job_is_told_who_holds_the_directory_and_since_when(tmp_path):
  before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
  with lock_task_directory(tmp_path):
    error = refusal(tmp_path)
  assert (error.fields["host"], error.fields["pid"]) == (socket.gethostname(), os.getpid())
  assert (
    before <= datetime.datetime.fromisoformat(error.fields["since"]) <= datetime.datetime.now(datetime.UTC)
  )


def test_nothing_is_left_of_a_lock_however_its_job_ended(tmp_path):
  with lock_task_directory(tmp_path / "task"):
    pass
  with contextlib.suppress(KeyboardInterrupt), lock_task_directory(tmp_path / "task"):
    raise KeyboardInterrupt
  assert list((tmp_path / "task").iterdir()) == []


def test_a_killed_job_s_lock_is_taken_over(tmp_path):
  with other_process(tmp_path) as process:
    assert refusal(tmp_path).fields["pid"] == process.pid
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == process.pid
    with lock_task_directory(tmp_path):
      assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
      refusal(tmp_path)
  assert not (tmp_path / LOCK).exists()


def test_another_host_s_lock_is_believed(tmp_path):
  held = {"host": "elsewhere", "pid": os.getpid(), "since": "2020-01-01T00:00:00+00:00"}
  (tmp_path / LOCK).write_text(json.dumps(held))
  error = refusal(tmp_path)
  assert {name: error.fields[name] for name in held} == held
  assert json.loads((tmp_path / LOCK).read_text()) == held


def test_a_lock_that_somebody_removed_is_not_missed_and_its_follower_s_is_not_removed(tmp_path):
  with lock_task_directory(tmp_path):
    (tmp_path / LOCK).unlink()
  with lock_task_directory(tmp_path):
    (tmp_path / LOCK).unlink()
    follower = lock_task_directory(tmp_path)
    follower.__enter__()
  refusal(tmp_path)
  follower.__exit__(None, None, None)
  assert list(tmp_path.iterdir()) == []


@given(content=st.binary(max_size=40) | st.sampled_from([b"", b"[]", b"7", b"{}", b'{"pid":', b"\xff"]))
def test_what_a_job_left_that_was_killed_while_it_wrote_stands_in_nobody_s_way(tmp_path_factory, content):
  directory = tmp_path_factory.mktemp("task")
  (directory / LOCK).write_bytes(content)
  with lock_task_directory(directory):
    assert json.loads((directory / LOCK).read_text())["pid"] == os.getpid()


def test_of_many_that_try_again_and_again_one_is_in_at_a_time(tmp_path):
  inside, overlaps = [], []

  def work():
    entries = 0
    while entries < 20:
      with contextlib.suppress(AnystepError), lock_task_directory(tmp_path):
        inside.append(1)
        time.sleep(0.0002)
        overlaps.append(len(inside))
        inside.pop()
        entries += 1

  threads = [threading.Thread(target=work) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert overlaps == [1] * 120


def test_a_job_touches_nothing_of_a_task_that_another_is_at(tmp_path):
  other = small_tasks.task("small_free", sizes={"train": (1,)})
  with registered(TASK, other), lock_task_directory(tmp_path / TASK.name):
    before = stamps_of(tmp_path / TASK.name)
    with pytest.raises(AnystepError, match="job_running"):
      run_job(tmp_path, tasks=f"{other.name},{TASK.name}")
    assert stamps_of(tmp_path / TASK.name) == before
    assert list((tmp_path / other.name).iterdir()) == []


def test_what_another_job_has_made_meanwhile_is_left_as_it_is(tmp_path, monkeypatch, capsys):
  """It ended after this one had looked and before this one had the lock."""
  elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
  log = tmp_path / "log"

  @contextlib.contextmanager
  def locked_late(directory):
    shutil.copytree(elsewhere / TASK.name, directory)
    with lock_task_directory(directory):
      yield

  with registered(TASK):
    run_job(elsewhere, tasks=TASK.name)
    monkeypatch.setattr(job, "lock_task_directory", locked_late)
    monkeypatch.setenv("SMALL_TASKS_LOG", str(log))
    capsys.readouterr()
    run_job(here, tasks=TASK.name)
    assert capsys.readouterr().out == f"{TASK.name}: the cache is complete, left as it is\n"
    assert not log.exists()
    # Nor does a complete cache keep anyone out.
    with lock_task_directory(here / TASK.name):
      run_job(here, tasks=TASK.name)
