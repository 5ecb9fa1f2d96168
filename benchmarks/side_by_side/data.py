"""The data that readers are compared on: the same records in each reader's own files.

A data set is a directory with
  anystep/   this library's cache of the task, 64 shards in blocks of 32, compressed
  seqio/     the records as SeqIO's cache job lays them out: 64 TFRecord files, uncompressed
  grain/     the records as Grain wants them: 64 ArrayRecord files, group_size:1, uncompressed
and, of the generated one, mixture/ (100 tasks, each a cache of its own) and wide/ (a cache of 1,024 shards).
Stores are measured on bucket/ in a directory of its own: both caches, as a store has them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anystep.caches.cache import Cache, open_cache
from anystep.caches.manifest import FileEntry, Fingerprint, Manifest, SourceShard
from anystep.containers import containers
from anystep.features.feature import Feature
from anystep.files import names
from anystep.files.json_files import canonical_json
from anystep.records.writing import serialize_example

SPLIT = "train"
FEATURE_LENGTHS = {"inputs": 512, "targets": 114}
VOCABULARY_SIZE = 32000
GENERATED_TASK = "generated"
STDLIB_TASK = "stdlib_span_corruption"
WIDE_TASK = "wide"
BUCKET = "bucket"
MIXTURE_TASKS = tuple(f"task_{k:03d}" for k in range(100))

_NUM_SHARDS = 64
_WIDE_SHARDS = 1024
_WIDE_RECORDS = 32  # a shard; how long a cache takes to open does not depend on it
_BLOCK_RECORDS = 32
_SHORTEST = {"inputs": 100, "targets": 20}
_FEATURES = {name: Feature(dtype="int32", shape=(None,)) for name in FEATURE_LENGTHS}
_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
  """A data set on disk: its title for people, its directory and its task's name."""

  title: str
  directory: pathlib.Path
  task: str

  def cache(self) -> Cache:
    """The cache in this library's own format."""
    return open_cache(self.directory / "anystep", self.task, SPLIT)


def generated(work_dir: pathlib.Path, num_examples: int) -> DataSet:
  """Examples of random ids, 100 to 512 inputs and 20 to 114 targets; made unless it is there."""

  def make(directory: pathlib.Path) -> None:
    records, lengths = _random_records(num_examples)
    cache = _write_cache(directory / "anystep", GENERATED_TASK, records, lengths, num_shards=_NUM_SHARDS)
    _write_for_others(directory, cache)
    for task in MIXTURE_TASKS:
      _link_cache(cache, directory / "mixture", task)
    kept = _WIDE_SHARDS * _WIDE_RECORDS
    _write_cache(directory / "wide", WIDE_TASK, records[:kept], lengths[:kept], num_shards=_WIDE_SHARDS)

  directory = _made_once(work_dir / f"generated-{num_examples}", make)
  return DataSet(title=f"{num_examples:,} generated examples", directory=directory, task=GENERATED_TASK)


def in_bucket(work_dir: pathlib.Path, num_examples: int) -> pathlib.Path:
  """A directory with a bucket's caches, of those examples in 64 shards and of fewer in 1,024; made once."""

  def make(directory: pathlib.Path) -> None:
    records, lengths = _random_records(num_examples)
    _write_cache(directory / BUCKET, GENERATED_TASK, records, lengths, num_shards=_NUM_SHARDS)
    # Files of ten blocks, again and again of the same records: no read gets all of one.
    chosen = np.arange(_WIDE_SHARDS * _BLOCK_RECORDS * 10) % num_examples
    wide = [records[k] for k in chosen.tolist()]
    _write_cache(directory / BUCKET, WIDE_TASK, wide, lengths[chosen], num_shards=_WIDE_SHARDS)

  return _made_once(work_dir / f"stores-{num_examples}", make)


