"""Completion of caches: manifests, files moved to their places, and last the marker of whole caches."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence

import seqio
from etils import epath

from anystep.cache_job.planning.building_directories import (
  BUILDING,
  list_building_directories,
  read_fingerprint,
)
from anystep.cache_job.planning.task_work import TaskWork
from anystep.cache_job.preprocessing.example_datasets import get_registered_task
from anystep.cache_job.shuffle.final_shards import read_shards
from anystep.cache_job.shuffle.summaries import read_spill_summaries
from anystep.cache_job.state.failures import report_failures
from anystep.cache_job.state.job_lock import LOCK, check_lock, lock_task_directory
from anystep.cache_job.state.split_job import (
  SplitJob,
  list_source_ranges,
  locate_file,
  make_incomplete_error,
  read_plan,
)
from anystep.cache_job.state.split_stats import merge_stats
from anystep.caches.cache import read_completed, read_manifest
from anystep.caches.manifest import AS_IS, FileEntry, Manifest, SourceShard
from anystep.errors import AnystepError
from anystep.files import names, storage
from anystep.files.json_files import canonical_json
from anystep.tasks.vocabularies.copies import keep_copies, remove_unused_copies

# For workers that complete a task at the same time.
_TRIES, _PAUSE_SECONDS = 3, 1.0


def complete_task(jobs: Sequence[SplitJob], kept: Mapping[str, str]) -> None:
  """Complete the cache of a task on a worker, once all shards are written.

  A second run, or one at the same time by another worker, changes nothing.

  Args:
    jobs: those of the task's splits.
    kept: complete splits that stay as they are, with the sha256 of their manifests.
  """
  with report_failures(jobs[0]):
    if are_complete(jobs):
      return
    task = get_registered_task(jobs[0])
    directory = names.task_directory(jobs[0].options.cache_dir, task.name)
    splits = [job.split for job in jobs]
    work = TaskWork(task=task, directory=directory, splits=splits, jobs=tuple(jobs), kept=kept)
    check_lock(jobs[0])
    for tries_left in reversed(range(_TRIES)):
      try:
        complete(work, {job.split: describe_split(job) for job in jobs})
        return
      except (AnystepError, OSError) as error:
        if are_complete(jobs):
          return
        # Another worker may have removed what this one was reading or writing, and not be done yet.
        if not tries_left or not isinstance(error, (AnystepError, FileNotFoundError)):
          raise
        time.sleep(_PAUSE_SECONDS)


def are_complete(jobs: Sequence[SplitJob]) -> bool:
  """Tell whether the jobs of a task have been completed, which removes their directories last."""
  directory = epath.Path(jobs[0].directory).parent.parent
  return not any(epath.Path(job.directory).exists() for job in jobs) and {job.split for job in jobs} <= set(
    read_completed(directory)
  )


def read_manifests(work: TaskWork) -> TaskWork:
  """Return the work of a task, whose cache is complete, with the manifests of its new splits."""
  completed = read_completed(work.directory)
  paths = {job.split: work.directory / names.manifest_name(job.split) for job in work.jobs}
  for split, path in paths.items():
    if split not in completed:
      raise make_incomplete_error(work.task.name, split, path, "a complete split")
  manifests = {split: read_manifest(path, completed[split]) for split, path in paths.items()}
  return dataclasses.replace(work, manifests=manifests)


def complete(work: TaskWork, manifests: Mapping[str, Manifest]) -> TaskWork:
  """Move the new splits to where readers look, beside those that are kept.

  The order must not change: first the splits that are replaced lose their place in the marker, then files
  come to their places, and last the marker names them as complete.

  Args:
    work: the task's.
    manifests: by split, one for each of its jobs, whose directories hold the files.
  """
  directory = work.directory
  with_tables = {split: manifest.with_tables() for split, manifest in manifests.items()}
  manifests = {split: manifest for split, (manifest, _) in with_tables.items()}
  tables = {split: contents for split, (_, contents) in with_tables.items()}
  waiting_files = {job.split: _list_waiting_files(job, manifests[job.split]) for job in work.jobs}
  withdraw_replaced(work)
  for job in work.jobs:
    manifest = manifests[job.split]
    for name, waiting in waiting_files[job.split].items():
      # A job that was stopped here, or another worker, has moved some; all are looked at below.
      with contextlib.suppress(FileNotFoundError):
        storage.move(waiting, directory / name)
    for name, content in tables[job.split].items():
      storage.put(directory / name, content)
    storage.put(directory / names.manifest_name(job.split), manifest.to_json().encode())
    _remove_replaced_files(directory, manifest)
    _check_placed(directory, manifest)
  keep_copies(work.task, directory, manifests.values())
  storage.sync(directory)
  new_splits = {
    split: hashlib.sha256(manifest.to_json().encode()).hexdigest() for split, manifest in manifests.items()
  }
  _sign(directory, {**work.kept, **new_splits})
  # A second run of a worker may still be writing: the next job tidies up after it.
  with contextlib.suppress(OSError):
    _remove_buildings(directory, {**work.kept, **new_splits})
    remove_unused_copies(directory, {**work.kept, **new_splits})
  return dataclasses.replace(work, manifests=manifests)


def withdraw_replaced(work: TaskWork) -> None:
  """Take the splits that are replaced out of the marker, before any of their files changes."""
  _sign(work.directory, work.kept)


def _list_waiting_files(job: SplitJob, manifest: Manifest) -> dict[str, epath.Path]:
  """Return the files to be moved, by the names of their places."""
  directory = epath.Path(job.directory)
  if manifest.layout == AS_IS:
    return {entry.name: directory / entry.name for entry in manifest.offsets_files}
  shards = read_shards(job, manifest.num_shards)
  files = [file for shard in shards for file in shard.values() if not file.version]
  shard_files = {file.entry.name: directory / file.file for file in files}
  return shard_files | {entry.name: directory / entry.name for entry in manifest.description_files}


def _check_placed(directory: epath.Path, manifest: Manifest) -> None:
  """Refuse to mark as complete a split whose files are not there with their sizes."""
  entries = manifest.offsets_files if manifest.layout == AS_IS else manifest.files
  sizes = storage.list_sizes(directory)
  for entry in entries:
    # A listing may be behind the objects.
    if sizes.get(entry.name) != entry.bytes and storage.size_of(directory / entry.name) != entry.bytes:
      raise make_incomplete_error(
        manifest.task, manifest.split, directory / entry.name, f"{entry.bytes} bytes"
      )


def _sign(directory: epath.Path, manifests: Mapping[str, str]) -> None:
  """Write the marker of complete splits; remove it where there is none."""
  if manifests:
    lines = [f"{split} {sha256}\n" for split, sha256 in sorted(manifests.items())]
    storage.put(directory / names.COMPLETED, "".join(lines).encode())
  else:
    (directory / names.COMPLETED).unlink(missing_ok=True)
    storage.sync(directory)


def _remove_replaced_files(directory: epath.Path, manifest: Manifest) -> None:
  """Remove files of the cache that was here before: readers could not tell them from the new ones."""
  split = manifest.split
  pattern, new_names = names.shard_pattern(split), {entry.name for entry in manifest.files}
  descriptions = {names.info_name(split), names.stats_name(split), names.quarantine_name(split)}
  descriptions |= set(names.table_names(split))
  for path in directory.iterdir():
    is_of_split = pattern.match(path.name) or path.name in descriptions
    put = (names.COMPLETED, names.manifest_name(split))
    is_attempt = any(storage.is_attempt(path.name, at=name) for name in put)
    if (is_of_split and path.name not in new_names) or is_attempt:
      # One that a listing of a store still has may be gone; so may one that another worker removes.
      path.unlink(missing_ok=True)


def _remove_buildings(directory: epath.Path, splits: Mapping[str, str]) -> None:
  """Remove the unfinished files of complete splits, of all jobs; other splits keep theirs."""
  building = directory / BUILDING
  for path in list_building_directories(directory, splits):
    path.rmtree()
  if building.exists() and not any(building.iterdir()):
    building.rmdir()


def remove_left_overs(work: TaskWork) -> None:
  """Remove files left by a job that was killed while it tidied up after a complete cache.

  They stay where another job holds the lock, and where they cannot be removed: they do no harm.
  """
  if any((work.directory / name).exists() for name in (BUILDING, LOCK)):
    with contextlib.suppress(AnystepError, OSError), lock_task_directory(work.directory):
      _remove_buildings(work.directory, work.kept)


def describe_split(job: SplitJob) -> Manifest:
  """Write SeqIO's own descriptions beside the split's shards, and return its manifest."""
  spills, plan, ranges = list(read_spill_summaries(job)), read_plan(job), list_source_ranges(job)
  shards = read_shards(job, plan.num_shards)
  features = next(form for spill in spills for _, form in spill.forms)
  info = {
    "num_shards": len(shards),
    "features": {name: {"dtype": f.dtype, "shape": f.shape} for name, f in features.items()},
    "seqio_version": seqio.__version__,
  }
  stats = merge_stats([spill.stats for spill in spills])
  source_names = _strip_common_folder([source.name for source in ranges])
  quarantine = [
    {**entry, "source_shard": source_names[entry["source_shard"]]} for spill in spills for entry in spill.bad
  ]
  entries = [
    _write_description(job, names.info_name(job.split), canonical_json(info, indent=2)),
    _write_description(job, names.stats_name(job.split), canonical_json(stats, indent=2)),
  ]
  if quarantine:
    lines = "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in quarantine)
    entries.append(_write_description(job, names.quarantine_name(job.split), lines, records=len(quarantine)))
  return Manifest(
    task=job.task,
    split=job.split,
    seed=job.options.seed,
    base_seed=job.options.base_seed,
    range_examples=job.options.range_examples,
    num_examples=plan.num_examples,
    num_shards=plan.num_shards,
    block_records=job.options.block_records,
    container=job.options.container,
    container_options=job.options.container_options,
    features=features,
    record_files=[shard["records"].entry for shard in shards],
    lengths_files=[shard["lengths"].entry for shard in shards],
    offsets_files=[shard["offsets"].entry for shard in shards if "offsets" in shard],
    description_files=entries,
    source_shards=[
      SourceShard(name=source_names[source.name], examples=count)
      for source, count in zip(ranges, (n for spill in spills for n in spill.examples), strict=True)
    ],
    fingerprint=read_fingerprint(job),
    cache_at=job.options.cache_at,
    task_feature_lengths=job.options.task_feature_lengths,
  )


def _strip_common_folder(names: Sequence[str]) -> dict[str, str]:
  """Return by each source shard's name the same without their common folder, which differs among machines.

  >>> _strip_common_folder(["/data/a/0.txt", "/data/a/1.txt"])
  {'/data/a/0.txt': '0.txt', '/data/a/1.txt': '1.txt'}
  >>> _strip_common_folder(["train 0", "train 1"])
  {'train 0': 'train 0', 'train 1': 'train 1'}
  """
  # All names begin with what the first and the last in order have in common.
  first, last = min(names), max(names)
  pairs = enumerate(zip(first, last, strict=False))
  common = next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))
  folder = first[: first.rfind("/", 0, common) + 1]
  return {name: name.removeprefix(folder) for name in names}


def _write_description(job: SplitJob, name: str, text: str, *, records: int = 1) -> FileEntry:
  content = text.encode()
  storage.put(locate_file(job, name), content)
  return FileEntry.of(name, records, content)
