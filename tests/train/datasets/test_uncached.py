"""Without a cache: straight from the source through SeqIO, seeded, and with no claim to be exact."""

import itertools
import json

import numpy as np
import pytest
import seqio
import tensorflow as tf
import tiny_tasks
from job_runs import registered

from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.tasks.data_program import main as data_main
from anystep.train import main
from anystep.train.checkpoints import checkpoints
from anystep.train.datasets.data_state import UncachedState, read_state, record_state
from anystep.train.datasets.uncached import UncachedStream, restart_seed
from anystep.train.reports.step_log import read_step_log

UNCACHED = {"USE_CACHED_TASKS": False, "CACHE_DIR": None}
EVALUATED = {"EVAL_DATASET": "@eval/datasets.DatasetConfig()"}
LENGTHS = {"inputs": 24, "targets": 12}


class Killed(BaseException):
  """Stands for the end of the process."""


@pytest.fixture
def data(command):
  """`data(**bindings)`: what a run would train on."""

  def prepared(**bindings):
    return main.prepare(command(**UNCACHED, **bindings)).data

  return prepared


def batches(data, step=0, count=3, rows=(0, 1)):
  with data.open_stream(rows) as stream:
    stream.seek(step)
    return list(itertools.islice(stream, count))


def to_the_end(data, rows=(0, 1)):
  """All batches of data that ends; that it has ended is an error to whoever asks for more."""
  found = []
  with data.open_stream(rows) as stream:
    with pytest.raises(AnystepError) as ended:
      found.extend(stream)
    assert (ended.value.code, ended.value.kind) == (78, "data_ended")
    assert ended.value.fields["step"] == stream.step
  return found


def plain_task(name, preprocessor, texts=("a", "b")):
  """A task of texts that are inputs and targets, in which nothing is random."""

  def source(split, shuffle_files, seed=None):
    del split, shuffle_files, seed
    return tf.data.Dataset.from_tensor_slices({"targets": list(texts), "inputs": list(texts)})

  return seqio.Task(
    name,
    source=seqio.FunctionDataSource(source, splits=["train"]),
    preprocessors=[preprocessor, seqio.preprocessors.tokenize],
    output_features={name: seqio.Feature(tiny_tasks.VOCABULARY) for name in ("inputs", "targets")},
  )


def digests(several):
  return [batch_digest(batch) for batch in several]


@pytest.mark.long
def test_a_run_that_is_killed_goes_on_with_the_data_begun_anew_and_says_so(
  command, data, tmp_path, monkeypatch, capsys
):
  def next_batch(stream, original=UncachedStream.__next__):
    if stream.step == 4:
      raise Killed
    return original(stream)

  arguments = command(**UNCACHED, **EVALUATED)
  with monkeypatch.context() as patch:
    patch.setattr(UncachedStream, "__next__", next_batch)
    with pytest.raises(Killed):
      main.main(arguments)
  assert capsys.readouterr().err.count("WARNING: USE_CACHED_TASKS = False") == 1
  assert main.main(arguments) == 0
  said = capsys.readouterr()
  assert "resumed from checkpoint_3" in said.out
  (warning,) = [line for line in said.err.splitlines() if line.startswith("WARNING: USE_CACHED_TASKS")]
  assert "without exact resume" in warning
  assert "the source of tiny_span_corruption, a FunctionDataSource, has no random access" in warning
  assert "│ examples" in said.out
  # What the log says is what the data gives to a start with step 0, and to one with step 3.
  first, second = read_step_log(tmp_path / "model")
  assert [record.step for record in second] == [3, 4, 5, 6]
  assert [record.digest for record in first] == digests(batches(data(), step=0))
  assert [record.digest for record in second] == digests(batches(data(), step=3, count=4))
  assert not {record.digest for record in first} & {record.digest for record in second}
  # Nothing that is left claims to know which examples the steps saw.
  model_dir = tmp_path / "model"
  assert not list(model_dir.rglob("data_plan.json"))
  assert checkpoints.checkpoint_steps(model_dir) == [3, 6, 7]
  for directory in (model_dir, model_dir / "checkpoint_7"):
    document = json.loads((directory / "data_uncached.json").read_text())
    assert (document["exact"], document["mixture_or_task_name"]) == (False, tiny_tasks.NAME)
  with pytest.raises(AnystepError) as refused:
    data_main.main(["what-was-at", f"--model_dir={model_dir}", "--steps=0:1"])
  assert (refused.value.kind, "USE_CACHED_TASKS" in refused.value.fields["got"]) == ("plan_missing", True)
  # Whoever goes on with a cache, or another batch size, is told that the run began otherwise.
  for bindings, field in (({}, "data"), ({**UNCACHED, "BATCH_SIZE": 16}, "batch_size")):
    with pytest.raises(AnystepError) as refused:
      main.prepare(command(**bindings))
    assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
    assert refused.value.fields["field"] == field
    if field == "batch_size":
      assert refused.value.fields["got"] == "batch_size: 8 → 16"


