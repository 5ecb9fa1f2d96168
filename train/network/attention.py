"""Multi-head attention as in T5, and its masks."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Initializer

from anystep.train.network.attention_functions import attend
from anystep.train.network.layers import dense
from anystep.train.partitioning.rules import constrain


def attention_mask(
  query_valid: jax.Array,
  key_valid: jax.Array,
  *,
  query_segments: jax.Array | None = None,
  key_segments: jax.Array | None = None,
  causal: bool = False,
  prefix: jax.Array | None = None,
) -> jax.Array:
  """Return the mask of the keys that each query may attend to.

  Args:
    query_valid: (rows, query_length) bool, False at padding.
    key_valid: (rows, key_length) bool, False at padding.
    query_segments: (rows, query_length) int32, for packed rows: the number of the example a query belongs
      to. A query attends within its own example only.
    key_segments: (rows, key_length) int32, the same of the keys; both or neither.
    causal: whether to hide from a query the keys after it.
    prefix: (rows, length) bool, for a causal mask of self-attention: where both query and key are in the
      prefix of an example, the key is not hidden.

  Returns:
    (rows, 1, query_length, key_length) bool; the axis of size 1 stands for the heads.

  Raises:
    ValueError: only one of the two has segments.

  >>> tokens = jnp.array([[5, 6, 7, 0]])
  >>> attention_mask(tokens > 0, tokens > 0, causal=True)[0, 0].astype(int).tolist()
  [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
  """
  if (query_segments is None) != (key_segments is None):
    given, missing = ("keys", "queries") if query_segments is None else ("queries", "keys")
    raise ValueError(f"segment ids: got them for the {given} but not for the {missing}; pass both or neither")
  mask = query_valid[:, :, None] & key_valid[:, None, :]
  if query_segments is not None and key_segments is not None:
    mask = mask & (query_segments[:, :, None] == key_segments[:, None, :])
  if causal:
    before = jnp.tri(mask.shape[1], mask.shape[2], dtype=bool)[None]
    if prefix is not None:
      before = before | (prefix[:, :, None] & prefix[:, None, :])
    mask = mask & before
  return mask[:, None]


class MultiHeadAttention(nn.Module):
  """Multi-head attention: softmax(query key^T + bias) value, for each head.

  As Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762, section 3.2) without the division of the
  logits by sqrt(head_dim): T5 divides the initial values of the query kernel instead, which trains
  equally well under Adafactor.

  Attributes:
    num_heads: number of heads.
    head_dim: size of a head's queries, keys and values.
    dtype: dtype of the computation; parameters are float32.
    float32_logits: see `attend`.
    implementation: see `attend`.
    joined_kernels: whether kernels have one axis for all heads' values, `joined_kv`; else `heads` and `kv`.
  """

  num_heads: int
  head_dim: int
  dtype: Any = jnp.float32
  float32_logits: bool = False
  implementation: str = "reference"
  joined_kernels: bool = True

  @nn.compact
  def __call__(
    self,
    queries: jax.Array,
    keys_values: jax.Array,
    *,
    mask: jax.Array,
    bias: jax.Array | None = None,
    weight_dropout: jax.Array | float = 1.0,
  ) -> jax.Array:
    """Return, for each query, the weighted sum of the values that its mask allows.

    A query that may attend to no key gets the mean of all values, which the caller must ignore.

    Args:
      queries: (rows, query_length, emb_dim) float, inputs of the queries.
      keys_values: (rows, key_length, emb_dim) float, inputs of the keys and values.
      mask: (rows, 1, query_length, key_length) bool, see `attention_mask`.
      bias: (1, num_heads, query_length, key_length) float, see `RelativePositionBiases`.
      weight_dropout: factors for the attention weights, (rows, num_heads, 1, key_length), see
        `draw_dropout`.

    Returns:
      (rows, query_length, emb_dim), of dtype `dtype`.
    """
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
    query_init = nn.initializers.variance_scaling(1.0 / self.head_dim, "fan_in", "normal")
    attended = attend(
      self._heads(queries, "query", query_init),
      self._heads(keys_values, "key", init),
      self._heads(keys_values, "value", init),
      mask=mask,
      bias=bias,
      weight_dropout=weight_dropout,
      float32_logits=self.float32_logits,
      implementation=self.implementation,
    )
    attended = constrain(attended, "batch", "length", "heads", "kv")
    emb_dim = queries.shape[-1]
    if not self.joined_kernels:
      out = dense(emb_dim, ("heads", "kv", "embed"), name="out", dtype=self.dtype, init=init, axis=(-2, -1))
      return out(attended)
    joined = attended.reshape(*queries.shape[:2], self.num_heads * self.head_dim)
    return dense(emb_dim, ("joined_kv", "embed"), name="out", dtype=self.dtype, init=init)(joined)

  def _heads(self, x: jax.Array, name: str, init: Initializer) -> jax.Array:
    """Map (rows, length, emb_dim) to (rows, length, num_heads, head_dim)."""
    heads = (self.num_heads, self.head_dim)
    if self.joined_kernels:
      joined = dense(
        self.num_heads * self.head_dim, ("embed", "joined_kv"), name=name, dtype=self.dtype, init=init
      )
      values = joined(x).reshape(*x.shape[:2], *heads)
    else:
      values = dense(heads, ("embed", "heads", "kv"), name=name, dtype=self.dtype, init=init)(x)
    return constrain(values, "batch", "length", "heads", "kv")
