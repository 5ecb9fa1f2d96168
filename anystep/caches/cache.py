"""A task's cache, opened for reading."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from anystep.caches.entries import FileEntry, count_examples
from anystep.caches.file_checks import check_foreign, check_sizes, list_directory, read_content
from anystep.caches.manifest import AS_IS, Manifest
from anystep.caches.read_pool import ReadPool, held_bytes, process_pool
from anystep.caches.shard_files import ShardFiles
from anystep.containers.file_ranges import RESTORE, FileStamp
from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.features.ragged import Ragged
from anystep.files import names
from anystep.files.input_files import read_file
from anystep.limits import MAX_JSON_BYTES
from anystep.order.preshuffle import preshuffle
from anystep.records.parsing import parse_example, parse_examples
from anystep.whole_numbers import whole_numbers

# Lengths of so many shards are fetched from a store together.
_TABLES_AHEAD = 32
_COMPLETED_TEXT = re.compile(r"([A-Za-z0-9_.-]+ [0-9a-f]{64}\n)+\Z")


def read_completed(directory: epath.Path) -> dict[str, str]:
  """Return the sha256 of the manifest of each split, by split; nothing where there is no complete cache."""
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
    fix=RESTORE,
  )


def open_cache(cache_dir: epath.PathLike, task: str, split: str, *, pool: ReadPool | None = None) -> Cache:
  """Open a split of a task's cache, after checking that its files are those that were written.

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
      fix=_fix_of_missing(epath.Path(cache_dir), task),
    )
  if split not in completed:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "split_missing",
      task=task,
      path=directory,
      expected=", ".join(sorted(completed)),
      got=split,
      fix=f"name one of the splits that were cached, such as {find_nearest(split, completed)}",
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


def find_cache(roots: Iterable[epath.PathLike], task: str, split: str) -> Cache:
  """Return the task's cache in the first root that has one.

  Raises:
    AnystepError: as `open_cache`; where no root has one, the error is that of the first root.
  """
  missing: AnystepError | None = None
  for root in roots:
    try:
      return open_cache(root, task, split)
    except AnystepError as error:
      if error.kind != "cache_missing":
        raise
      missing = missing or error
  raise missing or AnystepError(
    ExitCode.CONFIG, "cache_dirs", expected="at least one directory", got="none", fix="name a cache directory"
  )


def _fix_of_missing(cache_dir: epath.Path, task: str) -> str:
  """Return what to do where a root has no cache of a task; the root may be the task's own directory."""
  root = cache_dir
  for part in reversed(task.split(":")):
    if root.name != part:
      break
    root = root.parent
  else:
    if (cache_dir / names.COMPLETED).exists():
      return f"name the root {root}: {cache_dir} is the directory of the task itself"
  return f"anystep-cache --tasks={task} --output_cache_dir={cache_dir} --module_import=MODULE_OF_THE_TASK"


def read_manifest(path: epath.Path, sha256: str) -> Manifest:
  """Return a manifest of a complete cache, whose sha256 is in COMPLETED.

  Raises:
    AnystepError: 65 `file_missing`, `manifest_changed`; as `Manifest.from_json`.
  """
  try:
    content = read_file(path, limit_bytes=MAX_JSON_BYTES)
  except FileNotFoundError as error:
    raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=RESTORE) from error
  except (ValueError, IsADirectoryError) as error:
    raise AnystepError(ExitCode.DATA, "manifest_invalid", path=path, got=error, fix=RESTORE) from error
  got = hashlib.sha256(content).hexdigest()
  if got != sha256:
    raise AnystepError(ExitCode.DATA, "manifest_changed", path=path, expected=sha256, got=got, fix=RESTORE)
  return Manifest.from_json(content, path=path)


