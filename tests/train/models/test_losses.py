"""Cross entropy, z-loss, label smoothing and normalisation, against T5X and the definitions written out."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anystep.train.models.losses import (
  LossNormalizingFactor,
  batch_loss,
  normalized_weights,
  token_cross_entropy,
  with_normalized_weights,
)

T5X = Path(__file__).parents[2] / "fixtures" / "t5x" / "losses"
CASES = json.loads((T5X / "cases.json").read_text())


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


def weighted_sums(logits, targets, weights, **options):
  """The loss, and the sums of weighted z-losses and of weights."""
  batch = {"decoder_target_tokens": targets, "decoder_loss_weights": weights}
  loss, metrics = batch_loss(logits, batch, **options)
  return loss, metrics["z_loss"], metrics["weight_sum"]


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
  options = {"z_loss": z_loss, "label_smoothing": label_smoothing}
  gradient = jax.grad(lambda logits: weighted_sums(logits, targets, weights, **options)[0])(logits)

  exact = np.asarray(logits, np.float64)
  log_z = np.log(np.sum(np.exp(exact), axis=-1, keepdims=True))
  distribution = np.full(exact.shape, label_smoothing / (exact.shape[-1] - 1))
  np.put_along_axis(distribution, np.asarray(targets)[..., None], 1 - label_smoothing, axis=-1)
  expected = np.exp(exact - log_z) * (1 + 2 * z_loss * log_z) - distribution
  np.testing.assert_allclose(gradient, expected * np.asarray(weights)[..., None], rtol=1e-4, atol=1e-6)


def test_sums_are_weighted():
  logits, targets, weights = random_case()
  weights *= 0.5
  loss, z_loss, weight_sum = weighted_sums(logits, targets, weights, z_loss=0.1)
  expected_losses, expected_z_losses = by_definition(logits, targets, 0.1, 0.0)
  assert float(loss) == pytest.approx(np.sum(expected_losses * np.asarray(weights)), rel=1e-5)
  assert float(z_loss) == pytest.approx(np.sum(expected_z_losses * np.asarray(weights)), rel=1e-5)
  assert float(weight_sum) == np.sum(weights)


@pytest.mark.parametrize("content", [np.nan, np.inf, -np.inf, 1e30])
def test_logits_without_weight_do_not_matter(content):
  logits, targets, weights = random_case()
  spoilt = jnp.where(weights[..., None] == 0.0, content, logits)
  loss = jax.value_and_grad(lambda x: weighted_sums(x, targets, weights, z_loss=0.1)[0])
  jax.tree.map(np.testing.assert_array_equal, loss(spoilt), loss(logits))


def test_large_logits_stay_finite():
  logits, targets, weights = random_case(scale=1e4)
  loss, gradient = jax.value_and_grad(lambda x: weighted_sums(x, targets, weights)[0])(logits)
  assert np.isfinite(loss)
  assert np.all(np.isfinite(gradient))


def test_bfloat16_logits_are_summed_in_float32():
  logits, targets, weights = random_case()
  rounded = logits.astype(jnp.bfloat16)
  loss, *_ = weighted_sums(rounded, targets, weights)
  assert loss.dtype == jnp.float32
  assert loss == weighted_sums(rounded.astype(jnp.float32), targets, weights)[0]


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
  for dtype in (jnp.int32, jnp.float32):
    batch = {"decoder_loss_weights": jnp.array(weights, dtype)}
    if segment_ids is not None:
      batch["decoder_segment_ids"] = jnp.array(segment_ids)
    np.testing.assert_allclose(normalized_weights(batch, factor), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def arrays():
  with np.load(T5X / "losses.npz") as file:
    return dict(file)


def t5x_batch(arrays, case):
  """The batch of one of T5X's settings, and the factor."""
  batch = {"decoder_target_tokens": arrays["decoder_target_tokens"]}
  if case["weights"] != "none":
    batch["decoder_loss_weights"] = arrays[f"weights_{case['weights']}"]
  if case["packed"]:
    batch |= {name: arrays[name] for name in ("decoder_segment_ids", "decoder_positions")}
  factor = case["loss_normalizing_factor"]
  batch = {name: jnp.asarray(array) for name, array in batch.items()}
  return batch, LossNormalizingFactor[factor] if isinstance(factor, str) else factor


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["gradient"].rpartition("/")[2])
def test_losses_and_gradients_are_t5xs(case, arrays):
  batch, factor = t5x_batch(arrays, case)
  options = {"z_loss": case["z_loss"], "label_smoothing": case["label_smoothing"]}
  loss = jax.value_and_grad(lambda logits: batch_loss(logits, batch, factor=factor, **options), has_aux=True)
  (found, metrics), gradient = loss(jnp.asarray(arrays["logits"]))

  assert float(found) == pytest.approx(case["loss"], rel=2e-6)
  expected = arrays[case["gradient"]]
  np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
  # T5X counts a target of any weight once, fractions too.
  assert float(metrics["correct"] / metrics["num_targets"]) == pytest.approx(case["accuracy"], rel=1e-6)
  # What T5X calls z_loss is divided, as its loss is.
  shares = normalized_weights(batch, factor)
  targets = batch["decoder_target_tokens"]
  _, z_loss, _ = weighted_sums(jnp.asarray(arrays["logits"]), targets, shares, **options)
  assert float(z_loss) == pytest.approx(case["z_loss_term"], rel=2e-6, abs=1e-12)


