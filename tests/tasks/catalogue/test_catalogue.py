"""The catalogue of tasks: its table, its texts and metrics beside T5's, and its way through a cache."""

import pathlib
import re

import numpy as np
import pytest
import seqio
import t5_tasks
import tensorflow as tf
from job_runs import registered, run_job
from tfds_rows import ROWS, MadeUpRows

import anystep
from anystep.errors import AnystepError
from anystep.features.ragged import Ragged
from anystep.tasks.catalogue import arithmetic, c4, copying, glue, stdlib, super_glue, winograd, wmt
from anystep.tasks.catalogue.text_to_text import T5_VOCABULARY
from anystep.tasks.reading.task_reader import TaskReader
from anystep.tasks.seqio_api.evaluation import ModelOutput, compute_metrics
from anystep.tasks.sources.tfds_source import TfdsSource

DOCUMENT = pathlib.Path(__file__).resolve().parents[3] / "docs" / "catalogue.md"
MODULES = {"glue": glue, "super_glue": super_glue, "wmt": wmt, "c4": c4}
MADE = {"arithmetic": arithmetic, "copying": copying, "stdlib": stdlib}
BYTES = seqio.ByteVocabulary(extra_ids=100)
PREFIX = "bytes_"
LENGTHS = {"inputs": 400, "targets": 60}


def name_in_t5(name):
  """T5's own task, whose texts and metrics ours must have."""
  if name.startswith("super_glue_wsc"):
    return name.replace("wsc_", "wsc_v102_simple_")
  version = {"super_glue": "_v102", "glue": "_v002", "wmt14": "_v003"}
  return name + next(v for start, v in version.items() if name.startswith(start))


OF_TFDS = [
  *(f"glue_{name}" for name in [*glue._DATASETS, "stsb"]),
  *(f"super_glue_{name}" for name in [*super_glue._DATASETS, "multirc", "record", "wsc_train", "wsc_eval"]),
  "wmt14_ende",
]
CACHED = ["super_glue_multirc", "super_glue_record", "c4_lm", "arithmetic_addition_2"]


@pytest.fixture(scope="module", autouse=True)
def t5():
  """T5's own tasks and mixtures, registered beside ours."""
  with t5_tasks.registered():
    import t5

    yield t5


@pytest.fixture(scope="module")
def on_bytes():
  """The names of all tasks and mixtures, registered once more, with another vocabulary."""
  names = {*seqio.TaskRegistry.names()}, {*seqio.MixtureRegistry.names()}
  for module in MODULES.values():
    module.register(BYTES, prefix=PREFIX)
  added = {*seqio.TaskRegistry.names()} - names[0], {*seqio.MixtureRegistry.names()} - names[1]
  yield added
  for name in added[0]:
    seqio.TaskRegistry.remove(name)
  for name in added[1]:
    seqio.MixtureRegistry.remove(name)


def made_up(task, source):
  """The task on made-up rows, under another name, on bytes."""
  return task.replace(
    name=f"made_up_{task.name}",
    source=source,
    output_features={
      name: seqio.Feature(BYTES, add_eos=feature.add_eos) for name, feature in task.output_features.items()
    },
  )


def texts_of(task, split):
  """What the task makes of a split before tokens, and its specification."""
  steps = list(task.preprocessors)
  dataset = task.source.get_dataset(split)
  for step in steps[: steps.index(seqio.preprocessors.tokenize)]:
    dataset = step(dataset)
  return dataset.element_spec, list(dataset.as_numpy_iterator())


@pytest.mark.parametrize("name", OF_TFDS)
def test_texts_are_those_of_t5(name, tmp_path):
  # All labels to train on are published; where one is not, T5 would keep the example.
  hides_a_label = name != "super_glue_wsc_train"
  task = seqio.TaskRegistry.get(name)
  source = MadeUpRows(task.source, tmp_path, hides_a_label=hides_a_label)
  ours, theirs = (made_up(one, source) for one in (task, seqio.TaskRegistry.get(name_in_t5(name))))
  (spec, examples), (their_spec, their_examples) = (texts_of(one, source.splits[0]) for one in (ours, theirs))
  assert spec == their_spec
  np.testing.assert_equal(examples, their_examples)
  assert len(examples) >= ROWS // 4


