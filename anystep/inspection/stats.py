"""How many examples and tokens there are, how long they are, and what part of a mixture each task has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.inspection.rows import stretches
from anystep.plans.plan import Plan

QUANTILES = (50, 90, 99)
# Lengths below are counted in an array, those above, which are few, by value.
_ARRAY_LENGTHS = 1 << 16
_RECORDS_AT_A_TIME = 1 << 20


class LengthCounts:
  """How many examples have each length of a feature; memory goes with the lengths, not the examples.

  >>> counts = LengthCounts()
  >>> counts.add(np.array([3, 5, 3, 100_000]))
  >>> counts.examples, counts.tokens, counts.largest, counts.quantile(50)
  (4, 100011, 100000, 3)
  >>> counts.cut(4)
  (2, 99997)
  """

  def __init__(self):
    self._short = np.zeros(_ARRAY_LENGTHS, np.int64)
    self._long: dict[int, int] = {}

  def add(self, lengths: np.ndarray) -> None:
    """Counts the lengths of further examples, `(examples,)` integers >= 0."""
    short = lengths < _ARRAY_LENGTHS
    self._short += np.bincount(lengths[short], minlength=_ARRAY_LENGTHS)
    values, counts = np.unique(lengths[~short], return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
      self._long[value] = self._long.get(value, 0) + count

  @property
  def table(self) -> tuple[np.ndarray, np.ndarray]:
    """The lengths that occur, ascending, and how often: `(lengths,) int64` each."""
    short = np.flatnonzero(self._short)
    long = sorted(self._long)
    values = np.concatenate([short, np.array(long, np.int64)])
    counts = [self._short[short], np.array([self._long[value] for value in long], np.int64)]
    return values, np.concatenate(counts)

  @property
  def examples(self) -> int:
    """How many examples were counted."""
    return int(self.table[1].sum())

  @property
  def tokens(self) -> int:
    """The sum of the lengths."""
    values, counts = self.table
    return int((values * counts).sum())

  @property
  def largest(self) -> int:
    """The largest length; 0 where there is no example."""
    return int(self.table[0].max(initial=0))

  def quantile(self, percent: int) -> int:
    """The smallest length that at least this part of the examples does not exceed."""
    values, counts = self.table
    if not values.size:
      return 0
    wanted = -(-int(counts.sum()) * percent // 100)
    return int(values[np.searchsorted(np.cumsum(counts), wanted)])

  def cut(self, length: int) -> tuple[int, int]:
    """Examples longer than a length, and their tokens beyond it."""
    values, counts = self.table
    return int(counts[values > length].sum()), int((np.maximum(values - length, 0) * counts).sum())

  def histogram(self) -> list[tuple[int, int, int]]:
    """(from, to, examples) of lengths 0, 1, 2 to 3, 4 to 7, …, from the shortest to the longest there is."""
    values, counts = self.table
    bits = [int(value).bit_length() for value in values]
    examples = np.bincount(bits, weights=counts) if bits else np.zeros(0)
    return [
      (1 << bit >> 1, max((1 << bit) - 1, 0), int(examples[bit]))
      for bit in range(min(bits, default=0), len(examples))
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheStats:
  """A split of a task's cache in numbers.

  Attributes:
    bytes: of the records' files.
    features: lengths by sequence feature; None in layout `as_is`, which keeps none.
  """

  task: str
  split: str
  layout: str
  examples: int
  source_shards: int
  shards: int
  bytes: int
  features: Mapping[str, LengthCounts] | None

  @classmethod
  def of(cls, cache: Cache, report: Callable[[int], None] = lambda done_examples: None) -> CacheStats:
    """Counts from the lengths tables, one shard's at a time.

    Args:
      cache: the cache.
      report: called with the number of examples counted so far.

    Raises:
      AnystepError: 65 `file_changed`, `lengths_form` for a table that is not the manifest's.
    """
    m = cache.manifest
    features = None if m.layout == AS_IS else {name: LengthCounts() for name in m.sequence_features}
    done_examples = 0
    for shard in range(m.num_shards) if features is not None else ():
      table = cache.lengths(shard)
      for start in range(0, len(table), _RECORDS_AT_A_TIME):
        some = table[start : start + _RECORDS_AT_A_TIME].astype(np.int64)
        for column, counts in enumerate((features or {}).values()):
          counts.add(some[:, column])
        done_examples += len(some)
        report(done_examples)
    return cls(
      task=m.task,
      split=m.split,
      layout=m.layout,
      examples=m.num_examples,
      source_shards=len(m.source_shards),
      shards=m.num_shards,
      bytes=sum(file.bytes for file in m.record_files),
      features=features,
    )

  def tokens_per_example(self, feature_lengths: Mapping[str, int]) -> float | None:
    """Mean tokens that an example has, cut to feature lengths; of the features that have one, if any has."""
    if self.features is None or not self.examples:
      return None
    named = {name: counts for name, counts in self.features.items() if name in feature_lengths}
    total = 0
    for name, counts in (named or self.features).items():
      total += counts.tokens - (counts.cut(feature_lengths[name])[1] if name in named else 0)
    return total / self.examples

  def to_json(self, feature_lengths: Mapping[str, int]) -> dict[str, Any]:
    """All that is to be said, as a JSON object.

    Args:
      feature_lengths: what features are cut to; of those, the object says how much that takes.
    """
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "features"}
    if self.features is None:
      return {**fields, "features": None}
    return {
      **fields,
      "features": {
        name: _described(counts, feature_lengths.get(name)) for name, counts in self.features.items()
      },
    }


def _described(counts: LengthCounts, length: int | None) -> dict[str, Any]:
  described: dict[str, Any] = {
    "tokens": counts.tokens,
    "mean": counts.tokens / max(counts.examples, 1),
    "max": counts.largest,
    **{f"p{percent}": counts.quantile(percent) for percent in QUANTILES},
  }
  if length is not None:
    examples, tokens = counts.cut(length)
    described |= {
      "feature_length": length,
      "cut_examples": examples,
      "cut_examples_percent": 100 * examples / max(counts.examples, 1),
      "cut_tokens": tokens,
      "cut_tokens_percent": 100 * tokens / max(counts.tokens, 1),
    }
  bins = [{"from": low, "to": high, "examples": examples} for low, high, examples in counts.histogram()]
  return {**described, "histogram": bins}


def rows_of_tasks(plan: Plan, steps: range) -> dict[str, int]:
  """Rows of each of the plan's tasks in some steps, padding left out; no step is gone through."""
  rows = dict.fromkeys(plan.task_names, 0)
  for segment, stretch in stretches(plan, steps):
    # The data's last step is the only one with padding.
    stop = stretch.stop - (stretch.stop == plan.num_steps)
    first_units, units = segment.units_at(stretch.start), segment.units_at(stop)
    for name in segment.tasks:
      rows[name] += units[name] - first_units[name]
    if stop < stretch.stop:
      task, _, real = plan.units(stop)
      for position in task[slice(None) if real is None else real].tolist():
        rows[plan.task_names[position]] += 1
  return rows


