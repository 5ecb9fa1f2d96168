"""Parquet files give their rows as records, and any other bytes than those that were indexed are refused."""

import concurrent.futures
import errno
import io
import os
import sys

import caches
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.containers.checked_file import PART_BYTES, CheckedFile, part_checksums, part_table
from anystep.containers.containers import PARQUET, open_blocks
from anystep.containers.file_ranges import FileRanges
from anystep.errors import AnystepError
from anystep.features.feature import Feature
from anystep.records import parquet_rows
from anystep.records.parquet_rows import open_parquet
from anystep.records.parsing import parse_example, parse_examples
from anystep.records.writing import serialize_example

ROWS = 57


def values_of(kind, row):
  """A row's values of a kind: of other numbers in other rows, of other counts, some of none."""
  count = row * 5 % 7
  if kind == pa.bool_():
    return [(row + k) % 3 == 0 for k in range(count)]
  if pa.types.is_floating(kind):
    return [np.float16(row + k / 4).item() for k in range(count)]
  if pa.types.is_integer(kind):
    largest = np.iinfo(str(kind)).max
    return [(largest - row - k) if k % 2 else row for k in range(count)]
  if kind == pa.binary(3):
    return [b"%03d" % (row + k) for k in range(count)]
  texts = [f"tëxt {row} " * k for k in range(count)]
  return texts if "string" in str(kind) else [text.encode() + b"\0\xff" for text in texts]


INTEGERS = {pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()}
TEXTS = {pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3)}
KINDS = sorted({*INTEGERS, pa.bool_(), pa.float16(), pa.float32(), *TEXTS}, key=str)
DTYPES = {"halffloat": "float16", "float": "float32"} | {str(kind): "string" for kind in TEXTS}


def columns_of(kind):
  """Columns of a kind in every form, with the values that a reader is to give."""
  lists = [values_of(kind, row) for row in range(ROWS)]
  fixed = [(values_of(kind, row) + values_of(kind, 1) * 2)[:4] for row in range(ROWS)]
  pairs = [[fixed[row][:2], fixed[row][2:]] * (row % 3) for row in range(ROWS)]
  return {
    "plain": ([values[0] for values in fixed], kind, ()),
    "list": (lists, pa.list_(kind), (None,)),
    "large list": (lists, pa.large_list(kind), (None,)),
    "fixed": (fixed, pa.list_(kind, 4), (4,)),
    "pairs": (pairs, pa.list_(pa.list_(kind, 2)), (None, 2)),
  }


def table_of(rows):
  places = range(rows)
  return pa.table(
    {
      "number": pa.array(places, pa.int64()),
      "tokens": pa.array([list(range(k % 9)) for k in places], pa.list_(pa.int32())),
      "text": pa.array([f"row {k}" for k in places], pa.string()),
    }
  )


def record_of(row, columns=("number", "text", "tokens")):
  example = {"number": row, "text": f"row {row}", "tokens": np.arange(row % 9)}
  return serialize_example({name: example[name] for name in columns})


class File:
  """A Parquet file, and what opens it."""

  def __init__(self, path, table, **options):
    self.path = path
    pq.write_table(table, path, **options)
    self.num_records = len(table)
    self.offsets = part_table(part_checksums(path.read_bytes()))

  def open(self, **changes):
    arguments = {
      "num_records": self.num_records,
      "block_records": 10,
      "offsets": self.offsets,
      "columns": ("number", "text", "tokens"),
    }
    return open_blocks(PARQUET, self.path, **arguments | changes)


@pytest.fixture(scope="module")
def shared_file(tmp_path_factory):
  return File(tmp_path_factory.mktemp("shards") / "shard", table_of(95), row_group_size=10)


def refusal_of(action, *arguments, **named):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **named)
  assert refused.value.fix
  return refused.value


# Values


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("encoding", ["plain", "dictionary"])
def test_values_of_every_type_come_back_through_records(tmp_path, kind, encoding):
  columns = columns_of(kind)
  table = pa.table({name: pa.array(values, form) for name, (values, form, _) in columns.items()})
  dictionary = encoding == "dictionary" and kind != pa.bool_()
  pq.write_table(table, tmp_path / "file", row_group_size=20, use_dictionary=dictionary)
  rows = open_parquet(tmp_path / "file")
  dtype = DTYPES.get(str(kind), str(kind))
  features = {name: Feature(dtype=dtype, shape=shape) for name, (_, _, shape) in columns.items()}
  assert rows.features == features
  rows.check_records()
  records = rows.read_records(np.arange(ROWS))
  assert len(records) == len(rows) == ROWS
  for row, record in enumerate(records):
    for name, found in parse_example(record, features).items():
      values = columns[name][0][row]
      if dtype == "string":
        encode = np.vectorize(lambda text: text.encode() if isinstance(text, str) else text, otypes=[object])
        expected = encode(np.array(values, object)) if np.size(values) else np.zeros(0, object)
      else:
        expected = np.array(values, dtype)
      shape = (-1, *features[name].shape[1:]) if features[name].shape else ()
      assert caches.same_array(found, expected.reshape(shape)), (name, row)


