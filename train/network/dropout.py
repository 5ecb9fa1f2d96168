"""Dropout whose masks for a whole layer come from one draw, keyed by row.

A mask of its own for each place in a layer costs a random number generator in the compiled program for
each, which nearly doubles the time to compile a small model on a CPU. T5's masks are small, since one mask
serves all positions of a row, so a layer draws all of them at once and cuts the draw into pieces. Each row
draws with a key of its own (docs/order.md#draws-after-the-cache): its masks depend neither on the other rows
nor on how a batch is split.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


def layer_keys(row_keys: jax.Array | None, *, stack: int, num_layers: int) -> list[jax.Array | None]:
  """Return each layer's keys, and after them those of a stack's two ends.

  Args:
    row_keys: (rows,) JAX random keys; None for no dropout.
    stack: the stack's number in its model.
    num_layers: number of layers of the stack.

  Returns:
    num_layers + 1 arrays of (rows,) keys, or None for each.
  """
  if row_keys is None:
    return [None] * (num_layers + 1)
  numbers = np.uint32((stack << 16) + np.arange(num_layers + 1))
  return list(jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))(row_keys, numbers))


def draw_dropout(
  row_keys: jax.Array | None, rate: float, *, shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype
) -> dict[str, jax.Array | float]:
  """Return factors for activations: 0 with probability `rate`, else 1 / (1 - rate).

  Without keys, or at rate 0, nothing is drawn and every factor is 1.

  Args:
    row_keys: (rows,) JAX random keys, one for each row; None for no dropout.
    rate: share of the activations to drop, in [0, 1).
    shapes: by name, the shape of each mask for one row. An axis of size 1 shares the mask along it.
    dtype: dtype of the factors.

  Returns:
    By the same names, factors of shape (rows, *shape), or the number 1.
  """
  if rate == 0.0 or row_keys is None:
    return dict.fromkeys(shapes, 1.0)
  sizes = [math.prod(shape) for shape in shapes.values()]
  kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, (sum(sizes),)))(row_keys)
  factors = kept.astype(dtype) / (1.0 - rate)
  pieces = jnp.split(factors, np.cumsum(sizes)[:-1], axis=1)
  named_pieces = zip(shapes.items(), pieces, strict=True)
  return {name: piece.reshape(row_keys.shape[0], *shape) for (name, shape), piece in named_pieces}
