"""The cache job: plans the work, runs the Beam pipeline, and completes the caches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam

from anystep.cache_job.completion.completion import (
  complete,
  describe_split,
  remove_left_overs,
  withdraw_replaced,
)
from anystep.cache_job.completion.index_only import index_split
from anystep.cache_job.completion.watcher import Watcher
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.building_directories import prepare_directories
from anystep.cache_job.planning.task_work import TaskWork, plan_task, plan_work
from anystep.cache_job.runners.pipelines import RunnerGraph, build_graph, open_pipeline
from anystep.cache_job.runners.worker_failures import explain_runner_error
from anystep.cache_job.shuffle.final_shards import write_shard
from anystep.cache_job.shuffle.sorted_spills import plan_final, sort_group
from anystep.cache_job.shuffle.spill import count_source, write_spill
from anystep.cache_job.state.failures import locate_failure, read_failure, silence_known_failures
from anystep.cache_job.state.job_lock import lock_task_directory
from anystep.cache_job.state.split_job import SourceRange, SplitJob, list_source_ranges, read_plan
from anystep.caches.manifest import Manifest
from anystep.errors import AnystepError, exception_chain
from anystep.files import storage
from anystep.files.directory_lock import DirectoryLock

__all__ = ["CacheOptions", "cache_tasks"]


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
      prepare_directories(works)
      for work in works:
        if work.jobs and storage.is_remote(work.directory):
          # There, shards are written in their places.
          withdraw_replaced(work)
      _run_pipeline(jobs, options)
    for position, work in enumerate(works):
      if work.jobs:
        held[position].check()
        works[position] = complete(work, {job.split: _make_manifest(work, job) for job in work.jobs})
  return works


def build_job_graph(works: Iterable[TaskWork], options: CacheOptions) -> RunnerGraph:
  """Build the graph that a runner would be given; nothing is run."""

  def fill(pipeline: beam.Pipeline) -> None:
    for work in works:
      for job in work.jobs:
        add_split(pipeline, job)

  return build_graph(fill, options.pipeline_options)


def add_split(pipeline: beam.Pipeline, job: SplitJob) -> None:
  """Add the stages of one split to a pipeline.

  Its elements are numbers of items, never records: items leave files in the job's directory, where the next
  stage finds them. So neither memory nor bytes depend on the runner.
  """
  label = f"{job.task}/{job.split}"

  def start(name: str) -> beam.PCollection:
    return pipeline | f"{label}/{name}" >> beam.Create([None])

  counted: Iterable[int] | beam.pvalue.AsSideInput = ()
  if job.options.range_examples is not None:
    counts = (
      start("source_shards")
      | f"{label}/list_source_shards" >> beam.FlatMap(lambda _, job: range(len(job.source_shards)), job)
      | f"{label}/spread_count" >> beam.Reshuffle()
      | f"{label}/count" >> beam.Map(_count, job)
    )
    counted = beam.pvalue.AsIter(counts)
  spills = (
    start("source")
    | f"{label}/list_ranges" >> beam.FlatMap(_list_ranges, job, counted)
    | f"{label}/spread_spill" >> beam.Reshuffle()
    | f"{label}/spill" >> beam.Map(_spill, job)
  )
  groups = (
    start("spills")
    | f"{label}/plan" >> beam.FlatMap(_list_groups, job, beam.pvalue.AsIter(spills))
    | f"{label}/spread_sort" >> beam.Reshuffle()
    | f"{label}/sort" >> beam.Map(_sort, job)
  )
  _ = (
    start("sorted")
    | f"{label}/list_shards" >> beam.FlatMap(_list_shards, job, beam.pvalue.AsIter(groups))
    | f"{label}/spread_write" >> beam.Reshuffle()
    | f"{label}/write" >> beam.Map(_write, job)
  )


def _make_manifest(work: TaskWork, job: SplitJob) -> Manifest:
  return index_split(work.task, job) if job.options.index_only else describe_split(work.task, job)


def _run_pipeline(jobs: Sequence[SplitJob], options: CacheOptions) -> None:
  for job in jobs:
    locate_failure(job).unlink(missing_ok=True)
  try:
    with silence_known_failures(), Watcher(jobs), open_pipeline(options.pipeline_options) as pipeline:
      for job in jobs:
        add_split(pipeline, job)
  except Exception as error:
    failures = [failure for job in jobs if (failure := read_failure(job))]
    # An exception of a runner in this process may have our error within.
    ours = [cause for cause in exception_chain(error) if isinstance(cause, AnystepError)]
    if known := (failures[0] if failures else explain_runner_error(error)):
      raise known from error
    if ours:
      raise ours[0] from None
    raise


def _count(shard: int, job: SplitJob) -> int:
  count_source(job, shard)
  return shard


def _list_ranges(_: None, job: SplitJob, counted: Iterable[int]) -> list[SourceRange]:
  """Return the source ranges; Beam calls this once the shards are counted."""
  return list_source_ranges(job)


def _spill(source: SourceRange, job: SplitJob) -> int:
  write_spill(job, source)
  return source.number


def _list_groups(_: None, job: SplitJob, spills: Iterable[int]) -> Iterator[int]:
  """Yield the groups of spills that are sorted together; Beam calls this once all spills are finished."""
  yield from range(len(plan_final(job).groups))


def _sort(group: int, job: SplitJob) -> int:
  sort_group(job, group)
  return group


def _list_shards(_: None, job: SplitJob, groups: Iterable[int]) -> Iterator[int]:
  """Yield the shards of the cache; Beam calls this once all groups are sorted."""
  yield from range(read_plan(job).num_shards)


def _write(shard: int, job: SplitJob) -> int:
  write_shard(job, shard)
  return shard
