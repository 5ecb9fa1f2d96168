"""A cache gives the examples that were written, or says which of its files is no longer as written."""

import ast
import concurrent.futures
import dataclasses
import itertools
import os
import shutil
import time

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.caches.cache import open_cache, read_completed
from anystep.caches.manifest import FileEntry
from anystep.caches.read_pool import ReadPool
from anystep.containers import array_record_blocks, containers
from anystep.errors import AnystepError
from anystep.features.ragged import Ragged
from anystep.records.writing import serialize_example

# The shared cache's files: 4 shards of records and of lengths, and what describes them.
RECORD_FILES = [f"train.array_record-{shard:05d}-of-00004" for shard in range(4)]
LENGTHS_FILES = [f"train.lengths-{shard:05d}-of-00004.npy" for shard in range(4)]
DESCRIPTION_FILES = ["info.train.json", "stats.train.json"]
LISTED_FILES = [*RECORD_FILES, *LENGTHS_FILES, *DESCRIPTION_FILES]
ALL_FILES = [*LISTED_FILES, "manifest.train.json", "COMPLETED"]


def assert_same(found, example):
  assert found.keys() == example.keys()
  for name, value in example.items():
    assert caches.same_array(found[name], value), name


def refusal_of(action, *arguments):
  with pytest.raises(AnystepError) as refused:
    action(*arguments)
  assert refused.value.fix
  return refused.value


def refusal_when_opened(cache):
  return refusal_of(cache.open)


def refusal_when_verified(cache):
  """What is said of a cache whose change shows in no name or size."""
  return refusal_of(cache.open().verify)


# Reading


@pytest.mark.parametrize("container", containers.CONTAINERS)
@pytest.mark.parametrize(
  ("num_examples", "num_shards", "block_records", "seed"),
  [(50, 4, 4, 0), (97, 8, 5, 3), (3, 5, 2, 1), (1, 1, 1, 0), (40, 1, 8, 2), (24, 4, 100, 0)],
)
def test_examples_come_back_by_index(tmp_path, num_examples, num_shards, block_records, seed, container):
  built = caches.build(
    tmp_path,
    num_examples=num_examples,
    num_shards=num_shards,
    block_records=block_records,
    seed=seed,
    container=container,
  )
  cache = built.open()
  cache.verify()
  assert len(cache) == num_examples
  for index, example in enumerate(built.examples):
    assert_same(cache[index], example)
  assert len(list(cache)) == num_examples


@pytest.mark.parametrize("container", containers.CONTAINERS)
@pytest.mark.parametrize("shard_sizes", [(3, 0, 7, 5), (0, 0, 1, 0), (9,), (1, 30, 2)])
def test_an_index_counts_through_files_that_were_there_before(tmp_path, shard_sizes, container):
  built = caches.build_as_is(tmp_path, shard_sizes=shard_sizes, block_records=3, container=container)
  cache = built.open()
  cache.verify()
  cache.check_heads()
  places = [(shard, place) for shard, size in enumerate(shard_sizes) for place in range(size)]
  assert len(cache) == len(places)
  for index, (shard, place) in enumerate(places):
    assert_same(cache[index], built.examples[index])
    located = cache.locate(np.array([index]))
    assert [column.tolist() for column in located] == [[shard], [place]]
    assert [column.tolist() for column in cache.source_of(np.array([index]))] == [[shard], [place]]
    assert cache.index_of(*located).tolist() == [index]
  backwards = [example["number"] for example in cache.__getitems__(range(len(places) - 1, -1, -1))]
  assert backwards == [example["number"] for example in reversed(built.examples)]


@given(st.lists(st.integers(0, 49), max_size=30))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_several_indices_are_read_as_one_batch_in_their_order(shared_cache, indices):
  batch = shared_cache.open().read(indices)
  examples = [shared_cache.examples[index] for index in indices]
  assert batch["number"].tolist() == [int(example["number"]) for example in examples]
  for name in ("inputs", "targets", "weights"):
    feature = batch[name]
    assert isinstance(feature, Ragged)
    assert feature.values.dtype == caches.FEATURES[name].dtype
    assert [row.tolist() for row in feature.rows()] == [example[name].tolist() for example in examples]


def test_records_are_read_by_shard_and_place(shared_cache):
  shards, places = np.array([3, 0, 3, 1]), np.array([11, 12, 0, 5])
  expected = [
    serialize_example(shared_cache.examples[q * 4 + s]) for s, q in zip(shards, places, strict=True)
  ]
  assert shared_cache.open().read_records(shards, places) == expected


