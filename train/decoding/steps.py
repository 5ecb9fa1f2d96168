"""State that a decoding loop passes to the function of one step, and arrays by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

Cache = Any
"""Nested dicts of arrays whose first axis counts the rows; none is {}."""


@flax.struct.dataclass
class DecodingState:
  """Input of a step. The decodes of an example are neighbouring rows.

  Attributes:
    cur_index: (rows,) int32, the position of each row's current token; the first token, 0, is at position 0.
    sequences: (rows, length) int32, the first token, the prompt and what was decoded; 0 behind it.
    cur_token: (rows, 1) int32, the token at that position.
    cache: the cache after the step before.
  """

  cur_index: jax.Array
  sequences: jax.Array
  cur_token: jax.Array
  cache: Cache


TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Cache]]
"""Function of one step: from a state to logits of the next token, (rows, vocab_size), and the new cache."""


class DecodeFn(Protocol):
  """Signature of decoding functions; what else one takes is bound by `functools.partial`."""

  def __call__(
    self,
    inputs: jax.Array,
    cache: Cache,
    tokens_to_logits: TokensToLogits,
    *,
    eos_id: int,
    num_decodes: int,
    initial_index: jax.Array | None,
    keys: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array]:
    """Return sequences and their scores, see `temperature_sample`."""


def repeat_rows(tree: Any, times: int) -> Any:
  """Return arrays with each row repeated, as neighbours."""
  return tree if times == 1 else jax.tree.map(lambda array: jnp.repeat(array, times, axis=0), tree)


def split_rows(array: jax.Array, num_decodes: int) -> jax.Array:
  """Return an array with an axis of its own for the decodes of an example: (rows, decodes, ...)."""
  return array.reshape(-1, num_decodes, *array.shape[1:])


def join_rows(array: jax.Array) -> jax.Array:
  """Return an array without the axis of the decodes: (rows * decodes, ...)."""
  return array.reshape(-1, *array.shape[2:])


def write_at(array: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
  """Return an array with one value written into each row; a position beyond the row's end writes nothing.

  Args:
    array: (rows, length, ...).
    values: (rows, ...), of the same dtype.
    positions: (rows,) int32.
  """

  def write(row: jax.Array, value: jax.Array, position: jax.Array) -> jax.Array:
    return row.at[position].set(value, mode="drop")

  return jax.vmap(write)(array, values, positions)


def find_prompts(inputs: jax.Array, initial_index: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Return each row's first position to decode from, and its prompt's number of tokens: (rows,) int32.

  Args:
    inputs: (rows, length) int32, the first token, then the prompt and zeros.
    initial_index: (rows,) int32, the position of each prompt's last token, from which rows go on; None for
      rows that begin at position 0, whose prompts are forced.
  """
  if initial_index is not None:
    return initial_index.astype(jnp.int32), initial_index.astype(jnp.int32)
  return jnp.zeros(inputs.shape[:1], jnp.int32), jnp.sum(inputs[:, 1:] != 0, axis=1, dtype=jnp.int32)


def take_at(array: jax.Array, positions: jax.Array) -> jax.Array:
  """Return one element of each row: from (rows, length), (rows,)."""
  return jnp.take_along_axis(array, positions[:, None], axis=1)[:, 0]
