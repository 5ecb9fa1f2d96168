"""Fine-tuning from a checkpoint at step 1,000,000: the model counts on from there, its data from 0."""

import json
import shutil

import jax
import numpy as np
import pytest
from train_runs import TOTAL_STEPS, train_until

from anystep.errors import AnystepError
from anystep.tasks.data_program import main as data_program
from anystep.train import main
from anystep.train.checkpoints.checkpoints import checkpoint_steps, find_checkpoint
from anystep.train.conversion import formats
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.leaves.leaf import array_leaf
from anystep.train.reports.step_log import read_step_log

FIRST = 1_000_000


@pytest.fixture
def pretrained(reference, shared_runs):
  """A checkpoint of T5X's at step 1,000,000, of the tiny model."""
  path = shared_runs / "pretrained" / f"checkpoint_{FIRST}"
  if not path.exists():
    leaves = dict(formats.open_checkpoint(str(reference)).leaves)
    leaves["state/step"] = array_leaf(np.array(FIRST, np.int32))
    formats.plan_writing("t5x", leaves, source="a test")(str(path), lambda _: None)
  return path.parent


@pytest.fixture
def fine_tuning(command, pretrained):
  """`fine_tuning(**bindings)`: the command line of a run that starts with it."""

  def make(**bindings):
    restore = {
      "RESTORE": "@checkpoints.RestoreConfig()",
      "RESTORE_PATH": repr(str(pretrained)),
    }
    return command(**(restore | {"TRAIN_STEPS": FIRST + TOTAL_STEPS} | bindings))

  return make


@pytest.fixture
def fine_tuned(shared_runs, fine_tuning):
  """The directory of such a run that nothing disturbs; not to be changed."""
  directory = shared_runs / "fine_tuned"
  if not directory.exists():
    main.main(fine_tuning(MODEL_DIR=repr(str(directory))))
  return directory


def test_the_models_steps_go_on_and_the_data_begins_anew(reference, fine_tuned):
  (records,) = read_step_log(fine_tuned)
  (from_scratch,) = read_step_log(reference)
  assert [record.step for record in records] == list(range(FIRST, FIRST + TOTAL_STEPS))
  assert [record.data_step for record in records] == list(range(TOTAL_STEPS))
  assert [record.digest for record in records] == [record.digest for record in from_scratch]
  assert checkpoint_steps(fine_tuned) == [FIRST + 2, FIRST + 5, FIRST + 7]
  checkpoint = find_checkpoint(fine_tuned)
  assert (checkpoint.step, checkpoint.first_step) == (FIRST + 7, FIRST)
  assert checkpoint.data == find_checkpoint(reference).data
  assert json.loads((fine_tuned / "run.json").read_text())["first_step"] == FIRST
  # Adafactor's count was the step's: no leaf of its own is left.
  assert "state/opt_state/count" not in formats.open_checkpoint(str(fine_tuned)).leaves


