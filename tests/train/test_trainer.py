"""The trainer through its own command line: exact resume, and a proof that can fail."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_tasks

from anystep import containers
from anystep.cache import open_cache
from anystep.errors import AnystepError
from anystep.examples import serialize_example
from anystep.manifest import FileEntry
from anystep.stream import Stream
from anystep.train import checkpoints, main, trainer
from anystep.train.run_comparison import compare_runs
from anystep.train.step_log import read_step_log

TOTAL_STEPS, CHECKPOINT_PERIOD = 7, 3


class Killed(BaseException):
  """Stands for the end of the process: nothing in the product catches it."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Where runs go that several tests begin with; the first test that needs one trains it."""
  return tmp_path_factory.mktemp("runs")


@pytest.fixture
def reference(runs, command):
  """The directory of a run that nothing disturbs."""
  if not (runs / "undisturbed").exists():
    main.main(command(MODEL_DIR=repr(str(runs / "undisturbed"))))
  return runs / "undisturbed"


@pytest.fixture
def trained(reference, tmp_path):
  """A copy of that directory, in `model`."""
  return shutil.copytree(reference, tmp_path / "model")


@pytest.fixture
def stopped(runs, command, tmp_path, monkeypatch):
  """The directory of a run that was killed right after its first checkpoint, in `model`."""
  if not (runs / "stopped").exists():
    _stop_after_a_checkpoint(command, monkeypatch, MODEL_DIR=repr(str(runs / "stopped")))
  return shutil.copytree(runs / "stopped", tmp_path / "model")


def _kill_at(monkeypatch, step):
  """The process ends when it asks for the batch of a step."""

  def next_batch(stream, original=Stream.__next__):
    if stream.step == step:
      raise Killed
    return original(stream)

  monkeypatch.setattr(Stream, "__next__", next_batch)


@pytest.mark.parametrize(
  "step", [3, *(pytest.param(step, marks=pytest.mark.soak) for step in (1, 5, *range(2, TOTAL_STEPS, 2)))]
)
def test_a_run_killed_at_any_step_and_run_again_is_the_undisturbed_one(
  step, reference, command, tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    _kill_at(patch, step)
    with pytest.raises(Killed):
      main.main(command())
  main.main(command())
  comparison = compare_runs(reference, tmp_path / "model")
  assert comparison.identical, comparison.verdict
  assert comparison.resumed_from == step // CHECKPOINT_PERIOD * CHECKPOINT_PERIOD


@pytest.fixture
def killed_after_saving(runs, command, monkeypatch):
  """The directory of a run that was killed when the whole of its second checkpoint was written."""

  def save(model_dir, state, plan, original=checkpoints.save_checkpoint):
    original(model_dir, state, plan)
    if int(state.step) > CHECKPOINT_PERIOD:
      raise Killed

  directory = runs / "killed_after_saving"
  if not directory.exists():
    with monkeypatch.context() as patch:
      patch.setattr(trainer, "save_checkpoint", save)
      with pytest.raises(Killed):
        main.main(command(MODEL_DIR=repr(str(directory))))
  return directory


@pytest.mark.parametrize(
  "written_before_the_kill",
  [
    *(pytest.param(last, marks=pytest.mark.soak) for last in ("nothing", "plan")),
    "state",
    "everything but the marker",
  ],
)
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
  written_before_the_kill, killed_after_saving, reference, command, tmp_path, capsys
):
  shutil.copytree(killed_after_saving, tmp_path / "model")
  plan_only = ["data_plan.json"]
  kept = {"nothing": [], "plan": plan_only, "state": [*plan_only, "state"]}.get(written_before_the_kill)
  for path in list((tmp_path / "model" / f"checkpoint_{2 * CHECKPOINT_PERIOD}").iterdir()):
    if path.name == checkpoints.COMMITTED or (kept is not None and path.name not in kept):
      shutil.rmtree(path) if path.is_dir() else path.unlink()
  capsys.readouterr()
  main.main(command())
  assert "checkpoint_6 was never finished" in capsys.readouterr().err
  comparison = compare_runs(reference, tmp_path / "model")
  assert comparison.identical, comparison.verdict
  assert comparison.resumed_from == CHECKPOINT_PERIOD


