"""The end of the job: manifests, files moved to their places, and last what says that the cache is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

import seqio
from etils import epath

from anystep.cache_job.planning.building_directories import BUILDING, buildings, task_fingerprint
from anystep.cache_job.planning.task_work import TaskWork
from anystep.cache_job.shuffle.final_shards import find_shard
from anystep.cache_job.shuffle.sorted_spills import all_spills
from anystep.cache_job.state.job_lock import LOCK, locked
from anystep.cache_job.state.split_job import SplitJob, file_of, job_incomplete, read_plan, source_ranges
from anystep.cache_job.state.split_stats import merged_stats
from anystep.caches.manifest import AS_IS, FileEntry, Manifest, SourceShard
from anystep.errors import AnystepError
from anystep.files import names, storage
from anystep.files.json_files import canonical_json
from anystep.tasks.vocabularies.copies import keep_copies, remove_unused_copies

_Result = TypeVar("_Result")


def complete(work: TaskWork, manifests: Mapping[str, Manifest]) -> TaskWork:
  """Puts the splits that were made where readers look, beside those that are kept.

  The order must not change: what is replaced is no longer called complete, files come to their places, and
  the last of all says that they are whole.

  Args:
    work: the task's.
    manifests: by split, one for each of its jobs, whose directories hold the files.
  """
  directory = work.directory
  _sign(directory, work.kept)
  for job in work.jobs:
    manifest = manifests[job.split]
    for name, waiting in _waiting(job, manifest).items():
      # A job that was stopped here has moved some.
      if waiting.exists():
        storage.move(waiting, directory / name)
    storage.put(directory / names.manifest_name(job.split), manifest.to_json().encode())
    _remove_what_was_here(directory, manifest)
    _check_placed(directory, manifest)
  keep_copies(work.task, directory, manifests.values())
  storage.sync(directory)
  made = {
    split: hashlib.sha256(manifest.to_json().encode()).hexdigest() for split, manifest in manifests.items()
  }
  _sign(directory, {**work.kept, **made})
  # A worker's double may still be writing: the next job tidies up after it.
  with contextlib.suppress(OSError):
    _remove_buildings(directory, {**work.kept, **made})
    remove_unused_copies(directory, {**work.kept, **made})
  return dataclasses.replace(work, manifests=manifests)


def _waiting(job: SplitJob, manifest: Manifest) -> dict[str, epath.Path]:
  """The files that go to their places, by the names that they have there."""
  directory = epath.Path(job.directory)
  if manifest.layout == AS_IS:
    return {entry.name: directory / entry.name for entry in manifest.offsets_files}
  shards = [_finished(job, find_shard(job, shard), f"shard {shard}") for shard in range(manifest.num_shards)]
  made = {file.entry.name: directory / file.file for shard in shards for file in shard.values()}
  return made | {entry.name: directory / entry.name for entry in manifest.description_files}


def _check_placed(directory: epath.Path, manifest: Manifest) -> None:
  """Whatever happened to the files since they were made, what is signed is there."""
  entries = manifest.offsets_files if manifest.layout == AS_IS else manifest.files
  for entry in entries:
    path = directory / entry.name
    if not path.exists() or path.stat().length != entry.bytes:
      raise job_incomplete(manifest.task, manifest.split, path, f"{entry.bytes} bytes")


def _sign(directory: epath.Path, manifests: Mapping[str, str]) -> None:
  """Says which splits are complete."""
  if manifests:
    lines = [f"{split} {sha256}\n" for split, sha256 in sorted(manifests.items())]
    storage.put(directory / names.COMPLETED, "".join(lines).encode())
  else:
    (directory / names.COMPLETED).unlink(missing_ok=True)
    storage.sync(directory)


def _remove_what_was_here(directory: epath.Path, manifest: Manifest) -> None:
  """Removes files of the cache that was here before, which no reader could tell from this one's."""
  split = manifest.split
  pattern, kept = names.shard_pattern(split), {entry.name for entry in manifest.files}
  descriptions = {names.info_name(split), names.stats_name(split), names.quarantine_name(split)}
  for path in directory.iterdir():
    is_of_split = pattern.match(path.name) or path.name in descriptions
    put = (names.COMPLETED, names.manifest_name(split))
    is_attempt = any(storage.is_attempt(path.name, at=name) for name in put)
    if (is_of_split and path.name not in kept) or is_attempt:
      path.unlink()


