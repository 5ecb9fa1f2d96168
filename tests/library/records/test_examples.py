"""Examples come back from their records as they were, by compiled loops and by protobuf, and records are
TensorFlow's own bytes."""

import concurrent.futures
import json
import os
import pickle
import struct
import subprocess
import sys

import caches
import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.records import parsing as examples
from anystep.records.parsing import ExampleParser, parse_example, parse_examples
from anystep.records.writing import serialize_example


def sequence(dtype, *inner):
  return Feature(dtype=dtype, shape=(None, *inner))


def scalar(dtype):
  return Feature(dtype=dtype, shape=())


def by_protobuf(records, features):
  """What parsing gives where numba is not installed."""
  return examples._parse_with_protobuf(records, dict(sorted(features.items())))


def by_compiled_loops(records, features):
  """What parsing gives where numba is installed."""
  return ExampleParser(features)(records)


@pytest.fixture(params=[by_protobuf, by_compiled_loops])
def parse(request):
  """Parses a batch: the test runs with either way of doing so."""
  return request.param


def outcome(parse, *arguments):
  """What came of parsing, to the bit: arrays or an error."""
  try:
    batch = parse(*arguments)
  except AnystepError as error:
    return str(error)
  return [
    (name, [(p.dtype, p.shape, p.tolist() if p.dtype == object else p.tobytes()) for p in parts_of(feature)])
    for name, feature in batch.items()
  ]


def parts_of(feature):
  """The arrays that a feature is made of."""
  return [*parts_of(feature.values), feature.lengths] if isinstance(feature, Ragged) else [feature]


def outcomes(records, features):
  """What comes of parsing by protobuf and by compiled loops."""
  return [outcome(parse, records, features) for parse in (by_protobuf, by_compiled_loops)]


ROUND_TRIPS = [
  *((np.array([0, 1, 5, 120], dtype), sequence(dtype)) for dtype in ("int8", "uint8", "int32", "int64")),
  (np.array([-(2**31), -1, 0, 2**31 - 1], np.int32), sequence("int32")),
  (np.array([-(2**63), 2**63 - 1]), sequence("int64")),
  (np.array([0.0, -1.5, 1e38, np.inf], np.float32), sequence("float32")),
  (np.array([0.5, -0.25], np.float16), sequence("float16")),
  (np.array([True, False, True]), sequence("bool")),
  (np.array([b"a", b"", "Zürich".encode(), b"\xff\x00\n"], object), sequence("string")),
  *((np.array([], dtype), sequence(dtype)) for dtype in ("int32", "float32", "bool")),
  (np.array([], object), sequence("string")),
  (np.arange(6, dtype=np.int32).reshape(3, 2), sequence("int32", 2)),
  (np.zeros((0, 2), np.float32), sequence("float32", 2)),
  (np.arange(12, dtype=np.float32).reshape(1, 3, 4), sequence("float32", 3, 4)),
  (np.array([7, 8, 9]), Feature(dtype="int64", shape=(3,))),
  (np.array(42), scalar("int64")),
  (np.array(0.5, np.float32), scalar("float32")),
  (np.array(True), scalar("bool")),
  (np.array(b"text", object), scalar("string")),
]


@pytest.mark.parametrize(("value", "feature"), ROUND_TRIPS)
def test_a_feature_comes_back(value, feature):
  (found,) = parse_example(serialize_example({"x": value}), {"x": feature}).values()
  assert caches.same_array(found, value)


@pytest.mark.parametrize(
  ("value", "feature", "expected"),
  [
    (3, scalar("int32"), np.array(3, np.int32)),
    ([1, 2], sequence("int32"), np.array([1, 2], np.int32)),
    (0.1, scalar("float32"), np.array(0.1, np.float32)),
    (b"text", scalar("string"), np.array(b"text", object)),
    ("Zürich", scalar("string"), np.array("Zürich".encode(), object)),
    (["a", "bcd"], sequence("string"), np.array([b"a", b"bcd"], object)),
    ([], sequence("int32"), np.array([], np.int32)),
  ],
)
def test_plain_python_values_are_stored_as_arrays_are(value, feature, expected):
  (found,) = parse_example(serialize_example({"x": value}), {"x": feature}).values()
  assert caches.same_array(found, expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [True, np.array([True, False])])
def test_bools_are_stored_as_integers(value):
  assert serialize_example({"x": value}) == serialize_example({"x": np.asarray(value).astype(int)})


@pytest.mark.parametrize("value", [b"a\0", [b"a\0\0", b"bcd"], "a\0"])
def test_zero_bytes_at_the_end_are_kept(value):
  values = [value] if isinstance(value, (str, bytes)) else value
  expected = [v.encode() if isinstance(v, str) else v for v in values]
  (found,) = parse_example(serialize_example({"x": value}), {"x": sequence("string")}).values()
  assert found.tolist() == expected