@pytest.mark.parametrize("weights", ["weights_mask", "weights_fraction", "weights_fraction_empty_segment"])
def test_averages_by_token_are_of_undivided_losses_and_weights(weights, arrays):
  """T5X's `loss_per_nonpadding_target_token` divides a loss that a factor has divided already."""
  names = ("decoder_target_tokens", "decoder_segment_ids", "decoder_positions")
  batch = {name: jnp.asarray(arrays[name]) for name in names} | {"decoder_loss_weights": arrays[weights]}
  sums = [
    batch_loss(jnp.asarray(arrays["logits"]), batch, factor=factor, z_loss=0.01)[1]
    for factor in (None, 7.0, REAL, TOTAL, PER_SEQUENCE)
  ]
  for other in sums[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, sums[0])
  assert float(sums[0]["weight_sum"]) == pytest.approx(arrays[weights].sum())


def test_packed_examples_begin_at_positions_of_0_and_end_with_padding():
  """As in T5X, which does not look where segment ids change."""
  batch = {
    "decoder_loss_weights": jnp.array([[2, 2, 4, 1, 1, 0, 3]]),
    "decoder_segment_ids": jnp.array([[1, 1, 1, 2, 2, 0, 0]]),
    "decoder_positions": jnp.array([[0, 1, 0, 0, 1, 0, 0]]),
  }
  expected = np.array([[1 / 2, 1 / 2, 1, 1 / 2, 1 / 2, 0, 0]]) / 3
  np.testing.assert_allclose(normalized_weights(batch, PER_SEQUENCE), expected, rtol=1e-6)


def test_the_smoothing_constant_is_subtracted_before_weights():
  """Half the weight is half the loss, constant included: a target hit as smoothly as can be loses nothing."""
  distribution = jnp.full((1, 1, 5), 0.025).at[0, 0, 2].set(0.9)
  for weight in (1.0, 0.5):
    loss, *_ = weighted_sums(
      jnp.log(distribution), jnp.array([[2]]), jnp.array([[weight]]), label_smoothing=0.1
    )
    assert float(loss) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("factor", [None, 7.0, REAL, TOTAL, PER_SEQUENCE])
@pytest.mark.parametrize("packed", [False, True])
def test_shares_of_rows_add_up_to_the_loss_of_the_whole_batch(factor, packed, arrays):
  batch = {
    "decoder_target_tokens": jnp.asarray(arrays["decoder_target_tokens"]),
    "decoder_loss_weights": jnp.asarray(arrays["weights_fraction"]),
  }
  if packed:
    batch |= {name: jnp.asarray(arrays[name]) for name in ("decoder_segment_ids", "decoder_positions")}
  options = {"factor": factor, "z_loss": 0.01, "label_smoothing": 0.1}
  loss = jax.jit(jax.grad(lambda logits, batch: batch_loss(logits, batch, **options)[0]))
  whole = loss(jnp.asarray(arrays["logits"]), batch)
  prepared = with_normalized_weights(batch, factor)
  for rows in (slice(0, 3), slice(3, 6)):
    part = loss(jnp.asarray(arrays["logits"][rows]), {name: array[rows] for name, array in prepared.items()})
    np.testing.assert_allclose(part, whole[rows], rtol=1e-6, atol=1e-9)
