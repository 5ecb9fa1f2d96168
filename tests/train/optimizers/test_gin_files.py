"""Optimizers as gin files write them."""

import re
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

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "gin_configs" / "optimizers"
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
    ("optimizers.adafactor.learning_rate", "-0.1", "optimizer"),
    ("optimizers.adafactor.learning_rate", "True", "optimizer"),
    ("optimizers.adafactor.decay_rate", "None", "optimizer"),
    ("optimizers.adafactor.epsilon1", "None", "optimizer"),
    ("optimizers.adafactor.min_dim_size_to_factor", "None", "optimizer"),
    ("optimizers.adafactor.beta1", "1.0", "optimizer"),
    ("optimizers.adafactor.clipping_threshold", "0.0", "optimizer"),
    ("optimizers.adafactor.weight_decay_rate_lr_exponent", "'1'", "optimizer"),
    ("optimizers.adafactor.multiply_by_parameter_scale", "[('norm', 'no'), ('', True)]", "optimizer"),
    ("optimizers.adafactor.logical_factor_rules", "['embed']", "optimizer"),
    ("learning_rates.learning_rate_schedule.base_learning_rate", "-1.0", "learning_rate"),
    ("learning_rates.learning_rate_schedule.decay_factor", "-0.5", "learning_rate"),
    ("network.T5Config.dtype", "'float16'", "gin_value"),
    ("network.T5Config.mlp_activations", "('glu', 'linear')", "gin_value"),
    ("network.T5Config.mlp_activations", "('vmap',)", "gin_value"),
    ("NUM_MICROBATCHES", "3", "num_microbatches"),
    ("EVALUATE_AVERAGE", "'yes'", "gin_value"),
    ("MODEL", "None", "gin_value"),
    ("MODEL", "@models.EncoderDecoderModel", "gin_value"),
    ("OPTIMIZER", "%OPTMZR", "gin_unknown_macro"),
    ("OPTIMIZER", "%NOTHING_SETS_IT", "gin_required"),
    ("OPTIMIZER", "@optax.sgd()", "gin_binding"),
    ("optimizers.adafactor.factor_map", "[('(', None)]", "parameter_pattern"),
    ("learning_rates.learning_rate_schedule.factors", "'constant * rsqrt_decy'", "learning_rate"),
    ("optimizers.adafactor.betta1", "0.9", "gin_binding"),
  ],
)
def test_a_bad_argument_is_an_error_of_the_table(binding, value, kind):
  with pytest.raises(AnystepError) as refused:
    built(**{binding: value})
  assert refused.value.kind == kind


def test_what_no_file_imports_is_written_in_a_file():
  with pytest.raises(AnystepError) as refused:
    built(OPTIMIZER="@optax.sgd()")
  assert refused.value.fix == "write it in a gin file that imports the module of what the value names"


def test_a_class_that_is_not_called_is_no_model():
  with pytest.raises(AnystepError, match=r"@models\.EncoderDecoderModel\(\) with parentheses"):
    built(MODEL="@models.EncoderDecoderModel")


def gin_blocks():
  """The gin files in the documents of models and optimizers."""
  for name in ("models.md", "optimizers.md"):
    blocks = re.findall(r"^```gin\n(.*?)^```", (ROOT / "docs" / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
      yield pytest.param(block, id=f"{name} {number}")


@pytest.mark.parametrize("block", list(gin_blocks()))
def test_what_documents_write_builds(block, tmp_path, monkeypatch):
  (tmp_path / "block.gin").write_text(block)
  # Gin would go on to name a class of anystep by this module, were it imported here.
  (tmp_path / "my_networks.py").write_text(
    "from flax import linen as nn\n\n\nclass MeanOfWords(nn.Module):\n  vocab_size: int\n\n"
    "  @nn.compact\n  def __call__(self, decoder_input_tokens):\n"
    "    return nn.Embed(9, self.vocab_size)(decoder_input_tokens)\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  assert built(str(tmp_path / "block.gin"), BATCH_SIZE="8").init


def test_a_mistake_in_a_module_of_ones_own_is_told_with_its_place(tmp_path, monkeypatch):
  (tmp_path / "wrong_network.py").write_text(
    "from flax import linen as nn\n\n\nclass Wrong(nn.Module):\n"
    "  def __call__(self, decoder_input_tokens):\n    return decoder_input_tokens @ self.nothing\n"
  )
  (tmp_path / "own.gin").write_text(
    "from __gin__ import dynamic_registration\nfrom anystep.train import models\nimport wrong_network\n"
    "MODEL = @models.FlaxModel()\nmodels.FlaxModel:\n  module = @wrong_network.Wrong()\n"
    "  optimizer_def = %OPTIMIZER\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(AnystepError) as refused:
    built(str(tmp_path / "own.gin"))
  assert refused.value.kind == "gin_value"
  assert refused.value.fields["at"] == f"{tmp_path / 'wrong_network.py'}:6"
