"""Third stage: shards of the cache, gathered from sorted spills by index."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from anystep.cache_job.shuffle.sorted_spills import read_sorted_names
from anystep.cache_job.state.failures import report_failures
from anystep.cache_job.state.group_sizes import RANGES_PER_FRAME
from anystep.cache_job.state.spill_files import read_sorted_frame
from anystep.cache_job.state.split_job import (
  CHUNK_ITEMS,
  FinalPlan,
  SplitJob,
  find_marker,
  locate_file,
  put_marker,
  put_summary,
  read_plan,
  read_summaries,
  require_finished,
)
from anystep.cache_job.state.split_stats import Count, count_nowhere
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
  files = find_marker(job, "final", shard, parse_files)
  return files if files is not None and all(_is_there(job, file) for file in files.values()) else None


def format_files(files: ShardFiles) -> dict[str, Any]:
  """Return a shard's files as JSON."""
  return {kind: dataclasses.asdict(file) for kind, file in files.items()}


def parse_files(document: Any) -> ShardFiles:
  """Return a shard's files from `format_files`'s JSON."""
  return {
    kind: ShardFile(
      entry=FileEntry(**entry["entry"]), file=str(entry["file"]), version=str(entry.get("version", ""))
    )
    for kind, entry in document.items()
  }


def write_shard(job: SplitJob, shard: int, count: Count = count_nowhere) -> None:
  """Write a shard's records and lengths; one that is finished is left as it is, and counted."""
  with report_failures(job, shard=shard):
    files = find_shard(job, shard)
    if files is None:
      files = _write_files(job, read_plan(job), shard, count)
      put_marker(job, "final", shard, format_files(files))
    count("examples", files["records"].entry.records)
    count("bytes", sum(file.entry.bytes for file in files.values()))


def summarize_shards(job: SplitJob, shards: Sequence[int]) -> None:
  """Write the results of a chunk of shards, all of which must be finished, to one file.

  Args:
    job: the split's.
    shards: their numbers, ascending.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  with report_failures(job):
    finished = require_finished(job, shards, lambda shard: find_shard(job, shard), "shard")
    put_summary(job, "finals", shards[0] // CHUNK_ITEMS, list(map(format_files, finished)))


def read_shards(job: SplitJob, num_shards: int) -> list[ShardFiles]:
  """Return the files of all shards of a split.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  summaries = read_summaries(job, "finals", num_shards, lambda documents: list(map(parse_files, documents)))
  return [files for summary in summaries for files in summary]


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


def _write_files(job: SplitJob, plan: FinalPlan, shard: int, count: Count) -> ShardFiles:
  records, lengths = _gather(job, plan, shard, count)
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


def _gather(job: SplitJob, plan: FinalPlan, shard: int, count: Count) -> tuple[list[bytes], np.ndarray]:
  """Return the shard's records by index, and their token counts, `(records, features) uint32`."""
  num_examples = plan.num_examples
  size = int(shard_sizes(num_examples, plan.num_shards)[shard])
  # A shard's frame in a group is in index order: the ordinals tell which group has the next record.
  indices = shard + plan.num_shards * np.arange(size)
  ordinals = preshuffle(num_examples, task=job.task, split=job.split, seed=job.options.seed).inverse(indices)
  ends = np.cumsum([group.records for group in plan.groups])
  group_of = np.searchsorted(ends, ordinals, side="right")
  sorted_names = read_sorted_names(job, plan)
  records: list[bytes] = [b""] * size
  count("ranges", RANGES_PER_FRAME * len(np.unique(group_of)))
  lengths = np.zeros((size, plan.num_features), np.uint32)
  for group in np.unique(group_of).tolist():
    rows = np.flatnonzero(group_of == group)
    frame, frame_bytes = read_sorted_frame(
      locate_file(job, sorted_names[group]),
      shard,
      num_shards=plan.num_shards,
      num_records=len(rows),
      num_features=plan.num_features,
    )
    count("range_bytes", frame_bytes)
    lengths[rows] = frame.lengths
    for row, record in zip(rows.tolist(), frame.records(), strict=True):
      records[row] = record
  return records, lengths
