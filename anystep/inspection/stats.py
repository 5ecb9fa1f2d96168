"""Statistics: numbers of examples and tokens, their lengths, and the tasks' shares of a mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.inspection.length_counts import LengthCounts
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

  def to_json(self, feature_lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return the statistics as a JSON object.

    Args:
      feature_lengths: number of tokens that features are cut to; the object has what is lost by that.
    """
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "features"}
    if self.features is None:
      return {**fields, "features": None}
    return {
      **fields,
      "features": {name: counts.to_json(feature_lengths.get(name)) for name, counts in self.features.items()},
    }


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
  plan: Plan, steps: range, stats: Mapping[str, CacheStats], *, feature_lengths: Mapping[str, int]
) -> list[dict[str, Any]]:
  """Return the planned and the real share of each task in the rows of steps, in percent, as JSON objects.

  Args:
    plan: a plan.
    steps: the steps, at least one of them before the data's end.
    stats: statistics of tasks, for the share of tokens: it is estimated from mean lengths, and None without
      them. For packed tasks it comes from their unit tables, if the plan knows its caches.
    feature_lengths: number of tokens that features are cut to.
  """
  planned = dict.fromkeys(plan.task_names, 0.0)
  for segment, stretch in split_by_segment(plan, steps):
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
