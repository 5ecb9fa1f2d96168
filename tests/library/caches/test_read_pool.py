"""A pool holds what its budgets allow, lets go of what was not used for longest, and never counts wrong."""

import collections
import concurrent.futures
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.caches import read_pool
from anystep.caches.read_pool import (
  DEFAULT_BUDGET_BYTES,
  ReadPool,
  default_open_files,
  held_bytes,
  process_pool,
)


class Files:
  """Files that do nothing but say how many of them are open."""

  def __init__(self, index_bytes=0):
    self.index_bytes = index_bytes
    self.open = []
    self.most_open = 0

  def opener(self, name):
    def open_file():
      file = File(self, name)
      self.open.append(name)
      self.most_open = max(self.most_open, len(self.open))
      return file

    return open_file


class File:
  def __init__(self, files, name):
    self.files, self.name = files, name
    self.index_bytes = files.index_bytes

  def close(self):
    self.files.open.remove(self.name)


# Held values


KEYS = st.integers(0, 5)
ACTIONS = st.one_of(
  st.tuples(st.just("hold"), KEYS, st.integers(0, 60)),
  st.tuples(st.just("get"), KEYS, st.just(0)),
  st.tuples(st.just("drop"), KEYS, st.just(0)),
  st.tuples(st.just("drop above"), KEYS, st.just(0)),
)


@given(st.integers(0, 150), st.lists(ACTIONS, max_size=60))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_the_pool_holds_what_was_used_last_within_its_budget(budget_bytes, actions):
  pool = ReadPool(budget_bytes=budget_bytes, open_files=1)
  by_use = {}  # sizes by key, what was used last at the end
  for number, (action, key, size) in enumerate(actions):
    if action == "hold":
      by_use.pop(key, None)
      by_use[key] = (number, size)
      pool.hold(key, number, size)
      while sum(held for _, held in by_use.values()) > budget_bytes and len(by_use) > 1:
        del by_use[next(iter(by_use))]
    elif action == "get":
      value, _ = by_use.get(key, (None, 0))
      assert pool.get(key) == value
      if key in by_use:
        by_use[key] = by_use.pop(key)
    elif action == "drop":
      pool.drop(key)
      by_use.pop(key, None)
    else:
      pool.drop_where(lambda held, least=key: held > least)
      by_use = {held: kept for held, kept in by_use.items() if held <= key}
    assert pool.used_bytes == sum(held for _, held in by_use.values())
    assert pool.used_bytes <= budget_bytes or len(by_use) == 1
  assert {key: pool.get(key) for key in range(6)} == {key: by_use.get(key, (None,))[0] for key in range(6)}


def test_what_was_held_under_a_key_is_replaced():
  pool = ReadPool(budget_bytes=100)
  pool.hold("a", "old", 90)
  pool.hold("a", "new", 60)
  assert (pool.get("a"), pool.used_bytes) == ("new", 60)


def test_one_value_is_held_whatever_its_size():
  pool = ReadPool(budget_bytes=10)
  pool.hold("a", "small", 5)
  pool.hold("b", "large", 1000)
  assert (pool.get("a"), pool.get("b"), pool.used_bytes) == (None, "large", 1000)
  pool.hold("c", "small", 5)
  assert (pool.get("b"), pool.get("c"), pool.used_bytes) == (None, "small", 5)


def test_records_take_more_than_their_bytes():
  assert held_bytes([]) == 0
  assert held_bytes([b"", b"abc"]) > 3 + 2 * 33  # what an empty bytes object takes


# Open files


@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=60))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_no_more_files_are_open_than_allowed_and_those_are_the_last_used(open_files, names):
  files, pool = Files(), ReadPool(open_files=open_files)
  for name in names:
    assert pool.reader(name, files.opener(name)).name == name
  last_used = list(dict.fromkeys(reversed(names)))[:open_files]
  assert sorted(files.open) == sorted(last_used)
  # Room is made before a file is opened, not after.
  assert files.most_open <= open_files