@given(
  arrays.arrays(np.int64, st.integers(0, 20), elements=st.integers(-(2**63), 2**63 - 1)),
  arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.just(3))),
  st.lists(st.binary(max_size=10), max_size=5),
)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_any_example_comes_back(numbers, table, texts):
  features = {"numbers": sequence("int64"), "table": sequence("float32", 3), "texts": sequence("string")}
  texts = np.array([*texts, None], object)[:-1]
  example = {"texts": texts, "table": table, "numbers": numbers}
  found = parse_example(serialize_example(example), features)
  assert list(found) == ["numbers", "table", "texts"]
  assert found["numbers"].tolist() == numbers.tolist()
  assert found["table"].shape == table.shape
  assert found["table"].tobytes() == table.tobytes()
  assert found["texts"].tolist() == texts.tolist()


def test_a_record_does_not_depend_on_the_order_of_features():
  example = {f"feature_{k}": np.arange(k) for k in range(12)}
  assert serialize_example(dict(reversed(example.items()))) == serialize_example(example)


def test_features_that_are_not_asked_for_are_left_out():
  record = serialize_example({"x": np.array([1]), "y": np.array([2])})
  assert list(parse_example(record, {"y": sequence("int32")})) == ["y"]


@pytest.mark.parametrize("value", [np.array([1 + 2j]), np.array(["2026-01-01"], "datetime64[D]")])
def test_a_feature_that_no_record_holds_is_refused_by_name(value):
  with pytest.raises(TypeError, match="'moment'"):
    serialize_example({"moment": value})


INT32 = "int32: -2147483648 to 2147483647"
LEFT_OUT = object()


@pytest.mark.parametrize(
  ("feature", "good", "bad", "expected", "got"),
  [
    (sequence("int32"), [1], [5, 2**31], INT32, 2**31),
    (sequence("int32", 2), [[1, 2]], [5, -(2**31) - 1], INT32, -(2**31) - 1),
    (sequence("int8"), [-128, 127], [0, 128], "int8: -128 to 127", 128),
    (sequence("uint64"), [2**63 - 1], [-1], "uint64: 0 to 18446744073709551615", -1),
    (sequence("bool"), [True], [1, 2], "bool: 0 to 1", 2),
    (scalar("uint8"), 255, 256, "uint8: 0 to 255", 256),
    (scalar("uint8"), 0, -1, "uint8: 0 to 255", -1),
    (scalar("int64"), 7, [7, 8], "values: 1", "values: 2"),
    (scalar("int64"), 7, LEFT_OUT, "values: 1", "values: 0"),
    (scalar("string"), b"a", [], "values: 1", "values: 0"),
    (scalar("float32"), 0.5, LEFT_OUT, "values: 1", "values: 0"),
    (Feature(dtype="int64", shape=(3,)), [1, 2, 3], [1, 2], "values: 3", "values: 2"),
    (Feature(dtype="string", shape=(2,)), [b"a", b"b"], LEFT_OUT, "values: 2", "values: 0"),
    (Feature(dtype="float32", shape=(2, 2)), [0.5] * 4, [0.5] * 6, "values: 4", "values: 6"),
    (sequence("int32", 2), [[1, 2]], [1, 2, 3], "values: a multiple of 2", "values: 3"),
    (sequence("int32", 0), [], [1], "values: a multiple of 0", "values: 1"),
    (sequence("int32"), [1], [1.0], "int64_list", "float_list"),
    (sequence("bool"), [True], [b"yes"], "int64_list", "bytes_list"),
    (scalar("float32"), 0.5, 1, "float_list", "int64_list"),
    (scalar("bfloat16"), 0.5, b"0.5", "float_list", "bytes_list"),
    (sequence("string"), [b"a"], [1], "bytes_list", "int64_list"),
  ],
)
def test_a_record_that_is_not_as_the_manifest_says_is_refused(parse, feature, good, bad, expected, got):
  records = [
    serialize_example({"a": [1]} if value is LEFT_OUT else {"a": [1], "x": value})
    for value in (good, good, bad, good, bad)
  ]
  with pytest.raises(AnystepError) as refused:
    parse(records, {"x": feature, "a": sequence("int32")})
  assert (refused.value.code, refused.value.kind) == (65, "record_invalid")
  assert refused.value.fields == {"position": 2, "feature": "x", "expected": expected, "got": got}
  assert "cache the task again" in refused.value.fix


def test_what_is_no_record_is_refused(parse):
  record = serialize_example({"x": [1]})
  with pytest.raises(AnystepError) as refused:
    parse([record, record[:-1], record], {"x": sequence("int32")})
  assert (refused.value.code, refused.value.kind) == (65, "record_invalid")
  got = refused.value.fields.pop("got")
  assert refused.value.fields == {
    "position": 1,
    "feature": None,
    "expected": "a serialized tf.train.Example",
  }
  assert got.startswith(f"{len(record) - 1} bytes: ")
  assert "cache the task again" in refused.value.fix


