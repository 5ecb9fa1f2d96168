"""T5's own tasks and mixtures, unmodified but for source and vocabulary file, from the cache job to metrics.

What SeqIO itself makes of the examples is the oracle. A sample runs always; `pytest -m soak -s` on this file
takes all of them and prints k of n.
"""

import collections
import contextlib
import functools
import json

import job_runs
import numpy as np
import pytest
import seqio
import t5_tasks
from t5_examples import NAMES, NOUNS
from t5_oracle import AT_END, LENGTHS, converter_of, lengths_of, seqio_split

import anystep
from anystep.errors import AnystepError
from anystep.features.ragged import Ragged
from anystep.plans.plan import PADDING_TASK
from anystep.tasks.reading.task_reader import TaskReader
from anystep.tasks.seqio_api.converters import native_converter
from anystep.tasks.seqio_api.deterministic_task import open_cached_tasks
from anystep.tasks.seqio_api.evaluation import ModelOutput, compute_metrics

BATCH_SIZE = 8
MIXTURE_STEPS = 6
# What the cache job has to be told of a task, besides --cache_at=end for those of AT_END.
FLAGS = {
  # The test split has no answers, of which the task makes its examples.
  "trivia_qa_v010": ["--splits=train,validation"],
  # It joins pieces by twos, and raises where a source shard's last one is left alone.
  "c4_prefix_lm_objective_encoder_decoder_architecture": ["--max_bad_examples=100"],
}
SAMPLE = {
  "c4_v220_span_corruption": "train",
  "squad_v010_allanswers": "train",
  "super_glue_multirc_v102_1_sentinel": "validation",
  "super_glue_record_v102": "validation",
}
# Where predicting each example's target does not give 100 in each metric.
NOT_PERFECT = {
  "glue_wnli_v002_simple_eval": "its metric asks for the label: whether the target is the right noun",
  "squad_v010": "deprecated in t5: its metric takes the letters of a target for answers",
  "super_glue_wsc_v102_simple_1_sentinel_eval": "as glue_wnli_v002_simple_eval",
  "super_glue_wsc_v102_simple_eval": "as glue_wnli_v002_simple_eval",
}


@pytest.fixture(scope="module")
def names():
  with t5_tasks.registered() as registered:
    yield registered


@pytest.fixture(scope="module")
def cache_dir(names, tmp_path_factory):
  """A root of caches, in which SeqIO's rate functions look for examples to count."""
  root = tmp_path_factory.mktemp("t5")
  before = list(seqio.utils.get_global_cache_dirs())
  seqio.set_global_cache_dirs([str(root)])
  yield root
  seqio.set_global_cache_dirs(before)


def drawn_by(reader):
  """Model features that SeqIO would draw otherwise."""
  return ("encoder_input_tokens",) if reader.is_random else ()


def flags_of(task):
  """What the cache job has to be told."""
  flags = list(FLAGS.get(task.name, ()))
  if task.name in AT_END:
    lengths = json.dumps(lengths_of(task))
    flags += ["--cache_at=end", f"--task_feature_lengths={lengths}"]
  return flags


def make_caches(tasks, cache_dir, *flags):
  for task in tasks:
    job_runs.run_job(cache_dir, *flags_of(task), *flags, tasks=task.name)


def splits_of(task):
  """The splits that are cached."""
  named = [
    flag.removeprefix("--splits=") for flag in FLAGS.get(task.name, ()) if flag.startswith("--splits=")
  ]
  return named[0].split(",") if named else list(task.splits)


def stream_of(task, cache, reader, **options):
  """An epoch of one task."""
  transforms = {task.name: reader}
  plan = anystep.Plan.start(
    cache,
    batch_size=BATCH_SIZE,
    feature_lengths=lengths_of(task),
    num_epochs=1,
    transforms=transforms,
    **options,
  )
  converter = native_converter(converter_of(task))
  return anystep.open_stream(plan, {task.name: cache}, transforms=transforms, feature_converter=converter)


def real_rows(stream):
  """The rows of a stream that ends, one after the other."""
  for step, batch in enumerate(stream):
    for row in np.flatnonzero(stream.plan.batch(step).task != PADDING_TASK):
      yield {name: feature[row] for name, feature in batch.items()}


def check_same(found, expected, *, drawn=()):
  """Examples or rows are the same, but for what is drawn in features of those names."""
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    same_type = isinstance(value, bytes) or found[name].dtype == value.dtype
    assert same_type, name
    if name in drawn:
      assert np.count_nonzero(found[name]) == np.count_nonzero(value), name
    else:
      assert np.asarray(found[name]).tolist() == np.asarray(value).tolist(), name


