"""What `pip install '.[all]'` gives, used from a folder with modules that could be mistaken for ours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_UV = Path(sys.executable).with_name("uv")
_TASKS = """
import functools
import seqio
import tensorflow as tf
from anystep.tasks import metrics, preprocessors

vocabulary = seqio.ByteVocabulary(extra_ids=125)


def texts(split, shuffle_files, seed=None):
  return tf.data.Dataset.from_tensor_slices({"targets": [f"{split} {i}" * 5 for i in range(40)]})


seqio.TaskRegistry.add(
  "mine",
  source=seqio.FunctionDataSource(texts, splits=["train", "validation"]),
  preprocessors=[
    functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
    seqio.CacheDatasetPlaceholder(),
    preprocessors.span_corruption,
    seqio.preprocessors.append_eos,
  ],
  output_features={name: seqio.Feature(vocabulary) for name in ("inputs", "targets")},
  metric_fns=[metrics.log_likelihood],
)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """An environment with the package and its extras alone, and a user's folder."""
  folder = tmp_path_factory.mktemp("installed")
  subprocess.run([_UV, "venv", "--quiet", "--python", sys.executable, folder / "environment"], check=True)
  # From a copy: building in the checkout would leave files there.
  source = folder / "source"
  shutil.copytree(
    _ROOT,
    source,
    ignore=shutil.ignore_patterns(".venv", ".git", "build", "demo_output", "*.egg-info", ".*_cache"),
  )
  subprocess.run(
    [
      _UV,
      "pip",
      "install",
      "--quiet",
      "--python",
      folder / "environment/bin/python",
      "--constraint",
      _ROOT / "requirements.lock",
      f"{source}[all]",
    ],
    check=True,
  )
  shutil.rmtree(source)
  user = folder / "user"
  user.mkdir()
  (user / "tasks.py").write_text(_TASKS)
  (user / "train.py").write_text("raise AssertionError('this is the user\\'s own train.py')\n")
  return folder / "environment" / "bin", user


def _run(installed, *command, status=0):
  programs, user = installed
  environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
  done = subprocess.run(
    [str(programs / command[0]), *command[1:]], cwd=user, env=environment, capture_output=True, text=True
  )
  assert done.returncode == status, done.stderr
  return done


@pytest.mark.long
def test_the_programs_work_beside_a_users_own_tasks_and_train_modules(installed):
  cached = _run(
    installed, "anystep-cache", "--tasks=mine", "--module_import=tasks", "--output_cache_dir=cache"
  )
  assert "mine: cached" in cached.stdout
  verified = _run(installed, "anystep-data", "verify", "--cache_dir=cache", "--task=mine")
  assert "mine train: 40 examples" in verified.stdout
  trained = _run(
    installed,
    "anystep-train",
    "--gin_file=gin_configs/examples/stdlib_tiny.gin",
    "--gin.MODEL_DIR='model'",
    "--gin.CACHE_DIR='cache'",
    "--gin.MIXTURE_OR_TASK_NAME='mine'",
    "--gin.MIXTURE_OR_TASK_MODULE='tasks'",
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 8}",
    "--gin.TRAIN_STEPS=2",
    "--gin.BATCH_SIZE=8",
    "--gin.network.T5Config.emb_dim=8",
    "--gin.network.T5Config.num_heads=2",
    "--gin.network.T5Config.head_dim=4",
    "--gin.network.T5Config.mlp_dim=16",
    "--gin.network.T5Config.num_encoder_layers=1",
    "--gin.network.T5Config.num_decoder_layers=1",
  )
  assert "mine, validation, teacher-forced, after 2 steps" in trained.stdout


def test_modules_run_as_programs_too(installed):
  for module in ("anystep.cache_job", "anystep.train", "anystep.train.convert"):
    assert "--" in _run(installed, "python", "-m", module, "--help").stdout


def test_everything_is_one_package(installed):
  listing = (
    "import anystep, anystep.tasks, anystep.cache_job, anystep.train, anystep.gin_configs, pathlib;"
    "root = pathlib.Path(anystep.__file__).parent;"
    "print(*sorted(p.relative_to(root).as_posix() for p in root.rglob('*') if p.suffix != '.pyc'), sep='\\n')"
  )
  files = _run(installed, "python", "-c", listing).stdout.splitlines()
  shipped = [path.relative_to(_ROOT).as_posix() for path in (_ROOT / "gin_configs").rglob("*.gin")]
  assert set(shipped) <= set(files)
  assert {"py.typed", "tasks/catalogue/stdlib.py", "cache_job/main.py", "train/main.py"} <= set(files)
  assert not any(name.startswith("tests") for name in files)
