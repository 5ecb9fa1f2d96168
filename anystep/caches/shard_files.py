"""Shards of a split, opened when they are first read, and checked whenever they are."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from etils import epath

from anystep.caches.file_checks import (
  check_content,
  check_sha256,
  file_changing,
  read_array,
  read_content,
  stamp_file,
)
from anystep.caches.manifest import AS_IS, HEAD_BYTES, FileEntry, Manifest
from anystep.caches.read_pool import ReadPool
from anystep.containers.containers import BlockReader, find_format, open_blocks
from anystep.containers.file_ranges import (
  FileRanges,
  FileStamp,
  ObjectRanges,
  content_at,
  is_replaced,
  unreadable,
)
from anystep.errors import AnystepError
from anystep.files import names
from anystep.stores.addresses import is_remote
from anystep.stores.failures import ObjectChangedError
from anystep.stores.range_fetcher import ObjectContent, Span

# A whole object is hashed in pieces, of which some are fetched ahead.
_HASHED_BYTES = 2 << 20
_HASHED_AHEAD = 16
# Indexes of so many shards, and of as many after these, are fetched together.
_INDEXES_AHEAD = 256
# The first 4 KiB of so many files are fetched together.
_HEADS_AHEAD = 1024
_T = TypeVar("_T")


class ShardFiles:
  """Files of a split's records.

  Args:
    root: the directory that the task's lies below.
    manifest: the split's.
    pool: holds open files; on stores, its fetcher holds ranges that are read ahead.
    key: begins the pool's keys.
    stamps: of record files whose content was compared with the manifest, by name.

  Attributes:
    stamps: the argument, and those that were compared since.
    are_remote: whether the files are on a store.
  """

  def __init__(
    self,
    root: epath.Path,
    manifest: Manifest,
    *,
    pool: ReadPool,
    key: Hashable,
    stamps: Mapping[str, FileStamp],
  ):
    self._root = root
    self._directory = names.task_directory(root, manifest.task)
    self._own_names = frozenset(entry.name for entry in manifest.offsets_files)
    self._manifest = manifest
    self._pool = pool
    self._key = key
    self.stamps = dict(stamps)
    self._contents: dict[str, ObjectContent] = {}
    self.are_remote = is_remote(root)

  def path_of(self, entry: FileEntry) -> epath.Path:
    """Return the path of a file of the manifest."""
    if self._manifest.layout == AS_IS and entry.name not in self._own_names:
      return names.record_path(self._root, entry.name)
    return self._directory / entry.name

  def read(self, shard: int, read: Callable[[BlockReader], _T]) -> _T:
    """Read from a shard's file, if it is still the file that was opened and checked.

    Raises:
      AnystepError: 65 `file_changed`, `file_missing`, and as `open_blocks` and the reader.
    """
    entry, key = self._manifest.record_files[shard], (self._key, shard)
    with self._pool.lock:
      for _ in range(2):
        reader = self._pool.reader(key, lambda: self._open(shard), holds_file=not self.are_remote)
        try:
          content = read(reader)
        except AnystepError as error:
          # So that the next call opens the file that somebody restores, as the error asks for.
          self._pool.close_reader(key)
          if is_replaced(error):
            continue
          raise
        # Compared after reading: a change of the file before the read has changed its stamp too.
        if reader.stamp() == self.stamps[entry.name]:
          return content
        self._pool.close_reader(key)
    raise file_changing(self.path_of(entry))

  def fetch(self, spans: Mapping[int, Sequence[tuple[int, int]]]) -> int:
    """Have records fetched from a store ahead of need; do nothing on local disks.

    Args:
      spans: by shard, ranges [start, stop) of records.

    Returns:
      The number of bytes that were not fetched before.

    Raises:
      AnystepError, OSError: as `read`, for a shard that had to be opened.
    """
    if not self.are_remote:
      return 0
    num_bytes, shards = 0, list(spans)
    for number, (shard, records) in enumerate(spans.items()):
      if number % _INDEXES_AHEAD == 0:
        self.fetch_indexes(shards[number : number + 2 * _INDEXES_AHEAD])
      byte_ranges = self.read(shard, functools.partial(_find_spans, records))
      content = self._content(self._manifest.record_files[shard])
      num_bytes += self._pool.fetcher.fetch(Span(content, start, stop) for start, stop in byte_ranges)
    return num_bytes

  def fetch_blocks(self, blocks: Mapping[int, Sequence[int]]) -> int:
    """Have whole blocks fetched ahead of need, as `fetch`; numbers of blocks are by shard."""
    size, files = self._manifest.block_records, self._manifest.record_files
    if not self.are_remote:
      return 0
    return self.fetch(
      {
        shard: [(block * size, min((block + 1) * size, files[shard].records)) for block in numbers]
        for shard, numbers in blocks.items()
      }
    )

  def fetch_indexes(self, shards: Iterable[int]) -> None:
    """Have what opening reads fetched from a store, of the first shards that are not open.

    As many as half of the fetcher's budget holds: what is fetched later would push them out.
    """
    m, spans, num_bytes = self._manifest, [], 0
    for shard in shards if self.are_remote else ():
      entry = m.record_files[shard]
      if entry.name in self.stamps and not self._pool.has_reader((self._key, shard)):
        if num_bytes > self._pool.fetcher.budget.ahead_bytes // 2:
          break
        content = self._content(entry)
        head_stop = min(HEAD_BYTES, entry.bytes)
        shard_spans = [Span(content, 0, head_stop), Span(content, *self._index_span(entry))]
        if m.offsets_files and m.offsets_files[shard].name in self.stamps:
          table = m.offsets_files[shard]
          shard_spans.append(Span(self._content(table), 0, table.bytes))
        spans += [span for span in shard_spans if span.start < span.stop]
        num_bytes += sum(span.stop - span.start for span in shard_spans)
    self._pool.fetcher.fetch(spans)

  def forget_fetched(self) -> None:
    """Let go of what was fetched from a store and is not read yet."""
    if self._contents:
      self._pool.fetcher.forget(self._contents.values())

  def check_heads(self) -> None:
    """Compare the first 4 KiB of all files of records with the manifest.

    Raises:
      AnystepError: 65 `file_changed`, `file_missing`.
    """
    files = self._manifest.record_files
    for number, entry in enumerate(files):
      if self.are_remote and number % _HEADS_AHEAD == 0:
        later = [
          file for file in files[number : number + _HEADS_AHEAD] if file.bytes and file.name in self.stamps
        ]
        spans = [Span(self._content(file), 0, min(HEAD_BYTES, file.bytes)) for file in later]
        self._pool.fetcher.fetch(spans)
      self._check_head(entry)

  def _check_head(self, entry: FileEntry) -> None:
    if self.are_remote:
      self._open_object(entry)
    else:
      read_content(self.path_of(entry), entry.head_sha256, num_bytes=HEAD_BYTES)

  def check_content(self, entry: FileEntry) -> None:
    """Compare every byte of a file with the manifest.

    Raises:
      AnystepError: 65 `file_changed`, `file_missing`.
    """
    path = self.path_of(entry)
    if self.are_remote:
      self._check_object(entry, stamp_file(path))
    else:
      check_content(path, entry.sha256)

  def read_array(
    self, entry: FileEntry, *, kind: str, dtype: np.dtype, shape: tuple[int, ...], later: Sequence[FileEntry]
  ) -> np.ndarray:
    """Return the array of an npy file; see `file_checks.read_array`.

    Args:
      entry: the file.
      kind: the error's kind for another dtype or shape.
      dtype: the array's.
      shape: the array's.
      later: files that are read next; on a store they are fetched meanwhile.
    """
    content = None
    if self.are_remote:
      spans = [Span(self._content(e), 0, e.bytes) for e in (entry, *later) if e.name in self.stamps]
      self._pool.fetcher.fetch(span for span in spans if span.stop)
      # What cannot be read of this content is read of the one that is there now, or is an error.
      with contextlib.suppress(OSError):
        content = self._pool.fetcher.read(spans[0]) if entry.name in self.stamps else None
    return read_array(self.path_of(entry), entry.sha256, kind=kind, dtype=dtype, shape=shape, content=content)

  def _content(self, entry: FileEntry) -> ObjectContent:
    """Return the content of a file on a store that was compared with the manifest."""
    stamp, known = self.stamps[entry.name], self._contents.get(entry.name)
    # Making an address takes longer than all else that a range needs.
    if known is None or known.etag != stamp.etag:
      known = self._contents[entry.name] = content_at(self.path_of(entry), stamp)
    return known

  def _open(self, shard: int) -> BlockReader:
    m = self._manifest
    entry = m.record_files[shard]
    path = self.path_of(entry)
    offsets, ranges = None, None
    if self.are_remote:
      ranges = self._open_object(entry)
      stamp = ranges.stamp()
    else:
      self._check_head(entry)
      stamp = stamp_file(path)
      if stamp != self.stamps.get(entry.name):
        # It may be another file, or changed, or only touched: the content decides.
        check_content(path, entry.sha256)
        self.stamps[entry.name] = stamp
    if m.offsets_files:
      offsets = self.read_array(
        m.offsets_files[shard],
        kind="offsets_form",
        dtype=np.dtype(np.uint64),
        shape=m.offsets_shape(shard),
        later=(),
      )
    if ranges is not None:
      with _store_failures(path):
        ranges.hold(*self._index_span(entry))
    reader = open_blocks(
      m.container,
      path,
      num_records=entry.records,
      block_records=m.block_records,
      offsets=offsets,
      columns=tuple(m.features),
      open_ranges=FileRanges if ranges is None else lambda path: ranges,
    )
    if ranges is not None:
      ranges.hold(0, 0)
    if reader.stamp() != stamp:
      reader.close()
      raise file_changing(path)
    return reader

  def _index_span(self, entry: FileEntry) -> tuple[int, int]:
    """Return the range of a file's bytes that opening it mostly reads."""
    num_blocks = -(-entry.records // self._manifest.block_records)
    return find_format(self._manifest.container).index_span(entry.bytes, num_blocks)

  def _open_object(self, entry: FileEntry) -> ObjectRanges:
    """Return the ranges of a file on a store, whose first 4 KiB are the manifest's."""
    path, stamp = self.path_of(entry), self.stamps.get(entry.name)
    with _store_failures(path):
      if stamp is not None:
        # Another content may be as good: an object that was copied back, for instance.
        with contextlib.suppress(ObjectChangedError, FileNotFoundError):
          return self._check_object_head(entry, stamp)
      stamp = stamp_file(path)
      self._check_object(entry, stamp)
      self.stamps[entry.name] = stamp
      return self._check_object_head(entry, stamp)

  def _check_object_head(self, entry: FileEntry, stamp: FileStamp) -> ObjectRanges:
    path = self.path_of(entry)
    ranges = ObjectRanges(content_at(path, stamp), self._pool.fetcher)
    check_sha256(path, entry.head_sha256, hashlib.sha256(ranges.read(0, HEAD_BYTES)).hexdigest())
    return ranges

  def _check_object(self, entry: FileEntry, stamp: FileStamp) -> None:
    """Compare every byte of one content of an object with the manifest."""
    path, digest = self.path_of(entry), hashlib.sha256()
    content = content_at(path, stamp)
    spans = [
      Span(content, start, min(start + _HASHED_BYTES, stamp.size_bytes))
      for start in range(0, stamp.size_bytes, _HASHED_BYTES)
    ]
    with _store_failures(path):
      for number, span in enumerate(spans):
        self._pool.fetcher.fetch(spans[number : number + _HASHED_AHEAD])
        digest.update(self._pool.fetcher.read(span))
    check_sha256(path, entry.sha256, digest.hexdigest())


@contextlib.contextmanager
def _store_failures(path: epath.Path) -> Iterator[None]:
  """Turn failures of a store into AnystepError."""
  try:
    yield
  except (ObjectChangedError, FileNotFoundError) as error:
    raise file_changing(path) from error
  except OSError as error:
    raise unreadable(str(path), error) from error


def _find_spans(records: Sequence[tuple[int, int]], reader: BlockReader) -> list[tuple[int, int]]:
  return [span for start, stop in records for span in reader.spans(start, stop)]
