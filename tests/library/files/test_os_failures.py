"""What the operating system refuses is told as what it is: not everything is a place to write to."""

import errno
import os

import pytest

from anystep.errors import AnystepError
from anystep.files import storage
from anystep.files.os_failures import os_failure, unreadable
from anystep.programs.command_line import run_program


def failure(number, path="/somewhere/file"):
  return os_failure(OSError(number, os.strerror(number), path))


@pytest.mark.parametrize(
  ("number", "code", "kind", "advice"),
  [
    (errno.ENOENT, 66, "input_missing", "correct the path"),
    (errno.ENOTDIR, 73, "cannot_create", "where a directory must be"),
    (errno.EISDIR, 73, "cannot_create", "where a directory must be"),
    (errno.EEXIST, 73, "cannot_create", "where a directory must be"),
    (errno.EACCES, 73, "cannot_create", "can be written to"),
    (errno.EPERM, 73, "cannot_create", "can be written to"),
    (errno.EROFS, 73, "cannot_create", "can be written to"),
    (errno.ENOSPC, 74, "disk_full", "make room"),
    (errno.EDQUOT, 74, "disk_full", "make room"),
    (errno.ENAMETOOLONG, 64, "path_invalid", "shorten"),
    (errno.ELOOP, 64, "path_invalid", "path"),
    (errno.EMFILE, 74, "too_many_files", "ulimit"),
    (errno.EIO, 74, "io_failed", "disk or store"),
    (errno.ESTALE, 74, "io_failed", "disk or store"),
  ],
)
def test_a_failure_has_its_own_code_kind_and_advice(number, code, kind, advice):
  error = failure(number)
  assert (int(error.code), error.kind, error.fields["path"]) == (code, kind, "/somewhere/file")
  assert os.strerror(number) in error.fields["got"]
  assert advice in error.fix


def test_a_store_s_refusal_names_what_the_credentials_lack():
  refused = failure(errno.EACCES, "s3://bucket/file")
  assert (int(refused.code), refused.kind) == (73, "cannot_create")
  assert "credentials" in refused.fix
  assert "credentials" in unreadable(PermissionError(errno.EACCES, "no"), "gs://bucket/file").fix


def test_a_file_that_cannot_be_read_is_told_from_a_place_that_cannot_be_written_to(tmp_path, monkeypatch):
  (tmp_path / "there").write_text("")
  forbidden = {str(tmp_path / "there")}
  monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in forbidden)
  read = failure(errno.EACCES, str(tmp_path / "there"))
  assert (int(read.code), read.kind) == (66, "file_unreadable")
  assert "may read" in read.fields["expected"]
  assert "write" not in str(read)
  written = failure(errno.EACCES, str(tmp_path / "new"))
  assert (int(written.code), written.kind) == (73, "cannot_create")
  forbidden.add(str(tmp_path))
  below = failure(errno.EACCES, str(tmp_path / "unseen" / "file"))
  assert (int(below.code), below.kind) == (66, "file_unreadable")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINVAL, errno.EACCES])
def test_a_path_that_nobody_knows_is_not_named(number, capsys):
  def fail():
    raise OSError(number, os.strerror(number))

  with pytest.raises(SystemExit) as ended:
    run_program(fail)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"ERROR code={ended.value.code} kind=")
  assert "path=" not in line
  assert "None" not in line


def test_a_file_that_is_written_is_named_by_the_failure_to_write_it(tmp_path, monkeypatch):
  def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="No space left") as failed:
    storage.put(tmp_path / "plan.json", b"content")
  assert (failed.value.filename, failed.value.filename2) == (str(tmp_path / "plan.json"), None)
  assert os_failure(failed.value).kind == "disk_full"


def test_a_program_that_has_too_little_memory_says_so(capsys):
  def fail():
    raise MemoryError("Unable to allocate 14.2 TiB for an array")

  with pytest.raises(SystemExit) as ended:
    run_program(fail)
  assert ended.value.code == 78
  (line,) = capsys.readouterr().err.splitlines()
  assert "kind=out_of_memory" in line
  assert "14.2 TiB" in line


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\nb", "a\x85b", "a\u2028b", "a\0b", "a\udcffb", "\x9b"])
def test_a_line_is_one_whatever_stands_in_it(text):
  line = str(AnystepError(66, "plan_missing", path=text, got=f"{text} {text}", fix=text))
  assert len(line.splitlines()) == 1
  assert line.encode().decode() == line
  assert not set("\x1b\x9b\x85\u2028\0") & set(line)


def test_a_long_value_does_not_drown_the_line():
  line = str(AnystepError(64, "index", got=list(range(10**5)), fix="give fewer"))
  assert len(line) < 5000
  assert "characters)" in line
  assert line.endswith('fix="give fewer"')
