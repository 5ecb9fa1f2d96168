"""Containers give the records that were written, whole blocks or single ones, or say what is wrong."""

import concurrent.futures
import errno
import functools
import os
import pathlib
import shutil

import caches
import numpy as np
import pytest
import tensorflow as tf
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from store_servers.served_folders import served_folder

from anystep.containers.array_record_library import open_reader
from anystep.containers.containers import (
  ARRAY_RECORD,
  CONTAINERS,
  TFRECORD,
  container_options,
  open_blocks,
  write_shard,
)
from anystep.errors import AnystepError

# Of many lengths, the empty one and one beyond 64 KiB among them, and some that Zstandard shrinks.
RECORDS = [
  b"",
  *(b"record %d " % k * (k * 7 % 13) for k in range(20)),
  np.random.default_rng(0).bytes(70_000),
  b"\0" * 5000,
  b"last",
]


class Shard:
  """A file of one container and what opens it."""

  def __init__(self, container, path, records, block_records):
    self.path, self.num_records = path, len(records)
    options = container_options(container, block_records)
    self.offsets = write_shard(container, path, records, options=options)
    self._open = functools.partial(open_blocks, container, path, block_records=block_records)

  def open(self, **changes):
    return self._open(**{"num_records": self.num_records, "offsets": self.offsets} | changes)


@pytest.fixture(params=CONTAINERS)
def container(request):
  return request.param


@pytest.fixture
def shard_of(container, tmp_path):
  """`shard_of(records, block_records)`: a new file."""
  return lambda records, block_records=4: Shard(container, tmp_path / "shard", records, block_records)


def refusal_of(action, *arguments, **named):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **named)
  assert refused.value.fix
  return refused.value


