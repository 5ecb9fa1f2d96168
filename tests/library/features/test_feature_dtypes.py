"""Features of every dtype come back from records and caches as they were, though records have three lists."""

import os
import subprocess
import sys

import caches
import ml_dtypes
import numpy as np
import pytest

from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.records.parsing import ExampleParser, parse_example
from anystep.records.writing import serialize_example, serialize_examples

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EVERY_16_BITS = np.arange(2**16, dtype=np.uint16)


def all_of(dtype):
  """Every value of an integer dtype of up to 16 bits."""
  limits = np.iinfo(dtype)
  return np.arange(limits.min, limits.max + 1).astype(dtype)


def without_nans(values):
  return values[~is_nan(values)]


def is_nan(values):
  with np.errstate(invalid="ignore"):
    return np.isnan(values)


def edges_of(dtype):
  """Where varints change in size, zero and both ends."""
  limits = np.iinfo(dtype)
  near = [sign * 2**bits + more for bits in range(0, 63, 7) for sign in (1, -1) for more in (-1, 0, 1)]
  inside = {limits.min, limits.max, *(number for number in near if limits.min <= number <= limits.max)}
  return np.array(sorted(inside), dtype)


# Numbers of either sign: zeros, subnormal, infinite, and NaNs, quiet and signalling, that carry something.
FLOAT32_BITS = [0, 1, 0x007FFFFF, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FC12345, 0x7F800001]
VALUES = {
  "bool": np.array([False, True]),
  **{dtype: all_of(dtype) for dtype in ("uint8", "int8", "uint16", "int16")},
  **{dtype: edges_of(dtype) for dtype in ("int32", "uint32", "int64")},
  "float16": without_nans(EVERY_16_BITS.view(np.float16)),
  "bfloat16": without_nans(EVERY_16_BITS.view(BFLOAT16)),
  "float32": np.array([bits | sign for bits in FLOAT32_BITS for sign in (0, 1 << 31)], np.uint32).view(
    np.float32
  ),
  "string": np.array([b"", b"\0", b"a\0", "Zürich".encode(), b"\xff\xfe", bytes(range(256)) * 70], object),
}
BATCH_ROWS = 20