@pytest.mark.parametrize(
  ("wrong", "feature", "expected", "got"),
  [
    ({"x": [1, 2, 3], "_rl:0:x": [2]}, "x", "values: 2, as its rows' lengths add up", "values: 3"),
    ({"x": [1, 2], "_rl:0:x": [2, 0, 1]}, "x", "values: 3, as its rows' lengths add up", "values: 2"),
    ({"x": [1, 2]}, "x", "values: 0, as its rows' lengths add up", "values: 2"),
    ({"_rl:0:x": [1]}, "x", "values: 1, as its rows' lengths add up", "values: 0"),
    ({"x": [1, 2], "_rl:0:x": [3, -1]}, "x", "row lengths: 0 to 14", "row lengths: -1"),
    ({"x": [], "_rl:0:x": [2**63 - 1] * 2 + [2]}, "x", "row lengths: 0 to 12", f"row lengths: {2**63 - 1}"),
    ({"x": [1, 2], "_rl:0:x": [2.0]}, "_rl:0:x", "int64_list", "float_list"),
    ({"x": [1, 2**31], "_rl:0:x": [2]}, "x", INT32, 2**31),
    ({"y": list(range(9)), "_rl:0:y": [1, 1]}, "y", "values: 6, as its rows' lengths add up", "values: 9"),
  ],
)
def test_rows_that_are_not_as_long_as_a_record_says_are_refused(parse, wrong, feature, expected, got):
  whole = {"x": Ragged(np.arange(4), np.array([1, 0, 3])), "y": Ragged(np.ones((1, 3), int), np.array([1]))}
  bad = serialize_example({name: np.array(values, None if values else int) for name, values in wrong.items()})
  records = [serialize_example(whole)] * 2 + [bad, serialize_example(whole)]
  with pytest.raises(AnystepError) as refused:
    parse(records, {"x": sequence("int32", None), "y": sequence("int32", None, 3)})
  assert (refused.value.code, refused.value.kind) == (65, "record_invalid")
  assert refused.value.fields == {"position": 2, "feature": feature, "expected": expected, "got": got}


def test_a_single_record_is_refused_likewise():
  with pytest.raises(AnystepError) as refused:
    parse_example(serialize_example({"x": [1, 2]}), {"x": scalar("int64")})
  assert (refused.value.code, refused.value.kind) == (65, "record_invalid")
  assert refused.value.fields == {
    "position": 0,
    "feature": "x",
    "expected": "values: 1",
    "got": "values: 2",
  }


@pytest.mark.parametrize("other", [{"x": 0.5}, {"x": [1, 2]}, {"y": 300}, {}])
@pytest.mark.parametrize("place", [0, 2])
def test_of_several_wrong_records_both_parsers_name_the_same(other, place):
  good, wrong = {"x": 1, "y": 2}, {"x": -1, "y": 2}
  records = [serialize_example(example) for example in (good, wrong, good)]
  records.insert(place, serialize_example({**good, **other} if other else {}))
  one, two = outcomes(records, {"x": scalar("uint8"), "y": scalar("uint8")})
  assert one == two
  assert "record_invalid" in one


EXAMPLES = [
  {
    "inputs": np.array(inputs, np.int32),
    "score": np.array(score, np.float32),
    "text": np.array(text, object),
    "texts": np.array(texts, object),
  }
  for inputs, score, text, texts in [
    ([3, 1, 4], 0.5, b"a", [b"x", b"yz"]),
    ([], -1.0, b"", []),
    ([5, 9], 2.0, b"xyz", [b""]),
  ]
]
EXAMPLE_FEATURES = {
  "inputs": sequence("int32"),
  "score": scalar("float32"),
  "text": scalar("string"),
  "texts": sequence("string"),
}


EXAMPLE_RECORDS = [serialize_example(example) for example in EXAMPLES]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", ["inputs", "texts"])
def test_sequences_of_several_records_are_ragged(parse, count, name):
  feature = parse(EXAMPLE_RECORDS[:count], EXAMPLE_FEATURES)[name]
  assert isinstance(feature, Ragged)
  assert feature.values.dtype == EXAMPLES[0][name].dtype
  assert feature.lengths.tolist() == [len(example[name]) for example in EXAMPLES[:count]]
  for row, example in zip(feature.rows(), EXAMPLES[:count], strict=True):
    assert caches.same_array(row, example[name])


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", ["score", "text"])
def test_scalars_of_several_records_are_one_array(parse, count, name):
  expected = np.array([*(example[name].item() for example in EXAMPLES[:count])], EXAMPLES[0][name].dtype)
  assert caches.same_array(parse(EXAMPLE_RECORDS[:count], EXAMPLE_FEATURES)[name], expected)


DTYPES = {
  "string": st.binary(max_size=4),
  "bool": st.booleans(),
  "uint64": st.integers(0, 2**63 - 1),
  **{
    dtype: st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
  },
  "float16": st.floats(width=16),
  **{dtype: st.floats(width=32) for dtype in ("bfloat16", "float32", "float64")},
}
SHAPES = [(), (None,), (None, 2), (None, 1, 3), (3,), (2, 2), (None, None), (None, None, 3)]


@st.composite
def values_of(draw, feature):
  """What one example has of a feature."""
  if feature.ragged:
    lengths = np.array(draw(st.lists(st.integers(0, 3), max_size=3)), np.int64)
    flat = Feature(dtype=feature.dtype, shape=(int(lengths.sum()), *feature.shape[2:]))
    return Ragged(draw(values_of(flat)), lengths)
  shape = [draw(st.integers(0, 4)) if size is None else size for size in feature.shape]
  size = int(np.prod(shape))
  values = draw(st.lists(DTYPES[feature.dtype], min_size=size, max_size=size))
  if feature.dtype == "string":
    array = np.array([*values, None], object)[:-1]
  elif "float" in feature.dtype:
    array = np.array(values, np.float32).astype(feature.dtype)
  else:
    array = np.array(values, feature.dtype)
  return array.reshape(shape)


