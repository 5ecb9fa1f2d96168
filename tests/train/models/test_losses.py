"""Cross entropy, z-loss, label smoothing and normalisation, against the definitions written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anystep.train.models.losses import (
  LossNormalizingFactor,
  normalized_weights,
  token_cross_entropy,
  weighted_cross_entropy,
)


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def random_case(seed=0, scale=3.0):
  rng = np.random.default_rng(seed)
  logits = jnp.asarray(scale * rng.standard_normal((4, 7, 50)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, 50, (4, 7)), jnp.int32)
  weights = jnp.asarray(rng.integers(0, 2, (4, 7)), jnp.float32)
  return logits, targets, weights


def by_definition(logits, targets, z_loss, label_smoothing):
  """The losses in float64, from the whole target distribution."""
  logits, targets = np.asarray(logits, np.float64), np.asarray(targets)
  log_z = np.log(np.sum(np.exp(logits), axis=-1))
  others = label_smoothing / (logits.shape[-1] - 1)
  distribution = np.full(logits.shape, others)
  np.put_along_axis(distribution, targets[..., None], 1 - label_smoothing, axis=-1)
  entropy = -np.sum(distribution * np.log(np.maximum(distribution, 1e-20)), axis=-1)
  cross_entropy = -np.sum(distribution * (logits - log_z[..., None]), axis=-1)
  return cross_entropy - entropy + z_loss * log_z**2, z_loss * log_z**2


@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_token_losses_are_those_of_the_definition(z_loss, label_smoothing):
  logits, targets, _ = random_case()
  losses, z_losses = token_cross_entropy(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing)
  expected_losses, expected_z_losses = by_definition(logits, targets, z_loss, label_smoothing)
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(z_losses, expected_z_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("z_loss", "label_smoothing"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)])
def test_gradients_are_those_of_the_definition(z_loss, label_smoothing):
  logits, targets, weights = random_case()
  options = {"weights": weights, "z_loss": z_loss, "label_smoothing": label_smoothing}
  gradient = jax.grad(lambda logits: weighted_cross_entropy(logits, targets, **options)[0])(logits)

  exact = np.asarray(logits, np.float64)
  log_z = np.log(np.sum(np.exp(exact), axis=-1, keepdims=True))
  distribution = np.full(exact.shape, label_smoothing / (exact.shape[-1] - 1))
  np.put_along_axis(distribution, np.asarray(targets)[..., None], 1 - label_smoothing, axis=-1)
  expected = np.exp(exact - log_z) * (1 + 2 * z_loss * log_z) - distribution
  np.testing.assert_allclose(gradient, expected * np.asarray(weights)[..., None], rtol=1e-4, atol=1e-6)


def test_sums_are_weighted():
  logits, targets, weights = random_case()
  weights *= 0.5
  loss, z_loss, weight_sum = weighted_cross_entropy(logits, targets, weights=weights, z_loss=0.1)
  expected_losses, expected_z_losses = by_definition(logits, targets, 0.1, 0.0)
  assert float(loss) == pytest.approx(np.sum(expected_losses * np.asarray(weights)), rel=1e-5)
  assert float(z_loss) == pytest.approx(np.sum(expected_z_losses * np.asarray(weights)), rel=1e-5)
  assert float(weight_sum) == np.sum(weights)


@pytest.mark.parametrize("content", [np.nan, np.inf, -np.inf, 1e30])
def test_logits_without_weight_do_not_matter(content):
  logits, targets, weights = random_case()
  spoilt = jnp.where(weights[..., None] == 0.0, content, logits)
  loss = jax.value_and_grad(lambda x: weighted_cross_entropy(x, targets, weights=weights, z_loss=0.1)[0])
  jax.tree.map(np.testing.assert_array_equal, loss(spoilt), loss(logits))


def test_large_logits_stay_finite():
  logits, targets, weights = random_case(scale=1e4)
  loss, gradient = jax.value_and_grad(lambda x: weighted_cross_entropy(x, targets, weights=weights)[0])(
    logits
  )
  assert np.isfinite(loss)
  assert np.all(np.isfinite(gradient))


def test_bfloat16_logits_are_summed_in_float32():
  logits, targets, weights = random_case()
  rounded = logits.astype(jnp.bfloat16)
  losses = weighted_cross_entropy(rounded, targets, weights=weights)
  assert losses[0].dtype == jnp.float32
  assert losses[0] == weighted_cross_entropy(rounded.astype(jnp.float32), targets, weights=weights)[0]


REAL = LossNormalizingFactor.NUM_REAL_TARGET_TOKENS
TOTAL = LossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS
PER_SEQUENCE = LossNormalizingFactor.AVERAGE_PER_SEQUENCE


@pytest.mark.parametrize(
  ("factor", "weights", "segment_ids", "expected"),
  [
    (None, [[1, 1, 0], [1, 0, 0]], None, [[1, 1, 0], [1, 0, 0]]),
    (4.0, [[1, 1, 0], [1, 0, 0]], None, [[0.25, 0.25, 0], [0.25, 0, 0]]),
    (REAL, [[1, 1, 0], [1, 0, 0]], None, [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]]),
    (REAL, [[0, 0, 0], [0, 0, 0]], None, [[0, 0, 0], [0, 0, 0]]),
    (TOTAL, [[1, 1, 0], [1, 0, 0]], None, [[1 / 6, 1 / 6, 0], [1 / 6, 0, 0]]),
    (PER_SEQUENCE, [[1, 1, 0], [1, 0, 0]], None, [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0]]),
    (PER_SEQUENCE, [[1, 1, 0], [0, 0, 0]], None, [[1 / 2, 1 / 2, 0], [0, 0, 0]]),
    (PER_SEQUENCE, [[1, 1, 1], [1, 0, 0]], [[1, 1, 2], [1, 0, 0]], [[1 / 6, 1 / 6, 1 / 3], [1 / 3, 0, 0]]),
  ],
)
def test_normalized_weights_divide_as_the_factor_says(factor, weights, segment_ids, expected):
  segments = None if segment_ids is None else jnp.array(segment_ids)
  for dtype in (jnp.int32, jnp.float32):
    found = normalized_weights(jnp.array(weights, dtype), factor, segment_ids=segments)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