def all_records(reader, num_records, block_records):
  return [record for b in range(-(-num_records // block_records)) for record in reader.read_block(b)]


# What every container does


@pytest.mark.parametrize("block_records", [1, 4, 5, 24, 100])
def test_blocks_are_whole_and_the_last_one_is_short(shard_of, block_records):
  reader = shard_of(RECORDS, block_records).open()
  blocks = [RECORDS[start : start + block_records] for start in range(0, len(RECORDS), block_records)]
  for block in [*range(len(blocks)), *reversed(range(len(blocks)))]:
    assert reader.read_block(block) == blocks[block]


def test_blocks_need_not_be_those_that_the_file_was_written_with(shard_of):
  shard = shard_of(RECORDS, 4)
  reader = shard.open(block_records=7)
  assert all_records(reader, len(RECORDS), 7) == RECORDS


@given(places=st.lists(st.integers(0, len(RECORDS) - 1), max_size=12))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_single_records_are_read_in_the_order_asked_for(shared_readers, places):
  for reader in shared_readers:
    assert reader.read_records(places) == [RECORDS[place] for place in places]
    assert reader.read_records(np.array(places, np.int64)) == [RECORDS[place] for place in places]


@pytest.fixture(scope="module")
def shared_readers(tmp_path_factory):
  folder = tmp_path_factory.mktemp("shards")
  return [Shard(container, folder / container, RECORDS, 4).open() for container in CONTAINERS]


def test_a_shard_may_be_empty(shard_of):
  reader = shard_of([]).open()
  assert reader.read_records([]) == []
  with pytest.raises(IndexError, match="no block 0"):
    reader.read_block(0)
  reader.close()


@pytest.mark.parametrize("block", [-1, 6, 10**9])
def test_a_block_outside_is_refused(shard_of, block):
  with pytest.raises(IndexError, match=f"no block {block} "):
    shard_of(RECORDS).open().read_block(block)


@pytest.mark.parametrize("place", [-1, 24, 10**9])
def test_a_place_outside_is_refused(shard_of, place):
  with pytest.raises(IndexError, match=f"no record {place} "):
    shard_of(RECORDS).open().read_records([0, place])


@pytest.mark.parametrize("num_records", [23, 25, 0])
def test_another_number_of_records_is_refused(shard_of, num_records):
  shard = shard_of(RECORDS)
  error = refusal_of(shard.open, num_records=num_records)
  assert (error.code, error.kind) == (65, "shard_records")
  assert error.fields == {"path": str(shard.path), "expected": num_records, "got": 24}


@pytest.mark.parametrize("keep", [0, 1, 11, 0.3, 0.5, 0.9, -16, -1])
def test_a_truncated_file_is_refused(shard_of, keep):
  shard = shard_of(RECORDS)
  size = shard.path.stat().st_size
  os.truncate(shard.path, int(size * keep) if isinstance(keep, float) else keep % size)
  error = refusal_of(lambda: all_records(shard.open(), 24, 4))
  assert error.code == 65
  assert error.kind in ("shard_corrupt", "shard_records", "offsets_invalid")
  assert error.fields["path"] == str(shard.path)


@pytest.mark.parametrize("keep", [0, 0.1, 0.4, 0.5])
def test_a_file_truncated_while_it_is_open_gives_no_other_records(shard_of, keep):
  records = [np.random.default_rng(k).bytes(30_000) for k in range(100)]
  shard = shard_of(records)
  reader = shard.open()
  os.truncate(shard.path, int(shard.path.stat().st_size * keep))
  # ArrayRecord has read the last megabyte of the file to open it, and may know some of it still.
  for block in range(13, 25):
    error = refusal_of(reader.read_block, block)
    assert (error.code, error.kind) == (65, "shard_corrupt")
    assert error.fields["path"] == str(shard.path)
  assert refusal_of(reader.read_records, [60]).kind == "shard_corrupt"
  for block in range(int(25 * keep)):
    assert reader.read_block(block) == records[4 * block : 4 * block + 4]


@pytest.mark.parametrize("content", [b"no shard", bytes(200_000)], ids=["text", "zeros"])
@pytest.mark.parametrize("records", [RECORDS, []], ids=["some", "empty"])
def test_a_file_that_is_no_shard_is_refused(shard_of, content, records):
  shard = shard_of(records)
  shard.path.write_bytes(content)
  error = refusal_of(lambda: shard.open().read_block(0))
  assert error.code == 65
  assert error.kind in ("shard_corrupt", "shard_records", "offsets_invalid")
  assert error.fields["path"] == str(shard.path)


@pytest.mark.parametrize("records", [RECORDS, []], ids=["some", "empty"])
def test_a_file_that_is_not_there_is_refused(shard_of, records):
  shard = shard_of(records)
  shard.path.unlink()
  error = refusal_of(shard.open)
  assert error.code == 65
  assert error.kind in ("shard_corrupt", "shard_records")
  assert error.fields["path"] == str(shard.path)


def positions_of(content):
  """All but those within long runs of zeros, of which every thousandth."""
  near = np.convolve(np.frombuffer(content, np.uint8) != 0, np.ones(65), "same") > 0
  return sorted({*np.nonzero(near)[0].tolist(), *range(0, len(content), 1009)})


def test_no_flipped_byte_gives_other_records(shard_of, container):
  records = [b"record %d" % k * (k % 3) for k in range(8)]
  shard = shard_of(records, 3)
  written = shard.path.read_bytes()
  outcomes = {}
  for position in positions_of(written):
    caches.flip(shard.path, position, 1 << position % 8)
    try:
      reader = shard.open()
      outcomes[position] = "same" if all_records(reader, 8, 3) == records else "other"
      reader.close()
    except AnystepError as error:
      outcomes[position] = error.kind
    shard.path.write_bytes(written)
  assert len(outcomes) > 150
  if container == TFRECORD:
    assert set(outcomes.values()) == {"shard_corrupt"}
  else:
    # Some bytes only fill a block of the file or say how it was written.
    assert set(outcomes.values()) == {"shard_corrupt", "same"}


def test_a_flipped_byte_leaves_other_blocks_readable(shard_of):
  records = [np.random.default_rng(k).bytes(3000) for k in range(40)]
  shard = shard_of(records, 4)
  caches.flip(shard.path, shard.path.read_bytes().index(records[17][1000:1100]))
  reader = shard.open()
  for block in range(10):
    if block == 4:
      error = refusal_of(reader.read_block, block)
      assert (error.code, error.kind) == (65, "shard_corrupt")
      assert error.fields["path"] == str(shard.path)
      assert error.fields["got"]
    else:
      assert reader.read_block(block) == records[4 * block : 4 * block + 4]
  assert refusal_of(reader.read_records, [0, 17]).kind == "shard_corrupt"
  assert reader.read_records([0, 39]) == [records[0], records[39]]


def test_threads_read_what_one_reads(shard_of):
  records = [b"%d " % k * 50 for k in range(400)]
  reader = shard_of(records, 8).open()

  def read(seed):
    for block in np.random.default_rng(seed).permutation(50).tolist():
      assert reader.read_block(block) == records[8 * block : 8 * block + 8]
      assert reader.read_records([block, 399 - block]) == [records[block], records[399 - block]]

  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    assert list(threads.map(read, range(16))) == [None] * 16


def test_a_closed_reader_holds_no_file_and_reads_nothing(shard_of):
  shard = shard_of(RECORDS)

  def times_open():
    return sum(path.resolve() == shard.path for path in pathlib.Path("/proc/self/fd").iterdir())

  readers = [shard.open() for _ in range(10)]
  assert times_open() == 10
  for reader in readers:
    reader.close()
    reader.close()
  assert times_open() == 0
  with pytest.raises((AnystepError, ValueError)):
    readers[0].read_block(0)


def test_bytes_depend_on_the_records_alone(container, tmp_path):
  options = container_options(container, 4)
  written = []
  for name, records in {"a": RECORDS, "another/b": list(RECORDS), "c": RECORDS[:-1]}.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write_shard(container, epath.Path(path), records, options=options)
    written.append(path.read_bytes())
  assert written[0] == written[1] != written[2]


def test_the_index_is_small_and_grows_with_the_file(shard_of):
  assert shard_of([]).open().index_bytes == 0
  assert shard_of(RECORDS, 1).open().index_bytes == 8 * len(RECORDS)


@pytest.mark.parametrize("unknown", ["sstable", "", None])
def test_an_unknown_container_is_refused(tmp_path, unknown):
  for action in (
    lambda: container_options(unknown, 4),
    lambda: write_shard(unknown, tmp_path / "shard", [], options=""),
    lambda: open_blocks(unknown, tmp_path / "shard", num_records=0, block_records=4),
  ):
    with pytest.raises(ValueError, match=f"got {unknown!r}"):
      action()


# ArrayRecord


def test_an_array_records_chunks_are_blocks(tmp_path):
  assert container_options(ARRAY_RECORD, 5) == "group_size:5,zstd:1"
  shard = Shard(ARRAY_RECORD, tmp_path / "shard", RECORDS, 5)
  assert shard.offsets is None
  options = open_reader(shard.path).writer_options_string()
  assert options.startswith("group_size:5,")
  assert ",zstd:1," in options


# TFRecord


@pytest.fixture
def tfrecord(tmp_path):
  return Shard(TFRECORD, tmp_path / "shard", RECORDS, 4)


def test_tensorflow_reads_a_tfrecord_file(tfrecord):
  assert list(tf.data.TFRecordDataset(str(tfrecord.path)).as_numpy_iterator()) == RECORDS


def test_a_tfrecord_file_is_the_same_bytes_as_tensorflows(tfrecord, tmp_path):
  with tf.io.TFRecordWriter(str(tmp_path / "tensorflows")) as writer:
    for record in RECORDS:
      writer.write(record)
  assert (tmp_path / "tensorflows").read_bytes() == tfrecord.path.read_bytes()


def test_offsets_are_where_each_records_framing_starts(tfrecord):
  assert (tfrecord.offsets.dtype, tfrecord.offsets.shape) == (np.uint64, (len(RECORDS),))
  content = tfrecord.path.read_bytes()
  for offset, record in zip(tfrecord.offsets.tolist(), RECORDS, strict=True):
    assert content[offset : offset + 8] == len(record).to_bytes(8, "little")
    assert content[offset + 12 : offset + 12 + len(record)] == record


def test_offsets_of_an_empty_tfrecord_file_are_none(tmp_path):
  shard = Shard(TFRECORD, tmp_path / "shard", [], 4)
  assert (shard.offsets.dtype, shard.offsets.shape) == (np.uint64, (0,))
  assert shard.path.read_bytes() == b""


def test_a_tfrecord_file_has_no_options_and_needs_offsets(tfrecord, tmp_path):
  assert container_options(TFRECORD, 5) == ""
  with pytest.raises(ValueError, match="group_size"):
    write_shard(TFRECORD, tmp_path / "other", [], options="group_size:5")
  with pytest.raises(ValueError, match="offsets"):
    tfrecord.open(offsets=None)


def test_offsets_may_be_a_memory_map(tfrecord, tmp_path):
  np.save(tmp_path / "offsets.npy", tfrecord.offsets)
  reader = tfrecord.open(offsets=np.load(tmp_path / "offsets.npy", mmap_mode="r"))
  assert all_records(reader, len(RECORDS), 4) == RECORDS


def changed(offsets, **at):
  offsets = offsets.copy()
  for place, value in at.items():
    offsets[int(place.removeprefix("at_"))] = value
  return offsets


# Four that turn once around 2^64 and so ascend by differences alone.
AROUND = np.array([0, 2**62, 2**63, 2**63 + 2**62], np.uint64)


@pytest.mark.parametrize(
  ("change", "got"),
  [
    (lambda offsets: changed(offsets, at_0=16), "the first at 16"),
    (lambda offsets: changed(offsets, at_5=offsets[4]), "no room for record 4 at "),
    (lambda offsets: changed(offsets, at_5=offsets[4] + np.uint64(15)), "no room for record 4 at "),
    (lambda offsets: changed(offsets, at_5=offsets[7]), "no room for record 5 at "),
    (lambda offsets: np.concatenate([offsets[:1], offsets[:0:-1]]), "no room for record 1 at "),
    (lambda offsets: changed(offsets, at_23=10**6), "one at 1000000"),
    (lambda offsets: changed(offsets, at_23=2**64 - 1), "one at 18446744073709551615"),
    (lambda offsets: changed(offsets, at_23=76_000), "one at 76000"),
    (lambda offsets: np.concatenate([AROUND, offsets[4:]]), "one at 13835058055282163712"),
    (lambda offsets: offsets.astype(np.int64), "(24,) int64"),
    (lambda offsets: offsets.astype(">u8"), "(24,) >u8"),
    (lambda offsets: offsets.reshape(24, 1), "(24, 1) uint64"),
  ],
)
def test_offsets_that_are_none_are_refused(tfrecord, change, got):
  if got == "one at 76000":
    os.truncate(tfrecord.path, 76_000)
  error = refusal_of(tfrecord.open, offsets=change(tfrecord.offsets))
  assert (error.code, error.kind) == (65, "offsets_invalid")
  assert error.fields["path"] == str(tfrecord.path)
  assert error.fields["expected"]
  assert error.fields["got"].startswith(got)


def test_a_file_that_should_be_empty_and_is_not_is_refused(tmp_path):
  shard = Shard(TFRECORD, tmp_path / "shard", [], 4)
  shard.path.write_bytes(b"x")
  error = refusal_of(shard.open)
  assert (error.code, error.kind) == (65, "offsets_invalid")


def test_a_file_that_is_refused_is_closed(tfrecord):
  error = refusal_of(tfrecord.open, offsets=changed(tfrecord.offsets, at_0=16))
  # The error's traceback holds the reader.
  assert error.__traceback__
  assert all(path.resolve() != tfrecord.path for path in pathlib.Path("/proc/self/fd").iterdir())


def test_offsets_within_records_are_found_when_they_are_read(tfrecord):
  reader = tfrecord.open(offsets=changed(tfrecord.offsets, at_22=tfrecord.offsets[22] - np.uint64(1)))
  assert reader.read_block(4) == RECORDS[16:20]
  error = refusal_of(reader.read_block, 5)
  assert (error.code, error.kind, error.fields["place"]) == (65, "shard_corrupt", 21)


@pytest.mark.parametrize("more", [b"x", b"\0" * 16, b"\0" * 16000])
def test_what_follows_the_last_record_is_found_when_it_is_read(tfrecord, more):
  with tfrecord.path.open("ab") as file:
    file.write(more)
  reader = tfrecord.open()
  assert reader.read_records([22]) == [RECORDS[22]]
  assert refusal_of(reader.read_records, [23]).fields["place"] == 23


@pytest.mark.parametrize(
  ("position", "got"),
  [(0, "length"), (7, "length"), (8, "length"), (11, "length"), (12, "data"), (-4, "data"), (-1, "data")],
)
def test_a_corrupt_record_is_named_with_what_is_wrong_of_it(tfrecord, position, got):
  start, stop = tfrecord.offsets[10:12].tolist()
  caches.flip(tfrecord.path, (start if position >= 0 else stop) + position)
  error = refusal_of(tfrecord.open().read_block, 2)
  assert (error.code, error.kind) == (65, "shard_corrupt")
  assert (error.fields["path"], error.fields["place"]) == (str(tfrecord.path), 10)
  assert got in error.fields["got"]


def test_a_block_is_one_read_of_its_bytes_alone(tfrecord, monkeypatch):
  reads, pread = [], os.pread
  monkeypatch.setattr(os, "pread", lambda fd, size, at: reads.append((at, at + size)) or pread(fd, size, at))
  reader = tfrecord.open()
  bounds = [*tfrecord.offsets.tolist(), tfrecord.path.stat().st_size]
  for block in range(6):
    reader.read_block(block)
  reader.read_records([7, 23])
  blocks = [(bounds[4 * block], bounds[4 * block + 4]) for block in range(6)]
  assert reads == [*blocks, (bounds[7], bounds[8]), (bounds[23], bounds[24])]


def test_a_read_that_gives_less_is_continued(tfrecord, monkeypatch):
  pread = os.pread
  monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 1000), at))
  assert all_records(tfrecord.open(), len(RECORDS), 4) == RECORDS


