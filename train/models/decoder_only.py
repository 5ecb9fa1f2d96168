"""Decoder-only model: a language model or prefix language model with its loss, scores and optimizer."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from anystep.features.converters import DecoderConverter, FeatureConverter
from anystep.train.decoding.steps import DecodeFn
from anystep.train.models.base import Batch, Tree
from anystep.train.models.prediction import (
  GREEDY,
  check_unpacked,
  find_eos_id,
  make_step,
  prefilled,
  select_decodes,
  without_prompts,
)
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
    """See `base.PredictingModel`: the batch holds `decoder_input_tokens` and `decoder_causal_attention`.

    The tokens that the latter marks are the prompts; tokens behind them are ignored. Predictions begin after
    the prompt, which they share the row's length with.

    Raises:
      ValueError: the batch lacks a feature, or its rows are packed.
    """
    check_features(batch, ("decoder_input_tokens", "decoder_causal_attention"))
    check_unpacked(batch)
    prefix = batch["decoder_causal_attention"]
    prompts = batch["decoder_input_tokens"] * prefix
    length = prompts.shape[1]
    keywords = {"decoder_causal_attention": prefix} if self.inputs_bidirectional_attention else {}
    filled = prefilled(self.module, params, prompts, length=length, **keywords)
    # The marks are one more than the prompt's tokens, for the first token.
    prompt_lengths = jnp.maximum(jnp.sum(prefix, axis=1, dtype=jnp.int32) - 1, 0)
    sequences, scores = decode_fn(
      prompts,
      filled["cache"],
      make_step(self.module, params, filled, length=length),
      eos_id=find_eos_id(self.vocabulary),
      num_decodes=num_decodes,
      initial_index=prompt_lengths,
      keys=keys,
    )
    return select_decodes(
      without_prompts(sequences, prompt_lengths), scores, return_all_decodes=return_all_decodes
    )

  def boxed_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """See `NetworkModel`."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return dict(self.module.lazy_init(rng, tokens, decoder_target_tokens=tokens))
