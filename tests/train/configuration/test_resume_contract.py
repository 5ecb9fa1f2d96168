"""A run resumes as what it began as: what decides its parameters changes only where that is accepted."""

import json
import shutil

import pytest
from train_runs import CHECKPOINT_PERIOD, as_version_1, sign, train_until

from anystep.errors import AnystepError
from anystep.train import main
from anystep.train.checkpoints.checkpoints import find_checkpoint
from anystep.train.configuration.resume_contract import (
  AcceptedChanges,
  Change,
  find_value_changes,
  record_accepted,
)
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.runs.trainer import PreparedRun

CONFIG, LOSSES = "model.module.config", "anystep.train.losses"


def refusal(arguments):
  with pytest.raises(AnystepError) as refused:
    main.main(arguments)
  return refused.value


def accepted_in(model_dir):
  paths = sorted((model_dir / "accepted_changes").iterdir())
  return {path.name: json.loads(path.read_text()) for path in paths}


@pytest.mark.parametrize(
  ("bindings", "difference"),
  [
    ({"DROPOUT_RATE": 0.5}, f"{CONFIG}.dropout_rate: 0.1 → 0.5"),
    ({"network.T5Config.mlp_dim": 32}, f"{CONFIG}.mlp_dim: 16 → 32"),
    ({"network.T5Config.dtype": "'bfloat16'"}, f'{CONFIG}.dtype: "float32" → "bfloat16"'),
    ({"models.EncoderDecoderModel.z_loss": 0}, "model.z_loss: 0.0001 → 0"),
    (
      {"models.EncoderDecoderModel.loss_normalizing_factor": "'NUM_REAL_TARGET_TOKENS'"},
      f'model.loss_normalizing_factor: null → "{LOSSES}.LossNormalizingFactor.NUM_REAL_TARGET_TOKENS"',
    ),
    ({"optimizers.adafactor.decay_rate": 0.9}, "model.optimizer_def.decay_rate: 0.8 → 0.9"),
    (
      {"learning_rates.learning_rate_schedule.warmup_steps": 99},
      "model.optimizer_def.learning_rate.warmup_steps: 1000 → 99",
    ),
    ({"trainer.Trainer.random_seed": 5}, "random_seed: 0 → 5"),
  ],
)
def test_what_decides_parameters_is_refused_before_devices_are_touched(
  bindings, difference, stopped, command, monkeypatch
):
  monkeypatch.setattr(PreparedRun, "run", lambda *_, **named: pytest.fail("it was to be refused before"))
  for flags in ([], ["--dry_run"]):
    error = refusal([*command(**bindings), *flags])
    assert (error.code, error.kind) == (76, "resume_contract")
    assert error.fields["expected"] == "what checkpoint_3 was trained with"
    assert error.fields["got"] == difference
    assert error.fix.endswith(f"or accept it: '--accept_change={difference.partition(':')[0]}'")
  assert not (stopped / "accepted_changes").exists()


@pytest.mark.parametrize(
  "bindings",
  [
    {"CHECKPOINT_PERIOD": 2, "CHECKPOINTS_KEPT": 5},
    {"TRAIN_STEPS": 40},
    {"EVAL_DATASET": "@eval/datasets.DatasetConfig()"},
    {"datasets.DatasetConfig.prefetch_batches": 0},
    {"partitioning.Partitioner.num_partitions": 2},
    # Another text of the same values.
    {"network.T5Config.dropout_rate": 0.1, "DROPOUT_RATE": 0.7, "network.T5Config.dtype": "'float32'"},
  ],
)
def test_what_decides_no_parameters_passes(bindings, stopped, command):
  assert main.prepare(command(**bindings)).restore_step == CHECKPOINT_PERIOD


def test_a_number_of_steps_that_a_schedule_uses_decides(command):
  schedule = {"learning_rates.learning_rate_schedule.warmup_steps": "%TRAIN_STEPS"}
  main.main(command(TRAIN_STEPS=2, **schedule))
  error = refusal(command(TRAIN_STEPS=4, **schedule))
  assert error.fields["got"] == "model.optimizer_def.learning_rate.warmup_steps: 2 → 4"


