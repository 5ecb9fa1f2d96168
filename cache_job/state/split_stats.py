"""Counts over a split's examples: those of SeqIO, and histograms of lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.features.ragged import Batch, Ragged

Count = Callable[[str, int], None]
"""Function that counts work: examples, bytes, milliseconds or bad_examples, and how many of them."""


def count_nowhere(what: str, amount: int) -> None:
  """Count work where nobody reads the counts."""


# Lengths fall into bins by their number of binary digits: 0, 1, 2-3, 4-7 and so on.
_NUM_BINS = 33


class SplitStats:
  """Counts as SeqIO's `GetStats` does, batch by batch (seqio/beam_utils.py).

  Args:
    output_features: the task's.
    char_counts: whether to count characters too, for which tokens are decoded.
  """

  def __init__(self, output_features: Mapping[str, Any], *, char_counts: bool):
    self._output_features = output_features
    self._char_counts = char_counts
    self.counts: dict[str, int] = {"examples": 0}
    self.longest: dict[str, int] = {}
    self.bins: dict[str, np.ndarray] = {}

  def add(self, batch: Batch) -> None:
    """Count a batch's examples."""
    for name, feature in batch.items():
      if isinstance(feature, Ragged):
        bins = np.bincount(_find_bins(feature.lengths), minlength=_NUM_BINS)
        self.bins[name] = self.bins.get(name, 0) + bins
      if name in self._output_features:
        self._add_tokens(name, feature)
        if self._char_counts:
          self._add_characters(name, feature)
    self.counts["examples"] += len(next(iter(batch.values())))

  def document(self) -> dict[str, Any]:
    """Return the counts, to be merged with those of other ranges."""
    bins = {name: bins.tolist() for name, bins in self.bins.items()}
    return {"counts": self.counts, "longest": self.longest, "bins": bins}

  def _add_tokens(self, name: str, feature: Ragged | np.ndarray) -> None:
    """Count a feature's integers except end and padding ids; SeqIO too counts those that are no tokens."""
    values, lengths = (feature.values, feature.lengths) if isinstance(feature, Ragged) else (feature, None)
    if isinstance(values, Ragged) or values.dtype not in (np.int32, np.int64):
      return
    vocabulary = self._output_features[name].vocabulary
    counted = np.ones(values.shape, bool)
    for special in (vocabulary.eos_id, vocabulary.pad_id):
      if special is not None:
        counted &= values != special
    tokens = counted.reshape(len(values), int(np.prod(values.shape[1:]))).sum(axis=1)
    if lengths is not None:
      sums = np.concatenate([[0], np.cumsum(tokens)])
      stops = np.cumsum(lengths)
      tokens = sums[stops] - sums[stops - lengths]
    self._raise(f"{name}_tokens", tokens.sum())
    # SeqIO makes the name so, whatever the feature is called.
    longest = f"{name}_tokens".replace("tokens", "max_tokens")
    self.longest[longest] = max(self.longest.get(longest, 0), int(tokens.max(initial=0)))

  def _add_characters(self, name: str, feature: Ragged | np.ndarray) -> None:
    """Count characters of texts, and of tokens that a SentencePiece vocabulary decodes, as SeqIO does."""
    if not isinstance(feature, Ragged):
      if feature.dtype.hasobject:
        self._raise(f"{name}_chars", sum(len(text.decode()) for text in feature))
    elif _is_decoded(feature, self._output_features[name]):
      decode = self._output_features[name].vocabulary.decode_tf
      rows = (np.abs(row.astype(np.int32)) for row in feature.rows())
      self._raise(f"{name}_chars", sum(len(decode(row).numpy().decode()) for row in rows))

  def _raise(self, name: str, by: int) -> None:
    self.counts[name] = self.counts.get(name, 0) + int(by)


def join_stats(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Return the counts of several `SplitStats.document` in the same form."""
  joined: dict[str, Any] = {"counts": {}, "longest": {}, "bins": {}}
  for document in documents:
    for name, count in document["counts"].items():
      joined["counts"][name] = joined["counts"].get(name, 0) + count
    for name, count in document["longest"].items():
      joined["longest"][name] = max(joined["longest"].get(name, 0), count)
    for name, bins in document["bins"].items():
      joined["bins"][name] = np.add(joined["bins"].get(name, 0), bins)
  return joined | {"bins": {name: bins.tolist() for name, bins in joined["bins"].items()}}


def merge_stats(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Return a split's stats: SeqIO's counts, and for each sequence a histogram of its lengths."""
  joined = join_stats(documents)
  bins = {
    f"{name}_lengths": {_name_bin(k): count for k, count in enumerate(counts) if count}
    for name, counts in sorted(joined["bins"].items())
  }
  return {"examples": 0, **joined["counts"], **joined["longest"], **bins}


def _is_decoded(feature: Ragged, output_feature: Any) -> bool:
  """Tell whether SeqIO decodes a feature to count its characters."""
  import seqio

  return (
    not isinstance(feature.values, Ragged)
    and feature.values.dtype in (np.int32, np.int64)
    and output_feature.rank == 1
    and isinstance(output_feature.vocabulary, seqio.SentencePieceVocabulary)
  )


def _find_bins(lengths: np.ndarray) -> np.ndarray:
  return np.frexp(lengths.astype(np.float64))[1]


def _name_bin(number: int) -> str:
  """Return a bin's lengths as text.

  >>> [_name_bin(k) for k in range(4)]
  ['0', '1', '2-3', '4-7']
  """
  first, last = (1 << number) >> 1, max((1 << number) - 1, 0)
  return str(first) if first == last else f"{first}-{last}"
