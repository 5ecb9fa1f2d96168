"""The loop: evaluations between steps, reports, and the record of each start."""

import json
import os
import signal

import jax
import numpy as np
import pytest
import tiny_tasks
from train_runs import CHECKPOINT_PERIOD, TOTAL_STEPS, train_until

from anystep.errors import AnystepError
from anystep.train import main
from anystep.train.checkpoints.checkpoints import checkpoint_steps
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.models.train_state import norms_by_module
from anystep.train.reports.evaluation import Evaluator
from anystep.train.reports.metric_writers import read_metrics

EVALUATED = {"EVAL_DATASET": "@eval/datasets.DatasetConfig()"}


def written(model_dir, group):
  return {record["step"]: record["values"] for record in read_metrics(model_dir) if record["group"] == group}


def test_every_task_of_a_mixture_and_the_mixture_are_evaluated_between_steps_and_at_the_end(
  reference, command, tmp_path
):
  evaluated = command(
    **EVALUATED,
    **{
      "eval/datasets.DatasetConfig.mixture_or_task_name": repr(tiny_tasks.MIXTURE),
      "EVAL_PERIOD": 3,
      "STATS_PERIOD": 2,
    },
  )
  results = main.prepare(evaluated).run()
  tasks = [tiny_tasks.NAME, tiny_tasks.OTHER_NAME]
  by_name = {
    name: written(tmp_path / "model", f"eval_validation/{name}") for name in [*tasks, tiny_tasks.MIXTURE]
  }
  assert all(sorted(by_step) == [3, 6, TOTAL_STEPS] for by_step in by_name.values())
  assert results[f"{tiny_tasks.NAME}/examples"] == 21
  of_mixture = by_name[tiny_tasks.MIXTURE][TOTAL_STEPS]
  assert of_mixture["examples"] == sum(by_name[name][TOTAL_STEPS]["examples"] for name in tasks)
  entropies = [by_name[name][TOTAL_STEPS]["cross_entropy"] for name in tasks]
  assert min(entropies) < of_mixture["cross_entropy"] < max(entropies)
  # To look at the state changes nothing of the run.
  assert compare_runs(reference, tmp_path / "model").identical
  # Metrics of training are written at multiples of their period.
  train = written(tmp_path / "model", "train")
  assert sorted(train) == [2, 4, 6]
  assert train[4]["timing/steps_per_second"] > 0
  # Evaluations of the first step's parameters and the last's differ.
  assert by_name[tiny_tasks.NAME][3]["cross_entropy"] != by_name[tiny_tasks.NAME][6]["cross_entropy"]


def test_an_evaluation_of_some_batches_sees_their_examples_alone(command):
  results = main.prepare(command(**EVALUATED, EVAL_BATCHES=2)).run()
  assert results["examples"] == 16


def test_sigterm_within_an_evaluation_between_steps_saves_the_step(reference, command, tmp_path, monkeypatch):
  arguments = command(**EVALUATED, EVAL_PERIOD=2)

  def interrupted(evaluator, state, *, is_interrupted, original=Evaluator.evaluate):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(evaluator, state, is_interrupted=is_interrupted)

  with monkeypatch.context() as patch:
    patch.setattr(Evaluator, "evaluate", interrupted)
    with pytest.raises(AnystepError, match="kind=preempted"):
      main.main(arguments)
  assert checkpoint_steps(tmp_path / "model") == [2]
  assert written(tmp_path / "model", f"eval_validation/{tiny_tasks.NAME}") == {}
  main.main(arguments)
  assert compare_runs(reference, tmp_path / "model").identical


def test_each_start_is_recorded_with_how_it_ended(command, tmp_path, monkeypatch):
  train_until(CHECKPOINT_PERIOD + 1, command(), monkeypatch)
  main.main(command())
  first, second = (json.loads((tmp_path / "model" / "runs" / f"000{k}.json").read_text()) for k in range(2))
  assert (first["start_step"], first["last_step"], first["error"]) == (0, CHECKPOINT_PERIOD + 1, "Killed")
  assert (second["start_step"], second["last_step"]) == (CHECKPOINT_PERIOD, TOTAL_STEPS)
  assert (second["exit_code"], second["error"]) == (0, None)
  assert first["start"] <= first["end"] <= second["start"] <= second["end"]
  assert second["packages"]["jax"] == jax.__version__


def test_a_profile_of_some_steps_is_written(command, tmp_path):
  arguments = command(
    **{
      "PROFILE": "@reports.Profile()",
      "reports.Profile.first_step": 2,
      "reports.Profile.num_steps": 2,
    }
  )
  main.main(arguments)
  assert list((tmp_path / "model" / "profile").rglob("*.xplane.pb"))


def test_norms_are_of_all_leaves_and_of_modules_by_their_names():
  tree = {
    "decoder": {"a": {"kernel": np.full((2, 2), 2.0)}, "b": {"scale": np.full(9, 1.0)}},
    "c": np.ones(3),
  }
  whole = np.sqrt(16 + 9 + 3)
  assert norms_by_module("norm", tree, 0) == {"norm": pytest.approx(whole)}
  assert norms_by_module("norm", tree, 1) == {"norm": pytest.approx(whole), "norm/decoder": pytest.approx(5)}
  assert norms_by_module("norm", tree, 2) == {
    "norm": pytest.approx(whole),
    "norm/decoder/a": pytest.approx(4),
    "norm/decoder/b": pytest.approx(3),
  }


@pytest.mark.parametrize(
  "binding",
  [
    {"STATS_PERIOD": 0},
    {"EVAL_PERIOD": 0},
    {"EVAL_BATCHES": "'2'"},
    {"trainer.Trainer.norms_depth": -1},
    {"trainer.Trainer.metric_writers": "'tensorboard'"},
    {"trainer.Trainer.metric_writers": "['tensorboard']"},
  ],
)
def test_values_of_the_loop_that_cannot_be_are_refused(command, binding):
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**binding))
  assert (refused.value.code, refused.value.kind) == (78, "gin_value")
