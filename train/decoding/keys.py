"""Random keys of examples, so that what is drawn for one depends on no other (docs/order.md)."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np


def example_keys(seed: int, task: str, indices: np.ndarray) -> jax.Array:
  """Return the keys that a task's examples are decoded with: (examples,) JAX random keys.

  With n the BLAKE2b hash of the task's name, four bytes read as a little-endian number, the key of the
  example of index i is fold_in(fold_in(fold_in(key(seed), n), i div 2^32), i mod 2^32).

  Args:
    seed: a whole number.
    task: name of the task, or of what else names the examples.
    indices: (examples,) int, the examples' indices in the task's order.
  """
  digest = hashlib.blake2b(task.encode(), digest_size=4).digest()
  key = jax.random.fold_in(jax.random.key(seed), np.uint32(int.from_bytes(digest, "little")))
  wide = np.asarray(indices, np.uint64)
  words = np.stack([wide >> np.uint64(32), wide & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)

  def fold(word: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, word[0]), word[1])

  return jax.vmap(fold)(jnp.asarray(words))


def sample_keys(keys: jax.Array, num_samples: int) -> jax.Array:
  """Return the keys of samples, those of an example as neighbours: fold_in(key, number of the sample)."""
  numbers = np.arange(num_samples, dtype=np.uint32)
  folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, numbers)
  return folded.reshape(-1)