def segments(row):
  """The examples in a packed row, each as its features' sequences."""
  tokens = {"encoder": "encoder_input_tokens", "decoder": "decoder_target_tokens"}
  ids = {}
  for name in row:
    stem = name.removesuffix("_segment_ids")
    # A task that makes a model's features has such a feature too: tokens like others.
    if stem != name and f"{name}_segment_ids" not in row:
      ids[stem if stem in row else tokens[stem]] = row[name]
  for segment in range(1, 1 + max(own.max() for own in ids.values())):
    yield {name: row[name][own == segment] for name, own in ids.items()}


def sequences(example):
  """An example's sequences under the names that they have in packed rows."""
  tokens = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
  return {tokens[name]: example[name] for name in LENGTHS if name in example} or example


def tally(examples, *, drawn=()):
  """How often which sequences come; of what is drawn, the length counts."""

  def known(name, tokens):
    return (name, len(tokens) if name in drawn else tuple(tokens.tolist()))

  return collections.Counter(tuple(known(*item) for item in sorted(e.items())) for e in examples)


def check_task(task, cache_dir):
  """From the cache job to metrics."""
  make_caches([task], cache_dir)
  for split in splits_of(task):
    check_split(task, split, cache_dir)


def check_split(task, split, cache_dir):
  """From the cache to metrics."""
  expected = seqio_split(task.name, split)
  cache = anystep.open_cache(cache_dir, task.name, split)
  cache.verify()
  assert len(cache) == len(expected.cached) > 0
  for index, example in enumerate(expected.cached):
    check_same(cache[index], example)
  reader = TaskReader(task, cache, lengths_of(task))
  check_rows(task, cache, reader, expected)
  if task.metric_objs and t5_tasks.has_labels(task, split):
    check_metrics(task, cache, reader)


def check_rows(task, cache, reader, expected):
  """An epoch has SeqIO's rows in the cache's order, and packed, each of its examples once."""
  drawn = drawn_by(reader)
  with stream_of(task, cache, reader) as stream:
    rows = list(real_rows(stream))
  assert len(rows) == len(expected.rows)
  for row, of_seqio in zip(rows, expected.rows, strict=True):
    check_same(row, of_seqio, drawn=drawn)
  if drawn:
    # All that t5 draws at reading: which part of the inputs is kept.
    whole = [example["inputs"].tobytes() for example in expected.cached]
    kept = [tokens[tokens > 0][:-1].tobytes() for tokens in (row["encoder_input_tokens"] for row in rows)]
    assert all(any(part in inputs for inputs in whole) for part in kept)
  with stream_of(task, cache, reader, packing="best_fit") as stream:
    packed = list(real_rows(stream))
  assert len(packed) <= len(rows)
  found = [segment for row in packed for segment in segments(row)]
  assert tally(found, drawn=drawn) == tally(map(sequences, expected.read), drawn=drawn)


def check_metrics(task, cache, reader):
  """The task's metrics are t5's own functions of its own postprocessing."""
  with stream_of(task, cache, reader) as stream:
    batches = [stream.examples(stream.plan.batch(step))[0] for step in range(stream.plan.num_steps)]
  examples = [example for batch in batches for example in examples_of(batch)]
  own = [example["targets"] for example in examples]
  # Every third prediction is another example's.
  guesses = [own[(k + (k % 3 == 0)) % len(own)] for k in range(len(own))]
  best = metrics_of(task, examples, own)
  assert np.isfinite([*best.values(), *metrics_of(task, examples, guesses).values()]).all()
  assert task.name in NOT_PERFECT or list(best.values()) == pytest.approx([100] * len(best))


def metrics_of(task, examples, predicted):
  """The task's metrics of some predictions, as t5's functions give them too."""
  tokens = Ragged.of_rows(predicted, np.dtype(np.int32), ()).to_padded(LENGTHS["targets"])
  vocabulary = task.output_features["targets"].vocabulary
  texts = [example["targets_pretokenized"].decode() for example in examples]
  postprocess = task.postprocessor or (lambda text, **_: text)
  targets = [postprocess(t, example=e, is_target=True) for t, e in zip(texts, examples, strict=True)]
  predictions = [
    postprocess(vocabulary.decode(row.tolist()), example=e, is_target=False)
    for row, e in zip(tokens, examples, strict=True)
  ]
  expected = {}
  with rouge_seed():
    for metric in task.metric_fns:
      expected |= metric(targets, predictions)
  with rouge_seed():
    computed = compute_metrics(task, examples, {ModelOutput.PREDICTION: tokens})
  assert computed == expected
  return computed


