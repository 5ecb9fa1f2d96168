"""Pool of open files and records read ahead that caches and streams share, with a budget for each."""

from __future__ import annotations

import collections
import resource
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from anystep.cached import cached_property
from anystep.containers.containers import BlockReader
from anystep.forks import start_anew_in_children
from anystep.stores.range_fetcher import FetchBudget, RangeFetcher

DEFAULT_BUDGET_BYTES = 1 << 30
# Memory of a record besides its bytes: an object's head and an entry in a list.
_RECORD_OVERHEAD_BYTES = 48
# Indexes of open files may take this part of the budget: a quarter.
_INDEX_SHARE = 4


def default_open_files() -> int:
  """Return half of the number of files that the process may open; the rest is for other uses."""
  soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return 4096 if soft_limit == resource.RLIM_INFINITY else max(soft_limit // 2, 8)


class ReadPool:
  """Open files and held records of all caches and streams that share it.

  The entry that was not used for the longest time is dropped first. Only speed depends on the pool: what it
  dropped is read again.

  Args:
    budget_bytes: for held records and the indexes of open files together.
    open_files: how many files may be open at a time; by default half of the process's limit. Objects on
      stores do not count.
    fetch_budget: for reading ahead from stores; by default what environment variables say (docs/stores.md).

  Raises:
    ValueError: for a budget below 0 bytes or 1 file.
  """

  def __init__(
    self,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    open_files: int | None = None,
    fetch_budget: FetchBudget | None = None,
  ):
    self._fetch_budget = fetch_budget
    self.budget_bytes = budget_bytes
    self.open_files = default_open_files() if open_files is None else open_files
    if self.budget_bytes < 0 or self.open_files < 1:
      raise ValueError(f"a pool of {self.budget_bytes} bytes and {self.open_files} files cannot read")
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Forget open files and held records without touching them, as a forked process must."""
    self.lock = threading.RLock()
    # Of files that are open, and of objects on stores, which are not.
    self._readers: collections.OrderedDict[Hashable, BlockReader] = collections.OrderedDict()
    self._object_readers: collections.OrderedDict[Hashable, BlockReader] = collections.OrderedDict()
    self._index_bytes = 0
    self._held: collections.OrderedDict[Hashable, tuple[Any, int]] = collections.OrderedDict()
    self._held_bytes = 0

  @cached_property
  def fetcher(self) -> RangeFetcher:
    """Fetches ranges of files on stores, within a budget of its own.

    Raises:
      AnystepError: 78 `store_setting`.
    """
    return RangeFetcher(self._fetch_budget or FetchBudget.from_environment())

  @property
  def used_bytes(self) -> int:
    """Bytes that are held now."""
    return self._held_bytes + self._index_bytes

  def reader(
    self, key: Hashable, open_reader: Callable[[], BlockReader], *, holds_file: bool = True
  ) -> BlockReader:
    """Return the open reader of a file. Use it under the pool's lock: another thread may close it.

    Args:
      key: of the file.
      open_reader: opens it.
      holds_file: whether the reader keeps a file open, of which the process may have so many.
    """
    with self.lock:
      readers = self._readers if holds_file else self._object_readers
      if key in readers:
        readers.move_to_end(key)
        return readers[key]
      # Close files first: a process at its limit could not open one more.
      while holds_file and len(readers) >= self.open_files:
        self.close_reader(next(iter(readers)))
      reader = open_reader()
      try:
        readers[key] = reader
        self._index_bytes += reader.index_bytes
      except BaseException:
        self._count_anew()
        raise
      while self._index_bytes > self.budget_bytes // _INDEX_SHARE and len(readers) > 1:
        self.close_reader(next(iter(readers)))
      self._make_room()
      return reader

  def has_reader(self, key: Hashable) -> bool:
    """Return whether a file's reader is open."""
    return key in self._readers or key in self._object_readers

  def close_reader(self, key: Hashable) -> None:
    """Close a file's reader, if it is open."""
    with self.lock:
      try:
        reader = self._readers.pop(key, None) or self._object_readers.pop(key, None)
        if reader is not None:
          self._index_bytes -= reader.index_bytes
          reader.close()
      except BaseException:
        self._count_anew()
        raise

  def get(self, key: Hashable) -> Any:
    """Return the value that is held under a key; None where there is none."""
    with self.lock:
      value_and_size = self._held.get(key)
      if value_and_size is None:
        return None
      self._held.move_to_end(key)
      return value_and_size[0]

  def hold(self, key: Hashable, value: Any, size_bytes: int) -> None:
    """Hold a value until it is dropped or the budget needs its room."""
    with self.lock:
      try:
        self.drop(key)
        self._held[key] = (value, size_bytes)
        self._held_bytes += size_bytes
        self._make_room()
      except BaseException:
        self._count_anew()
        raise

  def _make_room(self) -> None:
    while self.used_bytes > self.budget_bytes and len(self._held) > 1:
      self.drop(next(iter(self._held)))

  def drop(self, key: Hashable) -> None:
    """Drop the value that is held under a key, if there is one."""
    with self.lock:
      try:
        _, size_bytes = self._held.pop(key, (None, 0))
        self._held_bytes -= size_bytes
      except BaseException:
        self._count_anew()
        raise

  def _count_anew(self) -> None:
    """Count all bytes again, after an interrupt that may have come between a change and its count."""
    self._held_bytes = sum(size_bytes for _, size_bytes in self._held.values())
    readers = (*self._readers.values(), *self._object_readers.values())
    self._index_bytes = sum(reader.index_bytes for reader in readers)

  def drop_where(self, meets_condition: Callable[[Any], bool]) -> None:
    """Drop every value whose key meets a condition."""
    with self.lock:
      for key in [key for key in self._held if meets_condition(key)]:
        self.drop(key)


def held_bytes(records: Sequence[bytes]) -> int:
  """Return the memory that records take."""
  return sum(map(len, records)) + _RECORD_OVERHEAD_BYTES * len(records)


_pools: dict[str, ReadPool] = {}


def process_pool() -> ReadPool:
  """Return the pool that caches of this process use by default."""
  # Without a lock: a process that is forked meanwhile would find it taken for ever.
  return _pools.get("process") or _pools.setdefault("process", ReadPool())