@pytest.mark.parametrize("index", [-1, 50, 10**12])
def test_an_index_outside_is_refused(shared_cache, index):
  with pytest.raises(IndexError, match=str(index)):
    shared_cache.open()[index]


@pytest.mark.parametrize("index", [-1, 56, 1000])
def test_an_index_outside_is_refused_among_others(shared_cache, index):
  with pytest.raises(IndexError, match=str(index)):
    shared_cache.open().read([0, index])


def test_lengths_are_those_of_the_examples(shared_cache):
  cache = shared_cache.open()
  for shard in range(4):
    expected = [
      [len(example[name]) for name in ("inputs", "targets", "weights")]
      for example in shared_cache.examples[shard::4]
    ]
    lengths = cache.lengths(shard)
    assert lengths.dtype == np.uint32
    assert lengths.tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_examples_are_traced_to_the_source_as_the_oracle_traces_them(seed):
  cache = caches.cache_without_files(seed=seed, source_sizes=[0, 20, 0, 1, 29, 0])
  source_shards, source_places = cache.source_of(np.arange(50))
  expected = [oracle.trace(index, "demo", "train", seed, [0, 20, 0, 1, 29, 0]) for index in range(50)]
  assert list(zip(source_shards.tolist(), source_places.tolist(), strict=True)) == expected


def test_its_repr_names_what_was_opened_and_not_where(shared_cache, own_cache):
  cache = shared_cache.open()
  assert repr(cache) == repr(own_cache.open())
  assert repr(cache) == f"Cache(task='demo', split='train', manifest_sha256={cache.manifest_sha256!r})"


def test_threads_read_what_one_reads(shared_cache, monkeypatch):
  """Each slow read lets others in, who would close its file under it."""
  read_block = array_record_blocks.ArrayRecordBlocks.read_block

  def read_block_slowly(self, block):
    time.sleep(0.001)
    return read_block(self, block)

  monkeypatch.setattr(array_record_blocks.ArrayRecordBlocks, "read_block", read_block_slowly)
  cache = shared_cache.open(pool=ReadPool(budget_bytes=1, open_files=1))

  def read(seed):
    for index in np.random.default_rng(seed).permutation(50)[:20].tolist():
      assert_same(cache[index], shared_cache.examples[index])

  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    assert list(threads.map(read, range(8))) == [None] * 8


@pytest.mark.parametrize("budget", [{"open_files": 1}, {"budget_bytes": 1}, {"budget_bytes": 0}], ids=str)
def test_what_is_dropped_from_memory_is_read_again(shared_cache, budget):
  cache = shared_cache.open(pool=ReadPool(**budget))
  for index in itertools.chain(range(50), reversed(range(50))):
    assert_same(cache[index], shared_cache.examples[index])


def test_splits_and_tasks_stand_beside_each_other(tmp_path):
  built = [
    caches.build(tmp_path, task=task, split=split, num_examples=10, num_shards=2)
    for task in ("a:b", "a:c", "a")
    for split in ("train", "validation")
  ]
  for cache in built:
    opened = cache.open()
    opened.verify()
    assert_same(opened[7], cache.examples[7])
  assert (tmp_path / "a" / "b" / "COMPLETED").exists()
  assert read_completed(opened.directory).keys() == {"train", "validation"}


def test_an_empty_split_is_a_cache(tmp_path):
  built = caches.build(tmp_path, num_examples=0, num_shards=1)
  cache = built.open()
  cache.verify()
  assert len(cache) == 0
  assert cache.lengths(0).shape == (0, 3)
  assert list(cache) == []


# What is not there


def test_a_cache_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path):
  error = refusal_of(open_cache, tmp_path / "caches", "my:task", "train")
  assert (error.code, error.kind) == (66, "cache_missing")
  assert error.fields["task"] == "my:task"
  assert str(error.fields["path"]) == str(tmp_path / "caches" / "my" / "task" / "COMPLETED")
  assert error.fix.startswith(f"anystep-cache --tasks=my:task --output_cache_dir={tmp_path / 'caches'} ")


def test_a_tasks_own_directory_is_no_root_and_the_fix_names_the_root(shared_cache):
  error = refusal_of(open_cache, shared_cache.directory, "demo", "train")
  assert (error.code, error.kind) == (66, "cache_missing")
  assert error.fix.startswith(f"name the root {shared_cache.root}: ")