@pytest.mark.parametrize(
  ("text", "index", "pronoun"),
  [
    ('whip the pony , and the pony threw him over. "Good for him," he said. ', 12, "him"),
    ("Some day they might want to use it , but really for now", 6, "it"),
    ("Bob asked Tom if he could lend some money. ", 4, "he"),
    ("It sang", 0, "It"),
    ("then came she", 2, "she"),
  ],
)
def test_a_pronoun_is_starred_also_where_the_index_is_not_quite_its_own(text, index, pronoun):
  rows = {"text": [text], "span2_index": [index], "span2_text": [pronoun], "span1_text": ["Bob"]}
  rows = tf.data.Dataset.from_tensor_slices({**rows, "label": [1], "idx": [0]})
  (example,) = winograd.wsc(rows, referents_only=True).as_numpy_iterator()
  inputs = example["inputs"].decode()
  assert inputs.startswith("wsc: ")
  assert inputs.count(f"*{pronoun}*") == 1
  starred = inputs.removeprefix("wsc: ").replace("*", "").replace(' ,"', ',"')
  assert starred.strip() == text.strip()
  before = inputs.removeprefix("wsc: ").split(f"*{pronoun}*")[0]
  assert len(before.split()) - index in (0, 1)


# The two texts of SuperGLUE's WSC whose index is not the pronoun's.
PONY = (
  "The boy continued to whip the pony , and eventually the pony threw him over. John laughed out quite "
  'loud. "Good for him," he said. '
)
PEBBLE = (
  "When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the magic pebble in an "
  "iron safe . Some day they might want to use it , but really for now, what more could they wish for?"
)


@pytest.mark.parametrize(("text", "at_index", "pronoun"), [(PONY, "him,", "him"), (PEBBLE, "use", "it")])
def test_the_odd_texts_of_wsc_are_starred_as_t5_stars_them(text, at_index, pronoun, t5):
  words = [word.strip('"') for word in text.split(" ")]
  index = len(words) - 1 - words[::-1].index(at_index)
  row = {"text": [text], "span2_index": [index], "span2_text": [pronoun], "span1_text": ["it"]}
  dataset = tf.data.Dataset.from_tensor_slices({**row, "label": [1], "idx": [0]})
  (ours,), (theirs,) = (
    star(dataset, **only).as_numpy_iterator()
    for star, only in (
      (winograd.wsc, {"referents_only": True}),
      (t5.data.preprocessors.wsc_simple, {"correct_referent_only": True}),
    )
  )
  assert ours == theirs


def test_a_pronoun_that_is_not_there_is_refused():
  rows = {"text": ["a b c d"], "span2_index": [1], "span2_text": ["he"], "span1_text": ["Bob"]}
  rows = tf.data.Dataset.from_tensor_slices({**rows, "label": [1], "idx": [0]})
  with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
    list(winograd.wsc(rows, referents_only=True))


@pytest.mark.parametrize("noun", ["Bob", "the boy's hat", "my", "Her big Bird", "his brother"])
@pytest.mark.parametrize(
  "text", ["bob", "Bob 's", "the", "", "big bird", "hat", "boy's", "brother", "his brother Bob", "bird's"]
)
@pytest.mark.parametrize("label", [0, 1])
def test_predicted_referents_are_judged_as_t5_judges_them(text, noun, label, t5):
  example = {"targets_pretokenized": noun.encode(), "label": np.int64(label)}
  for is_target in (False, True):
    theirs = t5.data.postprocessors.wsc_simple(text, example=example, is_target=is_target)
    assert winograd.is_referent(text, example=example, is_target=is_target) == theirs


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
  """A cache directory, and in it tasks of the catalogue on made-up rows."""
  directory = tmp_path_factory.mktemp("catalogue")
  tasks = {name: seqio.TaskRegistry.get(name) for name in CACHED}
  tasks = {
    name: made_up(task, MadeUpRows(task.source, directory)) if isinstance(task.source, TfdsSource) else task
    for name, task in tasks.items()
  }
  run_made_up_job(directory, tasks.values(), "--splits=validation")
  return directory, tasks


def run_made_up_job(directory, tasks, *flags):
  with registered(*(task for task in tasks if task.name.startswith("made_up_"))):
    run_job(directory, *flags, tasks=",".join(task.name for task in tasks))


def read_examples(directory, task, split):
  """All examples of a split, as a reader of its cache has them."""
  lengths = {name: LENGTHS[name] for name in task.output_features}
  cache = anystep.open_cache(directory, task.name, split)
  transforms = {task.name: TaskReader(task, cache, lengths)}
  plan = anystep.Plan.start(cache, batch_size=8, feature_lengths=lengths, num_epochs=1, transforms=transforms)
  examples = []
  with anystep.open_stream(plan, directory, transforms=transforms) as stream:
    for step in range(plan.num_steps):
      columns, _ = stream.examples(plan.batch(step))
      rows = [column.rows() if isinstance(column, Ragged) else list(column) for column in columns.values()]
      examples += [dict(zip(columns, row, strict=True)) for row in zip(*rows, strict=True)]
  return examples


