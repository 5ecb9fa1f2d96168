"""Each shipped family trains through its own gin file, and a run that was killed goes on as if it was not."""

import jax
import pytest
import tiny_tasks
from train_runs import train_until

from anystep.train import main
from anystep.train.demo.run_comparison import compare_runs

TOTAL_STEPS, PERIOD, KILLED_AT = 4, 2, 3
LENGTHS = {"inputs": 24, "targets": 12}
_T5 = {"emb_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 16}
_LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
EXAMPLES = {
  "lm_tiny": ("network.DecoderConfig", {**_T5, "num_layers": 1}),
  "prefix_lm_tiny": ("network.DecoderConfig", {**_T5, "num_layers": 1}),
  "stdlib_lm": ("network.LlamaConfig", {**_T5, "num_kv_heads": 1, "num_layers": 2}),
  "scalable_tiny": ("network.ScalableT5Config", {**_T5, **_LAYERS}),
  "own_module_tiny": ("own_module.MeanOfWords", {"emb_dim": 8}),
}
OWN_VALUES = {"stdlib_lm": {"WARMUP_STEPS": 1}}


@pytest.fixture
def promotion(example):
  """Optax's schedules and AdamW multiply integers by floats."""
  with jax.numpy_dtype_promotion("standard" if example == "stdlib_lm" else "strict"):
    yield


@pytest.mark.long
@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize(
  "example",
  [pytest.param(name, marks=[] if name == "own_module_tiny" else pytest.mark.long) for name in EXAMPLES],
)
@pytest.mark.parametrize("packing", ["none", pytest.param("greedy", marks=pytest.mark.soak)])
def test_a_killed_run_goes_on_as_the_undisturbed_one(example, packing, tiny_cache, tmp_path, monkeypatch):
  configured, sizes = EXAMPLES[example]

  def command(model_dir):
    values = {
      "MODEL_DIR": repr(str(tmp_path / model_dir)),
      "CACHE_DIR": repr(str(tiny_cache)),
      "MIXTURE_OR_TASK_NAME": repr(tiny_tasks.NAME),
      "MIXTURE_OR_TASK_MODULE": "'tiny_tasks'",
      "TASK_FEATURE_LENGTHS": repr(LENGTHS),
      "TRAIN_STEPS": TOTAL_STEPS,
      "CHECKPOINT_PERIOD": PERIOD,
      "BATCH_SIZE": 8,
      "DROPOUT_RATE": 0.1,
      "PACKING": repr(packing),
      **OWN_VALUES.get(example, {}),
      **{f"{configured}.{name}": value for name, value in sizes.items()},
    }
    bindings = [f"--gin.{name}={value}" for name, value in values.items()]
    return ["anystep-train", f"--gin_file=gin_configs/examples/{example}.gin", *bindings]

  main.main(command("undisturbed"))
  train_until(KILLED_AT, command("killed"), monkeypatch)
  main.main(command("killed"))
  comparison = compare_runs(tmp_path / "undisturbed", tmp_path / "killed")
  assert comparison.identical, comparison.verdict
  assert comparison.resumed_from == PERIOD