def test_a_root_that_is_a_file_has_no_caches(tmp_path):
  (tmp_path / "caches").write_text("")
  assert refusal_of(open_cache, tmp_path / "caches", "demo", "train").kind == "cache_missing"


def test_a_split_that_is_not_there_is_named_with_those_that_are(shared_cache):
  error = refusal_of(open_cache, shared_cache.root, "demo", "trian")
  assert (error.code, error.kind) == (66, "split_missing")
  assert (error.fields["expected"], error.fields["got"]) == ("train", "trian")
  assert "train" in error.fix


def test_a_cache_without_its_marker_is_not_there(own_cache):
  (own_cache.directory / "COMPLETED").unlink()
  assert refusal_when_opened(own_cache).kind == "cache_missing"


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "..", "a:..:b", "", ":", "a b", "ä", ".hidden"])
def test_a_task_that_is_a_path_is_refused(shared_cache, name):
  error = refusal_of(open_cache, shared_cache.root, name, "train")
  assert (error.code, error.kind) == (77, "task_name")


def test_another_tasks_cache_is_refused(own_cache):
  shutil.copytree(own_cache.directory, own_cache.root / "other")
  error = refusal_of(open_cache, own_cache.root, "other", "train")
  assert (error.code, error.kind) == (65, "manifest_task")
  assert (error.fields["expected"], error.fields["got"]) == ("other train", "demo train")


def test_another_splits_manifest_is_refused(own_cache):
  text = (own_cache.directory / "manifest.train.json").read_text()
  caches.sign(own_cache.directory, "test", text)
  error = refusal_of(open_cache, own_cache.root, "demo", "test")
  assert (error.code, error.kind) == (65, "manifest_task")


# What is not as it was written: every file, every way


def positions_in(path, count):
  """Places spread over a file, its first and last among them."""
  return sorted({*range(min(4, count)), *np.linspace(0, path.stat().st_size - 1, count).astype(int).tolist()})


def test_the_matrix_covers_every_file(shared_cache):
  assert sorted(ALL_FILES) == sorted(path.name for path in shared_cache.directory.iterdir())


@pytest.mark.parametrize("mask", [0x01, 0x80])
@pytest.mark.parametrize("name", LISTED_FILES)
def test_a_flipped_byte_of_a_listed_file_is_found_by_verify(own_cache, name, mask):
  path = own_cache.directory / name
  written = path.read_bytes()
  for position in positions_in(path, 12):
    caches.flip(path, position, mask)
    error = refusal_when_verified(own_cache)
    assert (error.code, error.kind) == (65, "file_changed")
    assert str(error.fields["path"]) == str(path)
    path.write_bytes(written)
  own_cache.open().verify()


def test_any_flipped_byte_of_the_manifest_is_found_at_once(own_cache):
  path = own_cache.directory / "manifest.train.json"
  written = path.read_bytes()
  for position in positions_in(path, 200):
    caches.flip(path, position)
    error = refusal_when_opened(own_cache)
    assert (error.code, error.kind) == (65, "manifest_changed")
    assert {error.fields["expected"], error.fields["got"]} != {error.fields["expected"]}
    path.write_bytes(written)


def test_any_flipped_byte_of_the_marker_is_found_at_once(own_cache):
  path = own_cache.directory / "COMPLETED"
  written = path.read_bytes()
  kinds = set()
  for position in range(len(written)):
    caches.flip(path, position)
    error = refusal_when_opened(own_cache)
    kinds.add((error.code, error.kind))
    path.write_bytes(written)
  assert kinds == {(65, "completed_invalid"), (65, "manifest_changed"), (66, "split_missing")}


@pytest.mark.parametrize("name", ["manifest.train.json", "COMPLETED"])
def test_a_byte_that_is_no_text_is_found_as_any_other(own_cache, name):
  caches.flip(own_cache.directory / name, 10, 0x80)
  assert refusal_when_opened(own_cache).code == 65


def test_a_line_end_of_the_manifest_is_a_byte_as_any_other(own_cache):
  path = own_cache.directory / "manifest.train.json"
  caches.flip(path, path.read_bytes().index(b"\n"), ord("\n") ^ ord("\r"))
  assert refusal_when_opened(own_cache).kind == "manifest_changed"


