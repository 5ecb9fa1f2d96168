"""Converters make a model's rows of a task's features, as SeqIO's do."""

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.converters import EncoderDecoderConverter, PassThroughConverter, shifted_right
from anystep.errors import AnystepError
from anystep.examples import Ragged

TOKENS = st.lists(st.integers(1, 99), max_size=8)


def ragged(rows, dtype=np.int32):
  return Ragged.of_rows([np.array(row, dtype) for row in rows], np.dtype(dtype))


def filled(rows, length, dtype=np.int32):
  return np.array([(row + [0] * length)[:length] for row in rows], dtype).reshape(len(rows), length)


@given(st.lists(TOKENS, min_size=1, max_size=5), st.integers(1, 10))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_pass_through_cuts_and_fills_sequences_and_leaves_the_rest(rows, length):
  scalars = np.arange(len(rows), dtype=np.float32)
  batch = {"targets": ragged(rows), "score": scalars}
  converted = PassThroughConverter()(batch, {"targets": length, "unused": 3})
  assert converted.keys() == batch.keys()
  assert caches.same_array(converted["targets"], filled(rows, length))
  assert converted["score"] is scalars


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5), st.integers(1, 10), st.integers(1, 10))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_an_encoder_decoders_features_follow_from_inputs_and_targets(rows, input_length, target_length):
  batch = {
    "inputs": ragged([inputs for inputs, _ in rows]),
    "targets": ragged([targets for _, targets in rows]),
    "idle": np.arange(len(rows)),
  }
  converted = EncoderDecoderConverter()(batch, {"inputs": input_length, "targets": target_length})
  targets = [targets for _, targets in rows]
  expected = {
    "encoder_input_tokens": filled([inputs for inputs, _ in rows], input_length),
    "decoder_target_tokens": filled(targets, target_length),
    "decoder_input_tokens": filled([[0, *row] for row in targets], target_length),
    "decoder_loss_weights": filled([[1] * len(row) for row in targets], target_length),
  }
  assert converted.keys() == expected.keys()
  for name, values in expected.items():
    assert caches.same_array(converted[name], values), name


def test_padding_inside_targets_has_no_weight():
  batch = {"inputs": ragged([[1]]), "targets": ragged([[5, 0, 6]])}
  converted = EncoderDecoderConverter()(batch, {"inputs": 1, "targets": 4})
  assert converted["decoder_loss_weights"].tolist() == [[1, 0, 1, 0]]
  assert converted["decoder_input_tokens"].tolist() == [[0, 5, 0, 6]]


@pytest.mark.parametrize("rows", [0, 1])
def test_any_number_of_rows_is_converted(rows):
  batch = {"inputs": ragged([[1]] * rows), "targets": ragged([[2]] * rows)}
  for values in EncoderDecoderConverter()(batch, {"inputs": 3, "targets": 2}).values():
    assert values.dtype == np.int32
    assert len(values) == rows


def test_rows_may_have_no_length():
  batch = {"inputs": ragged([[1], []]), "targets": ragged([[2], [3, 4]])}
  converted = EncoderDecoderConverter()(batch, {"inputs": 0, "targets": 0})
  assert {values.shape for values in converted.values()} == {(2, 0)}


def test_shifting_keeps_dtype_and_rows_apart():
  targets = np.array([[5, 6], [7, 8]], np.int64)
  assert caches.same_array(shifted_right(targets), np.array([[0, 5], [0, 7]]))
  assert targets.tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize(
  ("batch", "missing"),
  [
    ({"inputs": ragged([[1]])}, "targets"),
    ({"targets": ragged([[1]]), "text": np.array([1])}, "inputs"),
    ({"inputs": np.array([1]), "targets": ragged([[1]])}, "inputs"),
  ],
)
def test_a_feature_that_is_not_there_is_named_with_those_that_are(batch, missing):
  with pytest.raises(AnystepError) as refused:
    EncoderDecoderConverter()(batch, {"inputs": 4, "targets": 4})
  assert (refused.value.code, refused.value.kind) == (78, "feature_missing")
  assert refused.value.fields == {"expected": missing, "got": ", ".join(sorted(batch))}


def test_a_models_feature_without_a_length_is_refused():
  batch = {"inputs": ragged([[1]]), "targets": ragged([[1]])}
  with pytest.raises(AnystepError) as refused:
    EncoderDecoderConverter()(batch, {"inputs": 4, "target": 4})
  assert (refused.value.code, refused.value.kind) == (78, "feature_length")
  assert refused.value.fields["expected"] == "a length for targets"
  assert refused.value.fields["got"] == {"inputs": 4, "target": 4}
  assert "(named there now: target" in refused.value.fix


def test_pass_through_leaves_a_feature_without_a_length_ragged():
  batch = {"inputs": ragged([[1], [2, 3]]), "targets": ragged([[4], []])}
  converted = PassThroughConverter()(batch, {"targets": 2})
  assert converted["inputs"] is batch["inputs"]
  assert converted["targets"].tolist() == [[4, 0], [0, 0]]


def test_an_encoder_decoders_features_are_seqios():
  seqio = pytest.importorskip("seqio")
  tf = pytest.importorskip("tensorflow")
  rows = [([3, 4, 5, 6, 7], [8, 1]), ([2], []), ([9, 9], [5, 6, 7, 1])]
  lengths = {"inputs": 6, "targets": 5}
  dataset = tf.data.Dataset.from_generator(
    lambda: ({"inputs": inputs, "targets": targets} for inputs, targets in rows),
    output_signature={name: tf.TensorSpec((None,), tf.int32) for name in lengths},
  )
  theirs = list(seqio.EncDecFeatureConverter(pack=False)(dataset, lengths).as_numpy_iterator())
  batch = {"inputs": ragged([row[0] for row in rows]), "targets": ragged([row[1] for row in rows])}
  ours = EncoderDecoderConverter()(batch, lengths)
  assert all(their.keys() == ours.keys() for their in theirs)
  for name, values in ours.items():
    assert caches.same_array(values, np.stack([their[name] for their in theirs])), name
