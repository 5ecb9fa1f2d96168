"""The reader of our own reads what array_record writes, and leaves to it what it does not know."""

import os

import numpy as np
import pytest
import zstandard
from array_record.python import array_record_module
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.containers import riegeli_loops
from anystep.containers.array_record_blocks import ArrayRecordBlocks
from anystep.containers.array_record_library import LibraryBlocks
from anystep.containers.containers import ARRAY_RECORD, open_blocks, write_array_record
from anystep.containers.file_ranges import FileRanges
from anystep.errors import AnystepError

# Of the algorithm's own test, for the bytes 0, 1, 2, … under a key of the bytes 0 to 31.
PUBLISHED = {
  0: 0x907A56DE22C26E53,
  1: 0x7EAB43AAC7CDDD78,
  2: 0xB8D0569AB0B53D62,
  3: 0x5C6BEFAB8A463D80,
}


def records_of(seed, count, longest):
  """Records of many lengths, some that compress and some that do not."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(0, longest, count, endpoint=True).tolist()
  return [rng.bytes(n) if k % 2 else bytes([k % 256]) * n for k, n in enumerate(lengths)]


def opened(path, num_records, block_records):
  return open_blocks(ARRAY_RECORD, path, num_records=num_records, block_records=block_records)


def read_all(reader, num_records, block_records):
  return [record for b in range(-(-num_records // block_records)) for record in reader.read_block(b)]


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_hash_is_the_published_one(size):
  key = np.frombuffer(bytes(range(32)), np.uint64)
  assert int(riegeli_loops.highway_hash(np.arange(size, dtype=np.uint8), key)) == PUBLISHED[size]


@given(
  seed=st.integers(0, 2**32 - 1),
  count=st.integers(0, 90),
  longest=st.sampled_from([0, 5, 700, 9000]),
  block_records=st.sampled_from([1, 2, 7, 32]),
  compression=st.sampled_from(["zstd:1", "zstd:5", "uncompressed"]),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_what_array_record_writes_is_read(tmp_path_factory, seed, count, longest, block_records, compression):
  """Chunks begin, end and are interrupted anywhere in the blocks of 64 KiB."""
  path = tmp_path_factory.getbasetemp() / "shard"
  records = records_of(seed, count, longest)
  write_array_record(path, records, options=f"group_size:{block_records},{compression}")
  reader = opened(path, count, block_records)
  assert isinstance(reader, ArrayRecordBlocks)
  assert read_all(reader, count, block_records) == records
  reader.close()


def test_chunks_may_be_larger_than_blocks_of_the_file(tmp_path):
  records = [*records_of(0, 3, 10), np.random.default_rng(1).bytes(300_000), bytes(1_000_000), b"end"]
  write_array_record(tmp_path / "shard", records, options="group_size:4,zstd:1")
  assert read_all(opened(tmp_path / "shard", 6, 4), 6, 4) == records


@pytest.mark.parametrize(
  ("options", "block_records"),
  [
    ("group_size:4,brotli:1", 4),
    ("group_size:4,snappy", 4),
    ("group_size:4,zstd:1,transpose", 4),
    ("group_size:3,zstd:1", 4),
    ("group_size:8,uncompressed", 4),
  ],
)
def test_other_files_are_read_by_the_library(tmp_path, options, block_records):
  records = records_of(0, 30, 200)
  write_array_record(tmp_path / "shard", records, options=options)
  reader = opened(tmp_path / "shard", 30, block_records)
  assert isinstance(reader, LibraryBlocks)
  assert read_all(reader, 30, block_records) == records


def test_without_numba_the_library_reads(tmp_path, monkeypatch):
  records = records_of(0, 30, 200)
  write_array_record(tmp_path / "shard", records, options="group_size:4,zstd:1")
  monkeypatch.setattr("anystep.containers.containers.is_fast", lambda: False)
  reader = opened(tmp_path / "shard", 30, 4)
  assert isinstance(reader, LibraryBlocks)
  assert read_all(reader, 30, 4) == records


def end_of_chunk(content, begin):
  """Where a chunk that no header of the file's blocks interrupts ends."""
  return begin + 40 + int.from_bytes(content[begin + 8 : begin + 16], "little")


def test_every_flipped_bit_of_what_is_read_is_found(tmp_path):
  """Only the file's signature, headers of its blocks and what fills it may change unseen."""
  path, records = tmp_path / "shard", records_of(3, 10, 60)
  write_array_record(path, records, options="group_size:4,zstd:1")
  written = path.read_bytes()
  footer, postscript = opened(path, 10, 4)._begins[-1], len(written) - (1 << 16) + 24
  chunks = [(64, end_of_chunk(written, footer)), (postscript, end_of_chunk(written, postscript))]
  positions = [position for begin, end in chunks for position in range(begin, end)]
  assert len(positions) > 500
  for position in positions:
    damaged = bytearray(written)
    damaged[position] ^= 1 << position % 8
    path.write_bytes(damaged)
    with pytest.raises(AnystepError) as found:
      read_all(ArrayRecordBlocks(str(path), FileRanges(path), num_records=10, block_records=4), 10, 4)
    assert (found.value.code, found.value.kind) == (65, "shard_corrupt"), position


