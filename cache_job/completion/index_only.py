"""Layout `as_is`: the files of a task's source described where they are, nothing copied."""

from __future__ import annotations

import array
import dataclasses
import mmap
import os
import re
import struct

import numpy as np
import seqio
from etils import epath

from anystep.cache_job.planning.building_directories import make_fingerprint
from anystep.cache_job.preprocessing.example_checks import require_static_features
from anystep.cache_job.state.split_job import SplitJob
from anystep.caches.manifest import AS_IS, FileEntry, Manifest, SourceShard
from anystep.containers import containers
from anystep.containers.array_record_library import open_reader
from anystep.containers.checked_file import part_checksums, part_table
from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.files import names, storage
from anystep.records.arrow_columns import check_same_columns
from anystep.records.parquet_rows import open_parquet
from anystep.records.parsing import parse_example
from anystep.stores.local_copies import fetch
from anystep.tasks.sources.in_place import files_of

# Of a TFRecord: the length of its data and that length's checksum before it, the data's checksum after it.
_LENGTH = struct.Struct("<Q")
_FRAME_BYTES = 16
_PARQUET_MAGIC = b"PAR1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scan:
  """One source file: its records, and the facts that its container tells.

  Attributes:
    options: the options of an ArrayRecord file's writer.
    group_records: records that are read at a time; 0 where it is unknown.
    offsets: of a TFRecord file's records, `(records,) uint64`.
  """

  path: epath.Path
  container: str
  records: int
  options: str = ""
  group_records: int = 0
  offsets: np.ndarray | None = None


def index_split(task: seqio.Task, job: SplitJob) -> Manifest:
  """Describe the files of a split of the task's source; tables of offsets go to the job's directory.

  Raises:
    AnystepError: 78 `file_outside_root`, `source_decodes`, `feature_form`, `files_differ`; 65
      `file_container`, `column_null`; 77 `file_name`.
  """
  files = files_of(task.source, job.split)
  record_names = [_name_record_file(job, shard, path) for shard, path in enumerate(files)]
  scans = [_scan(epath.Path(path)) for path in files]
  for scan in scans:
    if scan.container != scans[0].container:
      raise _make_container_error(scan.path, f"{scans[0].container}, as {scans[0].path.name}")
  features = require_static_features(
    task.source.get_dataset(split=job.split, shuffle=False).element_spec, job.task
  )
  if scans[0].container == containers.PARQUET:
    _check_columns(job, scans, features)
  _check_examples(task, job, scans, features)
  epath.Path(job.directory).mkdir(parents=True, exist_ok=True)
  record_files, offsets_files = [], []
  for shard, (scan, name) in enumerate(zip(scans, record_names, strict=True)):
    entry, offsets = _describe_file(scan, name)
    record_files.append(entry)
    if offsets is not None:
      offsets_files.append(_write_offsets(job, shard, scan, offsets, num_shards=len(files)))
  return Manifest(
    layout=AS_IS,
    task=job.task,
    split=job.split,
    seed=job.options.seed,
    num_examples=sum(scan.records for scan in scans),
    num_shards=len(scans),
    block_records=max(scan.group_records for scan in scans) or job.options.block_records,
    container=scans[0].container,
    container_options=scans[0].options,
    features=features,
    record_files=record_files,
    lengths_files=[],
    offsets_files=offsets_files,
    description_files=[],
    source_shards=[SourceShard(name=entry.name, examples=entry.records) for entry in record_files],
    fingerprint=make_fingerprint(task, job),
    cache_at=job.options.cache_at,
  )


def _name_record_file(job: SplitJob, shard: int, path: str) -> str:
  """Return a file's name relative to the root; make a link there to a file that is elsewhere."""
  try:
    root = storage.find_absolute(job.options.cache_dir)
    relative = epath.Path(storage.find_absolute(path)).relative_to(root)
  except ValueError:
    return _link_below(job, shard, path)
  return names.check_record_name(relative.as_posix())


def _link_below(job: SplitJob, shard: int, path: str) -> str:
  """Make a link below the root to a file elsewhere; return its name there."""
  if storage.is_remote(path) or storage.is_remote(job.options.cache_dir):
    raise AnystepError(
      ExitCode.CONFIG,
      "file_outside_root",
      path=path,
      expected=f"a file below {job.options.cache_dir}",
      fix="name a root above the files with --output_cache_dir: a store has no links",
    )
  file = re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(path))
  name = "/".join(["linked", *job.task.split(":"), f"{job.split}-{shard:05d}-{file}"])
  link = names.record_path(job.options.cache_dir, name)
  link.parent.mkdir(parents=True, exist_ok=True)
  attempt = storage.attempt_path(link)
  os.symlink(os.path.abspath(path), attempt)
  os.replace(attempt, link)
  return name