@st.composite
def batches(draw):
  """Features and examples that have them."""
  some_feature = st.builds(Feature, dtype=st.sampled_from(list(DTYPES)), shape=st.sampled_from(SHAPES))
  features = draw(st.dictionaries(st.text(max_size=3), some_feature, max_size=3))
  row = st.fixed_dictionaries({name: values_of(feature) for name, feature in features.items()})
  return features, draw(st.lists(row, max_size=4))


def batch_of(features, rows):
  """What parsing is to give."""
  batch = {}
  for name, feature in sorted(features.items()):
    dtype = np.dtype(object if feature.dtype == "string" else feature.dtype)
    column = [row[name] for row in rows]
    if feature.shape:
      batch[name] = Ragged.of_rows(column, dtype, feature.shape[1:])
    else:
      batch[name] = np.concatenate([np.zeros(0, dtype), *(value.reshape(1) for value in column)])
  return batch


def tensorflows_record(example):
  """An example as TensorFlow's own class writes it, features in the order given."""
  import tensorflow as tf

  features = {}
  ragged = {name: value for name, value in example.items() if isinstance(value, Ragged)}
  lists = example | {name: value.values for name, value in ragged.items()}
  for name, value in (lists | {f"_rl:0:{name}": value.lengths for name, value in ragged.items()}).items():
    values = value.reshape(-1)
    if value.dtype == object:
      features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    elif value.dtype.kind in "biu":
      features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values.astype(np.int64)))
    else:
      features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values.astype(np.float32)))
  return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@given(batches(), st.booleans())