@pytest.mark.long
def test_changes_are_accepted_one_by_one_and_once(stopped, command, monkeypatch):
  changed = command(**{"DROPOUT_RATE": 0.5, "models.EncoderDecoderModel.z_loss": 0.0})
  dropout, z_loss = f"--accept_change={CONFIG}.dropout_rate", "--accept_change=model.z_loss"
  both = refusal(changed)
  assert both.fields["got"] == f"{CONFIG}.dropout_rate: 0.1 → 0.5; model.z_loss: 0.0001 → 0.0"
  assert both.fix.endswith(f"or accept each: '{dropout}' '{z_loss}'")
  assert refusal([*changed, dropout]).fields["got"] == "model.z_loss: 0.0001 → 0.0"
  # A dry run accepts for itself.
  assert main.main([*changed, dropout, z_loss, "--dry_run"]) == 0
  assert not (stopped / "accepted_changes").exists()
  # Killed before the next checkpoint: it goes on from the same one.
  train_until(5, [*changed, dropout, z_loss], monkeypatch)
  recorded = {
    "0000.json": {"version": 1, "name": f"{CONFIG}.dropout_rate", "was": 0.1, "is": 0.5, "step": 3},
    "0001.json": {"version": 1, "name": "model.z_loss", "was": 0.0001, "is": 0.0, "step": 3},
  }
  assert accepted_in(stopped) == recorded
  main.main(changed)
  assert accepted_in(stopped) == recorded
  assert find_checkpoint(stopped).trained_with["model.z_loss"] == 0.0
  # What was trained since was trained with the new values: the old ones are another change.
  assert refusal(command(TRAIN_STEPS=8)).fields["got"] == (
    f"{CONFIG}.dropout_rate: 0.5 → 0.1; model.z_loss: 0.0 → 0.0001"
  )
  # But from the checkpoint before the change they are none.
  for step in (6, 7):
    shutil.rmtree(stopped / f"checkpoint_{step}")
  assert main.prepare(command()).restore_step == 3
  assert main.prepare(changed).restore_step == 3


def test_another_model_that_was_accepted_is_refused_with_the_leaf_that_differs(stopped, command):
  other = [*command(**{"network.T5Config.mlp_dim": 32}), f"--accept_change={CONFIG}.mlp_dim"]
  error = refusal(other)
  assert (error.code, error.kind) == (76, "checkpoint_tree")
  assert "mlp" in error.fields["leaf"]
  assert not (stopped / "accepted_changes").exists()
  assert "mlp_dim = 32" not in (stopped / "config.gin").read_text()


def test_a_name_that_nothing_has_is_refused(stopped, command):
  error = refusal([*command(), f"--accept_change={CONFIG}.dropuot_rate"])
  assert (error.code, error.kind) == (64, "accept_change")
  assert f"{CONFIG}.dropout_rate" in error.fields["nearest"]
  # What changes nothing is no error: the same command is run again and again.
  assert main.prepare([*command(), f"--accept_change={CONFIG}.dropout_rate"]).newly_accepted == []


def test_values_that_only_one_side_has_are_changes():
  first, second = find_value_changes(3, {"a": 1, "b": None, "c": [1]}, {"b": None, "c": [1], "d": "x"})
  assert str(first) == "a: 1 → absent"
  assert str(second) == 'd: absent → "x"'
  for change in (first, second):
    assert Change.from_json(change.to_json(), path="p") == change


def test_a_change_is_covered_at_its_step_and_before_and_not_after(tmp_path):
  def accepts(step):
    changes = [Change(name="a", was=[1], now=[2], step=step)]
    accepted = AcceptedChanges.read(tmp_path)
    assert accepted.require(changes, kind="resume_contract", expected="e", fix="f") == []

  record_accepted(tmp_path, [Change(name="a", was=[1], now=[2], step=6)])
  record_accepted(tmp_path, [Change(name="b", was=[], now=[None], step=9)])
  assert list(accepted_in(tmp_path)) == ["0000.json", "0001.json"]
  (tmp_path / "accepted_changes" / "0002.json.0123456789ab").write_text("a write that was killed")
  accepts(6)
  accepts(3)
  with pytest.raises(AnystepError, match="kind=resume_contract "):
    accepts(7)


@pytest.mark.parametrize(
  "text",
  [
    "{",
    "[]",
    "[" * 100_000,
    '{"version": 2, "name": "a", "was": 1, "is": 2, "step": 3}',
    '{"version": 1, "name": 7, "was": 1, "is": 2, "step": 3}',
    '{"version": 1, "name": "a", "was": 1, "is": 2, "step": -3}',
    '{"version": 1, "name": "a", "was": 1, "is": 2}',
  ],
)
def test_a_record_of_a_change_that_is_none_is_refused(text, tmp_path):
  (tmp_path / "accepted_changes").mkdir()
  (tmp_path / "accepted_changes" / "0000.json").write_text(text)
  with pytest.raises(AnystepError) as refused:
    AcceptedChanges.read(tmp_path)
  assert (refused.value.code, refused.value.kind) == (65, "accepted_change_invalid")


