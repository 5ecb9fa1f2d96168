"""Placement of a run's state: the mesh, and the abstract state with its shardings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from rich.table import Table

from anystep.train.datasets.run_data import RunData
from anystep.train.models.accumulation import Microbatches
from anystep.train.models.base import Model
from anystep.train.models.train_state import TrainState, initialize, make_train_step
from anystep.train.partitioning.mesh import process_share
from anystep.train.partitioning.partitioner import Partitioner


class Placement(NamedTuple):
  """Placement of a run's state.

  Attributes:
    mesh: the devices.
    make_initial: makes the initial state, each part of it on the devices that keep it.
    abstract: shapes, dtypes and shardings of the state.
  """

  mesh: jax.sharding.Mesh
  make_initial: Callable[..., TrainState]
  abstract: TrainState


def place_state(
  model: Model,
  *,
  partitioner: Partitioner,
  batch_sizes: Iterable[int],
  microbatches: Microbatches,
  root_key: jax.Array,
) -> Placement:
  """Return where the state of a model goes, for batches of all these sizes.

  Raises:
    AnystepError: 78 `num_partitions`, `mesh_shape`, `batch_size`, `logical_axis`, `num_microbatches`.
  """
  for batch_size in batch_sizes:
    mesh = partitioner.mesh(batch_size)
    microbatches.check(model, batch_size)
  assert model.optimizer_def is not None, "Trainer refuses a model without one"
  make_initial, abstract = initialize(
    model, model.optimizer_def, root_key=root_key, mesh=mesh, partitioner=partitioner
  )
  return Placement(mesh, make_initial, abstract)


def trace_step(
  model: Model, data: RunData, placement: Placement, *, partitioner: Partitioner, microbatches: Microbatches
) -> None:
  """Trace a training step of the first batch without compiling it, to find what it cannot compute.

  Raises:
    AnystepError: as the step, such as 78 `optimizer` and `module`.
  """
  assert model.optimizer_def is not None, "Trainer refuses a model without one"
  with data.open_stream(process_share(placement.mesh)) as stream:
    stream.seek(0)
    batch = next(stream)
  step: Any = make_train_step(
    model,
    model.optimizer_def,
    root_key=jax.random.key(0),
    microbatches=microbatches,
    abstract=placement.abstract,
    partitioner=partitioner,
  )
  step.eval_shape(placement.abstract, batch)


def describe_placement(placement: Placement) -> Table:
  """Return a table of how each parameter is split, with the bytes of it and its optimizer state by device."""
  mesh, state = placement.mesh, placement.abstract
  axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
  table = Table(title=f"{mesh.size} devices: {axes}", title_justify="left")
  for column, justify in (("parameter", "left"), ("shape", "left"), ("split over", "left")):
    table.add_column(column, justify=justify)  # type: ignore[arg-type]
  table.add_column("bytes a device", justify="right")
  for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    table.add_row(name, _describe_shape(leaf.shape), _describe_split(leaf), f"{bytes_by_device([leaf]):,}")
  table.add_section()
  for name, tree in (("parameters", state.params), ("optimizer", state.opt_state), ("all", state)):
    table.add_row(name, "", "", f"{bytes_by_device(jax.tree.leaves(tree)):,}")
  return table


def bytes_by_device(leaves: Sequence[Any]) -> int:
  """Return the bytes that one device holds of abstract arrays with shardings."""
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _describe_shape(shape: Sequence[int]) -> str:
  return " × ".join(map(str, shape))


def _describe_split(leaf: Any) -> str:
  spec = [*leaf.sharding.spec, *([None] * (len(leaf.shape) - len(leaf.sharding.spec)))]
  return ", ".join("whole" if axis is None else str(axis) for axis in spec) if any(spec) else "whole"
