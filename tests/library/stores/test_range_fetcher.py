"""Ranges are fetched ahead within budgets; whatever becomes of that, readers get the object's bytes."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest

from anystep.errors import AnystepError
from anystep.stores import range_fetcher
from anystep.stores.addresses import Address
from anystep.stores.disk_cache import DiskCache
from anystep.stores.range_fetcher import FetchBudget, ObjectContent, RangeFetcher, Span

CONTENT = np.random.default_rng(0).bytes(5 << 20)
OBJECT = ObjectContent(Address("s3", "bucket", "object"), len(CONTENT), "etag")
OTHER = OBJECT._replace(address=Address("s3", "bucket", "other"))


class Store:
  """Stands in for requests: notes them, and can hold them up or fail."""

  def __init__(self):
    self.requests = []
    self.running = self.most_running = 0
    self.failing = set()
    self.let_go = threading.Event()
    self.let_go.set()
    self._lock = threading.Lock()

  def view_range(self, address, start, stop, *, etag):
    with self._lock:
      self.requests.append((address.key, start, stop))
      self.running += 1
      self.most_running = max(self.most_running, self.running)
    self.let_go.wait(10)
    with self._lock:
      self.running -= 1
    if start in self.failing:
      raise OSError(5, "the store failed")
    return memoryview(CONTENT)[start:stop]


@pytest.fixture
def store(monkeypatch):
  store = Store()
  monkeypatch.setattr(range_fetcher, "view_range", store.view_range)
  return store


def wait_until(is_so, seconds=5):
  stop = time.monotonic() + seconds
  while not is_so() and time.monotonic() < stop:
    time.sleep(0.002)
  assert is_so()


def test_what_was_fetched_is_read_without_a_further_request(store):
  fetcher = RangeFetcher(FetchBudget())
  assert fetcher.fetch([Span(OBJECT, 10, 500), Span(OTHER, 0, 10)]) == 500
  assert fetcher.read(Span(OBJECT, 10, 200)) == CONTENT[10:200]
  assert fetcher.read(Span(OBJECT, 200, 500)) == CONTENT[200:500]
  assert fetcher.read(Span(OTHER, 0, 10)) == CONTENT[:10]
  assert sorted(store.requests) == [("object", 10, 500), ("other", 0, 10)]
  assert fetcher.free_bytes == FetchBudget().ahead_bytes


def test_ranges_that_lie_together_are_joined_up_to_a_size(store):
  fetcher = RangeFetcher(FetchBudget())
  spans = [Span(OBJECT, start, start + 40_000) for start in range(0, 4_000_000, 50_000)]
  fetcher.fetch([*reversed(spans), Span(OBJECT, 4_500_000, 4_600_000)])
  for span in spans:
    assert fetcher.read(span) == CONTENT[span.start : span.stop]
  assert sorted(store.requests)[0] == ("object", 0, 2_090_000)
  assert len(store.requests) in (2, 3)
  assert fetcher.read(Span(OBJECT, 4_500_000, 4_600_000)) == CONTENT[4_500_000:4_600_000]
  assert len(store.requests) == 3


def test_what_is_read_twice_stays_until_all_is_read(store):
  fetcher = RangeFetcher(FetchBudget())
  fetcher.fetch([Span(OBJECT, 0, 1000), Span(OBJECT, 500, 2000), Span(OBJECT, 9000, 9500)])
  for start, stop in ((500, 1500), (500, 1500), (0, 600), (9000, 9500), (0, 600), (1200, 2000)):
    assert fetcher.read(Span(OBJECT, start, stop)) == CONTENT[start:stop]
  assert store.requests == [("object", 0, 9500)]
  assert fetcher.free_bytes == FetchBudget().ahead_bytes


def test_nothing_is_fetched_twice(store):
  fetcher = RangeFetcher(FetchBudget())
  assert fetcher.fetch([Span(OBJECT, 0, 1000)]) == 1000
  assert fetcher.fetch([Span(OBJECT, 0, 1000), Span(OBJECT, 100, 200)]) == 0


def test_what_was_not_fetched_is_read_by_a_request_of_its_own(store):
  fetcher = RangeFetcher(FetchBudget())
  assert fetcher.read(Span(OBJECT, 7, 9)) == CONTENT[7:9]
  assert fetcher.read(Span(OBJECT, len(CONTENT) - 3, len(CONTENT) + 100)) == CONTENT[-3:]


def test_what_could_not_be_fetched_is_read_anew_or_is_the_error(store):
  fetcher = RangeFetcher(FetchBudget())
  store.failing.add(10)
  fetcher.fetch([Span(OBJECT, 10, 500)])
  with pytest.raises(OSError, match="the store failed"):
    fetcher.read(Span(OBJECT, 10, 500))
  fetcher.fetch([Span(OBJECT, 10, 500)])
  wait_until(lambda: len(store.requests) >= 3 and not store.running)
  store.failing.clear()
  assert fetcher.read(Span(OBJECT, 10, 500)) == CONTENT[10:500]
  assert fetcher.free_bytes == FetchBudget().ahead_bytes


def test_an_answer_that_is_too_short_is_an_error(store, monkeypatch):
  monkeypatch.setattr(range_fetcher, "view_range", lambda *span, etag: memoryview(b"short"))
  with pytest.raises(OSError, match="5 bytes of 100"):
    RangeFetcher(FetchBudget()).read(Span(OBJECT, 0, 100))


def test_no_more_requests_run_at_a_time_than_the_budget_has(store):
  fetcher = RangeFetcher(FetchBudget(requests=3))
  store.let_go.clear()
  spans = [Span(OBJECT, start, start + 10) for start in range(0, 5_000_000, 100_000)]
  fetcher.fetch(spans)
  wait_until(lambda: store.running == 3)
  store.let_go.set()
  wait_until(lambda: len(store.requests) == len(spans))
  assert store.most_running == 3


def test_the_oldest_ranges_make_room(store):
  fetcher = RangeFetcher(FetchBudget(ahead_bytes=1_000_000))
  spans = [Span(OBJECT, start, start + 300_000) for start in range(0, 4_000_000, 400_000)]
  for span in spans:
    fetcher.fetch([span])
    assert fetcher.free_bytes >= 0
  wait_until(lambda: not store.running)
  num_requests = len(store.requests)
  # Fetched alone, a span beyond the budget is still fetched.
  assert [fetcher.read(span) for span in spans] == [CONTENT[s.start : s.stop] for s in spans]
  assert len(store.requests) >= num_requests + len(spans) - 3


def test_what_is_forgotten_takes_no_memory_and_is_read_anew(store):
  fetcher = RangeFetcher(FetchBudget(requests=1))
  store.let_go.clear()
  fetcher.fetch([Span(OBJECT, 0, 10), Span(OBJECT, 1_000_000, 2_000_000), Span(OTHER, 0, 10)])
  wait_until(lambda: store.running == 1)
  fetcher.forget([OBJECT])
  assert fetcher.free_bytes == FetchBudget().ahead_bytes - 10
  store.let_go.set()
  assert fetcher.read(Span(OTHER, 0, 10)) == CONTENT[:10]
  assert fetcher.read(Span(OBJECT, 0, 10)) == CONTENT[:10]
  # Nobody fetches what nobody waits for.
  assert ("object", 1_000_000, 2_000_000) not in store.requests


def test_a_reader_does_not_wait_for_a_thread_that_is_busy(store):
  fetcher = RangeFetcher(FetchBudget(requests=1))
  store.let_go.clear()
  fetcher.fetch([Span(OBJECT, 0, 10), Span(OBJECT, 1_000_000, 1_000_010)])
  wait_until(lambda: store.running == 1)
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    read = threads.submit(fetcher.read, Span(OBJECT, 1_000_000, 1_000_010))
    wait_until(lambda: store.running == 2)
    store.let_go.set()
    assert read.result(5) == CONTENT[1_000_000:1_000_010]


def test_threads_end_with_the_fetcher(store):
  # Others may still be ending.
  before = set(threading.enumerate())
  fetcher = RangeFetcher(FetchBudget(requests=8))
  fetcher.fetch([Span(OBJECT, start, start + 10) for start in range(0, 5_000_000, 100_000)])
  own_threads = set(threading.enumerate()) - before
  assert own_threads
  del fetcher
  wait_until(lambda: not any(thread.is_alive() for thread in own_threads))


def test_many_threads_read_the_right_bytes(store):
  fetcher = RangeFetcher(FetchBudget(requests=4, ahead_bytes=500_000))

  def read(seed):
    rng = np.random.default_rng(seed)
    for _ in range(30):
      starts = rng.integers(0, len(CONTENT) - 1000, 5).tolist()
      spans = [Span(OBJECT, start, start + 1000) for start in starts]
      fetcher.fetch(spans)
      assert [fetcher.read(span) for span in spans] == [CONTENT[s.start : s.stop] for s in spans]

  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    assert list(threads.map(read, range(8))) == [None] * 8


def test_the_environment_sets_the_budget(monkeypatch, tmp_path):
  monkeypatch.setenv("ANYSTEP_STORE_REQUESTS", "7")
  monkeypatch.setenv("ANYSTEP_STORE_AHEAD_BYTES", "1000")
  budget = FetchBudget.from_environment()
  assert (budget.requests, budget.ahead_bytes, budget.disk_cache) == (7, 1000, None)
  monkeypatch.setenv("ANYSTEP_STORE_CACHE_DIR", str(tmp_path))
  monkeypatch.setenv("ANYSTEP_STORE_CACHE_BYTES", "5000")
  disk_cache = FetchBudget.from_environment().disk_cache
  assert isinstance(disk_cache, DiskCache)
  assert (disk_cache.directory, disk_cache.budget_bytes) == (str(tmp_path), 5000)


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5"])
def test_a_setting_that_is_no_number_is_refused(monkeypatch, text):
  monkeypatch.setenv("ANYSTEP_STORE_REQUESTS", text)
  with pytest.raises(AnystepError) as caught:
    FetchBudget.from_environment()
  assert (caught.value.code, caught.value.kind) == (78, "store_setting")
  assert "ANYSTEP_STORE_REQUESTS" in caught.value.fields["expected"]


def test_a_budget_that_cannot_fetch_is_refused():
  for wrong in ({"requests": 0}, {"ahead_bytes": -1}):
    with pytest.raises(ValueError, match="cannot fetch"):
      FetchBudget(**wrong)