@pytest.mark.parametrize("keep", [0, 1, 65_535, 65_536, 131_071, 1 << 16])
def test_a_file_that_is_cut_is_no_array_record_file(tmp_path, keep):
  path = tmp_path / "shard"
  write_array_record(path, records_of(0, 9, 50), options="group_size:4,zstd:1")
  os.truncate(path, keep)
  with pytest.raises(AnystepError) as refused:
    opened(path, 9, 4)
  assert (refused.value.code, refused.value.kind) == (65, "shard_corrupt")


def chunk(data, num_records, decoded_bytes, *, kind=b"r"):
  """A chunk with right hashes around any data."""
  key = riegeli_loops._KEY

  def hashed(content):
    return int(riegeli_loops.highway_hash(np.frombuffer(content, np.uint8), key)).to_bytes(8, "little")

  rest = len(data).to_bytes(8, "little") + hashed(data) + kind + num_records.to_bytes(7, "little")
  rest += decoded_bytes.to_bytes(8, "little")
  return hashed(rest) + rest + data


@pytest.mark.parametrize(
  "made",
  [
    chunk(b"", 0, 0),
    chunk(b"\0", 1, 1),
    chunk(b"\0\x01", 1, 1),
    chunk(b"\0\x01\x05abc", 1, 5),
    chunk(b"\0\x01\x05abcde", 1, 4),
    chunk(b"\0\x01\x05abcde", 2, 5),
    chunk(b"\0\x02\x05\x00abcde", 1, 5),
    chunk(b"\0\xff\xff\xff\xff\xff\xff\xff\xff\x7fabc", 1, 5),
    chunk(b"\0\x01\xffabcde", 1, 5),
    chunk(b"\0\x01\x05abcde", 2**50, 5),
    chunk(b"\0\x01\x05abcde", 1, 2**63),
    chunk(b"z\x02\x01\x01\x05abcde", 1, 5),
    chunk(b"z\x01\xff\x05abcde", 1, 5),
    chunk(b"z\x0b\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x28\xb5", 1, 5),
  ],
)
def test_chunks_that_lie_under_right_hashes_are_refused(tmp_path, made):
  from anystep.containers.riegeli_chunks import ChunkError, read_chunk

  (tmp_path / "file").write_bytes(bytes(64) + made)
  with pytest.raises(ChunkError):
    read_chunk(FileRanges(tmp_path / "file"), 64, 64 + len(made))


def test_a_chunk_made_here_is_read(tmp_path):
  """So that the refusals above are of what they change."""
  from anystep.containers.riegeli_chunks import read_chunk

  made = chunk(b"\0\x02\x05\x03abcdexyz", 2, 8)
  (tmp_path / "file").write_bytes(bytes(64) + made)
  assert read_chunk(FileRanges(tmp_path / "file"), 64, 64 + len(made)).records() == [b"abcde", b"xyz"]


def test_array_record_reads_the_same_files(tmp_path):
  """The files are still everybody's."""
  records = records_of(5, 50, 300)
  write_array_record(tmp_path / "shard", records, options="group_size:8,zstd:1")
  assert array_record_module.ArrayRecordReader(str(tmp_path / "shard")).read_all() == records


def test_a_chunk_that_promises_more_than_the_limit_is_not_decompressed(tmp_path, monkeypatch):
  """A frame of zeros is a thousandth of what it becomes."""
  from anystep.containers import riegeli_chunks

  monkeypatch.setattr(riegeli_chunks, "MAX_CHUNK_BYTES", 5000)
  frame = zstandard.compress(bytes(6000))
  values = b"\xf0\x2e" + frame
  sizes = b"\x02" + zstandard.compress(b"\xf0\x2e")
  made = chunk(b"z" + bytes([len(sizes)]) + sizes + values, 1, 6000)
  assert len(made) < 200
  (tmp_path / "file").write_bytes(bytes(64) + made)
  with pytest.raises(riegeli_chunks.ChunkError, match="beyond the limits"):
    riegeli_chunks.read_chunk(FileRanges(tmp_path / "file"), 64, 64 + len(made))
  monkeypatch.setattr(riegeli_chunks, "MAX_CHUNK_BYTES", 6000)
  read = riegeli_chunks.read_chunk(FileRanges(tmp_path / "file"), 64, 64 + len(made))
  assert read.records() == [bytes(6000)]
