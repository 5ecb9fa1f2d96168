"""The partitioner: how parameters, optimizer states, activations and batches are split over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anystep.errors import AnystepError, ExitCode
from anystep.limits import is_count
from anystep.train.partitioning.mesh import make_mesh
from anystep.train.partitioning.rules import (
  STANDARD_RULES,
  LogicalAxisRules,
  check_rules,
  sharded_activations,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partitioner:
  """Splits batches over the `data` axis of a mesh of devices, and parameters by rules for their logical axes.

  Attributes:
    num_partitions: number of devices along the mesh's axis `model`.
    ici_mesh_shape: devices of a slice along (data, model), where num_partitions does not say enough.
    dcn_mesh_shape: slices along (data, model), such as (2, 1), where the devices are several slices.
    logical_axis_rules: mesh axis of each logical axis, see `standard_logical_axis_rules`; None means that the
      axis is not split.

  Raises:
    ValueError: a number is not a whole number of at least 1.
    AnystepError: 78 `logical_axis_rules`, `mesh_shape`.
  """

  num_partitions: int = 1
  ici_mesh_shape: Sequence[int] | None = None
  dcn_mesh_shape: Sequence[int] | None = None
  logical_axis_rules: LogicalAxisRules = STANDARD_RULES

  def __post_init__(self):
    if not is_count(self.num_partitions, least=1):
      raise ValueError(f"num_partitions is a whole number of at least 1, not {self.num_partitions!r}")
    for name in ("ici_mesh_shape", "dcn_mesh_shape"):
      shape = getattr(self, name)
      if shape is not None and (len(shape) != 2 or not all(is_count(size, least=1) for size in shape)):
        raise ValueError(f"{name} is two whole numbers of at least 1, (data, model), not {shape!r}")
    shapes = [shape for shape in (self.ici_mesh_shape, self.dcn_mesh_shape) if shape is not None]
    if self.ici_mesh_shape is None and self.dcn_mesh_shape is not None:
      raise _bad_shape("ici_mesh_shape beside dcn_mesh_shape", "dcn_mesh_shape alone")
    along_model = math.prod(shape[1] for shape in shapes)
    if shapes and self.num_partitions not in (1, along_model):
      raise _bad_shape(f"num_partitions 1 or {along_model}, as the shapes say", self.num_partitions)
    check_rules(self.logical_axis_rules)

  def mesh(self, batch_size: int) -> Mesh:
    """Return all devices as a (data, model) mesh. No device is touched before this call.

    Raises:
      AnystepError: 78 `num_partitions`, `mesh_shape`, `batch_size`.
    """
    mesh = make_mesh(self.num_partitions, self.ici_mesh_shape, self.dcn_mesh_shape)
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
    """Return the shardings of a tree of logical axis names.

    Raises:
      AnystepError: 78 `logical_axis` for a name without a rule, or one that an array has twice.
    """
    known = {axis for axis, _ in self.logical_axis_rules}
    leaves = jax.tree_util.tree_flatten_with_path(
      logical_axes, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )[0]
    for path, spec in leaves:
      unknown = [axis for axis in spec or () if axis is not None and axis not in known]
      if unknown:
        raise AnystepError(
          ExitCode.CONFIG,
          "logical_axis",
          parameter=_name(path),
          expected=f"axes that logical_axis_rules name: {', '.join(sorted(known))}",
          got=unknown[0],
          fix="correct the axis, or add a rule: standard_logical_axis_rules.additional_rules = [('…', None)]",
        )
      names = [axis for axis in spec or () if axis is not None]
      if len(set(names)) < len(names):
        raise AnystepError(
          ExitCode.CONFIG,
          "logical_axis",
          parameter=_name(path),
          expected="logical axes that all differ",
          got=", ".join(names),
          fix="give one of them another name, or None",
        )
    return nn.logical_to_mesh_sharding(logical_axes, mesh, list(self.logical_axis_rules))

  def sharded_activations(self, mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """Split activations over the mesh by the same rules, in what is traced within the context."""
    return sharded_activations(mesh, self.logical_axis_rules)

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
          parameter=_name(path),
          expected=f"a number that divides its axes {leaf.shape} as {sharding.spec}",
          got=dict(sharding.mesh.shape),
          fix="choose another num_partitions, other sizes, or other logical_axis_rules",
        ) from error


def optimizer_shardings(mesh: Mesh, init: Callable[[Any], Any], params: Any, shardings: Any) -> Any:
  """Return the shardings of an optimizer's state: each array is split as its parameter.

  An array that has some of its parameter's axes, such as the row and column means of Adafactor, is split
  along those. Which these are is seen from the state of parameters whose axes all differ in size. Other
  arrays are whole on every device.

  Args:
    mesh: the devices.
    init: the optimizer's, from parameters to its state.
    params: the parameters; leaves have shapes.
    shardings: theirs.
  """
  differing = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(_distinct(leaf.shape), leaf.dtype), params)
  by_path = {
    path: (leaf.shape, other.shape, sharding.spec)
    for (path, leaf), other, sharding in zip(
      jax.tree_util.tree_flatten_with_path(params)[0],
      jax.tree.leaves(differing),
      jax.tree.leaves(shardings),
      strict=True,
    )
  }

  def sharding_of(path: tuple[Any, ...], leaf: Any, other: Any) -> NamedSharding:
    # An optimizer's own keys come before the parameter's.
    ends = (by_path.get(path[start:]) for start in range(len(path)))
    found = next((end for end in ends if end is not None), None)
    if found is None:
      return NamedSharding(mesh, PartitionSpec())
    shape, distinct, spec = found
    axes = [distinct.index(size) for size in other.shape if size in distinct]
    if len(axes) < len(other.shape) or tuple(shape[axis] for axis in axes) != leaf.shape:
      return NamedSharding(mesh, PartitionSpec())
    mesh_axes = [*spec, *([None] * (len(shape) - len(spec)))]
    return NamedSharding(mesh, PartitionSpec(*(mesh_axes[axis] for axis in axes)))

  return jax.tree_util.tree_map_with_path(
    sharding_of, jax.eval_shape(init, params), jax.eval_shape(init, differing)
  )


def _distinct(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Return sizes in the same order of size, of which no two are equal.

  >>> _distinct((128, 128, 64))
  (128, 129, 64)
  """
  sizes, least = list(shape), 0
  for axis in sorted(range(len(shape)), key=lambda axis: shape[axis]):
    sizes[axis] = max(sizes[axis], least)
    least = sizes[axis] + 1
  return tuple(sizes)


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _bad_shape(expected: str, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG, "mesh_shape", expected=expected, got=got, fix="correct the partitioner's shapes"
  )
