"""JSON that others wrote is read within limits, and what is refused is said in one line."""

import json
import os
import socket

import pytest

from anystep.errors import AnystepError
from anystep.files import json_files
from anystep.files.json_files import parse_json, read_json
from anystep.limits import MAX_JSON_DEPTH


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("1", 1),
    ('{"a": [1, 2.5, null, true], "b": {"a": 1}}', {"a": [1, 2.5, None, True], "b": {"a": 1}}),
    ('"é"'.encode(), "é"),
    ("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH, None),
  ],
)
def test_json_has_its_value(text, value):
  found = parse_json(text)
  assert found == (json.loads(text) if value is None else value)


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "Expecting value"),
    ("{", "Expecting property name"),
    ("NaN", "NaN is no number"),
    ("[-Infinity]", "-Infinity is no number"),
    ('{"a": 1, "b": 2, "a": 1}', "'a' stands there twice"),
    ('[{"a": {"b": 2, "b": 1}}]', "'b' stands there twice"),
    ("9" * 5000, "limit"),
    (b'"\xff"', "invalid start byte"),
    ('{"a": 1}'.encode("utf-16"), "utf-8"),
    ("[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1), "more than 200 values one within the other"),
    ("[" * 100_000 + "]" * 100_000, "more than 200 values one within the other"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "more than 200 values one within the other"),
    ("[1, " * 300 + "1" + "]" * 300, "more than 200 values one within the other"),
  ],
)
def test_what_is_no_json_within_the_limits_is_a_value_error_that_says_so(text, said):
  with pytest.raises(ValueError, match=said) as refused:
    parse_json(text)
  assert "\n" not in str(refused.value)


def test_a_name_that_stands_twice_among_many_is_found_at_once():
  members = [f'"{k}": 0' for k in range(200_000)]
  with pytest.raises(ValueError, match="'7' stands there twice"):
    parse_json("{" + ", ".join([*members, '"7": 0']) + "}")


def test_text_beyond_the_limit_is_refused_before_it_is_read(monkeypatch, tmp_path):
  monkeypatch.setattr(json_files, "MAX_JSON_BYTES", 10)
  assert parse_json("[1,2,3,45]") == [1, 2, 3, 45]
  with pytest.raises(ValueError, match="more than 10 bytes"):
    parse_json("[1,2,3,456]")
  (tmp_path / "long.json").write_text("[1,2,3,456]")
  with pytest.raises(ValueError, match="more than 10 bytes"):
    read_json(tmp_path / "long.json")


def _fifo(path):
  os.mkfifo(path)


def _socket(path):
  with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(str(path))


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (_fifo, "a FIFO, not a regular file"),
    (_socket, "a socket, not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular file"),
    (lambda path: path.symlink_to("/dev/null"), "a device, not a regular file"),
  ],
  ids=["fifo", "socket", "zero", "null"],
)
def test_what_has_no_end_or_no_writer_is_not_waited_for(tmp_path, monkeypatch, make, said):
  monkeypatch.chdir(tmp_path)
  make(tmp_path / "x")
  with pytest.raises(ValueError, match=said):
    read_json(tmp_path / "x")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have_is_a_value_error(name):
  with pytest.raises(ValueError, match=r"null|surrogates"):
    read_json(name)


def test_what_is_missing_is_told_as_open_tells_it(tmp_path):
  (tmp_path / "file").write_text("1")
  for path, error in [
    (tmp_path / "none", FileNotFoundError),
    (tmp_path / "file" / "below", NotADirectoryError),
    (tmp_path, IsADirectoryError),
  ]:
    with pytest.raises(error) as refused:
      read_json(path)
    assert refused.value.filename == str(path)


def test_a_file_that_may_not_be_read_is_no_place_to_write_to(tmp_path, monkeypatch):
  (tmp_path / "plan.json").write_text("1")

  def refuse(path, *arguments):
    raise PermissionError(13, "Permission denied", path)

  monkeypatch.setattr(os, "open", refuse)
  with pytest.raises(AnystepError) as refused:
    read_json(tmp_path / "plan.json")
  error = refused.value
  assert (error.code, error.kind, str(error.fields["path"])) == (
    66,
    "file_unreadable",
    str(tmp_path / "plan.json"),
  )
  assert "may read" in error.fields["expected"]


def test_a_read_that_fails_names_the_file(tmp_path, monkeypatch):
  (tmp_path / "plan.json").write_text("1")

  class Broken:
    def __enter__(self):
      return self

    def __exit__(self, *exc_info):
      pass

    def seek(self, *arguments):
      raise OSError(5, "Input/output error")

  monkeypatch.setattr("anystep.files.input_files._open_local", lambda path: Broken())
  with pytest.raises(AnystepError) as refused:
    read_json(tmp_path / "plan.json")
  assert (refused.value.code, refused.value.kind) == (74, "io_failed")
  assert refused.value.fields["path"] == str(tmp_path / "plan.json")
