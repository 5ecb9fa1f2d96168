"""Distances between positions in attention: T5's biases and rotary embeddings.

T5's: an attention logit from query position q to key position k gets a learned bias, one for each head and
each bucket of the distance k - q. Near distances have a bucket each, far ones share buckets that widen
geometrically (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1).

Rotary: queries and keys are turned by angles that are proportional to their positions, so that a logit
depends on the distance alone (Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.4).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


def relative_position_buckets(
  relative_positions: np.ndarray, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> np.ndarray:
  """Return the bucket of each relative position.

  With n = num_buckets, halved where `bidirectional` (one half for keys up to the query, the other for
  keys after it), a distance d below n/2 has bucket d, and from there on bucket

    n/2 + floor(n/2 * log(d / (n/2)) / log(max_distance / (n/2))), at most n - 1.

  Args:
    relative_positions: key position minus query position, any shape, int.
    bidirectional: False where keys after the query are masked anyway (a decoder); these get bucket 0.
    num_buckets: how many buckets there are.
    max_distance: the distance, in tokens, from which on all share the last bucket.

  Returns:
    Buckets in [0, num_buckets), of the same shape, int32.

  >>> relative_position_buckets(np.array([-200, -9, -1, 0, 1, 9]), bidirectional=True).tolist()
  [15, 8, 1, 0, 17, 24]
  >>> relative_position_buckets(np.array([-200, -9, -1, 0, 1, 9]), bidirectional=False).tolist()
  [31, 9, 1, 0, 0, 0]
  """
  if bidirectional:
    num_buckets //= 2
    offset = np.where(relative_positions > 0, num_buckets, 0)
    distance = np.abs(relative_positions)
  else:
    offset = np.zeros_like(relative_positions)
    distance = np.maximum(-relative_positions, 0)
  exact = num_buckets // 2
  octaves = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
  far = np.minimum(exact + (octaves * (num_buckets - exact)).astype(np.int32), num_buckets - 1)
  return (offset + np.where(distance < exact, distance, far)).astype(np.int32)


class RelativePositionBiases(nn.Module):
  """Biases for the self-attention logits of all layers of a stack.

  Attributes:
    num_heads: number of attention heads, each with biases of its own.
    bidirectional: whether keys after the query are told from keys up to it.
    num_buckets: see `relative_position_buckets`.
    max_distance: see `relative_position_buckets`, in tokens.
    dtype: dtype of the biases returned; the table is float32.
  """

  num_heads: int
  bidirectional: bool
  num_buckets: int = 32
  max_distance: int = 128
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, length: int, *, query_positions: jax.Array | None = None) -> jax.Array:
    """Biases for attention among `length` tokens, (1, num_heads, length, length).

    Args:
      length: number of keys.
      query_positions: (rows,) int32, for one query in each row, which sees no key after it: its position. The
        biases are then (rows, num_heads, 1, length).
    """
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    table = self.param(
      "rel_embedding",
      nn.with_logical_partitioning(init, ("heads", "relpos_buckets")),
      (self.num_heads, self.num_buckets),
      jnp.float32,
    )
    positions = np.arange(length, dtype=np.int32)
    relative = -positions if query_positions is not None else positions[None, :] - positions[:, None]
    buckets = relative_position_buckets(
      relative,
      bidirectional=self.bidirectional,
      num_buckets=self.num_buckets,
      max_distance=self.max_distance,
    )
    if query_positions is not None:
      distances = jnp.clip(query_positions[:, None] - positions[None, :], 0, length - 1)
      biases = jnp.asarray(table, self.dtype)[:, buckets][:, distances]
      # As in T5X, a row that waits for others beyond the last position has none.
      biases = jnp.where((query_positions < length)[None, :, None], biases, 0)
      return biases.transpose(1, 0, 2)[:, :, None, :]
    # A contraction in place of table[:, buckets], whose gradient would be a slow scatter-add.
    one_hot = jax.nn.one_hot(buckets, self.num_buckets, axis=0, dtype=self.dtype)
    return jnp.einsum("hb,bqk->hqk", jnp.asarray(table, self.dtype), one_hot)[None]


def rotary_frequencies(
  head_dim: int,
  *,
  theta: float = 10000.0,
  scaling_factor: float = 1.0,
  low_freq_factor: float = 1.0,
  high_freq_factor: float = 4.0,
  original_length: int = 8192,
) -> np.ndarray:
  """Return the angles by which each pair of a head's values is turned from one position to the next.

  Pair i has theta^(-2i / head_dim). With a scaling factor, as Llama 3.1 has, angles that turn fewer than
  low_freq_factor times in the original length are divided by the factor, those that turn more than
  high_freq_factor times stay, and between them the result changes linearly with the number of turns.

  Args:
    head_dim: size of a head, even.
    theta: the base; larger for longer texts.
    scaling_factor: of Llama 3.1's scaling; 1.0 for none.
    low_freq_factor: number of turns in the original length.
    high_freq_factor: likewise, larger.
    original_length: length in tokens that a model was trained with before its context was extended.

  Returns:
    (head_dim / 2,) float32, radians.

  >>> rotary_frequencies(4, theta=100.0).tolist() == [1.0, np.float32(0.1)]
  True
  """
  frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  num_turns = original_length * frequencies / (2 * math.pi)
  share = np.clip((num_turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
  return (frequencies * (share + (1.0 - share) / scaling_factor)).astype(np.float32)


def make_rotation(positions: jax.Array, frequencies: np.ndarray) -> Callable[[jax.Array], jax.Array]:
  """Return the function that turns queries or keys by their positions.

  Value i of a head's first half and value i of its second half are a pair, as in Hugging Face's Llama. (In
  Meta's, neighbours are.) Angles and products are float32.

  Args:
    positions: (rows or 1, length) int32.
    frequencies: (head_dim / 2,) float32, see `rotary_frequencies`.

  Returns:
    A function from (rows, length, heads, head_dim) float to the same.
  """
  angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None]
  cosines, sines = jnp.cos(angles), jnp.sin(angles)

  def rotate(x: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)

  return rotate