@pytest.mark.parametrize("data_step", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_run_resumes_its_own_checkpoint(
  data_step, fine_tuned, fine_tuning, tmp_path, monkeypatch, capsys
):
  train_until(data_step, fine_tuning(), monkeypatch)
  # A run that has a checkpoint of its own needs the other no more.
  arguments = fine_tuning(RESTORE_PATH="'nowhere'") if data_step == 5 else fine_tuning()
  capsys.readouterr()
  main.main(arguments)
  comparison = compare_runs(fine_tuned, tmp_path / "model")
  assert comparison.identical, comparison.verdict
  resumed = (
    "resumed from checkpoint_1000005, data step 5"
    if data_step == 5
    else "training from step 1000000, data step 0"
  )
  assert resumed in capsys.readouterr().out


def ask(capsys, *arguments):
  capsys.readouterr()
  data_program.main([*arguments, "--format=jsonl"])
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_what_was_at_answers_by_both_counts(reference, fine_tuned, capsys):
  by_data = ask(capsys, "what-was-at", f"--model_dir={fine_tuned}", "--steps=2:4")
  by_model = ask(capsys, "what-was-at", f"--model_dir={fine_tuned}", f"--model_steps={FIRST + 2}:{FIRST + 4}")
  assert by_data == by_model
  assert {(row["step"], row["model_step"]) for row in by_data} == {(2, FIRST + 2), (3, FIRST + 3)}
  from_scratch = ask(capsys, "what-was-at", f"--model_dir={reference}", "--steps=2:4")
  assert from_scratch == [{key: row[key] for key in row if key != "model_step"} for row in by_data]
  data_program.main(["what-was-at", f"--model_dir={fine_tuned}", "--steps=2:3", "--row=0"])
  assert capsys.readouterr().out.startswith(f"step 2 (model step {FIRST + 2}) row 0: ")
  (plan,) = (
    line for line in ask(capsys, "plan", "show", f"--model_dir={fine_tuned}") if line["kind"] == "plan"
  )
  assert (plan["trained_steps"], plan["first_model_step"]) == (TOTAL_STEPS, FIRST)


@pytest.mark.parametrize(
  ("flags", "text"),
  [
    (["--plan={model_dir}/data_plan.json", "--model_steps=5:6"], "--model_steps without --model_dir"),
    (["--model_dir={model_dir}", "--model_steps=5:6"], "of a run that began at step 1000000"),
  ],
)
def test_steps_of_a_model_need_a_run_that_had_them(flags, text, fine_tuned, tiny_cache):
  with pytest.raises(AnystepError, match=text):
    data_program.main(
      ["what-was-at", *(flag.format(model_dir=fine_tuned) for flag in flags), f"--cache_dir={tiny_cache}"]
    )


def test_a_damaged_first_step_is_refused(fine_tuned, tmp_path):
  shutil.copytree(fine_tuned, tmp_path / "run")
  (tmp_path / "run" / "run.json").write_text('{"first_step": -1}')
  with pytest.raises(AnystepError) as refused:
    data_program.main(["plan", "show", f"--model_dir={tmp_path / 'run'}"])
  assert (refused.value.code, refused.value.kind) == (65, "run_invalid")


def test_steps_count_from_the_checkpoints(fine_tuning):
  with pytest.raises(AnystepError) as refused:
    main.prepare(fine_tuning(TRAIN_STEPS=FIRST - 1))
  assert (refused.value.code, refused.value.kind) == (78, "total_steps")
  with pytest.raises(AnystepError, match=f"steps after step {FIRST} in 1 epochs") as refused:
    main.prepare(fine_tuning(**{"datasets.DatasetConfig.num_epochs": 1, "TRAIN_STEPS": FIRST + 10**6}))
  assert (refused.value.code, refused.value.kind) == (78, "data_ended")


def test_parameters_in_another_dtype_stay_so(fine_tuning, tmp_path):
  narrow = fine_tuning(**{"checkpoints.RestoreConfig.dtype": "'bfloat16'", "TRAIN_STEPS": FIRST + 2})
  # A sum of such a parameter and its float32 update is rounded once.
  with jax.numpy_dtype_promotion("standard"):
    main.main(narrow)
  leaves = formats.open_checkpoint(str(tmp_path / "model")).leaves
  assert {leaf.dtype.name for name, leaf in leaves.items() if name.startswith("target/")} == {"bfloat16"}
  assert leaves["state/param_states/token_embedder/embedding/v"].dtype == np.float32
  with pytest.raises(AnystepError, match="parameter_dtype"):
    main.main(fine_tuning(TRAIN_STEPS=FIRST + 3))


def test_a_converted_checkpoint_is_no_runs_own(fine_tuning, command, pretrained, tmp_path):
  leaves = formats.open_checkpoint(str(pretrained)).leaves
  converted = tmp_path / "model" / f"checkpoint_{FIRST}"
  formats.plan_writing("anystep", leaves, source="a test")(str(converted), lambda _: None)
  with pytest.raises(AnystepError) as refused:
    main.prepare(command())
  assert (refused.value.code, refused.value.kind) == (76, "checkpoint_converted")
  prepared = main.prepare(
    fine_tuning(MODEL_DIR=repr(str(tmp_path / "other")), RESTORE_PATH=repr(str(converted)))
  )
  assert prepared.describe_start().startswith(f"step {FIRST}, data step 0, of {converted} (anystep)")


def test_a_loss_that_is_not_finite_is_named_by_both_steps(tmp_path):
  from anystep.train.reports.metric_writers import MetricWriters
  from anystep.train.reports.step_reporter import StepReporter

  metrics = {"loss": np.nan, "z_loss": 0.0, "correct": 1.0, "weight_sum": 1.0, "gradient_norm": 1.0}
  reporter = StepReporter(
    tmp_path, MetricWriters((), tmp_path), start_step=FIRST, total_steps=FIRST + 2, first_step=FIRST
  )
  reporter.report_before(FIRST + 1, {}, metrics)
  with pytest.raises(AnystepError, match=f"model_step={FIRST + 1} data_step=1"):
    reporter.flush()
