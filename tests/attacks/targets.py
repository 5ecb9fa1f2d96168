"""What is attacked: files, what is read of them value by value, and the truth. A new part joins by a row.

A row makes its files below a folder, from examples that begin with a number, and returns its `Target`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import caches
import numpy as np
from attacks.attack import Wrong
from expected_rows import ExpectedRows

from anystep.caches.cache import open_cache
from anystep.caches.manifest import FileEntry
from anystep.caches.read_pool import ReadPool
from anystep.containers import containers
from anystep.containers.checked_file import part_checksums, part_table
from anystep.features.digest import batch_digest
from anystep.features.feature import Feature
from anystep.files import names
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

TASK, SPLIT = "demo", "train"
FEATURES = {"number": Feature(dtype="int64", shape=()), "tokens": Feature(dtype="int32", shape=(None,))}
SHARDS, SHARD_RECORDS, BLOCK_RECORDS = 4, 12, 4
VOCABULARY = b"the content of a vocabulary's file"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """Files and what is read of them.

  Attributes:
    root: the folder that holds the files.
    read: gives what is read below a folder like it, or on a store, value by value, first once files are open.
    truth: those values, where nobody touched the files.
    verify: reads every byte below a folder like it, and raises where one is not what was written.
  """

  root: pathlib.Path
  read: Callable[[pathlib.Path | str], Iterator[object]]
  truth: Sequence[object]
  verify: Callable[[pathlib.Path], object]

  def check(self, values: Iterator[object], *, start: int = 0, stop: int | None = None) -> None:
    """Compares values [start, stop) with the truth.

    Raises:
      Wrong: for other values, more, or fewer.
    """
    expected = self.truth[start:stop]
    for place, value in enumerate(expected, start):
      found = next(values, "no value")
      if found != value:
        known = self.truth.index(found) if found in self.truth else "none"
        raise Wrong(f"value {place} of {len(self.truth)} is {known} of the true ones")
    if stop is None and (more := next(values, None)) is not None:
      raise Wrong(f"a value too many: {more}")


def example_of(first: int) -> Callable[[int], caches.Example]:
  """Examples of half a kilobyte and one size: files are longer than the 4 KiB that are compared first."""

  def example(ordinal: int) -> caches.Example:
    tokens = np.random.default_rng(first + ordinal).integers(128, 16384, 256, np.int32)
    return {"number": np.int64(1_000_000 + first + ordinal), "tokens": tokens}

  return example


def preshuffled(folder: pathlib.Path, first: int, *, container: str) -> Target:
  """A cache that the job could have written, with a copy of a vocabulary."""
  built = caches.build(
    folder,
    task=TASK,
    num_examples=SHARDS * SHARD_RECORDS,
    num_shards=SHARDS,
    block_records=BLOCK_RECORDS,
    features=FEATURES,
    example_of=example_of(first),
    container=container,
  )
  entry = FileEntry.of("vocabulary", 1, VOCABULARY)

  def name_vocabulary(document: dict) -> None:
    document["fingerprint"]["provenance"]["vocabularies"] = {"tokens": entry.sha256}

  caches.tamper(built, name_vocabulary)
  path = built.directory / names.VOCABULARIES / entry.sha256
  path.parent.mkdir()
  path.write_bytes(VOCABULARY)
  return stream_of(built)


def packed(folder: pathlib.Path, first: int) -> Target:
  """A cache with a unit table; its examples are of several lengths."""

  def example(ordinal: int) -> caches.Example:
    tokens = example_of(first)(ordinal)["tokens"]
    return {"number": np.int64(ordinal), "tokens": tokens[: 40 + ordinal % 7 * 30]}

  built = caches.build(
    folder,
    task=TASK,
    num_examples=SHARDS * SHARD_RECORDS,
    num_shards=SHARDS,
    block_records=BLOCK_RECORDS,
    features=FEATURES,
    example_of=example,
  )
  return stream_of(built, packing="greedy", feature_lengths={"tokens": 256})


def as_is(folder: pathlib.Path, first: int, *, container: str) -> Target:
  """Files that were there before, described where they are."""
  built = caches.build_as_is(
    folder,
    task=TASK,
    shard_sizes=(SHARD_RECORDS,) * SHARDS,
    container=container,
    block_records=BLOCK_RECORDS,
    features=FEATURES,
    example_of=example_of(first),
  )
  return stream_of(built)


def parquet(folder: pathlib.Path, first: int) -> Target:
  """Parquet files, described where they are."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  examples = [example_of(first)(ordinal) for ordinal in range(SHARDS * SHARD_RECORDS)]
  built = caches.SmallCache(root=folder, task=TASK, split=SPLIT, examples=examples)
  built.directory.mkdir(parents=True)
  record_files, offsets_files = [], []
  for shard in range(SHARDS):
    own = examples[shard * SHARD_RECORDS : (shard + 1) * SHARD_RECORDS]
    name = caches.as_is_name(TASK, SPLIT, containers.PARQUET, shard)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
      "number": pa.array([int(example["number"]) for example in own], pa.int64()),
      "tokens": pa.array([example["tokens"].tolist() for example in own], pa.list_(pa.int32())),
    }
    pq.write_table(pa.table(columns), path, row_group_size=BLOCK_RECORDS)
    content = path.read_bytes()
    record_files.append(FileEntry.of(name, len(own), content))
    table = caches.npy(part_table(part_checksums(content)))
    offsets_name = names.offsets_name(SPLIT, shard, SHARDS, container=containers.PARQUET)
    (built.directory / offsets_name).write_bytes(table)
    offsets_files.append(FileEntry.of(offsets_name, len(part_checksums(content)), table))
  manifest = caches.manifest_as_is_of(
    task=TASK,
    split=SPLIT,
    shard_sizes=(SHARD_RECORDS,) * SHARDS,
    container=containers.PARQUET,
    block_records=BLOCK_RECORDS,
    features=FEATURES,
    record_files=record_files,
    offsets_files=offsets_files,
  )
  caches.sign(built.directory, SPLIT, manifest.to_json())
  return stream_of(built)