def test_a_process_that_is_killed_for_real_goes_on_where_it_was(reference, command, tmp_path):
  program = [str(Path(sys.executable).with_name("anystep-train")), *command()[1:]]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[2:0:-1]))}
  process = subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL)
  deadline = time.monotonic() + 120
  while len(_logged(tmp_path / "model")) <= 4:
    assert process.poll() is None, "it ended before it could be killed"
    assert time.monotonic() < deadline
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  process.wait()
  main.main(command())
  comparison = compare_runs(reference, tmp_path / "model")
  assert comparison.identical, comparison.verdict


def _logged(model_dir):
  return [record for start in read_step_log(model_dir) for record in start] if model_dir.exists() else []


def test_the_proof_fails_for_a_run_that_resumes_one_step_off(reference, stopped, command, monkeypatch):
  def seek(stream, step, original=Stream.seek):
    original(stream, step + 1 if step == CHECKPOINT_PERIOD else step)

  with monkeypatch.context() as patch:
    patch.setattr(Stream, "seek", seek)
    main.main(command())
  comparison = compare_runs(reference, stopped)
  assert not comparison.identical
  assert comparison.identical_batches == CHECKPOINT_PERIOD
  assert "losses DIFFERENT, parameters DIFFERENT" in comparison.verdict


def test_the_proof_fails_for_a_run_that_resumes_on_a_cache_with_one_token_changed(
  reference, command, own_cache, tmp_path, monkeypatch
):
  _stop_after_a_checkpoint(command, monkeypatch, cache_dir=own_cache)
  before = open_cache(own_cache, tiny_tasks.NAME, "train").manifest_sha256
  for index in range(300):
    _change_a_token(own_cache, index)
  with pytest.raises(AnystepError) as refused:
    main.main(command(cache_dir=own_cache))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  # Not even a plan forged to fit the changed cache hides the change from the comparison.
  after = open_cache(own_cache, tiny_tasks.NAME, "train").manifest_sha256
  _forge_plan(tmp_path / "model", before, after)
  main.main(command(cache_dir=own_cache))
  comparison = compare_runs(reference, tmp_path / "model")
  assert not comparison.identical
  assert comparison.identical_batches < TOTAL_STEPS


def _stop_after_a_checkpoint(command, monkeypatch, **arguments):
  with monkeypatch.context() as patch:
    _kill_at(patch, CHECKPOINT_PERIOD)
    with pytest.raises(Killed):
      main.main(command(**arguments))


def _change_a_token(cache_dir, index):
  """Changes the first token of an example, and every checksum that knows of it."""
  cache = open_cache(cache_dir, tiny_tasks.NAME, "train")
  shard, place = index % cache.manifest.num_shards, index // cache.manifest.num_shards
  records = cache.read_records(
    np.full(cache.manifest.record_files[shard].records, shard),
    np.arange(cache.manifest.record_files[shard].records),
  )
  example = cache[index]
  example["targets"][0] += 1
  records[place] = serialize_example(example)
  path = cache.directory / cache.manifest.record_files[shard].name
  containers.write_array_record(path, records, options=cache.manifest.container_options)
  document = json.loads((cache.directory / "manifest.train.json").read_text())
  entry = FileEntry.of(path.name, len(records), path.read_bytes())
  document["files"]["records"][shard] = vars(entry)
  text = json.dumps(document)
  (cache.directory / "manifest.train.json").write_text(text)
  completed = (cache.directory / "COMPLETED").read_text()
  new = hashlib.sha256(text.encode()).hexdigest()
  (cache.directory / "COMPLETED").write_text(completed.replace(cache.manifest_sha256, new))


def _forge_plan(model_dir, before, after):
  directory = checkpoints.checkpoint_directory(model_dir, CHECKPOINT_PERIOD)
  plan = directory / "data_plan.json"
  plan.write_text(plan.read_text().replace(before, after))
  integrity = json.loads((directory / "integrity.json").read_text())
  integrity["files"]["data_plan.json"] = checkpoints._fingerprint(plan)
  (directory / "integrity.json").write_text(json.dumps(integrity))
  (directory / checkpoints.COMMITTED).write_text(checkpoints._sha256(json.dumps(integrity)))


