"""Decoder-only model: a language model or prefix language model with its loss, scores and optimizer."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from anystep.features.converters import DecoderConverter, FeatureConverter
from anystep.train.models.base import Batch, Tree
from anystep.train.models.teacher_forcing import TARGET_FEATURES, NetworkModel, check_features

_FEATURES = ("decoder_input_tokens", *TARGET_FEATURES)
_POSITIONS = "decoder_positions"


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderOnlyModel(NetworkModel):
  """Decoder-only network, trained by teacher forcing.

  Where `task_feature_lengths` has a length for `targets` alone it is a language model of the targets. With
  `inputs` too, a row holds the inputs and after them the targets, and the loss is on the targets only.

  Batches hold `decoder_input_tokens` (int32, 0 is padding) besides what `TeacherForcedModel` names, and with
  inputs `decoder_causal_attention`: 1 on the inputs and on the first target, whose input is the last of them.

  Attributes:
    module: the network, called as `network.DecoderWrapper` is, or as `network.Llama`, which takes positions.
    vocabulary: vocabulary of inputs and targets; the trainer compares it with the tasks'.
    inputs_bidirectional_attention: whether the inputs see all inputs, a prefix language model (Raffel et al.
      2020, section 3.2.1), and not only those before them.
  """

  feature_converter: ClassVar[FeatureConverter] = DecoderConverter()

  vocabulary: Any = None
  inputs_bidirectional_attention: bool = False

  def __post_init__(self):
    super().__post_init__()
    if not isinstance(self.inputs_bidirectional_attention, bool):
      raise ValueError(
        "DecoderOnlyModel.inputs_bidirectional_attention: expected True or False,"
        f" got {self.inputs_bidirectional_attention!r}"
      )

  @property
  def vocabularies(self) -> Mapping[str, Any]:
    """See `base.Model`."""
    return {"inputs": self.vocabulary, "targets": self.vocabulary}

  def logits(self, params: Tree, batch: Batch, row_keys: jax.Array | None = None) -> jax.Array:
    """See `TeacherForcedModel`.

    Raises:
      ValueError: the batch lacks a feature.
    """
    prefix = ["decoder_causal_attention"] if self.inputs_bidirectional_attention else []
    check_features(batch, [*_FEATURES, *prefix])
    takes_positions = _POSITIONS in inspect.signature(type(self.module).__call__).parameters
    names = ["decoder_segment_ids", *prefix, *([_POSITIONS] if takes_positions else [])]
    keywords: dict[str, Any] = {name: batch[name] for name in names if name in batch}
    logits = self.module.apply(
      {"params": params},
      batch["decoder_input_tokens"],
      decoder_target_tokens=batch["decoder_target_tokens"],
      row_keys=row_keys,
      **keywords,
    )
    return cast(jax.Array, logits)

  def boxed_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """See `NetworkModel`."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return dict(self.module.lazy_init(rng, tokens, decoder_target_tokens=tokens))