@settings(deadline=None, max_examples=150, derandomize=True)
def test_both_parsers_give_what_was_written(batch, backwards):
  pytest.importorskip("tensorflow")
  features, rows = batch
  expected = outcome(batch_of, features, rows)
  assert outcomes([serialize_example(row) for row in rows], features) == [expected, expected]
  rows = [{"another": np.array(1), **row, "one more": np.array(b"x", object)} for row in rows]
  rows = [dict(reversed(row.items())) for row in rows] if backwards else rows
  assert outcomes([tensorflows_record(row) for row in rows], features) == [expected, expected]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_floats_keep_their_bits_and_those_too_large_become_infinite(parse, dtype):
  bits = np.array([0x7FA00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x7F800000], np.uint32)
  floats = bits.view(np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    expected = floats.astype(dtype)
  found = parse([serialize_example({"x": floats})], {"x": sequence(dtype)})["x"].values
  assert found.dtype == expected.dtype
  assert found.tobytes() == expected.tobytes()


def varint(number):
  return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def field(number, content):
  """A field of protobuf's wire format that has a length."""
  return varint(number << 3 | 2) + varint(len(content)) + content


def entry(name, feature):
  return field(1, field(1, name) + field(2, feature))


INTS = field(3, field(1, varint(1) + varint(300)))
NO_INTS = ([], np.int64)
SOME_INTS = ([1, 300], np.int64)
SOME_FLOATS = ([1.5, -2.0], np.float32)


@pytest.mark.parametrize(
  ("record", "expected"),
  [
    (field(1, entry(b"x", INTS)), SOME_INTS),
    (field(1, entry(b"x", field(3, b"\x08" + varint(1) + b"\x08" + varint(300)))), SOME_INTS),
    (field(1, entry(b"x", field(2, field(1, struct.pack("<2f", 1.5, -2.0))))), SOME_FLOATS),
    (field(1, entry(b"x", field(2, struct.pack("<BfBf", 13, 1.5, 13, -2.0)))), SOME_FLOATS),
    (field(1, entry(b"x", field(3, field(1, varint(7)))) + entry(b"x", INTS)), SOME_INTS),
    (field(1, entry(b"x", field(2, field(1, bytes(4)))) + entry(b"x", INTS)), SOME_INTS),
    (field(1, entry(b"x", field(3, field(1, varint(7))))) + field(1, entry(b"x", INTS)), SOME_INTS),
    (field(1, entry(b"y", INTS)) + field(1, entry(b"x", INTS)), SOME_INTS),
    (field(1, entry(b"y", INTS) + entry(b"x", INTS) + entry(b"a", INTS)), SOME_INTS),
    (field(1, entry(b"\xff", INTS) + entry(b"x", INTS)), SOME_INTS),
    (field(1, entry(b"x", INTS)) + field(9, b"abc"), SOME_INTS),
    (field(1, entry(b"x", INTS) + field(9, b"abc")), SOME_INTS),
    (field(1, field(1, field(2, INTS) + field(1, b"x"))), SOME_INTS),
    (field(1, entry(b"x", field(3, b""))), NO_INTS),
    (field(1, entry(b"x", field(2, b""))), NO_INTS),
    (field(1, entry(b"x", b"")), NO_INTS),
    (field(1, field(1, field(1, b"x"))), NO_INTS),
    (field(1, b""), NO_INTS),
    (b"", NO_INTS),
  ],
)
def test_any_encoding_of_a_record_is_parsed(parse, record, expected):
  values, dtype = expected
  whole = serialize_example({"x": np.array([7], dtype)})
  found = parse([whole, record, whole], {"x": sequence(np.dtype(dtype).name)})["x"]
  assert caches.same_array(found.values, np.array([7, *values, 7], dtype))
  assert found.lengths.tolist() == [1, len(values), 1]


class Guarded:
  """An array that refuses places outside it, where compiled loops would read or write what lies there."""

  def __init__(self, array):
    self.array = array

  def __len__(self):
    return len(self.array)

  def checked(self, key):
    for place, size in zip(key if isinstance(key, tuple) else (key,), self.array.shape, strict=False):
      if isinstance(place, slice):
        assert 0 <= place.start <= place.stop <= size
      else:
        assert 0 <= place < size
    return key

  def __getitem__(self, key):
    return self.array[self.checked(key)]

  def __setitem__(self, key, value):
    self.array[self.checked(key)] = value


def guarded(loop):
  return lambda *arguments: loop.plain(*(Guarded(a) if isinstance(a, np.ndarray) else a for a in arguments))


LOOPS = ("locate_lists", "decode_integers", "gather_bytes", "locate_texts")


def by_guarded_loops(records, features):
  """What parsing gives by the loops as they stand, which fails where one leaves its arrays."""
  with pytest.MonkeyPatch.context() as patched:
    for name in LOOPS:
      patched.setattr(examples, name, guarded(getattr(examples, name)))
    return ExampleParser(features)(records)


def outcome_of_all(records, features):
  """What comes of parsing, whichever way it is done."""
  by_loops = outcome(by_compiled_loops, records, features)
  assert by_loops == outcome(by_protobuf, records, features)
  assert by_loops == outcome(by_guarded_loops, records, features)
  return by_loops


def unpacked(values, size):
  """Values as the fields of a list that is not packed: varints have no size, floats 4 bytes."""
  tag = b"\x0d" if size else b"\x08"
  return b"".join(tag + value for value in values)


EDGES = [edge + k for edge in (0, *(2**n for n in (7, 14, 21, 28, 31, 63))) for k in (-1, 0, 1)]
numbers = st.one_of(
  st.integers(0, 300), st.integers(0, 2**22), st.sampled_from(EDGES), st.integers(-(2**31), -1)
).map(lambda number: number % 2**64)
# Some in more bytes than they need, some of more bytes than any may have.
varints = st.one_of(
  numbers.map(varint),
  st.builds(
    lambda number, more: bytes(byte | 128 for byte in varint(number)) + b"\x80" * more + b"\0",
    numbers,
    st.integers(0, 4),
  ),
  st.builds(lambda more, last: b"\xff" * more + bytes([last]), st.integers(8, 10), st.integers(0, 127)),
)
floats = st.binary(min_size=4, max_size=4)
texts = st.binary(max_size=5)
unknown = st.sampled_from(
  [
    *(field(9, b"abc"), b"\x48\x05", b"\x49" + bytes(8), b"\x4d" + bytes(4), b"\x4b\x4c", b"\x4b", b"\x4c"),
    *(b"\x4f", b"\0", b"\0\0", b"\x08\x01", b"\x10\x01", b"\x8a\0\x01a", b"\x12\0", b"\x1a\0"),
  ]
)


def joined(pieces, **sizes):
  return st.lists(pieces, **sizes).map(b"".join)


def mostly(usual, *others):
  """The usual seven times in eight."""
  return st.integers(0, 7).flatmap(lambda k: st.one_of(*others) if k == 0 else usual)


int_lists = mostly(
  st.builds(field, st.just(1), joined(varints, max_size=9)),
  st.lists(varints, max_size=3).map(lambda values: unpacked(values, 0)),
  joined(st.builds(field, st.just(1), joined(varints, max_size=3)), max_size=3),
)
float_lists = mostly(
  st.builds(field, st.just(1), joined(floats, max_size=4)),
  st.lists(floats, max_size=3).map(lambda values: unpacked(values, 4)),
  st.builds(field, st.just(1), st.binary(max_size=9)),
)
text_lists = joined(st.builds(field, st.just(1), texts), max_size=4)
a_list = st.one_of(
  st.builds(field, st.just(number), mostly(content, joined(st.one_of(content, unknown), max_size=2)))
  for number, content in ((1, text_lists), (2, float_lists), (3, int_lists), (3, int_lists))
)
a_feature = mostly(a_list, joined(st.one_of(a_list, unknown), max_size=3))
a_name = st.sampled_from([b"x", b"y", b"z", b"", b"xy", b"\xff", b"_rl:0:x"]).map(lambda name: field(1, name))
an_entry = mostly(
  st.tuples(a_name, st.builds(field, st.just(2), a_feature)).map(b"".join),
  joined(st.one_of(a_name, st.builds(field, st.just(2), a_feature), unknown), max_size=3),
)
entries = joined(st.builds(field, st.just(1), an_entry), max_size=4)
any_record = mostly(
  st.builds(field, st.just(1), entries),
  joined(st.one_of(st.builds(field, st.just(1), entries), unknown), max_size=2),
)


@st.composite
def damaged_records(draw):
  """A record, most often one that protobuf can read, or a part of one, or one with other bytes in it."""
  record = draw(any_record)
  begin = draw(st.integers(0, len(record)))
  stop = draw(st.integers(begin, min(len(record), begin + 3)))
  return draw(
    mostly(st.just(record), st.just(record[:begin]), st.just(record[:begin] + draw(texts) + record[stop:]))
  )


@given(
  st.lists(damaged_records(), min_size=1, max_size=3),
  st.fixed_dictionaries(
    {},
    optional={
      name: st.builds(
        Feature,
        dtype=st.sampled_from(["int32", "int32", "int64", "uint8", "bool", "float32", "string"]),
        shape=st.sampled_from([(None,), (None,), (None, 2), (), (None, None)]),
      )
      for name in ("x", "y", "")
    },
  ),
)
@settings(deadline=None, max_examples=600, derandomize=True)
@pytest.mark.long
def test_of_any_bytes_comes_what_protobuf_makes_of_them(records, features):
  outcome_of_all(records, features)


HOSTILE_EXAMPLE = {
  "a": np.array([3, 300, 70_000, 2**27, -1]),
  "b": np.array([0.5, 1.5]),
  "c": np.array([b"x", b"", b"yz"], object),
  "d": np.array([], np.int64),
}
HOSTILE_RECORD = serialize_example(HOSTILE_EXAMPLE)
HOSTILE_FEATURES = {"a": sequence("int64"), "b": sequence("float32"), "c": sequence("string")}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_wherever_a_record_is_cut_protobuf_says_what_it_is(count):
  features = dict(list(HOSTILE_FEATURES.items())[:count])
  for cut in range(1, len(HOSTILE_RECORD)):
    found = outcome_of_all([HOSTILE_RECORD, HOSTILE_RECORD[:cut], HOSTILE_RECORD], features)
    assert "record_invalid" in found
  assert outcome_of_all([HOSTILE_RECORD], features) == outcome(batch_of, features, [HOSTILE_EXAMPLE])


@pytest.mark.parametrize("count", [1, 3])
def test_whatever_byte_is_another_protobuf_says_what_it_is(count):
  features = dict(list(HOSTILE_FEATURES.items())[:count])
  for place, byte in enumerate(HOSTILE_RECORD):
    for other in {0, 1, 8, 127, 128, 255, byte ^ 1, byte ^ 2, byte ^ 128, (byte + 1) % 256} - {byte}:
      damaged = HOSTILE_RECORD[:place] + bytes([other]) + HOSTILE_RECORD[place + 1 :]
      outcome_of_all([damaged, HOSTILE_RECORD], features)


@pytest.fixture
def _no_protobuf(monkeypatch):
  monkeypatch.setattr(examples, "_parse_with_protobuf", None)


@given(batches())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_writers_write_is_decoded_without_protobuf(batch):
  features, rows = batch
  another = {
    "another": np.array([-1, 1]),
    "one more": np.array(b"x", object),
    "third": np.array([0.5], np.float32),
  }
  records = [serialize_example({**row, **another}) for row in rows]
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(examples, "_parse_with_protobuf", None)
    assert outcome(by_compiled_loops, records, features) == outcome(batch_of, features, rows)


@pytest.mark.usefixtures("_no_protobuf")
@pytest.mark.parametrize(
  ("dtype", "bits"),
  [("int32", bits) for bits in (7, 8, 14, 15, 21, 22, 31)] + [("int64", bits) for bits in (21, 35, 63)],
)
def test_integers_of_all_sizes_are_decoded(dtype, bits):
  """Lists of none to very many, of varints of all lengths, some negative where they are large."""
  rng = np.random.default_rng(bits)
  rows = []
  for size in [*range(40), 300, 20_000]:
    values = rng.integers(0, 2**63 - 1, size, endpoint=True) >> 63 - rng.integers(
      0, bits, size, endpoint=True
    )
    negative = rng.random(size) < (bits > 21) / 8
    rows.append({"x": np.where(negative, -values, values).astype(dtype)})
  features = {"x": sequence(dtype)}
  found = outcome(by_compiled_loops, [serialize_example(row) for row in rows], features)
  assert found == outcome(batch_of, features, rows)


@pytest.mark.usefixtures("_no_protobuf")
@pytest.mark.parametrize("size", [0, *range(110, 120), 10_000, 3_000_000])
def test_texts_of_all_sizes_are_decoded(size):
  rows = [{"text": np.array(bytes(count), object)} for count in (5, size, 6)]
  features = {"text": scalar("string")}
  found = outcome(by_compiled_loops, [serialize_example(row) for row in rows], features)
  assert found == outcome(batch_of, features, rows)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "string"])
