"""Files appear whole, whoever writes or looks at one time, and nothing is left of an attempt that failed."""

import os
import threading

import pytest

from anystep.files import storage


def test_a_file_that_is_put_has_the_content_and_stands_alone(tmp_path):
  for content in (b"first", b"", b"second, longer"):
    storage.put(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_file_that_cannot_be_put_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch, failing):
  storage.put(tmp_path / "file", b"old")

  def fail(*args):
    raise OSError("no")

  content = b"new"
  if failing == "write":
    content = "not bytes"
  else:
    monkeypatch.setattr(os, failing, fail)
  with pytest.raises((OSError, TypeError)):
    storage.put(tmp_path / "file", content)
  assert os.listdir(tmp_path) == ["file"]
  assert (tmp_path / "file").read_bytes() == b"old"


def test_readers_see_the_old_content_or_the_new_whatever_is_put_meanwhile(tmp_path):
  contents = {bytes([k]) * 100_000 for k in range(8)}
  storage.put(tmp_path / "file", next(iter(contents)))
  stopped = threading.Event()

  def write(content):
    while not stopped.is_set():
      storage.put(tmp_path / "file", content)

  writers = [threading.Thread(target=write, args=(content,)) for content in contents]
  for writer in writers:
    writer.start()
  try:
    assert {(tmp_path / "file").read_bytes() for _ in range(300)} <= contents
  finally:
    stopped.set()
    for writer in writers:
      writer.join()
  assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_durable_before_its_name_is(tmp_path, monkeypatch):
  """After a loss of power a name must not stand for content that never came to the disk."""
  done = []
  for name in ("fsync", "replace"):
    real = getattr(os, name)
    monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (done.append(name), real(*args)))
  storage.put(tmp_path / "file", b"content")
  # The file, then its name, then the directory that has the name.
  assert done == ["fsync", "replace", "fsync"]


def test_attempts_at_one_file_have_names_of_their_own(tmp_path):
  names = {storage.attempt_path(tmp_path / "file").name for _ in range(100)}
  assert len(names) == 100
  assert all(name.startswith("file.") for name in names)


def test_object_stores_are_told_from_local_files():
  assert storage.is_remote("gs://bucket/file")
  assert not storage.is_remote("/data/file")
