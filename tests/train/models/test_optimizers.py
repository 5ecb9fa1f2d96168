"""Adafactor against 20 steps of T5X, and against the paper's algorithm written out."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.learning_rates import learning_rate_schedule
from anystep.train.models.optimizers import adafactor
from anystep.train.network.t5 import T5Config, Transformer

T5X = Path(__file__).parents[2] / "fixtures" / "t5x_t5_1_1"
STEPS = 20


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def load(name):
  with np.load(T5X / f"{name}.npz") as arrays:
    return dict(arrays)


def test_twenty_steps_are_t5xs(optimized):
  config = T5Config(
    vocab_size=384,
    emb_dim=64,
    num_heads=4,
    head_dim=16,
    mlp_dim=128,
    num_encoder_layers=2,
    num_decoder_layers=3,
    mlp_activations=("gelu", "linear"),
  )
  schedule = learning_rate_schedule("constant * rsqrt_decay", base_learning_rate=0.5, warmup_steps=10)
  model = EncoderDecoderModel(Transformer(config), optimizer_def=adafactor(schedule), z_loss=1e-4)

  @jax.jit
  def train_step(params, state, batch):
    (loss, _), gradient = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch)
    updates, state = model.optimizer_def.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = unflatten_dict(load("params_0"), sep="/")
  state = model.optimizer_def.init(params)
  batches = load("batches")
  losses = {}
  for step in range(STEPS):
    batch = {name: rows[8 * step : 8 * step + 8] for name, rows in batches.items()}
    params, state, loss = train_step(params, state, batch)
    losses[str(step + 1)] = float(loss)

  assert losses == pytest.approx(json.loads((T5X / "metrics.json").read_text())["loss_by_step"], rel=1e-6)
  ours, moments = flatten_dict(params, sep="/"), flatten_dict(state[0].v, sep="/")
  for found, name in [(ours, "params_20"), (moments, "second_moments_20")]:
    for path, expected in load(name).items():
      np.testing.assert_allclose(found[path], expected, atol=5e-5 * np.abs(expected).max(), err_msg=path)
  assert state[0].count == STEPS


@pytest.mark.parametrize("shape", [(130, 200), (200, 130), (128, 128), (40, 200), (200,)])
def test_large_matrices_keep_only_row_and_column_means(shape):
  rng = np.random.default_rng(0)
  x = 0.3 * rng.standard_normal(shape)
  gradients = [10.0**-k * rng.standard_normal(shape) * (1 + np.abs(x)) for k in range(3)]
  factored = len(shape) == 2 and min(shape) >= 128

  optimizer = adafactor(0.1)
  ours = jnp.asarray(x, jnp.float32)
  state = optimizer.init(ours)
  update = jax.jit(optimizer.update)
  v, rows, columns = np.zeros(shape), np.zeros(shape[0]), np.zeros(shape[-1])
  for t, gradient in enumerate(gradients):
    updates, state = update(jnp.asarray(gradient, jnp.float32), state, ours)
    ours = optax.apply_updates(ours, updates)

    decay = 1 - (t + 1) ** -0.8
    squares = gradient**2 + 1e-30
    if factored:
      rows = decay * rows + (1 - decay) * squares.mean(axis=1)
      columns = decay * columns + (1 - decay) * squares.mean(axis=0)
      v = np.outer(rows, columns) / rows.mean()
    else:
      v = decay * v + (1 - decay) * squares
    u = gradient / np.sqrt(v)
    u /= max(1.0, np.sqrt(np.mean(u**2)))
    x = x - 0.1 * max(1e-3, np.sqrt(np.mean(x**2))) * u

  np.testing.assert_allclose(ours, x, rtol=1e-4, atol=1e-5)
  numbers = sum(leaf.size for leaf in jax.tree.leaves((state[0].v_row, state[0].v_col, state[0].v)))
  assert numbers <= (sum(shape) if factored else np.prod(shape)) + 2


@pytest.mark.parametrize(
  ("options", "step"),
  [
    ({}, 0.1 * 2.0),
    ({"multiply_by_parameter_scale": False}, 0.1),
    ({"weight_decay_rate": 0.01}, 0.1 * 2.0 + 0.01 * 2.0),
    ({"clipping_threshold": 0.5}, 0.1 * 2.0 * 0.5),
    ({"clipping_threshold": None}, 0.1 * 2.0),
  ],
)
def test_options_change_the_first_step_as_the_formula_says(options, step):
  optimizer = adafactor(0.1, **options)
  x = jnp.full((4,), 2.0)
  updates, _ = optimizer.update(jnp.full((4,), 5.0), optimizer.init(x), x)
  np.testing.assert_allclose(updates, -step, rtol=1e-5)


def test_the_decay_restarts_at_the_step_offset():
  x, gradient = jnp.array([1.0, 2.0]), jnp.array([3.0, -4.0])
  fresh, shifted = adafactor(0.1), adafactor(0.1, step_offset=100)
  state = shifted.init(x)
  pretrained = (state[0]._replace(count=jnp.int32(100), v=jnp.array([9.0, 9.0])), *state[1:])
  updates, _ = shifted.update(gradient, pretrained, x)
  np.testing.assert_allclose(updates, fresh.update(gradient, fresh.init(x), x)[0], rtol=1e-6)
