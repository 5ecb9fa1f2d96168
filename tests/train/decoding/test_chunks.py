"""Chunks of examples: who computes which changes no answer."""

import doctest

import numpy as np
import pytest

from anystep.train.decoding import chunks, truncation
from anystep.train.decoding.chunks import ChunkPlan, answer_chunks, bucket_length

LENGTHS = np.random.default_rng(0).integers(0, 300, 1003)


def plan(**changes):
  values = {
    "lengths": {"inputs": LENGTHS},
    "max_lengths": {"inputs": 256, "targets": 64},
    "chunk_examples": 16,
  }
  return ChunkPlan(**values | changes)


def test_every_example_is_in_one_chunk_whose_rows_have_room_for_it():
  cut = plan()
  indices = np.concatenate([cut[number].indices for number in range(len(cut))])
  np.testing.assert_array_equal(np.sort(indices), np.arange(1003))
  for number in range(len(cut)):
    chunk = cut[number]
    assert chunk.lengths["targets"] == 64
    assert np.minimum(LENGTHS[chunk.indices], 256).max() <= chunk.lengths["inputs"] <= 256
    assert len(chunk.indices) == (16 if number < len(cut) - 1 else 1003 % 16)
  with pytest.raises(IndexError, match="there are 63"):
    cut[63]


def test_little_of_the_rows_is_padding_and_their_shapes_are_few():
  cut = plan(chunk_examples=8)
  padded = sum(cut[number].lengths["inputs"] * len(cut[number].indices) for number in range(len(cut)))
  assert np.minimum(LENGTHS, 256).sum() / padded > 0.9
  assert len({cut[number].lengths["inputs"] for number in range(len(cut))}) <= 41


def test_a_padded_length_is_the_least_of_its_kind():
  for length in range(3000):
    bucket = bucket_length(length)
    assert length <= bucket <= max(8, length * 9 / 8)
    assert bucket_length(bucket) == bucket
  assert len({bucket_length(length) for length in range(513, 1025)}) == 8


def test_the_order_of_examples_of_one_length_is_their_own():
  cut = plan(lengths={"inputs": np.full(40, 9)})
  np.testing.assert_array_equal(cut[1].indices, np.arange(16, 32))


def test_answers_do_not_depend_on_who_computes_which_chunk():
  cut = plan(lengths={"inputs": LENGTHS[:70]})

  def make_batch(indices, lengths):
    assert len(indices) == 16
    return np.minimum(LENGTHS[indices], lengths["inputs"]), lengths

  def answer(batch, indices):
    lengths, padded = batch
    return {"sum": lengths + indices * 1000, "padded": np.full(16, padded["inputs"])}

  def answers(numbers):
    found = {}
    for chunk, answer_of_chunk in answer_chunks(cut, numbers, make_batch=make_batch, answer=answer):
      rows = zip(chunk.indices, answer_of_chunk["sum"], answer_of_chunk["padded"], strict=True)
      found |= {int(index): (int(total), int(padded)) for index, total, padded in rows}
    return found

  together = answers(range(5))
  assert together.keys() == set(range(70))
  assert all(total == min(LENGTHS[index], 256) + index * 1000 for index, (total, _) in together.items())
  assert answers([4, 2]) | answers([0]) | answers([3, 1]) == together


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"chunk_examples": 0}, "chunk_examples: expected a whole number"),
    ({"lengths": {"inputs": LENGTHS, "targets": LENGTHS[1:]}}, "expected the lengths of all examples"),
    ({"lengths": {"other": LENGTHS}}, r"expected features of \['inputs', 'targets'\], got \['other'\]"),
  ],
)
def test_bad_plans_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    plan(**changes)


@pytest.mark.parametrize("module", [chunks, truncation])
def test_the_examples_in_docstrings_hold(module):
  failures, tests = doctest.testmod(module)
  assert (failures, tests > 0) == (0, True)
