"""Distributions without their unlikely tokens."""

import jax
import jax.numpy as jnp

MASKED = -1.0e7
"""Logit of a token that is left out, as in T5X."""


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
  """Return the logits with all but the k largest masked; all that equal the k-th largest stay.

  Args:
    logits: (rows, vocab_size) float32.
    k: number of tokens.

  >>> keep_top_k(jnp.array([[1.0, 3.0, 2.0]]), 2).tolist()
  [[-10000000.0, 3.0, 2.0]]
  """
  if k >= logits.shape[-1]:
    return logits
  least = jax.lax.top_k(logits, k)[0][:, -1:]
  return jnp.where(logits >= least, logits, MASKED)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
  """Return the logits with all masked but the likeliest that together have probability p.

  See Holtzman et al. 2020 (arXiv 1904.09751, section 3.1). These are the fewest whose probabilities add up
  to at least p, and all that equal the last of them.

  Args:
    logits: (rows, vocab_size) float32.
    p: probability, in (0, 1].

  >>> keep_top_p(jnp.log(jnp.array([[0.5, 0.2, 0.3]])), 0.6)[0, 1].item()
  -10000000.0
  """
  probabilities = jax.nn.softmax(logits, axis=-1)
  falling = -jnp.sort(-probabilities, axis=-1)
  # Those before which p is not reached yet: at least the first.
  before = jnp.cumsum(falling, axis=-1) - falling
  count = jnp.maximum(jnp.sum(before < p, axis=-1, keepdims=True), 1)
  least = jnp.take_along_axis(falling, count - 1, axis=-1)
  return jnp.where(probabilities >= least, logits, MASKED)
