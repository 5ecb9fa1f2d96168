"""Cross entropy over the vocabulary, weighted by token, and normalization of losses."""

import enum

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


def weighted_cross_entropy(
  logits: jax.Array,
  targets: jax.Array,
  *,
  weights: jax.Array,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return the weighted sum of the losses of `token_cross_entropy`.

  Args:
    logits: (rows, length, vocab_size) float. Where the weight is 0 they may be anything, nan included.
    targets: (rows, length) int.
    weights: (rows, length) float or int, 0 at padding.
    z_loss: see `token_cross_entropy`.
    label_smoothing: see `token_cross_entropy`.

  Returns:
    loss: () float32, the sum of weight times loss, the z-loss included.
    z_loss: () float32, the sum of weight times z-loss.
    weight_sum: () float32.
  """
  weights = weights.astype(jnp.float32)
  # 0 * nan is nan, and so is its gradient: what has no weight must be gone before the loss is computed.
  logits = jnp.where(weights[..., None] == 0.0, 0.0, logits.astype(jnp.float32))
  losses, z_losses = token_cross_entropy(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing)
  return jnp.sum(losses * weights), jnp.sum(z_losses * weights), jnp.sum(weights)


def normalized_weights(
  weights: jax.Array,
  factor: float | LossNormalizingFactor | None,
  *,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  """Return weights divided as `factor` says, so that the loss is always a weighted sum.

  Args:
    weights: (rows, length) float or int.
    factor: a number to divide by; or what to count, see `LossNormalizingFactor`; None leaves the sum.
    segment_ids: (rows, length) int32, for packed rows: which example each target belongs to. Without them a
      row is one example.

  Returns:
    (rows, length) float32; all 0 where there is nothing to divide by.

  >>> weights = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]])
  >>> normalized_weights(weights, LossNormalizingFactor.AVERAGE_PER_SEQUENCE).tolist()
  [[0.125, 0.125, 0.125, 0.125], [0.5, 0.0, 0.0, 0.0]]
  """
  weights = weights.astype(jnp.float32)
  if factor is None:
    return weights
  if factor is LossNormalizingFactor.NUM_REAL_TARGET_TOKENS:
    return _divide(weights, jnp.sum(weights, keepdims=True))
  if factor is LossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS:
    return weights / weights.size
  if factor is LossNormalizingFactor.AVERAGE_PER_SEQUENCE:
    if segment_ids is None:
      example_weights = jnp.sum(weights, axis=1, keepdims=True)
    else:
      same_example = segment_ids[:, :, None] == segment_ids[:, None, :]
      example_weights = jnp.einsum("bqk,bk->bq", same_example.astype(jnp.float32), weights)
    shares = _divide(weights, example_weights)
    return _divide(shares, jnp.sum(shares, keepdims=True))
  return weights / factor


def _divide(x: jax.Array, by: jax.Array) -> jax.Array:
  """Return x / by, and 0 where `by` is 0."""
  return jnp.where(by == 0.0, 0.0, x / jnp.where(by == 0.0, 1.0, by))
