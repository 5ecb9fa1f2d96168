"""The second half of the job: each shard of the cache, gathered from the spills in the order's places."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
from etils import epath

from anystep import containers, names
from anystep.cache_job.spill import SplitJob, publish, publish_array, reported_failures, spill_path
from anystep.manifest import FileEntry, canonical_json, default_num_shards, shard_sizes
from anystep.permutation import Permutation


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalShard:
  """One shard to be written: its number among num_shards, and the examples of each source shard."""

  job: SplitJob
  shard: int
  num_shards: int
  source_examples: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFiles:
  """A finished shard's files; offsets are those of a TFRecord shard."""

  records: FileEntry
  lengths: FileEntry
  offsets: FileEntry | None = None


def plan_final_shards(job: SplitJob, source_examples: Sequence[int]) -> list[FinalShard]:
  """The shards of a split whose source shards gave these numbers of examples."""
  default = default_num_shards(sum(source_examples), job.block_records)
  num_shards = job.num_shards or bounded(default, job.min_shards, job.max_shards)
  return [
    FinalShard(job=job, shard=shard, num_shards=num_shards, source_examples=tuple(source_examples))
    for shard in range(num_shards)
  ]


def bounded(num_shards: int, least: int, most: int) -> int:
  """A number of shards within bounds, of which 0 is none and the upper one wins, as SeqIO has it.

  >>> bounded(1, 16, 0), bounded(64, 0, 10), bounded(1, 16, 10)
  (16, 10, 10)
  """
  return min(max(num_shards, least), most or max(num_shards, least))


def read_shard_files(directory: epath.PathLike, shard: int) -> ShardFiles | None:
  """A shard's files; None where it is not finished, or where a job that was stopped has moved it away."""
  try:
    document = json.loads(_description_path(directory, shard).read_text())
  except FileNotFoundError:
    return None
  files = ShardFiles(**{name: entry and FileEntry(**entry) for name, entry in document.items()})
  entries = [entry for entry in (files.records, files.lengths, files.offsets) if entry]
  return files if all((epath.Path(directory) / entry.name).exists() for entry in entries) else None


def write_final_shard(work: FinalShard) -> ShardFiles:
  """Writes a shard's records and lengths; one that is finished is left as it is."""
  job = work.job
  finished = read_shard_files(job.directory, work.shard)
  if finished is not None:
    return finished
  with reported_failures(job, shard=work.shard):
    return _write_final_shard(work)


def _write_final_shard(work: FinalShard) -> ShardFiles:
  job = work.job
  records, lengths = _gather(work)
  directory = epath.Path(job.directory)
  options = containers.container_options(job.container, job.block_records)
  records_path = directory / names.records_name(job.split, job.container, work.shard, work.num_shards)
  lengths_path = directory / names.lengths_name(job.split, work.shard, work.num_shards)
  offsets_path = directory / names.offsets_name(job.split, work.shard, work.num_shards)

  def entry(path: epath.Path) -> FileEntry:
    return FileEntry.of(path.name, len(records), path.read_bytes())

  offsets = publish(
    records_path, lambda path: containers.write_shard(job.container, path, records, options=options)
  )
  publish_array(lengths_path, lengths)
  if offsets is not None:
    publish_array(offsets_path, offsets)
  files = ShardFiles(
    records=entry(records_path),
    lengths=entry(lengths_path),
    offsets=None if offsets is None else entry(offsets_path),
  )
  description = canonical_json(dataclasses.asdict(files))
  publish(_description_path(directory, work.shard), lambda path: path.write_text(description))
  return files


def _gather(work: FinalShard) -> tuple[list[bytes], np.ndarray]:
  """The shard's records in index order and their token counts, `(records, features) uint32`."""
  job, num_examples = work.job, sum(work.source_examples)
  size = int(shard_sizes(num_examples, work.num_shards)[work.shard])
  starts = np.concatenate([[0], np.cumsum(work.source_examples)]).astype(np.int64)
  indices = work.shard + work.num_shards * np.arange(size)
  ordinals = indices
  if size:
    ordinals = Permutation(num_examples, "preshuffle", job.task, job.split, job.seed).inverse(indices)
  spill_of = np.searchsorted(starts, ordinals, side="right") - 1
  place_of = ordinals - starts[spill_of]
  records = np.empty(size, object)
  num_features = np.load(spill_path(job.directory, 0, "lengths.npy"), mmap_mode="r").shape[1]
  lengths = np.zeros((size, num_features), np.uint32)
  for source_shard in np.unique(spill_of).tolist():
    rows = np.nonzero(spill_of == source_shard)[0]
    places = place_of[rows]
    offsets = np.load(spill_path(job.directory, source_shard, "offsets.npy"))
    lengths[rows] = np.load(spill_path(job.directory, source_shard, "lengths.npy"))[places]
    content = np.memmap(spill_path(job.directory, source_shard, "records"), np.uint8, "r")
    for row, start, stop in zip(rows, offsets[places], offsets[places + 1], strict=True):
      records[row] = content[start:stop].tobytes()
  return records.tolist(), lengths


def _description_path(directory: epath.PathLike, shard: int) -> epath.Path:
  return epath.Path(directory) / f"final-{shard:05d}.json"
