"""Dropout whose masks for a whole layer come from one draw.

A mask of its own for each place in a layer costs a random number generator in the compiled program for
each, which nearly doubles the time to compile a small model on a CPU. T5's masks are small, since one mask
serves all positions of a row, so a layer draws all of them at once and cuts the draw into pieces.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


def draw_dropout(
  module: nn.Module, rate: float, *, rows: int, shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype
) -> dict[str, jax.Array | float]:
  """Return factors for activations: 0 with probability `rate`, else 1 / (1 - rate).

  Without a `dropout` RNG stream, or at rate 0, nothing is drawn and every factor is 1.

  Args:
    module: the Linen module whose `dropout` stream is drawn from.
    rate: share of the activations to drop, in [0, 1).
    rows: number of rows in the batch; each has masks of its own.
    shapes: by name, the shape of each mask for one row. An axis of size 1 shares the mask along it.
    dtype: dtype of the factors.

  Returns:
    By the same names, factors of shape (rows, *shape), or the number 1.
  """
  if rate == 0.0 or not module.has_rng("dropout"):
    return dict.fromkeys(shapes, 1.0)
  sizes = [math.prod(shape) for shape in shapes.values()]
  kept = jax.random.bernoulli(module.make_rng("dropout"), 1.0 - rate, (rows, sum(sizes)))
  factors = kept.astype(dtype) / (1.0 - rate)
  pieces = jnp.split(factors, np.cumsum(sizes)[:-1], axis=1)
  named_pieces = zip(shapes.items(), pieces, strict=True)
  return {name: piece.reshape(rows, *shape) for (name, shape), piece in named_pieces}
