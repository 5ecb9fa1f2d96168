"""Small caches for tests, made with the library alone; the order specification places their examples."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

import oracle
from anystep.caches.cache import Cache, open_cache
from anystep.caches.manifest import AS_IS, FileEntry, Fingerprint, Manifest, SourceShard
from anystep.caches.read_pool import ReadPool
from anystep.containers import containers
from anystep.features.feature import Feature
from anystep.files import names
from anystep.files.json_files import canonical_json
from anystep.records.writing import serialize_example

Example = dict[str, Any]

FEATURES = {
  "inputs": Feature(dtype="int32", shape=(None,)),
  "number": Feature(dtype="int64", shape=()),
  "targets": Feature(dtype="int32", shape=(None,)),
  "weights": Feature(dtype="float32", shape=(None, 2)),
}
FEATURE_LENGTHS = {"inputs": 5, "targets": 4, "weights": 3}


def example_of(ordinal: int) -> Example:
  """An example that no other ordinal has; some sequences are empty, some longer than FEATURE_LENGTHS."""
  return {
    "inputs": np.arange(ordinal % 7, dtype=np.int32) + ordinal,
    "number": np.int64(ordinal),
    "targets": np.arange((ordinal + 3) % 6, dtype=np.int32) + 1000 + ordinal,
    "weights": np.arange(2 * (ordinal % 4), dtype=np.float32).reshape(-1, 2) / 8 + ordinal,
  }


def large_example_of(ordinal: int) -> Example:
  """An example of a few kilobytes that do not compress."""
  return {"blob": np.array(np.random.default_rng(ordinal).bytes(3000), object)}


LARGE_FEATURES = {"blob": Feature(dtype="string", shape=())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallCache:
  """A cache on disk and what it was made of.

  Attributes:
    root: what programs call --cache_dir.
    directory: the task's.
    examples: by index.
    manifest: the manifest file, as JSON gives it: what the oracle takes.
  """

  root: pathlib.Path
  task: str
  split: str
  examples: Sequence[Example]

  @property
  def directory(self) -> pathlib.Path:
    return self.root.joinpath(*self.task.split(":"))

  @property
  def manifest(self) -> dict[str, Any]:
    return json.loads((self.directory / f"manifest.{self.split}.json").read_text())

  def open(self, *, pool: ReadPool | None = None) -> Cache:
    return open_cache(self.root, self.task, self.split, pool=pool or ReadPool())

  def at(self, root: pathlib.Path) -> SmallCache:
    """The same cache, copied to another root."""
    return dataclasses.replace(self, root=root)


def source_sizes_of(num_examples: int) -> list[int]:
  """Sizes of source shards that are uneven, one of them empty."""
  return [num_examples // 2, 0, num_examples - num_examples // 2 - num_examples // 5, num_examples // 5]


def build(
  root: pathlib.Path,
  *,
  task: str = "demo",
  split: str = "train",
  num_examples: int = 50,
  num_shards: int = 4,
  block_records: int = 4,
  seed: int = 0,
  source_sizes: Sequence[int] | None = None,
  features: Mapping[str, Feature] = FEATURES,
  example_of: Callable[[int], Example] = example_of,
  container: str = containers.ARRAY_RECORD,
) -> SmallCache:
  """Writes a split of a task's cache below root, beside the splits that are there."""
  source_sizes = source_sizes_of(num_examples) if source_sizes is None else source_sizes
  examples: list[Example | None] = [None] * num_examples
  ordinal = 0
  for source_shard, size in enumerate(source_sizes):
    for place in range(size):
      index = oracle.index_of(source_shard, place, task, split, seed, list(source_sizes))
      assert examples[index] is None
      examples[index] = example_of(ordinal)
      ordinal += 1
  built = SmallCache(root=root, task=task, split=split, examples=examples)  # type: ignore[arg-type]
  built.directory.mkdir(parents=True, exist_ok=True)
  sequences = sorted(name for name, feature in features.items() if feature.shape)
  record_files, lengths_files, offsets_files = [], [], []
  for shard in range(num_shards):
    own = built.examples[shard::num_shards]
    path = built.directory / names.records_name(split, container, shard, num_shards)
    offsets_path = built.directory / names.offsets_name(split, shard, num_shards)
    offsets_files += write_shard(container, path, own, block_records=block_records, offsets_path=offsets_path)
    record_files.append(FileEntry.of(path.name, len(own), path.read_bytes()))
    lengths = [[len(example[name]) for name in sequences] for example in own]
    content = npy(np.array(lengths, np.uint32).reshape(len(own), len(sequences)))
    name = names.lengths_name(split, shard, num_shards)
    (built.directory / name).write_bytes(content)
    lengths_files.append(FileEntry.of(name, len(own), content))
  description_files = []
  for name, document in {
    names.info_name(split): {"num_shards": num_shards, "features": {n: f.dtype for n, f in features.items()}},
    names.stats_name(split): {"examples": num_examples},
  }.items():
    content = canonical_json(document, indent=2).encode()
    (built.directory / name).write_bytes(content)
    description_files.append(FileEntry.of(name, 1, content))
  manifest = manifest_of(
    task=task,
    split=split,
    seed=seed,
    num_examples=num_examples,
    num_shards=num_shards,
    block_records=block_records,
    features=features,
    source_sizes=source_sizes,
    container=container,
    record_files=record_files,
    lengths_files=lengths_files,
    offsets_files=offsets_files,
    description_files=description_files,
  )
  sign(built.directory, split, manifest.to_json())
  return built


