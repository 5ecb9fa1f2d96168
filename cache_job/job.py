"""The cache job: plans the work, runs the Beam pipeline, and completes the caches."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import apache_beam as beam

from anystep.cache_job.completion.completion import (
  are_complete,
  complete,
  complete_task,
  read_manifests,
  remove_left_overs,
  withdraw_replaced,
)
from anystep.cache_job.completion.index_only import index_split
from anystep.cache_job.completion.watcher import Watcher
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.building_directories import prepare_directories
from anystep.cache_job.planning.task_work import TaskWork, plan_task, plan_work
from anystep.cache_job.runners.counters import make_counters, report_counters
from anystep.cache_job.runners.engine_jobs import get_job_id, wait_for_job
from anystep.cache_job.runners.pipelines import RunnerGraph, build_graph, start_pipeline
from anystep.cache_job.runners.worker_failures import explain_runner_error
from anystep.cache_job.shuffle.final_shards import summarize_shards, write_shard
from anystep.cache_job.shuffle.sorted_spills import plan_final, sort_group, summarize_sorted
from anystep.cache_job.shuffle.spill import count_source, write_spill
from anystep.cache_job.shuffle.summaries import summarize_spills
from anystep.cache_job.state.failures import locate_failure, read_failure, silence_known_failures
from anystep.cache_job.state.job_lock import lock_task_directory
from anystep.cache_job.state.split_job import (
  CHUNK_ITEMS,
  SourceRange,
  SplitJob,
  find_engine_job,
  gather_counts,
  list_source_ranges,
  note_engine_job,
  read_plan,
)
from anystep.cache_job.state.split_stats import Count
from anystep.errors import AnystepError, exception_chain
from anystep.files import storage
from anystep.files.directory_lock import DirectoryLock

__all__ = ["CacheOptions", "cache_tasks"]

_List = Callable[[SplitJob], Iterable[Any]]
_Work = Callable[[SplitJob, Any, Count], object]
_Summarize = Callable[[SplitJob, Sequence[int]], None]


def cache_tasks(task_names: Iterable[str], options: CacheOptions) -> list[TaskWork]:
  """Cache splits of tasks that have no complete cache yet.

  Args:
    task_names: registered tasks.
    options: the command line's.

  Returns:
    The work of each task, with the manifests that were made.

  Raises:
    AnystepError: as `plan_work`; 73 `job_running` where another job caches one of the tasks; the
      error of a worker that failed.
  """
  works = plan_work(task_names, options)
  held: dict[int, DirectoryLock] = {}
  with contextlib.ExitStack() as locks:
    for position, work in enumerate(works):
      if work.jobs:
        held[position] = locks.enter_context(lock_task_directory(work.directory))
        # Another job may have ended between the first look and the lock.
        planned = plan_task(work.task, options)
        locked_jobs = (dataclasses.replace(job, lock_id=held[position].id) for job in planned.jobs)
        works[position] = dataclasses.replace(planned, jobs=tuple(locked_jobs))
      elif work.kept:
        remove_left_overs(work)
    jobs = [job for work in works for job in work.jobs]
    if jobs and not options.index_only:
      # The program that submitted the same job may be gone.
      with Watcher(jobs):
        waited = options.resume and _wait_for_engine(jobs, options)
      if not (waited and _are_all_complete(works)):
        prepare_directories(works)
        for work in works:
          if work.jobs and storage.is_remote(work.directory):
            # There, shards are written in their places.
            withdraw_replaced(work)
        _run_pipeline(works, options)
    for position, work in enumerate(works):
      if work.jobs and options.index_only:
        held[position].check()
        works[position] = complete(work, {job.split: index_split(work.task, job) for job in work.jobs})
      elif work.jobs:
        works[position] = read_manifests(work)
  return works


def build_job_graph(works: Iterable[TaskWork], options: CacheOptions) -> RunnerGraph:
  """Build the graph that a runner would be given; nothing is run."""

  def fill(pipeline: beam.Pipeline) -> None:
    for work in works:
      add_task(pipeline, work)

  return build_graph(fill, options.pipeline_options)


def add_task(pipeline: beam.Pipeline, work: TaskWork) -> None:
  """Add the stages of a task's splits to a pipeline, and the one that completes its cache.

  Its elements are numbers of items, never records: items leave files in the job's directory, where the next
  stage finds them. So neither memory nor bytes depend on the runner. The last stage completes the cache, so
  that a job needs nobody who waits for it.
  """
  if not work.jobs:
    return
  jobs = tuple(job.for_workers() for job in work.jobs)
  written = [_add_split(pipeline, job) for job in jobs]
  _ = pipeline | f"{work.task.name}/complete" >> _Complete(jobs, dict(work.kept), written)


def _add_split(pipeline: beam.Pipeline, job: SplitJob) -> beam.PCollection:
  """Add the stages of one split; return the summaries of its last stage."""

  def add(
    name: str, list_items: _List, work: _Work, summarize: _Summarize, *, after: beam.PCollection | None = None
  ) -> beam.PCollection:
    before = () if after is None else beam.pvalue.AsIter(after)
    stage = _Stage(job, name, list_items, work, summarize, after=before)
    return pipeline | f"{job.task}/{job.split}/{name}" >> stage

  is_cut = job.options.range_examples is not None
  counts = add("count", _list_source_shards, count_source, gather_counts) if is_cut else None
  spills = add("preprocess", list_source_ranges, write_spill, summarize_spills, after=counts)
  groups = add("sort", _list_groups, sort_group, summarize_sorted, after=spills)
  return add("write", _list_shards, write_shard, summarize_shards, after=groups)


class _Stage(beam.PTransform):
  """Items that are listed once the stages before are done, worked on by any worker, and summarized by chunks.

  Args:
    job: the split's.
    name: of the stage, with which the names of its counters begin.
    list_items: returns the items of a job, numbers or source ranges.
    work: is called with the job, an item and what counts its work.
    summarize: is called with the job and the numbers of a chunk's items, once they are done.
    after: summaries of the stage before; nothing where there is none.
  """

  def __init__(
    self,
    job: SplitJob,
    name: str,
    list_items: _List,
    work: _Work,
    summarize: _Summarize,
    *,
    after: Iterable[int] | beam.pvalue.AsIter,
  ):
    super().__init__()
    self._job, self._name = job, name
    self._functions = list_items, work, summarize
    self._after = after

  def expand(self, pipeline: beam.Pipeline) -> beam.PCollection:
    list_items, work, summarize = self._functions
    return (
      pipeline
      | "start" >> beam.Create([None])
      | "list" >> beam.FlatMap(_list, list_items, self._job, self._after)
      | "spread" >> beam.Reshuffle()
      | "work" >> beam.Map(_work, work, self._name, self._job).with_output_types(tuple[int, int])
      | "chunk" >> beam.GroupByKey()
      | "summarize" >> beam.Map(_summarize, summarize, self._job)
    )


class _Complete(beam.PTransform):
  """Completion of a task's cache once the shards of all its splits are summarized."""

  def __init__(self, jobs: Sequence[SplitJob], kept: Mapping[str, str], written: Sequence[beam.PCollection]):
    super().__init__()
    self._jobs, self._kept, self._written = jobs, kept, written

  def expand(self, pipeline: beam.Pipeline) -> beam.PCollection:
    written = beam.pvalue.AsIter(tuple(self._written) | "written" >> beam.Flatten())
    start = pipeline | "start" >> beam.Create([None])
    return start | "work" >> beam.Map(_complete, self._jobs, self._kept, written)


