"""Meshes, and the share of a batch that a process holds."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from anystep.errors import AnystepError
from anystep.train.partitioning import Partitioner
from anystep.train.partitioning.mesh import _neighbouring_rows, process_share


def processes(numbers):
  """Devices of these processes."""
  return np.vectorize(lambda number: types.SimpleNamespace(process_index=number), otypes=[object])(numbers)


@pytest.mark.parametrize(
  ("holders", "share"),
  [
    ([[0, 0], [0, 0], [1, 1], [1, 1]], {0: (0, 2), 1: (1, 2)}),
    ([[0], [1], [0], [1]], {0: (0, 2), 1: (1, 2)}),
    ([[0, 1], [0, 1]], {0: (0, 1), 1: (0, 1)}),
    ([[0, 1], [2, 3], [0, 1], [2, 3]], {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)}),
    ([[0, 0, 0, 0]], {0: (0, 1)}),
  ],
)
def test_each_process_gets_the_rows_that_its_devices_hold(holders, share, monkeypatch):
  mesh = types.SimpleNamespace(devices=_neighbouring_rows(processes(holders)))
  for process, expected in share.items():
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    assert process_share(mesh) == expected
    index, count = expected
    rows = np.array_split(np.arange(len(holders)), count)[index]
    mine = [row for row in range(len(holders)) if process in {d.process_index for d in mesh.devices[row]}]
    assert mine == rows.tolist()


@pytest.mark.parametrize("holders", [[[0], [0], [0], [1]], [[0, 1], [1, 2]]])
def test_processes_that_hold_unequal_or_parts_of_the_same_rows_are_refused(holders):
  with pytest.raises(AnystepError) as refused:
    process_share(types.SimpleNamespace(devices=processes(holders)))
  assert (refused.value.code, refused.value.kind) == (78, "mesh_shape")


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (1, 8)])
def test_shapes_make_the_mesh(shape):
  mesh = Partitioner(ici_mesh_shape=shape).mesh(8)
  assert isinstance(mesh, Mesh)
  assert tuple(mesh.shape.values()) == shape
  assert mesh.devices.flatten().tolist() == jax.devices()


@pytest.mark.parametrize(
  "shapes",
  [
    {"ici_mesh_shape": (3, 2)},
    {"ici_mesh_shape": (2, 2), "dcn_mesh_shape": (3, 1)},
    {"dcn_mesh_shape": (2, 1)},
    {"ici_mesh_shape": (4, 2), "num_partitions": 4},
  ],
)
def test_shapes_that_are_not_the_devices_are_refused(shapes):
  with pytest.raises(AnystepError) as refused:
    Partitioner(**shapes).mesh(24)
  assert (refused.value.code, refused.value.kind) == (78, "mesh_shape")


@pytest.mark.parametrize("shape", [(4,), (4, 0), (4.0, 2), (2, 2, 2)])
def test_what_is_no_shape_is_refused(shape):
  with pytest.raises(ValueError, match="ici_mesh_shape"):
    Partitioner(ici_mesh_shape=shape)
