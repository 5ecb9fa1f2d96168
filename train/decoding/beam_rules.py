"""Rules of beam search: T5X's and Hugging Face's score finished sequences and stop rows differently."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp

from anystep.limits import is_number

NOTHING = -1.0e7
"""Score of a slot without a sequence, and what is added to log-probabilities of beams that may not go on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
  """State of a search after a step.

  Attributes:
    num_steps: () int32, steps done.
    max_steps: (rows,) int32, steps after which a row is full.
    num_decoded: (rows,) int32, tokens after the prompt; below 1 within it.
    max_length: most tokens of a row, those of the prompt too.
    best_live: (rows,) float32, the log-probability of the best sequence without an end.
    finished_scores: (rows, beams) float32.
    finished_flags: (rows, beams) bool, whether a slot has a sequence.
  """

  num_steps: jax.Array
  max_steps: jax.Array
  num_decoded: jax.Array
  max_length: int
  best_live: jax.Array
  finished_scores: jax.Array
  finished_flags: jax.Array


class BeamRules(abc.ABC):
  """Scores of finished sequences, and the end of a row's search."""

  @abc.abstractmethod
  def score(self, log_probs: jax.Array, lengths: jax.Array, prompt_lengths: jax.Array) -> jax.Array:
    """Return the scores of sequences.

    Args:
      log_probs: (rows, candidates) float32.
      lengths: (rows, 1) int32, their tokens, those of the prompt and the end of sequence too.
      prompt_lengths: (rows, 1) int32.
    """

  @abc.abstractmethod
  def finishes(self, is_eos: jax.Array, is_full: jax.Array, num_decodes: int) -> tuple[jax.Array, jax.Array]:
    """Return which candidates may not go on, and which of them are finished sequences.

    Args:
      is_eos: (rows, 2 * num_decodes) bool, by falling log-probability.
      is_full: (rows, 1) bool, whether this is the row's last token.
      num_decodes: number of beams.
    """

  @abc.abstractmethod
  def done(self, progress: Progress) -> jax.Array:
    """Return the rows that are done: (rows,) bool."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5XBeams(BeamRules):
  """T5X's rules: a score is log-probability / ((5 + length) / 6)^alpha (Wu et al. 2016, arXiv 1609.08144).

  A row is done when it is full, or when the worst of its finished sequences is better than what the best
  live one could become. A row without any finished sequence returns its live ones with their
  log-probabilities.

  Attributes:
    alpha: exponent of the length penalty; 0 for none, more for longer sequences.
    min_log_prob: a row is done, too, when no live sequence is likelier.
    rows_together: whether a row goes on until all rows are done, as in T5X. Then the answers of rows whose
      prompts differ in length, or of any with min_log_prob, depend on the rows beside them; else each row is
      searched as T5X searches it alone.
  """

  alpha: float = 0.6
  min_log_prob: float = NOTHING
  rows_together: bool = False

  def __post_init__(self):
    if not is_number(self.alpha, least=0.0):
      raise ValueError(f"T5XBeams.alpha: expected a number of at least 0, got {self.alpha!r}")
    if not is_number(self.min_log_prob):
      raise ValueError(f"T5XBeams.min_log_prob: expected a number, got {self.min_log_prob!r}")

  def score(self, log_probs: jax.Array, lengths: jax.Array, prompt_lengths: jax.Array) -> jax.Array:
    return log_probs / self._penalty(lengths)

  def finishes(self, is_eos: jax.Array, is_full: jax.Array, num_decodes: int) -> tuple[jax.Array, jax.Array]:
    return is_eos, is_eos

  def done(self, progress: Progress) -> jax.Array:
    # One more than the longest row, as in T5X: a bound that is a little too high.
    penalty = self._penalty(jnp.asarray(progress.max_length + 1, jnp.int32))
    bound = progress.best_live / penalty
    worst = jnp.min(progress.finished_scores, axis=1)
    full = progress.num_steps >= progress.max_steps
    settled = jnp.all(progress.finished_flags, axis=1) & (worst > bound)
    unlikely = (bound < self.min_log_prob / penalty) & (progress.num_steps > 0)
    if self.rows_together:
      full, settled, unlikely = (
        jnp.broadcast_to(jnp.all(rows), rows.shape) for rows in (full, settled, unlikely)
      )
    return full | settled | unlikely

  def _penalty(self, lengths: jax.Array) -> jax.Array:
    return jnp.power((5.0 + lengths.astype(jnp.float32)) / 6.0, jnp.float32(self.alpha))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceBeams(BeamRules):
  """Rules of Hugging Face's `generate`: a score is log-probability / length^length_penalty.

  The length is that of the tokens after the prompt. Only the likeliest `num_decodes` candidates of a step may
  finish. Sequences are finished when their row is full. A row is done when the worst of its finished
  sequences is at least as good as the best live one would be if it ended now.

  Attributes:
    length_penalty: exponent; 0 for none, more for longer sequences.
    early_stopping: whether a row is done as soon as it has `num_decodes` finished sequences.
  """

  length_penalty: float = 1.0
  early_stopping: bool = False

  def __post_init__(self):
    if not is_number(self.length_penalty):
      raise ValueError(f"HuggingFaceBeams.length_penalty: expected a number, got {self.length_penalty!r}")
    if not isinstance(self.early_stopping, bool):
      raise ValueError(
        f"HuggingFaceBeams.early_stopping: expected True or False, got {self.early_stopping!r}"
      )

  def score(self, log_probs: jax.Array, lengths: jax.Array, prompt_lengths: jax.Array) -> jax.Array:
    return log_probs / self._penalty(lengths - prompt_lengths)

  def finishes(self, is_eos: jax.Array, is_full: jax.Array, num_decodes: int) -> tuple[jax.Array, jax.Array]:
    ends = is_eos | is_full
    return ends, ends & (jnp.arange(is_eos.shape[1]) < num_decodes)[None, :]

  def done(self, progress: Progress) -> jax.Array:
    any_slot_empty = ~jnp.all(progress.finished_flags, axis=1)
    bound = progress.best_live / self._penalty(progress.num_decoded)
    improvable = any_slot_empty | (bound > jnp.min(progress.finished_scores, axis=1))
    open_slots = any_slot_empty | jnp.bool_(not self.early_stopping)
    return (progress.num_steps >= progress.max_steps) | ~improvable | ~open_slots

  def _penalty(self, lengths: jax.Array) -> jax.Array:
    return jnp.power(jnp.maximum(lengths, 1).astype(jnp.float32), jnp.float32(self.length_penalty))
