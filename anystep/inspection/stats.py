"""Statistics: numbers of examples and tokens, their lengths, and the tasks' shares of a mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.inspection.length_counts import LengthCounts
from anystep.inspection.read_lengths import ReadLengths
from anystep.inspection.rows import split_by_segment
from anystep.plans.plan import Plan

_RECORDS_AT_A_TIME = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheStats:
  """Statistics of a split of a task's cache.

  Attributes:
    bytes: size of the records' files.
    features: lengths by sequence feature; None in layout `as_is`, which has no lengths tables.
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
    """Count from the lengths tables, shard by shard.

    Args:
      cache: the cache.
      report: called with the number of examples counted so far.

    Raises:
      AnystepError: 65 `file_changed`, `lengths_form` for a table that does not fit the manifest.
    """
    m = cache.manifest
    features = None if m.layout == AS_IS else {name: LengthCounts() for name in m.sequence_features}
    done_examples = 0
    for shard in range(m.num_shards) if features is not None else ():
      table = cache.lengths(shard)
      for start in range(0, len(table), _RECORDS_AT_A_TIME):
        lengths = table[start : start + _RECORDS_AT_A_TIME].astype(np.int64)
        for column, counts in enumerate((features or {}).values()):
          counts.add(lengths[:, column])
        done_examples += len(lengths)
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
    """Return the mean number of an example's tokens, cut to the feature lengths.

    Only features with a length count; if none has one, all count.
    """
    if self.features is None or not self.examples:
      return None
    with_length = {name: counts for name, counts in self.features.items() if name in feature_lengths}
    total = 0
    for name, counts in (with_length or self.features).items():
      total += counts.tokens - (counts.cut(feature_lengths[name])[1] if name in with_length else 0)
    return total / self.examples

  def to_json(self) -> dict[str, Any]:
    """Return the statistics as a JSON object."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "features"}
    if self.features is None:
      return {**fields, "features": None}
    return {**fields, "features": {name: counts.to_json() for name, counts in self.features.items()}}


def rows_of_tasks(plan: Plan, steps: range) -> dict[str, int]:
  """Return the number of rows of each of the plan's tasks in steps, without padding, by arithmetic."""
  rows = dict.fromkeys(plan.task_names, 0)
  for segment, stretch in split_by_segment(plan, steps):
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
  plan: Plan,
  steps: range,
  stats: Mapping[str, CacheStats],
  *,
  feature_lengths: Mapping[str, int],
  read_lengths: Mapping[str, ReadLengths] | None = None,
) -> list[dict[str, Any]]:
  """Return each task's shares in steps, in percent: of rows, planned and real, of examples and of tokens.

  Rows are exact. Examples are as exact where each is a row; of packed rows, and of tokens, each task's mean
  per row is taken.

  Args:
    plan: a plan.
    steps: the steps, at least one of them before the data's end.
    stats: statistics of tasks' caches, by name.
    feature_lengths: number of tokens that features are cut to.
    read_lengths: lengths of tasks' examples as they are read, by name.

  Returns:
    Of each task a JSON object. `tokens_as` says which tokens count: `read`, those of the rows that a model
    gets, known for packed tasks from their unit tables and for others from read_lengths; else `cached`, those
    in the caches, by stats. `token_percent` is None where a task has neither.
  """
  planned = dict.fromkeys(plan.task_names, 0.0)
  for segment, stretch in split_by_segment(plan, steps):
    for name, quota in segment.quotas.items():
      planned[name] += len(stretch) * segment.batch_size * quota / sum(segment.quotas.values())
  rows = rows_of_tasks(plan, steps)
  examples = {name: _count_examples(plan, name, count) for name, count in rows.items()}
  tokens_as = "read"
  tokens = {name: _multiply(_mean_read_tokens(plan, name, read_lengths or {}), rows[name]) for name in rows}
  if any(tokens[name] is None for name in rows if rows[name]):
    tokens_as = "cached"
    means = {name: counts.tokens_per_example(feature_lengths) for name, counts in stats.items()}
    tokens = {name: _multiply(means.get(name), examples[name]) for name in rows}
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
      "examples": round(examples[name]),
      "example_percent": percent(examples[name], sum(examples.values())),
      "tokens_as": tokens_as,
      "token_percent": percent(tokens[name], total_tokens),
    }
    for name in plan.task_names
  ]


def _multiply(mean: float | None, count: float) -> float | None:
  return None if mean is None else mean * count


def _count_examples(plan: Plan, task: str, num_rows: int) -> float:
  """Return how many examples a task's rows have, on average over its units."""
  table = plan.unit_tables.get(task)
  return num_rows if table is None else num_rows * int(table.shard_records.sum()) / table.num_units


def _mean_read_tokens(plan: Plan, task: str, read_lengths: Mapping[str, ReadLengths]) -> float | None:
  """Return how many tokens a task's row has on average; None where that is not known."""
  table = plan.unit_tables.get(task)
  if table is not None and table.features:
    return sum(table.real_tokens.values()) / table.num_units
  return read_lengths[task].mean_tokens if task in read_lengths else None
