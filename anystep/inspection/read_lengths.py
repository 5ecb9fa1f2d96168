"""Lengths of examples as they are read, after what comes after the cache, and what is cut of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.features.converters import FeatureConverter, cut_lengths, joins_sequences
from anystep.features.ragged import Batch, Ragged, as_sequences
from anystep.inspection.length_counts import LengthCounts
from anystep.order.packing import PackingPolicy
from anystep.transforms.transform import Records, Transform

# A share of examples or tokens above which a cut is worth a warning.
LARGE_CUT_PERCENT = 5.0
# So many examples tell shares of 5% to within half a percent.
_SAMPLED_EXAMPLES = 4096
_LENGTHS_EXAMPLES = 1 << 20
_EXAMPLES_AT_A_TIME = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadLengths:
  """Lengths of a split's examples as they are read, and what rows' lengths cut of them.

  Attributes:
    task, split: the cache.
    feature_lengths: number of tokens that rows have for each feature.
    examples: number of the split's examples.
    counted_examples: number of those that were counted. If fewer, they are a sample: the first of a
      preshuffled cache, which are in random order, or blocks spread over a cache in layout `as_is`.
    dropped_examples: number of counted examples that are dropped after the cache.
    features: lengths by sequence feature, after what comes after the cache and before rows cut them.
    cut_examples: number of counted examples that lose a token to the feature lengths.
    tokens: number of tokens of the features with a length, in all counted examples, if nothing were cut.
    cut_tokens: number of these that are cut.
    cut_before_tokens: number of these that preprocessors cut, before rows do.
    are_joined: whether inputs and targets are cut as one sequence, so that no length is one feature's own.
    is_all_known: False where the transform may itself cut to the lengths in a way that could not be counted.
  """

  task: str
  split: str
  feature_lengths: Mapping[str, int]
  examples: int
  counted_examples: int
  dropped_examples: int
  features: Mapping[str, LengthCounts]
  cut_examples: int
  tokens: int
  cut_tokens: int
  cut_before_tokens: int
  are_joined: bool
  is_all_known: bool

  @property
  def cut_examples_percent(self) -> float:
    """Share of examples that lose a token, of those that are not dropped."""
    return 100 * self.cut_examples / max(self.counted_examples - self.dropped_examples, 1)

  @property
  def cut_tokens_percent(self) -> float:
    """Share of tokens that are cut."""
    return 100 * self.cut_tokens / max(self.tokens, 1)

  @property
  def cuts_much(self) -> bool:
    """True if more than `LARGE_CUT_PERCENT` of examples or of tokens are cut."""
    return max(self.cut_examples_percent, self.cut_tokens_percent) > LARGE_CUT_PERCENT

  @property
  def mean_tokens(self) -> float | None:
    """Mean number of tokens that rows get of an example that is not dropped; None without examples."""
    num_kept = self.counted_examples - self.dropped_examples
    return (self.tokens - self.cut_tokens) / num_kept if num_kept else None

  def describe_cut(self) -> str:
    """Return a line about what is cut, for people."""
    if not self.feature_lengths:
      return f"{self.task} {self.split}: no feature has a length, so nothing is cut"
    lengths = ", ".join(f"{name} {length:,}" for name, length in self.feature_lengths.items())
    sample = "" if self.counted_examples == self.examples else f", of {self.counted_examples:,} counted"
    cut = "no example is"
    if self.cut_examples:
      cut = f"{self.cut_examples_percent:.3g}% of examples and {self.cut_tokens_percent:.3g}% of tokens are"
    by = ""
    if self.cut_before_tokens:
      all_before = self.cut_before_tokens == self.cut_tokens
      by = ", by its preprocessors" if all_before else ", by its preprocessors and by rows"
    unknown = "" if self.is_all_known else "; what its preprocessors cut themselves is not known"
    return f"{self.task} {self.split}: {cut} cut to {lengths}{by}{sample}{unknown}"

  def to_json(self) -> dict[str, Any]:
    """Return the numbers as a JSON object."""
    counts = ("counted_examples", "dropped_examples", "cut_examples", "cut_examples_percent")
    tokens = ("tokens", "cut_tokens", "cut_tokens_percent", "is_all_known")
    return {
      **{name: getattr(self, name) for name in (*counts, *tokens)},
      "summary": self.describe_cut(),
      "feature_lengths": dict(self.feature_lengths),
      "features": {
        name: counts.to_json(None if self.are_joined else self.feature_lengths.get(name))
        for name, counts in self.features.items()
      },
    }


def count_read_lengths(
  cache: Cache,
  transform: Transform | None,
  *,
  feature_lengths: Mapping[str, int],
  all_lengths: bool = False,
  converter: FeatureConverter | None = None,
  packing: PackingPolicy = PackingPolicy.NONE,
  report: Callable[[int], None] = lambda done_examples: None,
) -> ReadLengths:
  """Count lengths of a split's examples as they are read.

  Where the transform at most cuts and appends, the cache's lengths tables say them, and up to 2**20 examples
  are counted. Else the transform runs on up to 4,096 examples, as in epoch 0.

  Args:
    cache: the task's cache.
    transform: what the task's examples go through after the cache; None for nothing.
    feature_lengths: number of tokens that rows have for each feature, by which the transform was made.
    all_lengths: whether all of the lengths tables are counted.
    converter: makes the model's features, which a prefix LM's converter cuts as one sequence; by default each
      feature is cut to its own length.
    packing: the plan's policy.
    report: called with the number of examples counted so far.

  Raises:
    AnystepError: 65 for a damaged cache; whatever the transform raises.
  """
  packed = packing is not PackingPolicy.NONE
  cut = functools.partial(cut_lengths, converter, feature_lengths=feature_lengths, packed=packed)
  counting = _Counting(cut)
  appended = _appended_tokens(cache, transform)
  are_joined = joins_sequences(converter, feature_lengths, packed=packed)
  if appended and are_joined:
    # What is cut to the features' own lengths is not cut to their sum, and lengths do not tell it apart.
    appended = None
  limit = _SAMPLED_EXAMPLES if appended is None else len(cache) if all_lengths else _LENGTHS_EXAMPLES
  num_examples = min(len(cache), limit)
  if appended is not None:
    names = cache.manifest.sequence_features
    for table in _read_lengths_tables(cache, num_examples):
      columns = {name: table[:, k] + appended.get(name, 0) for k, name in enumerate(names)}
      counting.add(columns, len(table))
      report(counting.counted_examples)
  else:
    for indices in _sample(cache, num_examples):
      _count_transformed(counting, cache, transform, indices)
      report(counting.counted_examples)
  return ReadLengths(
    task=cache.manifest.task,
    split=cache.manifest.split,
    feature_lengths=dict(feature_lengths),
    examples=len(cache),
    counted_examples=num_examples,
    dropped_examples=counting.dropped_examples,
    features=counting.features,
    cut_examples=counting.cut_examples,
    tokens=counting.tokens,
    cut_tokens=counting.cut_tokens,
    cut_before_tokens=counting.cut_before_tokens,
    are_joined=are_joined,
    is_all_known=counting.is_all_known,
  )


def _appended_tokens(cache: Cache, transform: Transform | None) -> Mapping[str, int] | None:
  """Return how many tokens each feature gets after the cache; None where the transform must run to tell."""
  if cache.manifest.layout == AS_IS:
    return None
  if transform is None or transform.does_nothing:
    return {}
  return None if transform.may_drop else transform.appended_tokens


def _read_lengths_tables(cache: Cache, num_examples: int) -> Iterator[np.ndarray]:
  """Yield lengths of so many examples, `(examples, sequence features) int64`, a shard's at a time."""
  for shard in range(cache.manifest.num_shards):
    if num_examples <= 0:
      return
    table = cache.lengths(shard)[:num_examples].astype(np.int64)
    num_examples -= len(table)
    yield table