def test_arrays_are_the_callers_to_change(parse, dtype):
  value = [b"a"] if dtype == "string" else np.array([1], dtype)
  batch = parse([serialize_example({"x": value})] * 3, {"x": sequence(dtype), "y": sequence(dtype)})
  assert all(feature.values.flags.writeable for feature in batch.values())


def test_no_features_are_parsed_of_any_record(parse):
  assert parse(EXAMPLE_RECORDS, {}) == {}


def test_a_parser_serves_several_threads(parse):
  batches = [EXAMPLE_RECORDS * count for count in (1, 7, 50, 200)]
  expected = [outcome(parse, records, EXAMPLE_FEATURES) for records in batches]
  with concurrent.futures.ThreadPoolExecutor(4) as executor:
    found = list(executor.map(lambda k: outcome(parse, batches[k % 4], EXAMPLE_FEATURES), range(80)))
  assert found == expected * 20


def test_a_parser_can_be_pickled():
  parser = pickle.loads(pickle.dumps(ExampleParser(EXAMPLE_FEATURES)))
  assert outcome(parser, EXAMPLE_RECORDS) == outcome(batch_of, EXAMPLE_FEATURES, EXAMPLES)


def test_a_parser_compiles_before_its_first_batch(monkeypatch):
  """Also where it was pickled: each process compiles for itself."""
  parser = ExampleParser({**EXAMPLE_FEATURES, "number": scalar("int64")})
  loops = [getattr(examples, name) for name in LOOPS]
  signatures = [set(loop._run.signatures) for loop in loops]
  assert all(signatures)
  outcome(parser, EXAMPLE_RECORDS)
  assert [set(loop._run.signatures) for loop in loops] == signatures
  asked = []
  monkeypatch.setattr(examples, "_decode", lambda records, features: asked.append(features))
  pickle.loads(pickle.dumps(parser))
  assert asked == [parser._features]


