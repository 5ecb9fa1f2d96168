"""A cache of the tiny task, the shipped example's command line, shrunk to it, and runs of it."""

import os
import shutil

import jax
import pytest
import tiny_tasks
from train_runs import CHECKPOINT_PERIOD, TOTAL_STEPS, train_until

from anystep.cache_job.job import CacheOptions, cache_tasks


@pytest.fixture
def optimized():
  """XLA's optimizations, as T5X ran with: an update by a gradient's sign turns with the last bit of a sum."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "true")


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory):
  """The tiny task's cache; tests that change it copy it first."""
  cache_dir = tmp_path_factory.mktemp("tiny") / "cache"
  cache_tasks(
    [tiny_tasks.NAME, tiny_tasks.OTHER_NAME],
    CacheOptions(cache_dir=str(cache_dir), num_shards=4, block_records=8),
  )
  return cache_dir


@pytest.fixture
def own_cache(tiny_cache, tmp_path):
  """A copy of the tiny task's cache, to be tampered with."""
  return shutil.copytree(tiny_cache, tmp_path / "own_cache")


@pytest.fixture
def command(tiny_cache, tmp_path):
  """`command(model_dir="m", **bindings)`: arguments of `anystep-train` for the example's gin file, shrunk."""

  def make(model_dir="model", cache_dir=None, **bindings):
    values = {
      "MODEL_DIR": repr(str(tmp_path / model_dir)),
      "CACHE_DIR": repr(str(cache_dir or tiny_cache)),
      "MIXTURE_OR_TASK_NAME": repr(tiny_tasks.NAME),
      "MIXTURE_OR_TASK_MODULE": "'tiny_tasks'",
      "TASK_FEATURE_LENGTHS": "{'inputs': 24, 'targets': 12}",
      "TRAIN_STEPS": TOTAL_STEPS,
      "CHECKPOINT_PERIOD": CHECKPOINT_PERIOD,
      "STATS_PERIOD": 1,
      "BATCH_SIZE": 8,
      "EVAL_DATASET": None,
      "network.T5Config.emb_dim": 8,
      "network.T5Config.num_heads": 2,
      "network.T5Config.head_dim": 4,
      "network.T5Config.mlp_dim": 16,
      "network.T5Config.num_encoder_layers": 1,
      "network.T5Config.num_decoder_layers": 1,
      **bindings,
    }
    return [
      "anystep-train",
      "--gin_file=gin_configs/examples/stdlib_tiny.gin",
      *(f"--gin.{name}={value}" for name, value in values.items()),
    ]

  return make


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory):
  """Where runs go that several tests begin with; the first test that needs one trains it."""
  return tmp_path_factory.mktemp("runs")


@pytest.fixture
def reference(shared_runs, command):
  """The directory of a run that nothing disturbs; not to be changed."""
  from anystep.train import main

  if not (shared_runs / "undisturbed").exists():
    main.main(command(MODEL_DIR=repr(str(shared_runs / "undisturbed"))))
  return shared_runs / "undisturbed"


@pytest.fixture
def trained(reference, tmp_path):
  """A copy of that directory, in `model`."""
  return shutil.copytree(reference, tmp_path / "model")


@pytest.fixture
def stopped(shared_runs, command, tmp_path, monkeypatch):
  """The directory of a run that was killed right after its first checkpoint, in `model`."""
  if not (shared_runs / "stopped").exists():
    directory = repr(str(shared_runs / "stopped"))
    train_until(CHECKPOINT_PERIOD, command(MODEL_DIR=directory), monkeypatch)
  return shutil.copytree(shared_runs / "stopped", tmp_path / "model")