def test_a_record_is_what_the_serializer_makes_of_the_columns(shared_file):
  assert shared_file.open().read_records(range(95)) == [record_of(row) for row in range(95)]
  some = shared_file.open(columns=["tokens"])
  assert some.read_block(3) == [record_of(row, ["tokens"]) for row in range(30, 40)]


def test_batches_are_the_rows(shared_file):
  batches = list(open_parquet(shared_file.path).batches())
  assert np.concatenate([batch["number"] for batch in batches]).tolist() == list(range(95))
  tokens = [row.tolist() for batch in batches for row in batch["tokens"].rows()]
  assert tokens == [list(range(row % 9)) for row in range(95)]


# Columns that are refused

REFUSED = {
  "struct": pa.array([{"a": 1}]),
  "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
  "dictionary": pa.array(["a"]).dictionary_encode(),
  "timestamp": pa.array([1], pa.timestamp("s")),
  "date": pa.array([1], pa.date32()),
  "decimal": pa.array([1], pa.decimal128(5, 2)),
  "lists of lists": pa.array([[[1], [2, 3]]]),
  "list of structs": pa.array([[{"a": 1}]]),
  "nothing": pa.array([None], pa.null()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_that_is_no_feature_is_refused_unless_it_is_not_read(tmp_path, name):
  path = tmp_path / "file"
  pq.write_table(pa.table({"good": [1], name: REFUSED[name]}), path)
  error = refusal_of(open_parquet, path)
  assert (error.code, error.kind, error.fields["feature"]) == (78, "feature_form", name)
  assert error.fields["path"] == path
  assert len(open_parquet(path, ["good"])) == 1


@pytest.mark.parametrize("kind", [pa.float64(), pa.uint64(), pa.list_(pa.float64())], ids=str)
def test_a_column_that_a_record_would_round_is_no_record_s(tmp_path, kind):
  path = tmp_path / "file"
  pq.write_table(pa.table({"wide": pa.array([[1]] if pa.types.is_list(kind) else [1], kind)}), path)
  error = refusal_of(open_parquet(path).check_records)
  assert (error.code, error.kind, error.fields["feature"]) == (78, "feature_form", "wide")
  assert error.fields["got"] in ("float64", "uint64")


WITH_NULLS = {
  "plain": [1, None, 3],
  "lists": [[1], None, []],
  "in lists": [[1], [2, None], []],
  "texts": ["", None, "a"],
}


@pytest.mark.parametrize("statistics", [True, False], ids=["with_statistics", "without"])
@pytest.mark.parametrize("name", WITH_NULLS)
def test_a_null_is_refused_before_and_while_records_are_read(tmp_path, name, statistics):
  path = tmp_path / "file"
  table = pa.table({"good": [1, 2, 3], name: WITH_NULLS[name]})
  pq.write_table(table, path, write_statistics=statistics)
  rows = open_parquet(path)
  for action in (rows.check_records, lambda: rows.read_records(np.arange(3))):
    error = refusal_of(action)
    assert (error.code, error.kind, error.fields["feature"]) == (65, "column_null", name)
  open_parquet(path, ["good"]).check_records()


def test_columns_without_nulls_are_not_read_to_know_it(shared_file, monkeypatch):
  rows = open_parquet(shared_file.path, ["number", "text"])
  monkeypatch.setattr(type(rows), "_decode_group", None)
  rows.check_records()


@pytest.mark.parametrize("columns", [["a"], ["a", "absent"]])
def test_a_column_that_is_there_twice_or_not_at_all_is_refused(tmp_path, columns):
  twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a" if columns == ["a"] else "b"])
  pq.write_table(twice, tmp_path / "file")
  error = refusal_of(open_parquet, tmp_path / "file", columns)
  assert (error.code, error.kind, error.fields["feature"]) == (78, "column_missing", columns[-1])


def test_columns_named_alike_are_told_apart(tmp_path):
  table = pa.table({"a": [1], "a.b": [[2, 3]], "a.list.element": [4]})
  pq.write_table(table, tmp_path / "file")
  for name, value in {"a": 1, "a.b": [2, 3], "a.list.element": 4}.items():
    (batch,) = open_parquet(tmp_path / "file", [name]).batches()
    assert list(batch) == [name]
    assert np.array_equal(getattr(batch[name], "values", batch[name]), np.atleast_1d(value))


# Blocks


@pytest.mark.parametrize("block_records", [1, 7, 10, 30, 95, 200])
def test_blocks_are_whole_whatever_the_row_groups(shared_file, block_records):
  reader = shared_file.open(block_records=block_records)
  for block in range(-(-95 // block_records)):
    rows = range(95)[block * block_records : (block + 1) * block_records]
    assert reader.read_block(block) == [record_of(row) for row in rows]
  with pytest.raises(IndexError, match="no block"):
    reader.read_block(-(-95 // block_records))


@given(places=st.lists(st.integers(0, 94), max_size=12))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_single_records_are_read_in_the_order_asked_for(shared_file, places):
  assert shared_file.open().read_records(places) == [record_of(place) for place in places]


@pytest.mark.parametrize("place", [-1, 95])
def test_a_place_outside_is_refused(shared_file, place):
  with pytest.raises(IndexError, match=f"no record {place} "):
    shared_file.open().read_records([0, place])


@pytest.fixture
def decoded_rows(monkeypatch):
  """The sizes of the batches that were decoded, by row group."""
  found = []
  decode = parquet_rows.ParquetRows._decode_group

  def seen(rows, group, *arguments, **named):
    sizes = []
    found.append((group, sizes))
    for batch in decode(rows, group, *arguments, **named):
      sizes.append(len(batch))
      yield batch

  monkeypatch.setattr(parquet_rows.ParquetRows, "_decode_group", seen)
  return found


def test_a_row_group_is_decoded_once_for_all_records_wanted_of_it(shared_file, decoded_rows):
  reader = shared_file.open()
  reader.read_records([94, 3, 31, 5, 3, 38])
  assert decoded_rows == [(0, [2]), (3, [2]), (9, [1])]
  decoded_rows.clear()
  reader.read_block(4)
  assert decoded_rows == [(4, [10])]


def test_a_large_row_group_is_decoded_some_rows_at_a_time(tmp_path, monkeypatch, decoded_rows):
  monkeypatch.setattr(parquet_rows, "_DECODED_BYTES", 1 << 16)
  table = table_of(3000).append_column("blob", [[np.random.default_rng(k).bytes(500) for k in range(3000)]])
  file = File(tmp_path / "file", table)
  reader = file.open(columns=["blob"], block_records=3000)
  assert len(reader.read_block(0)) == 3000
  ((_, sizes),) = decoded_rows
  assert max(sizes) * 500 < 1 << 16
  assert sum(sizes) == 3000


def test_a_file_may_be_empty(tmp_path):
  reader = File(tmp_path / "file", table_of(0)).open()
  assert reader.read_records([]) == []
  with pytest.raises(IndexError, match="no block 0"):
    reader.read_block(0)
  reader.close()


def test_threads_read_what_one_reads(shared_file):
  reader = shared_file.open()

  def read(seed):
    for block in np.random.default_rng(seed).permutation(9).tolist():
      assert reader.read_block(block) == [record_of(row) for row in range(10 * block, 10 * block + 10)]

  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    assert list(threads.map(read, range(8))) == [None] * 8


def test_a_closed_reader_reads_nothing(shared_file):
  reader = shared_file.open()
  reader.close()
  reader.close()
  with pytest.raises((AnystepError, ValueError)):
    reader.read_block(0)


# Damage


def test_no_flipped_byte_gives_other_records(tmp_path):
  file = File(tmp_path / "file", table_of(40), row_group_size=10, compression="none")
  written = file.path.read_bytes()
  for position in range(0, len(written), 13):
    caches.flip(file.path, position, 1 << position % 8)
    error = refusal_of(lambda: [file.open().read_block(block) for block in range(4)])
    assert (error.code, error.kind) == (65, "shard_corrupt")
    assert error.fields["path"] == str(file.path)
    file.path.write_bytes(written)


@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.9, -8, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
  file = File(tmp_path / "file", table_of(95), row_group_size=10)
  size = file.path.stat().st_size
  os.truncate(file.path, int(size * keep) if isinstance(keep, float) else keep % size)
  error = refusal_of(file.open)
  assert error.code == 65
  assert error.kind in ("shard_corrupt", "offsets_invalid")


def large_file(path):
  """A file of several parts in each row group."""
  blobs = [[np.random.default_rng(k).bytes(20_000) for k in range(60)]]
  return File(path, table_of(60).append_column("blob", blobs), row_group_size=10, compression="none")


def test_a_changed_row_group_leaves_others_readable(tmp_path):
  file = large_file(tmp_path / "file")
  blob = np.random.default_rng(35).bytes(20_000)
  caches.flip(file.path, file.path.read_bytes().index(blob) + 9000)
  reader = file.open(columns=["blob", "number"])
  for block in range(6):
    if block == 3:
      error = refusal_of(reader.read_block, block)
      assert (error.code, error.kind) == (65, "shard_corrupt")
      assert error.fields["offset"] % PART_BYTES == 0
    elif abs(block - 3) > 1:
      # A part may belong to two row groups that stand side by side.
      assert len(reader.read_block(block)) == 10


def test_a_file_truncated_while_it_is_open_gives_no_other_records(tmp_path):
  file = large_file(tmp_path / "file")
  reader = file.open(columns=["blob"])
  os.truncate(file.path, file.path.stat().st_size // 2)
  assert len(reader.read_block(0)) == 10
  assert refusal_of(reader.read_block, 5).kind == "shard_corrupt"
  assert refusal_of(reader.read_records, [55]).kind == "shard_corrupt"


def test_another_number_of_records_is_refused(shared_file):
  error = refusal_of(shared_file.open, num_records=94)
  assert (error.code, error.kind) == (65, "shard_records")
  assert (error.fields["expected"], error.fields["got"]) == (94, 95)


def test_a_file_that_is_none_is_refused_whatever_its_checksums(tmp_path):
  path = tmp_path / "file"
  for content in (b"PAR1 but no more of it PAR1", b"", bytes(100_000)):
    path.write_bytes(content)
    offsets = part_table(part_checksums(content))
    error = refusal_of(open_blocks, PARQUET, path, num_records=0, block_records=1, offsets=offsets)
    assert (error.code, error.kind) == (65, "shard_corrupt")
    assert refusal_of(open_parquet, path).kind == "file_container"
  path.unlink()
  assert refusal_of(open_blocks, PARQUET, path, num_records=0, block_records=1, offsets=offsets).code == 65


@pytest.mark.parametrize(
  "change",
  [
    lambda table: table[:0],
    lambda table: table.astype(np.int64),
    lambda table: table[:, 1],
    lambda table: np.concatenate([table, table + np.uint64(PART_BYTES)]),
    lambda table: table + np.array([1, 0], np.uint64),
  ],
  ids=["none", "int64", "one_column", "more", "moved"],
)
def test_a_table_of_parts_that_is_not_the_file_s_is_refused(shared_file, change):
  error = refusal_of(shared_file.open, offsets=change(shared_file.offsets))
  assert (error.code, error.kind) == (65, "offsets_invalid")


def test_a_file_is_opened_with_the_table_of_its_parts(shared_file):
  with pytest.raises(ValueError, match="offsets"):
    shared_file.open(offsets=None)


def test_a_disk_that_fails_is_not_taken_for_a_changed_file(shared_file, monkeypatch):
  reader = shared_file.open()

  def fail(*arguments):
    raise OSError(errno.EIO, "Input/output error")

  monkeypatch.setattr(os, "pread", fail)
  error = refusal_of(reader.read_block, 0)
  assert (error.code, error.kind) == (74, "shard_unreadable")


@pytest.fixture(scope="module")
def some_bytes(tmp_path_factory):
  path = tmp_path_factory.mktemp("bytes") / "some"
  path.write_bytes(np.random.default_rng(0).bytes(3 * PART_BYTES + 777))
  return path


@given(reads=st.lists(st.tuples(st.integers(0, 300_000), st.integers(-1, 150_000)), max_size=6))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_checked_file_reads_what_the_file_has(some_bytes, reads):
  content = some_bytes.read_bytes()
  file = CheckedFile("x", FileRanges(some_bytes), part_table(part_checksums(content)))
  plain = io.BytesIO(content)
  for position, size in reads:
    assert file.seek(position) == plain.seek(position)
    assert file.read(size) == plain.read(size)
    if position <= len(content):
      assert file.tell() == plain.tell()
  assert file.seek(-5, io.SEEK_END) == plain.seek(-5, io.SEEK_END)


def test_without_pyarrow_the_error_says_what_to_install(shared_file, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
  error = refusal_of(shared_file.open)
  assert (error.code, error.kind) == (78, "package_missing")


def test_records_are_parsed_in_batches_as_one_by_one(shared_file):
  features = open_parquet(shared_file.path).features
  batch = parse_examples(shared_file.open().read_block(2), features)
  assert batch["number"].tolist() == list(range(20, 30))
  assert batch["text"].tolist() == [b"row %d" % row for row in range(20, 30)]
