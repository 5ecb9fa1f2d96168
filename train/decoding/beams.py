"""Beam search, with T5X's meaning or Hugging Face's."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from anystep.limits import is_count
from anystep.train.decoding.beam_rules import NOTHING, BeamRules, Progress, T5XBeams
from anystep.train.decoding.steps import (
  Cache,
  DecodingState,
  TokensToLogits,
  find_prompts,
  join_rows,
  repeat_rows,
  split_rows,
  take_at,
)

T5X_BEAMS = T5XBeams()


@flax.struct.dataclass
class BeamState:
  """State of the loop; beams stand from the worst to the best.

  Attributes:
    num_steps: () int32, steps done; tokens of step s are at place s + 1 of the sequences.
    done: (rows,) bool, rows whose sequences stay as they are.
    live: (rows, beams, max_decode_len + 1) int32, sequences that may go on.
    live_log_probs: (rows, beams) float32.
    finished: like live.
    finished_scores: (rows, beams) float32, NOTHING where a slot is empty.
    finished_flags: (rows, beams) bool, whether a slot has a sequence.
    cache: the cache of the live sequences.
  """

  num_steps: jax.Array
  done: jax.Array
  live: jax.Array
  live_log_probs: jax.Array
  finished: jax.Array
  finished_scores: jax.Array
  finished_flags: jax.Array
  cache: Cache


def beam_search(
  inputs: jax.Array,
  cache: Cache,
  tokens_to_logits: TokensToLogits,
  *,
  eos_id: int,
  num_decodes: int = 4,
  initial_index: jax.Array | None = None,
  keys: jax.Array | None = None,
  rules: BeamRules = T5X_BEAMS,
  max_decode_len: int | None = None,
  max_decode_step: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Return the sequences with the highest scores that a search of this width finds.

  Tokens of the inputs are forced, and add nothing to a score: where an input is not 0, it is the token. Of
  each step's candidates the likeliest 2 * num_decodes are looked at, so that as many as num_decodes may end
  and others go on.

  Args:
    inputs: (rows, length) int32, the first token, 0 or another, then the prompt and zeros.
    cache: arrays whose first axis counts the rows.
    tokens_to_logits: the step, for rows * num_decodes rows.
    eos_id: id of the end of sequence.
    num_decodes: number of beams, and of sequences of each row.
    initial_index: (rows,) int32, see `temperature_sample`.
    keys: for the signature that decoding functions share; nothing is drawn.
    rules: score and end of the search.
    max_decode_len: length of the sequences, the prompt's tokens counted; None for that of the inputs.
    max_decode_step: most steps; None for no limit.

  Returns:
    sequences: (rows, num_decodes, max_decode_len) int32, without the first token, from the worst to the
      best. A row that has fewer finished sequences than num_decodes has zeros in the places of others; one
      that has none may return sequences without an end, see `BeamRules`.
    scores: (rows, num_decodes) float32, NOTHING (-1e7) where there is no sequence.

  Raises:
    ValueError: a number is not a whole one of at least 1.
  """
  del keys
  for name, value in [("max_decode_len", max_decode_len), ("max_decode_step", max_decode_step)]:
    if value is not None and not is_count(value, least=1):
      raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
  num_rows, length = inputs.shape
  inputs = inputs.astype(jnp.int32)
  max_length = length if max_decode_len is None else max_decode_len
  begin, prompt_lengths = find_prompts(inputs, initial_index)
  # With a filled cache the prompt's last token takes the place of the first token, and nothing is forced.
  first = take_at(inputs, begin)
  forced = inputs if initial_index is None else jnp.zeros_like(inputs)
  forced = jnp.pad(forced, ((0, 0), (0, max(0, max_length + 1 - length))))
  max_steps = max_length - begin
  if max_decode_step is not None:
    max_steps = jnp.minimum(max_steps, max_decode_step)

  def step(state: BeamState) -> BeamState:
    token = jax.lax.dynamic_index_in_dim(join_rows(state.live), state.num_steps, axis=1)
    logits, cache = tokens_to_logits(
      DecodingState(
        cur_index=repeat_rows(begin + state.num_steps, num_decodes),
        sequences=join_rows(state.live),
        cur_token=token,
        cache=state.cache,
      )
    )
    log_probs = split_rows(jax.nn.log_softmax(logits), num_decodes) + state.live_log_probs[:, :, None]
    vocab_size = log_probs.shape[-1]
    candidate_log_probs, chosen = jax.lax.top_k(log_probs.reshape(num_rows, -1), 2 * num_decodes)
    beams, tokens = chosen // vocab_size, chosen % vocab_size
    # Within the prompt one beam lives, for all would decode the same.
    prompt_token = jax.lax.dynamic_index_in_dim(forced, state.num_steps + 1, axis=1)
    is_free = prompt_token == 0
    alone = jnp.where(jnp.arange(2 * num_decodes) == 0, 0.0, NOTHING)[None, :]
    candidate_log_probs = jnp.where(is_free, candidate_log_probs, alone)
    tokens = jnp.where(is_free, tokens, prompt_token)
    candidates = _take_beams(state.live, beams)
    candidates = jax.lax.dynamic_update_slice_in_dim(
      candidates, tokens[:, :, None], state.num_steps + 1, axis=2
    )

    is_full = (state.num_steps + 1 >= max_steps)[:, None]
    ends, finishes = rules.finishes(tokens == eos_id, is_full, num_decodes)
    live_log_probs, best = _best(candidate_log_probs + jnp.where(ends, NOTHING, 0.0), num_decodes)
    lengths = begin[:, None] + state.num_steps + 1
    scores = rules.score(candidate_log_probs, lengths, prompt_lengths[:, None])
    scores = jnp.concatenate([state.finished_scores, scores + jnp.where(finishes, 0.0, NOTHING)], axis=1)
    finished_scores, kept = _best(scores, num_decodes)
    finished = jnp.concatenate([state.finished, candidates], axis=1)
    flags = jnp.concatenate([state.finished_flags, finishes], axis=1)
    after = {
      "live": _take_beams(candidates, best),
      "live_log_probs": live_log_probs,
      "finished": _take_beams(finished, kept),
      "finished_scores": finished_scores,
      "finished_flags": _take_beams(flags, kept),
    }
    after = {name: _where_rows(state.done, getattr(state, name), value) for name, value in after.items()}
    num_steps = state.num_steps + 1
    progress = Progress(
      num_steps=num_steps,
      max_steps=max_steps,
      num_decoded=begin + num_steps - prompt_lengths,
      max_length=max_length,
      best_live=after["live_log_probs"][:, -1],
      finished_scores=after["finished_scores"],
      finished_flags=after["finished_flags"],
    )
    parents = jnp.take_along_axis(beams, best, axis=1)
    return BeamState(
      num_steps=num_steps,
      done=state.done | rules.done(progress),
      cache=jax.tree.map(partial(_take_rows_of_beams, beams=parents), cache),
      **after,
    )

  live = jnp.zeros((num_rows, num_decodes, max_length + 1), jnp.int32).at[:, :, 0].set(first[:, None])
  log_probs = jnp.where(jnp.arange(num_decodes) == 0, 0.0, NOTHING)
  state = BeamState(
    num_steps=jnp.zeros((), jnp.int32),
    done=max_steps <= 0,
    live=live,
    live_log_probs=jnp.broadcast_to(log_probs, (num_rows, num_decodes)),
    finished=jnp.zeros_like(live),
    finished_scores=jnp.full((num_rows, num_decodes), NOTHING, jnp.float32),
    finished_flags=jnp.zeros((num_rows, num_decodes), bool),
    cache=repeat_rows(cache, num_decodes),
  )
  state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), step, state)
  has_finished = jnp.any(state.finished_flags, axis=1)
  sequences = _where_rows(has_finished, state.finished, state.live)[:, :, 1:]
  if initial_index is not None:
    sequences = _after_prompts(sequences, inputs, begin)
  return sequences, _where_rows(has_finished, state.finished_scores, state.live_log_probs)


