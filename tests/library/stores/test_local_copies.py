"""Copies for libraries that read local files alone."""

from pathlib import Path

from etils import epath

from anystep.stores import local_copies
from anystep.stores.local_copies import fetch


def test_a_copy_is_made_once_and_anew_where_the_object_is_another(folder, monkeypatch):
  monkeypatch.setattr(local_copies, "_MAX_COPIES", 2)
  path = epath.Path(folder) / "text.gz"
  path.write_bytes(b"first")
  first = fetch(path)
  assert Path(first).read_bytes() == b"first"
  assert first.endswith("text.gz")
  assert fetch(path) == first
  path.write_bytes(b"second")
  second = fetch(path)
  assert Path(second).read_bytes() == b"second"
  (path.parent / "other").write_bytes(b"third")
  assert Path(fetch(path.parent / "other")).read_bytes() == b"third"
  assert [Path(copy).exists() for copy in (first, second)] == [False, True]


def test_local_paths_and_other_stores_are_left_as_they_are(tmp_path):
  assert fetch(tmp_path / "file") == str(tmp_path / "file")
  assert fetch("http://host/file") == "http://host/file"
