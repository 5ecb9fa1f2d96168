"""Examples come back from their records as they were, and records are TensorFlow's own bytes."""

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from anystep.examples import Ragged, parse_example, parse_examples, serialize_example
from anystep.manifest import Feature


def sequence(dtype, *inner):
  return Feature(dtype=dtype, shape=(None, *inner))


def scalar(dtype):
  return Feature(dtype=dtype, shape=())


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


@pytest.mark.parametrize(
  ("value", "feature"),
  [
    (np.array([2**31]), sequence("int32")),
    (np.array([1, 2]), scalar("int64")),
    (np.array([1, 2, 3]), sequence("int32", 2)),
  ],
)
def test_values_that_do_not_fit_the_feature_are_refused(value, feature):
  with pytest.raises((ValueError, OverflowError)):
    parse_example(serialize_example({"x": value}), {"x": feature})


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


def batch_of(count):
  return parse_examples([serialize_example(example) for example in EXAMPLES[:count]], EXAMPLE_FEATURES)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", ["inputs", "texts"])
def test_sequences_of_several_records_are_ragged(count, name):
  feature = batch_of(count)[name]
  assert isinstance(feature, Ragged)
  assert feature.values.dtype == EXAMPLES[0][name].dtype
  assert feature.lengths.tolist() == [len(example[name]) for example in EXAMPLES[:count]]
  for row, example in zip(feature.rows(), EXAMPLES[:count], strict=True):
    assert caches.same_array(row, example[name])


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", ["score", "text"])
def test_scalars_of_several_records_are_one_array(count, name):
  expected = np.array([*(example[name].item() for example in EXAMPLES[:count])], EXAMPLES[0][name].dtype)
  assert caches.same_array(batch_of(count)[name], expected)


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