def build_as_is(
  root: pathlib.Path,
  *,
  task: str = "demo",
  split: str = "train",
  shard_sizes: Sequence[int] = (3, 0, 7, 5),
  container: str = containers.ARRAY_RECORD,
  block_records: int = 1,
  features: Mapping[str, Feature] = FEATURES,
  example_of: Callable[[int], Example] = example_of,
) -> SmallCache:
  """Writes files below root/corpus and, what a cache in layout as_is adds to them."""
  examples = [example_of(ordinal) for ordinal in range(sum(shard_sizes))]
  built = SmallCache(root=root, task=task, split=split, examples=examples)
  built.directory.mkdir(parents=True, exist_ok=True)
  record_files, offsets_files = [], []
  start = 0
  for shard, size in enumerate(shard_sizes):
    name = as_is_name(task, split, container, shard)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets_files += write_shard(
      container,
      path,
      examples[start : start + size],
      block_records=block_records,
      offsets_path=built.directory / names.offsets_name(split, shard, len(shard_sizes)),
    )
    record_files.append(FileEntry.of(name, size, path.read_bytes()))
    start += size
  manifest = manifest_as_is_of(
    task=task,
    split=split,
    shard_sizes=shard_sizes,
    container=container,
    block_records=block_records,
    features=features,
    record_files=record_files,
    offsets_files=offsets_files,
  )
  sign(built.directory, split, manifest.to_json())
  return built


def as_is_name(task: str, split: str, container: str, shard: int) -> str:
  """The name, below the root, of a file that `build_as_is` finds there."""
  return f"corpus/{task.replace(':', '/')}/{split}-part{shard}.{container}"


def write_shard(
  container: str,
  path: pathlib.Path,
  examples: Sequence[Example],
  *,
  block_records: int,
  offsets_path: pathlib.Path,
) -> list[FileEntry]:
  """Writes examples as a file and returns the entry of its offsets file, if its container needs one."""
  offsets = containers.write_shard(
    container,
    path,
    [serialize_example(example) for example in examples],
    options=containers.container_options(container, block_records),
  )
  if offsets is None:
    return []
  content = npy(offsets)
  offsets_path.write_bytes(content)
  return [FileEntry.of(offsets_path.name, len(examples), content)]


def manifest_of(
  *,
  task: str = "demo",
  split: str = "train",
  num_examples: int = 50,
  num_shards: int = 4,
  block_records: int = 4,
  source_sizes: Sequence[int] | None = None,
  features: Mapping[str, Feature] = FEATURES,
  container: str = containers.ARRAY_RECORD,
  **changes: Any,
) -> Manifest:
  """A manifest; where no files are given, of files that nobody wrote."""
  sizes = [len(range(shard, num_examples, num_shards)) for shard in range(num_shards)]
  fields = {
    "seed": 0,
    "container_options": containers.container_options(container, block_records),
    "record_files": [
      FileEntry.of(names.records_name(split, container, shard, num_shards), size, b"")
      for shard, size in enumerate(sizes)
    ],
    "lengths_files": [
      FileEntry.of(names.lengths_name(split, shard, num_shards), size, b"")
      for shard, size in enumerate(sizes)
    ],
    "offsets_files": offsets_entries(split, container, sizes),
    "description_files": [
      FileEntry.of(name, 1, b"") for name in (names.info_name(split), names.stats_name(split))
    ],
    "source_shards": [
      SourceShard(name=f"source-{k} of Zürich", examples=size)
      for k, size in enumerate(source_sizes_of(num_examples) if source_sizes is None else source_sizes)
    ],
    "fingerprint": fingerprint_of(task),
  }
  return Manifest(
    task=task,
    split=split,
    num_examples=num_examples,
    num_shards=num_shards,
    block_records=block_records,
    features=features,
    container=container,
    **{**fields, **changes},
  )