def test_a_run_with_a_plan_does_not_go_on_without_one(command, data):
  plan = main.prepare(command()).data.state
  with pytest.raises(AnystepError) as refused:
    data().dataset.run_order((3, plan))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  assert refused.value.fields["expected"] == "with a plan of its examples"


def test_every_start_and_seed_has_batches_of_its_own_and_the_same_ones_each_time(data):
  runs = {seed: data(RANDOM_SEED=seed) for seed in (0, 1)}
  found = [digests(batches(runs[seed], step, count=2)) for seed, step in ((0, 0), (0, 3), (1, 0))]
  assert len({digest for several in found for digest in several}) == 6
  assert digests(batches(data(), step=3, count=2)) == found[1]


@pytest.mark.parametrize(("name", "packing"), [(tiny_tasks.NAME, "greedy"), (tiny_tasks.MIXTURE, "none")])
def test_batches_are_those_of_seqio_s_own_converter(name, packing, data):
  # Of rows that hold an example each at least, SeqIO's greedy packs are ours.
  bindings = {"MIXTURE_OR_TASK_NAME": repr(name), "PACKING": repr(packing)}
  run = data(**bindings)
  converter = seqio.EncDecFeatureConverter(pack=packing != "none")
  dataset = seqio.get_dataset(
    name,
    LENGTHS,
    converter,
    dataset_split="train",
    shuffle=True,
    num_epochs=None,
    seed=restart_seed(run.state, 5),
  )
  expected = list(dataset.batch(8).take(3).as_numpy_iterator())
  assert digests(batches(run, step=5)) == digests(expected)


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_packed_rows_hold_every_example_once(packing, data):
  epoch = {"train/datasets.DatasetConfig.num_epochs": 1, "BATCH_SIZE": 1, "PACKING": repr(packing)}
  run = data(**epoch, TASK_FEATURE_LENGTHS="{'inputs': 400, 'targets': 200}")
  examples = run.examples(shuffle=True, seed=restart_seed(run.state, 0), num_epochs=1)
  expected = sorted(example["targets"].tolist() for example in examples.as_numpy_iterator())
  found, rows = [], to_the_end(run)
  for row in rows:
    segments, targets = row["decoder_segment_ids"][0], row["decoder_target_tokens"][0]
    found += [targets[segments == number].tolist() for number in range(1, segments.max() + 1)]
  assert sorted(found) == expected
  assert len(rows) < len(expected) / 2


