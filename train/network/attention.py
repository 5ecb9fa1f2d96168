"""Multi-head attention, its masks, and the implementations of attention of queries to keys and values.

`reference` and `xla` add the mask to the logits as -1e10, as T5X does, so that a query without any key gets
the mean of all values; cuDNN has a mask of its own. All multiply by factors of dropout after the softmax,
without normalizing anew.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Initializer

from anystep.errors import AnystepError, ExitCode
from anystep.train.decoding.key_value_cache import KeptKeysValues
from anystep.train.network.layers import dense
from anystep.train.partitioning.rules import constrain

IMPLEMENTATIONS = ("reference", "xla", "cudnn")
_MASKED = -1e10


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


def decoder_mask(
  valid: jax.Array, *, segments: jax.Array | None = None, causal_attention: jax.Array | None = None
) -> jax.Array:
  """Return the mask of a decoder's self-attention, see `attention_mask`.

  Args:
    valid: (rows, length) bool, False at padding.
    segments: (rows, length) int32, for packed rows: the number of the example that a token belongs to.
    causal_attention: (rows, length) int32, 1 on each example's prefix, whose tokens see all of it; None for a
      causal model.
  """
  prefix = None if causal_attention is None else causal_attention > 0
  return attention_mask(
    valid, valid, query_segments=segments, key_segments=segments, causal=True, prefix=prefix
  )


class MultiHeadAttention(nn.Module):
  """Multi-head attention: softmax(query key^T + bias) value, for each head.

  As Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762, section 3.2) without the division of the
  logits by sqrt(head_dim), unless `divided_logits`: T5 divides the initial values of the query kernel
  instead, which trains equally well under Adafactor.

  Attributes:
    num_heads: number of heads.
    head_dim: size of a head's queries, keys and values.
    dtype: dtype of the computation; parameters are float32.
    float32_logits: see `attend`.
    implementation: see `attend`.
    joined_kernels: whether kernels have one axis for all heads' values, `joined_kv`; else `heads` and `kv`.
    num_kv_heads: number of heads of keys and values, each of which serves as many consecutive heads of
      queries (grouped-query attention, Ainslie et al. 2023, https://arxiv.org/abs/2305.13245); None for
      num_heads.
    divided_logits: whether logits are divided by sqrt(head_dim), and initial values of kernels are not.
  """

  num_heads: int
  head_dim: int
  dtype: Any = jnp.float32
  float32_logits: bool = False
  implementation: str = "reference"
  joined_kernels: bool = True
  num_kv_heads: int | None = None
  divided_logits: bool = False

  @nn.compact
  def __call__(
    self,
    queries: jax.Array,
    keys_values: jax.Array | None,
    *,
    mask: jax.Array,
    bias: jax.Array | None = None,
    weight_dropout: jax.Array | float = 1.0,
    rotate: Callable[[jax.Array], jax.Array] | None = None,
    cache: KeptKeysValues | None = None,
  ) -> jax.Array:
    """Return, for each query, the weighted sum of the values that its mask allows.

    A query that may attend to no key gets the mean of all values, which the caller must ignore.

    Args:
      queries: (rows, query_length, emb_dim) float, inputs of the queries.
      keys_values: (rows, key_length, emb_dim) float, inputs of the keys and values; None where the cache has
        them.
      mask: (rows, 1, query_length, key_length) bool, see `attention_mask`. Where the cache has one row for n
        neighbouring rows of queries, their tokens are queries of that row: (rows / n, 1, n, key_length).
      bias: (1, num_heads, query_length, key_length) float, see `RelativePositionBiases`.
      weight_dropout: factors for the attention weights, (rows, num_heads, 1, key_length), see
        `draw_dropout`.
      rotate: turns queries and keys, (rows, length, heads, head_dim), by their positions, see
        `make_rotation`; None for none.
      cache: keys and values that are kept from one call to the next; None for the call's own.

    Returns:
      (rows, query_length, emb_dim), of dtype `dtype`.
    """
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
    query_scale = 1.0 if self.divided_logits else 1.0 / self.head_dim
    query_init = nn.initializers.variance_scaling(query_scale, "fan_in", "normal")
    num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
    turn = rotate or (lambda heads: heads)
    query = turn(self._heads(queries, "query", query_init, self.num_heads))

    def project() -> tuple[jax.Array, jax.Array]:
      assert keys_values is not None, "a cache without them asks for none"
      key = self._heads(keys_values, "key", init, num_kv_heads)
      return turn(key), self._heads(keys_values, "value", init, num_kv_heads)

    key, value = project() if cache is None else cache.extend(self, project)
    attended = attend(
      query.reshape(key.shape[0], -1, *query.shape[2:]),
      key,
      value,
      mask=mask,
      bias=bias,
      weight_dropout=weight_dropout,
      scale=1.0 / math.sqrt(self.head_dim) if self.divided_logits else 1.0,
      float32_logits=self.float32_logits,
      implementation=self.implementation,
    )
    attended = constrain(attended.reshape(query.shape), "batch", "length", "heads", "kv")
    emb_dim = queries.shape[-1]
    if not self.joined_kernels:
      out = dense(emb_dim, ("heads", "kv", "embed"), name="out", dtype=self.dtype, init=init, axis=(-2, -1))
      return out(attended)
    joined = attended.reshape(*queries.shape[:2], self.num_heads * self.head_dim)
    return dense(emb_dim, ("joined_kv", "embed"), name="out", dtype=self.dtype, init=init)(joined)

  def _heads(self, x: jax.Array, name: str, init: Initializer, num_heads: int) -> jax.Array:
    """Map (rows, length, emb_dim) to (rows, length, num_heads, head_dim)."""
    heads = (num_heads, self.head_dim)
    if self.joined_kernels:
      joined = dense(
        num_heads * self.head_dim, ("embed", "joined_kv"), name=name, dtype=self.dtype, init=init
      )
      values = joined(x).reshape(*x.shape[:2], *heads)
    else:
      values = dense(heads, ("embed", "heads", "kv"), name=name, dtype=self.dtype, init=init)(x)
    return constrain(values, "batch", "length", "heads", "kv")


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  mask: jax.Array,
  bias: jax.Array | None = None,
  weight_dropout: jax.Array | float = 1.0,
  scale: float = 1.0,
  float32_logits: bool = False,
  implementation: str = "reference",
) -> jax.Array:
  """Return softmax(scale query key^T + bias) value, for each head.

  | implementation | logits and softmax of bfloat16 queries        | bias          |
  |----------------|-----------------------------------------------|---------------|
  | reference      | bfloat16 as in T5X, or float32_logits         | any           |
  | xla            | float32: `jax.nn.dot_product_attention`       | any           |
  | cudnn          | float32, never in memory; bfloat16, GPUs only | none          |

  cuDNN adds the mask to the bias and gives the sum of them no gradient where the bias, as a relative position
  bias, serves all rows (https://github.com/jax-ml/jax/issues/30593): such a bias would silently stay as it
  was initialized, so a bias is refused.

  Args:
    query: (rows, query_length, heads, head_dim) float.
    key: (rows, key_length, kv_heads, head_dim), of the query's dtype; kv_heads divides heads, and each of
      them serves as many consecutive heads.
    value: like key.
    mask: (rows, 1, query_length, key_length) bool, False at keys that a query must not see.
    bias: (1 or rows, heads, query_length, key_length) float, added to the logits.
    weight_dropout: factors of the attention weights, (rows, heads, 1, key_length), or one number for all.
    scale: factor of the logits, without the bias.
    float32_logits: whether `reference` computes logits and softmax in float32 where the dtype is smaller; the
      others always do.
    implementation: one of IMPLEMENTATIONS.

  Returns:
    (rows, query_length, heads, head_dim), of the query's dtype.

  Raises:
    AnystepError: 78 `attention_implementation` for cudnn with a bias.
  """
  additive = _additive_mask(mask, bias, query.dtype)
  factors = jnp.asarray(weight_dropout, value.dtype)
  num_groups = query.shape[2] // key.shape[2]
  # JAX's function knows grouped heads, but masks of dropout are of every head.
  if num_groups > 1 and (implementation == "reference" or factors.ndim):
    key, value = (jnp.repeat(heads, num_groups, axis=2) for heads in (key, value))
  if implementation == "reference":
    return _reference(query, key, value, additive, weight_dropout, scale, float32_logits)
  # One mask of dropout serves all queries, so the values can be multiplied in the place of the weights.
  value = value * (factors.transpose(0, 3, 1, 2) if factors.ndim else factors)
  if bias is not None and implementation == "cudnn":
    raise cudnn_without_gradient()
  # JAX's function adds a bias of float32 to logits of bfloat16.
  with jax.numpy_dtype_promotion("standard"):
    if implementation == "xla":
      bias = additive.astype(jnp.float32)
      return jax.nn.dot_product_attention(query, key, value, bias, scale=scale, implementation="xla")
    return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="cudnn")


def cudnn_without_gradient() -> AnystepError:
  """Return the refusal of cuDNN for attention with a bias."""
  return AnystepError(
    ExitCode.CONFIG,
    "attention_implementation",
    expected="reference or xla, since cuDNN gives a bias that serves all rows no gradient",
    got="cudnn",
    fix="set attention_implementation = 'xla'; cudnn is for attention without biases, as to the encoder",
  )


def cudnn_in_float32(dtype: Any, attribute: str) -> AnystepError:
  """Return the refusal of cuDNN for activations that it does not compute with."""
  return AnystepError(
    ExitCode.CONFIG,
    "attention_implementation",
    expected="activations in bfloat16 or float16 for cudnn",
    got=str(dtype),
    fix=f"set dtype = 'bfloat16', or {attribute} = 'xla'",
  )


def _additive_mask(mask: jax.Array, bias: jax.Array | None, dtype: Any) -> jax.Array:
  additive = jnp.where(mask, jnp.zeros((), dtype), jnp.asarray(_MASKED, dtype))
  return additive if bias is None else additive + bias.astype(dtype)


def _reference(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  additive: jax.Array,
  weight_dropout: jax.Array | float,
  scale: float,
  float32_logits: bool,
) -> jax.Array:
  if float32_logits:
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
  logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale + additive.astype(query.dtype)
  weights = jax.nn.softmax(logits).astype(value.dtype) * weight_dropout
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