@pytest.mark.parametrize(("count", "parsers"), [(0, 0), (15, 0), (16, 1), (30, 1)])
def test_a_few_examples_are_parsed_without_compiling(monkeypatch, count, parsers):
  made = []
  monkeypatch.setattr(examples, "ExampleParser", lambda features: made.append(1) or ExampleParser(features))
  records = (EXAMPLE_RECORDS * 10)[:count]
  expected = outcome(batch_of, EXAMPLE_FEATURES, (EXAMPLES * 10)[:count])
  assert outcome(parse_examples, records, EXAMPLE_FEATURES) == expected
  assert len(made) == parsers


IMPORTER = """
import sys

import anystep
from anystep.records.parsing import ExampleParser, parse_example

parse_example(b"", {})
assert "numba" not in sys.modules
ExampleParser({})
assert "numba" in sys.modules
"""


def test_numba_is_imported_with_the_first_parser(checkout, tmp_path):
  environment = os.environ | {"PYTHONPATH": str(checkout)}
  subprocess.run([sys.executable, "-c", IMPORTER], env=environment, cwd=tmp_path, check=True)


@given(
  st.lists(arrays.arrays(np.int32, st.tuples(st.integers(0, 6), st.just(2))), min_size=1, max_size=6),
  st.integers(0, 8),
)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_ragged_rows_are_cut_and_filled_with_zeros(rows, length):
  ragged = Ragged.of_rows(rows, np.dtype(np.int32))
  assert len(ragged) == len(rows)
  assert [row.tolist() for row in ragged.rows()] == [row.tolist() for row in rows]
  expected = [(row.tolist() + [[0, 0]] * length)[:length] for row in rows]
  padded = ragged.to_padded(length)
  assert padded.dtype == np.int32
  assert padded.shape == (len(rows), length, 2)
  assert padded.tolist() == expected


def test_no_rows_keep_their_dtype_and_shape():
  empty = Ragged.of_rows([], np.dtype(np.float32), (2,))
  assert empty.rows() == []
  assert empty.to_padded(3).dtype == np.float32
  assert empty.to_padded(3).shape == (0, 3, 2)


TABLES = [
  Ragged(np.array([1, 2, 3], np.int32), np.array([2, 0, 1])),
  Ragged(np.zeros(0, np.int32), np.zeros(0, np.int64)),
  Ragged(np.array([4], np.int32), np.array([0, 1])),
]


def lists_of(table):
  return [row.tolist() for row in table.rows()]


def test_an_example_of_ragged_rows_is_ragged_itself():
  batch = Ragged.of_rows(TABLES, np.dtype(np.int32), (None,))
  assert (len(batch), batch.lengths.tolist()) == (3, [3, 0, 2])
  assert [lists_of(table) for table in batch.rows()] == [[[1, 2], [], [3]], [], [[], [4]]]
  assert (batch.dtype, batch.shape, batch.ndim) == (np.int32, (3, None, None), 3)
  none = Ragged.of_rows([], np.dtype(np.float32), (None, 3))
  assert (len(none), none.dtype, none.shape) == (0, np.float32, (0, None, None, 3))


@pytest.mark.parametrize("cut", [slice(0, 2), slice(1, None), slice(-1, None), slice(2, 1), slice(None)])
def test_rows_side_by_side_are_a_view(cut):
  tables = Ragged.of_rows(TABLES, np.dtype(np.int32), (None,))
  for whole in (tables, TABLES[0]):
    part = whole[cut]
    rows, expected = part.rows(), whole.rows()[cut]
    assert [row.tolist() if whole is TABLES[0] else lists_of(row) for row in rows] == [
      row.tolist() if whole is TABLES[0] else lists_of(row) for row in expected
    ]
    assert np.shares_memory(parts_of(part)[0], parts_of(whole)[0]) == bool(parts_of(part)[0].size)


