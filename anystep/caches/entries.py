"""Entries of a manifest: files of the cache, and shards of the source, one by one or in tables."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np
from etils import epath

from anystep.limits import is_count, is_sha256, refuse_wrong

HEAD_BYTES = 4096
_HASHED_BYTES = 1 << 24
# Of a row of a table of files.
_ROW = np.dtype(
  [("records", "<u8"), ("bytes", "<u8"), ("sha256", np.uint8, (32,)), ("head_sha256", np.uint8, (32,))]
)


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


class FileTable(Sequence[FileEntry]):
  """Entries of one file for each shard, in an array; names follow from the shards.

  Args:
    rows: `(S,)`, as `file_rows` makes them.
    name_of: returns the name of a shard's file.

  Raises:
    ValueError: for an array of another form, or counts beyond the limits.
  """

  def __init__(self, rows: np.ndarray, name_of: Callable[[int], str]):
    if rows.dtype != _ROW or rows.ndim != 1:
      raise ValueError(f"a table of files of {rows.dtype} {rows.shape}")
    for name in ("records", "bytes"):
      if not is_count(int(rows[name].max(initial=0))):
        raise ValueError(f"a table of files with too large {name}")
    self.rows = rows
    self._name_of = name_of

  def __len__(self) -> int:
    return len(self.rows)

  @overload
  def __getitem__(self, place: int) -> FileEntry: ...
  @overload
  def __getitem__(self, place: slice) -> list[FileEntry]: ...
  def __getitem__(self, place: int | slice) -> FileEntry | list[FileEntry]:
    if isinstance(place, slice):
      return [self[k] for k in range(*place.indices(len(self)))]
    shard = range(len(self))[place]
    (entry,) = self._entries(shard, shard + 1)
    return entry

  def __iter__(self) -> Iterator[FileEntry]:
    return self._entries(0, len(self))

  def _entries(self, start: int, stop: int) -> Iterator[FileEntry]:
    rows = self.rows[start:stop]
    sha256, head_sha256 = (_split_digests(rows[name]) for name in ("sha256", "head_sha256"))
    columns = (rows["records"].tolist(), rows["bytes"].tolist(), sha256, head_sha256)
    for shard, (records, size, digest, of_head) in enumerate(zip(*columns, strict=True), start):
      yield FileEntry(
        name=self._name_of(shard), records=records, bytes=size, sha256=digest, head_sha256=of_head
      )


def _split_digests(digests: np.ndarray) -> list[str]:
  """Return digests of 32 bytes, `(files, 32) uint8`, in hexadecimal digits."""
  text = digests.tobytes().hex()
  return [text[start : start + 64] for start in range(0, len(text), 64)]


def file_rows(files: Sequence[FileEntry]) -> np.ndarray:
  """Return the rows of a table of files, `(files,)`: records, bytes and both digests."""
  if isinstance(files, FileTable):
    return files.rows
  rows = np.empty(len(files), _ROW)
  for name in ("records", "bytes"):
    rows[name] = np.array([getattr(file, name) for file in files], np.uint64)
  for name in ("sha256", "head_sha256"):
    digests = bytes.fromhex("".join(getattr(file, name) for file in files))
    rows[name] = np.frombuffer(digests, np.uint8).reshape(-1, 32)
  return rows


class SourceTable(Sequence[SourceShard]):
  """Shards of a source; their names are read when one is asked for.

  Args:
    examples: of each shard, `(shards,) uint64`.
    read_names: returns all names.

  Raises:
    ValueError: for an array of another form, or counts beyond the limits.
  """

  def __init__(self, examples: np.ndarray, read_names: Callable[[], Sequence[str]]):
    if examples.dtype != np.dtype("<u8") or examples.ndim != 1 or not is_count(int(examples.max(initial=0))):
      raise ValueError(f"a table of source shards of {examples.dtype} {examples.shape}")
    self.examples = examples
    self._read_names = read_names

  @functools.cached_property
  def names(self) -> Sequence[str]:
    """The shards' names, in the source's order."""
    return self._read_names()

  def __len__(self) -> int:
    return len(self.examples)

  @overload
  def __getitem__(self, place: int) -> SourceShard: ...
  @overload
  def __getitem__(self, place: slice) -> list[SourceShard]: ...
  def __getitem__(self, place: int | slice) -> SourceShard | list[SourceShard]:
    if isinstance(place, slice):
      return [self[k] for k in range(*place.indices(len(self)))]
    return SourceShard(name=self.names[place], examples=int(self.examples[place]))

  def __iter__(self) -> Iterator[SourceShard]:
    pairs = zip(self.names, self.examples.tolist(), strict=True)
    return (SourceShard(name=name, examples=examples) for name, examples in pairs)


def count_examples(shards: Sequence[SourceShard]) -> np.ndarray:
  """Return the examples of source shards, `(shards,) uint64`."""
  if isinstance(shards, SourceTable):
    return shards.examples
  return np.array([shard.examples for shard in shards], "<u8")


def are_named(files: Sequence[FileEntry], name_of: Callable[[int], str]) -> bool:
  """Return whether files have the names of shards; those of tables have no others."""
  if isinstance(files, FileTable):
    return True
  return [file.name for file in files] == [name_of(shard) for shard in range(len(files))]


def have_names(shards: Sequence[SourceShard]) -> bool:
  """Return whether source shards have texts as names; those of tables are compared when they are read."""
  return isinstance(shards, SourceTable) or all(isinstance(shard.name, str) for shard in shards)


def count_records(files: Sequence[FileEntry]) -> np.ndarray:
  """Return the records of each file: `(files,) int64`."""
  return file_rows(files)["records"].astype(np.int64)
