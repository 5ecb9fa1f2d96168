"""Layers of the network: Linen's own, configured as in T5.

Each parameter names its logical axes. A table maps these names to the axes of a device mesh
(https://flax-linen.readthedocs.io/en/latest/guides/parallel_training/flax_on_pjit.html).
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import mul
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.typing import Initializer

from anystep.train.partitioning.rules import constrain

LOOKUPS = ("gather", "one_hot")
TRUNCATED_NORMAL_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def dense(
  features: int | tuple[int, ...],
  axes: tuple[str, ...],
  *,
  name: str,
  dtype: Any,
  init: Initializer = TRUNCATED_NORMAL_FAN_IN,
  axis: int | tuple[int, ...] = -1,
  sum_dtype: Any = None,
) -> nn.DenseGeneral:
  """Return a linear map of the last axes, without bias; its kernel (*in, *out) has these logical axes.

  Products are of dtype `dtype`, and so is the result unless `sum_dtype` says in which they are summed.
  """
  kernel_init = nn.with_logical_partitioning(init, axes)
  return nn.DenseGeneral(
    features,
    axis=axis,
    use_bias=False,
    dtype=dtype,
    param_dtype=jnp.float32,
    kernel_init=kernel_init,
    dot_general=sum_dtype and partial(jax.lax.dot_general, preferred_element_type=sum_dtype),
    name=name,
  )


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + epsilon) * scale over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467).

  The mean and the quotient are float32, and rounded to `dtype` before the scale multiplies them, as in T5X.
  (Linen's rounds once, after the scale.)

  Attributes:
    dtype: dtype of the result.
    epsilon: T5's, or another.
  """

  dtype: Any = jnp.float32
  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """(..., emb_dim) float to the same."""
    init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
    scale: Any = self.param("scale", init, (x.shape[-1],), jnp.float32)
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jax.lax.square(x), axis=-1, keepdims=True)
    normalized = (x * jax.lax.rsqrt(mean_square + self.epsilon)).astype(self.dtype)
    return normalized * scale.astype(self.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)


class Embedding(nn.Module):
  """Table of embeddings, also for logits.

  Attributes:
    vocab_size: number of token ids.
    emb_dim: size of an embedding.
    lookup: `one_hot`, a product with one-hot rows as in T5X, whose gradient is a product too and not a sum in
      whatever order an accelerator's threads come; or `gather`, which takes less time where the vocabulary is
      large and the processor small. An id outside the vocabulary has the embedding 0 with `one_hot`, and nan
      with `gather`. Decoding needs no gradient, and always gathers.
    dtype: dtype of embeddings; the table is float32.
    init_stddev: standard deviation of the table's initial values.
  """

  vocab_size: int
  emb_dim: int
  lookup: str = "one_hot"
  dtype: Any = jnp.float32
  init_stddev: float = 1.0

  def setup(self):
    init = nn.with_logical_partitioning(nn.initializers.normal(self.init_stddev), ("vocab", "embed"))
    table: Any = self.param("embedding", init, (self.vocab_size, self.emb_dim), jnp.float32)
    self.embedding = table

  def __call__(self, tokens: jax.Array, *, has_gradient: bool = True) -> jax.Array:
    """(rows, length) int to (rows, length, emb_dim); without a gradient by a gather, to the same."""
    table = self.embedding.astype(self.dtype)
    if self.lookup == "one_hot" and has_gradient:
      embeddings = jax.nn.one_hot(tokens, self.vocab_size, dtype=self.dtype) @ table
    else:
      outside = 0.0 if self.lookup == "one_hot" else jnp.nan
      embeddings = jnp.take(table, tokens, axis=0, mode="fill", fill_value=outside)
    return constrain(embeddings, "batch", "length", "embed")

  def logits(self, x: jax.Array) -> jax.Array:
    """Products with every embedding by sqrt(emb_dim): (..., emb_dim) to (..., vocab_size) float32."""
    products = jnp.einsum("...e,ve->...v", x.astype(jnp.float32), self.embedding)
    return products / np.float32(np.sqrt(self.emb_dim))


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
  """Return the activation function of Linen with this name; 'linear' is the identity."""
  if name == "linear":
    return lambda x: x
  function = getattr(nn, name, None)
  if not callable(function) or isinstance(function, type) or not _keeps_shape(function):
    raise ValueError(
      f"mlp_activations: no activation {name!r}; expected 'linear' or one of flax.linen's, as 'gelu'"
    )
  return function


def _keeps_shape(function: Callable) -> bool:
  """Return whether a function of one array returns one of its shape: `glu` halves it."""
  try:
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    return getattr(jax.eval_shape(function, x), "shape", None) == x.shape
  except Exception:  # Functions of something else raise whatever they do.
    return False


class MlpBlock(nn.Module):
  """The feed-forward block: (act_0(x wi_0) * act_1(x wi_1) * ...) wo.

  ('gelu', 'linear') is T5.1.1's gated GELU (Shazeer 2020, https://arxiv.org/abs/2002.05202); ('relu',)
  is T5.1.0's, whose one kernel is named `wi`.

  Attributes:
    mlp_dim: size of the hidden layer.
    activations: names of the activations, one for each kernel into the hidden layer.
    dtype: dtype of the computation; parameters are float32.
  """

  mlp_dim: int
  activations: tuple[str, ...]
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, *, hidden_dropout: jax.Array | float = 1.0) -> jax.Array:
    """Maps each position by itself.

    Args:
      x: (rows, length, emb_dim) float.
      hidden_dropout: factors for the hidden layer, (rows, 1, mlp_dim), see `draw_dropout`.

    Returns:
      (rows, length, emb_dim), of dtype `dtype`.
    """
    gated = len(self.activations) > 1
    gates = []
    for i, name in enumerate(self.activations):
      wi = dense(self.mlp_dim, ("embed", "mlp"), name=f"wi_{i}" if gated else "wi", dtype=self.dtype)
      gates.append(activation(name)(wi(x)))
    hidden = constrain(reduce(mul, gates) * hidden_dropout, "batch", "length", "mlp")
    return dense(x.shape[-1], ("mlp", "embed"), name="wo", dtype=self.dtype)(hidden)
