"""A batch's records are, to the byte, those that protobuf writes of each row, however they are written."""

import concurrent.futures

import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.records import writing as example_writing
from anystep.records.parsing import parse_examples
from anystep.records.writing import serialize_example, serialize_examples

LOOPS = ("lay_out", "measure_integers", "measure_texts", "write_bytes", "write_integers", "write_texts")


def by_protobuf(batch):
  """What is written where numba is not installed."""
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(example_writing.importlib.util, "find_spec", lambda name: None)
    return serialize_examples(batch)


def by_compiled_loops(batch):
  """What is written where numba is installed, of batches of any size."""
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(example_writing, "FEWEST_TO_COMPILE_FOR", 0)
    return serialize_examples(batch)


def by_plain_loops(batch):
  """What the loops write as they stand, which fails where one leaves its arrays."""
  with pytest.MonkeyPatch.context() as patched:
    for name in LOOPS:
      patched.setattr(example_writing, name, getattr(example_writing, name).plain)
    return by_compiled_loops(batch)


WAYS = [by_protobuf, by_compiled_loops, by_plain_loops]


@pytest.fixture(params=WAYS)
def write(request):
  """Writes a batch: the test runs with every way of doing so."""
  return request.param


def records_of(written):
  """The records, after a look at how they are given."""
  data, ends = written
  assert (data.dtype, data.ndim, ends.dtype, ends.ndim) == (np.uint8, 1, np.int64, 1)
  assert (ends[-1] if len(ends) else 0) == len(data)
  return [bytes(data[start:stop]) for start, stop in zip([0, *ends[:-1]], ends, strict=False)]


def rows_of(batch):
  """The rows' features by name."""
  columns = {name: f.rows() if isinstance(f, Ragged) else f for name, f in batch.items()}
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def assert_written(write, batch):
  assert records_of(write(batch)) == [serialize_example(row) for row in rows_of(batch)]


INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
numbers = st.one_of(
  st.integers(0, 200),
  st.sampled_from([2**bits + more for bits in range(0, 64, 7) for more in (-1, 0, 1)]),
  st.integers(-(2**63), 2**63 - 1),
)
ELEMENTS = {
  "string": st.binary(max_size=4),
  "bool": st.booleans(),
  **dict.fromkeys(INTEGERS, numbers),
  **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), st.floats(width=32)),
}


@st.composite
def arrays_of(draw, dtype, shape):
  """An array: numbers that its dtype does not hold are cut to it."""
  size = int(np.prod(shape))
  values = draw(st.lists(ELEMENTS[dtype], min_size=size, max_size=size))
  if dtype == "string":
    return np.array([*values, None], object)[:-1].reshape(shape)
  if dtype in INTEGERS:
    return np.array([value % 2**64 for value in values], np.uint64).astype(dtype).reshape(shape)
  with np.errstate(over="ignore"):
    return np.array(values, np.float32).astype(dtype).reshape(shape)


@st.composite
def ragged_of(draw, num_rows, dtype, inner):
  """A feature of so many rows, which are ragged themselves where the inner shape begins with None."""
  lengths = np.array(draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows)), np.int64)
  if inner[:1] == (None,):
    return Ragged(draw(ragged_of(int(lengths.sum()), dtype, inner[1:])), lengths)
  return Ragged(draw(arrays_of(dtype, (int(lengths.sum()), *inner))), lengths)


@st.composite
def batches(draw):
  num_rows = draw(st.integers(0, 4))
  batch = {}
  for name in draw(st.lists(st.text(max_size=3), max_size=4, unique=True)):
    dtype = draw(st.sampled_from(list(ELEMENTS)))
    inner = draw(st.sampled_from([(), (2,), (1, 3), (0,), (None,), (None, 2)]))
    dense = arrays_of(dtype, (num_rows, *(size for size in inner if size is not None)))
    batch[name] = draw(st.one_of(dense, ragged_of(num_rows, dtype, inner)))
  return batch


@given(batches())
@settings(deadline=None, max_examples=200, derandomize=True)
def test_each_row_is_what_protobuf_writes_of_it(batch):
  for write in WAYS:
    assert_written(write, batch)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint64"])
