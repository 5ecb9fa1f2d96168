"""A task's cache, opened for reading."""

from __future__ import annotations

import collections
import hashlib
import io
import re
import threading
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath

from anystep import names
from anystep.containers import ArrayRecordBlocks
from anystep.errors import AnystepError, ExitCode, nearest
from anystep.examples import Ragged, parse_example, parse_examples
from anystep.manifest import HEAD_BYTES, FileEntry, Manifest
from anystep.permutation import Permutation

_RESTORE = "restore the file from where the cache was made, or cache the task again with --overwrite"
_COMPLETED_TEXT = re.compile(r"([A-Za-z0-9_.-]+ [0-9a-f]{64}\n)+\Z")
_OPEN_FILES = 256
_BLOCK_BUDGET_BYTES = 1 << 30


def read_completed(directory: epath.Path) -> dict[str, str]:
  """The splits of a complete cache with the sha256 of their manifests; empty where there is no cache."""
  try:
    text = (directory / names.COMPLETED).read_bytes().decode("ascii", "replace")
  except (FileNotFoundError, NotADirectoryError):
    return {}
  if not _COMPLETED_TEXT.match(text):
    raise AnystepError(
      ExitCode.DATA,
      "completed_invalid",
      path=directory / names.COMPLETED,
      expected="one line per split: split, sha256 of its manifest",
      got=text[:80],
      fix=_RESTORE,
    )
  return dict(line.split(" ") for line in text.removesuffix("\n").split("\n"))