def _scan(path: epath.Path) -> _Scan:
  if _begins_as_parquet(path):
    rows = open_parquet(path, columns=())
    # A row group is decoded at a time; blocks of the largest one's rows need no more than two.
    group_records = int(rows.group_rows.max(initial=0))
    return _Scan(path=path, container=containers.PARQUET, records=len(rows), group_records=group_records)
  # A reader of another container answers that it is not ok, and raises when it is closed.
  try:
    reader = open_reader(path)
    is_array_record = reader.ok()
  except (ValueError, RuntimeError) as error:
    # Of a footer that promises more chunks than fit in memory.
    raise _make_container_error(path, "ArrayRecord, Parquet or uncompressed TFRecord, and whole") from error
  if not is_array_record:
    offsets = _find_tfrecord_offsets(path)
    return _Scan(path=path, container=containers.TFRECORD, records=len(offsets), offsets=offsets)
  records, options = reader.num_records(), reader.writer_options_string() or ""
  reader.close()
  group_size = re.search(r"group_size:(\d+)", options)
  return _Scan(
    path=path,
    container=containers.ARRAY_RECORD,
    records=records,
    options=options,
    group_records=int(group_size.group(1)) if group_size else 0,
  )


def _begins_as_parquet(path: epath.Path) -> bool:
  with path.open("rb") as file:
    return file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC


def _find_tfrecord_offsets(path: epath.Path) -> np.ndarray:
  """Return where each record's frame starts, `(records,) uint64`; the last frame must end with the file."""
  offsets, position, size = array.array("Q"), 0, path.stat().length
  if size:
    with open(fetch(path), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
      while position + _LENGTH.size <= size:
        offsets.append(position)
        position += _FRAME_BYTES + _LENGTH.unpack_from(content, position)[0]
  if position != size:
    raise _make_container_error(path, "ArrayRecord, Parquet or uncompressed TFRecord, and whole")
  return np.array(offsets, np.uint64)


def _make_container_error(path: epath.Path, expected: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "file_container",
    path=path,
    expected=expected,
    fix="convert or mend the file, or cache the task without --index_only",
  )


def _check_columns(job: SplitJob, scans: list[_Scan], features: dict[str, Feature]) -> None:
  """Refuse files whose rows are not all records with the source's features."""
  first: dict[str, Feature] | None = None
  for scan in scans:
    try:
      rows = open_parquet(scan.path, columns=sorted(features))
    except AnystepError as error:
      if error.kind == "column_missing" and first is None:
        raise _make_decodes_error(
          job, scan.path, f"feature {error.fields['feature']}, which no column is"
        ) from error
      raise
    first = first or rows.features
    check_same_columns(scan.path, rows.features, expected=first)
    rows.check_records()


def _check_examples(
  task: seqio.Task, job: SplitJob, scans: list[_Scan], features: dict[str, Feature]
) -> None:
  """Compare the first example as the source gives it with the record: a source may do more than read."""
  scan = next((scan for scan in scans if scan.records), None)
  if scan is None:
    return
  record = _read_first_record(scan, features)
  expected = _read_first_example(task, job)
  try:
    parsed_example = parse_example(record, features)
    is_same = expected is not None and all(
      _is_same(parsed_example[name], value) for name, value in expected.items()
    )
  except AnystepError:
    is_same = False
  if not is_same:
    raise _make_decodes_error(job, scan.path, "something else than the first record")


def _read_first_example(task: seqio.Task, job: SplitJob) -> dict[str, np.ndarray] | None:
  """Return the source's first example; None where it has none."""
  # A source's shards may be parts of files.
  for shard in range(len(job.source_shards)):
    shard_info = seqio.ShardInfo(index=shard, num_shards=len(job.source_shards))
    dataset = task.source.get_dataset(split=job.split, shuffle=False, shard_info=shard_info)
    for example in dataset.take(1).as_numpy_iterator():
      return example
  return None


def _read_first_record(scan: _Scan, features: dict[str, Feature]) -> bytes:
  if scan.container == containers.PARQUET:
    (record,) = open_parquet(scan.path, columns=sorted(features)).read_records(np.array([0]))
    return record
  blocks = containers.open_blocks(
    scan.container, scan.path, num_records=scan.records, block_records=1, offsets=scan.offsets
  )
  try:
    (record,) = blocks.read_records([0])
  finally:
    blocks.close()
  return record


def _is_same(one: object, other: object) -> bool:
  """Compare two values, NaNs by their bits."""
  one, other = np.asarray(one), np.asarray(other)
  if one.dtype.hasobject or one.shape != other.shape:
    return np.array_equal(one, other)
  return one.tobytes() == other.tobytes()


def _make_decodes_error(job: SplitJob, path: epath.Path, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "source_decodes",
    task=job.task,
    split=job.split,
    path=path,
    expected="a source that gives the features of its files' records, or rows, as they are",
    got=got,
    fix="cache the task without --index_only",
  )


def _describe_file(scan: _Scan, name: str) -> tuple[FileEntry, np.ndarray | None]:
  """Return a file's entry, and its table of offsets where its container needs one; read the file once."""
  checksums: list[int] = []

  def see(piece: bytes) -> None:
    if scan.container == containers.PARQUET:
      checksums.extend(part_checksums(piece))

  entry = FileEntry.of_file(scan.path, name=name, records=scan.records, see=see)
  return entry, part_table(checksums) if scan.container == containers.PARQUET else scan.offsets


def _write_offsets(
  job: SplitJob, shard: int, scan: _Scan, offsets: np.ndarray, *, num_shards: int
) -> FileEntry:
  name = names.offsets_name(job.split, shard, num_shards, container=scan.container)
  path = epath.Path(job.directory) / name
  with storage.new_file(path) as file:
    np.save(file, offsets, allow_pickle=False)
  return FileEntry.of(path.name, len(offsets), path.read_bytes())