def _sample(cache: Cache, num_examples: int) -> Iterator[np.ndarray]:
  """Yield indices of so many examples, some at a time."""
  indices = np.arange(num_examples)
  if cache.manifest.layout == AS_IS and num_examples < len(cache):
    # Neighbours in a file are alike: blocks from all over the split are not.
    block_records = cache.manifest.block_records
    block, place = np.divmod(indices, block_records)
    num_blocks = -(-num_examples // block_records)
    indices = block * (len(cache) - block_records) // max(num_blocks - 1, 1) + place
  for start in range(0, num_examples, _EXAMPLES_AT_A_TIME):
    yield indices[start : start + _EXAMPLES_AT_A_TIME]


def _count_transformed(
  counting: _Counting, cache: Cache, transform: Transform | None, indices: np.ndarray
) -> None:
  """Count examples after the transform."""
  m = cache.manifest
  batch: Batch = cache.read(indices)
  kept, rows = batch, np.arange(len(indices))
  cut_tokens: np.ndarray | None = np.zeros(len(indices), np.int64)
  if transform is not None and not transform.does_nothing:
    records = Records(np.zeros_like(indices), indices, task=m.task, split=m.split, seed=0)
    kept, rows = transform.survey(batch, records)
    cut_tokens = transform.count_cut_tokens(batch, records)
  if cut_tokens is None:
    counting.is_all_known = False
  sequences = {name: as_sequences(feature) for name, feature in kept.items()}
  lengths = {name: feature.lengths for name, feature in sequences.items() if isinstance(feature, Ragged)}
  counting.add(lengths, len(indices), None if cut_tokens is None else cut_tokens[rows], num_kept=len(rows))


class _Counting:
  """Sums of what was counted so far; attributes are those of `ReadLengths`."""

  def __init__(self, cut_lengths: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]):
    self._cut_lengths = cut_lengths
    self.features: dict[str, LengthCounts] = {}
    self.counted_examples = self.dropped_examples = 0
    self.cut_examples = self.tokens = self.cut_tokens = self.cut_before_tokens = 0
    self.is_all_known = True

  def add(
    self,
    lengths: Mapping[str, np.ndarray],
    num_examples: int,
    cut_before: np.ndarray | None = None,
    *,
    num_kept: int | None = None,
  ) -> None:
    """Count further examples.

    Args:
      lengths: of the features of examples that are kept, `(kept,) int64` each.
      num_examples: number of examples, kept or dropped.
      cut_before: tokens that were cut off each of the kept ones before, `(kept,) int64`; None for none.
      num_kept: number of those that are kept; all by default.
    """
    num_kept = num_examples if num_kept is None else num_kept
    cut = np.zeros(num_kept, np.int64) if cut_before is None else cut_before.copy()
    self.cut_before_tokens += int(cut.sum())
    self.tokens += int(cut.sum())
    for name, column in lengths.items():
      self.features.setdefault(name, LengthCounts()).add(column)
    for name, kept_lengths in self._cut_lengths(lengths).items():
      cut += lengths[name] - kept_lengths
      self.tokens += int(lengths[name].sum())
    self.counted_examples += num_examples
    self.dropped_examples += num_examples - num_kept
    self.cut_examples += int(np.count_nonzero(cut))
    self.cut_tokens += int(cut.sum())
