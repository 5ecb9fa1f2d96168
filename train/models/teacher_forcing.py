"""Loss and scores of models that predict each target token, given those before it."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from anystep.features.converters import EncoderDecoderConverter, FeatureConverter
from anystep.limits import is_number
from anystep.train.decoding.steps import DecodeFn
from anystep.train.models.base import Batch, Metrics, Tree
from anystep.train.models.losses import (
  LossNormalizingFactor,
  batch_loss,
  token_cross_entropy,
  with_normalized_weights,
)
from anystep.train.models.prediction import GREEDY
from anystep.train.optimizers.logical_axes import check_transformation

TARGET_FEATURES = ("decoder_target_tokens", "decoder_loss_weights")


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherForcedModel(abc.ABC):
  """Network with the cross entropy of its logits; subclasses add the network and apply it.

  Batches map names to arrays of shape (rows, length): `decoder_target_tokens` (int32, 0 is padding) and
  `decoder_loss_weights` (float or int, 0 at padding), `decoder_segment_ids` where rows are packed, and what
  the network reads. Other entries are ignored.

  Attributes:
    optimizer_def: optimizer of the parameters, such as `optimizers.adafactor(...)`; the trainer runs it.
    z_loss: see `losses.token_cross_entropy`.
    label_smoothing: see `losses.token_cross_entropy`.
    loss_normalizing_factor: None trains on the sum over tokens, as T5 does, whose Adafactor is indifferent
      to the loss's scale; a number divides it; a `LossNormalizingFactor`, or the name of one, divides it by
      what the batch holds.

  Raises:
    ValueError: label_smoothing is not in [0, 1), z_loss is below 0, or loss_normalizing_factor is no number
      above 0 and no known name.
    AnystepError: 78 `optimizer` if optimizer_def is no optimizer.
  """

  optimizer_def: optax.GradientTransformation | None = dataclasses.field(default=None, kw_only=True)
  z_loss: float = dataclasses.field(default=1e-4, kw_only=True)
  label_smoothing: float = dataclasses.field(default=0.0, kw_only=True)
  loss_normalizing_factor: float | str | LossNormalizingFactor | None = dataclasses.field(
    default=None, kw_only=True
  )

  def __post_init__(self):
    name = type(self).__name__
    if not is_number(self.z_loss, least=0.0):
      raise ValueError(f"{name}.z_loss: expected a number of at least 0, got {self.z_loss!r}")
    if not is_number(self.label_smoothing, least=0.0) or self.label_smoothing >= 1.0:
      raise ValueError(f"{name}.label_smoothing: expected a rate in [0, 1), got {self.label_smoothing!r}")
    factor = self.loss_normalizing_factor
    if isinstance(factor, str):
      if factor not in LossNormalizingFactor.__members__:
        known = ", ".join(LossNormalizingFactor.__members__)
        raise ValueError(
          f"{name}.loss_normalizing_factor: expected None, a number or one of {known}; got {factor!r}"
        )
      object.__setattr__(self, "loss_normalizing_factor", LossNormalizingFactor[factor])
    elif not isinstance(factor, LossNormalizingFactor | None) and not (is_number(factor) and factor > 0):
      raise ValueError(f"{name}.loss_normalizing_factor: expected a number to divide by, got {factor!r}")
    if self.optimizer_def is not None and not hasattr(self.optimizer_def, "update"):
      check_transformation(f"{name}.optimizer_def", self.optimizer_def)

  @abc.abstractmethod
  def logits(self, params: Tree, batch: Batch, row_keys: jax.Array | None = None) -> jax.Array:
    """Return the logits of every target: (rows, length, vocab_size) float32.

    Args:
      params: the parameters.
      batch: a batch, as the class describes.
      row_keys: (rows,) JAX random keys for dropout, one for each row; None for no dropout.
    """

  def loss_fn(self, params: Tree, batch: Batch, rng: jax.Array | None = None) -> tuple[jax.Array, Metrics]:
    """See `base.Model`; the key of row i is fold_in(rng, i) if rng is one key."""
    return self.loss_of_logits(self.logits(params, batch, make_row_keys(rng, batch)), batch)

  def score_batch(self, params: Tree, batch: Batch) -> dict[str, jax.Array]:
    """See `base.Model`."""
    return scores_of_logits(self.logits(params, batch), batch)

  def predict_batch(self, params: Tree, batch: Batch, **options: Any) -> jax.Array:
    """See `base.PredictingModel`."""
    return self.predict_batch_with_aux(params, batch, **options)[0]

  @abc.abstractmethod
  def predict_batch_with_aux(
    self,
    params: Tree,
    batch: Batch,
    *,
    decode_fn: DecodeFn = GREEDY,
    num_decodes: int = 1,
    keys: jax.Array | None = None,
    return_all_decodes: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """See `base.PredictingModel`."""

  def loss_of_logits(self, logits: jax.Array, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Return the loss to minimise, and sums for reports, as `base.Model.loss_fn` does."""
    check_features(batch, TARGET_FEATURES)
    return batch_loss(
      logits, batch, factor=self._factor, z_loss=self.z_loss, label_smoothing=self.label_smoothing
    )

  def normalized(self, batch: Batch) -> Batch:
    """Return the batch with weights divided as the loss of all its rows divides them.

    The losses of parts of the result add up to the loss of the batch.
    """
    return with_normalized_weights(batch, self._factor)

  @property
  def _factor(self) -> float | LossNormalizingFactor | None:
    assert not isinstance(self.loss_normalizing_factor, str), "__post_init__ made it a member"
    return self.loss_normalizing_factor


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkModel(TeacherForcedModel):
  """Model of a network of `train.network`, whose parameters are boxed with their logical axes.

  Attributes:
    module: the network; its `config` has the size of the vocabulary.

  Raises:
    ValueError: the module has no such config, or another network's, or is a network of other features.
  """

  feature_converter: ClassVar[FeatureConverter]

  module: nn.Module

  def __post_init__(self):
    super().__post_init__()
    name = type(self).__name__
    if not hasattr(getattr(self.module, "config", None), "vocab_size"):
      raise ValueError(f"{name}.module: expected a network with its config, got {self.module!r}")
    network = type(self.module)
    kind = next((field.type for field in dataclasses.fields(network) if field.name == "config"), None)
    if isinstance(kind, type) and not isinstance(self.module.config, kind):
      got = type(self.module.config).__name__
      raise ValueError(f"{network.__name__}.config: expected a {kind.__name__}, got a {got}")
    with_encoder = isinstance(self.feature_converter, EncoderDecoderConverter)
    if with_encoder is not ("encoder_input_tokens" in inspect.signature(network.__call__).parameters):
      expected = f"a network {'with' if with_encoder else 'without'} encoder_input_tokens"
      raise ValueError(f"{name}.module: expected {expected}, got {network.__name__}")

  @property
  def vocab_size(self) -> int:
    """See `base.Model`."""
    return self.module.config.vocab_size

  def initial_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """See `base.Model`."""
    return nn.unbox(self.boxed_variables(rng))

  def logical_axes(self) -> dict[str, Tree]:
    """See `base.Model`."""
    return nn.get_partition_spec(jax.eval_shape(lambda: self.boxed_variables(jax.random.key(0))))

  @abc.abstractmethod
  def boxed_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """Return initial parameters, each boxed with its logical axes."""


