"""Batches and parameters over devices: the same numbers, however many there are."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anystep.errors import AnystepError
from anystep.train import main
from anystep.train.models.teacher_forcing import make_row_keys
from anystep.train.models.train_state import stream_key
from anystep.train.network.dropout import draw_dropout
from anystep.train.partitioning.batches import batch_sharding, global_batch, local_rows, local_values
from anystep.train.partitioning.partitioner import Partitioner
from anystep.train.reports.step_log import read_step_log


def _mesh(num_data, num_model=1):
  devices = np.array(jax.devices()[: num_data * num_model]).reshape(num_data, num_model)
  return Mesh(devices, ("data", "model"))


@pytest.mark.parametrize(("num_data", "num_model"), [(1, 1), (4, 1), (2, 4), (8, 1)])
def test_rows_survive_the_way_to_the_devices_and_back(num_data, num_model):
  sharding = batch_sharding(_mesh(num_data, num_model))
  rows = {"tokens": np.arange(48).reshape(16, 3), "weights": np.arange(16)}
  numbers = local_rows(sharding, 16)
  batch = global_batch(rows, sharding, numbers, 16)
  assert numbers.tolist() == list(range(16))
  assert all(array.sharding.is_equivalent_to(sharding, array.ndim) for array in batch.values())
  back = local_values(batch)
  assert all(np.array_equal(back[name], rows[name]) for name in rows)


def test_a_process_that_holds_some_rows_makes_only_those():
  """As in a run of several processes, where this one's devices hold every other row block."""
  sharding = batch_sharding(_mesh(4))

  class Some:
    def addressable_devices_indices_map(self, shape):
      return dict(list(sharding.addressable_devices_indices_map(shape).items())[::2])

  assert local_rows(Some(), 8).tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("num_partitions", [1, 2, 8])
def test_parameters_are_split_as_their_logical_axes_say(num_partitions):
  partitioner = Partitioner(num_partitions=num_partitions)
  mesh = partitioner.mesh(8)
  assert dict(mesh.shape) == {"data": 8 // num_partitions, "model": num_partitions}
  shardings = partitioner.shardings(
    mesh, {"kernel": PartitionSpec("embed", "mlp"), "scale": PartitionSpec("embed")}
  )
  assert shardings["kernel"] == NamedSharding(mesh, PartitionSpec(None, "model"))
  assert shardings["scale"].is_fully_replicated


@pytest.mark.parametrize(
  ("num_partitions", "batch_size", "kind"),
  [(3, 8, "num_partitions"), (1, 12, "batch_size"), (2, 6, "batch_size")],
)
def test_what_cannot_be_split_is_refused(num_partitions, batch_size, kind):
  with pytest.raises(AnystepError) as refused:
    Partitioner(num_partitions=num_partitions).mesh(batch_size)
  assert (refused.value.code, refused.value.kind) == (78, kind)


def test_a_model_that_cannot_be_split_is_refused_with_the_parameter(command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(**{"partitioning.Partitioner.num_partitions": 8}))
  assert (refused.value.code, refused.value.kind) == (78, "num_partitions")
  assert refused.value.fields["parameter"] == "decoder/relpos_bias/rel_embedding"


@pytest.mark.long
def test_a_run_is_the_same_on_one_and_on_two_partitions(command, tmp_path):
  for partitions in (1, 2):
    main.main(
      command(f"on_{partitions}", **{"partitioning.Partitioner.num_partitions": partitions, "TRAIN_STEPS": 4})
    )
  one, two = (read_step_log(tmp_path / f"on_{partitions}")[0] for partitions in (1, 2))
  assert [record.digest for record in one] == [record.digest for record in two]
  np.testing.assert_allclose([record.loss for record in one], [record.loss for record in two], rtol=1e-5)


def test_random_streams_differ_by_name_and_step_and_are_the_same_again():
  root = jax.random.key(0)
  keys = {
    (name, step): jax.random.key_data(stream_key(root, name, step)).tobytes()
    for name in ("params", "dropout")
    for step in (0, 1, 2**31 - 1)
  }
  assert len(set(keys.values())) == len(keys)
  assert jax.random.key_data(stream_key(root, "dropout", 1)).tobytes() == keys["dropout", 1]


@pytest.mark.parametrize(("num_data", "num_model"), [(4, 1), (2, 4), (8, 1)])
def test_masks_of_dropout_do_not_depend_on_the_devices(num_data, num_model):
  """T5X's do where its seed is None, with JAX's generator `unsafe_rbg`."""

  def draw(key):
    shapes = {"weights": (4, 1, 50), "mlp": (1, 64)}
    keys = make_row_keys(key, {"tokens": np.zeros((8, 3))})
    return draw_dropout(keys, 0.25, shapes=shapes, dtype=np.dtype(np.float32))

  key = stream_key(jax.random.key(0), "dropout", 3)
  sharding = batch_sharding(_mesh(num_data, num_model))
  one, several = jax.jit(draw)(key), jax.jit(draw, out_shardings=sharding)(key)
  jax.tree.map(np.testing.assert_array_equal, several, one)


def test_a_run_without_a_seed_is_refused(command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(**{"trainer.Trainer.random_seed": None}))
  assert refused.value.kind == "gin_value"
  assert "random_seed is a whole number, not None" in str(refused.value)
