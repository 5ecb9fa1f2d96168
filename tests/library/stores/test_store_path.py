"""Paths on stores do what local paths do."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from etils import epath

from anystep.stores import object_files
from anystep.stores.store_path import StorePath

# Longer than a part of an upload, and than any range that is read at a time.
LONG = np.random.default_rng(0).bytes(21 << 20)


@pytest.fixture
def roots(tmp_path, folder):
  """A local folder and one on a store."""
  return epath.Path(tmp_path), epath.Path(folder)


def answers(roots, ask):
  """What is answered of either path: names, content, or the type of an error."""
  return [answer(root, ask) for root in roots]


def answer(root, ask):
  try:
    found = ask(root)
    if isinstance(found, epath.Path):
      return found.relative_to(root).as_posix()
    if hasattr(found, "__next__"):
      return sorted(path.relative_to(root).as_posix() for path in found)
    return found
  except OSError as error:
    return type(error)


def write_tree(root):
  for name, content in {"a.txt": b"one", "b.txt": b"", "c/d.txt": b"two", "c/e/f.bin": b"three"}.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


@pytest.mark.parametrize(
  "ask",
  [
    lambda root: root.iterdir(),
    lambda root: (root / "c").iterdir(),
    lambda root: (root / "none").iterdir(),
    lambda root: [(root / name).exists() for name in ("a.txt", "c", "c/e", "none", "a")],
    lambda root: [(root / name).is_dir() for name in ("a.txt", "c", "c/e", "none", "a")],
    lambda root: [(root / name).is_file() for name in ("a.txt", "b.txt", "c", "none")],
    lambda root: [(root / name).stat().length for name in ("a.txt", "b.txt")],
    lambda root: (root / "c").stat().is_directory,
    lambda root: (root / "none").stat(),
    lambda root: (root / "none").read_bytes(),
    lambda root: (root / "none").open("rb"),
    lambda root: (root / "none").unlink(),
    lambda root: (root / "none").unlink(missing_ok=True),
    lambda root: (root / "b.txt").read_bytes(),
    lambda root: (root / "c/d.txt").read_text(),
    lambda root: root.glob("*.txt"),
    lambda root: root.glob("*/*.txt"),
    lambda root: root.glob("c/*/f.*"),
    lambda root: root.glob("c/d.txt"),
    lambda root: root.glob("none/*"),
    lambda root: (root / "c").mkdir(),
    lambda root: (root / "a.txt").rename(root / "g.txt"),
    lambda root: (root / "a.txt").rename(root / "b.txt"),
    lambda root: (root / "a.txt").replace(root / "b.txt").read_bytes(),
    lambda root: (root / "a.txt").copy(root / "h.txt").read_bytes(),
    lambda root: (root / "c").rmtree(),
    lambda root: (root / "none").rmtree(),
    lambda root: (root / "none").rmtree(missing_ok=True),
  ],
)
def test_a_path_answers_as_a_local_one(roots, ask):
  for root in roots:
    write_tree(root)
  local, remote = answers(roots, ask)
  assert remote == local
  local, remote = answers(roots, files_below)
  assert remote == local


def files_below(root):
  """All files below, with their content."""
  found = {}
  for path in root.iterdir():
    if path.is_dir():
      found |= {f"{path.name}/{name}": content for name, content in files_below(path).items()}
    else:
      found[path.name] = path.read_bytes()
  return found


def test_what_is_written_in_parts_is_read_back_from_anywhere(roots):
  rng = np.random.default_rng(1)
  reads = []
  for root in roots:
    with (root / "long").open("wb") as file:
      for start in range(0, len(LONG), 1_000_003):
        file.write(LONG[start : start + 1_000_003])
      assert file.tell() == len(LONG)
  places = [(int(rng.integers(len(LONG))), int(rng.integers(200_000))) for _ in range(20)]
  for root in roots:
    with (root / "long").open("rb") as file:
      read = [(file.seek(start), file.read(size)) for start, size in places]
      read += [(file.seek(-1000, 2), file.read()), (file.seek(0), file.read())]
      reads.append(read)
  assert reads[0] == reads[1]
  assert reads[1][-1][1] == LONG


@pytest.mark.parametrize("size", [0, 1, 9 << 20, len(LONG)])
def test_a_file_that_could_not_be_written_whole_never_appears(roots, size):
  _, root = roots

  def write():
    with (root / "torn").open("wb") as file:
      file.write(LONG[:size])
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    write()
  file = (root / "dropped").open("wb")
  file.write(LONG[:size])
  del file
  assert not root.exists()


def test_an_object_is_there_though_the_answer_to_its_last_part_got_lost(roots, monkeypatch):
  _, root = roots

  class Lost:
    """An upload whose end is done, or is not, and is answered by an error."""

    is_done = True

    def __init__(self, upload):
      self._upload = upload

    def write(self, content):
      self._upload.write(content)

    def close(self):
      if self.is_done:
        self._upload.close()
      raise ConnectionError("lost")

  start = object_files._start_upload
  monkeypatch.setattr(object_files, "_start_upload", lambda address: Lost(start(address)))
  with (root / "file").open("wb") as file:
    file.write(b"content")
  assert (root / "file").read_bytes() == b"content"
  monkeypatch.setattr(Lost, "is_done", False)
  for name in ("file", "other"):
    file = (root / name).open("wb")
    file.write(b"another")
    with pytest.raises(ConnectionError):
      file.close()


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(roots):
  _, root = roots
  (root / "long").write_bytes(LONG[: 1 << 20])
  with (root / "long").open("rb") as file:
    assert file.read(10) == LONG[:10]
    (root / "long").write_bytes(LONG[1 : (1 << 20) + 1])
    with pytest.raises(OSError, match="another one by now"):
      file.read()


def test_a_directory_with_files_is_not_removed_as_an_empty_one(roots):
  for root in roots:
    write_tree(root)
    with pytest.raises((OSError, ValueError), match="not empty"):
      (root / "c").rmdir()
    (root / "none").mkdir()
    (root / "none").rmdir()
    assert not (root / "none").exists()


def test_nothing_is_appended(folder):
  with pytest.raises(ValueError, match="mode"):
    (epath.Path(folder) / "file").open("ab")


def test_paths_are_those_of_their_addresses():
  path = epath.Path("s3://bucket/a/")
  assert (str(path / "b"), str(path.parent), path.name) == ("s3://bucket/a/b", "s3://bucket", "a")
  assert (path / "b").relative_to("s3://bucket").as_posix() == "a/b"
  assert str(path.with_name("c")) == "s3://bucket/c"
  assert pickle.loads(pickle.dumps(path)) == path
  assert path.is_absolute()
  assert isinstance(epath.Path("gs://bucket"), StorePath)


def test_importing_the_library_loads_no_store(tmp_path):
  code = (
    "import sys, anystep; print(*sorted({'obstore', 'botocore', 'google.cloud.storage'} & {*sys.modules}))"
  )
  printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert printed.stdout.strip() == ""
