"""A task's own metrics, as SeqIO's Evaluator computes them."""

import numpy as np
import pytest
import seqio
import tensorflow as tf

from anystep.errors import AnystepError
from anystep.tasks import metrics
from anystep.tasks.seqio_api.evaluation import ModelOutput, compute_metrics

VOCABULARY = seqio.ByteVocabulary(extra_ids=3)
TEXTS = ["one", "two words", "Drei"]
TEXTS_IN_CAPITALS = [text.upper() for text in TEXTS]
PREDICTIONS = ["ONE", "TWO WARDS", "drei "]
SCORES = np.array([-1.0, -2.5, -6.0])
LENGTHS = {"inputs": 12, "targets": 12}


def texts(split, shuffle_files, seed=None):
  del split, shuffle_files, seed
  return tf.data.Dataset.from_tensor_slices({"inputs": TEXTS, "targets": TEXTS_IN_CAPITALS})


def lowered(text, example=None, is_target=False):
  """Texts as they are compared; targets come as the task has them."""
  assert {"inputs", "targets"} <= example.keys()
  assert (text in TEXTS_IN_CAPITALS) or not is_target
  return text.strip().lower()


def accuracy(targets, predictions):
  return {"accuracy": float(np.mean([t == p for t, p in zip(targets, predictions, strict=True)]))}


def mean_score(targets, scores):
  assert len(targets) == len(scores)
  return {"mean_score": seqio.metrics.Scalar(float(np.mean(scores)))}


def task_of(*metric_fns, **arguments):
  return seqio.Task(
    "evaluated",
    source=seqio.FunctionDataSource(texts, splits=["validation"]),
    preprocessors=[
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos,
    ],
    output_features={name: seqio.Feature(VOCABULARY) for name in LENGTHS},
    metric_fns=metric_fns,
    **arguments,
  )


def examples_of(task):
  return list(task.get_dataset(LENGTHS, "validation", use_cached=False, shuffle=False).as_numpy_iterator())


def token_ids():
  ids = np.zeros([len(PREDICTIONS), LENGTHS["targets"]], np.int32)
  for row, text in enumerate(PREDICTIONS):
    tokens = [*VOCABULARY.encode(text), VOCABULARY.eos_id]
    ids[row, : len(tokens)] = tokens
  return ids


OUTPUTS = {ModelOutput.PREDICTION: token_ids(), ModelOutput.SCORE: SCORES}


def test_metrics_are_those_of_seqio_s_evaluator():
  task = task_of(accuracy, mean_score, metrics.edit_similarity, postprocess_fn=lowered)
  seqio.TaskRegistry.add_provider(task.name, task)
  try:
    evaluator = seqio.Evaluator(
      task.name, seqio.EncDecFeatureConverter(pack=False), sequence_length=LENGTHS, num_examples=None
    )

    def outputs(values):
      return lambda dataset: [(int(k), values[int(k)]) for k, _ in dataset.as_numpy_iterator()]

    expected, _ = evaluator.evaluate(
      compute_metrics=True, step=0, predict_fn=outputs(token_ids()), score_fn=outputs(SCORES)
    )
    expected = expected.result()[task.name]
  finally:
    seqio.TaskRegistry.remove(task.name)
  computed = compute_metrics(task, examples_of(task), OUTPUTS)
  assert computed == {name: getattr(value, "value", value) for name, value in expected.items()}
  assert computed.keys() == {"accuracy", "mean_score", "edit_similarity"}


def test_metrics_see_texts_after_the_task_s_postprocessing():
  assert compute_metrics(task_of(accuracy), examples_of(task_of()), OUTPUTS) == {"accuracy": 1 / 3}
  task = task_of(accuracy, mean_score)
  named = compute_metrics(task, examples_of(task_of()), OUTPUTS, prefixes={ModelOutput.PREDICTION: "forced/"})
  assert named.keys() == {"forced/accuracy", "mean_score"}
  lower = task_of(accuracy, mean_score, postprocess_fn=lowered)
  assert compute_metrics(lower, examples_of(lower), OUTPUTS) == {
    "accuracy": pytest.approx(2 / 3),
    "mean_score": pytest.approx(SCORES.mean()),
  }


def test_metrics_may_be_computed_again_of_other_outputs():
  """A metric object keeps nothing of an earlier evaluation."""
  task = task_of(accuracy, mean_score)
  examples = examples_of(task)
  first = compute_metrics(task, examples, OUTPUTS)
  fewer = {kind: values[1:] for kind, values in OUTPUTS.items()}
  assert compute_metrics(task, examples[1:], fewer) == {"accuracy": 0, "mean_score": pytest.approx(-4.25)}
  assert compute_metrics(task, examples, OUTPUTS) == first


def test_a_task_without_metrics_has_none():
  assert compute_metrics(task_of(), examples_of(task_of()), OUTPUTS) == {}


def test_a_name_that_two_metrics_give_is_refused():
  def other(targets, predictions):
    return {"other": 1.0, "accuracy": 0.0}

  with pytest.raises(AnystepError) as caught:
    compute_metrics(task_of(accuracy, other), examples_of(task_of()), OUTPUTS)
  assert (caught.value.code, caught.value.kind) == (78, "metric_name")
  assert caught.value.fields == {"task": "evaluated", "got": ["accuracy"]}


@pytest.mark.parametrize("part", ["metric", "postprocessor"])
def test_a_metric_that_raises_is_named_with_its_task(part):
  def unlabelled(targets, predictions):
    raise ValueError("no labels\n\nat all")

  def unreadable(text, example, is_target):
    raise ValueError("no labels at all")

  task = task_of(accuracy, unlabelled) if part == "metric" else task_of(accuracy, postprocess_fn=unreadable)
  with pytest.raises(AnystepError) as caught:
    compute_metrics(task, examples_of(task), OUTPUTS)
  assert (caught.value.code, caught.value.kind) == (78, "metric_failed")
  assert caught.value.fields == {
    "task": "evaluated",
    "metric": "unlabelled" if part == "metric" else "accuracy",
    "got": "ValueError: no labels at all",
  }


def test_an_output_that_nobody_made_is_refused():
  def with_auxiliary(targets, predictions, aux_values):
    return {}

  with pytest.raises(AnystepError) as caught:
    compute_metrics(task_of(with_auxiliary), examples_of(task_of()), OUTPUTS)
  assert (caught.value.code, caught.value.kind) == (78, "metric_output")
  assert caught.value.fields == {
    "task": "evaluated",
    "expected": "prediction or score",
    "got": "prediction_with_aux",
  }
