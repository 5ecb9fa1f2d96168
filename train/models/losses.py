"""Cross entropy over the vocabulary, weighted by token, and normalization of losses."""

import enum
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


class LossNormalizingFactor(enum.Enum):
  """Divisor of a batch's summed loss that depends on the batch.

  Attributes:
    NUM_REAL_TARGET_TOKENS: the sum of the weights.
    NUM_TOTAL_TARGET_TOKENS: the number of target positions, padding included.
    AVERAGE_PER_SEQUENCE: each example's weights are first divided by their sum, then all by the number of
      examples that have any: every example counts alike, however long.
  """

  NUM_REAL_TARGET_TOKENS = "NUM_REAL_TARGET_TOKENS"
  NUM_TOTAL_TARGET_TOKENS = "NUM_TOTAL_TARGET_TOKENS"
  AVERAGE_PER_SEQUENCE = "AVERAGE_PER_SEQUENCE"


Factor = float | LossNormalizingFactor | None
_NORMALIZED_WEIGHTS = "decoder_normalized_weights"


def token_cross_entropy(
  logits: jax.Array, targets: jax.Array, *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
  """Return the loss of every token, in float32.

  With log Z = log(sum(exp(logits))):  log Z - logits[target] + z_loss * (log Z)^2

  The z-loss keeps logits from drifting from zero, which costs precision (Chowdhery et al. 2022,
  https://arxiv.org/abs/2204.02311, section 5). Label smoothing s over V classes compares with 1 - s at the
  target and s / (V - 1) elsewhere, less that distribution's entropy, so that 0 stays the least possible.

  Args:
    logits: (..., vocab_size) float.
    targets: (...) int. A target outside [0, vocab_size) has no logit, which counts as 0.
    z_loss: factor of (log Z)^2; T5.1.1 has 1e-4.
    label_smoothing: s, in [0, 1).

  Returns:
    losses: (...) float32, the z-loss included.
    z_losses: (...) float32, the z-loss alone.

  >>> losses, _ = token_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))
  >>> round(float(losses[0]), 4)  # log(4)
  1.3863
  """
  logits = logits.astype(jnp.float32)
  vocab_size = logits.shape[-1]
  log_z = jax.nn.logsumexp(logits, axis=-1)
  # Compared, selected and summed in one fused loop: no one-hot array, and no gather over a sharded axis.
  classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
  target_logits = jnp.sum(jnp.where(classes == targets[..., None], logits, 0.0), axis=-1)
  losses = log_z - target_logits
  if label_smoothing > 0.0:
    on, off = 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)
    entropy = -(on * np.log(on) + (vocab_size - 1) * off * np.log(off))
    losses = log_z - (on - off) * target_logits - off * jnp.sum(logits, axis=-1) - float(entropy)
  z_losses = z_loss * jnp.square(log_z)
  return losses + z_losses, z_losses


def target_weights(batch: Mapping[str, jax.Array], factor: Factor) -> jax.Array:
  """Return the weight of every target of a batch, before any division.

  Args:
    batch: has `decoder_target_tokens`, (rows, length) int32, and may have `decoder_loss_weights`.
    factor: see `normalized_weights`. A batch without weights has 1 for every target, padding included, and
      with a `LossNormalizingFactor` 1 for every target but padding, as in T5X.

  Returns:
    (rows, length) float32.
  """
  if "decoder_loss_weights" in batch:
    return batch["decoder_loss_weights"].astype(jnp.float32)
  targets = batch["decoder_target_tokens"]
  counted = targets > 0 if isinstance(factor, LossNormalizingFactor) else jnp.ones(targets.shape, bool)
  return counted.astype(jnp.float32)