def test_an_open_file_is_not_opened_again():
  files, pool = Files(), ReadPool(open_files=2)
  first = pool.reader("a", files.opener("a"))
  pool.reader("b", files.opener("b"))
  assert pool.reader("a", files.opener("a")) is first
  assert files.open == ["a", "b"]
  pool.reader("c", files.opener("c"))
  assert files.open == ["a", "c"]


def test_a_file_that_cannot_be_opened_leaves_no_trace():
  files, pool = Files(index_bytes=5), ReadPool(open_files=2)
  pool.reader("a", files.opener("a"))

  def fail():
    raise OSError("no such file")

  for _ in range(3):
    with pytest.raises(OSError, match="no such file"):
      pool.reader("b", fail)
  assert pool.used_bytes == 5
  assert pool.reader("b", files.opener("b")).name == "b"
  assert (files.open, pool.used_bytes) == (["a", "b"], 10)


@pytest.mark.parametrize(
  ("index_bytes", "open_at_last"), [(0, 7), (1, 7), (4, 6), (25, 1), (30, 1), (1000, 1)]
)
def test_indexes_of_open_files_take_no_more_than_a_quarter_of_the_budget(index_bytes, open_at_last):
  files, pool = Files(index_bytes=index_bytes), ReadPool(budget_bytes=100, open_files=7)
  for name in range(20):
    pool.reader(name, files.opener(name))
    assert pool.used_bytes == index_bytes * len(files.open)
  assert len(files.open) == open_at_last


def test_what_is_held_makes_room_for_the_index_of_a_file_that_is_opened():
  files, pool = Files(index_bytes=20), ReadPool(budget_bytes=100, open_files=7)
  for key in "abcd":
    pool.hold(key, key, 25)
  pool.reader("file", files.opener("file"))
  assert pool.used_bytes == 95
  assert [pool.get(key) for key in "abcd"] == [None, "b", "c", "d"]


# Defaults


@pytest.mark.parametrize(
  ("soft_limit", "expected"), [(1024, 512), (256, 128), (17, 8), (4, 8), (resource.RLIM_INFINITY, 4096)]
)
def test_half_of_what_the_process_may_open_is_the_pools(monkeypatch, soft_limit, expected):
  monkeypatch.setattr(read_pool.resource, "getrlimit", lambda which: (soft_limit, resource.RLIM_INFINITY))
  assert default_open_files() == ReadPool().open_files == expected


def test_a_process_has_one_pool_of_its_own():
  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    pools = list(threads.map(lambda _: process_pool(), range(20)))
  assert {id(pool) for pool in pools} == {id(process_pool())}
  assert process_pool().budget_bytes == DEFAULT_BUDGET_BYTES


@pytest.mark.parametrize("budget", [{"budget_bytes": -1}, {"open_files": 0}, {"open_files": -1}])
def test_a_pool_that_could_not_read_is_refused(budget):
  with pytest.raises(ValueError, match=str(next(iter(budget.values())))):
    ReadPool(**budget)


# Threads


def test_threads_leave_the_pool_as_one_would():
  files, pool = Files(index_bytes=3), ReadPool(budget_bytes=500, open_files=4)

  def work(seed):
    random = np.random.default_rng(seed)
    for _ in range(300):
      key = int(random.integers(8))
      with pool.lock:
        assert pool.reader(("file", key), files.opener(key)).name in files.open
      pool.hold(key, key, int(random.integers(100)))
      assert pool.get(key) in (key, None)
      pool.drop(int(random.integers(8)))

  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    assert list(threads.map(work, range(8))) == [None] * 8
  assert collections.Counter(files.open).most_common(1)[0][1] == 1
  assert files.most_open <= 4
  for key in range(8):
    pool.drop(key)
  assert pool.used_bytes == 3 * len(files.open)
