"""Batches on the devices of all processes, and back."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Return the sharding that splits rows over the data axis."""
  return NamedSharding(mesh, PartitionSpec("data"))


def local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
  """Return the row numbers that this process's devices hold, ascending: `(local rows,) int64`."""
  slices = sharding.addressable_devices_indices_map((batch_size,)).values()
  return np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))


def global_batch(
  rows: Mapping[str, np.ndarray], sharding: NamedSharding, row_numbers: np.ndarray, batch_size: int
) -> dict[str, jax.Array]:
  """Return the batch that all processes hold together, given this process's rows.

  Args:
    rows: arrays of shape `(local rows, ...)`.
    sharding: of the batch.
    row_numbers: the rows' numbers in the batch, as `local_rows` returns them.
    batch_size: rows of the whole batch.
  """

  def put(array: np.ndarray) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
      wanted = np.arange(batch_size)[index[0] if index else slice(None)]
      return array[np.searchsorted(row_numbers, wanted)]

    return jax.make_array_from_callback((batch_size, *array.shape[1:]), sharding, part)

  return {name: put(array) for name, array in rows.items()}


def local_values(batch: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
  """Return this process's rows of a batch: arrays `(local rows, ...)`, in row order, each row once."""

  def gather(array: jax.Array) -> np.ndarray:
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])

  return {name: gather(array) for name, array in batch.items()}
