"""Ranges of objects that threads fetch ahead of need, with budgets for requests and for memory."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from anystep.errors import AnystepError, ExitCode
from anystep.forks import start_anew_in_children
from anystep.stores.addresses import Address
from anystep.stores.disk_cache import DiskCache
from anystep.stores.objects import view_range

DEFAULT_REQUESTS = 128
DEFAULT_AHEAD_BYTES = 256 << 20
DEFAULT_DISK_CACHE_BYTES = 64 << 30
# Ranges of an object that are no further apart are fetched by one request, which has at most so many bytes:
# a request takes as long as some hundred kilobytes do.
_GAP_BYTES = 32 << 10
_REQUEST_BYTES = 2 << 20
# Longest wait for running requests where the process ends.
_ENDING_SECONDS = 10.0


class ObjectContent(NamedTuple):
  """One content of an object, which another one may replace: ranges are read of this one alone.

  Attributes:
    address: the object's.
    size_bytes: its size.
    etag: see `objects.ObjectStatus`.
  """

  address: Address
  size_bytes: int
  etag: str


class Span(NamedTuple):
  """Bytes [start, stop) of an object."""

  content: ObjectContent
  start: int
  stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchBudget:
  """Limits on what a process fetches from stores ahead of need.

  Attributes:
    requests: number of requests at a time.
    ahead_bytes: memory for ranges that were fetched, or are being fetched, and are not used yet.
    disk_cache: holds what was fetched for later processes and epochs; None for none.
  """

  requests: int = DEFAULT_REQUESTS
  ahead_bytes: int = DEFAULT_AHEAD_BYTES
  disk_cache: DiskCache | None = None

  def __post_init__(self):
    if self.requests < 1 or self.ahead_bytes < 0:
      raise ValueError(f"{self.requests} requests and {self.ahead_bytes} bytes cannot fetch")

  @classmethod
  def from_environment(cls) -> FetchBudget:
    """Return the budget that environment variables set (docs/stores.md).

    Raises:
      AnystepError: 78 `store_setting`.
    """
    disk_cache, directory = None, os.environ.get("ANYSTEP_STORE_CACHE_DIR")
    if directory:
      budget_bytes = _read_number("ANYSTEP_STORE_CACHE_BYTES", DEFAULT_DISK_CACHE_BYTES)
      disk_cache = DiskCache(directory, budget_bytes=budget_bytes)
    return cls(
      requests=_read_number("ANYSTEP_STORE_REQUESTS", DEFAULT_REQUESTS),
      ahead_bytes=_read_number("ANYSTEP_STORE_AHEAD_BYTES", DEFAULT_AHEAD_BYTES),
      disk_cache=disk_cache,
    )


def _read_number(variable: str, default: int) -> int:
  text = os.environ.get(variable) or str(default)
  if not text.isdecimal() or int(text) < 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "store_setting",
      expected=f"{variable} that is a whole number >= 1",
      got=repr(text),
      fix="set the environment variable to a number, or unset it",
    )
  return int(text)


class RangeFetcher:
  """Fetches ranges of objects in background threads, and gives them to whoever reads them.

  Only speed depends on what is fetched: a range that is not there, or could not be fetched, is read when it
  is asked for. Thread-safe; calls may be interrupted anywhere.

  Args:
    budget: limits on requests and memory.
  """

  def __init__(self, budget: FetchBudget):
    self.budget = budget
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    """Forget the threads and what they fetch, as a forked process must."""
    self._lock = threading.Lock()
    self._pieces: dict[ObjectContent, list[_Piece]] = {}
    # A set in the order of fetching.
    self._in_order: dict[_Piece, None] = {}
    self._held_bytes = 0
    self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
    self._threads: list[threading.Thread] = []
    self._process = os.getpid()
    _fetchers.add(self)

  @property
  def free_bytes(self) -> int:
    """Bytes that the budget has room for; negative where `fetch` was asked for more."""
    with self._lock:
      # Counted anew: an interrupt may have come between a change and its count.
      self._held_bytes = sum(piece.num_bytes for piece in self._in_order)
      return self.budget.ahead_bytes - self._held_bytes

  def __del__(self) -> None:
    # Threads hold the queue alone. An interrupt may have stopped __init__. When Python ends modules are gone.
    if not sys.is_finalizing() and getattr(self, "_process", None) == os.getpid():
      self.end()

  def end(self) -> None:
    """Let the threads end after their current requests."""
    with contextlib.suppress(queue.Empty):
      while True:
        self._queue.get_nowait()
    for _ in self._threads:
      self._queue.put(None)

  def join(self, *, seconds: float) -> None:
    """Wait until the threads have ended, at most so long."""
    stop = time.monotonic() + seconds
    for thread in self._threads:
      thread.join(max(stop - time.monotonic(), 0))

  def fetch(self, spans: Iterable[Span]) -> int:
    """Have spans fetched, unless they are; return the number of bytes that were not.

    The oldest ranges that nobody read make room.
    """
    with self._lock:
      unfetched = [span for span in spans if not self._find(span)]
      if not unfetched:
        return 0
      new = [_Piece(joined, asked) for joined, asked in _join(unfetched)]
      num_bytes = sum(piece.num_bytes for piece in new)
      while self._in_order and self._held_bytes + num_bytes > self.budget.ahead_bytes:
        self._drop(next(iter(self._in_order)))
      for piece in new:
        self._pieces.setdefault(piece.span.content, []).append(piece)
        self._in_order[piece] = None
      self._held_bytes += num_bytes
    for piece in new:
      self._queue.put(piece)
    while len(self._threads) < min(self.budget.requests, self._queue.qsize()):
      thread = threading.Thread(
        target=_fetch_all, args=(self._queue, self.budget), name="anystep-store", daemon=True
      )
      self._threads.append(thread)
      thread.start()
    return num_bytes

  def read(self, span: Span) -> bytes:
    """Return a span's bytes: those that were fetched, which are waited for, or by a request of its own.

    Raises:
      OSError: as `objects.view_range`; ObjectChangedError where the object has another content by now.
    """
    span = span._replace(stop=min(span.stop, span.content.size_bytes))
    with self._lock:
      piece = self._find(span)
    if piece is not None:
      fetched = piece.take(span, self.budget)
      if not piece.is_held:
        with self._lock:
          self._drop(piece)
      if fetched is not None:
        return fetched
    return bytes(_read(span, self.budget))

  def forget(self, contents: Iterable[ObjectContent]) -> None:
    """Let go of what was fetched of objects, and of what is still to be fetched."""
    with self._lock:
      for content in contents:
        for piece in tuple(self._pieces.get(content, ())):
          self._drop(piece)

  def _find(self, span: Span) -> _Piece | None:
    for piece in self._pieces.get(span.content, ()):
      if piece.is_held and piece.span.start <= span.start and span.stop <= piece.span.stop:
        return piece
    return None

  def _drop(self, piece: _Piece) -> None:
    """Forget a piece; the lock is held."""
    piece.drop()
    if piece in self._in_order:
      del self._in_order[piece]
      self._held_bytes -= piece.num_bytes
    pieces = self._pieces.get(piece.span.content, [])
    if piece in pieces:
      pieces.remove(piece)
    if not pieces:
      self._pieces.pop(piece.span.content, None)


class _Piece:
  """A range that one request fetches, for one or several spans.

  Attributes:
    span: the range.
    num_bytes: its length.
    is_held: whether it waits for readers.
  """

  __slots__ = ("_asked_bytes", "_claim", "_content", "_fetching", "_taken", "is_held", "num_bytes", "span")

  def __init__(self, span: Span, asked_bytes: int):
    self.span = span
    self.num_bytes = span.stop - span.start
    self.is_held = True
    self._asked_bytes = asked_bytes
    # Ranges that readers took, apart from each other.
    self._taken: list[tuple[int, int]] = []
    self._claim = threading.Lock()
    # Held until the range is fetched, or could not be.
    self._fetching = threading.Lock()
    self._fetching.acquire()
    self._content: memoryview | None = None

  def drop(self) -> None:
    """Let go of the content; readers that come later read for themselves."""
    self.is_held, self._content = False, None

  def fetch(self, budget: FetchBudget) -> None:
    """Fetch the range, unless somebody does; a failure leaves it without content."""
    if self._claim.acquire(blocking=False):
      try:
        if self.is_held:
          self._content = _read(self.span, budget)
      finally:
        self._fetching.release()

  def take(self, span: Span, budget: FetchBudget) -> bytes | None:
    """Return a span within the range, after waiting for it; None where it could not be fetched."""
    # A reader does not wait for a thread to begin.
    try:
      self.fetch(budget)
    except OSError:
      self.is_held = False
      return None
    with self._fetching:
      content = self._content
    if content is None or self._is_all_taken(span):
      self.is_held = False
    if content is None:
      return None
    return bytes(content[span.start - self.span.start : span.stop - self.span.start])

  def _is_all_taken(self, span: Span) -> bool:
    """Note that a span is taken; return whether as much is as was asked for."""
    start, stop, apart = span.start, span.stop, []
    for other_start, other_stop in self._taken:
      if other_stop < start or stop < other_start:
        apart.append((other_start, other_stop))
      else:
        start, stop = min(start, other_start), max(stop, other_stop)
    self._taken = [*apart, (start, stop)]
    return sum(stop - start for start, stop in self._taken) >= self._asked_bytes


def _fetch_all(pieces: queue.SimpleQueue[_Piece | None], budget: FetchBudget) -> None:
  while (piece := pieces.get()) is not None:
    # The reader finds no content, reads it anew, and gets the error.
    with contextlib.suppress(Exception):
      piece.fetch(budget)
    del piece


def _read(span: Span, budget: FetchBudget) -> memoryview:
  """Read a span from the disk cache or the store.

  Raises:
    OSError: as `objects.view_range`; also where the store's answer is too short.
  """
  content, start, stop = span

  def get(start: int, stop: int) -> memoryview:
    answer = view_range(content.address, start, stop, etag=content.etag)
    if len(answer) != stop - start:
      text = f"the store's answer has {len(answer)} bytes of {stop - start}"
      raise OSError(errno.EIO, text, str(content.address))
    return answer

  if budget.disk_cache is None:
    return get(start, stop)
  name = f"{content.address} {content.size_bytes} {content.etag}"
  kept = budget.disk_cache.read(
    name, start, stop, size_bytes=content.size_bytes, get=lambda start, stop: bytes(get(start, stop))
  )
  return memoryview(kept)


def _join(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
  """Yield spans that lie together as one each, with the bytes that were asked for of it.

  In the order in which an object is first asked for.
  """
  by_object: dict[ObjectContent, list[Span]] = {}
  for span in spans:
    by_object.setdefault(span.content, []).append(span)
  for of_object in by_object.values():
    joined, asked = None, 0
    for span in sorted(set(of_object)):
      if joined and span.start <= joined.stop + _GAP_BYTES and span.stop <= joined.start + _REQUEST_BYTES:
        asked += max(span.stop - max(span.start, joined.stop), 0)
        joined = joined._replace(stop=max(joined.stop, span.stop))
        continue
      if joined:
        yield joined, asked
      joined, asked = span, span.stop - span.start
    if joined:
      yield joined, asked


_fetchers: weakref.WeakSet[RangeFetcher] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
  """End the threads that are left: a request that returns to an interpreter that has ended crashes it."""
  left = [fetcher for fetcher in _fetchers if fetcher._process == os.getpid()]
  for fetcher in left:
    fetcher.end()
  for fetcher in left:
    fetcher.join(seconds=_ENDING_SECONDS)