def test_hosts_share_the_source(data):
  task = plain_task("tiny_plain", lambda dataset: dataset, texts=[f"text {k}" for k in range(40)])
  epoch = {"train/datasets.DatasetConfig.num_epochs": 1, "BATCH_SIZE": 2}

  def seen(run, rows):
    parts = [batch["decoder_target_tokens"] for batch in to_the_end(run, rows)]
    assert {len(part) for part in parts} == {2 // rows[1]}
    return [row.tobytes() for part in parts for row in part]

  with registered(task):
    run = data(**epoch, MIXTURE_OR_TASK_NAME="'tiny_plain'")
    hosts = [seen(run, (host, 2)) for host in range(2)]
    assert [len(rows) for rows in hosts] == [20, 20]
    assert {*hosts[0], *hosts[1]} == set(seen(run, (0, 1)))
    assert len({*hosts[0], *hosts[1]}) == 40
    with pytest.raises(AnystepError) as refused:
      run.open_stream((0, 3))
  assert (refused.value.code, refused.value.kind) == (78, "rows")


def test_an_evaluation_sees_every_example_once_in_order(command):
  prepared = main.prepare(command(**UNCACHED, **EVALUATED))
  parts = list(prepared.evaluation[0].evaluation_batches())
  assert [len(part.real) for part in parts] == [8, 8, 8]
  assert sum(part.real.sum() for part in parts) == 21
  task = seqio.TaskRegistry.get(tiny_tasks.NAME)
  dataset = task.get_dataset(LENGTHS, split="validation", shuffle=False, seed=0, num_epochs=1)
  expected = [example["targets"].tolist() for example in dataset.as_numpy_iterator()]
  found = [row.tolist() for part in parts for row in part.examples["targets"].rows()]
  assert found == expected
  for part in parts:
    assert not part.rows["decoder_loss_weights"][~part.real].any()
    assert part.rows["decoder_loss_weights"][part.real].any(axis=1).all()


@pytest.mark.parametrize(
  ("bindings", "code", "kind", "said"),
  [
    ({"DATA_PLAN": "'plan.json'"}, 78, "use_cached", "DATA_PLAN"),
    ({"train/datasets.DatasetConfig.epoch_policy": "'same'"}, 78, "use_cached", "epoch_policy"),
    ({"train/datasets.DatasetConfig.split": "'test'"}, 66, "split_missing", "train, validation"),
    ({"BATCH_SIZE": 0}, 78, "batch_size", "at least 1"),
    ({"TASK_FEATURE_LENGTHS": "{'inputs': 24}"}, 78, "feature_length", "targets"),
    ({"MIXTURE_OR_TASK_NAME": "'a/b,1'"}, 66, "cache_missing", "a/b"),
    ({"USE_CACHED_TASKS": "'no'"}, 78, "gin_value", "use_cached"),
    ({"USE_CACHED_TASKS": True}, 78, "cache_dir", "USE_CACHED_TASKS = False"),
  ],
)
def test_what_needs_a_cache_or_is_not_there_is_named(bindings, code, kind, said, command):
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**{**UNCACHED, **bindings}))
  assert (refused.value.code, refused.value.kind) == (code, kind)
  assert said in str(refused.value)


def drop_all(dataset):
  return dataset.filter(lambda example: False)


def fail(dataset):
  def refuse(_):
    raise ValueError("this text is indigestible")

  def through_python(example):
    text = tf.py_function(refuse, [example["targets"]], tf.string)
    return {**example, "targets": tf.ensure_shape(text, [])}

  return dataset.map(through_python)


def without_inputs(dataset):
  return dataset.map(lambda example: {"targets": example["targets"]})


@pytest.mark.parametrize(
  ("preprocessor", "code", "kind", "said"),
  [
    (drop_all, 66, "source_empty", "train"),
    (fail, 65, "source_failed", "indigestible"),
    (without_inputs, 78, "source_refused", "inputs"),
  ],
)
def test_what_the_source_or_its_preprocessors_say_is_an_error(preprocessor, code, kind, said, data):
  task = plain_task("tiny_failing", preprocessor)
  with registered(task), pytest.raises(AnystepError) as refused:
    data(MIXTURE_OR_TASK_NAME="'tiny_failing'")
  assert (refused.value.code, refused.value.kind) == (code, kind)
  assert said in str(refused.value)


def state_of(**changes):
  fields = {"mixture_or_task_name": "a", "split": "train", "batch_size": 8, "seed": 3}
  return UncachedState(**{**fields, "feature_lengths": LENGTHS, "packing": "none", **changes})


def test_a_state_is_read_as_it_was_written_and_nothing_else_is(tmp_path):
  record_state(tmp_path, state_of(), 0)
  assert read_state(tmp_path / "data_uncached.json") == state_of()
  text = state_of().to_json()
  for wrong in (text.replace('"version": 1', '"version": 2'), text.replace("8", "0"), text[:-9], "[]"):
    with pytest.raises(AnystepError) as refused:
      UncachedState.from_json(wrong)
    assert (refused.value.code, refused.value.kind) == (65, "data_uncached_invalid")


def test_a_plan_that_was_never_trained_on_is_set_aside(tmp_path):
  (tmp_path / "data_plan.json").write_text("a plan")
  record_state(tmp_path, state_of(), 0)
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ["data_plan_until_step_0.json", "data_uncached.json"]


def test_every_start_and_seed_has_an_order_of_its_own():
  seeds = {restart_seed(state_of(seed=seed), step) for seed in (0, 1) for step in range(100)}
  assert len(seeds) == 200
  assert all(0 <= seed <= np.iinfo(np.int32).max for seed in seeds)
