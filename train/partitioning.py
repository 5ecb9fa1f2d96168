"""Placement of arrays: a mesh of devices, and shardings by logical axis (GSPMD, Xu et al. 2021)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anystep.errors import AnystepError, ExitCode
from anystep.limits import is_count

LogicalAxisRules = tuple[tuple[str, str | None], ...]

# T5X's standard rules for one axis of data and one of model parallelism.
STANDARD_RULES: LogicalAxisRules = (
  ("batch", "data"),
  ("vocab", "model"),
  ("mlp", "model"),
  ("heads", "model"),
  ("joined_kv", "model"),
  ("kv", None),
  ("embed", None),
  ("length", None),
  ("relpos_buckets", None),
  ("stack", None),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partitioner:
  """Splits batches over the devices, and parameters over `num_partitions` of them.

  Attributes:
    num_partitions: number of devices that share one copy of the parameters.
    logical_axis_rules: mesh axis of each logical axis; None means that the axis is not split.
  """

  num_partitions: int = 1
  logical_axis_rules: LogicalAxisRules = STANDARD_RULES

  def __post_init__(self):
    if not is_count(self.num_partitions, least=1):
      raise ValueError(f"num_partitions is a whole number of at least 1, not {self.num_partitions!r}")

  def mesh(self, batch_size: int) -> Mesh:
    """Return all devices as a (data, model) mesh. No device is touched before this call.

    Raises:
      AnystepError: 78 `num_partitions`, `batch_size`.
    """
    devices = np.array(jax.devices())
    if devices.size % self.num_partitions:
      raise AnystepError(
        ExitCode.CONFIG,
        "num_partitions",
        expected=f"a divisor of {devices.size} devices",
        got=self.num_partitions,
        fix="choose another num_partitions or number of devices",
      )
    mesh = Mesh(devices.reshape(-1, self.num_partitions), ("data", "model"))
    if batch_size % mesh.shape["data"]:
      raise AnystepError(
        ExitCode.CONFIG,
        "batch_size",
        expected=f"a multiple of {mesh.shape['data']}, the mesh's data axis",
        got=batch_size,
        fix="set BATCH_SIZE to such a multiple, or choose another num_partitions",
      )
    return mesh

  def shardings(self, mesh: Mesh, logical_axes: Any) -> Any:
    """Return the shardings of a tree of logical axis names."""
    return nn.logical_to_mesh_sharding(logical_axes, mesh, list(self.logical_axis_rules))

  def check_divides(self, shapes: Any, shardings: Any) -> None:
    """Refuse parameters with an axis that cannot be split evenly.

    Raises:
      AnystepError: 78 `num_partitions` names the first.
    """
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
      try:
        sharding.shard_shape(leaf.shape)
      except ValueError as error:
        raise AnystepError(
          ExitCode.CONFIG,
          "num_partitions",
          parameter=jax.tree_util.keystr(path, simple=True, separator="/"),
          expected=f"a number that divides its axes {leaf.shape} as {sharding.spec}",
          got=self.num_partitions,
          fix="choose another num_partitions, other sizes, or other logical_axis_rules",
        ) from error


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
