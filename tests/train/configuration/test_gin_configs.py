"""Every shipped gin file, as it configures a run, beside golden files."""

from pathlib import Path

import jax
import pytest

from anystep.train.configuration import configuration
from anystep.train.configuration.gin_files import GinFiles
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.runs.trainer import Trainer

_ROOT = Path(__file__).parents[3] / "gin_configs"
_EXAMPLES = sorted(path.relative_to(_ROOT.parent).as_posix() for path in (_ROOT / "examples").glob("*.gin"))


def _parameter_table(model: EncoderDecoderModel) -> str:
  params = jax.eval_shape(lambda: model.initial_variables(jax.random.key(0))["params"])
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  lines = [f"{jax.tree_util.keystr(path, simple=True, separator='/')} {leaf.shape}" for path, leaf in leaves]
  return "\n".join([*lines, f"total {sum(leaf.size for _, leaf in leaves):,}", ""])


@pytest.mark.parametrize("gin_file", _EXAMPLES)
def test_an_example_configures_what_its_golden_file_says(gin_file, golden):
  configuration.load_configuration(GinFiles.read([gin_file], {"MODEL_DIR": "'model'"}))
  trainer = configuration.build(Trainer)
  text = configuration.configuration_text()
  golden(f"{Path(gin_file).stem}.txt", f"{text}\n{_parameter_table(trainer.model)}")


@pytest.mark.parametrize("path", sorted(_ROOT.rglob("*.gin")), ids=lambda path: path.name)
def test_a_gin_file_opens_with_what_it_is(path):
  assert path.read_text().startswith("# ")


def test_the_example_trains_a_model_of_one_to_two_million_parameters():
  configuration.load_configuration(
    GinFiles.read(["gin_configs/examples/stdlib_tiny.gin"], {"MODEL_DIR": "'model'"})
  )
  table = _parameter_table(configuration.build(Trainer).model)
  total = int(table.rstrip().rpartition(" ")[2].replace(",", ""))
  assert 1_000_000 <= total <= 2_000_000
