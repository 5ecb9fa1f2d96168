"""Layers of the network: Linen's own, configured as in T5.

Each parameter names its logical axes. A table maps these names to the axes of a device mesh
(https://flax-linen.readthedocs.io/en/latest/guides/parallel_training/flax_on_pjit.html).
"""

from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Initializer

TRUNCATED_NORMAL_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def dense(
  features: int, axes: tuple[str, str], *, name: str, dtype: Any, init: Initializer = TRUNCATED_NORMAL_FAN_IN
) -> nn.Dense:
  """Return a linear map without bias; its kernel (in, features) has these logical axes."""
  kernel_init = nn.with_logical_partitioning(init, axes)
  return nn.Dense(features, use_bias=False, dtype=dtype, kernel_init=kernel_init, name=name)


def rms_norm(*, name: str, dtype: Any) -> nn.RMSNorm:
  """x / sqrt(mean(x^2) + 1e-6) * scale over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467)."""
  scale_init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
  return nn.RMSNorm(epsilon=1e-6, dtype=dtype, scale_init=scale_init, name=name)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
  """Return the activation function of Linen with this name; 'linear' is the identity."""
  if name == "linear":
    return lambda x: x
  function = getattr(nn, name, None)
  if not callable(function) or isinstance(function, type):
    raise ValueError(
      f"mlp_activations: no activation {name!r}; expected 'linear' or one of flax.linen's, as 'gelu'"
    )
  return function


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
    hidden = reduce(mul, gates) * hidden_dropout
    return dense(x.shape[-1], ("mlp", "embed"), name="wo", dtype=self.dtype)(hidden)
