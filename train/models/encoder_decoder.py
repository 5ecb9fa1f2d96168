"""Encoder-decoder model: a network with its loss, scores and optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from anystep.features.converters import EncoderDecoderConverter, FeatureConverter
from anystep.train.models.base import Batch, Tree
from anystep.train.models.teacher_forcing import TARGET_FEATURES, NetworkModel, check_features

_FEATURES = ("encoder_input_tokens", "decoder_input_tokens", *TARGET_FEATURES)
_KEYWORDS = ("decoder_target_tokens", "encoder_segment_ids", "decoder_segment_ids")


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderDecoderModel(NetworkModel):
  """Encoder-decoder network, trained by teacher forcing.

  Batches hold `encoder_input_tokens` and `decoder_input_tokens` (int32, 0 is padding) besides what
  `TeacherForcedModel` names; packed ones have `encoder_segment_ids` and `decoder_segment_ids`.

  Attributes:
    module: the network, called as `network.Transformer` is.
    input_vocabulary: vocabulary of the inputs; the trainer compares it with the tasks'.
    output_vocabulary: vocabulary of the targets; likewise.
  """

  feature_converter: ClassVar[FeatureConverter] = EncoderDecoderConverter()

  input_vocabulary: Any = None
  output_vocabulary: Any = None

  @property
  def vocabularies(self) -> Mapping[str, Any]:
    """See `base.Model`."""
    return {"inputs": self.input_vocabulary, "targets": self.output_vocabulary}

  def logits(self, params: Tree, batch: Batch, row_keys: jax.Array | None = None) -> jax.Array:
    """See `TeacherForcedModel`.

    Raises:
      ValueError: the batch lacks a feature.
    """
    check_features(batch, _FEATURES)
    keywords: dict[str, Any] = {name: batch[name] for name in _KEYWORDS if name in batch}
    inputs = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    return cast(jax.Array, self.module.apply({"params": params}, *inputs, row_keys=row_keys, **keywords))

  def boxed_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """See `NetworkModel`."""
    # lazy_init leaves the forward pass out of the compiled program: only its shapes are needed.
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return dict(self.module.lazy_init(rng, tokens, tokens, decoder_target_tokens=tokens))