def manifest_as_is_of(
  *,
  task: str = "demo",
  split: str = "train",
  shard_sizes: Sequence[int] = (3, 0, 7, 5),
  block_records: int = 1,
  features: Mapping[str, Feature] = FEATURES,
  container: str = containers.ARRAY_RECORD,
  **changes: Any,
) -> Manifest:
  """A manifest in layout as_is; where no files are given, of files that nobody wrote."""
  shards = [(as_is_name(task, split, container, shard), size) for shard, size in enumerate(shard_sizes)]
  fields = {
    "layout": AS_IS,
    "seed": 0,
    "num_examples": sum(shard_sizes),
    "num_shards": len(shard_sizes),
    "container_options": ""
    if container == containers.PARQUET
    else containers.container_options(container, block_records),
    "record_files": [FileEntry.of(name, size, b"") for name, size in shards],
    "lengths_files": [],
    "offsets_files": offsets_entries(split, container, shard_sizes),
    "description_files": [],
    "source_shards": [SourceShard(name=name, examples=size) for name, size in shards],
    "fingerprint": fingerprint_of(task),
  }
  return Manifest(
    task=task,
    split=split,
    block_records=block_records,
    features=features,
    container=container,
    **{**fields, **changes},
  )


def offsets_entries(split: str, container: str, sizes: Sequence[int]) -> list[FileEntry]:
  """The entries of offsets files that nobody wrote; none where the container needs none."""
  return [
    FileEntry.of(names.offsets_name(split, shard, len(sizes)), size, b"")
    for shard, size in enumerate(sizes if container == containers.TFRECORD else [])
  ]


def fingerprint_of(task: str) -> Fingerprint:
  """The fingerprint of a task that tests made."""
  return Fingerprint(reader={"task": task, "preprocessors": []}, provenance={"source": "tests"})


def cache_without_files(**fields: Any) -> Cache:
  """A cache for what reads its manifest alone, such as a plan; in layout as_is by shard_sizes."""
  manifest = manifest_as_is_of(**fields) if "shard_sizes" in fields else manifest_of(**fields)
  sha256 = hashlib.sha256(manifest.to_json().encode()).hexdigest()
  return Cache(epath.Path("/nowhere"), manifest, sha256)


def sign(directory: pathlib.Path, split: str, manifest_text: str) -> None:
  """Writes a split's manifest and its line in COMPLETED."""
  (directory / f"manifest.{split}.json").write_text(manifest_text)
  completed = directory / "COMPLETED"
  lines = dict(line.split() for line in completed.read_text().splitlines()) if completed.exists() else {}
  lines[split] = hashlib.sha256(manifest_text.encode()).hexdigest()
  completed.write_text("".join(f"{name} {sha256}\n" for name, sha256 in sorted(lines.items())))


def tamper(cache: SmallCache, change: Callable[[dict[str, Any]], object]) -> None:
  """Changes the manifest and signs it anew, as one would who means harm."""
  document = cache.manifest
  change(document)
  sign(cache.directory, cache.split, canonical_json(document, indent=1) + "\n")


def flip(path: pathlib.Path, position: int, mask: int = 1) -> None:
  """Flips bits of one byte of a file."""
  content = bytearray(path.read_bytes())
  content[position] ^= mask
  path.write_bytes(content)


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
  """The array as an .npy file's bytes."""
  buffer = io.BytesIO()
  np.save(buffer, array, allow_pickle=allow_pickle)
  return buffer.getvalue()


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
  """Whether two arrays are the same to the type of their elements (an array in an array equals bytes)."""
  one, other = np.asarray(one), np.asarray(other)
  elements = list(zip(one.reshape(-1).tolist(), other.reshape(-1).tolist(), strict=one.shape == other.shape))
  return (one.dtype, one.shape) == (other.dtype, other.shape) and all(
    type(a) is type(b) and a == b for a, b in elements
  )


def padded_row(example: Example, lengths: Mapping[str, int] = FEATURE_LENGTHS) -> Example:
  """An example as one row of a batch: sequences cut and filled with zeros."""
  row = {}
  for name, value in example.items():
    if name in lengths:
      filled = np.zeros((lengths[name], *value.shape[1:]), value.dtype)
      filled[: len(value)] = value[: lengths[name]]
      value = filled
    row[name] = value
  return row


def expected_batch(
  cache: SmallCache, step: int, *, batch_size: int, num_epochs: int | None = None, **order: Any
) -> list[Example]:
  """The rows of a step's batch as the order specification says, padding rows as zeros."""
  zeros = {name: np.zeros_like(value) for name, value in padded_row(cache.examples[0]).items()}
  rows = [zeros] * batch_size
  for row in oracle.what_was_at(cache.manifest, batch_size, step, step + 1, num_epochs=num_epochs, **order):
    (example,) = row["examples"]
    rows[row["row"]] = padded_row(cache.examples[example["index"]])
  return rows


def oracle_digest(rows: Iterable[Example]) -> str:
  """The oracle's digest of a batch."""
  return oracle.batch_digest(
    [{name: (value.dtype.name, value.shape, value.tobytes()) for name, value in row.items()} for row in rows]
  )