def mixture_shares(
  plan: Plan, steps: range, stats: Mapping[str, CacheStats], *, feature_lengths: Mapping[str, int]
) -> list[dict[str, Any]]:
  """What part of the rows of some steps each task was to have and has, in percent, as JSON objects.

  Args:
    plan: a plan.
    steps: the steps, of which one at least comes before the data's end.
    stats: of the tasks, for the share of tokens: estimated from mean lengths, None where there are none. Of
      packed tasks their unit tables say it, where the plan knows its caches.
    feature_lengths: what features are cut to.
  """
  planned = dict.fromkeys(plan.task_names, 0.0)
  for segment, stretch in stretches(plan, steps):
    for name, quota in segment.quotas.items():
      planned[name] += len(stretch) * segment.batch_size * quota / sum(segment.quotas.values())
  rows = rows_of_tasks(plan, steps)
  means = {name: stats[name].tokens_per_example(feature_lengths) for name in rows if name in stats}
  packed = {name: table for name, table in plan.unit_tables.items() if table.features}
  means |= {name: sum(table.real_tokens.values()) / table.num_units for name, table in packed.items()}
  tokens = {name: None if (mean := means.get(name)) is None else mean * rows[name] for name in rows}
  total_tokens = (
    None if any(tokens[n] is None for n in rows if rows[n]) else sum(t or 0 for t in tokens.values())
  )

  def percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole

  return [
    {
      "task": name,
      "steps": [steps.start, steps.stop],
      "planned_percent": percent(planned[name], sum(planned.values())),
      "rows": rows[name],
      "real_percent": percent(rows[name], sum(rows.values())),
      "token_percent": percent(tokens[name], total_tokens),
    }
    for name in plan.task_names
  ]
