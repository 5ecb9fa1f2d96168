"""Encoder-decoder model: a network with its loss, scores and optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from anystep.features.converters import EncoderDecoderConverter, FeatureConverter
from anystep.train.decoding.steps import DecodeFn
from anystep.train.models.base import Batch, Tree
from anystep.train.models.prediction import (
  GREEDY,
  check_unpacked,
  find_eos_id,
  make_step,
  prefilled,
  select_decodes,
)
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

  def predict_batch_with_aux(
    self,
    params: Tree,
    batch: Batch,
    *,
    decode_fn: DecodeFn = GREEDY,
    num_decodes: int = 1,
    keys: jax.Array | None = None,
    return_all_decodes: bool = False,
    prompt_with_targets: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """See `base.PredictingModel`: the batch holds `encoder_input_tokens` and `decoder_input_tokens`.

    The latter's length is that of the predictions; with `prompt_with_targets`, its tokens but ends of
    sequence are forced.

    Raises:
      ValueError: the batch lacks a feature, or its rows are packed.
    """
    check_features(batch, ("encoder_input_tokens", "decoder_input_tokens"))
    check_unpacked(batch)
    inputs, targets = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    eos_id = find_eos_id(self.output_vocabulary)
    prompts = jnp.where(targets == eos_id, 0, targets) if prompt_with_targets else jnp.zeros_like(targets)
    length = targets.shape[1]
    filled = prefilled(self.module, params, inputs, length=length)
    sequences, scores = decode_fn(
      prompts,
      filled["cache"],
      make_step(self.module, params, filled, length=length, encoder_input_tokens=inputs),
      eos_id=eos_id,
      num_decodes=num_decodes,
      initial_index=None,
      keys=keys,
    )
    return select_decodes(sequences, scores, return_all_decodes=return_all_decodes)

  def boxed_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """See `NetworkModel`."""
    # lazy_init leaves the forward pass out of the compiled program: only its shapes are needed.
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return dict(self.module.lazy_init(rng, tokens, tokens, decoder_target_tokens=tokens))
