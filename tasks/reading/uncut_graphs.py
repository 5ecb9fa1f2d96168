"""Tokens that preprocessors in a graph cut to fit feature lengths: found by running them with longer ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import seqio

from anystep.features.feature import Feature
from anystep.features.ragged import Batch, Ragged, as_sequences
from anystep.limits import is_count
from anystep.tasks.reading.preprocessor_graph import PreprocessorGraph, Seeds

# Room for end tokens and sentinels beside an example's own tokens.
_ADDED_TOKENS = 16


class UncutGraphs:
  """A task's preprocessors with feature lengths so long that they cut nothing.

  Args:
    task: the task.
    preprocessors: the preprocessors after the cache.
    features: features of the cached examples.
    feature_lengths: SeqIO's `sequence_length`, which the lengths exceed.
  """

  def __init__(
    self,
    task: seqio.Task,
    preprocessors: Sequence[Any],
    features: Mapping[str, Feature],
    feature_lengths: Mapping[str, Any],
  ):
    self._task = task
    self._preprocessors = preprocessors
    self._features = features
    self._feature_lengths = feature_lengths
    self._runs: dict[int, Callable | None] = {}

  def count_cut_tokens(
    self, batch: Batch, seeds: Seeds, results: Batch, rows: np.ndarray
  ) -> np.ndarray | None:
    """Return how many tokens fewer examples have than with longer lengths, `(examples,) int64`.

    Args:
      batch: the cached examples.
      seeds: their seeds.
      results: what came of those that are kept, with the feature lengths.
      rows: the rows of the kept ones in the batch, `(kept,) int64`.

    Returns:
      The numbers, 0 for examples that are not kept; None where the preprocessors take no longer lengths.
    """
    # A power of two, so that batches share a graph.
    tokens = 1 << (_count_longest(batch) + _ADDED_TOKENS).bit_length()
    run = self._run_of(tokens)
    if run is None:
      return None
    try:
      uncut, uncut_rows = run(batch, seeds)
    except Exception:
      self._runs[tokens] = None
      return None
    num_examples = len(next(iter(batch.values())))
    totals = np.zeros((2, num_examples), np.int64)
    for total, examples, of_batch in zip(totals, (results, uncut), (rows, uncut_rows), strict=True):
      for name in self._feature_lengths:
        feature = as_sequences(examples[name]) if name in examples else None
        if isinstance(feature, Ragged):
          np.add.at(total, of_batch, feature.lengths)
    is_kept = np.isin(np.arange(num_examples), rows)
    return np.where(is_kept, np.maximum(totals[1] - totals[0], 0), 0)

  def _run_of(self, tokens: int) -> Callable | None:
    """Return a function that runs the preprocessors with lengths of at least so many tokens.

    None where they fail with them: with other lengths than a user has chosen, user code may raise anything,
    as span corruption does that has too few sentinels.
    """
    if tokens not in self._runs:
      longer = {
        name: max(length, tokens) if is_count(length) else length
        for name, length in self._feature_lengths.items()
      }
      try:
        graph = PreprocessorGraph(self._task, self._preprocessors, self._features, longer)
        self._runs[tokens] = graph.one_by_one(len(self._preprocessors))
      except Exception:
        self._runs[tokens] = None
    return self._runs[tokens]


def _count_longest(batch: Batch) -> int:
  """Return a number of tokens that no example of a batch exceeds, all features together."""
  longest = 0
  for feature in batch.values():
    if isinstance(feature, Ragged) and not isinstance(feature.values, Ragged):
      texts = feature.values.dtype.hasobject
      longest += max(feature.lengths.max(initial=0), max(map(len, feature.values), default=0) if texts else 0)
    elif isinstance(feature, np.ndarray) and feature.dtype.hasobject:
      # A text has no more tokens than bytes.
      longest += max((len(text) for text in feature.reshape(-1)), default=0)
  return int(longest)
