"""The manifest: what a split of a cache consists of, to the byte (design section 4)."""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.names import info_name, lengths_name, records_name, stats_name

FORMAT = "anystep-cache"
FORMAT_VERSION = 1
ORDER_VERSION = 1
HEAD_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
  """A cached feature; `shape` is that of one example, with None in the first place for a sequence."""

  dtype: str
  shape: tuple[int | None, ...]

  def __post_init__(self):
    np.dtype(object if self.dtype == "string" else self.dtype)
    for place, size in enumerate(self.shape):
      if not (size is None and place == 0) and not is_count(size):
        raise ValueError(f"wrong shape {self.shape}")

  @property
  def sequence(self) -> bool:
    """Whether the feature's first dimension is its length in tokens."""
    return bool(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
  """A file of the cache. `records` is its number of records, of a lengths table its rows, else 1."""

  name: str
  records: int
  bytes: int
  sha256: str
  head_sha256: str

  def __post_init__(self):
    if not (is_count(self.records) and is_count(self.bytes)):
      raise ValueError(f"wrong records or bytes of {self.name}")

  @classmethod
  def of(cls, name: str, records: int, content: builtins.bytes) -> FileEntry:
    """Describes a file from its content."""
    return cls(
      name=name,
      records=records,
      bytes=len(content),
      sha256=hashlib.sha256(content).hexdigest(),
      head_sha256=hashlib.sha256(content[:HEAD_BYTES]).hexdigest(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceShard:
  """A shard of the task's source: its name and how many examples came of it."""

  name: str
  examples: int

  def __post_init__(self):
    if not is_count(self.examples):
      raise ValueError(f"wrong examples of {self.name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
  """What decided the cached examples; a difference in `reader` is refused, in `provenance` a warning."""

  reader: Mapping[str, Any]
  provenance: Mapping[str, Any]

  @property
  def reader_sha256(self) -> str:
    """Names the reader part: sha256 of its canonical JSON."""
    return hashlib.sha256(canonical_json(self.reader).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """One split of one task's cache.

  Attributes:
    layout: `preshuffled`, the only one that this version writes.
    seed: the preshuffle's.
    num_examples: N. num_shards: S. block_records: g.
    container: name of the record format; container_options: what its writer was told.
    cache_at: `placeholder` or `end`; task_feature_lengths: the lengths that `end` was cached for.
    features: every cached feature by name.
    record_files, lengths_files: one per shard, in shard order. description_files: SeqIO's info and stats.
    source_shards: in the source's order.
  """

  task: str
  split: str
  seed: int
  num_examples: int
  num_shards: int
  block_records: int
  container: str
  container_options: str
  features: Mapping[str, Feature]
  record_files: Sequence[FileEntry]
  lengths_files: Sequence[FileEntry]
  description_files: Sequence[FileEntry]
  source_shards: Sequence[SourceShard]
  fingerprint: Fingerprint
  cache_at: str = "placeholder"
  task_feature_lengths: Mapping[str, int] | None = None
  range_examples: int | None = None
  base_seed: int = 0
  layout: str = "preshuffled"

  def __post_init__(self):
    checks = {
      "layout": self.layout == "preshuffled",
      "task": isinstance(self.task, str),
      "seed": isinstance(self.seed, int),
      "base_seed": isinstance(self.base_seed, int),
      "num_examples": is_count(self.num_examples),
      "num_shards": is_count(self.num_shards, least=1),
      "block_records": is_count(self.block_records, least=1),
      "range_examples": self.range_examples is None or is_count(self.range_examples, least=1),
      "container": self.container == "array_record",
      "cache_at": self.cache_at in ("placeholder", "end"),
      "files": len(self.record_files) == len(self.lengths_files) == self.num_shards,
    }
    _refuse(checks)
    sizes = shard_sizes(self.num_examples, self.num_shards).tolist()
    shards = range(self.num_shards)
    _refuse(
      {
        "files.records": [(file.name, file.records) for file in self.record_files]
        == [(records_name(self.split, self.container, s, self.num_shards), sizes[s]) for s in shards],
        "files.lengths": [(file.name, file.records) for file in self.lengths_files]
        == [(lengths_name(self.split, s, self.num_shards), sizes[s]) for s in shards],
        "files.descriptions": [file.name for file in self.description_files]
        == [info_name(self.split), stats_name(self.split)],
        "source_shards": sum(shard.examples for shard in self.source_shards) == self.num_examples,
      }
    )

  @property
  def sequence_features(self) -> list[str]:
    """Names of the features with a length: the columns of the lengths tables, sorted."""
    return sorted(name for name, feature in self.features.items() if feature.sequence)

  @property
  def files(self) -> list[FileEntry]:
    """All files that the manifest vouches for."""
    return [*self.record_files, *self.lengths_files, *self.description_files]

  def to_json(self) -> str:
    """The manifest file's text: the same bytes for the same manifest."""
    return canonical_json(self._document(), indent=1) + "\n"

  def _document(self) -> dict[str, Any]:
    fingerprint = {
      "reader_sha256": self.fingerprint.reader_sha256,
      "reader": self.fingerprint.reader,
      "provenance": self.fingerprint.provenance,
    }
    return {
      "format": FORMAT,
      "format_version": FORMAT_VERSION,
      "order_version": ORDER_VERSION,
      **{name: getattr(self, name) for name in _PLAIN_FIELDS},
      "container": {"name": self.container, "options": self.container_options},
      "features": {
        name: {"dtype": f.dtype, "shape": list(f.shape), "sequence": f.sequence}
        for name, f in self.features.items()
      },
      "files": {
        "records": [dataclasses.asdict(f) for f in self.record_files],
        "lengths": [dataclasses.asdict(f) for f in self.lengths_files],
        "descriptions": [dataclasses.asdict(f) for f in self.description_files],
      },
      "source_shards": [dataclasses.asdict(s) for s in self.source_shards],
      "fingerprint": fingerprint,
    }

  @classmethod
  def from_json(cls, text: str, *, path: object = "manifest") -> Manifest:
    """Reads and checks a manifest.

    Raises:
      AnystepError: 65 `manifest_version` or `manifest_invalid`.
    """
    try:
      document = json.loads(text)
      found = (document["format"], document["format_version"], document["order_version"])
      if found == (FORMAT, FORMAT_VERSION, ORDER_VERSION):
        manifest = cls._from_document(document)
        # Nothing that the file says may go unread.
        if canonical_json(manifest._document()) != canonical_json(document):
          raise ValueError("it says more than a manifest does, or says it otherwise")
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise AnystepError(
        ExitCode.DATA,
        "manifest_invalid",
        path=path,
        got=f"{type(error).__name__}: {error}",
        fix="restore the file from where the cache was made, or cache the task again",
      ) from error
    raise AnystepError(
      ExitCode.DATA,
      "manifest_version",
      path=path,
      expected=(FORMAT, FORMAT_VERSION, ORDER_VERSION),
      got=found,
      fix="read the cache with the anystep version that wrote it, or cache the task again",
    )

  @classmethod
  def _from_document(cls, document: Mapping[str, Any]) -> Manifest:
    fingerprint = Fingerprint(
      reader=document["fingerprint"]["reader"], provenance=document["fingerprint"]["provenance"]
    )
    if fingerprint.reader_sha256 != document["fingerprint"]["reader_sha256"]:
      raise ValueError("fingerprint.reader_sha256 is not that of fingerprint.reader")
    return cls(
      **{name: document[name] for name in _PLAIN_FIELDS},
      container=document["container"]["name"],
      container_options=document["container"]["options"],
      features={
        name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in document["features"].items()
      },
      record_files=tuple(FileEntry(**f) for f in document["files"]["records"]),
      lengths_files=tuple(FileEntry(**f) for f in document["files"]["lengths"]),
      description_files=tuple(FileEntry(**f) for f in document["files"]["descriptions"]),
      source_shards=tuple(SourceShard(**s) for s in document["source_shards"]),
      fingerprint=fingerprint,
    )


_PLAIN_FIELDS = (
  "layout",
  "task",
  "split",
  "seed",
  "base_seed",
  "num_examples",
  "num_shards",
  "block_records",
  "cache_at",
  "task_feature_lengths",
  "range_examples",
)


def _refuse(checks: Mapping[str, bool]) -> None:
  wrong = [name for name, right in checks.items() if not right]
  if wrong:
    raise ValueError(f"wrong or inconsistent {', '.join(wrong)}")


def canonical_json(value: object, *, indent: int | None = None) -> str:
  """JSON with sorted keys and plain ASCII, so that equal values are equal bytes."""
  separators = (",", ": ") if indent else (",", ":")
  return json.dumps(value, sort_keys=True, indent=indent, separators=separators, allow_nan=False)


def is_count(value: object, *, least: int = 0) -> bool:
  """Whether a value from a file is a whole number, no bool, and not below `least`."""
  return type(value) is int and value >= least


def shard_sizes(num_examples: int, num_shards: int) -> np.ndarray:
  """Records of each shard when example i is in shard i mod S: `(S,) int64`.

  >>> shard_sizes(10, 4)
  array([3, 3, 2, 2])
  """
  return (num_examples - np.arange(num_shards) + num_shards - 1) // num_shards


def default_num_shards(num_examples: int, block_records: int) -> int:
  """S where nobody chose it: 64, and 1 for a split that would not fill one block a shard."""
  return 64 if num_examples >= 64 * block_records else 1
