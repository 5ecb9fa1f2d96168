"""Scanned or not, and whatever the backward pass computes again, scalable T5 computes the same."""

import jax
import numpy as np
import pytest

from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.network.config import REMAT_POLICIES
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer

SIZES = {
  "vocab_size": 32,
  "emb_dim": 16,
  "num_heads": 2,
  "head_dim": 8,
  "mlp_dim": 32,
  "num_encoder_layers": 2,
  "num_decoder_layers": 3,
  "dropout_rate": 0.1,
}
BATCH = {
  "encoder_input_tokens": np.array([[5, 6, 7, 8, 9, 1], [4, 3, 1, 0, 0, 0]], np.int32),
  "decoder_input_tokens": np.array([[0, 11, 12, 13], [0, 14, 0, 0]], np.int32),
  "decoder_target_tokens": np.array([[11, 12, 13, 1], [14, 1, 0, 0]], np.int32),
  "decoder_loss_weights": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.int32),
}


def model_of(**options):
  return EncoderDecoderModel(ScalableTransformer(ScalableT5Config(**SIZES, **options)))


def loss_of(model):
  return lambda params: model.loss_fn(params, BATCH, jax.random.key(1))[0]


def by_layer(params):
  """The parameters by the names of a model whose layers are not scanned."""
  apart = dict(params)
  for stack, num_layers in (("encoder", 2), ("decoder", 3)):
    stacked = params[stack][stack]
    layers = {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[:, i], stacked) for i in range(num_layers)}
    apart[stack] = {name: tree for name, tree in params[stack].items() if name != stack} | layers
  return apart


@pytest.mark.long
def test_gradients_depend_on_neither_the_scan_nor_what_is_computed_again():
  params = model_of().initial_variables(jax.random.key(0))["params"]
  expected = jax.jit(jax.grad(loss_of(model_of())))(params)
  for policy, scan_layers in (("full", True), ("none", False), ("minimal", False)):
    model = model_of(remat_policy=policy, scan_layers=scan_layers)
    gradients = jax.jit(jax.grad(loss_of(model)))(params if scan_layers else by_layer(params))
    jax.tree.map(
      lambda found, leaf: np.testing.assert_allclose(found, leaf, rtol=0, atol=1e-5 * np.abs(leaf).max()),
      gradients,
      expected if scan_layers else by_layer(expected),
    )


@pytest.mark.parametrize("scan_layers", [True, False])
def test_each_policy_computes_more_products_again(scan_layers):
  def count(policy):
    model = model_of(remat_policy=policy, scan_layers=scan_layers)
    params = jax.eval_shape(model.initial_variables, jax.random.key(0))["params"]
    return str(jax.make_jaxpr(jax.grad(loss_of(model)))(params)).count("dot_general")

  none, minimal, full = (count(policy) for policy in REMAT_POLICIES)
  assert none < minimal < full