def comparable(example):
  return sorted((name, np.asarray(value).tolist()) for name, value in example.items())


def assert_read_as_seqio_has_them(directory, task, split):
  examples = read_examples(directory, task, split)
  expected = list(task.get_dataset(LENGTHS, split, use_cached=False, shuffle=False).as_numpy_iterator())
  assert len(examples) == len(expected)
  if not task.name.endswith(("c4_lm", "c4_span_corruption")):
    # Those draw at random.
    assert sorted(map(comparable, examples)) == sorted(map(comparable, expected))
  for example in examples:
    for name in task.output_features:
      assert 0 < len(example[name]) <= LENGTHS[name]
      assert example[name][-1] == BYTES.eos_id or name == "targets"
  return examples


@pytest.mark.parametrize("name", CACHED)
def test_tasks_are_cached_and_read_as_seqio_has_them(name, cached):
  directory, tasks = cached
  assert_read_as_seqio_has_them(directory, tasks[name], "validation")


@pytest.mark.parametrize("name", [name for name in CACHED if name in OF_TFDS])
def test_metrics_of_made_up_predictions_are_those_of_t5(name, cached):
  directory, tasks = cached
  assert_metrics_as_t5(tasks[name], read_examples(directory, tasks[name], "validation"))


def assert_metrics_as_t5(task, examples):
  targets = [example["targets"] for example in examples]
  predictions = np.zeros((len(examples), LENGTHS["targets"]), np.int32)
  for row, target in enumerate(targets):
    wrong = targets[(row + 5) % len(targets)]
    said = [target, wrong, wrong[:-2]][row % 3]
    predictions[row, : len(said)] = said
  theirs = seqio.TaskRegistry.get(name_in_t5(task.name.removeprefix("made_up_")))
  theirs = theirs.replace(source=task.source, output_features=task.output_features)
  outputs = {ModelOutput.PREDICTION: predictions}
  metrics, their_metrics = (compute_metrics(made, examples, outputs) for made in (task, theirs))
  assert metrics == pytest.approx(their_metrics, nan_ok=True)
  assert all(-100 < value < 100 for value in metrics.values())
  assert any(metrics.values())


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("c4_lm", {"bits_per_byte", "log_likelihood"}),
    ("arithmetic_addition_2", {"sequence_accuracy", "edit_similarity"}),
  ],
)
def test_metrics_of_other_tasks_are_of_scores_or_predictions(name, expected, cached):
  directory, tasks = cached
  examples = read_examples(directory, tasks[name], "validation")
  predictions = np.zeros((len(examples), LENGTHS["targets"]), np.int32)
  for row, example in enumerate(examples):
    predictions[row, : len(example["targets"])] = example["targets"] + row % 2
  outputs = {ModelOutput.SCORE: np.full(len(examples), -3.0), ModelOutput.PREDICTION: predictions}
  metrics = compute_metrics(tasks[name], examples, outputs)
  assert metrics.keys() == expected
  assert metrics.get("log_likelihood", -3) == -3
  assert metrics.get("sequence_accuracy", 50) == 50
  assert all(abs(value) > 0 for value in metrics.values())


@pytest.mark.long
@pytest.mark.parametrize("name", [*OF_TFDS, "c4_span_corruption", "c4_lm"])
def test_every_task_goes_through_a_cache_with_all_its_splits(name, tmp_path):
  task = seqio.TaskRegistry.get(name)
  task = made_up(task, MadeUpRows(task.source, tmp_path))
  run_made_up_job(tmp_path, [task])
  for split in task.source.splits:
    examples = assert_read_as_seqio_has_them(tmp_path, task, split)
    if name in OF_TFDS and task.metric_fns and not split.startswith("test"):
      assert_metrics_as_t5(task, examples)


def test_mixtures_have_t5_s_rates_for_the_tasks_that_they_share():
  for ours, theirs, version in (
    ("glue_proportional", "glue_v002_proportional", "_v002"),
    ("super_glue_proportional", "super_glue_v102_proportional", "_v102"),
  ):
    rates, their_rates = (
      {task.name: mixture.get_rate(task) for task in mixture.tasks}
      for mixture in map(seqio.MixtureRegistry.get, (ours, theirs))
    )
    # Definite Pronoun Resolution is no part of SuperGLUE.
    their_rates.pop("dpr_v001_simple", None)
    assert {name_in_t5(name): rate for name, rate in rates.items()} == their_rates
    assert version in theirs


