"""Unit tables: the records of each unit, where units are not single records (docs/order.md#unit-tables)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from anystep.cached import cached_property
from anystep.caches.cache import Cache
from anystep.caches.file_checks import list_directory
from anystep.caches.manifest import FileEntry
from anystep.caches.read_pool import ReadPool, process_pool
from anystep.containers.file_ranges import content_at
from anystep.errors import AnystepError, ExitCode
from anystep.files import names, storage
from anystep.files.input_files import read_file
from anystep.files.json_files import MALFORMED, canonical_json, parse_json
from anystep.files.os_failures import FULL, os_failure
from anystep.forks import start_anew_in_children
from anystep.limits import MAX_COUNT, MAX_JSON_BYTES, is_count, is_name, refuse_wrong
from anystep.stores.range_fetcher import ObjectContent, Span
from anystep.units.table_files import UnitTableFile, table_invalid

TABLE_VERSION = 1
# Files of so many shards are fetched from a store together.
_FILES_AHEAD = 32
_owners = itertools.count()


class Members(NamedTuple):
  """The records of some units, unit by unit.

  Attributes:
    counts: records of each unit, `(units,) int64`.
    places: the records' places in the shard, ascending within a unit, `(records,) int64`.
    lengths: tokens that they fill of each of the table's features, `(records, features) int64`.
  """

  counts: np.ndarray
  places: np.ndarray
  lengths: np.ndarray


class UnitTable:
  """The units of a task's cache under a packing policy, after transforms that may drop examples.

  Made by `surveys.make_unit_table`, found by `find_unit_table`. A shard's file is compared with its sha256
  when one of its units is first asked for, and every later read is compared too; see `UnitTableFile`.

  Attributes:
    directory: the table's.
    sha256: of its `units.json`; plans name the table by it.
    made_for: manifest, transforms, feature lengths and policy, from which the table follows.
    features: names of the features that are packed, the columns of `Members.lengths`, sorted.
    num_examples: N, the cache's examples, kept or dropped.
    real_tokens: by packed feature, tokens in all units together.
    shard_units: R_s, `(S,) int64`. shard_records: records that are in some unit, `(S,) int64`.
  """

  def __init__(self, directory: epath.Path, content: bytes, *, pool: ReadPool | None = None):
    self._pool = process_pool() if pool is None else pool
    self._owner = ("unit table", next(_owners))
    self.directory = directory
    self._content = content
    self.sha256 = hashlib.sha256(content).hexdigest()
    document = parse_json(content)
    refuse_wrong(
      made_for=isinstance(document["made_for"], dict),
      features=isinstance(document["features"], list) and all(map(is_name, document["features"])),
      real_tokens=all(map(is_count, document["real_tokens"].values())),
      shard_units=isinstance(document["shard_units"], list) and all(map(is_count, document["shard_units"])),
      num_examples=is_count(document["num_examples"]),
    )
    self.made_for: Mapping[str, Any] = document["made_for"]
    self.features: Sequence[str] = document["features"]
    self.num_examples: int = document["num_examples"]
    self.real_tokens: Mapping[str, int] = document["real_tokens"]
    self._files = [FileEntry(**entry) for entry in document["files"]]
    self.shard_units = np.array(document["shard_units"], np.int64)
    self.shard_records = np.array([file.records for file in self._files], np.int64)
    refuse_wrong(
      version=type(document["version"]) is int and document["version"] == TABLE_VERSION,
      shard_units=len(self.shard_units) == len(self._files) and sum(document["shard_units"]) <= MAX_COUNT,
      files=[file.name for file in self._files]
      == [names.units_name(self.made_for["split"], k, len(self._files)) for k in range(len(self._files))],
      features=sorted(self.real_tokens) == list(self.features),
      shard_records=sum(file.records for file in self._files) <= self.num_examples,
    )
    self._shards: dict[int, UnitTableFile] = {}
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Make a new lock, as a forked process must."""
    self._lock = threading.Lock()

  def __reduce__(self):
    # Another process reads for itself.
    return type(self), (self.directory, self._content)

  @property
  def num_units(self) -> int:
    """U: units per epoch."""
    return int(self.shard_units.sum())

  def fill(self, feature_lengths: Mapping[str, int]) -> dict[str, float]:
    """Return the share of a row's tokens that are real, on average, by packed feature."""
    return {name: self.real_tokens[name] / (feature_lengths[name] * self.num_units) for name in self.features}

  def members(self, shard: int, places: np.ndarray) -> Members:
    """Return the records of a shard's units.

    Args:
      shard: the shard.
      places: the units' places in it, `(units,) int64`.

    Raises:
      AnystepError: 65 `file_missing`, `file_changed` where the table's file is not as it was written.
    """
    file = self._open_shard(shard)
    records_start = int(self.shard_units[shard]) + 1
    lengths_start = records_start + int(self.shard_records[shard])
    starts = file.take(places)
    counts = file.take(places + 1) - starts
    entries = ranges(starts, counts)
    num_features = len(self.features)
    columns = lengths_start + entries[:, None] * num_features + np.arange(num_features)
    lengths = file.take(columns.reshape(-1)).reshape(len(entries), num_features)
    return Members(counts, file.take(records_start + entries), lengths)

  def kept(self, shard: int) -> np.ndarray:
    """Return places of the shard's records that are in some unit, `(records,)`, in no order."""
    start = int(self.shard_units[shard]) + 1
    return self._open_shard(shard).all(start, start + int(self.shard_records[shard]))

  def unit_of(self, shard: int, record: int) -> int | None:
    """Return the place of the unit that has a record of the shard; None for a record that is dropped."""
    (entries,) = np.nonzero(self.kept(shard) == record)
    if not len(entries):
      return None
    starts = self._open_shard(shard).all(0, int(self.shard_units[shard]) + 1)
    return int(np.searchsorted(starts, entries[0], side="right")) - 1

  def let_go(self) -> None:
    """Drop what the pool holds of the table; it is read again where it is asked for."""
    self._pool.drop_where(lambda key: key[0] == self._owner)

  def _open_shard(self, shard: int) -> UnitTableFile:
    with self._lock:
      if shard not in self._shards:
        file, num_units = self._files[shard], int(self.shard_units[shard])
        num_words = num_units + 1 + file.records * (1 + len(self.features))
        self._shards[shard] = UnitTableFile(
          self.directory / file.name,
          file,
          num_words=num_words,
          pool=self._pool,
          key=(self._owner, shard),
          content=self._fetch(shard) if storage.is_remote(self.directory) else None,
        )
      return self._shards[shard]

  def _fetch(self, shard: int) -> bytes | None:
    """Return a file's content from a store, while those of later shards are fetched; None where it fails."""
    later = range(shard, min(shard + _FILES_AHEAD, len(self._files)))
    names_ahead = [self._files[k].name for k in later if k not in self._shards]
    with contextlib.suppress(AnystepError, KeyError, OSError):
      spans = [Span(self._contents[name], 0, self._contents[name].size_bytes) for name in names_ahead]
      self._pool.fetcher.fetch(spans)
      return self._pool.fetcher.read(spans[0])
    return None

  @cached_property
  def _contents(self) -> Mapping[str, ObjectContent]:
    """The objects in the table's directory on a store, by name."""
    return {
      path.name: content_at(path, stamp) for path, stamp in list_directory(self.directory).items() if stamp
    }


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Return the numbers of several ranges, one after the other: `(sum of counts,) int64`.

  >>> ranges(np.array([7, 2]), np.array([1, 3]))
  array([7, 2, 3, 4])
  """
  first = np.cumsum(counts) - counts
  return np.arange(counts.sum()) + np.repeat(starts - first, counts)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardUnits:
  """A shard's part of a table: unit q has records[starts[q]:starts[q + 1]] and their rows of lengths.

  Attributes:
    starts: `(R_s + 1,)`. records: places in the shard, `(records,)`. lengths: `(records, features)`.
  """

  starts: np.ndarray
  records: np.ndarray
  lengths: np.ndarray

  def to_bytes(self) -> bytes:
    """Return the file: one `uint32` array of starts, records and lengths, one after the other."""
    joined = np.concatenate([self.starts, self.records, self.lengths.reshape(-1)]).astype(np.uint32)
    file = io.BytesIO()
    np.save(file, joined, allow_pickle=False)
    return file.getvalue()


def table_key(made_for: Mapping[str, Any]) -> str:
  """Return the name of a table's directory: sha256 of `made_for`."""
  return hashlib.sha256(canonical_json(made_for).encode()).hexdigest()


