"""Small training states, one for each step, and checkpoints of them."""

import jax
import jax.numpy as jnp
import numpy as np

from anystep.train.checkpoints import checkpoints
from anystep.train.datasets.data_state import UncachedState
from anystep.train.models.train_state import TrainState

RUN, VALUES = "0123456789abcdef" * 2, {"rate": 0.1, "sizes": [1, 2], "name": "ä"}


def data_of(step):
  return UncachedState(
    mixture_or_task_name="demo",
    split="train",
    batch_size=8,
    seed=step,
    feature_lengths={"targets": 4},
    packing="none",
  )


def state_of(step):
  params = {"w": jnp.arange(300.0).reshape(30, 10) + step, "b": jnp.full((3,), step, jnp.float32)}
  return TrainState(jnp.int32(step), params, ({"count": jnp.int32(step)}, [jnp.ones((2,)) * step]))


def save(model_dir, step):
  return checkpoints.save_checkpoint(
    model_dir, state_of(step), data=data_of(step), run=RUN, trained_with=VALUES
  )


def abstract():
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), state_of(0))


def assert_restored(model_dir, step):
  """The newest checkpoint is that of a step, with all that belongs to it."""
  found = checkpoints.find_checkpoint(model_dir)
  assert found == checkpoints.Checkpoint(
    step=step, first_step=0, data=data_of(step), run=RUN, trained_with=VALUES
  )
  restored = checkpoints.restore_state(model_dir, step, abstract())
  jax.tree.map(np.testing.assert_array_equal, restored, state_of(step))
