"""A task's cache, opened for reading."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath

from anystep.caches.manifest import AS_IS, HEAD_BYTES, FileEntry, Manifest
from anystep.caches.read_pool import ReadPool, held_bytes, process_pool
from anystep.containers.containers import PARQUET, BlockReader, open_blocks
from anystep.containers.file_ranges import FileStamp
from anystep.errors import AnystepError, ExitCode, nearest
from anystep.features.ragged import Ragged
from anystep.files import names
from anystep.files.input_files import open_file, read_file
from anystep.files.os_failures import os_failure
from anystep.limits import MAX_JSON_BYTES
from anystep.order.preshuffle import preshuffle
from anystep.records.parsing import parse_example, parse_examples
from anystep.whole_numbers import whole_numbers

_RESTORE = "restore the file from where the cache was made, or cache the task again with --overwrite"
_T = TypeVar("_T")
_COMPLETED_TEXT = re.compile(r"([A-Za-z0-9_.-]+ [0-9a-f]{64}\n)+\Z")


def read_completed(directory: epath.Path) -> dict[str, str]:
  """The splits of a complete cache with the sha256 of their manifests; empty where there is no cache."""
  try:
    content = read_file(directory / names.COMPLETED, limit_bytes=MAX_JSON_BYTES)
  except (FileNotFoundError, NotADirectoryError):
    return {}
  except (ValueError, IsADirectoryError) as error:
    raise _completed_invalid(directory, got=error) from error
  text = content.decode("ascii", "replace")
  if not _COMPLETED_TEXT.match(text):
    raise _completed_invalid(directory, got=text[:80])
  return dict(line.split(" ") for line in text.removesuffix("\n").split("\n"))


def _completed_invalid(directory: epath.Path, *, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "completed_invalid",
    path=directory / names.COMPLETED,
    expected="one line per split: split, sha256 of its manifest",
    got=got,
    fix=_RESTORE,
  )


def open_cache(cache_dir: epath.PathLike, task: str, split: str, *, pool: ReadPool | None = None) -> Cache:
  """Opens a split of a task's cache after checking that its files are those that were written.

  One listing and the manifest are read; `Cache.verify` reads every byte.

  Args:
    cache_dir: the root that the cache job wrote to (`--output_cache_dir`).
    task: the task's registered name.
    split: the split's name.
    pool: holds open files and records; the process's own by default.

  Raises:
    AnystepError: 66 `cache_missing`, `split_missing`; 65 where the files are not the manifest's
      (`manifest_changed`, `file_missing`, `file_size`, `file_foreign`).
  """
  directory = names.task_directory(cache_dir, task)
  completed = read_completed(directory)
  if not completed:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "cache_missing",
      task=task,
      path=directory / names.COMPLETED,
      fix=f"anystep-cache --tasks={task} --output_cache_dir={cache_dir} --module_import=MODULE_OF_THE_TASK",
    )
  if split not in completed:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "split_missing",
      task=task,
      path=directory,
      expected=", ".join(sorted(completed)),
      got=split,
      fix=f"name one of the splits that were cached, such as {nearest(split, completed)}",
    )
  path = directory / names.manifest_name(split)
  manifest = read_manifest(path, completed[split])
  if (manifest.task, manifest.split) != (task, split):
    raise AnystepError(
      ExitCode.DATA,
      "manifest_task",
      path=path,
      expected=f"{task} {split}",
      got=f"{manifest.task} {manifest.split}",
      fix="point --cache_dir at this task's own cache",
    )
  cache = Cache(epath.Path(cache_dir), manifest, completed[split], pool=pool)
  cache.check_files()
  return cache


def read_manifest(path: epath.Path, sha256: str) -> Manifest:
  """Reads a manifest of a complete cache, which COMPLETED names by its sha256.

  Raises:
    AnystepError: 65 `file_missing`, `manifest_changed`; as `Manifest.from_json`.
  """
  try:
    content = read_file(path, limit_bytes=MAX_JSON_BYTES)
  except FileNotFoundError as error:
    raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=_RESTORE) from error
  except (ValueError, IsADirectoryError) as error:
    raise AnystepError(ExitCode.DATA, "manifest_invalid", path=path, got=error, fix=_RESTORE) from error
  found = hashlib.sha256(content).hexdigest()
  if found != sha256:
    raise AnystepError(ExitCode.DATA, "manifest_changed", path=path, expected=sha256, got=found, fix=_RESTORE)
  return Manifest.from_json(content, path=path)


class Cache:
  """A split of a task's cache: its examples by index, its records by shard and place.

  Made by `open_cache`. Reading is thread-safe. A cache is a Grain `RandomAccessDataSource`; a copy in another
  process, by pickle, reads for itself.

  Attributes:
    root: the directory that the task's lies below.
    directory: the task's directory.
    manifest: what the split consists of.
    manifest_sha256: sha256 of the manifest file, as COMPLETED states it.
  """

  def __init__(
    self,
    root: epath.Path,
    manifest: Manifest,
    manifest_sha256: str,
    *,
    pool: ReadPool | None = None,
    stamps: Mapping[str, FileStamp] | None = None,
  ):
    self.root = root
    self.directory = names.task_directory(root, manifest.task)
    self.manifest = manifest
    self.manifest_sha256 = manifest_sha256
    self.pool = process_pool() if pool is None else pool
    self._key = (str(self.directory), manifest.split, manifest_sha256)
    # Of record files whose content is the manifest's, by name.
    self._stamps = dict(stamps or {})
    self._own_names = frozenset(entry.name for entry in manifest.offsets_files)
    # Index of the first record of each shard, where shards are files one after the other.
    self._starts = np.cumsum(manifest.shard_records) - manifest.shard_records

  def __repr__(self) -> str:
    m = self.manifest
    return f"Cache(task={m.task!r}, split={m.split!r}, manifest_sha256={self.manifest_sha256!r})"

  def __len__(self) -> int:
    return self.manifest.num_examples

  def __reduce__(self) -> tuple[Any, ...]:
    stamps = {name: tuple(stamp) for name, stamp in self._stamps.items()}
    return _unpickled, (str(self.root), self.manifest.to_json(), self.manifest_sha256, stamps)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    """The example of an index, features by name."""
    (record,) = self.read_records(*self.locate([index]))
    return parse_example(record, self.manifest.features)

  def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """The examples of several indices: what PyTorch's and Grain's batched fetching ask for."""
    records = self.read_records(*self.locate(indices))
    return [parse_example(record, self.manifest.features) for record in records]

  _getitems = __getitems__

  def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, Ragged | np.ndarray]:
    """The examples of several indices, each feature as one batch."""
    records = self.read_records(*self.locate(indices))
    return parse_examples(records, self.manifest.features)

  def locate(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shard and place of indices, `(rows,) int64` each.

    Raises:
      IndexError: for an index that the split does not have.
      TypeError: for what is no whole number, a mask among them.
    """
    indices = whole_numbers(indices, "indices")
    outside = indices[(indices < 0) | (indices >= len(self))]
    if outside.size:
      raise IndexError(f"{self} has no example {outside[0]}: there are {len(self)}.")
    if self.manifest.layout == AS_IS:
      shards = np.searchsorted(self._starts, indices, side="right") - 1
      return shards, indices - self._starts[shards]
    return indices % self.manifest.num_shards, indices // self.manifest.num_shards

  def index_of(self, shards: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Indices of records by shard and place, `(rows,) int64`: the inverse of `locate`."""
    if self.manifest.layout == AS_IS:
      return self._starts[shards] + places
    return places * self.manifest.num_shards + shards

  def read_records(self, shards: np.ndarray, places: np.ndarray) -> list[bytes]:
    """Serialized records by shard and place, `(rows,)` each, in that order; blocks are held whole.

    Raises:
      IndexError: for a shard or a place that the split does not have.
      TypeError: for what is no whole number.
    """
    shards, places = whole_numbers(shards, "shards"), whole_numbers(places, "places")
    sizes = self.manifest.shard_records
    if ((shards < 0) | (shards >= len(sizes))).any() or ((places < 0) | (places >= sizes[shards])).any():
      raise IndexError(f"{self} has no records at some of shards {shards} and places {places}")
    block_records = self.manifest.block_records
    keys = list(zip(shards.tolist(), (places // block_records).tolist(), strict=True))
    blocks = {key: self.held_block(*key) for key in dict.fromkeys(keys)}
    return [blocks[key][place] for key, place in zip(keys, (places % block_records).tolist(), strict=True)]

  def held_block(self, shard: int, block: int) -> list[bytes]:
    """A block that the pool holds from now on, as long as it has room."""
    key = (self._key, shard, block)
    with self.pool.lock:
      records = self.pool.get(key)
      if records is None:
        (records,) = self.read_blocks(shard, [block])
        self.pool.hold(key, records, held_bytes(records))
      return records

  def read_blocks(self, shard: int, blocks: Sequence[int]) -> list[list[bytes]]:
    """Whole blocks of a shard, read from its file."""
    return self._read(shard, lambda reader: [reader.read_block(block) for block in blocks])

  def read_single(self, shard: int, places: Sequence[int]) -> list[bytes]:
    """Single records of a shard, read from its file; a block that is one chunk is read for each."""
    return self._read(shard, lambda reader: reader.read_records(places))

  def _read(self, shard: int, read: Callable[[BlockReader], _T]) -> _T:
    """What is read of a shard's file, as long as it is the one that was opened and checked."""
    entry, key = self.manifest.record_files[shard], (self._key, shard)
    with self.pool.lock:
      for _ in range(2):
        reader = self.pool.reader(key, lambda: self._open(shard))
        try:
          found = read(reader)
        except AnystepError:
          # What is put in the file's place next is read, as the error asks for.
          self.pool.close_reader(key)
          raise
        # Only now: what is written to a file before it is read changes its stamp before, too.
        if reader.stamp() == self._stamps[entry.name]:
          return found
        self.pool.close_reader(key)
    raise self._changing(self.path_of(entry))

  def source_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where examples come from: source shard and place among its examples, `(rows,) int64` each."""
    m = self.manifest
    if m.layout == AS_IS:
      return self.locate(indices)
    indices = whole_numbers(indices, "indices")
    ordinals = preshuffle(m.num_examples, task=m.task, split=m.split, seed=m.seed).inverse(indices)
    stops = np.cumsum([shard.examples for shard in m.source_shards])
    source_shards = np.searchsorted(stops, ordinals, side="right")
    starts = np.concatenate([[0], stops[:-1]])
    return source_shards, ordinals - starts[source_shards]

  def lengths(self, shard: int) -> np.ndarray:
    """Token counts of a shard's records: `(records, sequence features) uint32`, columns by name."""
    entry = self.manifest.lengths_files[shard]
    shape = (entry.records, len(self.manifest.sequence_features))
    return self._table(entry, "lengths_form", np.dtype(np.uint32), shape)

  def _table(self, entry: FileEntry, kind: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array file of the cache, its content compared with the manifest."""
    path = self.path_of(entry)
    content = _content(path, entry.sha256)
    try:
      table = np.load(io.BytesIO(content), allow_pickle=False)
      found: object = (table.dtype, table.shape)
    except ValueError as error:
      found = str(error)
    if found != (dtype, shape):
      raise AnystepError(ExitCode.DATA, kind, path=path, expected=(dtype, shape), got=found, fix=_RESTORE)
    return table

  def path_of(self, entry: FileEntry) -> epath.Path:
    """Where a file of the manifest lies."""
    if self.manifest.layout == AS_IS and entry.name not in self._own_names:
      return names.record_path(self.root, entry.name)
    return self.directory / entry.name

  @property
  def vocabularies(self) -> dict[str, str]:
    """By feature, the sha256 of the file of its vocabulary, of which the task's directory has a copy."""
    found = self.manifest.fingerprint.provenance.get("vocabularies")
    return dict(found) if isinstance(found, Mapping) else {}

  def vocabulary(self, sha256: str) -> bytes:
    """The copy of the file that a vocabulary is made of.

    Raises:
      AnystepError: 65 `file_missing`, `file_changed`; 77 `vocabulary_name`.
    """
    return _content(names.vocabulary_path(self.directory, sha256), sha256)

  def check_files(self) -> None:
    """Compares names and sizes of all files with the manifest: one listing of each directory.

    Raises:
      AnystepError: 65 `file_missing`, `file_size`, `file_foreign`.
    """
    paths = {self.path_of(entry): entry for entry in self.manifest.files}
    present = {path for directory in {path.parent for path in paths} for path in _listed(directory)}
    stamps = {}
    for path, entry in paths.items():
      if path not in present:
        raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=_RESTORE)
      stamp = _stamp_of(path)
      if stamp.size_bytes != entry.bytes:
        raise AnystepError(
          ExitCode.DATA, "file_size", path=path, expected=entry.bytes, got=stamp.size_bytes, fix=_RESTORE
        )
      stamps[entry.name] = stamp
    self._stamps = {entry.name: stamps[entry.name] for entry in self.manifest.record_files}
    if self.manifest.layout == AS_IS:
      return
    pattern = names.shard_pattern(self.manifest.split)
    foreign = sorted(path.name for path in present - paths.keys() if pattern.match(path.name))
    if foreign:
      raise AnystepError(
        ExitCode.DATA,
        "file_foreign",
        path=self.directory / foreign[0],
        expected="only the files that the manifest lists",
        got=f"{len(foreign)} more",
        fix="move files that are not of this cache out of its directory",
      )

  def check_heads(self) -> None:
    """Compares the first 4 KiB of every shard: what tells a swapped shard without reading them all.

    Raises:
      AnystepError: 65 `file_changed`, `file_missing`.
    """
    for entry in self.manifest.record_files:
      self._check_head(entry)

  def verify(self, report: Callable[[int], None] = lambda done_bytes: None) -> None:
    """Reads every byte of every file, copies of vocabularies among them, and compares it with the manifest.

    Args:
      report: called with the number of bytes read so far, after each of the manifest's files.

    Raises:
      AnystepError: 65 `file_changed`, `file_missing` name the first file that differs.
    """
    done_bytes = 0
    for entry in self.manifest.files:
      _check_content(self.path_of(entry), entry.sha256)
      done_bytes += entry.bytes
      report(done_bytes)
    for sha256 in sorted(set(self.vocabularies.values())):
      self.vocabulary(sha256)

  def _check_head(self, entry: FileEntry) -> None:
    _content(self.path_of(entry), entry.head_sha256, size=HEAD_BYTES)

  def _open(self, shard: int) -> BlockReader:
    m = self.manifest
    entry = m.record_files[shard]
    path = self.path_of(entry)
    self._check_head(entry)
    stamp = _stamp_of(path)
    if stamp != self._stamps.get(entry.name):
      # Another file, or one that was written to or merely touched: its content decides.
      _check_content(path, entry.sha256)
      self._stamps[entry.name] = stamp
    offsets = None
    if m.offsets_files:
      table = m.offsets_files[shard]
      shape = (table.records, 2) if m.container == PARQUET else (table.records,)
      offsets = self._table(table, "offsets_form", np.dtype(np.uint64), shape)
    reader = open_blocks(
      m.container,
      path,
      num_records=entry.records,
      block_records=m.block_records,
      offsets=offsets,
      columns=tuple(m.features),
    )
    if reader.stamp() != stamp:
      reader.close()
      raise self._changing(path)
    return reader

  def _changing(self, path: epath.Path) -> AnystepError:
    return AnystepError(
      ExitCode.DATA,
      "file_changed",
      path=path,
      expected="a file that stays as it is while it is read",
      got="one that is being written to, or replaced",
      fix=_RESTORE,
    )


def _unpickled(
  root: str, manifest_json: str, manifest_sha256: str, stamps: Mapping[str, tuple[int, int, int]]
) -> Cache:
  known = {name: FileStamp(*stamp) for name, stamp in stamps.items()}
  return Cache(epath.Path(root), Manifest.from_json(manifest_json), manifest_sha256, stamps=known)


def _listed(directory: epath.Path) -> list[epath.Path]:
  try:
    return list(directory.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    raise os_failure(error) from error


@contextlib.contextmanager
def _file_errors(path: epath.Path) -> Iterator[None]:
  """What is raised for a file that went, or became something else, after the cache was opened."""
  try:
    yield
  except (FileNotFoundError, NotADirectoryError) as error:
    raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=_RESTORE) from error
  except (ValueError, IsADirectoryError) as error:
    raise AnystepError(
      ExitCode.DATA, "file_changed", path=path, expected="a file", got=error, fix=_RESTORE
    ) from error
  except OSError as error:
    raise os_failure(error) from error


def _content(path: epath.Path, sha256: str, *, size: int = -1) -> bytes:
  """A file's first bytes, or all, which have the sha256 that is expected."""
  with _file_errors(path), open_file(path) as file:
    content = file.read(size)
  _check_sha256(path, sha256, hashlib.sha256(content).hexdigest())
  return content


def _check_content(path: epath.Path, sha256: str) -> None:
  """Compares a file's sha256, reading it piece by piece."""
  with _file_errors(path), open_file(path) as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
  _check_sha256(path, sha256, found)


def _check_sha256(path: epath.Path, expected: str, found: str) -> None:
  if found != expected:
    raise AnystepError(ExitCode.DATA, "file_changed", path=path, expected=expected, got=found, fix=_RESTORE)


def _stamp_of(path: epath.Path) -> FileStamp:
  with _file_errors(path):
    return FileStamp.at(path)