@contextlib.contextmanager
def rouge_seed():
  """Rouge's confidence intervals draw from numpy's global generator."""
  state = np.random.get_state()
  np.random.seed(0)
  yield
  np.random.set_state(state)


def examples_of(batch):
  columns = {name: f.rows() if isinstance(f, Ragged) else f for name, f in batch.items()}
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check_mixture(mixture):
  """Steps at the mixture's own rates: each row, packed or not, is its task's row."""
  cached = open_cached_tasks(mixture, "train", LENGTHS)
  expected = {name: seqio_split(name, "train") for name in cached.caches}
  plan = cached.start_plan(batch_size=BATCH_SIZE)
  (segment,) = plan.segments
  rates = {name: mixture.get_rate(seqio.TaskRegistry.get(name)) for name in cached.caches}
  assert {name: float(task.rate) for name, task in segment.tasks.items()} == rates
  converter = native_converter(seqio.EncDecFeatureConverter(pack=False))
  with cached.open_stream(plan, slice(None), feature_converter=converter) as stream:
    for step in range(MIXTURE_STEPS):
      planned, batch = plan.batch(step), stream.batch(step)
      for row in range(BATCH_SIZE):
        name, unit = plan.task_names[planned.task[row]], int(planned.unit[row])
        drawn = drawn_by(cached.readers[name])
        if planned.epoch[row] == 0:
          found = {key: feature[row] for key, feature in batch.items()}
          check_same(found, expected[name].rows[unit], drawn=drawn)
  plan = cached.start_plan(batch_size=BATCH_SIZE, packing="greedy")
  with cached.open_stream(plan, slice(None), feature_converter=converter) as stream:
    for step in range(MIXTURE_STEPS):
      planned, batch = plan.batch(step), stream.batch(step)
      for row in range(BATCH_SIZE):
        name = plan.task_names[planned.task[row]]
        drawn = drawn_by(cached.readers[name])
        found = tally(segments({key: feature[row] for key, feature in batch.items()}), drawn=drawn)
        assert found <= tally(map(sequences, expected[name].read), drawn=drawn), (name, step, row)


@pytest.mark.parametrize(("name", "split"), SAMPLE.items())
def test_a_task_goes_from_its_source_to_its_metrics(name, split, cache_dir):
  task = seqio.TaskRegistry.get(name)
  make_caches([task], cache_dir, f"--splits={split}")
  check_split(task, split, cache_dir)


def test_a_mixture_is_mixed_at_its_own_rates(cache_dir):
  mixture = seqio.MixtureRegistry.get("wsc_dpr_simple_proportional")
  make_caches([task for task in mixture.tasks if "train" in task.splits], cache_dir, "--splits=train")
  check_mixture(mixture)


def test_scores_of_choices_are_ranked(cache_dir):
  """T5's rank classification: an example for each choice, told apart by `idx`, of rank 1."""
  from t5.data import postprocessors, preprocessors
  from t5.evaluation import metrics

  copa = t5_tasks.SyntheticSource("super_glue/copa")

  def in_one_shard(split, shuffle_files, seed=None):
    """The preprocessor numbers the examples of a source shard."""
    del shuffle_files, seed
    return copa.get_dataset(split)

  ranked = functools.partial(
    preprocessors.rank_classification_formatter,
    inputs_formats="{premise} What is the {question}?",
    targets_formats=["I think {choice1}", "I think {choice2}"],
  )
  task = seqio.Task(
    "t5_copa_ranked",
    source=seqio.FunctionDataSource(in_one_shard, splits=["validation"]),
    preprocessors=[
      ranked,
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos,
    ],
    output_features=seqio.TaskRegistry.get("super_glue_copa_v102").output_features,
    postprocess_fn=postprocessors.rank_classification,
    metric_fns=[functools.partial(metrics.rank_classification, num_classes=2)],
  )
  with job_runs.registered(task):
    make_caches([task], cache_dir)
  cache = anystep.open_cache(cache_dir, task.name, "validation")
  with stream_of(task, cache, TaskReader(task, cache, LENGTHS)) as stream:
    batches = [stream.examples(stream.plan.batch(step))[0] for step in range(stream.plan.num_steps)]
  examples = [example for batch in batches for example in examples_of(batch)]
  assert sorted(tuple(e["idx"]) for e in examples) == [(k, choice) for k in range(31) for choice in range(2)]
  right = np.array([float(e["is_correct"]) for e in examples])
  assert compute_metrics(task, examples, {ModelOutput.SCORE: right}) == pytest.approx(
    {"accuracy": 100, "f1": 100, "auc-roc": 100, "auc-pr": 100}
  )
  assert compute_metrics(task, examples, {ModelOutput.SCORE: -right})["accuracy"] == 0