def stream_of(built: caches.SmallCache, **order: object) -> Target:
  """The batches of two epochs, and what else of the cache has a reader."""
  plan = Plan.start(built.open(), batch_size=8, num_epochs=2, epoch_policy="reshuffle", **order)
  text = plan.to_json()

  def read(root: pathlib.Path | str) -> Iterator[object]:
    # One file is open at a time, and no block is held: all are opened and read again and again.
    cache = open_cache(root, TASK, SPLIT, pool=ReadPool(open_files=1, budget_bytes=0))
    with open_stream(Plan.from_json(text), {TASK: cache}, prefetch_batches=0) as stream:
      yield len(cache)
      yield from (batch_digest(batch) for batch in stream)
    if cache.manifest.lengths_files:
      yield from (cache.lengths(shard).tolist() for shard in range(SHARDS))
    yield from (cache.vocabulary(sha256) for sha256 in cache.vocabularies.values())

  rows = ExpectedRows(plan, [built])
  features = ["tokens"] if "packing" in order else None
  # The oracle's word on the batches; the rest as it was written.
  truth: list[object] = [len(built.examples)]
  truth += [rows.digest(step, features=features) for step in range(rows.num_steps or 0)]
  if built.manifest["files"]["lengths"]:
    truth += [[[len(e["tokens"])] for e in built.examples[shard::SHARDS]] for shard in range(SHARDS)]
  if "vocabularies" in built.manifest["fingerprint"]["provenance"]:
    truth.append(VOCABULARY)
  target = Target(
    root=built.root,
    read=read,
    truth=truth,
    verify=lambda root: open_cache(root, TASK, SPLIT, pool=ReadPool()).verify(),
  )
  target.check(read(built.root))
  return target


TARGETS: Mapping[str, Callable[[pathlib.Path, int], Target]] = {
  "array_record": lambda folder, first: preshuffled(folder, first, container=containers.ARRAY_RECORD),
  "tfrecord": lambda folder, first: preshuffled(folder, first, container=containers.TFRECORD),
  "array_record as_is": lambda folder, first: as_is(folder, first, container=containers.ARRAY_RECORD),
  "tfrecord as_is": lambda folder, first: as_is(folder, first, container=containers.TFRECORD),
  "parquet as_is": parquet,
  "packed": packed,
}


def targets_in(folder: pathlib.Path, first: int = 0) -> dict[str, Target]:
  """All targets, each below a folder of its own."""
  return {name: make(folder / name.replace(" ", "_"), first) for name, make in TARGETS.items()}
