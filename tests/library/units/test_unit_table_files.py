"""Whatever happens to a unit table's files, units are those that were written, or there is an error."""

import errno
import hashlib
import io
import os
import pathlib

import caches
import numpy as np
import pytest
from etils import epath
from expected_rows import ExpectedRows
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.caches.manifest import FileEntry
from anystep.caches.read_pool import ReadPool
from anystep.containers.checked_file import PART_BYTES
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.files import names
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.units import table_files as unit_table_files
from anystep.units.table_files import UnitTableFile

NUM_WORDS = 9 * PART_BYTES // 4 + 17
WORDS = np.random.default_rng(0).integers(0, 2**32, NUM_WORDS, np.uint32)


def npy(words):
  file = io.BytesIO()
  np.save(file, words)
  return file.getvalue()


def written(path, words=WORDS):
  """A table's file, and what a header says of it."""
  content = npy(words)
  path.write_bytes(content)
  return FileEntry.of(path.name, len(words), content)


def opened(path, entry, *, num_words=NUM_WORDS, budget_bytes=1 << 30):
  pool = ReadPool(budget_bytes=budget_bytes)
  return UnitTableFile(epath.Path(path), entry, num_words=num_words, pool=pool, key=("test",))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return tmp_path_factory.mktemp("table") / "train.units.npy"


@pytest.fixture(scope="module")
def entry(path):
  return written(path)


@given(st.lists(st.integers(0, NUM_WORDS - 1)), st.sampled_from([0, 1 << 30]))
@settings(max_examples=40, deadline=None)
def test_words_are_those_that_were_written(path, entry, places, budget_bytes):
  file = opened(path, entry, budget_bytes=budget_bytes)
  places = np.array(places, np.int64)
  for _ in range(2):
    assert file.take(places).tolist() == WORDS[places].tolist()
  assert file.take(places).dtype == np.int64


@pytest.mark.parametrize("start", [0, 1, 20_000, NUM_WORDS - 5])
@pytest.mark.parametrize("words", [0, 5, 70_000, NUM_WORDS])
def test_a_range_is_what_was_written(path, entry, start, words):
  stop = min(start + words, NUM_WORDS)
  assert np.array_equal(opened(path, entry).all(start, stop), WORDS[start:stop])


def test_what_is_held_is_counted_and_within_the_budget(path, entry):
  pool = ReadPool(budget_bytes=3 * PART_BYTES)
  file = UnitTableFile(epath.Path(path), entry, num_words=NUM_WORDS, pool=pool, key=("test",))
  for place in range(0, NUM_WORDS, 1000):
    file.take(np.array([place]))
    assert 0 < pool.used_bytes <= 3 * PART_BYTES


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30])
@pytest.mark.parametrize("how", ["flipped", "overwritten", "replaced", "cut", "emptied", "longer", "gone"])
def test_a_file_that_changes_after_it_was_opened_gives_no_other_words(tmp_path, how, budget_bytes):
  path = tmp_path / "train.units.npy"
  file = opened(path, written(path), budget_bytes=budget_bytes)
  every_place = np.arange(NUM_WORDS)
  file.take(np.arange(100))
  other = npy(np.random.default_rng(1).permutation(WORDS))
  if how == "gone":
    path.unlink()
  elif how == "replaced":
    (tmp_path / "other").write_bytes(other)
    os.replace(tmp_path / "other", path)
  elif how == "longer":
    with path.open("ab") as longer:
      longer.write(bytes(PART_BYTES))
  else:
    # In place: who had it mapped would see it, or die.
    with path.open("r+b") as changed:
      if how == "flipped":
        changed.seek(5 * PART_BYTES)
        changed.write(bytes([changed.read(1)[0] ^ 1]))
      elif how == "overwritten":
        changed.write(other)
      else:
        changed.truncate(0 if how == "emptied" else 6 * PART_BYTES)
  for read in (lambda: file.take(every_place), lambda: file.all(0, NUM_WORDS)):
    with pytest.raises(AnystepError) as refused:
      read()
    assert refused.value.code == 65
    assert refused.value.kind == ("file_missing" if how == "gone" else "file_changed")
    assert str(refused.value.fields["path"]) == str(path)


