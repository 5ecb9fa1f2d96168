"""The lock on a store's directory: one holder, taken over from who is gone, never from who refreshes it."""

import json
import subprocess
import sys
import threading
import time

import pytest
from etils import epath
from store_servers.fixtures import store_root

from anystep.errors import AnystepError
from anystep.files import object_lock
from anystep.files.directory_lock import LOCK, locked_directory
from anystep.files.object_lock import LockHeld, ObjectLock, refresh_lock
from anystep.stores import objects
from anystep.stores.addresses import parse_address


@pytest.fixture(scope="module")
def root():
  with store_root("s3") as path:
    yield path


@pytest.fixture
def directory(root, tmp_path):
  return f"{root}/{tmp_path.name}"


@pytest.fixture
def address(directory):
  return parse_address(f"{directory}/{LOCK}")


@pytest.fixture
def quick(monkeypatch):
  """Locks get old at once, so that only who refreshes them holds them."""
  monkeypatch.setattr(object_lock, "_STALE_SECONDS", -1.0)
  monkeypatch.setattr(object_lock, "_WATCH_SECONDS", 0.6)
  monkeypatch.setattr(object_lock, "_REFRESH_SECONDS", 0.1)


def locked(directory):
  return locked_directory(directory, kind="job_running", fix="wait")


def write_holder(address, **changed):
  """A lock that somebody else left."""
  document = {"id": "other", "host": "elsewhere", "pid": 7, "process": None, "since": "2026-01-01"}
  objects.put(address, json.dumps(document | changed).encode())


def test_one_program_at_a_time_holds_it_and_names_itself(directory, address):
  with locked(directory) as lock:
    lock.check()
    with pytest.raises(AnystepError) as caught, locked(directory):
      pass
    holder = json.loads(objects.read(address)[0])
  assert (caught.value.code, caught.value.kind) == (73, "job_running")
  assert caught.value.fields["path"] == f"{directory}/{LOCK}"
  assert {name: caught.value.fields[name] for name in ("host", "pid", "since")} == {
    name: holder[name] for name in ("host", "pid", "since")
  }
  assert not epath.Path(directory).exists()
  with locked(directory):
    pass


def test_the_engine_s_job_is_named(directory, address):
  with locked(directory) as lock:
    lock.name_job("flink-4711")
    with pytest.raises(AnystepError) as caught, locked(directory):
      pass
  assert caught.value.fields["job"] == "flink-4711"


def test_one_of_many_that_ask_at_a_time_gets_it(directory):
  entered, refused = [], []
  gate = threading.Barrier(5)

  def ask():
    gate.wait()
    try:
      with locked(directory):
        entered.append(1)
        time.sleep(1.5)
    except AnystepError:
      refused.append(1)

  threads = [threading.Thread(target=ask) for _ in range(5)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert (len(entered), len(refused)) == (1, 4)


def test_a_killed_program_s_lock_is_taken_over_on_its_machine_at_once(directory, address):
  code = f"""
import os, signal, anystep
from anystep.files.directory_lock import locked_directory
with locked_directory({directory!r}, kind="job_running", fix="wait"):
  os.kill(os.getpid(), signal.SIGKILL)
"""
  assert subprocess.run([sys.executable, "-c", code]).returncode == -9
  assert objects.head(address)
  started = time.monotonic()
  with locked(directory):
    pass
  assert time.monotonic() - started < object_lock._STALE_SECONDS / 2


def test_a_lock_that_nobody_refreshes_is_taken_over(directory, address, quick, monkeypatch):
  write_holder(address)
  with monkeypatch.context() as patches:
    patches.setattr(object_lock, "_STALE_SECONDS", 60.0)
    with pytest.raises(LockHeld):
      ObjectLock(address).acquire()
  with locked(directory):
    assert json.loads(objects.read(address)[0])["host"] != "elsewhere"


def test_a_lock_that_is_refreshed_is_never_taken_over(directory, address, quick):
  stop = threading.Event()
  write_holder(address)

  def refresh():
    while not stop.wait(0.1):
      refresh_lock(address, "other")

  worker = threading.Thread(target=refresh)
  worker.start()
  try:
    with pytest.raises(AnystepError), locked(directory):
      pass
  finally:
    stop.set()
    worker.join()
  # Of this machine's own processes, too, while its thread refreshes it.
  with locked(f"{directory}/held"), pytest.raises(AnystepError), locked(f"{directory}/held"):
    pass


def test_who_lost_the_lock_is_told_and_leaves_the_other_s(directory, address):

  def lose():
    with locked(directory) as lock:
      write_holder(address)
      lock.check()

  with pytest.raises(AnystepError) as caught:
    lose()
  assert caught.value.fields["host"] == "elsewhere"
  assert json.loads(objects.read(address)[0])["id"] == "other"


def test_a_worker_s_refresh_is_not_taken_for_a_loss(directory, address):
  with locked(directory) as lock:
    refresh_lock(address, lock.id)
    lock.check()
    refresh_lock(address, "another lock's")
    lock.check()
  assert not epath.Path(directory).exists()


def test_a_lock_that_is_left_to_workers_stays(directory, address):
  lock = ObjectLock(address)
  lock.acquire()
  lock.leave()
  lock.release()
  before = objects.head(address)
  refresh_lock(address, lock.id)
  assert objects.head(address).etag != before.etag