def _best(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Return the highest scores of each row and their places, the highest last."""
  values, places = jax.lax.top_k(scores, count)
  return jnp.flip(values, axis=1), jnp.flip(places, axis=1)


def _take_beams(array: jax.Array, beams: jax.Array) -> jax.Array:
  """Return chosen beams of each row: (rows, beams, ...), (rows, chosen) to (rows, chosen, ...)."""
  return jax.vmap(lambda row, chosen: row[chosen])(array, beams)


def _take_rows_of_beams(array: jax.Array, beams: jax.Array) -> jax.Array:
  """Return chosen beams where rows and beams are one axis."""
  return join_rows(_take_beams(split_rows(array, beams.shape[1]), beams))


def _where_rows(condition: jax.Array, x: jax.Array, y: jax.Array) -> Any:
  """Return x in the rows of which the condition is true, y in the others."""
  return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)


def _after_prompts(sequences: jax.Array, inputs: jax.Array, begin: jax.Array) -> jax.Array:
  """Return decoded tokens behind their prompts.

  Args:
    sequences: (rows, beams, length) int32, what came after each prompt.
    inputs: (rows, inputs' length) int32, the first token and the prompt.
    begin: (rows,) int32, the prompt's length.
  """
  length = sequences.shape[2]
  prompts = jnp.pad(inputs[:, 1:], ((0, 0), (0, max(0, length + 1 - inputs.shape[1]))))[:, :length]
  places = jnp.arange(length)[None, :] - begin[:, None]
  decoded = jnp.take_along_axis(sequences, jnp.maximum(places, 0)[:, None, :], axis=2)
  return jnp.where((places < 0)[:, None, :], prompts[:, None, :], decoded)
