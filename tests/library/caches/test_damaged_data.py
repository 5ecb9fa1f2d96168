"""What a stream reads of files that are not as they were written is refused, or the same all the same."""

import functools
import itertools
import os
import shutil

import caches
import numpy as np
import pytest
from expected_rows import ExpectedRows

from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.features.feature import Feature
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

BEFORE_OPENED, BEFORE_READ = WHEN = ["before it is opened", "before it is read"]


def built_in(root, layout, container, *, first_example=0):
  """4 shards of 12 records of half a kilobyte, beyond the 4 KiB that are compared when a file is opened.

  TFRecord shards are of one size, and have the same offsets.
  """

  def example_of(ordinal):
    return {"tokens": np.random.default_rng(first_example + ordinal).integers(128, 16384, 256, np.int32)}

  shared = {
    "container": container,
    "features": {"tokens": Feature(dtype="int32", shape=(None,))},
    "example_of": example_of,
    "block_records": 4,
  }
  if layout == "as_is":
    return caches.build_as_is(root, shard_sizes=(12,) * 4, **shared)
  return caches.build(root, num_examples=48, **shared)


class Reader:
  """Who reads two epochs of a cache again and again.

  Attributes:
    records, offsets: the cache's files.
  """

  def __init__(self, built):
    self.built = built
    self.plan = Plan.start(built.open(), batch_size=8, num_epochs=2, epoch_policy="reshuffle")
    expected = ExpectedRows(self.plan, [built])
    self.digests = [expected.digest(step) for step in range(expected.num_steps)]
    cache = built.open()
    self.container = cache.manifest.container
    self.records = [cache.path_of(entry) for entry in cache.manifest.record_files]
    self.offsets = [cache.path_of(entry) for entry in cache.manifest.offsets_files]

  def finds(self, damage, *, when):
    """What is found after `damage()`: the kind of the error, or "same"; other data fails."""
    written = {path: path.read_bytes() for path in [*self.records, *self.offsets]}
    try:
      if when == BEFORE_OPENED:
        damage()
      opened = {"demo": self.built.open()}
      with open_stream(self.plan, opened, prefetch_batches=0) as stream:
        if when == BEFORE_READ:
          damage()
        assert [batch_digest(batch) for batch in stream] == self.digests
      return "same"
    except AnystepError as error:
      return error.kind if error.code == 65 else str(error)
    finally:
      for path, content in written.items():
        if not path.exists() or path.read_bytes() != content:
          path.write_bytes(content)


@pytest.fixture(
  scope="module",
  params=itertools.product(["preshuffled", "as_is"], [containers.ARRAY_RECORD, containers.TFRECORD]),
  ids="-".join,
)
def reader(request, tmp_path_factory):
  return Reader(built_in(tmp_path_factory.mktemp("cache"), *request.param))


@pytest.mark.parametrize("when", WHEN)
def test_flipped_bytes_are_found(reader, when):
  found = set()
  for path in [reader.records[0], reader.records[3], *reader.offsets[1:2]]:
    size = path.stat().length
    places = {0, 1, 8, 11, 12, 100, 4095, 4096, *range(0, size, size // 12), size - 5, size - 1}
    for place in sorted(places & {*range(size)}):
      found.add(reader.finds(functools.partial(caches.flip, path, place, 1 << place % 8), when=when))
  if when == BEFORE_READ:
    # A file that was written to since the cache was opened is compared as a whole.
    assert found == {"file_changed"}
    return
  assert {"file_changed", "shard_corrupt"} <= found
  # Of an ArrayRecord file some bytes only fill it.
  ignored = {"same"} if reader.container == containers.ARRAY_RECORD else set()
  assert found <= {"file_changed", "shard_corrupt", "shard_records"} | ignored


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kept", [0, 0.3, 0.9, 0.99999], ids=str)
def test_cut_files_are_found(reader, kept, when):
  for path in [reader.records[1], *reader.offsets[2:3]]:
    cut = functools.partial(os.truncate, path, int(kept * path.stat().length))
    found = reader.finds(cut, when=when)
    if when == BEFORE_OPENED:
      assert found == "file_size"
    else:
      assert found in {"file_changed", "shard_corrupt", "shard_records", "offsets_invalid"}


def exchange(one, other):
  contents = one.read_bytes(), other.read_bytes()
  one.write_bytes(contents[1])
  other.write_bytes(contents[0])


@pytest.mark.parametrize("when", WHEN)
def test_exchanged_files_are_found_unless_they_are_equal(reader, when):
  sizes = {path.stat().length for path in reader.records}
  for one, other in itertools.combinations(reader.records, 2):
    found = reader.finds(functools.partial(exchange, one, other), when=when)
    assert found == "file_changed" or (found == "file_size" and len(sizes) > 1)
  if reader.offsets:
    assert len(sizes) == 1
  for one, other in itertools.combinations(reader.offsets, 2):
    assert reader.finds(functools.partial(exchange, one, other), when=when) == "same"


@pytest.mark.parametrize("when", WHEN)
def test_missing_files_are_found(reader, when):
  for path in [*reader.records, *reader.offsets]:
    assert reader.finds(path.unlink, when=when) == "file_missing"


@pytest.mark.parametrize("when", WHEN)
def test_another_caches_files_are_found(reader, tmp_path, when):
  layout = reader.built.manifest["layout"]
  other = Reader(built_in(tmp_path, layout, reader.container, first_example=1000))
  for own, foreign in zip(reader.records, other.records, strict=True):
    found = reader.finds(functools.partial(shutil.copyfile, foreign, own), when=when)
    assert found in {"file_changed", "file_size"}


@pytest.mark.parametrize("name", ["train.{}-00004-of-00005", "train.{}-00000-of-00001", "train.{}-0-of-4"])
def test_a_file_beside_the_shards_is_refused_or_not_read(reader, name):
  """In layout as_is the shards' folder is not the cache's own."""
  foreign = reader.records[0].parent / name.format(reader.container)
  found = reader.finds(functools.partial(shutil.copyfile, reader.records[1], foreign), when=BEFORE_OPENED)
  foreign.unlink()
  assert found == ("same" if reader.built.manifest["layout"] == "as_is" else "file_foreign")
