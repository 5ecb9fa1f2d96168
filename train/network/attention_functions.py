"""Attention of queries to keys and values, by one of several implementations.

`reference` and `xla` add the mask to the logits as -1e10, as T5X does, so that a query without any key gets
the mean of all values; cuDNN has a mask of its own. All multiply by factors of dropout after the softmax,
without normalizing anew.
"""

from typing import Any

import jax
import jax.numpy as jnp

from anystep.errors import AnystepError, ExitCode

IMPLEMENTATIONS = ("reference", "xla", "cudnn")
_MASKED = -1e10


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  mask: jax.Array,
  bias: jax.Array | None = None,
  weight_dropout: jax.Array | float = 1.0,
  float32_logits: bool = False,
  implementation: str = "reference",
) -> jax.Array:
  """Return softmax(query key^T + bias) value, for each head.

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
    key: (rows, key_length, heads, head_dim), of the query's dtype.
    value: like key.
    mask: (rows, 1, query_length, key_length) bool, False at keys that a query must not see.
    bias: (1 or rows, heads, query_length, key_length) float, added to the logits.
    weight_dropout: factors of the attention weights, (rows, heads, 1, key_length), or one number for all.
    float32_logits: whether `reference` computes logits and softmax in float32 where the dtype is smaller; the
      others always do.
    implementation: one of IMPLEMENTATIONS.

  Returns:
    (rows, query_length, heads, head_dim), of the query's dtype.

  Raises:
    AnystepError: 78 `attention_implementation` for cudnn with a bias.
  """
  additive = _additive_mask(mask, bias, query.dtype)
  if implementation == "reference":
    return _reference(query, key, value, additive, weight_dropout, float32_logits)
  # One mask of dropout serves all queries, so the values can be multiplied in the place of the weights.
  factors = jnp.asarray(weight_dropout, value.dtype)
  value = value * (factors.transpose(0, 3, 1, 2) if factors.ndim else factors)
  if implementation == "xla":
    bias = additive.astype(jnp.float32)
    return jax.nn.dot_product_attention(query, key, value, bias, scale=1.0, implementation="xla")
  if bias is not None:
    raise cudnn_without_gradient()
  return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=1.0, implementation="cudnn")


def cudnn_without_gradient() -> AnystepError:
  """Return the refusal of cuDNN for attention with a bias."""
  return AnystepError(
    ExitCode.CONFIG,
    "attention_implementation",
    expected="reference or xla, since cuDNN gives a bias that serves all rows no gradient",
    got="cudnn",
    fix="set attention_implementation = 'xla'; cudnn is for cross_attention_implementation",
  )


def cudnn_in_float32(dtype: Any) -> AnystepError:
  """Return the refusal of cuDNN for activations that it does not compute with."""
  return AnystepError(
    ExitCode.CONFIG,
    "attention_implementation",
    expected="activations in bfloat16 or float16 for cudnn",
    got=str(dtype),
    fix="set dtype = 'bfloat16', or cross_attention_implementation = 'xla'",
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
  float32_logits: bool,
) -> jax.Array:
  if float32_logits:
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
  logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) + additive.astype(query.dtype)
  weights = jax.nn.softmax(logits).astype(value.dtype) * weight_dropout
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
