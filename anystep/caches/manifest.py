"""The manifest: files, features and origin of a split, to the byte (docs/order.md#files-of-a-cache)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from anystep.caches.entries import (
  HEAD_BYTES,
  FileEntry,
  SourceShard,
  are_named,
  count_examples,
  count_records,
  file_rows,
  have_names,
)
from anystep.caches.manifest_tables import LARGE_ROWS, make_tables, read_tables
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

__all__ = ["HEAD_BYTES", "FileEntry", "Fingerprint", "Manifest", "SourceShard"]

FORMAT = "anystep-cache"
# Version 2 has tables beside it.
FORMAT_VERSIONS = (1, 2)
ORDER_VERSION = 1

# Layouts: files that the cache job wrote in the preshuffle's order, or files that were there before.
PRESHUFFLED = "preshuffled"
AS_IS = "as_is"


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
    table_files: of a large cache the tables that hold the other files and the source shards; else none.
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
  table_files: Sequence[FileEntry] = ()

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
    records_name, lengths_name, _ = _name_shard_files(self.split, self.container, self.num_shards)
    sizes = shard_sizes(self.num_examples, self.num_shards)
    return {
      "files.records": are_named(self.record_files, records_name)
      and np.array_equal(self.shard_records, sizes),
      "files.lengths": are_named(self.lengths_files, lengths_name)
      and np.array_equal(count_records(self.lengths_files), sizes),
      "files.tables": [file.name for file in self.table_files]
      == (list(names.table_names(self.split)) if self.table_files else []),
      "files.descriptions": [file.name for file in self.description_files]
      == [
        names.info_name(self.split),
        names.stats_name(self.split),
        *([names.quarantine_name(self.split)] if self.bad_examples else []),
      ],
      "source_shards": have_names(self.source_shards)
      and sum(count_examples(self.source_shards).tolist()) == self.num_examples,
    }

  def _checks_as_is(self) -> dict[str, bool]:
    names.manifest_name(self.split)
    shards = [(names.check_record_name(file.name), file.records) for file in self.record_files]
    return {
      "files.records": sum(records for _, records in shards) == self.num_examples,
      "files.descriptions": not self.description_files,
      "files.tables": not self.table_files,
      "source_shards": [(shard.name, shard.examples) for shard in self.source_shards] == shards,
      # No job ran that could have shuffled, drawn, split into ranges or trimmed.
      "seed": self.seed == 0,
      "base_seed": self.base_seed == 0,
      "range_examples": self.range_examples is None,
      "task_feature_lengths": self.task_feature_lengths is None,
    }

  def _offsets_are_of_shards(self) -> bool:
    """Return whether offsets files are those of the shards."""
    _, _, offsets_name = _name_shard_files(self.split, self.container, self.num_shards)
    shape_of, rows = find_format(self.container).offsets_shape, file_rows(self.record_files)
    sizes = zip(rows["bytes"].tolist(), rows["records"].tolist(), strict=True)
    expected = [] if shape_of is None else [shape_of(*of_file)[0] for of_file in sizes]
    return (
      are_named(self.offsets_files, offsets_name) and count_records(self.offsets_files).tolist() == expected
    )

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
    return count_records(self.record_files)

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
    return [
      *self.record_files,
      *self.lengths_files,
      *self.offsets_files,
      *self.description_files,
      *self.table_files,
    ]

  @property
  def format_version(self) -> int:
    """Version of the manifest's form: 2 with tables, else 1."""
    return 2 if self.table_files else 1

  def with_tables(self) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest with tables where the cache is large, and their content by name.

    Files in layout `as_is` have names of their own, and no tables.
    """
    is_large = self.num_shards + len(self.source_shards) >= LARGE_ROWS
    if not is_large or self.table_files or self.layout == AS_IS:
      return self, {}
    files = [self.record_files, self.lengths_files, *([self.offsets_files] if self.has_offsets else [])]
    tables = make_tables(self.split, files, self.source_shards)
    entries = [FileEntry.of(name, rows, content) for name, (rows, content) in tables.items()]
    contents = {name: content for name, (_, content) in tables.items()}
    return dataclasses.replace(self, table_files=entries), contents

  def to_json(self) -> str:
    """Return the manifest file's text: the same bytes for the same manifest."""
    return canonical_json(self._document(), indent=1) + "\n"

  def _document(self) -> dict[str, Any]:
    fingerprint = {
      "reader_sha256": self.fingerprint.reader_sha256,
      "reader": self.fingerprint.reader,
      "provenance": self.fingerprint.provenance,
    }
    files = {"descriptions": self.description_files}
    if self.table_files:
      files["tables"] = self.table_files
    else:
      files |= {"records": self.record_files, "lengths": self.lengths_files}
    # Manifests of other containers, which need no offsets, were fixed before offsets were added.
    if self.has_offsets and not self.table_files:
      files["offsets"] = self.offsets_files
    source_shards = (
      {} if self.table_files else {"source_shards": [dataclasses.asdict(s) for s in self.source_shards]}
    )
    return {
      "format": FORMAT,
      "format_version": self.format_version,
      "order_version": ORDER_VERSION,
      **{name: getattr(self, name) for name in _PLAIN_FIELDS},
      "container": {"name": self.container, "options": self.container_options},
      "features": {
        name: {"dtype": f.dtype, "shape": list(f.shape), "sequence": f.sequence}
        for name, f in self.features.items()
      },
      "files": {name: [dataclasses.asdict(f) for f in entries] for name, entries in files.items()},
      **source_shards,
      "fingerprint": fingerprint,
    }

  @classmethod
  def from_json(cls, text: str | bytes, *, path: epath.PathLike = "manifest") -> Manifest:
    """Return the manifest of a text, checked.

    Args:
      text: as `to_json` gives it.
      path: of the manifest's file; tables that it names are read beside it.

    Raises:
      AnystepError: 65 `manifest_version` or `manifest_invalid`; 65 `file_missing`, `file_changed` of tables.
    """
    try:
      document = parse_json(text)
      versions = (document["format"], document["format_version"], document["order_version"])
      if versions in [(FORMAT, version, ORDER_VERSION) for version in FORMAT_VERSIONS]:
        manifest = cls._from_document(document, epath.Path(path).parent)
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
      expected=(FORMAT, FORMAT_VERSIONS, ORDER_VERSION),
      got=versions,
      fix="read the cache with the anystep version that wrote it, or cache the task again",
    )

  @classmethod
  def _from_document(cls, document: Mapping[str, Any], directory: epath.Path) -> Manifest:
    fingerprint = Fingerprint(
      reader=document["fingerprint"]["reader"], provenance=document["fingerprint"]["provenance"]
    )
    if fingerprint.reader_sha256 != document["fingerprint"]["reader_sha256"]:
      raise ValueError("fingerprint.reader_sha256 is not that of fingerprint.reader")
    files = {
      name: tuple(FileEntry(**entry) for entry in entries) for name, entries in document["files"].items()
    }
    container = document["container"]["name"]
    source_shards: Sequence[SourceShard]
    kinds: list[Sequence[FileEntry]]
    if document["format_version"] == 1:
      kinds = [files["records"], files["lengths"], files.get("offsets", ())]
      source_shards = tuple(SourceShard(**s) for s in document["source_shards"])
    else:
      named = _name_shard_files(document["split"], container, document["num_shards"])
      has_offsets = find_format(container).offsets_shape is not None
      tables, source_shards = read_tables(directory, files["tables"], named if has_offsets else named[:2])
      kinds = [*tables, *([] if has_offsets else [()])]
    return cls(
      **{name: document[name] for name in _PLAIN_FIELDS},
      container=container,
      container_options=document["container"]["options"],
      features={
        name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in document["features"].items()
      },
      record_files=kinds[0],
      lengths_files=kinds[1],
      offsets_files=kinds[2],
      description_files=files["descriptions"],
      table_files=files.get("tables", ()),
      source_shards=source_shards,
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


def _name_shard_files(split: str, container: str, num_shards: int) -> tuple[Callable[[int], str], ...]:
  """Return what names a shard's records, lengths and offsets by its number."""
  return (
    lambda shard: names.records_name(split, container, shard, num_shards),
    lambda shard: names.lengths_name(split, shard, num_shards),
    lambda shard: names.offsets_name(split, shard, num_shards, container=container),
  )


def shard_sizes(num_examples: int, num_shards: int) -> np.ndarray:
  """Return the records of each shard if example i is in shard i mod S: `(S,) int64`.

  >>> shard_sizes(10, 4)
  array([3, 3, 2, 2])
  """
  return (num_examples - np.arange(num_shards) + num_shards - 1) // num_shards
