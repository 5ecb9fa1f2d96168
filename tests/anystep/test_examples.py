"""Examples come back from their records as they were, with TensorFlow and without, and records are
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

from anystep import examples
from anystep.errors import AnystepError
from anystep.examples import (
  ExampleParser,
  Ragged,
  parse_example,
  parse_examples,
  serialize_example,
)
from anystep.manifest import Feature


def sequence(dtype, *inner):
  return Feature(dtype=dtype, shape=(None, *inner))


def scalar(dtype):
  return Feature(dtype=dtype, shape=())


@pytest.fixture(params=[False, True], ids=["protobuf", "tensorflow"])
def parse(request):
  """Parses a batch: the test runs with either way of doing so."""
  if request.param:
    pytest.importorskip("tensorflow")
  return lambda records, features: ExampleParser(features, tensorflow=request.param)(records)


def outcome(parse, *arguments):
  """What came of parsing, to the bit: arrays or an error."""
  try:
    batch = parse(*arguments)
  except AnystepError as error:
    return str(error)
  parts = {name: (f.values, f.lengths) if isinstance(f, Ragged) else (f,) for name, f in batch.items()}
  return [
    (name, [(p.dtype, p.shape, p.tolist() if p.dtype == object else p.tobytes()) for p in part])
    for name, part in parts.items()
  ]


def outcomes(records, features):
  """What comes of parsing by protobuf and by TensorFlow."""
  return [outcome(ExampleParser(features, tensorflow=t), records) for t in (False, True)]


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
  pytest.importorskip("tensorflow")
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
SHAPES = [(), (None,), (None, 2), (None, 1, 3), (3,), (2, 2)]


@st.composite
def values_of(draw, feature):
  """What one example has of a feature."""
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
  for name, value in example.items():
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


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_wherever_a_record_is_cut_both_parsers_agree(size):
  """TensorFlow by itself reads one that ends between two features."""
  pytest.importorskip("tensorflow")
  example = {"a": np.arange(size), "b": np.array([0.5, 1.5]), "c": np.array([b"x", b""], object)}
  features = {"a": sequence("int64"), "b": sequence("float32"), "c": sequence("string")}
  record = serialize_example(example)
  for cut in {*range(40), *range(len(record) - 60, len(record))} & set(range(1, len(record))):
    one, two = outcomes([record, record[:cut]], features)
    assert one == two
    assert "record_invalid" in one
  one, two = outcomes([record, record], features)
  assert one == two == outcome(batch_of, features, [example, example])


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


def test_a_parser_can_be_pickled(parse):
  parser = pickle.loads(pickle.dumps(ExampleParser(EXAMPLE_FEATURES, tensorflow=False)))
  assert outcome(parser, EXAMPLE_RECORDS) == outcome(parse, EXAMPLE_RECORDS, EXAMPLE_FEATURES)


@pytest.mark.parametrize("size", [0, *range(110, 120), 10_000, 3_000_000])
def test_tensorflow_alone_parses_what_writers_write(monkeypatch, size):
  pytest.importorskip("tensorflow")
  rows = [{"text": np.array(bytes(count), object)} for count in (5, size, 6)]
  features = {"text": scalar("string")}
  monkeypatch.setattr(examples, "_parse_with_protobuf", None)
  parser = ExampleParser(features, tensorflow=True)
  found = outcome(parser, [serialize_example(row) for row in rows])
  assert found == outcome(batch_of, features, rows)


def test_records_are_parsed_where_tensorflow_builds_graphs():
  tf = pytest.importorskip("tensorflow")
  with tf.Graph().as_default():
    one, two = outcomes(EXAMPLE_RECORDS, EXAMPLE_FEATURES)
  assert one == two == outcome(batch_of, EXAMPLE_FEATURES, EXAMPLES)


def test_a_batch_is_parsed_with_tensorflow_where_that_is_imported_and_pays(monkeypatch):
  pytest.importorskip("tensorflow")
  asked = []
  monkeypatch.setattr(
    examples, "_parse_with_tensorflow", lambda records, features: asked.append(len(records))
  )
  records = EXAMPLE_RECORDS * 10
  expected = outcome(batch_of, EXAMPLE_FEATURES, EXAMPLES * 10)
  assert outcome(parse_examples, records, EXAMPLE_FEATURES) == expected
  assert asked == [30]
  parse_examples(records[:3], EXAMPLE_FEATURES)
  parse_example(records[0], EXAMPLE_FEATURES)
  monkeypatch.delitem(sys.modules, "tensorflow")
  assert outcome(parse_examples, records, EXAMPLE_FEATURES) == expected
  assert asked == [30]


def test_a_parser_that_was_pickled_starts_tensorflow_where_it_arrives(monkeypatch):
  started = []
  monkeypatch.setattr(examples, "_start_tensorflow", lambda: started.append(1))
  pickled = pickle.dumps(ExampleParser(EXAMPLE_FEATURES, tensorflow=True))
  started.clear()
  pickle.loads(pickled)
  assert started == [1]


# In its place, so that what is asked of it can be seen, and where there are no accelerators to hide.
TENSORFLOW = """
import contextlib, os

calls = [["imported", os.environ.get("TF_CPP_MIN_LOG_LEVEL")]]


class config:
  def set_visible_devices(devices, kind):
    calls.append(["visible", devices, kind])


@contextlib.contextmanager
def device(name):
  calls.append(["on", name])
  yield
  calls.append(["off", name])


def zeros(shape):
  calls.append(["zeros", shape])
"""
STARTER = """
import json, sys

if sys.argv[1] == "imported_before":
  import tensorflow
from anystep.examples import ExampleParser, parse_examples, tensorflow_installed

modules = set(sys.modules)
assert tensorflow_installed()
ExampleParser({}, tensorflow=False)([b""])
assert ("tensorflow" in sys.modules) == ("tensorflow" in modules)
ExampleParser({}, tensorflow=True)
print(json.dumps(sys.modules["tensorflow"].calls))
"""
STARTED = [["on", "CPU"], ["zeros", []], ["off", "CPU"]]


@pytest.mark.parametrize(
  ("when", "calls"),
  [
    ("imported_here", [["imported", "3"], ["visible", [], "GPU"], *STARTED]),
    ("imported_before", [["imported", None], *STARTED]),
  ],
)
def test_tensorflow_starts_with_its_parser_quiet_and_off_accelerators(checkout, tmp_path, when, calls):
  """Whoever imported it before has chosen its devices."""
  (tmp_path / "tensorflow.py").write_text(TENSORFLOW)
  environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{checkout}"}
  del environment["TF_CPP_MIN_LOG_LEVEL"]
  done = subprocess.run(
    [sys.executable, "-c", STARTER, when], env=environment, cwd=tmp_path, capture_output=True, check=True
  )
  assert json.loads(done.stdout) == calls


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