def _list(
  _: None, list_items: Callable[[SplitJob], Iterable[Any]], job: SplitJob, after: Iterable[int]
) -> Any:
  """Return a stage's items; Beam calls this once the stages before, whose summaries it passes, are done."""
  return list_items(job)


def _work(
  item: Any, work: Callable[[SplitJob, Any, Count], object], name: str, job: SplitJob
) -> tuple[int, int]:
  """Work on an item; return the numbers of its chunk and its own."""
  work(job, item, make_counters(f"{job.task}/{job.split}", name))
  number = item.number if isinstance(item, SourceRange) else item
  return number // CHUNK_ITEMS, number


def _summarize(
  chunk: tuple[int, Iterable[int]], summarize: Callable[[SplitJob, Sequence[int]], None], job: SplitJob
) -> int:
  number, items = chunk
  summarize(job, sorted(items))
  return number


def _complete(_: None, jobs: Sequence[SplitJob], kept: Mapping[str, str], written: Iterable[int]) -> None:
  complete_task(jobs, kept)


def _list_source_shards(job: SplitJob) -> Iterable[int]:
  return range(len(job.source_shards))


def _list_groups(job: SplitJob) -> Iterable[int]:
  return range(len(plan_final(job).groups))


def _list_shards(job: SplitJob) -> Iterable[int]:
  return range(read_plan(job).num_shards)


def _run_pipeline(works: Sequence[TaskWork], options: CacheOptions) -> None:
  jobs = [job for work in works for job in work.jobs]
  for job in jobs:
    locate_failure(job).unlink(missing_ok=True)

  def fill(pipeline: beam.Pipeline) -> None:
    for work in works:
      add_task(pipeline, work)

  try:
    with silence_known_failures(), Watcher(jobs):
      name = _name_job(jobs)
      result = start_pipeline(fill, options.pipeline_options, name=name)
      job_id = get_job_id(result)
      if job_id is not None:
        for job in jobs:
          # A short job may be complete by now.
          with contextlib.suppress(FileNotFoundError):
            note_engine_job(job, job_id=job_id, name=name)
      try:
        result.wait_until_finish()
      except Exception:
        # An engine's news of a job may end before the job does.
        _wait_for_engine(jobs, options)
        if not _are_all_complete(works):
          raise
    report_counters(result)
  except Exception as error:
    failures = [failure for job in jobs if (failure := read_failure(job))]
    # An exception of a runner in this process may have our error within.
    ours = [cause for cause in exception_chain(error) if isinstance(cause, AnystepError)]
    if known := (failures[0] if failures else explain_runner_error(error)):
      raise known from error
    if ours:
      raise ours[0] from None
    raise


def _wait_for_engine(jobs: Sequence[SplitJob], options: CacheOptions) -> bool:
  """Wait for the jobs that engines were last given for the same work; return whether there were any."""
  engine_jobs = {found for job in jobs if (found := find_engine_job(job)) is not None}
  for job_id, name in engine_jobs:
    wait_for_job(options.pipeline_options, job_id=job_id, name=name)
  return bool(engine_jobs)


def _are_all_complete(works: Iterable[TaskWork]) -> bool:
  return all(are_complete(work.jobs) for work in works if work.jobs)


def _name_job(jobs: Sequence[SplitJob]) -> str:
  """Return a name that an engine takes, the same for the same work: its page shows it."""
  identities = " ".join(job.directory.rpartition("-")[2] for job in jobs)
  return f"anystep-{hashlib.sha256(identities.encode()).hexdigest()[:16]}"