def open_unit_table(cache: Cache, key: str) -> UnitTable | None:
  """Return the table of a key, beside the cache or in the user's folder; None where there is none.

  Raises:
    AnystepError: 65 `unit_table_invalid`.
  """
  for root in _list_roots(cache):
    path = root / key / names.UNIT_TABLE
    if path.exists():
      return _open(path, cache.pool)
  return None


def find_unit_table(cache: Cache, sha256: str) -> UnitTable | None:
  """Return the table that a plan names by its sha256, whatever it was made for; None where there is none.

  Raises:
    AnystepError: 65 `unit_table_invalid`.
  """
  for root in _list_roots(cache):
    for path in sorted(root.glob(f"*/{names.UNIT_TABLE}")) if root.exists() else []:
      if hashlib.sha256(_read_header(path)).hexdigest() == sha256:
        return _open(path, cache.pool)
  return None


def write_unit_table(
  cache: Cache, made_for: Mapping[str, Any], features: Sequence[str], shards: Iterable[ShardUnits]
) -> UnitTable:
  """Write a table, shard by shard, beside the cache, or in the user's folder where that cannot be written.

  Several processes may write the same table at once: each file appears whole, the header last.

  Raises:
    AnystepError: 73 `unit_table_write`; 74 `disk_full`.
  """
  m = cache.manifest
  directory = _writable_directory(cache, table_key(made_for))
  files, shard_units = [], []
  real_tokens = np.zeros(len(features), np.int64)
  for number, shard in enumerate(shards):
    content = shard.to_bytes()
    file = FileEntry.of(names.units_name(m.split, number, m.num_shards), len(shard.records), content)
    _write_whole(directory / file.name, content)
    files.append(dataclasses.asdict(file))
    shard_units.append(len(shard.starts) - 1)
    real_tokens += shard.lengths.sum(axis=0, dtype=np.int64)
  header = {
    "version": TABLE_VERSION,
    "made_for": made_for,
    "features": list(features),
    "num_examples": m.num_examples,
    "real_tokens": dict(zip(features, real_tokens.tolist(), strict=True)),
    "shard_units": shard_units,
    "files": files,
  }
  content = (canonical_json(header, indent=1) + "\n").encode()
  _write_whole(directory / names.UNIT_TABLE, content)
  return UnitTable(directory, content, pool=cache.pool)