def example_of(dtype, ordinal):
  """Some of the dtype's values, all of them among BATCH_ROWS examples, in every form that a feature has."""
  own = VALUES[dtype][ordinal % BATCH_ROWS :: BATCH_ROWS]
  pairs = np.repeat(own, 2)
  return {
    "scalar": VALUES[dtype][ordinal % len(VALUES[dtype]) :][:1].reshape(()),
    "sequence": own,
    "pairs": pairs.reshape(-1, 2),
    "rows": Ragged(own, np.array([len(own) // 2, 0, len(own) - len(own) // 2])),
    "rows_of_pairs": Ragged(pairs.reshape(-1, 2), np.array([len(own)])),
  }


def features_of(dtype):
  shapes = {
    "scalar": (),
    "sequence": (None,),
    "pairs": (None, 2),
    "rows": (None, None),
    "rows_of_pairs": (None, None, 2),
  }
  return {name: Feature(dtype=dtype, shape=shape) for name, shape in shapes.items()}


def bits_of(value):
  """An array, or what a `Ragged` is made of, to the bit."""
  if isinstance(value, Ragged):
    return bits_of(value.values), value.lengths.tolist()
  content = value.tolist() if value.dtype == object else value.tobytes()
  return value.dtype, value.shape, content


def bits_of_example(example):
  return {name: bits_of(value) for name, value in sorted(example.items())}


def batch_of(dtype):
  """BATCH_ROWS examples as one batch."""
  examples = [example_of(dtype, ordinal) for ordinal in range(BATCH_ROWS)]
  batch = {}
  for name, feature in features_of(dtype).items():
    column = [example[name] for example in examples]
    if feature.shape:
      batch[name] = Ragged.of_rows(column, VALUES[dtype].dtype, feature.shape[1:])
    else:
      batch[name] = np.stack(column)
  return batch


@pytest.mark.parametrize("dtype", VALUES)
def test_a_batch_is_written_and_parsed_exactly(dtype):
  batch = batch_of(dtype)
  data, ends = serialize_examples(batch)
  records = [bytes(part) for part in np.split(data, ends[:-1])]
  assert bits_of_example(ExampleParser(features_of(dtype))(records)) == bits_of_example(batch)
  for ordinal, record in enumerate(records):
    example = example_of(dtype, ordinal)
    assert record == serialize_example(example)
    assert bits_of_example(parse_example(record, features_of(dtype))) == bits_of_example(example)


@pytest.mark.parametrize("dtype", VALUES)
def test_a_cache_gives_what_was_cached(tmp_path, dtype):
  built = caches.build(
    tmp_path,
    num_examples=BATCH_ROWS,
    features=features_of(dtype),
    example_of=lambda ordinal: example_of(dtype, ordinal),
  )
  cache = built.open()
  expected = [bits_of_example(example) for example in built.examples]
  assert [bits_of_example(cache[index]) for index in range(len(cache))] == expected
  assert [bits_of_example(example) for example in cache.__getitems__(range(len(cache)))] == expected
  batch = cache.read(np.arange(len(cache)))
  columns = {name: f.rows() if isinstance(f, Ragged) else f for name, f in batch.items()}
  for index, row in enumerate(expected):
    assert (
      bits_of_example(
        {
          name: np.asarray(c[index], VALUES[dtype].dtype) if name == "scalar" else c[index]
          for name, c in columns.items()
        }
      )
      == row
    )
  names = cache.manifest.sequence_features
  for shard in range(cache.manifest.num_shards):
    found = cache.lengths(shard).tolist()
    own = built.examples[shard :: cache.manifest.num_shards]
    assert found == [[len(example[name]) for name in names] for example in own]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_floats_that_are_no_numbers_stay_so(dtype):
  values = EVERY_16_BITS.view(np.float16 if dtype == "float16" else BFLOAT16)
  nans = values[is_nan(values)]
  (found,) = parse_example(
    serialize_example({"x": nans}), {"x": Feature(dtype=dtype, shape=(None,))}
  ).values()
  assert found.dtype == nans.dtype
  assert is_nan(found).all()
  assert np.signbit(found).tolist() == np.signbit(nans).tolist()


BFLOAT16_READER = """
import sys

import anystep
from anystep.caches.manifest import Feature

assert "ml_dtypes" not in sys.modules
assert Feature(dtype="bfloat16", shape=()).numpy_dtype.itemsize == 2
"""


def test_what_knows_bfloat16_is_imported_where_a_feature_is_of_it(checkout, tmp_path):
  environment = os.environ | {"PYTHONPATH": str(checkout)}
  subprocess.run([sys.executable, "-c", BFLOAT16_READER], env=environment, cwd=tmp_path, check=True)


@pytest.mark.parametrize("shape", [(None, None), (None, None, 3), (None, None, 2, 2)])
def test_rows_whose_lengths_differ_are_a_feature(shape):
  feature = Feature(dtype="int32", shape=shape)
  assert feature.sequence
  assert feature.ragged
  assert not Feature(dtype="int32", shape=(None, *shape[2:])).ragged


@pytest.mark.parametrize(
  "shape",
  [(None, None, None), (None, 2, None), (3, None), (None, None, 0), (None, None, -1), (-1,), (None, 2.0)],
)
def test_other_shapes_are_refused(shape):
  with pytest.raises(ValueError, match="wrong shape"):
    Feature(dtype="int32", shape=shape)


def test_rows_whose_lengths_differ_stand_in_the_manifest(tmp_path):
  built = caches.build(
    tmp_path, num_examples=3, features=features_of("int8"), example_of=lambda k: example_of("int8", k)
  )
  assert built.manifest["features"]["rows_of_pairs"] == {
    "dtype": "int8",
    "shape": [None, None, 2],
    "sequence": True,
  }
  assert built.open().manifest.features == features_of("int8")
