"""Encoder-decoder model: a network with its loss, scores and optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from anystep.features.converters import EncoderDecoderConverter, FeatureConverter
from anystep.train.models.losses import (
  LossNormalizingFactor,
  normalized_weights,
  token_cross_entropy,
  weighted_cross_entropy,
)

Params = Any  # nested dicts of arrays

FEATURES = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
PACKING_FEATURES = ("encoder_segment_ids", "decoder_segment_ids")


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderDecoderModel:
  """Encoder-decoder network, trained by teacher forcing.

  Batches map names to arrays of shape (rows, length): `encoder_input_tokens`, `decoder_input_tokens`,
  `decoder_target_tokens` (int32, 0 is padding) and `decoder_loss_weights` (float or int, 0 at padding);
  packed ones have `encoder_segment_ids` and `decoder_segment_ids` besides. Other entries are ignored.

  Attributes:
    module: the network, called as `network.Transformer` is.
    input_vocabulary: vocabulary of the inputs; the trainer compares it with the tasks'.
    output_vocabulary: vocabulary of the targets; likewise.
    optimizer_def: optimizer of the parameters, such as `optimizers.adafactor(...)`; the trainer runs it.
    z_loss: see `losses.token_cross_entropy`.
    label_smoothing: see `losses.token_cross_entropy`.
    loss_normalizing_factor: None trains on the sum over tokens, as T5 does, whose Adafactor is indifferent
      to the loss's scale; a number divides it; a `LossNormalizingFactor`, or the name of one, divides it by
      what the batch holds.

  Raises:
    ValueError: label_smoothing is not in [0, 1), or loss_normalizing_factor is 0 or no known name.
  """

  FEATURE_CONVERTER: ClassVar[FeatureConverter] = EncoderDecoderConverter()

  module: nn.Module
  input_vocabulary: Any = None
  output_vocabulary: Any = None
  optimizer_def: optax.GradientTransformation | None = None
  z_loss: float = 1e-4
  label_smoothing: float = 0.0
  loss_normalizing_factor: float | str | LossNormalizingFactor | None = None

  def __post_init__(self):
    if not 0.0 <= self.label_smoothing < 1.0:
      raise ValueError(
        f"EncoderDecoderModel.label_smoothing: expected a rate in [0, 1), got {self.label_smoothing!r}"
      )
    factor = self.loss_normalizing_factor
    if isinstance(factor, str):
      if factor not in LossNormalizingFactor.__members__:
        known = ", ".join(LossNormalizingFactor.__members__)
        raise ValueError(
          f"EncoderDecoderModel.loss_normalizing_factor: expected None, a number or one of {known}; "
          f"got {factor!r}"
        )
      object.__setattr__(self, "loss_normalizing_factor", LossNormalizingFactor[factor])
    elif factor == 0:
      raise ValueError("EncoderDecoderModel.loss_normalizing_factor: expected a number to divide by, got 0")

  def init(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, int]] | None = None) -> Params:
    """Return initial parameters, float32.

    Args:
      rng: JAX random key.
      input_shapes: shapes of the features, for modules whose parameters depend on them; T5's do not.
    """
    return nn.unbox(self._boxed_params(rng, input_shapes))

  def logical_axes(self, input_shapes: Mapping[str, tuple[int, int]] | None = None) -> Params:
    """Return a PartitionSpec of logical axis names, such as ('embed', 'mlp'), for each parameter."""
    boxed = jax.eval_shape(lambda: self._boxed_params(jax.random.key(0), input_shapes))
    return nn.get_partition_spec(boxed)

  def loss_fn(
    self, params: Params, batch: Mapping[str, jax.Array], dropout_rng: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss to minimise, and sums for reports.

    Args:
      params: the parameters.
      batch: a batch, as the class describes.
      dropout_rng: JAX random key for dropout; None for none.

    Returns:
      loss: () float32, divided as `loss_normalizing_factor` says.
      metrics: sums over the batch's target tokens, each times its weight, all () float32: `loss` (before
        any division), `z_loss` (the part of it that is), `correct` (targets that have the highest logit)
        and `weight_sum`. Divided by the latter, sums of them over batches are averages by token.
    """
    logits = self._logits(params, batch, dropout_rng)
    targets = batch["decoder_target_tokens"]
    weights = batch["decoder_loss_weights"].astype(jnp.float32)
    options = {"z_loss": self.z_loss, "label_smoothing": self.label_smoothing}
    loss_sum, z_loss, weight_sum = weighted_cross_entropy(logits, targets, weights=weights, **options)
    loss = loss_sum
    if self.loss_normalizing_factor is not None:
      assert not isinstance(self.loss_normalizing_factor, str), "__post_init__ made it a member"
      weights_in_loss = normalized_weights(
        weights, self.loss_normalizing_factor, segment_ids=batch.get("decoder_segment_ids")
      )
      loss, _, _ = weighted_cross_entropy(logits, targets, weights=weights_in_loss, **options)
    correct = jnp.sum(jnp.where(jnp.argmax(logits, axis=-1) == targets, weights, 0.0))
    metrics = {"loss": loss_sum, "z_loss": z_loss, "weight_sum": weight_sum, "correct": correct}
    return loss, metrics

  def score_batch(self, params: Params, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return log-likelihoods of the targets, without dropout, z-loss or label smoothing.

    Args:
      params: the parameters.
      batch: a batch, as the class describes. Only the sign of the weights counts.

    Returns:
      scores: (rows,) float32, the log-likelihood of each row's targets: the sum of its token_scores.
      token_scores: (rows, length) float32, the log-likelihood of each target; 0 where its weight is 0.
      predictions: (rows, length) int32, the likeliest token after the targets before it.
    """
    logits = self._logits(params, batch, None)
    losses, _ = token_cross_entropy(logits, batch["decoder_target_tokens"])
    token_scores = jnp.where(batch["decoder_loss_weights"] > 0, -losses, 0.0)
    return {
      "scores": jnp.sum(token_scores, axis=-1),
      "token_scores": token_scores,
      "predictions": jnp.argmax(logits, axis=-1).astype(jnp.int32),
    }

  def _boxed_params(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, int]] | None) -> Params:
    """Initial parameters, each boxed with its logical axes."""
    shapes = dict.fromkeys(FEATURES, (1, 1)) | dict(input_shapes or {})
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    # lazy_init leaves the forward pass out of the compiled program: only its shapes are needed.
    return self.module.lazy_init(rng, *_positional(batch), **_short_names(batch))["params"]

  def _logits(
    self, params: Params, batch: Mapping[str, jax.Array], dropout_rng: jax.Array | None
  ) -> jax.Array:
    missing = [name for name in FEATURES if name not in batch]
    if missing:
      raise ValueError(f"batch: expected the features {FEATURES}, got {tuple(batch)}; {missing} missing")
    rngs = None if dropout_rng is None else {"dropout": dropout_rng}
    logits = self.module.apply({"params": params}, *_positional(batch), **_short_names(batch), rngs=rngs)
    return cast(jax.Array, logits)


def _positional(batch: Mapping[str, Any]) -> tuple[Any, Any]:
  return batch["encoder_input_tokens"], batch["decoder_input_tokens"]


def _short_names(batch: Mapping[str, Any]) -> dict[str, Any]:
  names = ("decoder_target_tokens", *PACKING_FEATURES)
  return {name: batch[name] for name in names if name in batch}