def test_integers_of_all_sizes_are_written_wherever_in_a_list_they_stand(write, dtype):
  edges = [2**bits + more for bits in range(0, 63, 7) for more in (-1, 0, 1)]
  edges += [-number for number in edges] + [2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
  rows = [[0] * place + [edge] + [300] * after for edge in edges for place in range(5) for after in range(5)]
  columns = [np.array([number % 2**64 for number in row], np.uint64).astype(dtype) for row in rows]
  assert_written(write, {"x": Ragged.of_rows(columns, np.dtype(dtype))})


@pytest.mark.parametrize("write", [by_protobuf, by_compiled_loops])
@pytest.mark.parametrize("name", ["x", "n" * 100, "n" * 200])
def test_heads_of_all_sizes_are_written(write, name):
  """Lists, entries and records whose sizes grow from one byte to three, one size at a time."""
  sizes = np.array([*range(140), *range(16_340, 16_400), 2**21 - 30, 2**21])
  texts = np.array([bytes(size) for size in sizes.tolist()], object)
  counts = np.where(sizes < 2**20, sizes, 0)
  assert_written(write, {name: texts, "numbers": Ragged(np.ones(counts.sum(), np.int32), counts)})


def test_names_are_sorted_whatever_order_protobuf_has(write):
  """Some of its implementations put a name after those that begin with it: other bytes."""
  names = ["inputs", "inputs_pretokenized", "targets", "targets_pretokenized", "x", "x\uffff", "x\U0001f600"]
  assert names == sorted(names)
  (record,) = records_of(write(dict.fromkeys(reversed(names), np.zeros(1))))
  places = [record.index(b"\n" + bytes([len(name.encode())]) + name.encode()) for name in names]
  assert places == sorted(places)


def test_float_lists_of_all_lengths_are_written(write):
  lengths = np.arange(70)
  values = np.random.default_rng(0).integers(0, 2**32, lengths.sum(), np.uint32).view(np.float32)
  assert_written(write, {"x": Ragged(values, lengths)})


def test_floats_keep_their_bits(write):
  bits = np.array([0, 1 << 31, 0x7F800001, 0xFFC12345, 0x7FFFFFFF], np.uint32)
  found = parse_examples(
    records_of(write({"x": bits.view(np.float32)})), {"x": Feature(dtype="float32", shape=())}
  )
  assert found["x"].view(np.uint32).tolist() == bits.tolist()


def test_texts_may_be_of_characters(write):
  assert_written(write, {"x": np.array(["Zürich", "", "a\0"], object), "y": np.array(["b", "cd", ""])})


@pytest.mark.parametrize("dtype", ["int32", ">i4", ">i8", ">f4", ">u2"])
def test_arrays_may_lie_in_memory_as_they_like(write, dtype):
  values = np.arange(1, 61).astype(dtype)
  kept = values[::2]
  shown = np.broadcast_to(values[:1], 30)
  table = values.reshape(2, 30).T
  for array in (kept, shown, table):
    assert_written(write, {"x": array})
    assert_written(write, {"x": Ragged(array, np.array([10, 0, 20], np.int32))})


def test_no_rows_are_no_records(write):
  for dtype in ELEMENTS:
    values = np.zeros(0, object if dtype == "string" else dtype)
    assert records_of(write({"x": values, "y": Ragged(values, np.zeros(0, np.int64))})) == []
  assert records_of(write({})) == []


def test_the_batch_stays_as_it_was(write):
  values = np.arange(40, dtype=np.int32)
  batch = {"x": Ragged(values, np.array([40])), "y": np.array([b"a"], object)}
  write(batch)
  assert values.flags.writeable
  assert values.tolist() == list(range(40))


def test_records_are_the_callers_to_change(write):
  data, ends = write({"x": np.arange(3)})
  assert data.flags.writeable
  assert ends.flags.writeable


def test_features_of_different_numbers_of_rows_are_refused(write):
  with pytest.raises(ValueError, match=r"rows differ: \{'x': 2, 'y': 3\}"):
    write({"x": np.arange(2), "y": Ragged(np.arange(3), np.array([1, 1, 1]))})


@pytest.mark.parametrize("value", [np.array([1 + 2j]), np.array(["2026-01-01"], "datetime64[D]")])
def test_a_feature_that_no_record_holds_is_refused_by_name(write, value):
  with pytest.raises(TypeError, match="'moment'"):
    write({"moment": value})


ROWS = Ragged(np.array([1, 2, 3]), np.array([2, 0, 1]))


def test_lists_of_one_name_are_refused(write):
  with pytest.raises(ValueError, match=r"'_rl:0:x' has the name of the row lengths of feature 'x'"):
    write({"x": Ragged(ROWS, np.array([1, 2])), "_rl:0:x": np.array([1, 2])})


def test_rows_of_ragged_rows_are_refused(write):
  with pytest.raises(TypeError, match="A Ragged is not an array"):
    write({"x": Ragged(Ragged(ROWS, np.array([1, 2])), np.array([2]))})


@pytest.mark.parametrize(("num_rows", "other"), [(15, "_serialize_by_loops"), (16, "_serialize_by_rows")])
def test_a_few_examples_are_written_without_compiling(monkeypatch, num_rows, other):
  monkeypatch.setattr(example_writing, other, None)
  assert_written(serialize_examples, {"x": np.arange(num_rows)})


def test_several_threads_may_write(write):
  batches = [
    {"x": Ragged(np.arange(40 * k), np.full(k, 40)), "y": np.array([b"text"] * k, object)} for k in (1, 9, 20)
  ]
  expected = [records_of(write(batch)) for batch in batches]
  with concurrent.futures.ThreadPoolExecutor(4) as executor:
    found = list(executor.map(lambda k: records_of(serialize_examples(batches[k % 3])), range(60)))
  assert found == expected * 20
