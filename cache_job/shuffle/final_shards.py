"""Third stage: shards of the cache, gathered from sorted spills by index."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from typing import Any

import numpy as np
from etils import epath

from anystep.cache_job.shuffle.sorted_spills import find_sorted
from anystep.cache_job.state.failures import report_failures
from anystep.cache_job.state.spill_files import read_sorted_frame
from anystep.cache_job.state.split_job import (
  FinalPlan,
  SplitJob,
  find_marker,
  locate_file,
  put_marker,
  read_plan,
)
from anystep.caches.manifest import FileEntry, shard_sizes
from anystep.containers import containers
from anystep.files import names, storage
from anystep.order.preshuffle import preshuffle


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFile:
  """One file of a finished shard.

  Attributes:
    entry: its entry in the manifest.
    file: its name in the job's directory until the cache is complete; on a store, where no file can be
      renamed, it is in its place at once.
    version: that of the object in its place on a store; empty for a local file.
  """

  entry: FileEntry
  file: str
  version: str = ""


ShardFiles = dict[str, ShardFile]
"""A finished shard's files: `records`, `lengths`, and `offsets` of TFRecord."""


def find_shard(job: SplitJob, shard: int) -> ShardFiles | None:
  """Return a shard's files; None where it is not finished, or no longer whole."""
  files = find_marker(job, "final", shard, _parse_files)
  return files if files is not None and all(_is_there(job, file) for file in files.values()) else None


def _parse_files(document: Any) -> ShardFiles:
  return {
    kind: ShardFile(
      entry=FileEntry(**entry["entry"]), file=str(entry["file"]), version=str(entry.get("version", ""))
    )
    for kind, entry in document.items()
  }


def write_shard(job: SplitJob, shard: int) -> None:
  """Write a shard's records and lengths; one that is finished is left as it is."""
  with report_failures(job, shard=shard):
    if find_shard(job, shard) is None:
      files = _write_files(job, read_plan(job), shard)
      put_marker(job, "final", shard, {kind: dataclasses.asdict(file) for kind, file in files.items()})


def _is_there(job: SplitJob, file: ShardFile) -> bool:
  """Tell whether a file is whole, in the job's directory or where a job that was stopped has moved it."""
  if not file.version and (size := storage.size_of(locate_file(job, file.file))) is not None:
    return size == file.entry.bytes
  placed = locate_placed(job, file.entry.name)
  with contextlib.suppress(FileNotFoundError):
    if file.version and storage.find_version(placed) == file.version:
      return True
  if storage.size_of(placed) != file.entry.bytes:
    return False
  return FileEntry.of_file(placed, name=file.entry.name, records=file.entry.records) == file.entry


def locate_placed(job: SplitJob, name: str) -> epath.Path:
  """Return the path of a file of the complete cache."""
  return epath.Path(job.directory).parent.parent / name


def _write_files(job: SplitJob, plan: FinalPlan, shard: int) -> ShardFiles:
  records, lengths = _gather(job, plan, shard)
  split, num_shards = job.split, plan.num_shards
  attempts: dict[str, tuple[str, epath.Path]] = {}
  with storage.local_directory(job.directory) as folder:

    def attempt(kind: str, name: str) -> epath.Path:
      attempts[kind] = name, storage.attempt_path(folder / name)
      return attempts[kind][1]

    try:
      path = attempt("records", names.records_name(split, job.options.container, shard, num_shards))
      offsets = _write_records(job, path, records)
      _write_array(attempt("lengths", names.lengths_name(split, shard, num_shards)), lengths)
      if offsets is not None:
        _write_array(attempt("offsets", names.offsets_name(split, shard, num_shards)), offsets)
      return {
        kind: _place(job, path, FileEntry.of_file(path, name=name, records=len(records)))
        for kind, (name, path) in attempts.items()
      }
    except BaseException:
      for _, path in attempts.values():
        path.unlink(missing_ok=True)
      raise


def _place(job: SplitJob, path: epath.Path, entry: FileEntry) -> ShardFile:
  """Upload a finished file to its place on a store; a local one waits for the cache's completion."""
  is_remote = storage.is_remote(job.directory)
  version = storage.upload(path, locate_placed(job, entry.name)) if is_remote else ""
  return ShardFile(entry=entry, file=path.name, version=version)


def _write_records(job: SplitJob, path: epath.Path, records: list[bytes]) -> np.ndarray | None:
  try:
    offsets = containers.write_shard(
      job.options.container, path, records, options=job.options.container_options
    )
  except RuntimeError as error:
    # ArrayRecord's writer tells only by its text what failed.
    full = "No space left" in str(error) or "quota" in str(error)
    raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
  storage.sync(path)
  return offsets


def _write_array(path: epath.Path, array: np.ndarray) -> None:
  with storage.new_file(path) as file:
    np.save(file, array, allow_pickle=False)


def _gather(job: SplitJob, plan: FinalPlan, shard: int) -> tuple[list[bytes], np.ndarray]:
  """Return the shard's records by index, and their token counts, `(records, features) uint32`."""
  num_examples = sum(plan.examples)
  size = int(shard_sizes(num_examples, plan.num_shards)[shard])
  # A shard's frame in a group is in index order: the ordinals tell which group has the next record.
  indices = shard + plan.num_shards * np.arange(size)
  ordinals = preshuffle(num_examples, task=job.task, split=job.split, seed=job.options.seed).inverse(indices)
  ends = np.cumsum([sum(file.records for file in group) for group in plan.groups])
  group_of = np.searchsorted(ends, ordinals, side="right")
  records: list[bytes] = [b""] * size
  lengths = np.zeros((size, plan.num_features), np.uint32)
  for group in np.unique(group_of).tolist():
    rows = np.flatnonzero(group_of == group)
    frame = read_sorted_frame(
      _locate_sorted(job, plan, group),
      shard,
      num_shards=plan.num_shards,
      num_records=len(rows),
      num_features=plan.num_features,
    )
    lengths[rows] = frame.lengths
    for row, record in zip(rows.tolist(), frame.records(), strict=True):
      records[row] = record
  return records, lengths


def _locate_sorted(job: SplitJob, plan: FinalPlan, group: int) -> epath.Path:
  name = find_sorted(job, plan, group)
  if name is None:
    raise FileNotFoundError(f"sorted group {group} is gone")
  return locate_file(job, name)
