"""Metric functions."""

import functools
import math
import sys
import warnings

import numpy as np
import pytest
import t5.evaluation.metrics as t5_metrics

from anystep.errors import AnystepError
from anystep.tasks import metrics
from anystep.tasks.metrics import bits_per_byte, edit_similarity, log_likelihood

WORDS = ["the", "a", "Kiwi", "bird", "birds", "ten.", "don't", "Ünder", "-", "an", "x,y"]


@pytest.mark.parametrize(
  ("targets", "predictions", "expected"),
  [
    (["abc"], ["abc"], 1),
    (["abc"], ["xyz"], 0),
    (["abc"], [""], 0),
    ([""], [""], 1),
    (["kitten"], ["sitting"], 1 - 3 / 7),
    (["sitting"], ["kitten"], 1 - 3 / 7),
    (["üü"], ["üx"], 1 / 2),
    (["abcd", "x", "", "kitten"], ["abxd", "x", "y", "sitting"], (1 - 1 / 4 + 1 + 0 + 1 - 3 / 7) / 4),
  ],
)
def test_edit_similarity_is_the_mean_share_of_characters_kept(targets, predictions, expected):
  assert edit_similarity(targets, predictions) == {"edit_similarity": pytest.approx(100 * expected)}


def test_edit_similarity_refuses_predictions_of_another_number():
  with pytest.raises(ValueError, match="shorter"):
    edit_similarity(["a", "b"], ["a"])


@pytest.mark.parametrize(("scores", "expected"), [([-2.0], -2), ([-2.0, -4.0, 0.0], -2)])
def test_log_likelihood_is_the_mean_score(scores, expected):
  assert log_likelihood(["x"] * len(scores), scores) == {"log_likelihood": pytest.approx(expected)}


@pytest.mark.parametrize(
  ("targets", "scores", "expected"),
  [
    (["a"], [-8 * math.log(2)], 8),
    (["abcd", ""], [-8 * math.log(2), -4 * math.log(2)], 3),
    (["é"], [-8 * math.log(2)], 4),
    (["abc"], [0.0], 0),
    ([""], [-math.log(2)], 1),
  ],
)
def test_bits_per_byte_divides_all_bits_by_the_bytes_of_the_texts(targets, scores, expected):
  assert bits_per_byte(targets, scores) == {"bits_per_byte": pytest.approx(expected)}


def labels(rng, size, *, classes, invalid=False):
  return rng.integers(-1 if invalid else 0, classes, size).tolist()


def texts(rng, size, *, shortest=0):
  return [" ".join(rng.choice(WORDS, rng.integers(shortest, 6))) for _ in range(size)]


def answers(rng, size):
  return [texts(rng, rng.integers(1, 4)) for _ in range(size)]


def numbers(rng, size):
  # Fifths, as those of STS-B: many ties.
  return (rng.integers(0, 26, size) / 5).tolist()


# Ours, the same of the package t5, targets, predictions.
AS_T5 = {
  "accuracy": (
    metrics.accuracy,
    t5_metrics.accuracy,
    functools.partial(labels, classes=3),
    functools.partial(labels, classes=3, invalid=True),
  ),
  "sequence_accuracy": (metrics.sequence_accuracy, t5_metrics.sequence_accuracy, texts, texts),
  "f1": (
    metrics.f1,
    t5_metrics.f1_score_with_invalid,
    functools.partial(labels, classes=2),
    functools.partial(labels, classes=4, invalid=True),
  ),
  "mean_class_f1": (
    functools.partial(metrics.mean_class_f1, num_classes=3),
    t5_metrics.mean_multiclass_f1(num_classes=3),
    functools.partial(labels, classes=3),
    functools.partial(labels, classes=3, invalid=True),
  ),
  "matthews_corrcoef": (
    metrics.matthews_corrcoef,
    t5_metrics.sklearn_metrics_wrapper("matthews_corrcoef", metric_post_process_fn=lambda x: 100 * x),
    functools.partial(labels, classes=2),
    functools.partial(labels, classes=2, invalid=True),
  ),
  "pearson_corrcoef": (metrics.pearson_corrcoef, t5_metrics.pearson_corrcoef, numbers, numbers),
  "spearman_corrcoef": (metrics.spearman_corrcoef, t5_metrics.spearman_corrcoef, numbers, numbers),
  "squad": (metrics.squad, t5_metrics.squad, answers, texts),
  "bleu": (metrics.bleu, t5_metrics.bleu, functools.partial(texts, shortest=4), texts),
}


@pytest.mark.parametrize("name", AS_T5)
def test_metrics_of_benchmarks_are_t5_s_on_any_predictions(name):
  ours, theirs, targets_of, predictions_of = AS_T5[name]
  rng = np.random.default_rng(0)
  values = []
  for size in [3, 4, 5, 8, 40] * 4:
    targets, wrong = targets_of(rng, size), predictions_of(rng, size)
    right = [target[-1] for target in targets] if name == "squad" else targets
    some_right = [pair[rng.integers(2)] for pair in zip(right, wrong, strict=True)]
    for predictions in (wrong, some_right, wrong[:1] * size):
      with warnings.catch_warnings():
        # Of classes that do not occur, and of what does not vary.
        warnings.simplefilter("ignore")
        expected = theirs(targets, predictions)
      assert ours(targets, predictions) == pytest.approx(expected, nan_ok=True)
      values += expected.values()
  assert len({round(value, 6) for value in values if not math.isnan(value)}) > 10


@pytest.mark.parametrize("name", AS_T5)
def test_metrics_of_benchmarks_are_100_on_the_targets(name):
  metric, _, targets_of, _ = AS_T5[name]
  targets = targets_of(np.random.default_rng(1), 50)
  result = (
    metric([["an answer", "another"]] * 2, ["another"] * 2) if name == "squad" else metric(targets, targets)
  )
  assert list(result.values()) == [pytest.approx(100)] * len(result)


@pytest.mark.parametrize("name", [name for name in AS_T5 if name != "bleu"])
def test_metrics_of_benchmarks_refuse_predictions_of_another_number(name):
  metric, _, targets_of, predictions_of = AS_T5[name]
  rng = np.random.default_rng(2)
  with pytest.raises(ValueError, match=r"shorter|predictions"):
    metric(targets_of(rng, 4), predictions_of(rng, 3))


def test_bleu_without_its_package_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "sacrebleu", None)
  with pytest.raises(AnystepError) as caught:
    metrics.bleu(["a"], ["a"])
  assert (caught.value.code, caught.value.kind) == (78, "package_missing")
  assert caught.value.fix == "pip install sacrebleu"
  assert "sacrebleu" in caught.value.fields["got"]
