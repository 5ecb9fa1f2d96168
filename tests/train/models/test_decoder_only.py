"""Scores of both kinds of models beside T5X's, and what a decoder-only model asks of its batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from t5x_cases import FIXTURES, document, t5x_model

from anystep.features.converters import LMConverter, PrefixLMConverter
from anystep.features.ragged import Ragged


def t5x_scores(case):
  """T5X's weights, batch and scores of the case, and our model of it."""
  with np.load(FIXTURES / "t5x" / "decoding" / case / "params.npz") as loaded:
    params = unflatten_dict(dict(loaded), sep="/")
  with np.load(FIXTURES / "t5x" / "decoding" / case / "batches.npz") as loaded:
    batch = {name.removeprefix("batch/"): loaded[name] for name in loaded if name.startswith("batch/")}
  with np.load(FIXTURES / "t5x" / "decoding" / case / "expected.npz") as loaded:
    scores = {name: loaded[name] for name in loaded if name.startswith("score")}
  config = document(f"decoding/{case}", "cases")["config"]
  return t5x_model(case, **config), params, batch, scores


@pytest.mark.parametrize(
  ("case", "name", "bidirectional"),
  [
    ("t5_1_1", "score", False),
    ("decoder_only", "score", False),
    ("decoder_only", "score_prefix_bidirectional", True),
  ],
)
def test_scores_are_t5xs(case, name, bidirectional):
  model, params, batch, expected = t5x_scores(case)
  if case == "decoder_only":
    model = dataclasses.replace(model, inputs_bidirectional_attention=bidirectional)
  found = jax.jit(model.score_batch)(params, batch)
  logits = jax.jit(model.logits)(params, batch)
  np.testing.assert_allclose(logits, expected[f"{name}/logits"], atol=5e-5)
  np.testing.assert_allclose(found["token_scores"], expected[f"{name}/token_scores"], atol=5e-5)
  np.testing.assert_allclose(found["scores"], expected[f"{name}/sequence_scores"], atol=2e-4)


def test_attention_both_ways_needs_to_know_the_inputs():
  model, params, batch, _ = t5x_scores("decoder_only")
  model = dataclasses.replace(model, inputs_bidirectional_attention=True)
  del batch["decoder_causal_attention"]
  with pytest.raises(ValueError, match=r"\['decoder_causal_attention'\] missing"):
    model.loss_fn(params, batch)


def test_whether_attention_is_both_ways_is_true_or_false():
  model, *_ = t5x_scores("decoder_only")
  with pytest.raises(ValueError, match="inputs_bidirectional_attention: expected True or False, got 'no'"):
    dataclasses.replace(model, inputs_bidirectional_attention="no")


def ragged(*rows):
  values = np.concatenate([np.array(row, np.int32) for row in rows])
  return Ragged(values, np.array([len(row) for row in rows]))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_packed_row_has_the_scores_of_its_examples(bidirectional):
  model, params, _, _ = t5x_scores("decoder_only")
  model = dataclasses.replace(model, inputs_bidirectional_attention=bidirectional)
  features = {"inputs": ragged([9, 4, 6, 1], [7, 1]), "targets": ragged([3, 9, 1], [5, 8, 2, 1])}
  lengths = {"inputs": 8, "targets": 8}
  apart = PrefixLMConverter()(features, lengths)
  packed = PrefixLMConverter()(features, lengths, np.array([2]))
  score = jax.jit(model.score_batch)
  (together,) = np.asarray(score(params, packed)["token_scores"])
  apart = np.asarray(score(params, apart)["token_scores"])
  np.testing.assert_allclose(together[:13], np.concatenate([apart[0, :7], apart[1, :6]]), atol=1e-5)


def test_inputs_see_each_other_and_no_target_with_attention_both_ways():
  model, params, _, _ = t5x_scores("decoder_only")
  lengths = {"inputs": 4, "targets": 4}

  def logits(model, inputs, targets):
    batch = PrefixLMConverter()({"inputs": ragged(inputs), "targets": ragged(targets)}, lengths)
    return np.asarray(jax.jit(model.logits)(params, batch))[0]

  both_ways = dataclasses.replace(model, inputs_bidirectional_attention=True)
  # The input at place 3 is the third token of the inputs, which the one at place 1 must see or not.
  for network, sees in [(model, False), (both_ways, True)]:
    before, after = (logits(network, [9, 4, token, 1], [3, 8, 1]) for token in (6, 7))
    assert np.any(before[1] != after[1]) is np.bool_(sees)
    before, after = (logits(network, [9, 4, 6, 1], [3, token, 1]) for token in (8, 5))
    np.testing.assert_array_equal(before[:6], after[:6])
    assert np.any(before[6] != after[6])


def test_a_language_model_has_targets_alone():
  model, params, _, _ = t5x_scores("decoder_only")
  batch = model.feature_converter({"targets": ragged([3, 9, 1], [5, 1])}, {"targets": 4})
  same = LMConverter()({"targets": ragged([3, 9, 1], [5, 1])}, {"targets": 4})
  for name in same:
    np.testing.assert_array_equal(batch[name], same[name])
  loss, metrics = jax.jit(model.loss_fn)(params, batch)
  assert jnp.isfinite(loss)
  assert int(metrics["weight_sum"]) == 5
