"""A lock is its holder's alone, and a file of its own."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from anystep.errors import AnystepError
from anystep.files.directory_lock import LOCK, locked_directory

# Its child outlives it, and says so before it is killed.
HOLD_AND_FORK = """
import os, sys, time
from anystep.files.directory_lock import locked_directory
with locked_directory(sys.argv[1], kind="run_active", fix="wait"):
  if os.fork() == 0:
    print(os.getpid(), flush=True)
  time.sleep(600)
"""


def lock(directory):
  return locked_directory(directory, kind="run_active", fix="wait")


def refusal(directory):
  with pytest.raises(AnystepError) as refused, lock(directory):
    pytest.fail("two hold one directory")
  assert refused.value.code == 73
  assert refused.value.fields["path"] == str(directory / LOCK)
  return refused.value


def test_the_lock_of_a_killed_holder_does_not_live_on_in_its_children(tmp_path):
  command = [sys.executable, "-c", HOLD_AND_FORK, tmp_path]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
    child = int(holder.stdout.readline())
    try:
      assert refusal(tmp_path).fields["pid"] == holder.pid
      holder.kill()
      holder.wait()
      os.kill(child, 0)
      with lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    finally:
      os.kill(child, signal.SIGKILL)


def test_a_child_that_leaves_the_body_gives_nothing_back(tmp_path):
  reached = None
  with lock(tmp_path):
    inside = (tmp_path / LOCK).read_text()
    reached = os.fork()
    if reached:
      assert os.waitstatus_to_exitcode(os.waitpid(reached, 0)[1]) == 0
      assert (tmp_path / LOCK).read_text() == inside
      assert refusal(tmp_path).kind == "run_active"
  if reached == 0:
    os._exit(0)
  assert not (tmp_path / LOCK).exists()


def link_to_file(path):
  path.with_name("file").write_text("somebody's")
  path.symlink_to("file")


def make_socket(path):
  with socket.socket(socket.AF_UNIX) as server:
    server.bind(str(path))


NO_FILES = {
  "a symbolic link": link_to_file,
  "a FIFO": os.mkfifo,
  "a directory": os.mkdir,
  "a device or socket": make_socket,
}


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_neither_followed_nor_changed(what, tmp_path):
  NO_FILES[what](tmp_path / LOCK)
  before = (tmp_path / LOCK).lstat()
  error = refusal(tmp_path)
  assert (error.kind, error.fields["got"]) == ("lock_invalid", what)
  assert (tmp_path / LOCK).lstat() == before
  if what == "a symbolic link":
    assert (tmp_path / "file").read_text() == "somebody's"


def test_a_link_to_nowhere_makes_no_file(tmp_path):
  (tmp_path / LOCK).symlink_to("nowhere")
  assert refusal(tmp_path).kind == "lock_invalid"
  assert not (tmp_path / "nowhere").exists()
