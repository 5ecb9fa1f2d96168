"""From named tasks to a plan of their caches: what the trainer and SeqIO's and T5X's callers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import seqio

from anystep.cached import cached_property
from anystep.caches.cache import Cache
from anystep.features.converters import FeatureConverter
from anystep.limits import is_count
from anystep.plans.changes import Rate
from anystep.plans.plan import Plan
from anystep.streams.stream import Stream, open_stream
from anystep.tasks.reading.task_reader import TaskReader
from anystep.tasks.registry.named_tasks import NamedTasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedTasks:
  """Registered tasks with their caches, and the preprocessors that their examples go through at reading.

  Attributes:
    tasks, caches: by task name.
    rates: the mixture's, by task name; 1 for a task.
    sequence_length: what the preprocessors after the cache are told, by feature: a number of tokens, or
      whatever SeqIO's `sequence_length` may hold.
  """

  tasks: Mapping[str, seqio.Task]
  caches: Mapping[str, Cache]
  rates: Mapping[str, Rate]
  sequence_length: Mapping[str, Any]

  @classmethod
  def open(
    cls,
    named: NamedTasks,
    cache_dirs: Sequence[str],
    *,
    sequence_length: Mapping[str, Any],
    open_cache: Callable[[seqio.Task], Cache],
  ) -> CachedTasks:
    """Open the caches of named tasks, and compute the tasks' rates.

    Args:
      named: the tasks.
      cache_dirs: roots of caches, for SeqIO's rate functions.
      sequence_length: see the attribute.
      open_cache: opens the cache of a task, such as `open_task_cache` of a split and roots.

    Raises:
      AnystepError: as `open_cache` and `NamedTasks.compute_rates`.
    """
    caches = {name: open_cache(task) for name, task in named.tasks.items()}
    return cls(
      tasks=named.tasks,
      caches=caches,
      rates=named.compute_rates(cache_dirs),
      sequence_length=sequence_length,
    )

  @property
  def feature_lengths(self) -> dict[str, int]:
    """Lengths of the features of one dimension, in tokens."""
    return {name: length for name, length in self.sequence_length.items() if is_count(length)}

  @cached_property
  def readers(self) -> dict[str, TaskReader]:
    """Preprocessors after the cache, by task name.

    Raises:
      AnystepError: as `TaskReader`.
    """
    return make_readers(self.tasks, self.caches.values(), self.sequence_length)

  def start_plan(self, **options: Any) -> Plan:
    """Return the plan of a run that starts with these tasks.

    Args:
      **options: arguments of `Plan.start` beside the caches, rates, feature lengths and transforms.

    Raises:
      AnystepError: as `Plan.start` and `TaskReader`.
    """
    return Plan.start(
      self.caches.values(),
      rates=self.rates,
      feature_lengths=self.feature_lengths,
      transforms=self.readers,
      **options,
    )

  def open_stream(
    self,
    plan: Plan,
    rows: slice | Iterable[int] | tuple[int, int],
    *,
    feature_converter: FeatureConverter | None = None,
    prefetch_batches: int = 0,
  ) -> Stream:
    """Open a stream of the plan's batches; arguments are those of `anystep.open_stream`."""
    return open_stream(
      plan,
      self.caches,
      rows=rows,
      feature_converter=feature_converter,
      transforms={name: self.readers[name] for name in plan.tasks},
      prefetch_batches=prefetch_batches,
    )


def make_readers(
  tasks: Mapping[str, seqio.Task], caches: Iterable[Cache], sequence_length: Mapping[str, Any]
) -> dict[str, TaskReader]:
  """Return the preprocessors after the cache, by name of the task that each cache is of.

  Raises:
    AnystepError: as `TaskReader`.
  """
  by_task = {cache.manifest.task: cache for cache in caches}
  return {name: TaskReader(tasks[name], cache, sequence_length) for name, cache in by_task.items()}