def stdlib(work_dir: pathlib.Path, *, corrupted: bool) -> DataSet:
  """The cache of the standard library that `anystep-cache` makes.

  Args:
    work_dir: where data is made and kept.
    corrupted: whether spans are corrupted in the cache, so that every reader delivers the same rows: what
      comes after the cache draws at random. Else readers corrupt them.
  """

  def make(directory: pathlib.Path) -> None:
    command = [
      *(sys.executable, "-m", "anystep.cache_job"),
      f"--tasks={STDLIB_TASK}",
      "--module_import=anystep.tasks.stdlib",
      f"--output_cache_dir={directory / 'anystep'}",
    ]
    if corrupted:
      command += ["--cache_at=end", f"--task_feature_lengths={json.dumps(FEATURE_LENGTHS)}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    _write_for_others(directory, open_cache(directory / "anystep", STDLIB_TASK, SPLIT))

  directory = _made_once(work_dir / ("stdlib" if corrupted else "stdlib-uncorrupted"), make)
  data_set = DataSet(title="", directory=directory, task=STDLIB_TASK)
  how = "" if corrupted else " spans corrupted at reading,"
  title = f"The standard library,{how} {len(data_set.cache()):,} examples"
  return dataclasses.replace(data_set, title=title)


def _made_once(directory: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
  if not directory.exists():
    print(f"making {directory.name}", file=sys.stderr, flush=True)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    make(partial)
    partial.rename(directory)
  return directory


def _random_records(num_examples: int) -> tuple[list[bytes], np.ndarray]:
  """Serialized examples and their lengths, `(examples, 2) uint32`."""
  rng = np.random.default_rng(_SEED)
  columns = [
    rng.integers(_SHORTEST[name], longest, num_examples, endpoint=True)
    for name, longest in FEATURE_LENGTHS.items()
  ]
  lengths = np.stack(columns, axis=1).astype(np.uint32)
  records = [
    serialize_example(
      {name: rng.integers(2, VOCABULARY_SIZE, n) for name, n in zip(FEATURE_LENGTHS, row, strict=True)}
    )
    for row in lengths.tolist()
  ]
  return records, lengths


def _write_cache(
  root: pathlib.Path, task: str, records: Sequence[bytes], lengths: np.ndarray, *, num_shards: int
) -> Cache:
  """Writes records as the cache of a task, the k-th as its example of index k."""
  directory = root / task
  directory.mkdir(parents=True)
  options = containers.container_options(containers.ARRAY_RECORD, _BLOCK_RECORDS)
  record_files, lengths_files = [], []
  for shard in range(num_shards):
    path = directory / names.records_name(SPLIT, containers.ARRAY_RECORD, shard, num_shards)
    own = records[shard::num_shards]
    containers.write_array_record(path, own, options=options)
    record_files.append(FileEntry.of(path.name, len(own), path.read_bytes()))
    path = directory / names.lengths_name(SPLIT, shard, num_shards)
    np.save(path, lengths[shard::num_shards])
    lengths_files.append(FileEntry.of(path.name, len(own), path.read_bytes()))
  description_files = []
  for name, document in _descriptions(len(records), num_shards).items():
    (directory / name).write_text(canonical_json(document, indent=2))
    description_files.append(FileEntry.of(name, 1, (directory / name).read_bytes()))
  manifest = Manifest(
    task=task,
    split=SPLIT,
    seed=0,
    num_examples=len(records),
    num_shards=num_shards,
    block_records=_BLOCK_RECORDS,
    container=containers.ARRAY_RECORD,
    container_options=options,
    features=_FEATURES,
    record_files=tuple(record_files),
    lengths_files=tuple(lengths_files),
    description_files=tuple(description_files),
    source_shards=(SourceShard(name="generated", examples=len(records)),),
    fingerprint=_fingerprint(task),
  )
  _complete(directory, manifest)
  return open_cache(root, task, SPLIT)


def _fingerprint(task: str) -> Fingerprint:
  return Fingerprint(reader={"task": task, "preprocessors": []}, provenance={"source": "benchmarks"})


def _complete(directory: pathlib.Path, manifest: Manifest) -> None:
  """Writes what makes a directory of files a cache."""
  content = manifest.to_json().encode()
  entry = FileEntry.of(names.manifest_name(SPLIT), 1, content)
  (directory / entry.name).write_bytes(content)
  (directory / names.COMPLETED).write_text(f"{SPLIT} {entry.sha256}\n")


def _link_cache(cache: Cache, root: pathlib.Path, task: str) -> None:
  """Makes the same files the cache of another task."""
  directory = root / task
  directory.mkdir(parents=True)
  for entry in cache.manifest.files:
    os.link(cache.directory / entry.name, directory / entry.name)
  _complete(directory, dataclasses.replace(cache.manifest, task=task, fingerprint=_fingerprint(task)))


def _write_for_others(directory: pathlib.Path, cache: Cache) -> None:
  """Writes a cache's records, file by file, in SeqIO's layout and in Grain's."""
  import tensorflow as tf
  from array_record.python import array_record_module

  seqio_dir, grain_dir = directory / "seqio" / cache.manifest.task, directory / "grain"
  seqio_dir.mkdir(parents=True)
  grain_dir.mkdir(parents=True)
  num_shards = cache.manifest.num_shards
  for shard, entry in enumerate(cache.manifest.record_files):
    records = array_record_module.ArrayRecordReader(str(cache.directory / entry.name)).read_all()
    with tf.io.TFRecordWriter(
      str(seqio_dir / names.records_name(SPLIT, "tfrecord", shard, num_shards))
    ) as out:
      for record in records:
        out.write(record)
    containers.write_array_record(
      grain_dir / names.records_name(SPLIT, containers.ARRAY_RECORD, shard, num_shards),
      records,
      options="group_size:1,uncompressed",
    )
  for entry in cache.manifest.description_files:
    shutil.copy(cache.directory / entry.name, seqio_dir)
  (seqio_dir / "COMPLETED").touch()


def _descriptions(num_examples: int, num_shards: int) -> dict[str, Any]:
  """SeqIO's info and stats, by file name."""
  features = {name: {"dtype": "int32", "shape": [None]} for name in FEATURE_LENGTHS}
  return {
    names.info_name(SPLIT): {"num_shards": num_shards, "features": features},
    names.stats_name(SPLIT): {"examples": num_examples},
  }
