"""Rules by logical axis: T5X's four sets, and activations that really are split."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anystep.errors import AnystepError
from anystep.train.partitioning import Partitioner, standard_logical_axis_rules
from anystep.train.partitioning.rules import constrain

# By the numbers of activation and parameter dimensions: a table of embeddings, an attention kernel, a kernel
# of scanned layers, a norm's scale; activations between layers and in a feed-forward block.
SPLITS = {
  (1, 1): [("model", None), (None, "model"), (None, None, "model"), (None,), ("data",), ("model",)],
  (2, 1): [
    ("model", None),
    (None, "model"),
    (None, None, "model"),
    ("model",),
    ("data", "model"),
    ("model",),
  ],
  (1, 2): [
    ("model", "data"),
    ("data", "model"),
    ("data", None, "model"),
    ("data",),
    ("data",),
    ("model",),
  ],
  (2, 2): [
    ("model", "data"),
    ("data", "model"),
    ("data", None, "model"),
    ("model",),
    ("data", "model"),
    ("model",),
  ],
}


def mesh_of(num_data, num_model):
  devices = np.array(jax.devices()[: num_data * num_model]).reshape(num_data, num_model)
  return Mesh(devices, ("data", "model"))


@pytest.mark.parametrize("dims", SPLITS)
def test_each_set_splits_parameters_as_t5xs(dims):
  partitioner = Partitioner(logical_axis_rules=standard_logical_axis_rules(*dims))
  axes = {
    "embedding": PartitionSpec("vocab", "embed"),
    "kernel": PartitionSpec("embed", "joined_kv"),
    "scanned": PartitionSpec("embed", "layers", "mlp"),
    "scale": PartitionSpec("embed"),
  }
  shardings = partitioner.shardings(mesh_of(4, 2), axes)
  assert [tuple(shardings[name].spec) for name in axes] == SPLITS[dims][:4]


@pytest.mark.parametrize("dims", SPLITS)
def test_activations_are_split_within_a_run_and_only_there(dims):
  partitioner, mesh = Partitioner(logical_axis_rules=standard_logical_axis_rules(*dims)), mesh_of(4, 2)

  def split(context):
    def layer(x):
      with context():
        hidden = constrain(jnp.repeat(x, 2, axis=-1), "batch", "length", "mlp")
        return constrain(x + 1, "batch", "length", "embed"), hidden

    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(layer, in_shardings=replicated)(jnp.ones((8, 3, 6)))

  between, hidden = split(lambda: partitioner.sharded_activations(mesh))
  embed = [None, *SPLITS[dims][4][1:]] if len(SPLITS[dims][4]) > 1 else []
  assert between.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data", *embed)), 3)
  assert hidden.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data", None, "model")), 3)
  assert all(array.is_fully_replicated for array in split(contextlib.nullcontext))


def test_an_activation_whose_size_the_devices_do_not_divide_stays_whole():
  mesh = mesh_of(4, 2)

  def odd(x):
    with Partitioner().sharded_activations(mesh):
      return constrain(x, "batch", "length", "mlp")

  assert jax.jit(odd)(jnp.ones((8, 3, 5))).sharding.is_equivalent_to(
    NamedSharding(mesh, PartitionSpec("data")), 3
  )


@pytest.mark.parametrize("dims", [(0, 1), (1, 3), ("1", 1)])
def test_other_numbers_of_dimensions_are_refused(dims):
  with pytest.raises(AnystepError) as refused:
    standard_logical_axis_rules(*dims)
  assert (refused.value.code, refused.value.kind) == (78, "logical_axis_rules")


@pytest.mark.parametrize("rules", [[("embed", "modle")], [("embed",)], [(1, "data")], "embed", [None]])
def test_rules_that_name_no_axis_of_the_mesh_are_refused(rules):
  with pytest.raises(AnystepError) as refused:
    Partitioner(logical_axis_rules=rules)
  assert (refused.value.code, refused.value.kind) == (78, "logical_axis_rules")


def test_a_logical_axis_without_a_rule_is_refused_with_its_parameter_and_can_be_given_one():
  axes = {"layer": {"kernel": PartitionSpec("embed", "experts")}}
  with pytest.raises(AnystepError) as refused:
    Partitioner().shardings(mesh_of(4, 2), axes)
  assert (refused.value.kind, refused.value.fields["parameter"]) == ("logical_axis", "layer/kernel")
  rules = standard_logical_axis_rules(additional_rules=[["experts", "model"]])
  shardings = Partitioner(logical_axis_rules=rules).shardings(mesh_of(4, 2), axes)
  assert tuple(shardings["layer"]["kernel"].spec) == (None, "model")


def test_a_logical_axis_that_an_array_has_twice_is_refused():
  with pytest.raises(AnystepError) as refused:
    Partitioner().shardings(Partitioner().mesh(8), {"layer": {"kernel": PartitionSpec("embed", "embed")}})
  assert (refused.value.kind, refused.value.fields["got"]) == ("logical_axis", "embed, embed")
