"""Examples of a row stand one behind the other, and their ids say which token is whose."""

import caches
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.errors import AnystepError
from anystep.features.packed_rows import number_segments, pack_spans
from anystep.features.ragged import Ragged

# Examples' lengths, row by row; some rows have none.
PACKS = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6)


def flat(packs):
  return np.array([length for pack in packs for length in pack], np.int64)


def counts_of(packs):
  return np.array([len(pack) for pack in packs], np.int64)


@given(PACKS, st.integers(0, 3))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_every_place_is_of_the_example_that_covers_it(packs, room):
  length = max(map(sum, packs), default=0) + room
  spans = pack_spans(flat(packs), counts_of(packs), length)
  owner, places = [], []
  for pack in packs:
    row = [(k + 1, place) for k, own in enumerate(pack) for place in range(own)]
    row += [(0, 0)] * (length - len(row))
    owner.append([k for k, _ in row])
    places.append([place for _, place in row])
  shape = (len(packs), length)
  assert caches.same_array(
    spans.fill(number_segments(counts_of(packs))), np.array(owner, np.int32).reshape(shape)
  )
  assert caches.same_array(spans.positions(), np.array(places, np.int32).reshape(shape))
  assert caches.same_array(spans.mask(), (np.array(owner).reshape(shape) > 0).astype(np.int32))


def test_a_row_that_does_not_hold_its_examples_is_refused():
  lengths, counts = np.array([3, 2, 0, 4, 2, 9]), np.array([2, 0, 3, 1])
  with pytest.raises(AnystepError) as refused:
    pack_spans(lengths, counts, 5)
  assert (refused.value.code, refused.value.kind) == (65, "pack_length")
  assert refused.value.fields == {"row": 2, "expected": "at most 5 tokens in a row", "got": 6}
  assert pack_spans(lengths, counts, 9).shape == (4, 9)


@pytest.mark.parametrize("counts", [[], [2], [1, 3], [4]])
def test_counts_of_other_examples_are_refused(counts):
  with pytest.raises(AnystepError) as refused:
    pack_spans(np.array([1, 1, 1]), np.array(counts, np.int64), 9)
  assert (refused.value.code, refused.value.kind) == (78, "pack_counts")
  assert refused.value.fields == {"expected": "counts of 3 examples in all", "got": sum(counts)}


DTYPES = [np.int32, np.int64, np.float32, np.bool_, np.uint8, ml_dtypes.bfloat16, object]


@pytest.mark.parametrize("inner_shape", [(), (3,), (0,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 40])
def test_sequences_are_cut_and_filled_whatever_they_hold(num_rows, dtype, inner_shape):
  """Few rows and Python objects are copied by a loop that is not compiled."""
  generator = np.random.default_rng(num_rows)
  lengths = generator.integers(0, 9, num_rows)
  values = generator.integers(-9, 9, (lengths.sum(), *inner_shape)).astype(dtype)
  padded = Ragged(values, lengths).to_padded(5)
  assert (padded.shape, padded.dtype) == ((num_rows, 5, *inner_shape), np.dtype(dtype))
  first = 0
  for row, length in zip(padded, lengths, strict=True):
    kept = min(length, 5)
    np.testing.assert_array_equal(row[:kept], values[first : first + kept])
    assert not row[kept:].any()
    first += length


def test_bits_of_numbers_that_are_none_are_kept():
  bits = np.array([0x7FA00001, 0xFFC12345, 0x80000000] * 16, np.uint32)
  padded = Ragged(bits.view(np.float32), np.full(16, 3)).to_padded(3)
  np.testing.assert_array_equal(padded.view(np.uint32).ravel(), bits)