def _writable_directory(cache: Cache, key: str) -> epath.Path:
  tried = []
  for root in _list_roots(cache):
    try:
      (root / key).mkdir(parents=True, exist_ok=True)
      if storage.is_writable(root / key):
        return root / key
      tried.append(f"{root / key} cannot be written")
    except OSError as error:
      tried.append(str(error))
  raise _unwritable("; ".join(tried))


def _unwritable(got: str) -> AnystepError:
  return AnystepError(
    ExitCode.CANNOT_CREATE,
    "unit_table_write",
    expected="a directory for the table, beside the cache or in the user's cache folder",
    got=got,
    fix="let one of them be written, or set XDG_CACHE_HOME",
  )


def _write_whole(path: epath.Path, content: bytes) -> None:
  try:
    storage.put(path, content)
  except OSError as error:
    raise (os_failure(error) if error.errno in FULL else _unwritable(str(error))) from error


def _list_roots(cache: Cache) -> Iterator[epath.Path]:
  """Yield the directories for tables of a cache, the preferred one first."""
  yield cache.directory / "units"
  home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  yield epath.Path(home) / "anystep" / "units"


def _open(path: epath.Path, pool: ReadPool) -> UnitTable:
  try:
    table = UnitTable(path.parent, _read_header(path), pool=pool)
    if table_key(table.made_for) != path.parent.name:
      raise ValueError("made for something else than its directory's name says")
    return table
  except MALFORMED as error:
    raise table_invalid(path, error) from error


def _read_header(path: epath.Path) -> bytes:
  try:
    return read_file(path, limit_bytes=MAX_JSON_BYTES)
  # A name that is listed may be a link to nothing.
  except (ValueError, IsADirectoryError, FileNotFoundError, NotADirectoryError) as error:
    raise table_invalid(path, error) from error