@pytest.mark.parametrize(
  "keep",
  [lambda size: 0, lambda size: size // 2, lambda size: size - 1],
  ids=["to nothing", "by half", "by a byte"],
)
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_file_cut_short_is_found_when_opened(own_cache, name, keep):
  path = own_cache.directory / name
  size = path.stat().st_size
  os.truncate(path, keep(size))
  error = refusal_when_opened(own_cache)
  assert str(error.fields["path"]) == str(path)
  if name in LISTED_FILES:
    assert (error.code, error.kind) == (65, "file_size")
    assert (error.fields["expected"], error.fields["got"]) == (size, keep(size))
  else:
    kind = "completed_invalid" if name == "COMPLETED" else "manifest_changed"
    assert (error.code, error.kind) == (65, kind)


@pytest.mark.parametrize("name", LISTED_FILES)
def test_a_file_that_grew_is_found_when_opened(own_cache, name):
  with (own_cache.directory / name).open("ab") as file:
    file.write(b"\0")
  assert refusal_when_opened(own_cache).kind == "file_size"


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_missing_file_is_found_when_opened(own_cache, name):
  (own_cache.directory / name).unlink()
  error = refusal_when_opened(own_cache)
  assert (error.code, error.kind) == ((66, "cache_missing") if name == "COMPLETED" else (65, "file_missing"))
  assert str(error.fields["path"]) == str(own_cache.directory / name)


@pytest.mark.parametrize("files", [RECORD_FILES, LENGTHS_FILES[:2], LENGTHS_FILES[2:]], ids=lambda f: f[0])
def test_files_that_changed_places_are_found(own_cache, files):
  one, other = (own_cache.directory / name for name in files[:2])
  contents = one.read_bytes(), other.read_bytes()
  assert len(contents[0]) == len(contents[1])
  one.write_bytes(contents[1])
  other.write_bytes(contents[0])
  error = refusal_when_verified(own_cache)
  assert (error.code, error.kind) == (65, "file_changed")
  assert str(error.fields["path"]) == str(one)


def test_shards_that_changed_places_are_found_at_the_first_record(own_cache):
  one, other = (own_cache.directory / name for name in RECORD_FILES[:2])
  contents = one.read_bytes(), other.read_bytes()
  one.write_bytes(contents[1])
  other.write_bytes(contents[0])
  cache = own_cache.open()
  for index in (0, 1):
    error = refusal_of(cache.__getitem__, index)
    assert (error.code, error.kind) == (65, "file_changed")
    assert str(error.fields["path"]) == str(own_cache.directory / RECORD_FILES[index])
  assert_same(cache[2], own_cache.examples[2])


@pytest.mark.parametrize(
  ("name", "read"),
  [
    (RECORD_FILES[1], lambda cache: cache[1]),
    (RECORD_FILES[1], lambda cache: cache.check_heads()),
    (RECORD_FILES[1], lambda cache: cache.verify()),
    (LENGTHS_FILES[1], lambda cache: cache.lengths(1)),
    (LENGTHS_FILES[1], lambda cache: cache.verify()),
  ],
  ids=["record", "heads", "verified records", "lengths", "verified lengths"],
)
@pytest.mark.parametrize("gone", ["file", "directory"])
def test_a_file_that_goes_after_the_cache_was_opened_is_named(own_cache, name, read, gone):
  cache = own_cache.open()
  if gone == "file":
    (own_cache.directory / name).unlink()
  else:
    shutil.rmtree(own_cache.directory)
  error = refusal_of(read, cache)
  assert (error.code, error.kind) == (65, "file_missing")
  # Who reads all files misses the first of them first.
  assert str(error.fields["path"]).startswith(str(own_cache.directory))
  assert gone == "directory" or str(error.fields["path"]) == str(own_cache.directory / name)


@pytest.mark.parametrize(
  "name",
  [
    "train.array_record-00004-of-00005",
    "train.array_record-00000-of-00003",
    "train.array_record-4-of-5",
    "train.tfrecord-00000-of-00001",
    "train.tfrecord-00000-of-00001-offsets.npy",
    "train.lengths-00004-of-00005.npy",
  ],
)
def test_a_file_that_could_be_taken_for_a_shard_is_refused(own_cache, name):
  (own_cache.directory / name).write_bytes(b"")
  error = refusal_when_opened(own_cache)
  assert (error.code, error.kind) == (65, "file_foreign")
  assert str(error.fields["path"]) == str(own_cache.directory / name)
  assert error.fields["got"] == "1 more"


@pytest.mark.parametrize(
  "name",
  ["README", "validation.array_record-00000-of-00001", "pretrain.array_record-00000-of-00001", "units"],
)
def test_files_that_are_no_shards_of_the_split_are_left_alone(own_cache, name):
  (own_cache.directory / name).write_bytes(b"")
  own_cache.open().verify()


# What is not as it was written, found while reading


@pytest.mark.parametrize("position", [0, 1, 20, 64, 100, 2048, 4095])
def test_a_flipped_byte_of_a_shards_head_is_found_at_its_first_record(own_cache, position):
  caches.flip(own_cache.directory / RECORD_FILES[1], position)
  cache = own_cache.open()
  error = refusal_of(cache.__getitem__, 1)
  assert (error.code, error.kind) == (65, "file_changed")
  assert str(error.fields["path"]) == str(own_cache.directory / RECORD_FILES[1])
  assert error.fields["expected"] != error.fields["got"]
  assert_same(cache[0], own_cache.examples[0])


def place_in_file(content, record):
  """Where a record's bytes stand in the file; its random ones are stored as they are."""
  return content.index(record[200:600]) + 200


@pytest.mark.parametrize("place", [8, 15, 40, 77, 99])
def test_a_flipped_byte_deep_in_a_shard_is_found_when_its_block_is_read(own_large_cache, place):
  path = own_large_cache.directory / "train.array_record-00000-of-00001"
  position = place_in_file(path.read_bytes(), own_large_cache.examples[place]["blob"].item())
  assert position > 4096
  caches.flip(path, position)
  cache = own_large_cache.open()
  for index in range(100):
    if index // 8 == place // 8:
      error = refusal_of(cache.__getitem__, index)
      assert (error.code, error.kind) == (65, "shard_corrupt")
      assert error.fields["path"] == str(path)
      assert error.fields["got"]
    else:
      assert_same(cache[index], own_large_cache.examples[index])


def test_no_flipped_byte_anywhere_gives_other_data(own_large_cache):
  path = own_large_cache.directory / "train.array_record-00000-of-00001"
  written = path.read_bytes()
  # The ends of 64 KiB blocks and of the file have headers and footers of their own.
  borders = [at + d for at in range(65536, len(written), 65536) for d in (-1, 0, 9, 30)]
  random = np.random.default_rng(0).integers(4096, len(written), 60).tolist()
  blobs = [example["blob"].item() for example in own_large_cache.examples]
  outcomes = []
  for position in [*borders, *random, *range(len(written) - 100, len(written), 9)]:
    caches.flip(path, position, 1 << position % 8)
    cache = own_large_cache.open()
    try:
      found = [cache[index]["blob"].item() for index in range(100)]
      outcome = "same" if found == blobs else "other"
    except AnystepError as error:
      outcome = error.kind
    outcomes.append(outcome)
    path.write_bytes(written)
  # Bytes after the last record only fill a block.
  assert set(outcomes) <= {"shard_corrupt", "shard_records", "same"}
  assert outcomes.count("shard_corrupt") > 50


@pytest.mark.parametrize("num_records", [99, 101, 0])
def test_a_shard_with_another_number_of_records_is_refused(shared_large_cache, num_records):
  path = shared_large_cache.directory / "train.array_record-00000-of-00001"
  with pytest.raises(AnystepError) as refused:
    containers.open_blocks("array_record", path, num_records=num_records, block_records=8)
  assert (refused.value.code, refused.value.kind) == (65, "shard_records")
  fields = refused.value.fields
  assert (fields["path"], fields["expected"], fields["got"]) == (str(path), num_records, 100)


@pytest.mark.parametrize("content", [b"", b"no shard", bytes(200_000)])
def test_a_file_that_is_no_shard_is_refused(tmp_path, content):
  (tmp_path / "shard").write_bytes(content)

  def read():
    containers.open_blocks("array_record", tmp_path / "shard", num_records=9, block_records=8).read_block(0)

  error = refusal_of(read)
  assert error.code == 65
  assert error.kind in ("shard_corrupt", "shard_records")
  assert error.fields["path"] == str(tmp_path / "shard")


def test_a_flipped_byte_of_a_lengths_file_is_found_when_it_is_read(own_cache):
  path = own_cache.directory / LENGTHS_FILES[2]
  caches.flip(path, path.stat().st_size - 1)
  cache = own_cache.open()
  assert cache.lengths(1).shape == (13, 3)
  error = refusal_of(cache.lengths, 2)
  assert (error.code, error.kind) == (65, "file_changed")
  assert str(error.fields["path"]) == str(path)


def test_verify_says_how_far_it_is(shared_cache):
  told = []
  shared_cache.open().verify(told.append)
  sizes = [(shared_cache.directory / name).stat().st_size for name in LISTED_FILES]
  assert told == list(itertools.accumulate(sizes))


def test_shards_are_the_same_bytes_when_written_again(shared_cache, tmp_path):
  again = caches.build(tmp_path)
  for path in shared_cache.directory.iterdir():
    assert (again.directory / path.name).read_bytes() == path.read_bytes(), path.name


# Nothing that is read is executed


class Payload:
  """Leaves a file where it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return open, (str(self.path), "w")


@pytest.fixture
def cache_with_pickle(own_cache, tmp_path):
  """A cache whose first lengths file is a signed pickle, and the file that it makes."""
  content = caches.npy(np.array([Payload(tmp_path / "executed")], object), allow_pickle=True)
  path = own_cache.directory / LENGTHS_FILES[0]
  path.write_bytes(content)
  entry = dataclasses.asdict(FileEntry.of(path.name, 13, content))
  caches.tamper(own_cache, lambda document: document["files"]["lengths"].__setitem__(0, entry))
  return own_cache.open(), tmp_path / "executed"


def test_a_pickle_in_place_of_lengths_is_not_loaded(cache_with_pickle):
  cache, executed = cache_with_pickle
  with pytest.raises((ValueError, AnystepError)):
    cache.lengths(0)
  assert not executed.exists()


def test_a_pickle_in_place_of_lengths_is_refused_as_foreseen(cache_with_pickle):
  cache, _ = cache_with_pickle
  assert refusal_of(cache.lengths, 0).code in (65, 77)


@pytest.mark.parametrize(
  "table", [np.zeros((12, 3), np.uint32), np.zeros((13, 2), np.uint32), np.zeros((13, 3), np.float32)]
)
def test_lengths_of_another_form_are_refused(own_cache, table):
  content = caches.npy(table)
  path = own_cache.directory / LENGTHS_FILES[0]
  path.write_bytes(content)
  entry = dataclasses.asdict(FileEntry.of(path.name, 13, content))
  caches.tamper(own_cache, lambda document: document["files"]["lengths"].__setitem__(0, entry))
  error = refusal_of(own_cache.open().lengths, 0)
  assert (error.code, error.kind) == (65, "lengths_form")


def test_offsets_of_another_form_are_refused(tmp_path):
  cache = caches.build(tmp_path, container="tfrecord")
  entry = cache.manifest["files"]["offsets"][0]
  path = cache.directory / entry["name"]
  content = path.read_bytes().replace(b"<u8", b"<i8")
  path.write_bytes(content)
  signed = dataclasses.asdict(FileEntry.of(entry["name"], entry["records"], content))
  assert {**signed, **{name: entry[name] for name in ("sha256", "head_sha256")}} == entry
  caches.tamper(cache, lambda document: document["files"]["offsets"].__setitem__(0, signed))
  error = refusal_of(cache.open().read, np.arange(cache.manifest["num_examples"]))
  assert (error.code, error.kind) == (65, "offsets_form")


def test_the_library_neither_unpickles_nor_evaluates(checkout):
  modules = sorted((checkout / "anystep").rglob("*.py"))
  assert len(modules) > 60
  for path in modules:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, (ast.Import, ast.ImportFrom)):
        imported = {alias.name for alias in node.names} | {getattr(node, "module", None)}
        assert not imported & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, path
      if isinstance(node, ast.Call):
        assert getattr(node.func, "id", "") not in {"eval", "exec", "compile", "__import__"}, path
      if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        assert node.value.value is False, path


def test_a_manifest_that_was_signed_anew_must_still_agree_with_the_files(own_cache):
  caches.tamper(own_cache, lambda document: document["files"]["records"][2].update(bytes=1))
  assert refusal_when_opened(own_cache).kind == "file_size"
  caches.tamper(own_cache, lambda document: document.update(num_examples=51))
  assert refusal_when_opened(own_cache).kind == "manifest_invalid"
  caches.tamper(own_cache, lambda document: document.update(order_version=2))
  assert refusal_when_opened(own_cache).kind == "manifest_version"