class Cache:
  """A split of a task's cache: its examples by index, its records by shard and place.

  Made by `open_cache`. Reading is thread-safe. A cache is a Grain `RandomAccessDataSource`; a copy in another
  process, by pickle, reads for itself.

  Attributes:
    root: the directory that the task's lies below.
    directory: the task's directory.
    manifest: the split's files, features and layout.
    manifest_sha256: sha256 of the manifest file, as COMPLETED states it.
    files: the split's files of records.
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
    self.files = ShardFiles(root, manifest, pool=self.pool, key=self._key, stamps=stamps or {})
    # Index of the first record of each shard, where shards are files one after the other.
    self._starts = np.cumsum(manifest.shard_records) - manifest.shard_records

  def __repr__(self) -> str:
    m = self.manifest
    return f"Cache(task={m.task!r}, split={m.split!r}, manifest_sha256={self.manifest_sha256!r})"

  def __len__(self) -> int:
    return self.manifest.num_examples

  def __reduce__(self) -> tuple[Any, ...]:
    stamps = {name: tuple(stamp) for name, stamp in self.files.stamps.items()}
    path = self.directory / names.manifest_name(self.manifest.split)
    return _unpickled, (str(self.root), str(path), self.manifest.to_json(), self.manifest_sha256, stamps)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    """Return the example of an index, features by name."""
    (record,) = self.read_records(*self.locate([index]))
    return parse_example(record, self.manifest.features)

  def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Return the examples of several indices: PyTorch's and Grain's batched fetching call this."""
    records = self.read_records(*self.locate(indices))
    return [parse_example(record, self.manifest.features) for record in records]

  _getitems = __getitems__

  def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, Ragged | np.ndarray]:
    """Return the examples of several indices, each feature as one batch."""
    records = self.read_records(*self.locate(indices))
    return parse_examples(records, self.manifest.features)

  def locate(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return shard and place of indices, `(rows,) int64` each.

    Raises:
      IndexError: for an index that the split does not have.
      TypeError: for values that are no whole numbers, also for a mask.
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
    """Return indices of records by shard and place, `(rows,) int64`: the inverse of `locate`."""
    if self.manifest.layout == AS_IS:
      return self._starts[shards] + places
    return places * self.manifest.num_shards + shards

  def read_records(self, shards: np.ndarray, places: np.ndarray) -> list[bytes]:
    """Return serialized records by shard and place, `(rows,)` each; the pool holds their whole blocks.

    Raises:
      IndexError: for a shard or a place that the split does not have.
      TypeError: for values that are no whole numbers.
    """
    shards, places = whole_numbers(shards, "shards"), whole_numbers(places, "places")
    sizes = self.manifest.shard_records
    if ((shards < 0) | (shards >= len(sizes))).any() or ((places < 0) | (places >= sizes[shards])).any():
      raise IndexError(f"{self} has no records at some of shards {shards} and places {places}")
    block_records = self.manifest.block_records
    keys = list(zip(shards.tolist(), (places // block_records).tolist(), strict=True))
    self._fetch_unheld(keys)
    blocks = {key: self.held_block(*key) for key in dict.fromkeys(keys)}
    return [blocks[key][place] for key, place in zip(keys, (places % block_records).tolist(), strict=True)]

  def _fetch_unheld(self, keys: Sequence[tuple[int, int]]) -> None:
    """Have the blocks of shards fetched from a store that the pool does not hold."""
    blocks: dict[int, list[int]] = {}
    for shard, block in dict.fromkeys(keys) if self.files.are_remote else ():
      if self.pool.get((self._key, shard, block)) is None:
        blocks.setdefault(shard, []).append(block)
    self.files.fetch_blocks(blocks)

  def held_block(self, shard: int, block: int) -> list[bytes]:
    """Return the records of a block, which the pool holds from now on, as long as it has room."""
    key = (self._key, shard, block)
    with self.pool.lock:
      records = self.pool.get(key)
      if records is None:
        (records,) = self.read_blocks(shard, [block])
        self.pool.hold(key, records, held_bytes(records))
      return records

  def read_blocks(self, shard: int, blocks: Sequence[int]) -> list[list[bytes]]:
    """Read whole blocks of a shard from its file."""
    if len(blocks) > 1:
      self.files.fetch_blocks({shard: blocks})
    return self.files.read(shard, lambda reader: [reader.read_block(block) for block in blocks])

  def read_single(self, shard: int, places: Sequence[int]) -> list[bytes]:
    """Read single records of a shard from its file; where a block is one chunk, each record costs a block."""
    return self.files.read(shard, lambda reader: reader.read_records(places))

  def source_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return source shards of examples, and places among their examples, `(rows,) int64` each."""
    m = self.manifest
    if m.layout == AS_IS:
      return self.locate(indices)
    indices = whole_numbers(indices, "indices")
    ordinals = preshuffle(m.num_examples, task=m.task, split=m.split, seed=m.seed).inverse(indices)
    stops = np.cumsum(count_examples(m.source_shards).astype(np.int64))
    source_shards = np.searchsorted(stops, ordinals, side="right")
    starts = np.concatenate([[0], stops[:-1]])
    return source_shards, ordinals - starts[source_shards]

  def lengths(self, shard: int) -> np.ndarray:
    """Return token counts of a shard's records: `(records, sequence features) uint32`, columns by name."""
    entry = self.manifest.lengths_files[shard]
    return self.files.read_array(
      entry,
      kind="lengths_form",
      dtype=np.dtype(np.uint32),
      shape=(entry.records, len(self.manifest.sequence_features)),
      later=self.manifest.lengths_files[shard + 1 : shard + 1 + _TABLES_AHEAD],
    )

  def path_of(self, entry: FileEntry) -> epath.Path:
    """Return the path of a file of the manifest."""
    return self.files.path_of(entry)

  @property
  def vocabularies(self) -> dict[str, str]:
    """By feature, the sha256 of its vocabulary's file, of which the task's directory has a copy."""
    vocabularies = self.manifest.fingerprint.provenance.get("vocabularies")
    return dict(vocabularies) if isinstance(vocabularies, Mapping) else {}

  def vocabulary(self, sha256: str) -> bytes:
    """Return the content of a vocabulary's file, from the copy in the task's directory.

    Raises:
      AnystepError: 65 `file_missing`, `file_changed`; 77 `vocabulary_name`.
    """
    return read_content(names.vocabulary_path(self.directory, sha256), sha256)

  def check_files(self) -> None:
    """Compare names and sizes of all files with the manifest, with one listing of each directory.

    Raises:
      AnystepError: 65 `file_missing`, `file_size`, `file_foreign`.
    """
    entries = {self.path_of(entry): entry for entry in self.manifest.files}
    directories = {path.parent for path in entries}
    listed = {path: stamp for folder in directories for path, stamp in list_directory(folder).items()}
    stamps = check_sizes(entries, listed)
    stamped = self.manifest.files if self.files.are_remote else self.manifest.record_files
    self.files.stamps = {entry.name: stamps[entry.name] for entry in stamped}
    if self.manifest.layout != AS_IS:
      check_foreign(entries, listed, names.shard_pattern(self.manifest.split))

  def check_heads(self) -> None:
    """Compare the first 4 KiB of every shard, which finds swapped shards without reading them whole.

    Raises:
      AnystepError: 65 `file_changed`, `file_missing`.
    """
    self.files.check_heads()

  def verify(self, report: Callable[[int], None] = lambda done_bytes: None) -> None:
    """Compare every byte of every file with the manifest, also of copies of vocabularies.

    Args:
      report: called with the number of bytes read so far, after each of the manifest's files.

    Raises:
      AnystepError: 65 `file_changed`, `file_missing` name the first file that differs.
    """
    done_bytes = 0
    for entry in self.manifest.files:
      self.files.check_content(entry)
      done_bytes += entry.bytes
      report(done_bytes)
    for sha256 in sorted(set(self.vocabularies.values())):
      self.vocabulary(sha256)


def _unpickled(
  root: str, path: str, manifest_json: str, sha256: str, stamps: Mapping[str, tuple[int, int, int, str]]
) -> Cache:
  file_stamps = {name: FileStamp(*stamp) for name, stamp in stamps.items()}
  return Cache(epath.Path(root), Manifest.from_json(manifest_json, path=path), sha256, stamps=file_stamps)
