"""Meshes of devices: which device holds which rows and which part of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from anystep.errors import AnystepError, ExitCode
from anystep.train.partitioning.rules import MESH_AXES

Shape = Sequence[int]


def make_mesh(num_partitions: int, ici_shape: Shape | None, dcn_shape: Shape | None) -> Mesh:
  """Return all devices as a mesh of (data, model).

  The rows that a process's devices hold are neighbours.

  Args:
    num_partitions: devices along `model`, where no shape is given.
    ici_shape: devices of one slice along (data, model), joined by the slice's own network; None for all
      devices, with num_partitions along `model`.
    dcn_shape: slices along (data, model), joined by the data centre's network; None for one.

  Raises:
    AnystepError: 78 `num_partitions`, `mesh_shape`.
  """
  devices = jax.devices()
  if ici_shape is None:
    if len(devices) % num_partitions:
      raise AnystepError(
        ExitCode.CONFIG,
        "num_partitions",
        expected=f"a divisor of {len(devices)} devices",
        got=num_partitions,
        fix="choose another num_partitions or number of devices",
      )
    ici_shape = (len(devices) // num_partitions, num_partitions)
  dcn_shape = (1, 1) if dcn_shape is None else dcn_shape
  if math.prod(ici_shape) * math.prod(dcn_shape) != len(devices):
    raise AnystepError(
      ExitCode.CONFIG,
      "mesh_shape",
      expected=f"{len(devices)} devices",
      got=f"ici_mesh_shape {tuple(ici_shape)} and dcn_mesh_shape {tuple(dcn_shape)}",
      fix="choose shapes whose product is the number of devices",
    )
  try:
    array = (
      mesh_utils.create_device_mesh(ici_shape, devices, allow_split_physical_axes=True)
      if math.prod(dcn_shape) == 1
      else mesh_utils.create_hybrid_device_mesh(
        ici_shape, dcn_shape, devices, process_is_granule=not hasattr(devices[0], "slice_index")
      )
    )
  except (ValueError, NotImplementedError, AssertionError) as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "mesh_shape",
      expected="shapes that the devices' network has",
      got=str(error),
      fix="choose another ici_mesh_shape or dcn_mesh_shape",
    ) from error
  return Mesh(_neighbouring_rows(array), MESH_AXES)


def process_share(mesh: Mesh) -> tuple[int, int]:
  """Return this process's share of a batch's rows as (index, count): share `index` of `count` equal ones.

  Processes that hold the same rows have the same share.

  Raises:
    AnystepError: 78 `mesh_shape` if processes hold parts of each other's rows.
  """
  holders = [_processes(row) for row in mesh.devices]
  shares = list(dict.fromkeys(holders))
  are_equal = all(holders.count(share) * len(shares) == len(holders) for share in shares)
  are_apart = len({process for share in shares for process in share}) == sum(map(len, shares))
  if not are_equal or not are_apart:
    raise AnystepError(
      ExitCode.CONFIG,
      "mesh_shape",
      expected="processes that hold equal numbers of rows, each row with all its partitions",
      got=f"rows of the processes {holders}",
      fix="choose another num_partitions or mesh shape",
    )
  mine = next(number for number, share in enumerate(shares) if jax.process_index() in share)
  return mine, len(shares)


def _processes(devices: np.ndarray) -> tuple[int, ...]:
  return tuple(sorted({device.process_index for device in devices.flat}))


def _neighbouring_rows(devices: np.ndarray) -> np.ndarray:
  """Return the mesh with its rows in the order of their processes."""
  return devices[sorted(range(len(devices)), key=lambda row: _processes(devices[row]))]
