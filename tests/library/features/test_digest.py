"""The digest of a batch is the specification's, joins over hosts, and changes with anything in a row."""

import hashlib

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import oracle
from anystep.features.digest import batch_digest, row_digests
from anystep.features.ragged import Ragged

BATCH = {
  "inputs": np.array([[1, 2, 0], [3, 0, 0]], np.int32),
  "weights": np.array([0.5, 1.0], np.float32),
}
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "uint32", "float16", "float32", "float64"]


def rows_of(features):
  count = len(next(iter(features.values())))
  return [{name: np.asarray(values[row]) for name, values in features.items()} for row in range(count)]


def oracle_row_digests(features):
  return [
    oracle.row_digest({name: (v.dtype.name, v.shape, v.tobytes()) for name, v in row.items()})
    for row in rows_of(features)
  ]


@st.composite
def batches(draw):
  count = draw(st.integers(1, 5))
  shapes = st.sampled_from([(), (0,), (3,), (2, 2)])
  names = draw(st.lists(st.text(max_size=4), min_size=1, max_size=4, unique=True))
  return {name: draw(arrays.arrays(draw(st.sampled_from(DTYPES)), (count, *draw(shapes)))) for name in names}


@given(batches())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_digests_are_the_oracles(batch):
  assert row_digests(batch) == oracle_row_digests(batch)
  assert batch_digest(batch) == caches.oracle_digest(rows_of(batch))


@st.composite
def ragged_rows(draw):
  """Rows of lengths of their own, of one dtype and inner shape."""
  dtype, inner_shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (2,), (0,)]))
  lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
  return [draw(arrays.arrays(dtype, (length, *inner_shape))) for length in lengths]


@given(ragged_rows(), st.booleans())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_each_row_of_a_ragged_feature_has_its_own_shape(rows, big_endian):
  values = np.concatenate(rows)
  if big_endian:
    values = values.astype(values.dtype.newbyteorder(">"))
  numbers = np.arange(len(rows), dtype=np.int32)
  batch = {"ragged": Ragged(values, np.array([len(row) for row in rows])), "number": numbers}
  expected = [{"ragged": row, "number": number} for row, number in zip(rows, numbers, strict=True)]
  assert batch_digest(batch) == caches.oracle_digest(expected)


def test_a_ragged_rows_digest_is_that_of_the_same_row_filled_to_its_length():
  ragged = Ragged(np.array([1, 2, 3, 4], np.int32), np.array([2, 2]))
  assert batch_digest({"a": ragged}) == batch_digest({"a": np.array([[1, 2], [3, 4]], np.int32)})
  other = Ragged(np.array([1, 2, 3, 4], np.int32), np.array([1, 3]))
  assert batch_digest({"a": other}) != batch_digest({"a": ragged})


def test_a_digest_is_what_the_specification_writes_down():
  first = hashlib.sha256(
    b"inputs\x1fint32\x1f3\x1f"
    + bytes([1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0])
    + b"weights\x1ffloat32\x1f\x1f\0\0\0?"
  ).digest()
  assert row_digests(BATCH)[0] == first


@given(batches(), st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_row_digests_of_any_parts_join_to_the_batchs(batch, data):
  count = len(next(iter(batch.values())))
  cut = data.draw(st.integers(0, count))
  parts = [{name: values[part] for name, values in batch.items()} for part in (slice(cut), slice(cut, None))]
  joined = b"".join(digest for part in parts for digest in row_digests(part))
  assert hashlib.sha256(joined).hexdigest() == batch_digest(batch)


@pytest.mark.parametrize(
  "same",
  [
    dict(reversed(BATCH.items())),
    {**BATCH, "inputs": BATCH["inputs"].astype(">i4")},
    {**BATCH, "inputs": np.asfortranarray(BATCH["inputs"])},
    {**BATCH, "inputs": np.repeat(BATCH["inputs"], 2, axis=1)[:, ::2]},
  ],
  ids=["another order of names", "big-endian", "column-major", "strided"],
)
def test_how_arrays_lie_in_memory_does_not_matter(same):
  assert batch_digest(same) == batch_digest(BATCH)


@pytest.mark.parametrize(
  "other",
  [
    {**BATCH, "inputs": BATCH["inputs"] + np.array([[0, 0, 0], [0, 0, 1]], np.int32)},
    {**BATCH, "inputs": BATCH["inputs"].astype(np.int64)},
    {**BATCH, "inputs": BATCH["inputs"].astype(np.uint32)},
    {**BATCH, "inputs": BATCH["inputs"][:, None]},
    {**BATCH, "inputs": BATCH["inputs"][:, :2]},
    {"inputs": BATCH["inputs"]},
    {**BATCH, "more": BATCH["weights"]},
    {"inputs": BATCH["inputs"], "weight": BATCH["weights"]},
    {name: values[::-1] for name, values in BATCH.items()},
    {name: values[:1] for name, values in BATCH.items()},
  ],
  ids=[
    "a value",
    "width",
    "sign",
    "shape",
    "length",
    "a name less",
    "a name more",
    "a name",
    "order",
    "rows",
  ],
)
def test_whatever_differs_changes_the_digest(other):
  assert batch_digest(other) != batch_digest(BATCH)


def test_no_rows_and_no_features_have_a_digest():
  empty = hashlib.sha256().hexdigest()
  assert batch_digest({}) == empty
  assert batch_digest({name: values[:0] for name, values in BATCH.items()}) == empty


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_texts_are_refused(shape):
  with pytest.raises(ValueError, match="text holds objects"):
    batch_digest({"text": np.array([b"a", b"b"], object).reshape(shape)})
  with pytest.raises(ValueError, match="text holds objects"):
    batch_digest({"text": Ragged(np.array([b"a", b"b"], object), np.array([2, 0]))})


def test_features_of_different_numbers_of_rows_are_refused():
  with pytest.raises(ValueError, match="rows"):
    batch_digest({"a": np.zeros(1), "b": np.zeros(2)})
  with pytest.raises(ValueError, match="rows"):
    batch_digest({"a": np.zeros(3), "b": Ragged(np.zeros(3), np.array([1, 2]))})