def _remove_buildings(directory: epath.Path, splits: Mapping[str, str]) -> None:
  """Removes what made complete splits, by this job and others; what another split's job left stays for it."""
  building = directory / BUILDING
  for path in buildings(directory, splits):
    path.rmtree()
  if building.exists() and not any(building.iterdir()):
    building.rmdir()


def remove_left_overs(work: TaskWork) -> None:
  """Removes what a job left of a complete cache that was killed while it tidied up.

  Where another job is at it, they are that one's; what cannot be removed does no harm.
  """
  if any((work.directory / name).exists() for name in (BUILDING, LOCK)):
    with contextlib.suppress(AnystepError, OSError), locked(work.directory):
      _remove_buildings(work.directory, work.kept)


def describe(task: seqio.Task, job: SplitJob) -> Manifest:
  """The split's manifest, and SeqIO's own descriptions beside its shards."""
  spills, plan, ranges = all_spills(job), read_plan(job), source_ranges(job)
  shards = [_finished(job, find_shard(job, shard), f"shard {shard}") for shard in range(plan.num_shards)]
  features = next(spill.features for spill in spills if spill.features is not None)
  info = {
    "num_shards": len(shards),
    "features": {name: {"dtype": f.dtype, "shape": f.shape} for name, f in features.items()},
    "seqio_version": seqio.__version__,
  }
  stats = merged_stats([spill.stats for spill in spills])
  source_names = _without_folder([source.name for source in ranges])
  quarantine = [
    {**entry, "source_shard": source_names[entry["source_shard"]]} for spill in spills for entry in spill.bad
  ]
  entries = [
    _described(job, names.info_name(job.split), canonical_json(info, indent=2)),
    _described(job, names.stats_name(job.split), canonical_json(stats, indent=2)),
  ]
  if quarantine:
    lines = "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in quarantine)
    entries.append(_described(job, names.quarantine_name(job.split), lines, records=len(quarantine)))
  return Manifest(
    task=job.task,
    split=job.split,
    seed=job.options.seed,
    base_seed=job.options.base_seed,
    range_examples=job.options.range_examples,
    num_examples=sum(plan.examples),
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
      for source, count in zip(ranges, plan.examples, strict=True)
    ],
    fingerprint=task_fingerprint(task, job),
    cache_at=job.options.cache_at,
    task_feature_lengths=job.options.task_feature_lengths,
  )


def _without_folder(names: Sequence[str]) -> dict[str, str]:
  """By the names of source shards, these without the folder that all lie in, which differs among machines.

  >>> _without_folder(["/data/a/0.txt", "/data/a/1.txt"])
  {'/data/a/0.txt': '0.txt', '/data/a/1.txt': '1.txt'}
  >>> _without_folder(["train 0", "train 1"])
  {'train 0': 'train 0', 'train 1': 'train 1'}
  """
  parts = [name.split("/") for name in names]
  folders = zip(*(of_name[:-1] for of_name in parts), strict=False)
  common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, folders))
  return {name: "/".join(of_name[common:]) for name, of_name in zip(names, parts, strict=True)}


def _described(job: SplitJob, name: str, text: str, *, records: int = 1) -> FileEntry:
  content = text.encode()
  storage.put(file_of(job, name), content)
  return FileEntry.of(name, records, content)


def _finished(job: SplitJob, result: _Result | None, what: str) -> _Result:
  """What the workers left, which must be there by now."""
  if result is None:
    raise job_incomplete(job.task, job.split, job.directory, what)
  return result
