"""Layout `as_is`: the files of a task's source described where they are, nothing copied."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import mmap
import os
import re
import struct

import numpy as np
import seqio
from array_record.python import array_record_module
from etils import epath

from anystep import containers, names
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.spill import SplitJob, described_features, publish_array
from anystep.cache_job.task_work import task_fingerprint
from anystep.errors import AnystepError, ExitCode
from anystep.examples import parse_example
from anystep.manifest import AS_IS, HEAD_BYTES, Feature, FileEntry, Manifest, SourceShard

_HASHED_BYTES = 1 << 24
# Of a TFRecord: the length of its data and that length's checksum before it, the data's checksum after it.
_LENGTH = struct.Struct("<Q")
_FRAME_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scan:
  """A source file: its records, what its writer was told, and for TFRecord its records' offsets."""

  path: epath.Path
  container: str
  records: int
  options: str = ""
  offsets: np.ndarray | None = None


def index_split(task: seqio.Task, job: SplitJob, options: CacheOptions) -> Manifest:
  """Describes the files of a split of the task's source; tables of offsets go to the job's directory.

  Raises:
    AnystepError: 78 `file_outside_root`, `source_decodes`, `feature_form`; 65 `file_container`;
      77 `file_name`.
  """
  record_names = [_name_below(options.cache_dir, path) for path in job.source_shards]
  scans = [_scan(epath.Path(path)) for path in job.source_shards]
  for scan in scans:
    if scan.container != scans[0].container:
      raise _other_container(scan.path, f"{scans[0].container}, as {scans[0].path.name}")
  group_size = re.search(r"group_size:(\d+)", scans[0].options)
  features = described_features(
    task.source.get_dataset(split=job.split, shuffle=False).element_spec, job.task
  )
  _check_examples(task, job, scans, features)
  epath.Path(job.directory).mkdir(parents=True, exist_ok=True)
  record_files = [_file_entry(scan, name) for scan, name in zip(scans, record_names, strict=True)]
  return Manifest(
    layout=AS_IS,
    task=job.task,
    split=job.split,
    seed=job.seed,
    num_examples=sum(scan.records for scan in scans),
    num_shards=len(scans),
    block_records=int(group_size.group(1)) if group_size else options.block_records,
    container=scans[0].container,
    container_options=scans[0].options,
    features=features,
    record_files=record_files,
    lengths_files=[],
    offsets_files=[
      _offsets_entry(job, shard, scan.offsets) for shard, scan in enumerate(scans) if scan.offsets is not None
    ],
    description_files=[],
    source_shards=[SourceShard(name=entry.name, examples=entry.records) for entry in record_files],
    fingerprint=task_fingerprint(task, job),
    cache_at=job.cache_at,
  )


def _name_below(root: epath.PathLike, path: str) -> str:
  """A file's name relative to the root, as manifests have it."""
  try:
    relative = epath.Path(os.path.abspath(path)).relative_to(os.path.abspath(root))
  except ValueError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "file_outside_root",
      path=path,
      expected=f"a file below {root}",
      fix="name a root above the files with --output_cache_dir: manifests name files relative to it",
    ) from error
  return names.check_record_name(relative.as_posix())


def _scan(path: epath.Path) -> _Scan:
  # A reader of another file says so when it is asked, and raises where it is closed.
  reader = array_record_module.ArrayRecordReader(str(path))
  if not reader.ok():
    offsets = _tfrecord_offsets(path)
    return _Scan(path=path, container=containers.TFRECORD, records=len(offsets), offsets=offsets)
  records, options = reader.num_records(), reader.writer_options_string() or ""
  reader.close()
  return _Scan(path=path, container=containers.ARRAY_RECORD, records=records, options=options)


def _tfrecord_offsets(path: epath.Path) -> np.ndarray:
  """Where each record's framing starts, `(records,) uint64`; the frames must end where the file does."""
  offsets, position, size = array.array("Q"), 0, path.stat().length
  if size:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
      while position + _LENGTH.size <= size:
        offsets.append(position)
        position += _FRAME_BYTES + _LENGTH.unpack_from(content, position)[0]
  if position != size:
    raise _other_container(path, "ArrayRecord or TFRecord, uncompressed and whole")
  return np.array(offsets, np.uint64)


def _other_container(path: epath.Path, expected: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "file_container",
    path=path,
    expected=expected,
    fix="convert or mend the file, or cache the task without --index_only",
  )


def _check_examples(
  task: seqio.Task, job: SplitJob, scans: list[_Scan], features: dict[str, Feature]
) -> None:
  """Compares the first example as the source gives it with the record: a source may do more than read."""
  for shard, scan in enumerate(scans):
    if not scan.records:
      continue
    blocks = containers.open_blocks(
      scan.container, scan.path, num_records=scan.records, block_records=1, offsets=scan.offsets
    )
    try:
      (record,) = blocks.read_records([0])
    finally:
      blocks.close()
    shard_info = seqio.ShardInfo(index=shard, num_shards=len(scans))
    dataset = task.source.get_dataset(split=job.split, shuffle=False, shard_info=shard_info)
    expected = next(dataset.as_numpy_iterator())
    try:
      found = parse_example(record, features)
      same = all(np.array_equal(found[name], value) for name, value in expected.items())
    except AnystepError:
      same = False
    if not same:
      raise AnystepError(
        ExitCode.CONFIG,
        "source_decodes",
        task=job.task,
        split=job.split,
        path=scan.path,
        expected="records that are tf.train.Examples with the features that the source gives",
        got="a source that makes something else of its first record",
        fix="cache the task without --index_only",
      )
    return


def _file_entry(scan: _Scan, name: str) -> FileEntry:
  """Describes a file of any size."""
  digest = hashlib.sha256()
  with scan.path.open("rb") as file:
    head = file.read(HEAD_BYTES)
    digest.update(head)
    size = len(head)
    while content := file.read(_HASHED_BYTES):
      digest.update(content)
      size += len(content)
  return FileEntry(
    name=name,
    records=scan.records,
    bytes=size,
    sha256=digest.hexdigest(),
    head_sha256=hashlib.sha256(head).hexdigest(),
  )


def _offsets_entry(job: SplitJob, shard: int, offsets: np.ndarray) -> FileEntry:
  path = epath.Path(job.directory) / names.offsets_name(job.split, shard, len(job.source_shards))
  publish_array(path, offsets)
  return FileEntry.of(path.name, len(offsets), path.read_bytes())
