"""The manifest: files, features and origin of a split, to the byte (docs/order.md#files-of-a-cache)."""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from anystep.containers.containers import CONTAINERS, FORMATS, find_format
from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.features.feature import Feature
from anystep.files import names
from anystep.files.json_files import MALFORMED, canonical_json, parse_json
from anystep.limits import (
  MAX_SHARDS,
  are_feature_lengths,
  is_count,
  is_name,
  is_seed,
  is_sha256,
  refuse_wrong,
)

FORMAT = "anystep-cache"
FORMAT_VERSION = 1
ORDER_VERSION = 1
HEAD_BYTES = 4096
_HASHED_BYTES = 1 << 24

# Layouts: files that the cache job wrote in the preshuffle's order, or files that were there before.
PRESHUFFLED = "preshuffled"
AS_IS = "as_is"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
  """A file of the cache. `records` is its number of records, of a table its rows, else 1.

  Files are in the task's directory. Only records in layout `as_is` are elsewhere: their names are relative to
  the caches' root, and `names.record_path` makes paths of them.
  """

  name: str
  records: int
  bytes: int
  sha256: str
  head_sha256: str

  def __post_init__(self):
    refuse_wrong(
      records=is_count(self.records),
      bytes=is_count(self.bytes),
      sha256=is_sha256(self.sha256),
      head_sha256=is_sha256(self.head_sha256),
    )

  @classmethod
  def of(cls, name: str, records: int, content: builtins.bytes) -> FileEntry:
    """Return the entry of a file with this content."""
    return cls(
      name=name,
      records=records,
      bytes=len(content),
      sha256=hashlib.sha256(content).hexdigest(),
      head_sha256=hashlib.sha256(content[:HEAD_BYTES]).hexdigest(),
    )

  @classmethod
  def of_file(
    cls,
    path: epath.PathLike,
    *,
    name: str,
    records: int,
    see: Callable[[builtins.bytes], object] = lambda piece: None,
  ) -> FileEntry:
    """Return the entry of a file of any size; `see` is called with each piece, 16 MiB except the last one."""
    digest, size, head = hashlib.sha256(), 0, b""
    with epath.Path(path).open("rb") as file:
      while content := file.read(_HASHED_BYTES):
        head = head or content[:HEAD_BYTES]
        digest.update(content)
        size += len(content)
        see(content)
    return cls(
      name=name,
      records=records,
      bytes=size,
      sha256=digest.hexdigest(),
      head_sha256=hashlib.sha256(head).hexdigest(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceShard:
  """A shard of the task's source: its name and the number of its examples in the split."""

  name: str
  examples: int

  def __post_init__(self):
    refuse_wrong(examples=is_count(self.examples))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
  """Settings that decided the cached examples.

  Readers refuse a difference in `reader`; a difference in `provenance` is a warning.
  """

  reader: Mapping[str, Any]
  provenance: Mapping[str, Any]

  def __post_init__(self):
    features, vocabularies = self.reader.get("output_features", {}), self.provenance.get("vocabularies", {})
    calls = self.provenance.get("calls", {})
    refuse_wrong(
      output_features=isinstance(features, Mapping),
      calls=isinstance(calls, Mapping) and all(isinstance(called, Mapping) for called in calls.values()),
      vocabularies=isinstance(vocabularies, Mapping) and all(map(is_sha256, vocabularies.values())),
    )

  @property
  def reader_sha256(self) -> str:
    """The reader part's name: sha256 of its canonical JSON."""
    return hashlib.sha256(canonical_json(self.reader).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """One split of one task's cache.

  Attributes:
    layout: `preshuffled`: the cache job wrote the shards, example i as record i div S of shard i mod S.
      `as_is`: shards are files that were there before, and the index counts records through them in order.
    seed: the preshuffle's; 0 in layout `as_is`.
    num_examples: N. num_shards: S. block_records: g, in layout `as_is` the files' own group size.
    container: `array_record` or `tfrecord`, in layout `as_is` `parquet` too; container_options: the
      options of its writer.
    cache_at: `placeholder` or `end`; task_feature_lengths: the lengths that `end` was cached for.
    features: every cached feature by name.
    record_files: one per shard, in shard order.
    lengths_files: one per shard; none in layout `as_is`.
    offsets_files: of TFRecord one per shard, each record's offset; of Parquet one per shard, the offset and
      checksum of each part; else none.
    description_files: SeqIO's info and stats, and where examples were bad, those; none in layout `as_is`.
    source_shards: in the source's order; in layout `as_is` the shards themselves.
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
  offsets_files: Sequence[FileEntry] = ()
  layout: str = PRESHUFFLED

  def __post_init__(self):
    as_is = self.layout == AS_IS
    checks = {
      "layout": self.layout in (PRESHUFFLED, AS_IS),
      "task": is_name(self.task),
      "seed": is_seed(self.seed),
      "base_seed": is_seed(self.base_seed),
      "num_examples": is_count(self.num_examples),
      "num_shards": is_count(self.num_shards, least=1, most=MAX_SHARDS),
      "block_records": is_count(self.block_records, least=1),
      "range_examples": self.range_examples is None or is_count(self.range_examples, least=1),
      "container": self.container in (FORMATS if as_is else CONTAINERS),
      "container_options": isinstance(self.container_options, str),
      "cache_at": self.cache_at in ("placeholder", "end"),
      "task_feature_lengths": self.task_feature_lengths is None
      or are_feature_lengths(self.task_feature_lengths),
      "files": len(self.record_files) == self.num_shards
      and len(self.lengths_files) == (0 if as_is else self.num_shards)
      and len(self.offsets_files) == (self.num_shards if self.has_offsets else 0),
    }
    _refuse(checks)
    _refuse(self._checks_as_is() if as_is else self._checks_preshuffled())
    _refuse({"files.offsets": self._offsets_are_of_shards()})

  def _checks_preshuffled(self) -> dict[str, bool]:
    def records_name(split: str, shard: int, num_shards: int) -> str:
      return names.records_name(split, self.container, shard, num_shards)

    sizes = shard_sizes(self.num_examples, self.num_shards).tolist()
    return {
      "files.records": self._of_shards(self.record_files, records_name)
      and [file.records for file in self.record_files] == sizes,
      "files.lengths": self._of_shards(self.lengths_files, names.lengths_name),
      "files.descriptions": [file.name for file in self.description_files]
      == [
        names.info_name(self.split),
        names.stats_name(self.split),
        *([names.quarantine_name(self.split)] if self.bad_examples else []),
      ],
      "source_shards": all(isinstance(shard.name, str) for shard in self.source_shards)
      and sum(shard.examples for shard in self.source_shards) == self.num_examples,
    }

  def _checks_as_is(self) -> dict[str, bool]:
    names.manifest_name(self.split)
    shards = [(names.check_record_name(file.name), file.records) for file in self.record_files]
    return {
      "files.records": sum(records for _, records in shards) == self.num_examples,
      "files.descriptions": not self.description_files,
      "source_shards": [(shard.name, shard.examples) for shard in self.source_shards] == shards,
      # No job ran that could have shuffled, drawn, split into ranges or trimmed.
      "seed": self.seed == 0,
      "base_seed": self.base_seed == 0,
      "range_examples": self.range_examples is None,
      "task_feature_lengths": self.task_feature_lengths is None,
    }

  def _of_shards(self, files: Sequence[FileEntry], name_of: Callable[[str, int, int], str]) -> bool:
    """Return whether names and records of the files are those of the shards."""
    expected = [
      (name_of(self.split, shard, self.num_shards), file.records)
      for shard, file in enumerate(self.record_files)
    ]
    return [(file.name, file.records) for file in files] == expected

  def _offsets_are_of_shards(self) -> bool:
    """Return whether offsets files are those of the shards."""
    expected = [
      (
        names.offsets_name(self.split, shard, self.num_shards, container=self.container),
        self.offsets_shape(shard)[0],
      )
      for shard in range(len(self.record_files) if self.has_offsets else 0)
    ]
    return [(file.name, file.records) for file in self.offsets_files] == expected

  @property
  def has_offsets(self) -> bool:
    """True where readers need a table beside each shard, to find or check its records."""
    return find_format(self.container).offsets_shape is not None

  def offsets_shape(self, shard: int) -> tuple[int, ...]:
    """Return the shape of the table of a shard's offsets; its first axis counts the table's rows."""
    shape_of, file = find_format(self.container).offsets_shape, self.record_files[shard]
    return () if shape_of is None else shape_of(file.bytes, file.records)

  @property
  def shard_records(self) -> np.ndarray:
    """Records of each shard: `(S,) int64`."""
    return np.array([file.records for file in self.record_files], np.int64)

  @property
  def bad_examples(self) -> int:
    """Number of examples that were left out because they were bad."""
    return sum(file.records for file in self.description_files[2:])

  @property
  def sequence_features(self) -> list[str]:
    """Names of the features with a length: the columns of the lengths tables, sorted."""
    return sorted(name for name, feature in self.features.items() if feature.sequence)

  @property
  def files(self) -> list[FileEntry]:
    """All files of the split, except the manifest itself."""
    return [*self.record_files, *self.lengths_files, *self.offsets_files, *self.description_files]

  def to_json(self) -> str:
    """Return the manifest file's text: the same bytes for the same manifest."""
    return canonical_json(self._document(), indent=1) + "\n"

  def _document(self) -> dict[str, Any]:
    fingerprint = {
      "reader_sha256": self.fingerprint.reader_sha256,
      "reader": self.fingerprint.reader,
      "provenance": self.fingerprint.provenance,
    }
    files = {
      "records": self.record_files,
      "lengths": self.lengths_files,
      "descriptions": self.description_files,
    }
    # Manifests of other containers, which need no offsets, were fixed before offsets were added.
    if self.has_offsets:
      files["offsets"] = self.offsets_files
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
      "files": {name: [dataclasses.asdict(f) for f in entries] for name, entries in files.items()},
      "source_shards": [dataclasses.asdict(s) for s in self.source_shards],
      "fingerprint": fingerprint,
    }

  @classmethod
  def from_json(cls, text: str | bytes, *, path: object = "manifest") -> Manifest:
    """Return the manifest of a text, checked.

    Raises:
      AnystepError: 65 `manifest_version` or `manifest_invalid`.
    """
    try:
      document = parse_json(text)
      versions = (document["format"], document["format_version"], document["order_version"])
      if versions == (FORMAT, FORMAT_VERSION, ORDER_VERSION):
        manifest = cls._from_document(document)
        # No part of the file may be ignored.
        if canonical_json(manifest._document()) != canonical_json(document):
          raise ValueError("it says more than a manifest does, or says it otherwise")
        return manifest
    except MALFORMED as error:
      fix = "restore the file from where the cache was made, or cache the task again"
      raise make_file_error("manifest_invalid", error, path=path, fix=fix) from error
    raise AnystepError(
      ExitCode.DATA,
      "manifest_version",
      path=path,
      expected=(FORMAT, FORMAT_VERSION, ORDER_VERSION),
      got=versions,
      fix="read the cache with the anystep version that wrote it, or cache the task again",
    )

  @classmethod
  def _from_document(cls, document: Mapping[str, Any]) -> Manifest:
    fingerprint = Fingerprint(
      reader=document["fingerprint"]["reader"], provenance=document["fingerprint"]["provenance"]
    )
    if fingerprint.reader_sha256 != document["fingerprint"]["reader_sha256"]:
      raise ValueError("fingerprint.reader_sha256 is not that of fingerprint.reader")
    files = {
      name: tuple(FileEntry(**entry) for entry in entries) for name, entries in document["files"].items()
    }
    return cls(
      **{name: document[name] for name in _PLAIN_FIELDS},
      container=document["container"]["name"],
      container_options=document["container"]["options"],
      features={
        name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in document["features"].items()
      },
      record_files=files["records"],
      lengths_files=files["lengths"],
      offsets_files=files.get("offsets", ()),
      description_files=files["descriptions"],
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


def shard_sizes(num_examples: int, num_shards: int) -> np.ndarray:
  """Return the records of each shard if example i is in shard i mod S: `(S,) int64`.

  >>> shard_sizes(10, 4)
  array([3, 3, 2, 2])
  """
  return (num_examples - np.arange(num_shards) + num_shards - 1) // num_shards
