"""The job: what there is to do, the Beam pipeline that does it, and the files that make it a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from etils import epath

from anystep.cache_job.completion import complete, describe
from anystep.cache_job.final_shards import plan_final_shards, write_final_shard
from anystep.cache_job.index_only import index_split
from anystep.cache_job.job_lock import locked
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.spill import SplitJob, failure_path, read_failure, write_spill
from anystep.cache_job.task_work import TaskWork, plan_work, task_work
from anystep.cache_job.watcher import Watcher
from anystep.errors import AnystepError
from anystep.manifest import Manifest

__all__ = ["CacheOptions", "cache_tasks"]


def cache_tasks(task_names: Iterable[str], options: CacheOptions) -> list[TaskWork]:
  """Caches splits of tasks that have no complete cache yet.

  Args:
    task_names: registered tasks.
    options: how.

  Returns:
    What there was to do for each task.

  Raises:
    AnystepError: as `plan_work`; 73 `job_running` where another job is at one of the tasks.
  """
  works = plan_work(task_names, options)
  with contextlib.ExitStack() as locks:
    for place, work in enumerate(works):
      if work.jobs:
        locks.enter_context(locked(work.directory))
        # Another job may have ended between the first look and the lock.
        works[place] = task_work(work.task, options)
    jobs = [job for work in works for job in work.jobs]
    if jobs and not options.index_only:
      _run_pipeline(jobs, options)
    for work in works:
      if work.jobs:
        complete(work, {job.split: _made(work, job, options) for job in work.jobs})
  return works


def _made(work: TaskWork, job: SplitJob, options: CacheOptions) -> Manifest:
  return index_split(work.task, job, options) if options.index_only else describe(work.task, job)


def _run_pipeline(jobs: Sequence[SplitJob], options: CacheOptions) -> None:
  for job in jobs:
    epath.Path(job.directory).mkdir(parents=True, exist_ok=True)
    if failure_path(job.directory).exists():
      failure_path(job.directory).unlink()
  try:
    with Watcher(jobs):
      _run(jobs, options)
  except Exception as error:
    failures = [failure for job in jobs if (failure := read_failure(job.directory))]
    raise (failures[0] if failures else _foreseen_within(error)) from error


def _foreseen_within(error: BaseException) -> BaseException:
  """The foreseen failure that a runner in this process made its own exception of; else that exception."""
  cause: BaseException | None = error
  while cause is not None and not isinstance(cause, AnystepError):
    cause = cause.__cause__ or cause.__context__
  return cause or error


def _run(jobs: Sequence[SplitJob], options: CacheOptions) -> None:
  with beam.Pipeline(options=PipelineOptions(list(options.pipeline_options))) as pipeline:
    for job in jobs:
      label = f"{job.task}/{job.split}"
      spills = (
        pipeline
        | f"{label}/source_shards" >> beam.Create(range(len(job.source_shards)))
        | f"{label}/spread_source" >> beam.Reshuffle()
        | f"{label}/spill" >> beam.Map(_spill, job)
      )
      _ = (
        pipeline
        | f"{label}/split" >> beam.Create([job])
        | f"{label}/plan" >> beam.FlatMap(_plan, beam.pvalue.AsDict(spills))
        | f"{label}/spread_final" >> beam.Reshuffle()
        | f"{label}/write" >> beam.Map(write_final_shard)
      )


def _spill(source_shard: int, job: SplitJob) -> tuple[int, int]:
  return source_shard, write_spill(job, source_shard).examples


def _plan(job: SplitJob, examples: Mapping[int, int]):
  return plan_final_shards(job, [examples[k] for k in range(len(job.source_shards))])
