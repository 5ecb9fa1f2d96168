"""Dry runs: the work of a job with estimates, as text for people and as a document for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.estimates import Estimate, estimate_split
from anystep.cache_job.planning.task_work import TaskWork, find_tasks, plan_task
from anystep.cache_job.runners.pipelines import RunnerGraph
from anystep.cache_job.state.split_job import SplitJob, find_finished_items
from anystep.caches.cache import open_cache
from anystep.caches.manifest import AS_IS, Manifest
from anystep.errors import AnystepError

# A reader of the document refuses versions that it does not know.
DOCUMENT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitForecast:
  """One split that a job would make.

  Attributes:
    job: the split's.
    finished_ranges: source ranges that an earlier run preprocessed.
    estimate: of the cache; None for an index, and where the first examples give none.
    refusal: the error that the job would end with.
  """

  job: SplitJob
  finished_ranges: int = 0
  estimate: Estimate | None = None
  refusal: AnystepError | None = None

  def line(self) -> str:
    """Return the split's line for people."""
    number = len(self.job.source_shards)
    shards = f"{number} source shard{'' if number == 1 else 's'}"
    options = self.job.options
    if options.layout == AS_IS:
      return f"  {self.job.split}: {shards}, would be indexed where they are"
    ranges = "of them" if options.range_examples is None else "ranges of them"
    facts = [
      shards,
      *([f"{self.finished_ranges} {ranges} preprocessed by an earlier run"] if self.finished_ranges else []),
      f"would be cached as {options.container}",
    ]
    size = self.estimate or "how much cannot be known, for the first examples give none"
    return f"  {self.job.split}: {', '.join(facts)}: {size}"

  def document(self) -> dict[str, Any]:
    """Return the split's part of the document."""
    options, estimate = self.job.options, self.estimate
    document: dict[str, Any] = {
      "split": self.job.split,
      "action": "index" if options.layout == AS_IS else "cache",
      "source_shards": len(self.job.source_shards),
      "finished_source_ranges": self.finished_ranges,
      "container": None if options.layout == AS_IS else options.container,
      "num_shards": None if options.layout == AS_IS else options.num_shards,
      "examples": None,
      "cache_bytes": None,
      "temporary_bytes": None,
      "ranges": None,
      "refusal": _describe_refusal(self.refusal),
    }
    if estimate is not None and estimate.examples is not None:
      document |= dataclasses.asdict(estimate)
    elif estimate is not None:
      document["cache_bytes_per_example"] = estimate.cache_bytes
      document["temporary_bytes_per_example"] = estimate.temporary_bytes
    return document


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskForecast:
  """One task of a dry run.

  Attributes:
    task: the task's name.
    work: the task's; None where the job refuses the task.
    kept: manifests of complete splits that were asked for and stay as they are.
    splits: those that the job would make.
    refusal: the error that the job would end with before it begins.
  """

  task: str
  work: TaskWork | None = None
  kept: Sequence[Manifest] = ()
  splits: Sequence[SplitForecast] = ()
  refusal: AnystepError | None = None

  def lines(self) -> list[str]:
    """Return the task's lines for people; none for a task that is refused."""
    if self.work is None:
      return []
    if not self.work.jobs:
      return [f"{self.task}: {self.work.left_out}"]
    kept = [f"  {split}: complete, left as it is" for split in sorted(self.work.kept)]
    return [f"{self.task}: to {self.work.directory}", *kept, *(split.line() for split in self.splits)]

  def document(self) -> dict[str, Any]:
    """Return the task's part of the document."""
    return {
      "task": self.task,
      "directory": None if self.work is None else str(self.work.directory),
      "complete_in": None if self.work is None else self.work.elsewhere,
      "splits": [*map(_describe_kept, self.kept), *(split.document() for split in self.splits)],
      "refusal": _describe_refusal(self.refusal),
    }


def forecast_work(work: TaskWork) -> TaskForecast:
  """Forecast a task's work, by a try at a few examples of each split; nothing is written.

  Raises:
    AnystepError: the error that the job would end with at these examples.
  """
  return TaskForecast(
    task=work.task.name, work=work, splits=[_forecast_split(work, job) for job in work.jobs]
  )


def forecast_tasks(task_names: Iterable[str], options: CacheOptions) -> list[TaskForecast]:
  """Forecast the work of tasks, and note for each task and split the error that refuses it.

  Raises:
    AnystepError: 64 `split_unknown`.
  """
  forecasts = []
  for task in find_tasks(task_names, options):
    try:
      work = plan_task(task, options)
    except AnystepError as refusal:
      forecasts.append(TaskForecast(task=task.name, refusal=refusal))
      continue
    splits = []
    for job in work.jobs:
      try:
        splits.append(_forecast_split(work, job))
      except AnystepError as refusal:
        splits.append(SplitForecast(job=job, refusal=refusal))
    kept = _read_kept_manifests(work, options)
    forecasts.append(TaskForecast(task=task.name, work=work, kept=kept, splits=splits))
  return forecasts


def make_document(forecasts: Sequence[TaskForecast], graph: RunnerGraph | None) -> dict[str, Any]:
  """Return a dry run as one JSON value (docs/caching.md, A dry run for programs).

  Args:
    forecasts: of all tasks.
    graph: the job's, where a runner was chosen and nothing is refused.
  """
  is_refused = first_refusal(forecasts) is not None
  lines = [] if is_refused else [line for forecast in forecasts for line in forecast.lines()]
  return {
    "version": DOCUMENT_VERSION,
    "tasks": [forecast.document() for forecast in forecasts],
    "runner": None if graph is None else dataclasses.asdict(graph),
    "lines": [*lines, *(graph.lines() if graph is not None else [])],
  }


def first_refusal(forecasts: Sequence[TaskForecast]) -> AnystepError | None:
  """Return the error that the job would end with: a task's before any split's."""
  refusals = [forecast.refusal for forecast in forecasts]
  refusals += [split.refusal for forecast in forecasts for split in forecast.splits]
  return next((refusal for refusal in refusals if refusal is not None), None)


def _forecast_split(work: TaskWork, job: SplitJob) -> SplitForecast:
  if job.options.layout == AS_IS:
    return SplitForecast(job=job)
  return SplitForecast(
    job=job,
    finished_ranges=len(find_finished_items(job)["spill"]),
    estimate=estimate_split(work.task, job),
  )


def _read_kept_manifests(work: TaskWork, options: CacheOptions) -> list[Manifest]:
  root = work.elsewhere or options.cache_dir
  kept = [split for split in work.splits if work.elsewhere is not None or split in work.kept]
  return [open_cache(root, work.task.name, split).manifest for split in sorted(kept)]


def _describe_kept(manifest: Manifest) -> dict[str, Any]:
  return {
    "split": manifest.split,
    "action": "keep",
    "source_shards": None,
    "finished_source_ranges": None,
    "container": manifest.container,
    "num_shards": manifest.num_shards,
    "examples": manifest.num_examples,
    "cache_bytes": sum(file.bytes for file in manifest.files),
    "temporary_bytes": 0,
    "ranges": 0,
    "refusal": None,
  }


def _describe_refusal(refusal: AnystepError | None) -> dict[str, Any] | None:
  if refusal is None:
    return None
  fields = {name: str(value) for name, value in refusal.fields.items()}
  return {"code": int(refusal.code), "kind": refusal.kind, "fields": fields, "fix": refusal.fix}
