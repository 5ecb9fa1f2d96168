"""Optimizers as gin files write them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anystep.errors import AnystepError
from anystep.train.configuration import configuration
from anystep.train.configuration.built_values import built_values
from anystep.train.configuration.gin_files import GinFiles
from anystep.train.optimizers.parameter_average import averaged_parameters
from anystep.train.runs.trainer import Trainer

FOLDER = Path(__file__).parents[3] / "gin_configs" / "optimizers"
BASE = "gin_configs/examples/arithmetic_tiny.gin"
PARAMS = {
  "token_embedder": {"embedding": jnp.full((6, 4), 0.5)},
  "decoder": {"norm": {"scale": jnp.full((4,), 2.0)}, "wi": {"kernel": jnp.full((4, 4), 2.0)}},
}


def built(*gin_files, **bindings):
  files = GinFiles.read([BASE, *gin_files], {"MODEL_DIR": "'model'", **bindings})
  configuration.load_configuration(files)
  return configuration.build(Trainer).model.optimizer_def


def trained(optimizer, *, steps=2):
  """Parameters after steps without gradients, and with them."""
  results = []
  for gradient in (0.0, 1.0):
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
      gradients = optax.tree.full_like(params, gradient)
      updates, state = jax.jit(optimizer.update)(gradients, state, params)
      params = optax.apply_updates(params, updates)
    results.append(params)
  return *results, state


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.gin")), ids=lambda path: path.stem)
def test_every_file_builds_an_optimizer_whose_values_a_run_can_compare(path):
  values = [built_values({"o": built(f"gin_configs/optimizers/{path.name}")}) for _ in range(2)]
  assert values[0] == values[1]
  assert not any(isinstance(value, str) and " at 0x" in value for value in values[0].values())


@jax.numpy_dtype_promotion("standard")
def test_adamw_decays_kernels_alone_and_keeps_an_average():
  optimizer = built("gin_configs/optimizers/adamw.gin", **{"optimizers.with_average.decay": "0.5"})
  without, with_gradients, state = trained(optimizer)
  np.testing.assert_array_equal(without["decoder"]["norm"]["scale"], 2.0)
  assert np.all(without["decoder"]["wi"]["kernel"] < 2.0)
  assert np.all(with_gradients["decoder"]["norm"]["scale"] < 2.0)
  average = averaged_parameters(state, PARAMS)["decoder"]["norm"]["scale"]
  assert np.all((average < 2.0) & (average > with_gradients["decoder"]["norm"]["scale"]))


def test_finetuning_freezes_the_embedding():
  _, params, _ = trained(built("gin_configs/optimizers/adafactor_finetuning.gin"), steps=1)
  np.testing.assert_array_equal(params["token_embedder"]["embedding"], 0.5)
  np.testing.assert_allclose(params["decoder"]["wi"]["kernel"], 2.0 - 0.001 * 2.0, rtol=1e-6)


def test_arguments_of_adafactor_are_written_as_t5xs(tmp_path):
  path = tmp_path / "rules.gin"
  path.write_text(
    "# Arguments.\nfrom __gin__ import dynamic_registration\n"
    "from anystep.train import optimizers\n"
    "optimizers.adafactor:\n"
    "  beta1 = 0.9\n"
    "  multiply_by_parameter_scale = [('norm/scale$', False), ('.*', True)]\n"
    "  factor_map = [('embedding', ('column', 'row')), ('.*', None)]\n"
    "  logical_factor_rules = {'embed': 'row', 'mlp': 'column'}\n"
  )
  values = built_values({"o": built(str(path))})
  assert values["o.beta1"] == 0.9
  assert values["o.logical_factor_rules.mlp"] == "column"
  _, params, _ = trained(built(str(path)), steps=1)
  assert params["decoder"]["norm"]["scale"].shape == (4,)


@pytest.mark.parametrize("way", ["WholeBatchGradients", "T5XMicrobatches"])
def test_the_number_of_microbatches_is_that_of_either_way(way):
  bindings = {
    "MODEL_DIR": "'model'",
    "NUM_MICROBATCHES": "2",
    "trainer.Trainer.microbatches": f"@models.{way}()",
  }
  configuration.load_configuration(GinFiles.read([BASE], bindings))
  microbatches = configuration.build(Trainer).microbatches
  assert (type(microbatches).__name__, microbatches.num_microbatches) == (way, 2)


@pytest.mark.parametrize(
  ("binding", "value", "kind"),
  [
    ("optimizers.adafactor.beta1", "2.0", "optimizer"),
    ("optimizers.adafactor.decay_rate", "'0.8'", "optimizer"),
    ("optimizers.adafactor.factored", "'no'", "optimizer"),
    ("optimizers.adafactor.step_offset", "None", "optimizer"),
    ("NUM_MICROBATCHES", "3", "num_microbatches"),
    ("EVALUATE_AVERAGE", "'yes'", "gin_value"),
    ("MODEL", "None", "gin_value"),
    ("optimizers.adafactor.factor_map", "[('(', None)]", "parameter_pattern"),
    ("learning_rates.learning_rate_schedule.factors", "'constant * rsqrt_decy'", "learning_rate"),
    ("optimizers.adafactor.betta1", "0.9", "gin_binding"),
  ],
)
def test_a_bad_argument_is_an_error_of_the_table(binding, value, kind):
  with pytest.raises(AnystepError) as refused:
    built(**{binding: value})
  assert refused.value.kind == kind