def open_cache(cache_dir: epath.PathLike, task: str, split: str) -> Cache:
  """Opens a split of a task's cache after checking that its files are those that were written.

  One listing and the manifest are read; `Cache.verify` reads every byte.

  Args:
    cache_dir: the root that the cache job wrote to (`--output_cache_dir`).
    task: the task's registered name.
    split: the split's name.

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
  try:
    content = path.read_bytes()
  except FileNotFoundError as error:
    raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=_RESTORE) from error
  found = hashlib.sha256(content).hexdigest()
  if found != completed[split]:
    raise AnystepError(
      ExitCode.DATA, "manifest_changed", path=path, expected=completed[split], got=found, fix=_RESTORE
    )
  manifest = Manifest.from_json(content.decode(), path=path)
  if (manifest.task, manifest.split) != (task, split):
    raise AnystepError(
      ExitCode.DATA,
      "manifest_task",
      path=path,
      expected=f"{task} {split}",
      got=f"{manifest.task} {manifest.split}",
      fix="point --cache_dir at this task's own cache",
    )
  _check_listing(directory, manifest)
  return Cache(directory, manifest, found)


def _check_listing(directory: epath.Path, manifest: Manifest) -> None:
  present = {path.name: path for path in directory.iterdir()}
  for entry in manifest.files:
    path = present.get(entry.name)
    if path is None:
      raise AnystepError(ExitCode.DATA, "file_missing", path=directory / entry.name, fix=_RESTORE)
    size = path.stat().length
    if size != entry.bytes:
      raise AnystepError(ExitCode.DATA, "file_size", path=path, expected=entry.bytes, got=size, fix=_RESTORE)
  pattern = names.shard_pattern(manifest.split)
  listed = {entry.name for entry in manifest.files}
  foreign = sorted(name for name in present if pattern.match(name) and name not in listed)
  if foreign:
    raise AnystepError(
      ExitCode.DATA,
      "file_foreign",
      path=directory / foreign[0],
      expected="only the files that the manifest lists",
      got=f"{len(foreign)} more",
      fix="move files that are not of this cache out of its directory",
    )


class Cache:
  """A split of a task's cache: its examples by index, its records by shard and place.

  Made by `open_cache`. Reading is thread-safe.

  Attributes:
    directory: the task's directory.
    manifest: what the split consists of.
    manifest_sha256: sha256 of the manifest file, as COMPLETED states it.
  """

  def __init__(self, directory: epath.Path, manifest: Manifest, manifest_sha256: str):
    self.directory = directory
    self.manifest = manifest
    self.manifest_sha256 = manifest_sha256
    self._lock = threading.Lock()
    self._readers: collections.OrderedDict[int, ArrayRecordBlocks] = collections.OrderedDict()
    self._blocks: collections.OrderedDict[tuple[int, int], list[bytes]] = collections.OrderedDict()
    self._block_bytes = 0

  def __repr__(self) -> str:
    m = self.manifest
    return f"Cache(task={m.task!r}, split={m.split!r}, manifest_sha256={self.manifest_sha256!r})"

  def __len__(self) -> int:
    return self.manifest.num_examples

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    """The example of an index, features by name."""
    self._check_indices(np.array([index]))
    num_shards = self.manifest.num_shards
    (record,) = self.read_records(np.array([index % num_shards]), np.array([index // num_shards]))
    return parse_example(record, self.manifest.features)

  def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, Ragged | np.ndarray]:
    """The examples of several indices, each feature as one batch."""
    indices = np.asarray(indices, np.int64)
    self._check_indices(indices)
    num_shards = self.manifest.num_shards
    return parse_examples(
      self.read_records(indices % num_shards, indices // num_shards), self.manifest.features
    )

  def read_records(self, shards: np.ndarray, places: np.ndarray) -> list[bytes]:
    """Serialized records by shard and place, `(rows,)` each, in that order; read in whole blocks."""
    block_records = self.manifest.block_records
    keys = list(zip(shards.tolist(), (places // block_records).tolist(), strict=True))
    with self._lock:
      blocks = {key: self._block(*key) for key in dict.fromkeys(keys)}
    return [blocks[key][place] for key, place in zip(keys, (places % block_records).tolist(), strict=True)]

  def source_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where examples come from: source shard and place among its examples, `(rows,) int64` each."""
    m = self.manifest
    ordinals = Permutation(m.num_examples, "preshuffle", m.task, m.split, m.seed).inverse(np.asarray(indices))
    stops = np.cumsum([shard.examples for shard in m.source_shards])
    source_shards = np.searchsorted(stops, ordinals, side="right")
    starts = np.concatenate([[0], stops[:-1]])
    return source_shards, ordinals - starts[source_shards]

  def lengths(self, shard: int) -> np.ndarray:
    """Token counts of a shard's records: `(records, sequence features) uint32`, columns by name."""
    entry = self.manifest.lengths_files[shard]
    content = (self.directory / entry.name).read_bytes()
    path = self.directory / entry.name
    _check_content(path, entry, content)
    expected = (np.dtype(np.uint32), (entry.records, len(self.manifest.sequence_features)))
    try:
      table = np.load(io.BytesIO(content), allow_pickle=False)
      found: object = (table.dtype, table.shape)
    except ValueError as error:
      found = str(error)
    if found != expected:
      raise AnystepError(ExitCode.DATA, "lengths_form", path=path, expected=expected, got=found, fix=_RESTORE)
    return table

  def check_heads(self) -> None:
    """Compares the first 4 KiB of every shard: what tells a swapped shard without reading them all.

    Raises:
      AnystepError: 65 `file_changed`.
    """
    for entry in self.manifest.record_files:
      self._check_head(entry)

  def verify(self, report: Callable[[int], None] = lambda done_bytes: None) -> None:
    """Reads every byte of every file and compares it with the manifest.

    Args:
      report: called with the number of bytes read so far, after each file.

    Raises:
      AnystepError: 65 `file_changed` names the first file that differs.
    """
    done_bytes = 0
    for entry in self.manifest.files:
      path = self.directory / entry.name
      _check_content(path, entry, path.read_bytes())
      done_bytes += entry.bytes
      report(done_bytes)

  def _check_head(self, entry: FileEntry) -> None:
    path = self.directory / entry.name
    with path.open("rb") as file:
      head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
    if head != entry.head_sha256:
      raise AnystepError(
        ExitCode.DATA, "file_changed", path=path, expected=entry.head_sha256, got=head, fix=_RESTORE
      )

  def _check_indices(self, indices: np.ndarray) -> None:
    outside = indices[(indices < 0) | (indices >= len(self))]
    if outside.size:
      raise IndexError(f"{self} has no example {outside[0]}: there are {len(self)}.")

  def _block(self, shard: int, block: int) -> list[bytes]:
    key = (shard, block)
    if key in self._blocks:
      self._blocks.move_to_end(key)
      return self._blocks[key]
    records = self._reader(shard).read_block(block)
    self._blocks[key] = records
    self._block_bytes += sum(map(len, records))
    while self._block_bytes > _BLOCK_BUDGET_BYTES and len(self._blocks) > 1:
      _, dropped = self._blocks.popitem(last=False)
      self._block_bytes -= sum(map(len, dropped))
    return records

  def _reader(self, shard: int) -> ArrayRecordBlocks:
    if shard in self._readers:
      self._readers.move_to_end(shard)
      return self._readers[shard]
    entry = self.manifest.record_files[shard]
    path = self.directory / entry.name
    self._check_head(entry)
    reader = ArrayRecordBlocks(path, num_records=entry.records, block_records=self.manifest.block_records)
    self._readers[shard] = reader
    if len(self._readers) > _OPEN_FILES:
      self._readers.popitem(last=False)[1].close()
    return reader


def _check_content(path: epath.Path, entry: FileEntry, content: bytes) -> None:
  found = hashlib.sha256(content).hexdigest()
  if found != entry.sha256:
    raise AnystepError(
      ExitCode.DATA, "file_changed", path=path, expected=entry.sha256, got=found, fix=_RESTORE
    )
