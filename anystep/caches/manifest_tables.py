"""Tables beside the manifest of a large cache: JSON of a million rows takes too long to read.

docs/order.md (Tables of large caches) has their form.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath

from anystep.caches.entries import (
  FileEntry,
  FileTable,
  SourceShard,
  SourceTable,
  count_examples,
  file_rows,
)
from anystep.caches.file_checks import read_content
from anystep.files import names
from anystep.files.json_files import canonical_json, parse_json

# Shards and source shards together, from which on a manifest has tables.
LARGE_ROWS = 1 << 14


def make_tables(
  split: str, files: Sequence[Sequence[FileEntry]], source_shards: Sequence[SourceShard]
) -> dict[str, tuple[int, bytes]]:
  """Return the content of a large cache's tables, by name, with their numbers of rows.

  Args:
    split: the split's name.
    files: lists of one file for each shard: records, lengths, and offsets where there are some.
    source_shards: in the source's order.
  """
  rows = np.concatenate([file_rows(of_kind) for of_kind in files])
  shard_names = canonical_json([shard.name for shard in source_shards]).encode()
  file_name, names_name, examples_name = names.table_names(split)
  return {
    file_name: (len(rows), _format_array(rows)),
    names_name: (len(source_shards), shard_names),
    examples_name: (len(source_shards), _format_array(count_examples(source_shards))),
  }


def read_tables(
  directory: epath.Path, entries: Sequence[FileEntry], name_of: Sequence[Callable[[int], str]]
) -> tuple[list[FileTable], SourceTable]:
  """Return the files and the source shards that tables have.

  Args:
    directory: the task's.
    entries: of the tables, in the order of `names.table_names`.
    name_of: for each kind of a shard's files, what returns the name by the shard's number.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`.
    ValueError: for tables of another form.
  """
  of_files, of_names, of_examples = entries
  rows = _read_array(directory, of_files)
  source_shards = SourceTable(
    _read_array(directory, of_examples), functools.partial(_read_names, directory, of_names)
  )
  if len(rows) % len(name_of) or not len(source_shards) == of_names.records:
    raise ValueError(f"tables of {len(rows)} files and {len(source_shards)} source shards")
  parts = np.split(rows, len(name_of))
  return [FileTable(part, name) for part, name in zip(parts, name_of, strict=True)], source_shards


def _format_array(array: np.ndarray) -> bytes:
  file = io.BytesIO()
  np.save(file, array, allow_pickle=False)
  return file.getvalue()


def _read_array(directory: epath.Path, entry: FileEntry) -> np.ndarray:
  content = read_content(directory / entry.name, entry.sha256)
  array = np.load(io.BytesIO(content), allow_pickle=False)
  if array.shape != (entry.records,):
    raise ValueError(f"{entry.name} of shape {array.shape}")
  return array


def _read_names(directory: epath.Path, entry: FileEntry) -> Sequence[str]:
  shard_names = parse_json(read_content(directory / entry.name, entry.sha256))
  if len(shard_names) != entry.records or not all(isinstance(name, str) for name in shard_names):
    raise ValueError(f"{entry.name} does not have {entry.records} names")
  return shard_names
