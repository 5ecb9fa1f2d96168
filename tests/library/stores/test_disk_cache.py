"""A disk cache gives the bytes that the store has, whoever kills, shares or damages it, within its budget."""

import multiprocessing
import os
import pathlib
import signal
import time

import numpy as np
import pytest

from anystep.stores.disk_cache import PART_BYTES, DiskCache

CONTENT = np.random.default_rng(0).bytes(9 * PART_BYTES + 1000)
RANGES = [(0, 10), (PART_BYTES - 5, PART_BYTES + 5), (3 * PART_BYTES, 6 * PART_BYTES), (0, len(CONTENT))]


class Object:
  """An object on a store, and the ranges that were read of it."""

  def __init__(self, content=CONTENT, name="object 1"):
    self.content = content
    self.name = name
    self.requests = []

  def get(self, start, stop):
    self.requests.append((start, stop))
    return self.content[start:stop]

  def read(self, cache, start, stop):
    return cache.read(self.name, start, stop, size_bytes=len(self.content), get=self.get)


def files(directory):
  return sorted(path for path in pathlib.Path(directory).rglob("*") if path.is_file())


def test_ranges_are_read_from_the_store_once(tmp_path):
  for attempt in range(3):
    cache, stored = DiskCache(tmp_path, budget_bytes=1 << 30), Object()
    for start, stop in RANGES:
      assert stored.read(cache, start, stop) == CONTENT[start:stop]
    if attempt:
      assert not stored.requests
    else:
      # Whole parts, and those that are missing together at once.
      size = PART_BYTES
      assert stored.requests == [
        (0, size),
        (size, 2 * size),
        (3 * size, 6 * size),
        (2 * size, 3 * size),
        (6 * size, len(CONTENT)),
      ]


def test_another_content_has_other_parts(tmp_path):
  cache, one = DiskCache(tmp_path, budget_bytes=1 << 30), Object()
  one.read(cache, 0, 100)
  other = Object(CONTENT[::-1], "object 2")
  assert other.read(cache, 0, 100) == CONTENT[::-1][:100]
  assert one.read(cache, 0, 100) == CONTENT[:100]


@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "empty", "folder"])
def test_a_damaged_part_is_fetched_anew(tmp_path, damage):
  cache = DiskCache(tmp_path, budget_bytes=1 << 30)
  Object().read(cache, 0, len(CONTENT))
  for path in files(tmp_path):
    content = bytearray(path.read_bytes())
    if damage == "flip":
      content[len(content) // 2] ^= 1
    changed = {"cut": content[:-1], "extend": content + b"x", "empty": b""}.get(damage, content)
    if damage == "folder":
      path.unlink()
      path.mkdir()
    else:
      path.write_bytes(changed)
  stored = Object()
  assert stored.read(cache, 0, len(CONTENT)) == CONTENT
  assert stored.requests == [(0, len(CONTENT))]


def test_the_budget_holds_and_the_least_recently_used_part_goes_first(tmp_path):
  cache, stored = DiskCache(tmp_path, budget_bytes=4 * PART_BYTES + 100), Object()
  for part in range(9):
    stored.read(cache, part * PART_BYTES, part * PART_BYTES + 1)
    # So that times tell them apart.
    for age, path in enumerate(sorted(files(tmp_path), key=os.path.getmtime, reverse=True), 1):
      os.utime(path, (time.time() - age, time.time() - age))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= cache.budget_bytes
  stored.requests.clear()
  stored.read(cache, 8 * PART_BYTES, 8 * PART_BYTES + 1)
  assert not stored.requests
  stored.read(cache, 0, 1)
  assert stored.requests == [(0, PART_BYTES)]


def test_a_part_that_is_used_stays(tmp_path):
  cache, stored = DiskCache(tmp_path, budget_bytes=4 * PART_BYTES + 100), Object()
  stored.read(cache, 0, 1)
  for part in range(1, 9):
    for path in files(tmp_path):
      os.utime(path, (time.time() - 100, time.time() - 100))
    stored.requests.clear()
    stored.read(cache, 0, 1)
    assert not stored.requests
    stored.read(cache, part * PART_BYTES, part * PART_BYTES + 1)


def test_a_disk_that_cannot_be_written_costs_speed_alone(tmp_path, caplog):
  (tmp_path / "file").write_bytes(b"")
  cache, stored = DiskCache(tmp_path / "file", budget_bytes=1 << 30), Object()
  for _ in range(2):
    assert stored.read(cache, 5, 50) == CONTENT[5:50]
  assert len(stored.requests) == 2
  assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


def _read_for_ever(directory, seed):
  cache, stored = DiskCache(directory, budget_bytes=5 * PART_BYTES), Object()
  rng = np.random.default_rng(seed)
  while True:
    start, stop = sorted(rng.integers(0, len(CONTENT), 2).tolist())
    if stored.read(cache, start, stop) != CONTENT[start:stop]:
      os._exit(3)


def test_processes_share_it_and_are_killed(tmp_path):
  context = multiprocessing.get_context("fork")
  for seed in range(4):
    processes = [context.Process(target=_read_for_ever, args=(tmp_path, 2 * seed + k)) for k in range(2)]
    for process in processes:
      process.start()
    time.sleep(0.15)
    for process in processes:
      process.kill()
      process.join()
      assert process.exitcode == -signal.SIGKILL, "bytes that are not the object's"
  stored = Object()
  cache = DiskCache(tmp_path, budget_bytes=5 * PART_BYTES)
  assert stored.read(cache, 0, len(CONTENT)) == CONTENT
  # What the killed ones left half written is removed with the oldest parts.
  assert sum(path.stat().st_size for path in files(tmp_path)) <= 5 * PART_BYTES


def test_a_cache_without_room_is_refused():
  with pytest.raises(ValueError, match="0 bytes"):
    DiskCache("/nowhere", budget_bytes=0)