@pytest.mark.long
def test_mixtures_within_mixtures_and_rates_that_count_examples(cache_dir):
  from t5.data import rate_num_examples

  nested = seqio.Mixture(
    "t5_nested", [("squad_trivia_qa_equal", 2.0), ("c4_v220_span_corruption", rate_num_examples)]
  )
  make_caches(nested.tasks, cache_dir, "--splits=train")
  with job_runs.registered(nested):
    check_mixture(nested)


def test_tasks_of_the_form_before_seqio(names, cache_dir, tmp_path):
  """`t5.data.TaskRegistry`: text and token preprocessors apart, of lines of files."""
  import t5.data
  from t5.evaluation import metrics

  for file in range(2):
    rows = [f"{name} sees {file + 1}\tin the {noun}" for name in NAMES for noun in NOUNS[:3]]
    (tmp_path / f"{file}.tsv").write_text("\n".join(["inputs\ttargets", *rows]))
  task = t5.data.TextLineTask(
    "t5_lines",
    split_to_filepattern={"validation": str(tmp_path / "*.tsv")},
    skip_header_lines=1,
    text_preprocessor=functools.partial(t5.data.preprocessors.parse_tsv, field_names=["inputs", "targets"]),
    token_preprocessor=t5.data.preprocessors.trim_tokens_at_front,
    postprocess_fn=t5.data.postprocessors.lower_text,
    metric_fns=[metrics.sequence_accuracy],
    output_features=dict(seqio.TaskRegistry.get("glue_cola_v002").output_features),
  )
  with job_runs.registered(task):
    make_caches([task], cache_dir)
    check_split(task, "validation", cache_dir)


@pytest.mark.soak
@pytest.mark.parametrize("name", AT_END)
def test_what_joins_or_splits_examples_says_how_to_cache_it(name, names, tmp_path):
  task = seqio.TaskRegistry.get(name)
  job_runs.run_job(tmp_path, "--splits=validation", tasks=name)
  with pytest.raises(AnystepError) as caught:
    TaskReader(task, anystep.open_cache(tmp_path, name, "validation"), lengths_of(task))
  assert caught.value.kind == "preprocessor_not_one_to_one"
  assert caught.value.fields["task"] == name
  assert "--cache_at=end" in caught.value.fix


@pytest.mark.soak
@pytest.mark.parametrize(
  ("name", "kind", "way_out"),
  [
    ("trivia_qa_v010", "split_empty", "--splits"),
    (
      "c4_prefix_lm_objective_encoder_decoder_architecture",
      "preprocessor_failed",
      "--max_bad_examples",
    ),
  ],
)
def test_what_needs_a_flag_of_its_own_says_so(name, kind, way_out, names, tmp_path, monkeypatch):
  monkeypatch.delitem(FLAGS, name)
  with pytest.raises(AnystepError) as caught:
    make_caches([seqio.TaskRegistry.get(name)], tmp_path)
  assert caught.value.kind == kind
  assert way_out in caught.value.fix


@pytest.mark.soak
def test_every_task_and_mixture_of_t5(names, cache_dir, capsys):
  tasks, mixtures = names
  outcomes = {}
  for name in tasks:
    outcomes[name] = outcome(check_task, seqio.TaskRegistry.get(name), cache_dir)
  for name in mixtures:
    outcomes[name] = outcome(check_mixture, seqio.MixtureRegistry.get(name))
  failed = {name: how for name, how in outcomes.items() if how is not None}
  with capsys.disabled():
    print()
    for kind, own in (("tasks", tasks), ("mixtures", mixtures)):
      print(f"{sum(outcomes[name] is None for name in own)} of {len(own)} {kind}")
    for name in sorted({*AT_END, *FLAGS}):
      print(f"{name} needs {' '.join(flags_of(seqio.TaskRegistry.get(name)))}")
    for name, how in failed.items():
      print(f"{name} fails: {how}")
  assert not failed


def outcome(check, *arguments):
  """None, or how it fails, in one line."""
  try:
    check(*arguments)
  except Exception as error:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
  return None