@pytest.mark.parametrize(
  ("bindings", "field"),
  [
    ({"BATCH_SIZE": 16}, "segments"),
    ({"RANDOM_SEED": 1}, "seed"),
    ({"TASK_FEATURE_LENGTHS": "{'inputs': 20, 'targets': 12}"}, "feature_lengths"),
    ({"datasets.DatasetConfig.epoch_policy": "'same'"}, "epoch_policy"),
  ],
)
def test_resuming_under_another_configuration_is_refused(bindings, field, stopped, command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(**bindings))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  assert refused.value.fields["field"] == field
  assert refused.value.fields["expected"] != refused.value.fields["got"]


def test_resuming_another_model_is_refused_with_the_leaf_that_differs(stopped, command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(**{"network.T5Config.mlp_dim": 32}))
  assert (refused.value.code, refused.value.kind) == (76, "checkpoint_tree")
  assert "mlp" in refused.value.fields["leaf"]


def test_checkpoints_that_cannot_be_read_never_mean_step_0(trained, command, capsys):
  (trained / "checkpoint_7" / "integrity.json").write_text("{")
  capsys.readouterr()
  main.main(command())
  captured = capsys.readouterr()
  assert "checkpoint_7 cannot be read: ERROR code=65 kind=checkpoint_integrity" in captured.err
  assert "resumed from checkpoint_6" in captured.out
  for step in (3, 6, 7):
    (trained / f"checkpoint_{step}" / "state" / "manifest.ocdbt").unlink()
  with pytest.raises(AnystepError) as refused:
    main.main(command())
  assert (refused.value.code, refused.value.kind) == (65, "checkpoints_unreadable")