def scores_of_logits(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
  """Return the targets' log-likelihoods, each times its weight, as `base.Model.score_batch` does."""
  check_features(batch, TARGET_FEATURES)
  losses, _ = token_cross_entropy(logits, batch["decoder_target_tokens"])
  weights = batch["decoder_loss_weights"].astype(jnp.float32)
  token_scores = jnp.where(weights == 0.0, 0.0, -losses * weights)
  return {
    "scores": jnp.sum(token_scores, axis=-1),
    "token_scores": token_scores,
    "predictions": jnp.argmax(logits, axis=-1).astype(jnp.int32),
  }


def make_row_keys(rng: jax.Array | None, batch: Batch) -> jax.Array | None:
  """Return the keys of a batch's rows: fold_in(rng, row), unless rng already is one key for each row.

  docs/order.md#draws-after-the-cache.
  """
  if rng is None or rng.ndim:
    return rng
  num_rows = next(iter(batch.values())).shape[0]
  return jax.vmap(jax.random.fold_in, (None, 0))(rng, np.arange(num_rows, dtype=np.uint32))


def check_features(batch: Mapping[str, Any], names: Sequence[str]) -> None:
  """Refuse a batch that lacks a feature.

  Raises:
    ValueError: names of the missing features.
  """
  missing = [name for name in names if name not in batch]
  if missing:
    raise ValueError(f"batch: expected the features {tuple(names)}, got {tuple(batch)}; {missing} missing")
