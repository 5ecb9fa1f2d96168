"""Relative position biases, which T5 uses instead of position embeddings.

An attention logit from query position q to key position k gets a learned bias, one for each head and
each bucket of the distance k - q. Near distances have a bucket each, far ones share buckets that widen
geometrically (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1).
"""

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
  def __call__(self, length: int) -> jax.Array:
    """Biases for attention among `length` tokens, (1, num_heads, length, length)."""
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    table = self.param(
      "rel_embedding",
      nn.with_logical_partitioning(init, ("heads", "relpos_buckets")),
      (self.num_heads, self.num_buckets),
      jnp.float32,
    )
    positions = np.arange(length, dtype=np.int32)
    buckets = relative_position_buckets(
      positions[None, :] - positions[:, None],
      bidirectional=self.bidirectional,
      num_buckets=self.num_buckets,
      max_distance=self.max_distance,
    )
    # A contraction in place of table[:, buckets], whose gradient would be a slow scatter-add.
    one_hot = jax.nn.one_hot(buckets, self.num_buckets, axis=0, dtype=self.dtype)
    return jnp.einsum("hb,bqk->hqk", jnp.asarray(table, self.dtype), one_hot)[None]