def test_a_disk_that_fails_is_not_taken_for_a_corrupt_file(tfrecord, monkeypatch):
  reader = tfrecord.open()

  def fail(*arguments):
    raise OSError(errno.EIO, "Input/output error")

  monkeypatch.setattr(os, "pread", fail)
  error = refusal_of(reader.read_block, 0)
  assert (error.code, error.kind) == (74, "shard_unreadable")
  assert error.fields["path"] == str(tfrecord.path)
  assert "Input/output error" in error.fields["got"]


def test_a_file_that_cannot_be_opened_is_not_taken_for_a_corrupt_one(tfrecord, tmp_path):
  tfrecord.path.unlink()
  tfrecord.path.mkdir()
  error = refusal_of(tfrecord.open)
  assert (error.code, error.kind) == (74, "shard_unreadable")
  assert error.fields["path"] == str(tfrecord.path)


def test_an_object_on_a_store_is_read_by_ranges(tfrecord, tmp_path):
  with served_folder(tmp_path / "served") as served:
    (served.folder / "bucket").mkdir()
    shutil.copy(tfrecord.path, served.folder / "bucket")
    path = served.path(served.folder / "bucket" / tfrecord.path.name)
    reader = open_blocks(
      TFRECORD, path, num_records=tfrecord.num_records, block_records=4, offsets=tfrecord.offsets
    )

    def read(seed):
      for block in np.random.default_rng(seed).permutation(6).tolist():
        assert reader.read_block(block) == RECORDS[4 * block : 4 * block + 4]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
      assert list(threads.map(read, range(20))) == [None] * 20
    reader.close()
    # Its size, and a request for each block.
    assert served.take_requests() == {"HEAD": 1, "GET": 120}


def test_an_object_in_other_chunks_than_blocks_is_read_whole(tmp_path):
  with served_folder(tmp_path / "served") as served:
    path = served.folder / "bucket" / "file"
    path.parent.mkdir()
    write_shard(ARRAY_RECORD, path, RECORDS, options="group_size:1,uncompressed")
    reader = open_blocks(ARRAY_RECORD, served.path(path), num_records=len(RECORDS), block_records=4)
    assert reader.read_block(1) == RECORDS[4:8]
    assert reader.spans(4, 8) == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_spans_are_what_reading_reads(container, tmp_path, monkeypatch):
  shard = Shard(container, tmp_path / "shard", RECORDS, 4)
  reader = shard.open()
  read, pread = [], os.pread
  monkeypatch.setattr(os, "pread", lambda file, n, at: read.append((at, at + n)) or pread(file, n, at))
  for start, stop in ((0, 4), (4, 8), (20, len(RECORDS)), (8, 20)):
    read.clear()
    for block in range(start // 4, -(-stop // 4)):
      reader.read_block(block)
    (span,) = reader.spans(start, stop)
    assert span == (min(read)[0], max(read)[1])
