"""Beam's counters of the job's work: by split, for each stage the examples, bytes and milliseconds.

Engines' pages show them while the job runs. A bundle that is run again counts again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from anystep.errors import one_line
from anystep.programs.progress import log_notice

if TYPE_CHECKING:
  from apache_beam.runners.runner import PipelineResult

Counters = Mapping[str, Mapping[str, int]]
"""By split, as `task/split`, the values of its counters, as `preprocess_examples`."""


def make_counters(split: str, stage: str) -> Callable[[str, int], None]:
  """Return what raises a split's counters of a stage, on the worker's thread that calls it."""
  from apache_beam.metrics import Metrics

  def count(what: str, amount: int) -> None:
    if amount:
      Metrics.counter(split, f"{stage}_{what}").inc(amount)

  return count


def read_counters(result: PipelineResult) -> Counters:
  """Return the counters of a job that has ended."""
  counters: dict[str, dict[str, int]] = {}
  for counter in result.metrics().query()["counters"]:
    values = counters.setdefault(counter.key.metric.namespace, {})
    # What ran on several workers, or was fused with several stages, has a value each.
    values[counter.key.metric.name] = values.get(counter.key.metric.name, 0) + counter.result
  return counters


def report_counters(result: PipelineResult) -> None:
  """Print the counters of a job that has ended, of what took a worker some time."""
  try:
    counters = read_counters(result)
  except Exception as error:
    # Of an engine that is gone by now: the cache is complete all the same.
    log_notice(f"the engine does not tell its counters: {one_line(error)}")
    return
  shown = {split: values for split, values in counters.items() if _is_long(values)}
  for line in format_counters(shown):
    print(line, file=sys.stderr, flush=True)


def _is_long(values: Mapping[str, int]) -> bool:
  return values.get("preprocess_milliseconds", 0) >= _SHORT_MILLISECONDS


def format_counters(counters: Counters) -> list[str]:
  """Return a line for each split.

  >>> format_counters({"my_task/train": {"preprocess_examples": 1200, "preprocess_milliseconds": 3450}})
  ['my_task/train: preprocess 1,200 examples, 3.5 seconds']
  """
  lines = []
  for split, values in sorted(counters.items()):
    stages = list(dict.fromkeys(name.partition("_")[0] for name in values))
    parts = []
    for stage in sorted(stages, key=_STAGES.index):
      facts = [
        format_one(values[name])
        for what, format_one in _FACTS.items()
        if (name := f"{stage}_{what}") in values
      ]
      parts.append(f"{stage} {', '.join(facts)}")
    lines.append(f"{split}: {'; '.join(parts)}")
  return lines


# Shorter work is not worth a line.
_SHORT_MILLISECONDS = 2000
_STAGES = ("count", "preprocess", "sort", "write")
_FACTS: Mapping[str, Callable[[int], str]] = {
  "examples": lambda value: f"{value:,} examples",
  "bytes": lambda value: f"{value / 2**20:,.1f} MiB",
  "milliseconds": lambda value: f"{value / 1000:,.1f} seconds",
  "bad_examples": lambda value: f"{value:,} bad examples",
}