def test_a_cap_limits_the_rates_of_large_tasks():
  with registered():
    glue.register(BYTES, prefix="capped_", cap=10_000)
  mixture = seqio.MixtureRegistry.get("capped_glue_proportional")
  rates = {task.name: mixture.get_rate(task) for task in mixture.tasks}
  seqio.MixtureRegistry.remove(mixture.name)
  for name in [name for name in seqio.TaskRegistry.names() if name.startswith("capped_")]:
    seqio.TaskRegistry.remove(name)
  assert rates["capped_glue_mnli"] == rates["capped_glue_sst2"] == 10_000
  assert (rates["capped_glue_cola"], rates["capped_glue_ax"]) == (8_551, 0)


def test_all_tasks_have_t5_s_vocabulary_and_another_under_a_prefix(on_bytes):
  tasks, mixtures = on_bytes
  of_tfds = {*OF_TFDS, "c4_span_corruption", "c4_lm"}
  assert tasks == {PREFIX + name for name in of_tfds}
  assert mixtures == {PREFIX + "glue_proportional", PREFIX + "super_glue_proportional"}
  for name in of_tfds:
    for task, vocabulary in ((name, T5_VOCABULARY), (PREFIX + name, BYTES)):
      features = seqio.TaskRegistry.get(task).output_features
      assert all(feature.vocabulary is vocabulary for feature in features.values())
  assert T5_VOCABULARY.extra_ids == 100


@pytest.mark.parametrize("name", ["glue_cola", "c4_lm"])
def test_a_dataset_that_is_not_there_is_named_with_the_command_that_makes_it(name, tmp_path):
  source = seqio.TaskRegistry.get(name).source
  source.tfds_dataset.override_data_dir(str(tmp_path))
  dataset = {"glue_cola": "glue/cola", "c4_lm": "c4/en"}[name]
  try:
    for look in (source.list_shards, source.num_input_examples, source.get_dataset):
      with pytest.raises(AnystepError) as caught:
        look("train")
      assert (caught.value.code, caught.value.kind) == (66, "dataset_missing")
      assert caught.value.fields["dataset"].startswith(f"{dataset}:")
      assert str(tmp_path / dataset) in caught.value.fields["expected"]
      assert f"tfds build {dataset}`" in caught.value.fix
  finally:
    source.tfds_dataset.override_data_dir(None)
  assert list(tmp_path.iterdir()) == []


def test_the_cache_job_ends_with_that_error_before_it_writes_anything(tmp_path):
  rte = seqio.TaskRegistry.get("glue_rte")
  # As T5's: SeqIO's own source finds splits on disk.
  stock = seqio.Task(
    "stock_rte",
    source=seqio.TfdsDataSource("glue/rte:2.0.0"),
    preprocessors=rte.preprocessors,
    output_features=rte.output_features,
  )
  with registered(stock):
    for name in ("glue_rte", stock.name):
      with pytest.raises(AnystepError) as caught:
        run_job(tmp_path / "cache", f"--tfds_data_dir={tmp_path}", tasks=name)
      assert (caught.value.code, caught.value.kind) == (66, "dataset_missing")
      assert "tfds build glue/rte`" in caught.value.fix
  assert not list(tmp_path.rglob("*rte*"))


def test_the_document_has_a_row_for_every_task_and_mixture_and_no_other():
  rows = [line.split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
  documented = {}
  for row in rows:
    module = re.search(r"`anystep\.tasks\.(\w+)`", row[1]).group(1)
    documented.update(dict.fromkeys(re.findall(r"`(\w+)`", row[0]), module))
    assert len(row) == 5
    assert all(cell.strip(" |") for cell in row)
  assert documented == names_by_module()


def names_by_module():
  """By task and mixture, the module that registers it."""
  starts = {"arithmetic": "arithmetic_", "super_glue": "super_glue_", "glue": "glue_", "wmt": "wmt14_ende"}
  starts |= {"c4": "c4_", "copying": ("copy_", "reverse_"), "stdlib": "stdlib_"}
  names = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  of_t5 = re.compile(r".*(_v\d+|_architecture)")
  return {
    name: module
    for module, start in starts.items()
    for name in names
    if name.startswith(start) and not of_t5.match(name)
  }