def test_a_part_that_nothing_happened_to_is_read_on(tmp_path):
  path = tmp_path / "train.units.npy"
  file = opened(path, written(path), budget_bytes=0)
  with path.open("r+b") as changed:
    changed.truncate(6 * PART_BYTES)
  assert file.take(np.arange(1000)).tolist() == WORDS[:1000].tolist()


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"no npy file",
    npy(WORDS.astype(np.int64)),
    npy(WORDS[:-1]),
    npy(WORDS.reshape(-1, 1)),
    npy(np.asfortranarray(np.ones((2, 3), np.uint32))),
  ],
  ids=["empty", "text", "int64", "shorter", "rank 2", "columns"],
)
def test_a_file_of_another_form_is_refused(tmp_path, content):
  path = tmp_path / "train.units.npy"
  path.write_bytes(content)
  entry = FileEntry(
    name=path.name,
    records=NUM_WORDS,
    bytes=len(content),
    sha256=hashlib.sha256(content).hexdigest(),
    head_sha256=hashlib.sha256(content[:4096]).hexdigest(),
  )
  with pytest.raises(AnystepError) as refused:
    opened(path, entry)
  assert (refused.value.code, refused.value.kind) == (65, "unit_table_invalid")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
  path = tmp_path / "train.units.npy"
  entry = written(path)
  path.unlink()
  make(path)
  with pytest.raises(AnystepError) as refused:
    opened(path, entry)
  assert (refused.value.code, refused.value.kind) == (65, "file_changed")


def test_a_disk_that_fails_is_an_error_of_reading(tmp_path, monkeypatch):
  path = tmp_path / "train.units.npy"
  entry = written(path)

  def fail(*arguments):
    raise OSError(errno.EIO, "Input/output error")

  monkeypatch.setattr(unit_table_files, "open_file", fail)
  with pytest.raises(AnystepError) as refused:
    opened(path, entry)
  assert (refused.value.code, refused.value.kind) == (74, "shard_unreadable")


# Streams


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  return caches.build(tmp_path_factory.mktemp("tables"), num_examples=300, num_shards=3)


def packed_plan(built):
  lengths = {"inputs": 11, "targets": 9}
  return Plan.start(built.open(), batch_size=6, feature_lengths=lengths, packing="greedy")


def table_files(plan):
  (table,) = plan.unit_tables.values()
  return [pathlib.Path(table.directory) / names.units_name("train", shard, 3) for shard in range(3)]


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30])
@pytest.mark.parametrize("how", ["records swapped", "cut"])
def test_batches_of_a_table_that_changes_in_place_are_right_or_refused(tmp_path, how, budget_bytes):
  built = caches.build(tmp_path, num_examples=300, num_shards=3)
  plan = packed_plan(built)
  files, expected = table_files(plan), ExpectedRows(plan, [built])
  plan = Plan.from_json(plan.to_json())
  right, refused = 0, 0
  with open_stream(plan, {"demo": built.open(pool=ReadPool(budget_bytes=budget_bytes))}) as stream:
    for step in range(60):
      if step == 10:
        for file in files:
          words = np.load(file)
          with file.open("r+b") as changed:
            if how == "cut":
              changed.truncate(file.stat().st_size // 2)
            else:
              changed.write(npy(np.concatenate([words[:-30], words[:-31:-1]])))
      try:
        found = batch_digest(stream.batch(step))
      except AnystepError as error:
        found = error.kind
      right += found == expected.digest(step)
      refused += found == "file_changed"
  assert right + refused == 60
  assert right >= 10
  assert refused > 0 or budget_bytes


def test_no_table_is_mapped(built):
  plan = packed_plan(built)
  with open_stream(plan, built.root) as stream:
    next(stream)
    assert "units" not in pathlib.Path("/proc/self/maps").read_text()
