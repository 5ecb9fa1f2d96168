"""Predictions of models: sequences that a decoding function makes of a network's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from anystep.train.decoding.key_value_cache import CACHE, ENCODED
from anystep.train.decoding.sampling import temperature_sample
from anystep.train.decoding.steps import DecodeFn, DecodingState, repeat_rows
from anystep.train.models.base import Batch, Tree

DEFAULT_EOS_ID = 1
GREEDY: DecodeFn = partial(temperature_sample, temperature=0.0, rescale_log_probs=False)
"""The likeliest token at each position; scores are log-likelihoods."""


def find_eos_id(vocabulary: Any) -> int:
  """Return a vocabulary's end of sequence; 1, as in T5X, where it has none or there is no vocabulary."""
  eos_id = getattr(vocabulary, "eos_id", None)
  return DEFAULT_EOS_ID if eos_id is None else int(eos_id)


def check_unpacked(batch: Mapping[str, Any]) -> None:
  """Refuse packed rows, whose examples would have to be decoded one by one.

  Raises:
    ValueError: the batch has segment ids.
  """
  packed = [name for name in batch if name.endswith("_segment_ids")]
  if packed:
    raise ValueError(f"batch: expected one example in each row to predict, got packed rows with {packed[0]}")


def prefilled(module: Any, params: Tree, *args: Any, **keywords: Any) -> dict[str, Tree]:
  """Return the collections that a network's `prefill` fills: `cache`, and `encoded` of an encoder."""
  _, filled = module.apply({"params": params}, *args, method="prefill", mutable=[CACHE, ENCODED], **keywords)
  return dict(filled)


def make_step(module: Any, params: Tree, filled: Mapping[str, Tree], **keywords: Any) -> Any:
  """Return the function of one step of a network, see `decoding.steps.TokensToLogits`.

  Args:
    module: the network; its `decode_step` is called.
    params: its parameters.
    filled: what `prefilled` returned.
    **keywords: further arguments of `decode_step`.
  """
  constant = {name: tree for name, tree in filled.items() if name != CACHE}

  def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Tree]:
    variables = {"params": params, CACHE: state.cache, **constant}
    logits, changed = module.apply(
      variables, state.cur_token, state.cur_index, method="decode_step", mutable=[CACHE], **keywords
    )
    return logits, changed[CACHE]

  return tokens_to_logits


def predict_without_cache(
  logits_of: Callable[[Batch], jax.Array],
  batch: Batch,
  *,
  decode_fn: DecodeFn,
  eos_id: int,
  num_decodes: int,
  keys: jax.Array | None,
  return_all_decodes: bool,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Return what a module predicts that keeps no keys and values: each step computes all tokens again.

  Tokens that `decoder_causal_attention` marks, where the batch has it, are the prompts.

  Args:
    logits_of: from features to the logits of all tokens, (rows, length, vocab_size).
    batch: see `base.PredictingModel`; the others are its arguments.

  Raises:
    ValueError: the batch lacks `decoder_input_tokens`, or its rows are packed.
  """
  check_unpacked(batch)
  if "decoder_input_tokens" not in batch:
    raise ValueError(f"batch: expected decoder_input_tokens, got {tuple(batch)}")
  tokens, prefix = batch["decoder_input_tokens"], batch.get("decoder_causal_attention")
  prompts = jnp.zeros_like(tokens) if prefix is None else tokens * prefix
  length = tokens.shape[1]
  rows = repeat_rows(dict(batch), num_decodes)

  def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Tree]:
    index = jnp.minimum(state.cur_index, length - 1)[:, None]
    features = rows | {
      "decoder_input_tokens": state.sequences[:, :length],
      # Where targets are 0 there is padding.
      "decoder_target_tokens": (jnp.arange(length)[None, :] <= index).astype(jnp.int32),
    }
    return jnp.take_along_axis(logits_of(features), index[:, :, None], axis=1)[:, 0], state.cache

  sequences, scores = decode_fn(
    prompts,
    {},
    tokens_to_logits,
    eos_id=eos_id,
    num_decodes=num_decodes,
    initial_index=None,
    keys=keys,
  )
  if prefix is not None:
    prompt_lengths = jnp.maximum(jnp.sum(prefix, axis=1, dtype=jnp.int32) - 1, 0)
    sequences = without_prompts(sequences, prompt_lengths)
  return select_decodes(sequences, scores, return_all_decodes=return_all_decodes)


def select_decodes(
  sequences: jax.Array, scores: jax.Array, *, return_all_decodes: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Return all decodes of each row, or those with the highest score, which are the last, and their scores."""
  if return_all_decodes:
    return sequences, {"scores": scores}
  return sequences[:, -1], {"scores": scores[:, -1]}


def without_prompts(sequences: jax.Array, prompt_lengths: jax.Array) -> jax.Array:
  """Return sequences that begin after their prompts, with zeros at the end.

  Args:
    sequences: (rows, decodes, length) int32.
    prompt_lengths: (rows,) int32.

  >>> without_prompts(jnp.array([[[7, 8, 5, 1]]]), jnp.array([2])).tolist()
  [[[5, 1, 0, 0]]]
  """
  length = sequences.shape[-1]
  places = jnp.arange(length)[None, None, :] + prompt_lengths[:, None, None]
  moved = jnp.take_along_axis(sequences, jnp.minimum(places, length - 1), axis=-1)
  return jnp.where(places < length, moved, 0)