def test_a_checkpoint_of_version_1_is_accepted_with_a_line_that_says_so(stopped, command, capsys):
  as_version_1(stopped / "checkpoint_3")
  (stopped / "run.json").unlink()
  capsys.readouterr()
  main.main(command(DROPOUT_RATE=0.5))
  said = capsys.readouterr().err
  assert said.count("checkpoint_3 is of an earlier anystep and says neither which run wrote it nor what") == 1
  # From now on there is something to compare with.
  assert refusal(command(TRAIN_STEPS=8)).fields["got"] == f"{CONFIG}.dropout_rate: 0.5 → 0.1"
  assert find_checkpoint(stopped).run == run_of(stopped)


def run_of(model_dir):
  return json.loads((model_dir / "run.json").read_text())["run"]


def test_a_copied_checkpoint_of_another_run_is_refused_unless_it_is_named(
  stopped, reference, command, tmp_path
):
  shutil.copytree(reference / "checkpoint_6", stopped / "checkpoint_6")
  run, other = run_of(stopped), run_of(reference)
  for flags in ([], ["--dry_run"], ["--accept_change=checkpoint_5/run"]):
    error = refusal([*command(), *flags])
    assert (error.code, error.kind) == (76, "checkpoint_run")
    assert error.fields["expected"].endswith(run)
    assert error.fields["got"] == f'checkpoint_6/run: "{other}" → "{run}"'
  main.main([*command(), "--accept_change=checkpoint_6/run"])
  assert accepted_in(stopped)["0000.json"] == {
    "version": 1,
    "name": "checkpoint_6/run",
    "was": other,
    "is": run,
    "step": 6,
  }
  assert find_checkpoint(stopped).run == run_of(stopped) == run
  shutil.rmtree(stopped / "checkpoint_7")
  assert main.prepare(command()).restore_step == 6
  # Another checkpoint of that run is another matter.
  shutil.copytree(reference / "checkpoint_7", stopped / "checkpoint_7")
  assert refusal(command()).kind == "checkpoint_run"
  # Where its own are newer, it does not matter what else lies there.
  shutil.rmtree(stopped / "checkpoint_7")
  main.main(command(TRAIN_STEPS=8))


@pytest.mark.long
def test_a_directory_that_was_moved_or_copied_whole_resumes(stopped, reference, command, tmp_path):
  stopped.rename(tmp_path / "moved")
  shutil.copytree(tmp_path / "moved", tmp_path / "copied")
  for name in ("moved", "copied"):
    main.main(command(name))
    comparison = compare_runs(reference, tmp_path / name)
    assert comparison.identical, comparison.verdict
    assert comparison.resumed_from == 3


def test_checkpoints_without_their_run_s_name_are_refused_unless_named(stopped, command):
  (stopped / "run.json").unlink()
  error = refusal(command())
  assert (error.code, error.kind) == (76, "checkpoint_run")
  assert error.fields["got"].endswith("→ absent")
  assert "where run.json is lost, put it back" in error.fix
  assert not (stopped / "run.json").exists()
  main.main([*command(), "--accept_change=checkpoint_3/run"])
  assert accepted_in(stopped)["0000.json"]["is"] == run_of(stopped)
  # It is asked for once, at the checkpoint before as well as after.
  for step in (6, 7):
    shutil.rmtree(stopped / f"checkpoint_{step}")
  assert main.prepare(command()).restore_step == 3


@pytest.mark.parametrize(
  "text", ["{", "[" * 100_000, '{"version": 1}', '{"version": 1, "run": "../x"}', '{"version": 2}', "7"]
)
def test_a_run_s_name_that_is_none_is_refused(text, stopped, command):
  (stopped / "run.json").write_text(text)
  error = refusal(command())
  assert (error.code, error.kind) == (65, "run_invalid")


@pytest.mark.long
def test_a_run_that_falls_back_takes_the_plan_of_the_checkpoint_that_it_takes(stopped, command, tmp_path):
  """The newest has another plan, and arrays that cannot be restored."""
  before = (stopped / "checkpoint_3" / "data_plan.json").read_text()
  path = tmp_path / "skipped.json"
  path.write_text(main.prepare(command()).data.plan.skip(4, 9, trained_steps=3).to_json())
  main.main(command(DATA_PLAN=repr(str(path))))
  assert (stopped / "checkpoint_6" / "data_plan.json").read_text() == path.read_text() != before
  spoil_arrays(stopped / "checkpoint_6")
  spoil_arrays(stopped / "checkpoint_7")
  main.main(command())
  for folder in (stopped, stopped / "checkpoint_6"):
    assert (folder / "data_plan.json").read_text() == before


def spoil_arrays(directory):
  files = [path for path in (directory / "state").rglob("*") if path.is_file()]
  max(files, key=lambda path: path.stat().st_size).write_bytes(b"nothing")
  sign(directory)
