"""Metric functions in SeqIO's form: of `(targets, predictions)` or `(targets, scores)`, in example order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import editdistance
import numpy as np


def edit_similarity(targets: Sequence[str], predictions: Sequence[str]) -> Mapping[str, float]:
  """Mean of 1 - Levenshtein distance ÷ the longer length.

  >>> edit_similarity(["abcd", "x"], ["abxd", "x"])
  {'edit_similarity': 0.875}
  """
  similarities = [
    1 - editdistance.eval(target, prediction) / max(len(target), len(prediction), 1)
    for target, prediction in zip(targets, predictions, strict=True)
  ]
  return {"edit_similarity": float(np.mean(similarities))}


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
