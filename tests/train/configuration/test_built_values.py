"""What a configuration built is known by its values, whatever gin says."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from train_runs import ENVIRONMENT

from anystep.train import main, optimizers
from anystep.train.configuration.built_values import built_values
from anystep.train.models.losses import LossNormalizingFactor
from anystep.train.network import t5 as network


def of(value):
  return built_values({"v": value})


def own_schedule(rate, *, steps=10):
  def schedule(step):
    return rate / max(step, steps)

  return schedule


class Twice(nn.Module):
  """A user's own network around another."""

  inner: nn.Module
  factor: float = 2.0


@dataclasses.dataclass
class Loop:
  """Something that holds itself."""

  size: int
  itself: object = None


class Plain:
  """Something without fields."""

  def __init__(self, size):
    self.size = size


T5 = network.T5Config(vocab_size=384)
SCHEDULE = optimizers.learning_rate_schedule
CHANGES = {
  "a network's size": (T5, dataclasses.replace(T5, emb_dim=256), {"v.emb_dim": (512, 256)}),
  "precision": (T5, dataclasses.replace(T5, dtype="bfloat16"), {"v.dtype": ("float32", "bfloat16")}),
  "activations": (
    T5,
    dataclasses.replace(T5, mlp_activations=("relu",)),
    {"v.mlp_activations": (["gelu", "linear"], ["relu"])},
  ),
  "an optimizer's argument": (
    optimizers.adafactor(0.1),
    optimizers.adafactor(0.1, decay_rate=0.9),
    {"v.decay_rate": (0.8, 0.9)},
  ),
  "a learning rate": (
    optimizers.adafactor(SCHEDULE(warmup_steps=5)),
    optimizers.adafactor(SCHEDULE(warmup_steps=6)),
    {"v.learning_rate.warmup_steps": (5, 6)},
  ),
  "another kind of learning rate": (
    optimizers.adafactor(0.1),
    optimizers.adafactor(0.2),
    {"v.learning_rate": (0.1, 0.2)},
  ),
  "optax's own optimizer": (
    optax.adamw(0.1, b1=0.8),
    optax.adamw(0.1, b1=0.9),
    {"v.fns[0].b1": (0.8, 0.9)},
  ),
  "optax's own schedule": (
    optax.sgd(optax.linear_schedule(1.0, 0.1, 10)),
    optax.sgd(optax.linear_schedule(1.0, 0.1, 20)),
    {"v.fns[1].step_size_fn.learning_rate.transition_steps": (10, 20)},
  ),
  "of two optimizers one": (
    optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(0.1)}, {"x": "a"}),
    optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(0.2)}, {"x": "a"}),
    {"v.transforms.b.fns[1].step_size": (-0.1, -0.2)},
  ),
  "what only starting uses": (
    optax.adagrad(0.1, initial_accumulator_value=0.1),
    optax.adagrad(0.1, initial_accumulator_value=0.2),
    {"v.fns[0].initial_accumulator_value": (0.1, 0.2)},
  ),
  "an initializer": (
    nn.initializers.normal(1.0),
    nn.initializers.normal(2.0),
    {"v.stddev": (1.0, 2.0)},
  ),
  "what a function captured": (own_schedule(1.0), own_schedule(2.0), {"v.rate": (1.0, 2.0)}),
  "what is bound": (
    functools.partial(own_schedule, 1.0, steps=3),
    functools.partial(own_schedule, 1.0, steps=4),
    {"v.args.steps": (3, 4)},
  ),
  "an array": (
    {"a": np.arange(3)},
    {"a": jnp.arange(3) + 1},
    {"v.a": ("int64 (3,) sha256 ", "int32 (3,) sha256 ")},
  ),
  "a network around another": (
    Twice(inner=network.Transformer(config=T5)),
    Twice(inner=network.Transformer(config=T5), factor=3.0),
    {"v.factor": (2.0, 3.0)},
  ),
  "an attribute": (Plain(1), Plain(2), {"v.size": (1, 2)}),
  "an enum": (
    LossNormalizingFactor.NUM_REAL_TARGET_TOKENS,
    None,
    {"v": ("anystep.train.losses.LossNormalizingFactor.NUM_REAL_TARGET_TOKENS", None)},
  ),
  "a number that is none": (float("nan"), float("inf"), {"v": ("nan", "inf")}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_that_changed_is_named_by_its_path_and_no_other(change):
  was, now, expected = CHANGES[change]
  was, now = of(was), of(now)
  different = {name: (was.get(name), now.get(name)) for name in was | now if was.get(name) != now.get(name)}
  assert different.keys() == expected.keys()
  for name, sides in expected.items():
    for found, wanted in zip(different[name], sides, strict=True):
      assert found == wanted or (isinstance(wanted, str) and found.startswith(wanted))
  # They are kept as JSON.
  assert json.loads(json.dumps(now, allow_nan=False)) == now


def test_equal_objects_made_twice_have_equal_values():
  def make():
    return {
      "network": network.Transformer(config=T5),
      "optimizer": optax.chain(optax.clip(1.0), optax.adamw(SCHEDULE())),
      "own": own_schedule(1.0),
      "twice": Twice(inner=Plain(3)),
      "odd": [object(), {1, 2}, b"x", jax.nn.gelu, jnp.bfloat16, lambda x: x],
    }

  assert built_values(make()) == built_values(make())


def test_a_user_s_own_function_is_known_by_its_source_and_a_library_s_is_not():
  one, two = (lambda x: x + 1), (lambda x: x + 2)
  assert of(one) != of(two)
  assert "source" in of(own_schedule(1.0))["v"]
  assert of(jax.nn.gelu) == {"v": "jax.gelu"}
  assert of(nn.initializers.ones) == {"v": "jax.ones"}


def test_what_holds_itself_ends():
  loop = Loop(size=3)
  loop.itself = [loop, {"again": loop}]
  assert of(loop)["v.itself[0]"] == "itself"


def test_a_configuration_has_equal_values_in_every_process(command):
  program = (
    "import sys, json; from anystep.train import main;"
    "print(json.dumps(main.configure(sys.argv).deciding_values))"
  )
  done = subprocess.run(
    [sys.executable, "-c", program, *command()[1:]],
    capture_output=True,
    text=True,
    env=ENVIRONMENT | {"PYTHONHASHSEED": "1", "JAX_PLATFORMS": os.environ["JAX_PLATFORMS"]},
    check=True,
  )
  values = main.configure(command()).deciding_values
  assert json.loads(done.stdout.splitlines()[-1]) == values
  assert values["model.module"] == "anystep.train.network.Transformer"
  assert values["model.module.config.dropout_rate"] == 0.1
  assert values["model.optimizer_def.learning_rate.warmup_steps"] == 1000
  assert values["random_seed"] == 0
  assert not [name for name in values if "vocabulary" in name]
