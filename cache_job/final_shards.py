"""The second half of the job: each shard of the cache, gathered from the spills in the order's places."""

from __future__ import annotations

import dataclasses
import io
import json
import uuid
from collections.abc import Sequence

import numpy as np
from etils import epath

from anystep import containers, names
from anystep.cache_job.spill import SplitJob, spill_path
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
  """A finished shard's records and lengths files."""

  records: FileEntry
  lengths: FileEntry


def plan_final_shards(job: SplitJob, source_examples: Sequence[int]) -> list[FinalShard]:
  """The shards of a split whose source shards gave these numbers of examples."""
  num_shards = job.num_shards or default_num_shards(sum(source_examples), job.block_records)
  return [
    FinalShard(job=job, shard=shard, num_shards=num_shards, source_examples=tuple(source_examples))
    for shard in range(num_shards)
  ]


def read_shard_files(directory: epath.PathLike, shard: int) -> ShardFiles | None:
  """A shard's files; None where it is not finished."""
  try:
    document = json.loads(_description_path(directory, shard).read_text())
  except FileNotFoundError:
    return None
  return ShardFiles(**{name: FileEntry(**entry) for name, entry in document.items()})


def write_final_shard(work: FinalShard) -> ShardFiles:
  """Writes a shard's records and lengths; one that is finished is left as it is."""
  job = work.job
  finished = read_shard_files(job.directory, work.shard)
  if finished is not None:
    return finished
  records, lengths = _gather(work)
  records_name = names.records_name(job.split, containers.ARRAY_RECORD, work.shard, work.num_shards)
  lengths_name = names.lengths_name(job.split, work.shard, work.num_shards)
  npy = io.BytesIO()
  np.save(npy, lengths, allow_pickle=False)
  files = ShardFiles(
    records=_publish(
      epath.Path(job.directory) / records_name,
      len(records),
      lambda path: containers.write_array_record(
        path, records, options=containers.array_record_options(job.block_records)
      ),
    ),
    lengths=_publish(
      epath.Path(job.directory) / lengths_name, len(records), lambda path: path.write_bytes(npy.getvalue())
    ),
  )
  _description_path(job.directory, work.shard).write_text(canonical_json(dataclasses.asdict(files)))
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


def _publish(path: epath.Path, records: int, write) -> FileEntry:
  """Writes a file under a name of its own first: two workers on the same shard never share one."""
  attempt = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
  write(attempt)
  entry = FileEntry.of(path.name, records, attempt.read_bytes())
  attempt.replace(path)
  return entry


def _description_path(directory: epath.PathLike, shard: int) -> epath.Path:
  return epath.Path(directory) / f"final-{shard:05d}.json"
