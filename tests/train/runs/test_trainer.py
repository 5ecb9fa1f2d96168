"""The trainer through its own command line: exact resume, and a proof that can fail."""

import hashlib
import json

import jax
import numpy as np
import pytest
import tiny_tasks
from train_runs import CHECKPOINT_PERIOD, TOTAL_STEPS, sign, train_until

from anystep.caches.cache import open_cache
from anystep.caches.manifest import FileEntry
from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.records.writing import serialize_example
from anystep.streams.stream import Stream
from anystep.train import main
from anystep.train.checkpoints.checkpoints import checkpoint_directory
from anystep.train.demo.run_comparison import compare_runs


@pytest.mark.parametrize(
  "step", [3, *(pytest.param(step, marks=pytest.mark.soak) for step in (1, 5, *range(2, TOTAL_STEPS, 2)))]
)
def test_a_run_killed_at_any_step_and_run_again_is_the_undisturbed_one(
  step, reference, command, tmp_path, monkeypatch
):
  train_until(step, command(), monkeypatch)
  main.main(command())
  comparison = compare_runs(reference, tmp_path / "model")
  assert comparison.identical, comparison.verdict
  assert comparison.resumed_from == step // CHECKPOINT_PERIOD * CHECKPOINT_PERIOD


def test_a_run_of_several_processes_is_refused(command, monkeypatch):
  prepared = main.prepare(command())
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(AnystepError) as refused:
    prepared.run()
  assert (refused.value.code, refused.value.kind) == (78, "process_count")


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
  train_until(CHECKPOINT_PERIOD, command(cache_dir=own_cache), monkeypatch)
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
  directory = checkpoint_directory(model_dir, CHECKPOINT_PERIOD)
  plan = directory / "data_plan.json"
  plan.write_text(plan.read_text().replace(before, after))
  sign(directory)


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
  assert 0 <= first["teacher_forced/edit_similarity"] <= 100


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
  assert "8 devices: data 8 × model 1" in printed
  assert not (tmp_path / "model").exists()


def test_dry_run_prints_how_parameters_are_split_as_gin_says(command, tmp_path, capsys):
  rules = tmp_path / "rules.gin"
  rules.write_text(
    "from __gin__ import dynamic_registration\nfrom anystep.train import partitioning\n"
    "partitioning.Partitioner.num_partitions = 2\n"
    "partitioning.Partitioner.logical_axis_rules = @partitioning.standard_logical_axis_rules()\n"
    "partitioning.standard_logical_axis_rules.parameter_partitioning_dims = 2\n"
  )
  # The table is as wide as what reads it, where it can tell.
  assert main.main([*command(), f"--gin_file={rules}", "--dry_run"]) == 0
  rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
  by_name = {row[0]: row[1:] for row in rows if len(row) == 4}
  assert by_name["decoder/layers_0/mlp/wo/kernel"] == ["16 × 8", "model, data", "64"]
  assert by_name["decoder/decoder_norm/scale"] == ["8", "data", "8"]


def test_the_run_leaves_tensorboard_events(reference):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  from tensorboard.util.tensor_util import make_ndarray

  events = EventAccumulator(str(reference / "train"), size_guidance={"tensors": 0})
  events.Reload()
  assert {"loss", "accuracy", "gradient_norm", "parameter_norm"} <= set(events.Tags()["tensors"])
  # The gin file's rate before the warmup's end: of the steps done before each, as T5X logs it.
  rates = [float(make_ndarray(event.tensor_proto)) for event in events.Tensors("learning_rate")]
  np.testing.assert_allclose(rates, [1 / np.sqrt(1000)] * TOTAL_STEPS, rtol=1e-6)
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