def normalized_weights(batch: Mapping[str, jax.Array], factor: Factor) -> jax.Array:
  """Return weights divided as `factor` says, so that the loss is always a weighted sum.

  The loss of a part of the batch's rows with these weights is that part's share of the whole batch's loss.

  Args:
    batch: as `target_weights` takes it. Packed rows have `decoder_segment_ids` too, 0 at padding, and
      `decoder_positions`, both (rows, length) int32: an example begins at each position 0, as in T5X; without
      positions, where the segment id changes. Other rows are one example each.
    factor: a number to divide by; or what to count, see `LossNormalizingFactor`; None leaves the sum.

  Returns:
    (rows, length) float32; all 0 where there is nothing to divide by.

  >>> batch = {"decoder_target_tokens": jnp.array([[5, 6, 7, 1], [1, 0, 0, 0]])}
  >>> normalized_weights(batch, LossNormalizingFactor.AVERAGE_PER_SEQUENCE).tolist()
  [[0.125, 0.125, 0.125, 0.125], [0.5, 0.0, 0.0, 0.0]]
  """
  weights = target_weights(batch, factor)
  if factor is None:
    return weights
  if factor is LossNormalizingFactor.NUM_REAL_TARGET_TOKENS:
    return _divide(weights, jnp.sum(weights, keepdims=True))
  if factor is LossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS:
    return weights / weights.size
  if factor is LossNormalizingFactor.AVERAGE_PER_SEQUENCE:
    shares = _divide(weights, _example_weights(weights, batch))
    return _divide(shares, jnp.sum(shares, keepdims=True))
  return weights / factor


def with_normalized_weights(batch: Mapping[str, jax.Array], factor: Factor) -> dict[str, jax.Array]:
  """Return the batch with an entry that `batch_loss` uses in place of `normalized_weights`.

  Rows taken from the result keep the weights of the whole batch.
  """
  return {**batch, _NORMALIZED_WEIGHTS: normalized_weights(batch, factor)}


def batch_loss(
  logits: jax.Array,
  batch: Mapping[str, jax.Array],
  *,
  factor: Factor = None,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Return the loss of a batch, and sums for reports.

  Args:
    logits: (rows, length, vocab_size) float. Where the weight is 0 they may be anything, nan included.
    batch: as `normalized_weights` takes it.
    factor: see `normalized_weights`.
    z_loss: see `token_cross_entropy`.
    label_smoothing: see `token_cross_entropy`.

  Returns:
    loss: () float32, divided as `factor` says.
    metrics: sums over the batch's targets, all () float32, and never divided. Each target times its weight:
      `loss`, `z_loss` (the part of it that is) and `weight_sum`. Each target of any weight but 0 once, as T5X
      measures accuracy: `correct` (those that have the highest logit) and `num_targets`.
  """
  targets, weights = batch["decoder_target_tokens"], target_weights(batch, factor)
  shares = batch.get(_NORMALIZED_WEIGHTS)
  shares = normalized_weights(batch, factor) if shares is None else shares
  counted = weights != 0.0
  # 0 * nan is nan, and so is its gradient: what has no weight must be gone before the loss is computed.
  logits = jnp.where(counted[..., None], logits.astype(jnp.float32), 0.0)
  losses, z_losses = token_cross_entropy(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing)
  correct = counted & (jnp.argmax(logits, axis=-1) == targets)
  return jnp.sum(losses * shares), {
    "loss": jnp.sum(losses * weights),
    "z_loss": jnp.sum(z_losses * weights),
    "weight_sum": jnp.sum(weights),
    "correct": jnp.sum(correct, dtype=jnp.float32),
    "num_targets": jnp.sum(counted, dtype=jnp.float32),
  }


def _example_weights(weights: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Return, for each target, the summed weight of its example: (rows, length) or (rows, 1) float32."""
  segment_ids, positions = batch.get("decoder_segment_ids"), batch.get("decoder_positions")
  if segment_ids is None:
    return jnp.sum(weights, axis=1, keepdims=True)
  begins = segment_ids != jnp.roll(segment_ids, 1, axis=1) if positions is None else positions == 0
  # 0 is padding, and belongs to no example.
  numbers = jnp.where(segment_ids == 0, 0, 1 + jnp.cumsum(begins.astype(jnp.int32), axis=1))
  same_example = (numbers[:, :, None] == numbers[:, None, :]) & (numbers[:, :, None] != 0)
  # Summed by a fused loop: a product of matrices would round the weights on some accelerators.
  return jnp.sum(jnp.where(same_example, weights[:, None, :], 0.0), axis=2)


def _divide(x: jax.Array, by: jax.Array) -> jax.Array:
  """Return x / by, and 0 where `by` is 0."""
  return jnp.where(by == 0.0, 0.0, x / jnp.where(by == 0.0, 1.0, by))
