"""Numbers of a training run, which do not depend on how its arrays are split over devices."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.train_state import initialize, make_train_step
from anystep.train.network.llama import Llama, LlamaConfig
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.optimizers import adafactor
from anystep.train.partitioning import Partitioner, standard_logical_axis_rules
from anystep.train.partitioning.batches import batch_sharding, global_batch, local_rows
from anystep.train.partitioning.partitioner import optimizer_shardings
from anystep.train.runs.placement import bytes_by_device

SIZES = {
  "vocab_size": 128,
  "emb_dim": 16,
  "num_heads": 8,
  "head_dim": 2,
  "mlp_dim": 32,
  "num_encoder_layers": 1,
  "num_decoder_layers": 1,
}
LLAMA = {"vocab_size": 128, "emb_dim": 16, "num_heads": 16, "num_kv_heads": 8, "head_dim": 2, "mlp_dim": 32}
# Of its rows, each of which holds two examples.
PACKED = {"decoder_segment_ids": [1, 1, 2, 2, 2, 2], "decoder_positions": [0, 1, 0, 1, 2, 3]}
ROWS, STEPS = 8, 20
DIMS = [(1, 1), (2, 1), (1, 2), (2, 2)]
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
NETWORKS = {
  "t5": Transformer(T5Config(**SIZES, dropout_rate=0.1)),
  "scalable": ScalableTransformer(ScalableT5Config(**SIZES, dropout_rate=0.1)),
  "llama": Llama(LlamaConfig(**LLAMA, num_layers=2, dropout_rate=0.1)),
}


def mesh_of(num_data, num_model):
  devices = np.array(jax.devices()[: num_data * num_model]).reshape(num_data, num_model)
  return Mesh(devices, ("data", "model"))


def batches(*, packed):
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    batch = {
      "encoder_input_tokens": rng.integers(0, 128, (ROWS, 12), np.int32),
      "decoder_target_tokens": rng.integers(1, 128, (ROWS, 6), np.int32),
    }
    batch["decoder_input_tokens"] = np.roll(batch["decoder_target_tokens"], 1, axis=1)
    batch["decoder_loss_weights"] = np.ones((ROWS, 6), np.int32)
    if packed:
      batch |= {name: np.tile(np.array(row, np.int32), (ROWS, 1)) for name, row in PACKED.items()}
    yield batch


def train(network, mesh, dims=(1, 1)):
  """Return the losses of 20 steps, the abstract state and the last one."""
  partitioner = Partitioner(logical_axis_rules=standard_logical_axis_rules(*dims))
  model_class = DecoderOnlyModel if isinstance(network, Llama) else EncoderDecoderModel
  # Factored, so that its row and column means are split too.
  model = model_class(network, optimizer_def=adafactor(0.05, min_dim_size_to_factor=8))
  root_key = jax.random.key(0)
  make_initial, abstract = initialize(
    model, model.optimizer_def, root_key=root_key, mesh=mesh, partitioner=partitioner
  )
  step = make_train_step(
    model, model.optimizer_def, root_key=root_key, abstract=abstract, partitioner=partitioner
  )
  sharding = batch_sharding(mesh)
  state, losses = make_initial(), []
  for batch in batches(packed=isinstance(network, Llama)):
    state, metrics = step(state, global_batch(batch, sharding, local_rows(sharding, ROWS), ROWS))
    losses.append(float(metrics["loss"] / metrics["weight_sum"]))
  return losses, abstract, state


@functools.cache
def losses_on_one_device(name):
  return train(NETWORKS[name], mesh_of(1, 1))[0]


def check(name, shape, dims):
  losses, abstract, state = train(NETWORKS[name], mesh_of(*shape), dims)
  np.testing.assert_allclose(losses, losses_on_one_device(name), rtol=1e-5)
  for planned, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
    assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
  return abstract


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "shape", "dims"),
  [
    ("t5", (4, 2), (2, 2)),
    ("scalable", (4, 2), (1, 2)),
    ("llama", (8, 1), (1, 2)),
    ("llama", (2, 4), (2, 2)),
  ],
)
def test_a_run_on_a_mesh_has_the_losses_of_one_device(name, shape, dims):
  check(name, shape, dims)


@pytest.mark.soak
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_set_of_rules_on_every_mesh_has_the_losses_of_one_device(name, dims, shape):
  check(name, shape, dims)


@pytest.mark.parametrize("dims", DIMS)
def test_means_of_squared_gradients_are_split_along_the_axes_that_are_left(dims):
  partitioner = Partitioner(logical_axis_rules=standard_logical_axis_rules(*dims))
  model = EncoderDecoderModel(NETWORKS["scalable"], optimizer_def=adafactor(0.05, min_dim_size_to_factor=8))
  _, abstract = initialize(
    model, model.optimizer_def, root_key=jax.random.key(0), mesh=mesh_of(4, 2), partitioner=partitioner
  )
  state = abstract.opt_state
  kernel = abstract.params["encoder"]["encoder"]["mlp"]["wi_0"]["kernel"]
  row = state.v_row["encoder"]["encoder"]["mlp"]["wi_0"]["kernel"]
  column = state.v_col["encoder"]["encoder"]["mlp"]["wi_0"]["kernel"]
  embed, layers, mlp = [*kernel.sharding.spec, None, None][:3]
  # Rows are `embed`, whose means over the columns `mlp` are kept; layers are a batch of parameters.
  assert (row.shape, column.shape) == ((16, 1), (1, 32))
  assert row.sharding.is_equivalent_to(NamedSharding(mesh_of(4, 2), jax.P(embed, layers)), 2)
  assert column.sharding.is_equivalent_to(NamedSharding(mesh_of(4, 2), jax.P(layers, mlp)), 2)


def test_a_square_parameters_means_are_split_along_their_own_axes():
  axes = {"kernel": jax.P("embed", "mlp")}
  partitioner = Partitioner(logical_axis_rules=standard_logical_axis_rules(1, 2))
  mesh = mesh_of(4, 2)
  shapes = {"kernel": jax.ShapeDtypeStruct((16, 16), np.float32)}
  optimizer = optax.chain(
    optax.multi_transform({"all": adafactor(0.1, min_dim_size_to_factor=8)}, {"kernel": "all"}),
    optax.trace(0.9),
  )
  state = optimizer_shardings(mesh, optimizer.init, shapes, partitioner.shardings(mesh, axes))
  factored = state[0].inner_states["all"].inner_state
  assert tuple(factored.v_row["kernel"].spec) == ("data",)
  assert tuple(factored.v_col["kernel"].spec) == ("model",)
  assert factored.count.is_fully_replicated
  assert tuple(state[1].trace["kernel"].spec) == ("data", "model")


@pytest.mark.long
@pytest.mark.parametrize("dims", [(1, 1), (1, 2)])
def test_a_device_holds_its_share_of_the_state(dims):
  """T5.1.1 base, compiled and never run: XLA's own count of the bytes against the abstract state's."""
  base = T5Config(vocab_size=32128, emb_dim=768, num_heads=12, mlp_dim=2048)
  partitioner = Partitioner(num_partitions=2, logical_axis_rules=standard_logical_axis_rules(*dims))
  model = EncoderDecoderModel(Transformer(base), optimizer_def=optax.adam(0.1))
  mesh = partitioner.mesh(8)
  make_initial, abstract = initialize(
    model, model.optimizer_def, root_key=jax.random.key(0), mesh=mesh, partitioner=partitioner
  )
  leaves = jax.tree.leaves(abstract)
  measured = make_initial.lower().compile().memory_analysis().output_size_in_bytes
  assert measured == pytest.approx(bytes_by_device(leaves), rel=0.05)
  split = [leaf for leaf in leaves if any(leaf.sharding.spec)]
  total = sum(leaf.size * leaf.dtype.itemsize for leaf in split)
  # Embeddings and kernels are split over all 8 devices under 2 parameter dimensions.
  assert bytes_by_device(split) == pytest.approx(total / (2 if dims == (1, 1) else 8), rel=0.05)