@pytest.mark.parametrize("damage", ["a bit of an array", "a byte cut off", "a file lost"])
def test_a_damaged_checkpoint_means_the_one_before(damage, reference, trained, command, capsys):
  state = trained / "checkpoint_7" / "state"
  data = max((path for path in state.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  content = bytearray(data.read_bytes())
  content[len(content) // 2] ^= 1
  data.write_bytes(content[:-1] if damage == "a byte cut off" else content)
  if damage == "a file lost":
    data.unlink()
  capsys.readouterr()
  main.main(command())
  captured = capsys.readouterr()
  assert "checkpoint_7 cannot be read: ERROR code=65 kind=checkpoint_file" in captured.err
  assert "resumed from checkpoint_6" in captured.out
  assert compare_runs(reference, trained).identical
  # What could not be read is kept for whoever wants to look at it.
  assert len(list(trained.glob("unreadable_checkpoint_7_*"))) == 1


@pytest.mark.parametrize("foreign", [["checkpoint"], ["state", "commit_success.txt"], ["integrity.json"]])
def test_another_programs_checkpoints_are_neither_ignored_nor_removed(foreign, command, tmp_path):
  folder = tmp_path / "model" / "checkpoint_3"
  folder.mkdir(parents=True)
  for name in foreign:
    (folder / name).write_text("not ours")
  with pytest.raises(AnystepError) as refused:
    main.main(command())
  assert (refused.value.code, refused.value.kind) == (65, "checkpoints_unreadable")
  assert sorted(path.name for path in folder.iterdir()) == sorted(foreign)


def test_a_configuration_that_changed_is_said_and_kept(command, tmp_path, capsys):
  main.main(command(TRAIN_STEPS=3))
  assert "DROPOUT_RATE = 0.1" in (tmp_path / "model" / "config.gin").read_text()
  capsys.readouterr()
  main.main(command(TRAIN_STEPS=3, DROPOUT_RATE=0.5))
  said = [line for line in capsys.readouterr().err.splitlines() if "configuration changed" in line]
  assert said == [
    "the configuration changed: - DROPOUT_RATE = 0.1",
    "the configuration changed: + DROPOUT_RATE = 0.5",
  ]
  assert "DROPOUT_RATE = 0.5" in (tmp_path / "model" / "config.gin").read_text()


def test_fewer_steps_than_were_trained_are_refused(trained, command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(TRAIN_STEPS=5))
  assert (refused.value.code, refused.value.kind) == (78, "total_steps")


def test_a_finished_run_is_only_evaluated_again(command):
  evaluated = command(EVAL_DATASET="@eval/datasets.DatasetConfig()")
  first = main.prepare(evaluated).run()
  again = main.prepare(evaluated).run()
  assert first == again
  assert first["examples"] == 21
  assert 0 <= first["edit_similarity"] <= 1


def test_only_the_newest_checkpoints_are_kept_where_that_is_asked(command, tmp_path):
  main.main(command(CHECKPOINTS_KEPT=2))
  assert checkpoints.checkpoint_steps(tmp_path / "model") == [6, 7]


def test_a_loss_that_is_not_finite_stops_the_run(command):
  with pytest.raises(AnystepError) as stopped:
    main.main(command(**{"learning_rates.learning_rate_schedule.base_learning_rate": "1e38"}))
  assert (stopped.value.code, stopped.value.kind) == (70, "loss_not_finite")


def test_more_steps_than_data_are_refused_before_training(command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(**{"train/datasets.DatasetConfig.num_epochs": 1, "TRAIN_STEPS": 39}))
  assert (refused.value.code, refused.value.kind) == (78, "data_ended")
  assert refused.value.fields["expected"] == "at most 38 steps in 1 epochs"


def test_dry_run_prints_the_configuration_and_trains_nothing(command, tmp_path, capsys):
  assert main.main([*command(), "--dry_run"]) == 0
  printed = capsys.readouterr().out
  assert "trainer.Trainer.total_steps = %TRAIN_STEPS" in printed
  assert "would train from step 0 to step 7" in printed
  assert not (tmp_path / "model").exists()


def test_the_run_leaves_tensorboard_events(reference):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  events = EventAccumulator(str(reference / "train"), size_guidance={"tensors": 0})
  events.Reload()
  assert {"loss", "accuracy", "gradient_norm"} <= set(events.Tags()["tensors"])
  assert [event.step for event in events.Tensors("loss")] == list(range(1, TOTAL_STEPS + 1))


@pytest.mark.parametrize(
  ("tamper", "kind"),
  [
    (lambda folder: (folder / "train.array_record-00002-of-00004").unlink(), "file_missing"),
    (lambda folder: _append(folder / "train.array_record-00001-of-00004", b"x"), "file_size"),
    (lambda folder: (folder / "train.array_record-00001-of-00008").write_bytes(b""), "file_foreign"),
    (lambda folder: _append(folder / "manifest.validation.json", b" "), "manifest_changed"),
    (lambda folder: _flip(folder / "train.array_record-00000-of-00004", 100), "file_changed"),
    (
      lambda folder: _swap(folder, "train.array_record-00002-of-00004", "train.array_record-00003-of-00004"),
      "file_changed",
    ),
  ],
  ids=[
    "a shard missing",
    "a shard longer",
    "a foreign shard",
    "a manifest changed",
    "a byte of the first shard",
    "two shards swapped",
  ],
)
def test_a_cache_that_is_not_what_was_written_stops_the_trainer_before_step_0(
  tamper, kind, command, own_cache, tmp_path
):
  tamper(own_cache / tiny_tasks.NAME)
  with pytest.raises(AnystepError) as refused:
    main.main(command(cache_dir=own_cache, EVAL_DATASET="@eval/datasets.DatasetConfig()"))
  assert (refused.value.code, refused.value.kind) == (65, kind)
  assert not (tmp_path / "model").exists()


def _swap(folder, one, other):
  content = (folder / one).read_bytes()
  (folder / one).write_bytes((folder / other).read_bytes())
  (folder / other).write_bytes(content)


def _append(path, content):
  path.write_bytes(path.read_bytes() + content)


def _flip(path, place):
  content = bytearray(path.read_bytes())
  content[place] ^= 1
  path.write_bytes(content)


@pytest.mark.soak
@pytest.mark.parametrize("attempt", range(10))
def test_a_run_killed_again_and_again_at_any_moment_is_the_undisturbed_one(attempt, command, tmp_path):
  """Kills come after random times, from before the first step to the last checkpoint."""
  arguments = {"TRAIN_STEPS": 60, "CHECKPOINT_PERIOD": 5}
  main.main(command("reference", **arguments))
  program = [str(Path(sys.executable).with_name("anystep-train")), *command(**arguments)[1:]]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[2:0:-1]))}
  moments = random.SystemRandom()
  kills = []
  while True:
    process = subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
      assert process.wait(timeout=moments.uniform(8, 20)) == 0
      break
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      kills.append(len(_logged(tmp_path / "model")))
  comparison = compare_runs(tmp_path / "reference", tmp_path / "model")
  assert comparison.identical, (kills, comparison.verdict)
  print(f"killed {len(kills)} times, with {kills} steps logged: {comparison.verdict}")
