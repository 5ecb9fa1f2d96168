"""Runs with an optimizer of several parts, an average and microbatches resume, and evaluate the average."""

import jax
import numpy as np
import pytest
from train_runs import CHECKPOINT_PERIOD, TOTAL_STEPS, train_until

from anystep.errors import AnystepError
from anystep.train import main
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.reports.evaluation import Evaluation, Evaluator
from anystep.train.reports.step_log import read_step_log

ADAMW = "--gin_file=gin_configs/optimizers/adamw.gin"
TWO_OF_T5X = """
from __gin__ import dynamic_registration
from anystep.train import models
from anystep.train import trainer

trainer.Trainer.microbatches = @models.T5XMicrobatches()
NUM_MICROBATCHES = 2
"""


def losses(model_dir):
  return [step.loss for start in read_step_log(model_dir) for step in start]


@pytest.fixture
def averaged(command, monkeypatch):
  """`averaged(model_dir)`: the command line of a run whose average is evaluated, which it records."""
  evaluated = []

  def evaluate(evaluator, state, is_interrupted):
    evaluated.append(jax.device_get((state.params, state.opt_state.average)))
    return [Evaluation("demo", "validation", {"examples": 1}, {})]

  monkeypatch.setattr(Evaluator, "evaluate", evaluate)

  def make(model_dir, **bindings):
    values = {"EVAL_DATASET": "@eval/datasets.DatasetConfig()", "NUM_MICROBATCHES": 2, **bindings}
    arguments = command(model_dir, **values)
    return [arguments[0], arguments[1], ADAMW, *arguments[2:]], evaluated

  return make


# optax's Adam relies on promotion.
@jax.numpy_dtype_promotion("standard")
@pytest.mark.long
def test_a_run_with_an_average_and_microbatches_resumes_exactly_and_evaluates_the_average(
  averaged, tmp_path, monkeypatch
):
  arguments, evaluated = averaged("whole", **{"optimizers.with_average.decay": 0.5})
  main.main(arguments)
  arguments, _ = averaged("killed", **{"optimizers.with_average.decay": 0.5})
  train_until(CHECKPOINT_PERIOD + 1, arguments, monkeypatch)
  main.main(arguments)
  assert compare_runs(tmp_path / "whole", tmp_path / "killed").identical
  for params, average in evaluated:
    jax.tree.map(np.testing.assert_array_equal, params, average)
  jax.tree.map(np.testing.assert_array_equal, *evaluated)


@pytest.mark.long
def test_losses_do_not_depend_on_the_number_of_microbatches_and_it_may_change(
  command, reference, trained, tmp_path, capfd
):
  main.main(command("split", NUM_MICROBATCHES=4))
  np.testing.assert_allclose(losses(tmp_path / "split"), losses(reference), rtol=1e-4)
  # The number is no value that a run must keep; T5X's way is.
  main.main(command(TRAIN_STEPS=TOTAL_STEPS + 1, NUM_MICROBATCHES=2))
  assert f"resumed from checkpoint_{TOTAL_STEPS}" in capfd.readouterr().out
  (tmp_path / "t5x.gin").write_text(TWO_OF_T5X)
  with pytest.raises(AnystepError) as refused:
    main.main([*command(TRAIN_STEPS=TOTAL_STEPS + 2), f"--gin_file={tmp_path / 't5x.gin'}"])
  assert refused.value.kind == "resume_contract"
  assert "microbatches.num_microbatches" in refused.value.fields["got"]


def test_what_cannot_be_trained_is_refused_before_the_first_step(command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(NUM_MICROBATCHES=3))
  assert refused.value.kind == "num_microbatches"
  with pytest.raises(AnystepError) as refused:
    main.main(command(EVALUATE_AVERAGE=True, EVAL_DATASET="@eval/datasets.DatasetConfig()"))
  assert refused.value.kind == "parameter_average"