@pytest.mark.parametrize("places", [0, slice(None, None, 2), np.array([True, False, True]), [0, 1]])
def test_a_ragged_is_cut_by_slices_alone(places):
  with pytest.raises(TypeError, match="takes slices"):
    TABLES[0][places]


def test_a_ragged_is_no_array():
  with pytest.raises(TypeError, match="not an array"):
    np.asarray(TABLES[0])


def test_ragged_rows_are_not_filled():
  with pytest.raises(AnystepError) as refused:
    Ragged.of_rows(TABLES, np.dtype(np.int32), (None,)).to_padded(4)
  assert (refused.value.code, refused.value.kind) == (78, "feature_ragged")
  assert refused.value.fields == {
    "expected": "a feature of which only the first dimension varies",
    "got": "int32 of shape (rows, None, None)",
  }


def test_features_whose_lists_would_have_one_name_are_refused():
  with pytest.raises(ValueError, match="'_rl:0:x' has the name of the row lengths of feature 'x'"):
    serialize_example({"x": TABLES[0], "_rl:0:x": [1]})
  with pytest.raises(ValueError, match="'_rl:0:x' has the name of the row lengths of feature 'x'"):
    ExampleParser({"x": sequence("int32", None), "_rl:0:x": sequence("int32")})


def test_lengths_below_zero_are_refused():
  with pytest.raises(ValueError, match="add up to 2"):
    Ragged(np.array([1, 2]), np.array([3, -1]))


def test_lengths_that_do_not_add_up_are_refused():
  with pytest.raises(ValueError, match="add up to 3, values are 2"):
    Ragged(np.array([1, 2]), np.array([1, 2]))


def test_records_are_the_bytes_of_tensorflows_own_class():
  tf = pytest.importorskip("tensorflow")
  lists = {"i": "int64_list", "u": "int64_list", "b": "int64_list", "f": "float_list", "O": "bytes_list"}
  classes = {
    "int64_list": tf.train.Int64List,
    "float_list": tf.train.FloatList,
    "bytes_list": tf.train.BytesList,
  }
  for value, _ in ROUND_TRIPS:
    kind = lists[value.dtype.kind]
    values = [int(v) if kind == "int64_list" else v for v in value.reshape(-1).tolist()]
    feature = tf.train.Feature(**{kind: classes[kind](value=values)})
    features = dict.fromkeys(("zz", "x", "inputs"), feature)
    message = tf.train.Example(features=tf.train.Features(feature=features))
    record = serialize_example(dict.fromkeys(features, value))
    assert record == message.SerializeToString(deterministic=True)
    assert tf.train.Example.FromString(record) == message


def test_ragged_rows_are_stored_as_seqio_stores_them():
  tf = pytest.importorskip("tensorflow")
  seqio = pytest.importorskip("seqio")
  pairs = Ragged(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 3]))
  for example in [{"x": table, "pairs": pairs, "y": np.array([1, 2])} for table in TABLES]:
    tensors = {
      name: tf.RaggedTensor.from_row_lengths(value.values, value.lengths)
      if isinstance(value, Ragged)
      else value
      for name, value in example.items()
    }
    expected = seqio.utils.dict_to_tfexample(tensors)
    assert serialize_example(example) == expected.SerializeToString(deterministic=True)


def test_stock_seqio_reads_ragged_rows_of_a_cache(tmp_path):
  """Its own source, which knows nothing of a cache but the description of its features."""
  seqio = pytest.importorskip("seqio")
  examples = [
    {
      "tables": table,
      "pairs": Ragged(np.arange(2 * k, dtype=np.float32).reshape(k, 2), np.array([0, k])),
      "words": Ragged(np.array([b"a", b"b"], object), np.array([1, 1, 0])),
    }
    for k, table in enumerate(TABLES)
  ]
  features = {
    "tables": ("int32", (None, None)),
    "pairs": ("float32", (None, None, 2)),
    "words": ("string", (None, None)),
  }
  info = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in features.items()}
  (tmp_path / "info.train.json").write_text(
    json.dumps({"num_shards": 1, "features": info, "seqio_version": "0.0.20"})
  )
  (tmp_path / "stats.train.json").write_text(json.dumps({"examples": len(examples)}))
  records = [serialize_example(example) for example in examples]
  containers.write_shard(containers.TFRECORD, tmp_path / "train.tfrecord-00000-of-00001", records, options="")
  dataset = seqio.dataset_providers._CachedDataSource(str(tmp_path), "train").get_dataset(
    "train", shuffle=False
  )
  for found, example in zip(dataset, examples, strict=True):
    assert {name: tensor.dtype.name for name, tensor in found.items()} == {
      n: d for n, (d, _) in features.items()
    }
    assert {name: tensor.to_list() for name, tensor in found.items()} == {
      name: [row.tolist() for row in table.rows()] for name, table in example.items()
    }
  own = ExampleParser({name: Feature(dtype=dtype, shape=shape) for name, (dtype, shape) in features.items()})(
    records
  )
  for name, feature in own.items():
    assert [outcome(dict, {"x": row}) for row in feature.rows()] == [
      outcome(dict, {"x": e[name]}) for e in examples
    ]
