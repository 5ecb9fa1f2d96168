"""Greedy decoding and sampling, with T5X's meaning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from anystep.limits import is_count, is_number
from anystep.train.decoding.keys import sample_keys
from anystep.train.decoding.steps import (
  Cache,
  DecodingState,
  TokensToLogits,
  find_prompts,
  repeat_rows,
  split_rows,
  take_at,
  write_at,
)
from anystep.train.decoding.truncation import keep_top_k, keep_top_p

GREEDY_TEMPERATURE = 1e-4
"""Temperatures up to this are greedy, as in T5X: a quotient by less may overflow."""


@flax.struct.dataclass
class SamplingState:
  """State of the loop.

  Attributes:
    cur_index: (rows,) int32, the position of each row's current token.
    sequences: (rows, length + 2) int32: the first token, what stands so far, and a place that ended rows
      write to.
    cur_token: (rows, 1) int32, the current token.
    cache: the cache.
    ended: (rows,) bool.
    log_probs: (rows,) float32, the sum over the decoded tokens.
  """

  cur_index: jax.Array
  sequences: jax.Array
  cur_token: jax.Array
  cache: Cache
  ended: jax.Array
  log_probs: jax.Array


LogitCallback = Callable[[jax.Array, SamplingState], jax.Array]


def temperature_sample(
  inputs: jax.Array,
  cache: Cache,
  tokens_to_logits: TokensToLogits,
  *,
  eos_id: int,
  num_decodes: int = 1,
  initial_index: jax.Array | None = None,
  keys: jax.Array | None = None,
  temperature: float | jax.Array = 1.0,
  topk: int = 0,
  topp: float = 0.0,
  max_decode_steps: int | jax.Array | None = None,
  max_decode_steps_hard_limit: int | None = None,
  rescale_log_probs: bool = True,
  logit_callback: LogitCallback | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Return sequences whose tokens are drawn one after the other from softmax(logits / temperature).

  Tokens of the inputs are forced: where an input is not 0, it is the token. A row ends with its first end of
  sequence beyond those of its inputs, or at its last position; the loop ends when all rows have.

  A draw depends on the row's key, the sample's number and the position alone, so a row's tokens do not
  depend on the rows beside it.

  Args:
    inputs: (rows, length) int32, the first token, 0 or another, then the prompt and zeros.
    cache: arrays whose first axis counts the rows.
    tokens_to_logits: the step, for rows * num_decodes rows.
    eos_id: id of the end of sequence.
    num_decodes: number of samples of each row.
    initial_index: (rows,) int32, where a cache that holds the prompts' keys and values goes on: the position
      of each prompt's last token. None to begin at position 0.
    keys: (rows,) JAX random keys, see `example_keys`; None where the temperature is 0.
    temperature: one number, or (rows,) of them; up to 1e-4 the likeliest token is taken.
    topk: number of the likeliest tokens to draw from; 0 for all.
    topp: probability of the likeliest tokens to draw from, see `keep_top_p`; 0 for all. With both, topp is of
      what topk leaves.
    max_decode_steps: most tokens after the prompt.
    max_decode_steps_hard_limit: bound of max_decode_steps, where that is an array.
    rescale_log_probs: whether scores are of the distribution that is drawn from, so 0 where it is greedy;
      else of softmax(logits).
    logit_callback: function from logits and the state to other logits, before anything else is done to them.

  Returns:
    sequences: (rows, num_decodes, length) int32, without the first token; those of a row by rising score.
    scores: (rows, num_decodes) float32, the sum of log-probabilities of the tokens that were not forced, up
      to the end of sequence and with it.

  Raises:
    ValueError: topk or topp is out of range, more steps than length are asked for, or keys are missing.
  """
  _check_arguments(topk, topp, keys, temperature, max_decode_steps, inputs.shape[1])
  num_rows, length = inputs.shape
  rows = partial(repeat_rows, times=num_decodes)
  always_greedy = _is_greedy(temperature)
  temperatures = rows(jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (num_rows,)))
  row_keys = None if always_greedy or keys is None else sample_keys(keys, num_decodes)
  begin, prompt_lengths = find_prompts(inputs, initial_index)
  lengths = jnp.full((num_rows,), length, jnp.int32)
  if max_decode_steps is not None:
    if max_decode_steps_hard_limit:
      max_decode_steps = jnp.minimum(max_decode_steps, max_decode_steps_hard_limit)
    lengths = jnp.minimum(prompt_lengths + jnp.asarray(max_decode_steps, jnp.int32), length)
  begin, lengths = rows(begin), rows(lengths)
  sequences = rows(jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, 2))))
  num_eos_in_prompt = jnp.sum(sequences == eos_id, axis=1)
  first = take_at(sequences, begin)

  def choose(logits: jax.Array, cur_index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the next tokens and their log-probabilities: (rows,) each."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn_from = logits
    if row_keys is not None:
      is_drawn = temperatures > GREEDY_TEMPERATURE
      scaled = logits / jnp.maximum(temperatures, GREEDY_TEMPERATURE)[:, None]
      scaled = keep_top_k(scaled, topk) if topk else scaled
      scaled = keep_top_p(scaled, topp) if topp else scaled
      step_keys = jax.vmap(jax.random.fold_in)(row_keys, cur_index)
      drawn = jax.vmap(jax.random.categorical)(step_keys, scaled).astype(jnp.int32)
      tokens = jnp.where(is_drawn, drawn, tokens)
      drawn_from = scaled if rescale_log_probs else logits
    elif rescale_log_probs:
      return tokens, jnp.zeros(tokens.shape, jnp.float32)
    log_probs = take_at(jax.nn.log_softmax(drawn_from), tokens)
    if row_keys is not None and rescale_log_probs:
      log_probs = jnp.where(is_drawn, log_probs, 0.0)
    return tokens, log_probs

  def step(state: SamplingState) -> SamplingState:
    logits, cache = tokens_to_logits(
      DecodingState(
        cur_index=state.cur_index,
        sequences=state.sequences[:, :-2],
        cur_token=state.cur_token,
        cache=state.cache,
      )
    )
    if logit_callback is not None:
      logits = logit_callback(logits, state)
    tokens, log_probs = choose(logits, state.cur_index)
    index = jnp.minimum(state.cur_index, lengths)
    forced = take_at(state.sequences, index + 1)
    is_free = forced == 0
    counted = is_free & ~state.ended
    tokens = jnp.where(state.ended, 0, jnp.where(is_free, tokens, forced))
    sequences = write_at(state.sequences, tokens, index + 1)
    has_eos = jnp.sum(sequences == eos_id, axis=1) > num_eos_in_prompt
    return SamplingState(
      cur_index=index + 1,
      sequences=sequences,
      cur_token=tokens[:, None],
      cache=cache,
      ended=state.ended | has_eos | (index >= lengths - 1),
      log_probs=state.log_probs + jnp.where(counted, log_probs, 0.0),
    )

  state = SamplingState(
    cur_index=begin,
    sequences=sequences,
    cur_token=first[:, None],
    cache=rows(cache),
    ended=jnp.zeros(begin.shape, bool),
    log_probs=jnp.zeros(begin.shape, jnp.float32),
  )
  state = jax.lax.while_loop(lambda state: ~jnp.all(state.ended), step, state)
  sequences = split_rows(state.sequences[:, 1:-1], num_decodes)
  scores = split_rows(state.log_probs, num_decodes)
  order = jnp.argsort(scores, axis=-1)
  return jnp.take_along_axis(sequences, order[:, :, None], axis=1), jnp.take_along_axis(scores, order, axis=1)


def _is_greedy(temperature: float | jax.Array) -> bool:
  """Return whether the temperature is known to be 0 for all rows."""
  is_known = not isinstance(temperature, jax.core.Tracer)
  return is_known and bool(np.all(np.asarray(temperature) <= GREEDY_TEMPERATURE))


def _check_arguments(
  topk: int,
  topp: float,
  keys: jax.Array | None,
  temperature: float | jax.Array,
  max_decode_steps: int | jax.Array | None,
  length: int,
) -> None:
  if not is_count(topk, least=0):
    raise ValueError(f"topk: expected a whole number of at least 0, got {topk!r}")
  if not is_number(topp, least=0.0) or topp > 1.0:
    raise ValueError(f"topp: expected a probability in [0, 1], got {topp!r}")
  if keys is None and not _is_greedy(temperature):
    raise ValueError("keys: expected a key for each row where tokens are drawn, got None; see example_keys")
  if isinstance(max_decode_steps, int) and not 0 < max_decode_steps <= length:
    raise ValueError(f"max_decode_steps: expected 1 to {length}, the inputs' length, got {max_decode_steps}")
