"""Directories of unfinished jobs, and the check that a job may go on in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import seqio
from etils import epath

from anystep.cache_job.state.source_names import write_names
from anystep.cache_job.state.split_job import SplitJob, find_state, locate_file, make_incomplete_error
from anystep.caches.manifest import Fingerprint
from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.files.json_files import canonical_json, parse_json
from anystep.tasks.registry.fingerprint import CALLS, fingerprint, first_difference

if TYPE_CHECKING:
  from anystep.cache_job.planning.task_work import TaskWork

BUILDING = ".building"
_FINGERPRINT = "fingerprint.json"


def list_building_directories(directory: epath.Path, splits: Collection[str]) -> list[epath.Path]:
  """Return the directories of unfinished jobs of these splits, with any options, below a task's directory."""
  building = directory / BUILDING
  paths = building.iterdir() if building.exists() else ()
  return [path for path in paths if path.name.rpartition("-")[0] in splits]


def prepare_directories(works: Iterable[TaskWork]) -> None:
  """Make the directories that workers write to, and note in each its provenance.

  Raises:
    AnystepError: 76 `provenance_changed` where an earlier job read another source, or ran other versions.
  """
  for work in works:
    if work.jobs:
      storage.remove_unfinished_uploads(work.directory)
    for job in work.jobs:
      if not job.options.resume:
        for left in list_building_directories(work.directory, [job.split]):
          left.rmtree()
      epath.Path(job.directory).mkdir(parents=True, exist_ok=True)
      write_names(job.directory, job.source_shards)
      fingerprint = make_fingerprint(work.task, job)
      _check_provenance(job, fingerprint.provenance)
      storage.put(locate_file(job, _FINGERPRINT), canonical_json(dataclasses.asdict(fingerprint)).encode())


def _check_provenance(job: SplitJob, provenance: Mapping[str, Any]) -> None:
  path = locate_file(job, "provenance.json")
  before_job = find_state(path, lambda document: document)
  if before_job is None:
    storage.put(path, canonical_json(provenance).encode())
    return
  now = parse_json(canonical_json(provenance))
  if isinstance(before_job, dict) and CALLS not in before_job:
    # Jobs of version 0.1 did not note it.
    del now[CALLS]
  difference = first_difference(before_job, now)
  if difference:
    item, before, now = difference
    raise AnystepError(
      ExitCode.MISMATCH,
      "provenance_changed",
      task=job.task,
      split=job.split,
      item=item,
      expected=before,
      got=now,
      fix="undo the change to go on with what an earlier run left, or start anew with --noresume",
    )


def read_fingerprint(job: SplitJob) -> Fingerprint:
  """Return the fingerprint that `prepare_directories` noted.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  path = locate_file(job, _FINGERPRINT)
  fingerprint = find_state(path, lambda document: Fingerprint(**document))
  if fingerprint is None:
    raise make_incomplete_error(job.task, job.split, path, "the task's fingerprint")
  return fingerprint


def make_fingerprint(task: seqio.Task, job: SplitJob) -> Fingerprint:
  """Return the fingerprint of the split that the job makes."""
  return fingerprint(
    task,
    cache_at=job.options.cache_at,
    task_feature_lengths=job.options.task_feature_lengths,
    seed=job.options.seed,
    base_seed=job.options.base_seed,
    seqio_cache=job.seqio_cache and [f"{job.seqio_cache}/{name}" for name in job.source_shards],
  )
