"""A cache that is replaced, overwritten or merely touched under a stream gives its own rows or an error."""

import os
import pathlib
import pickle
import shutil

import caches
import numpy as np
import pytest

from anystep.caches import shard_files
from anystep.caches.read_pool import ReadPool
from anystep.caches.shard_files import ShardFiles
from anystep.containers import containers
from anystep.containers.file_ranges import FileRanges, FileStamp
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.features.feature import Feature
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

NUM_SHARDS, STEPS = 8, 15
FEATURES = {"values": Feature(dtype="float32", shape=(175,))}


def build(root, container, layout, first_example=0):
  """A cache whose files are as large whatever its examples are."""

  def example_of(ordinal):
    return {"values": np.random.default_rng(first_example + ordinal).random(175, np.float32)}

  shared = {"block_records": 2, "container": container, "features": FEATURES}
  if layout == "as_is":
    return caches.build_as_is(root, shard_sizes=(15,) * NUM_SHARDS, example_of=example_of, **shared)
  return caches.build(root, num_examples=120, num_shards=NUM_SHARDS, example_of=example_of, **shared)


@pytest.fixture(params=containers.CONTAINERS)
def container(request):
  return request.param


@pytest.fixture(params=["preshuffled", "as_is"])
def layout(request):
  return request.param


class Replacing:
  """A stream of a cache, and another cache of equal files but for what stands in them."""

  def __init__(self, folder, container, layout):
    self.built = build(folder / "cache", container, layout)
    self.other = build(folder / "other", container, layout, first_example=1000)
    # Few files are open at a time, and little is held: files are opened again and again.
    self.cache = self.built.open(pool=ReadPool(budget_bytes=3000, open_files=2))
    self.plan = Plan.start(self.cache, batch_size=8, num_epochs=1)
    with open_stream(self.plan, {"demo": self.built.open(pool=ReadPool())}) as stream:
      self.expected = [batch_digest(batch) for batch in stream]

  def files(self, built=None):
    manifest = self.cache.manifest
    opened = (built or self.built).open(pool=ReadPool())
    return [pathlib.Path(opened.path_of(entry)) for entry in manifest.record_files]

  def read(self, at_step, change):
    """Changes something before a step: how many right batches are given, and what error ends them."""
    with open_stream(self.plan, {"demo": self.cache}, prefetch_batches=0) as stream:
      given = 0
      try:
        for step in range(STEPS):
          if step == at_step:
            change()
          assert batch_digest(next(stream)) == self.expected[step], f"other rows at step {step}"
          given += 1
      except AnystepError as error:
        return given, error
    return given, None


@pytest.fixture
def replacing(tmp_path, container, layout):
  return Replacing(tmp_path, container, layout)


def overwrite(replacing):
  """The other cache's bytes into the same files, as `cp` does it."""
  for path, other in zip(replacing.files(), replacing.files(replacing.other), strict=True):
    with path.open("r+b") as file:
      file.write(other.read_bytes())


def put_others(replacing):
  """The other cache's files in the place of these, by renames."""
  for path, other in zip(replacing.files(), replacing.files(replacing.other), strict=True):
    os.replace(other, path)


def exchange_directories(replacing):
  os.rename(replacing.built.root, replacing.built.root.with_name("old"))
  shutil.copytree(replacing.other.root, replacing.built.root)


def overwrite_and_date_back(replacing):
  """As `overwrite`, by who restores the files' times."""
  for path, other in zip(replacing.files(), replacing.files(replacing.other), strict=True):
    before = path.stat()
    shutil.copy2(other, path.with_name("new"))
    os.utime(path.with_name("new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize("change", [overwrite, put_others, exchange_directories, overwrite_and_date_back])
@pytest.mark.parametrize("at_step", [0, 1, 7])
def test_no_row_of_another_cache_is_given(replacing, change, at_step):
  given, error = replacing.read(at_step, lambda: change(replacing))
  assert error is not None
  assert (error.code, error.kind) == (65, "file_changed")
  assert pathlib.Path(error.fields["path"]) in replacing.files()
  assert at_step <= given < STEPS


def touch(replacing):
  for path in replacing.files():
    os.utime(path)


def copy_again(replacing):
  """The same content in new files."""
  for path in replacing.files():
    shutil.copyfile(path, path.with_name("again"))
    os.replace(path.with_name("again"), path)


@pytest.mark.parametrize("change", [touch, copy_again])
def test_files_of_the_same_content_are_read_on(replacing, change):
  assert replacing.read(7, lambda: change(replacing)) == (STEPS, None)


def test_a_file_is_compared_as_a_whole_once_for_each_change(replacing, monkeypatch):
  compared, compare = [], shard_files.check_content
  monkeypatch.setattr(
    shard_files, "check_content", lambda path, sha256: compared.append(path) or compare(path, sha256)
  )
  assert replacing.read(0, lambda: None) == (STEPS, None)
  assert not compared
  assert replacing.read(7, lambda: touch(replacing)) == (STEPS, None)
  assert len(compared) == len(set(compared)) > 0


def test_a_file_that_is_written_to_all_the_time_is_refused(replacing, monkeypatch):
  read = ShardFiles.read
  monkeypatch.setattr(
    ShardFiles,
    "read",
    lambda self, shard, how: read(self, shard, lambda reader: touch(replacing) or how(reader)),
  )
  given, error = replacing.read(STEPS, lambda: None)
  assert (given, error.code, error.kind) == (0, 65, "file_changed")


def test_a_copy_in_another_process_knows_its_files_too(replacing):
  """What was replaced between pickling and reading is found without the first file having been opened."""
  copied = pickle.dumps(replacing.cache)
  overwrite_and_date_back(replacing)
  replacing.cache = pickle.loads(copied)
  given, error = replacing.read(STEPS, lambda: None)
  assert (given, error.kind) == (0, "file_changed")


def test_a_stamp_is_of_what_is_open(tmp_path):
  (tmp_path / "a").write_bytes(b"one")
  (tmp_path / "b").write_bytes(b"two")
  ranges = FileRanges(tmp_path / "a")
  before = ranges.stamp()
  assert before == FileStamp.at(tmp_path / "a")
  os.replace(tmp_path / "b", tmp_path / "a")
  assert ranges.stamp() == before != FileStamp.at(tmp_path / "a")


def test_a_file_that_is_put_back_is_read_again(replacing):
  """As the error asks for, in the same process, by a new stream and by the one that failed."""
  kept = {path: path.read_bytes() for path in replacing.files()}

  def cut():
    for path in kept:
      os.truncate(path, 70)

  _, error = replacing.read(3, cut)
  assert error.code == 65
  for path, content in kept.items():
    path.with_name("back").write_bytes(content)
    os.replace(path.with_name("back"), path)
  assert replacing.read(STEPS, lambda: None) == (STEPS, None)
  replacing.cache = replacing.built.open(pool=replacing.cache.pool)
  assert replacing.read(STEPS, lambda: None) == (STEPS, None)
