"""Metric functions in SeqIO's form: of `(targets, predictions)` or `(targets, scores)`, in example order.

Those of benchmarks are in percent, as benchmarks and the package t5 report them.
"""

from __future__ import annotations

import collections
import math
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import editdistance
import numpy as np

from anystep.errors import make_package_error

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def edit_similarity(targets: Sequence[str], predictions: Sequence[str]) -> Mapping[str, float]:
  """Mean of 1 - Levenshtein distance ÷ the longer length, in percent.

  >>> edit_similarity(["abcd", "x"], ["abxd", "x"])
  {'edit_similarity': 87.5}
  """
  similarities = [
    1 - editdistance.eval(target, prediction) / max(len(target), len(prediction), 1)
    for target, prediction in zip(targets, predictions, strict=True)
  ]
  return {"edit_similarity": float(100 * np.mean(similarities))}


def log_likelihood(targets: Sequence[object], scores: Sequence[float]) -> Mapping[str, float]:
  """Mean log-likelihood of an example's target sequence, in nats.

  >>> log_likelihood(["a", "b"], [-2.0, -4.0])
  {'log_likelihood': -3.0}
  """
  del targets
  return {"log_likelihood": float(np.mean(scores))}


def bits_per_byte(targets: Sequence[str], scores: Sequence[float]) -> Mapping[str, float]:
  """Bits that the model needs for a byte of the targets' text.

  >>> bits_per_byte(["ab", "cdef"], [-6 * math.log(2), -6 * math.log(2)])
  {'bits_per_byte': 2.0}
  """
  num_bytes = sum(len(target.encode()) for target in targets)
  return {"bits_per_byte": -float(np.sum(scores)) / math.log(2) / max(num_bytes, 1)}


def accuracy(targets: Sequence[object], predictions: Sequence[object]) -> Mapping[str, float]:
  """Percent of predictions that are their targets.

  >>> accuracy([1, 0, 2, 1], [1, 0, -1, 1])
  {'accuracy': 75.0}
  """
  return {"accuracy": _percent_equal(targets, predictions)}


def sequence_accuracy(targets: Sequence[str], predictions: Sequence[str]) -> Mapping[str, float]:
  """Percent of predicted texts that are their targets from end to end.

  >>> sequence_accuracy(["46", "12"], ["46", "21"])
  {'sequence_accuracy': 50.0}
  """
  return {"sequence_accuracy": _percent_equal(targets, predictions)}


def f1(targets: Sequence[int], predictions: Sequence[int]) -> Mapping[str, float]:
  """F1 of class 1 in percent, where a prediction that is neither 0 nor 1 counts as the wrong one.

  >>> f1([1, 1, 0, 0], [1, -1, 0, -1])
  {'f1': 50.0}
  """
  wanted, got = _same_length(targets, predictions)
  got = np.where((got == 0) | (got == 1), got, 1 - wanted)
  return {"f1": 100 * _f1_of_class(wanted, got, 1)}


def mean_class_f1(
  targets: Sequence[int], predictions: Sequence[int], *, num_classes: int
) -> Mapping[str, float]:
  """Mean of the classes' F1, in percent; a class that is neither wanted nor predicted has 0.

  >>> mean_class_f1([0, 1, 2], [0, 1, 1], num_classes=3)["mean_3class_f1"]
  55.55555555555555
  """
  wanted, got = _same_length(targets, predictions)
  scores = [_f1_of_class(wanted, got, label) for label in range(num_classes)]
  return {f"mean_{num_classes}class_f1": 100 * float(np.mean(scores))}


def matthews_corrcoef(targets: Sequence[int], predictions: Sequence[int]) -> Mapping[str, float]:
  """Matthews' correlation of classes in percent, for two or more of them; 0 where one side has one alone.

  Source: Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation coefficient".

  >>> matthews_corrcoef([1, 1, 0, 0], [1, 0, 0, 0])["matthews_corrcoef"]
  57.73502691896258
  """
  wanted, got = _same_length(targets, predictions)
  classes = np.unique(np.concatenate([wanted, got]))
  wanted_counts, got_counts = (np.array([(side == k).sum() for k in classes]) for side in (wanted, got))
  size, hits = len(wanted), int((wanted == got).sum())
  covariance = hits * size - int(wanted_counts @ got_counts)
  variances = [size**2 - int(counts @ counts) for counts in (wanted_counts, got_counts)]
  correlation = covariance / math.sqrt(math.prod(variances)) if all(variances) else 0.0
  return {"matthews_corrcoef": 100 * correlation}


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Mapping[str, float]:
  """Pearson's correlation in percent; not a number where one side does not vary.

  >>> pearson_corrcoef([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
  {'pearson_corrcoef': 100.0}
  """
  return {"pearson_corrcoef": 100 * _correlation(*_same_length(targets, predictions))}


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Mapping[str, float]:
  """Spearman's correlation in percent, by mean ranks; not a number where one side does not vary.

  >>> spearman_corrcoef([1.0, 2.0, 3.0], [2.0, 4.0, 60.0])
  {'spearman_corrcoef': 100.0}
  """
  wanted, got = _same_length(targets, predictions)
  return {"spearman_corrcoef": 100 * _correlation(_ranks(wanted), _ranks(got))}


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> Mapping[str, float]:
  """Exact match and F1 of words in percent, as SQuAD's script has them: of each answer's best.

  Case, punctuation, articles and spacing do not count (Rajpurkar et al. 2016, section 6.1).

  Args:
    targets: the right answers of each example, one or more.
    predictions: one answer each.

  >>> squad([["the Kiwi", "a bird"], ["ten"]], ["Kiwi!", "ten or so"])
  {'em': 50.0, 'f1': 75.0}
  """
  matches, scores = [], []
  for answers, prediction in zip(targets, predictions, strict=True):
    words = _answer_words(prediction)
    answers_words = [_answer_words(answer) for answer in answers]
    matches.append(words in answers_words)
    scores.append(max(_f1_of_words(answer, words) for answer in answers_words))
  return {"em": 100 * float(np.mean(matches)), "f1": 100 * float(np.mean(scores))}


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> Mapping[str, float]:
  """Corpus BLEU of the package sacrebleu, international tokenization, exponential smoothing.

  Source: Post 2018, https://aclanthology.org/W18-6319; its signature is
  `nrefs:1|case:mixed|eff:no|tok:intl|smooth:exp`.

  Raises:
    AnystepError: 78 `package_missing` without sacrebleu.
  """
  try:
    import sacrebleu
  except ModuleNotFoundError as error:
    raise make_package_error(error, expected="sacreBLEU, for the metric bleu", package="sacrebleu") from error
  score = sacrebleu.corpus_bleu(list(predictions), [list(targets)], tokenize="intl", smooth_method="exp")
  return {"bleu": float(score.score)}


def _same_length(targets: Sequence[Any], predictions: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
  """Both as arrays, which are as long as each other."""
  if len(targets) != len(predictions):
    raise ValueError(f"{len(targets)} targets, but {len(predictions)} predictions")
  return np.asarray(targets), np.asarray(predictions)


def _percent_equal(targets: Sequence[object], predictions: Sequence[object]) -> float:
  return 100 * float(np.mean([t == p for t, p in zip(targets, predictions, strict=True)]))


def _f1_of_class(wanted: np.ndarray, got: np.ndarray, label: int) -> float:
  hits = int(((wanted == label) & (got == label)).sum())
  return 2 * hits / max(int((wanted == label).sum() + (got == label).sum()), 1)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
  if not np.ptp(x) or not np.ptp(y):
    return math.nan
  x, y = (side - np.mean(side, dtype=np.float64) for side in (x, y))
  return float(np.clip(float(x @ y) / math.sqrt(float(x @ x) * float(y @ y)), -1, 1))


def _ranks(values: np.ndarray) -> np.ndarray:
  """Each value's place among the sorted ones, from 1; equal values share the mean of theirs."""
  _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _answer_words(text: str) -> list[str]:
  plain = "".join(character for character in text.lower() if character not in string.punctuation)
  return _ARTICLES.sub(" ", plain).split()


def _f1_of_words(answer: Sequence[str], words: Sequence[str]) -> float:
  shared = (collections.Counter(answer) & collections.Counter(words)).total()
  return 2 * shared / max(len(answer) + len(words), 1)
