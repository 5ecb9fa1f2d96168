"""A reader gives the records that the oracle names, and reads each block once where the budget allows."""

import collections
import contextlib
import gc
import logging
import math
import os
import pathlib
import re
import subprocess
import sys

import caches
import numpy as np
import pytest
from expected_rows import ExpectedRows
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.caches.read_pool import ReadPool, held_bytes
from anystep.containers import array_record_blocks, containers, tfrecord
from anystep.features.feature import Feature
from anystep.plans.plan import Plan
from anystep.records.writing import serialize_example
from anystep.streams.stream import open_stream

CONTAINERS = [containers.ARRAY_RECORD, containers.TFRECORD]
NUMBER = {"number": Feature(dtype="int64", shape=())}
BLOB = {"blob": Feature(dtype="string", shape=())}


def numbered(ordinal):
  return {"number": np.int64(ordinal)}


def blob_of(size_bytes):
  """Examples of that size, none like another."""
  return lambda ordinal: {"blob": np.array(np.random.default_rng(ordinal).bytes(size_bytes), object)}


class Readings:
  """What is read of shards' files, in order, and the most of them that were open at a reading.

  Attributes:
    blocks: (file, block) of each block; singles: (file, place) of each single record.
    most_open: counted after `start_counting`, for that takes time.
  """

  def __init__(self):
    self.blocks = []
    self.singles = []
    self.open_before = None
    self.most_open = 0

  def start_counting(self):
    gc.collect()
    self.open_before = self.count_open()

  @staticmethod
  def count_open():
    open_files = 0
    for descriptor in os.listdir("/proc/self/fd"):
      with contextlib.suppress(FileNotFoundError):
        open_files += "-of-" in os.readlink(f"/proc/self/fd/{descriptor}")
    return open_files

  def note(self, path, blocks=(), places=()):
    self.blocks += [(path, block) for block in blocks]
    self.singles += [(path, place) for place in places]
    if self.open_before is not None:
      self.most_open = max(self.most_open, self.count_open() - self.open_before)

  def clear(self):
    self.blocks.clear()
    self.singles.clear()

  @property
  def most_of_one_block(self):
    return max(collections.Counter(self.blocks).values())


@pytest.fixture
def readings(monkeypatch):
  noted = Readings()
  for reader in (array_record_blocks.ArrayRecordBlocks, tfrecord.TFRecordBlocks):

    def read_block(self, block, *, original=reader.read_block):
      noted.note(self._path, blocks=[block])
      return original(self, block)

    def read_records(self, places, *, original=reader.read_records):
      noted.note(self._path, places=places)
      return original(self, places)

    monkeypatch.setattr(reader, "read_block", read_block)
    monkeypatch.setattr(reader, "read_records", read_records)
  return noted


class Reading:
  """A plan's records, read step by step and compared with what the oracle names.

  Args:
    built: the caches of the plan's tasks.
    pool: what they are read through.
    rows: as `open_stream` takes them.
    plan: the plan; by default that of `plan_of`.
  """

  def __init__(self, built, *, pool=None, rows=slice(None), plan=None, **order):
    self.pool = ReadPool() if pool is None else pool
    self.caches = {cache.task: cache.open(pool=self.pool) for cache in built}
    self.plan = (plan or plan_of(built, **order)).on_caches(self.caches)
    self.expected = ExpectedRows(self.plan, built)
    self.stream = open_stream(self.plan, self.caches, rows=rows, prefetch_batches=0)
    self.reader = self.stream._examples._reader
    self.most_used_bytes = 0

  def read(self, steps):
    """Reads steps; returns the rows that the oracle names for them."""
    read_rows = []
    for step in steps:
      numbers = self.stream.rows_at(step)
      rows = self.expected.rows(step)
      wanted = [rows[number] for number in numbers.tolist() if rows[number] is not None]
      task, unit, real = self.plan.units(step, numbers)
      if real is not None:
        task, unit = task[real], unit[real]
      assert [(self.plan.task_names[k], v) for k, v in zip(task.tolist(), unit.tolist(), strict=True)] == [
        (row.task, row.unit) for row in wanted
      ]
      records = self.reader.read(task, unit).records
      assert records == [serialize_example(self.expected.example(row)) for row in wanted]
      self.most_used_bytes = max(self.most_used_bytes, self.pool.used_bytes)
      read_rows += wanted
    return read_rows

  @property
  def held_bytes(self):
    return self.pool._held_bytes


def plan_of(built, *, batch_size, **order):
  opened = [cache.open() for cache in built]
  rates = order.pop("rates", None) or dict.fromkeys([cache.task for cache in built], 1)
  return Plan.start(opened, rates=rates, batch_size=batch_size, **order)


def blocks_of(built):
  """How many blocks a cache's files have."""
  m = built.manifest
  return sum(math.ceil(file["records"] / m["block_records"]) for file in m["files"]["records"])


def mixture(root, *, tasks, num_shards, records_per_shard, block_records, container=containers.TFRECORD):
  """Tasks of equal size, so that a batch of a stripe for each ends their epochs together."""
  return [
    caches.build(
      root,
      task=f"t{k:03d}",
      num_examples=num_shards * records_per_shard,
      num_shards=num_shards,
      block_records=block_records,
      features=NUMBER,
      example_of=lambda ordinal, k=k: {"number": np.int64(1000 * ordinal + k)},
      container=container,
    )
    for k in range(tasks)
  ]


# Any order, any rows, any budget


@pytest.fixture(scope="module", params=CONTAINERS)
def some_caches(request, tmp_path_factory):
  """Preshuffled and as_is caches of shards that are unequal, empty, or smaller than a block."""
  root, container = tmp_path_factory.mktemp("some"), request.param
  shared = {"features": NUMBER, "example_of": numbered, "container": container}
  return [
    caches.build(root, task="a", num_examples=50, num_shards=4, block_records=4, **shared),
    caches.build(root, task="b", num_examples=23, num_shards=1, block_records=5, **shared),
    caches.build(root, task="c", num_examples=61, num_shards=12, block_records=8, **shared),
    caches.build(root, task="d", num_examples=7, num_shards=3, block_records=1, **shared),
    caches.build_as_is(root, task="e", shard_sizes=(3, 0, 17, 5), block_records=3, **shared),
    caches.build_as_is(root, task="f", shard_sizes=(0, 1, 0, 9, 9, 30), block_records=1, **shared),
  ]


@given(st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_records_are_those_that_the_oracle_names(some_caches, data):
  built = data.draw(st.lists(st.sampled_from(some_caches), min_size=1, unique_by=lambda cache: cache.task))
  hosts = data.draw(st.sampled_from([1, 2, 3]))
  batch_size = hosts * data.draw(st.integers(1, 20))
  divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
  reading = Reading(
    built,
    pool=ReadPool(
      budget_bytes=data.draw(st.sampled_from([1, 300, 1000, 3000, 1 << 30])),
      open_files=data.draw(st.sampled_from([1, 2, 5, 100])),
    ),
    rows=(data.draw(st.integers(0, hosts - 1)), hosts),
    batch_size=batch_size,
    rates={cache.task: data.draw(st.integers(1, 4)) for cache in built},
    lanes=data.draw(st.none() | st.sampled_from(divisors)),
    seed=data.draw(st.integers(0, 9)),
    epoch_policy=data.draw(st.sampled_from(["same", "reshuffle", "global"])),
    num_epochs=3,
  )
  num_steps = reading.expected.num_steps
  assert reading.plan.num_steps == num_steps
  start = data.draw(st.integers(0, num_steps - 1))
  reading.read(range(start, min(num_steps, start + 12)))
  seeks = data.draw(st.lists(st.integers(0, num_steps - 1), max_size=4))
  reading.read(seeks)
  reading.stream.close()
  assert reading.held_bytes == 0


@pytest.mark.parametrize("policy", ["same", "reshuffle"])
def test_with_room_each_block_is_read_once_an_epoch_whatever_the_shape(some_caches, readings, policy):
  for built in some_caches:
    reading = Reading([built], batch_size=7, num_epochs=1, epoch_policy=policy)
    readings.clear()
    reading.read(range(reading.plan.num_steps))
    assert len(readings.blocks) == len(set(readings.blocks)) == blocks_of(built), built.task
    assert not readings.singles
    assert reading.held_bytes == 0


# A mixture of many tasks: 10 stripes a batch, so each gives M units, and all end their epochs together


EPOCH_UNITS = 128  # of each of 10 tasks: 16 shards of 8 records in 4 blocks of 2


@pytest.fixture(scope="module", params=CONTAINERS)
def ten_tasks(request, tmp_path_factory):
  shape = {"tasks": 10, "num_shards": 16, "records_per_shard": 8, "block_records": 2}
  return mixture(tmp_path_factory.mktemp("ten"), **shape, container=request.param)


@pytest.mark.parametrize("lanes", [1, 4])
def test_one_host_reads_no_block_of_a_mixture_twice_in_an_epoch(ten_tasks, readings, lanes):
  reading = Reading(ten_tasks, batch_size=10 * lanes, lanes=lanes)
  steps = EPOCH_UNITS // lanes
  orders = []
  for epoch in range(2):
    readings.clear()
    rows = reading.read(range(epoch * steps, (epoch + 1) * steps))
    assert {row.epoch for row in rows} == {epoch}
    assert len(set(readings.blocks)) == len(readings.blocks) == 10 * 16 * 4
    assert reading.held_bytes == 0
    orders.append([row.index for row in rows])
  assert orders[0] != orders[1]


@pytest.mark.parametrize("lanes", [4, 8])
def test_hosts_whose_number_divides_the_lanes_read_each_block_once_among_them(ten_tasks, readings, lanes):
  plan, steps = plan_of(ten_tasks, batch_size=20 * lanes, lanes=lanes), EPOCH_UNITS // 2 // lanes
  hosts = [Reading(ten_tasks, plan=plan, rows=(host, 4)) for host in range(4)]
  for epoch in range(2):
    read_by_all = []
    for host in hosts:
      readings.clear()
      host.read(range(epoch * steps, (epoch + 1) * steps))
      read_by_all += readings.blocks
    assert len(read_by_all) == len(set(read_by_all)) == 10 * 16 * 4
    assert [host.held_bytes for host in hosts] == [0] * 4


def test_hosts_that_share_files_read_no_block_twice_either(ten_tasks, readings):
  plan = plan_of(ten_tasks, batch_size=60, lanes=1)
  read_by_all = []
  for host in range(4):
    readings.clear()
    Reading(ten_tasks, plan=plan, rows=(host, 4)).read(range(EPOCH_UNITS // 6))
    assert readings.most_of_one_block == 1
    read_by_all += readings.blocks
  assert len(read_by_all) > 1.9 * len(set(read_by_all))


@pytest.mark.parametrize("start_step", [1, 7, 31, 33, 50])
def test_who_resumes_inside_an_epoch_reads_no_block_twice(ten_tasks, readings, start_step):
  reading = Reading(ten_tasks, batch_size=40, lanes=4)
  for epoch_steps in (range(start_step, 32), range(max(start_step, 32), 64)):
    readings.clear()
    if reading.read(epoch_steps):
      assert readings.most_of_one_block == 1


@pytest.mark.parametrize("open_files", [1, 8])
def test_no_more_files_are_open_than_allowed_and_still_no_block_is_read_twice(
  ten_tasks, readings, open_files
):
  reading = Reading(ten_tasks, pool=ReadPool(open_files=open_files), batch_size=40, lanes=4)
  readings.start_counting()
  for epoch in range(2):
    readings.clear()
    reading.read(range(epoch * 32, (epoch + 1) * 32))
    assert len(set(readings.blocks)) == len(readings.blocks) == 10 * 16 * 4
  assert readings.most_open == open_files


def test_a_file_that_is_opened_anew_gives_several_blocks(ten_tasks, readings):
  """Room for 160 of them would be 160 openings for each block."""
  reading = Reading(ten_tasks, pool=ReadPool(open_files=8), batch_size=40, lanes=4)
  reading.read(range(1))
  by_file = collections.Counter(name for name, _ in readings.blocks)
  assert set(by_file.values()) == {4}


def test_windows_are_dropped_as_they_are_consumed(tmp_path, readings):
  tasks = mixture(tmp_path, tasks=3, num_shards=4, records_per_shard=16, block_records=4)
  reading = Reading(tasks, batch_size=6, lanes=1)
  built, asked = {cache.task: cache for cache in tasks}, collections.Counter()
  for step in range(64):  # two epochs
    reading.read([step])
    for row in reading.expected.rows(step):
      asked[row.task, row.epoch, row.shard, row.place // 4] += 1
    held = 0
    for (task, _, shard, block), count in asked.items():
      if count < 4:
        own = built[task].examples[shard::4][4 * block : 4 * block + 4]
        held += held_bytes([serialize_example(example) for example in own])
    assert reading.held_bytes == held


def test_a_batch_of_many_blocks_pushes_none_out_that_later_ones_need(tmp_path, readings):
  (built,) = mixture(tmp_path, tasks=1, num_shards=4, records_per_shard=250, block_records=8)
  block_bytes = held_bytes([serialize_example({"number": np.int64(10_000)})] * 8)
  # A batch of 400 takes 12 or 13 blocks of each shard; the budget holds two of each.
  pool = ReadPool(budget_bytes=8 * block_bytes + 4 * 250 * 8)
  reading = Reading([built], pool=pool, batch_size=400, lanes=4, num_epochs=1)
  reading.read(range(3))
  assert readings.most_of_one_block == 1
  assert reading.most_used_bytes <= pool.budget_bytes


# Budgets


def warned(caplog):
  """(task, bytes of the budget, readings of a block) of each warning."""
  texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
  found = [re.match(r"(\w+): .* read budget of (\d+): every block is read (\d+) times\.", t) for t in texts]
  assert all(found), texts
  return [(match[1], int(match[2]), int(match[3])) for match in found]


@pytest.mark.parametrize("policy", ["same", "reshuffle"])
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
  ("block_records", "budget_blocks", "times"),
  [
    (8, 0.001, 8),
    (8, 0.3, 8),
    (8, 0.5, 4),
    (8, 0.9, 2),
    (8, 1.4, 2),
    (8, 1.9, 1),
    (8, 10, 1),
    (7, 0.5, 4),  # by 2, 2, 2 and 1
    (7, 0.7, 3),
    (7, 0.95, 2),  # by 4 and 3
  ],
)
def test_a_small_budget_is_kept_and_the_warning_tells_what_it_costs(
  tmp_path, readings, caplog, container, policy, block_records, budget_blocks, times
):
  """The budget is given in blocks a shard, of which 0.7 may be planned with."""
  (built,) = mixture(
    tmp_path,
    tasks=1,
    num_shards=6,
    records_per_shard=2 * block_records,
    block_records=block_records,
    container=container,
  )
  block_bytes = held_bytes([serialize_example({"number": np.int64(10_000)})] * block_records)
  pool = ReadPool(budget_bytes=int(6 * budget_blocks * block_bytes))
  reading = Reading([built], pool=pool, batch_size=6, epoch_policy=policy, num_epochs=2)
  for epoch in range(2):
    readings.clear()
    reading.read(range(2 * epoch * block_records, 2 * (epoch + 1) * block_records))
    assert set(collections.Counter(readings.blocks).values()) == {times}
    assert len(set(readings.blocks)) == 12
  assert reading.most_used_bytes <= max(pool.budget_bytes, block_bytes)
  assert reading.held_bytes == 0
  assert warned(caplog) == ([("t000", pool.budget_bytes, times)] if times > 1 else [])


@pytest.mark.parametrize("budget_bytes", [0, 1])
@pytest.mark.parametrize("policy", ["same", "reshuffle", "global"])
def test_a_budget_of_nothing_works(some_caches, policy, budget_bytes):
  reading = Reading(
    some_caches, pool=ReadPool(budget_bytes=budget_bytes), batch_size=12, epoch_policy=policy, num_epochs=2
  )
  reading.read(range(reading.plan.num_steps))


def test_large_records_take_the_room_that_small_ones_leave(tmp_path, readings, caplog):
  shared = {"num_shards": 8, "block_records": 8, "features": BLOB, "container": containers.TFRECORD}
  small = [
    caches.build(tmp_path, task=f"t{k}", num_examples=64, example_of=blob_of(9), **shared) for k in range(9)
  ]
  large = caches.build(tmp_path, task="large", num_examples=64, example_of=blob_of(3000), **shared)
  # All blocks at once are 8 times 24 kB, and little more; shared out by shards, each would have 2 kB.
  reading = Reading([*small, large], pool=ReadPool(budget_bytes=360_000), batch_size=10, num_epochs=1)
  reading.read(range(64))
  assert readings.most_of_one_block == 1
  assert not caplog.records
  assert 190_000 < reading.most_used_bytes <= 360_000


def test_a_short_block_seen_first_does_not_mislead(tmp_path, readings):
  """A stream that starts with the last blocks of an epoch, of one record each, plans for whole ones."""
  built = caches.build(
    tmp_path,
    num_examples=4 * 17,
    num_shards=4,
    block_records=8,
    features=BLOB,
    example_of=blob_of(1000),
    container=containers.TFRECORD,
  )
  # Room for 2 blocks of 8 kB, and for 4 in two parts.
  reading = Reading([built], pool=ReadPool(budget_bytes=30_000, open_files=3), batch_size=4)
  reading.read(range(16, 34))
  assert reading.most_used_bytes <= 30_000
  whole = [count for (_, block), count in collections.Counter(readings.blocks).items() if block < 2]
  assert set(whole) == {2}


@pytest.mark.parametrize(
  ("rows", "lanes", "touched"),
  [
    (slice(None), 4, {"a": 8, "b": 6, "c": 1}),
    ((0, 4), 4, {"a": 2, "b": 3, "c": 1}),
    ((1, 2), 4, {"a": 4, "b": 6, "c": 1}),
    ((2, 4), 2, {"a": 4, "b": 3, "c": 1}),
    ((0, 4), 1, {"a": 8, "b": 6, "c": 1}),
    ([0], 8, {"a": 1, "b": 3, "c": 1}),
    ([0, 1, 5], 8, {"a": 2, "b": 6, "c": 1}),
  ],
)
def test_what_rows_touch_is_what_their_lanes_read_in_an_epoch(tmp_path, rows, lanes, touched):
  sizes = {"a": (48, 8), "b": (48, 6), "c": (48, 1)}
  built = [
    caches.build(tmp_path, task=task, num_examples=n, num_shards=s, features=NUMBER, example_of=numbered)
    for task, (n, s) in sizes.items()
  ]
  reading = Reading(built, batch_size=24, lanes=lanes, rows=rows)
  assert dict(zip("abc", reading.reader._sizes.shards_touched.tolist(), strict=True)) == touched
  shards = collections.defaultdict(set)
  for step in range(6):
    rows_of_step = reading.expected.rows(step)
    for row in [rows_of_step[number] for number in reading.stream.rows_at(step).tolist()]:
      if row.epoch == 0:
        shards[row.task].add(row.shard)
  assert all(len(shards[task]) <= touched[task] for task in sizes)


# The policy global


@pytest.mark.parametrize("layout", ["preshuffled", "as_is"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_under_global_a_cache_that_fits_is_read_once_in_all_epochs(tmp_path, readings, container, layout):
  shared = {"features": NUMBER, "example_of": numbered, "container": container, "block_records": 4}
  if layout == "as_is":
    built = caches.build_as_is(tmp_path, shard_sizes=(30, 0, 1, 41), **shared)
  else:
    built = caches.build(tmp_path, num_examples=72, **shared)
  reading = Reading([built], batch_size=12, epoch_policy="global")
  reading.read(range(18))
  assert len(readings.blocks) == len(set(readings.blocks)) == blocks_of(built)
  assert not readings.singles
  assert reading.held_bytes > 0
  reading.stream.close()
  assert reading.held_bytes == 0


@pytest.mark.parametrize("container", CONTAINERS)
def test_under_global_single_records_are_read_of_a_cache_that_does_not_fit(tmp_path, readings, container):
  shared = {"features": NUMBER, "example_of": numbered, "container": container}
  built = caches.build_as_is(tmp_path, shard_sizes=(30, 0, 1, 41), block_records=4, **shared)
  reading = Reading([built], pool=ReadPool(budget_bytes=2000), batch_size=12)
  for epoch in range(2):
    readings.singles.clear()
    rows = reading.read(range(epoch * 6, (epoch + 1) * 6))
    read = collections.Counter(readings.singles)
    assert set(read.values()) == {1}
    assert len(read) == len(rows) == 72
  assert len(readings.blocks) == 1  # to see how large records are
  assert reading.held_bytes == 0


def test_under_global_tasks_that_fit_are_held_beside_one_that_does_not(tmp_path, readings):
  shared = {"block_records": 8, "features": BLOB, "container": containers.TFRECORD}
  small = caches.build(tmp_path, task="small", num_examples=16, num_shards=1, example_of=blob_of(9), **shared)
  large = caches.build(tmp_path, task="large", num_examples=64, example_of=blob_of(3000), **shared)
  pool = ReadPool(budget_bytes=100_000)
  reading = Reading([small, large], pool=pool, batch_size=8, epoch_policy="global")
  reading.read(range(16))
  assert {pathlib.Path(name).parent.name for name, _ in readings.singles} == {"large"}
  of_small = [(name, block) for name, block in readings.blocks if pathlib.Path(name).parent.name == "small"]
  assert len(of_small) == len(set(of_small)) == 2


# What goes wrong, and who else reads


def test_a_reading_that_failed_is_made_again(tmp_path, monkeypatch):
  (built,) = mixture(tmp_path, tasks=1, num_shards=4, records_per_shard=8, block_records=2)
  original, failing = tfrecord.TFRecordBlocks.read_block, [1, 2, 7]
  calls = []

  def read_block(self, block):
    calls.append(block)
    if len(calls) in failing:
      raise OSError("this once")
    return original(self, block)

  monkeypatch.setattr(tfrecord.TFRecordBlocks, "read_block", read_block)
  reading = Reading([built], batch_size=4)
  for step in range(16):  # two epochs
    for _ in failing:
      with contextlib.suppress(OSError):
        reading.read([step])
        break
    else:
      reading.read([step])
  assert len(calls) > max(failing)
  assert reading.held_bytes == 0


# More files than a process may open


MANY_TASKS = """
import collections, os, pathlib, resource, sys

resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

import caches
import numpy as np
from anystep.containers import array_record_blocks, containers, tfrecord
from anystep.caches.manifest import Feature
from anystep.plans.plan import Plan
from anystep.caches.read_pool import ReadPool
from anystep.streams.stream import open_stream
from expected_rows import ExpectedRows

root, tasks, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
features = {"number": Feature(dtype="int64", shape=())}
built = [
  caches.build_as_is(
    root, task=f"t{k:03d}", shard_sizes=[4] * 64, block_records=2, features=features,
    example_of=lambda ordinal, k=k: {"number": np.int64(1000 * ordinal + k)},
  )
  for k in range(tasks)
]
pool = ReadPool(budget_bytes=30_000 * tasks)
opened = {cache.task: cache.open(pool=pool) for cache in built}
plan = Plan.start(
  opened.values(), rates=dict.fromkeys(opened, 1), batch_size=tasks, lanes=1, epoch_policy="reshuffle"
)
expected = ExpectedRows(plan, built)
read, most_open, most_used = collections.Counter(), 0, 0
read_block = array_record_blocks.ArrayRecordBlocks.read_block

def counted(self, block):
  read[self._path, block] += 1
  return read_block(self, block)

array_record_blocks.ArrayRecordBlocks.read_block = counted
with open_stream(plan, opened, prefetch_batches=0) as stream:
  stream.seek(256 - steps // 2)  # the last of one epoch and the first of the next
  for step in range(stream.step, stream.step + steps):
    if step == 256:
      assert set(read.values()) == {1}, "a block read twice in epoch 0"
      read.clear()
    assert [row["number"] for row in expected.batch(step)] == next(stream)["number"].tolist(), step
    most_open = max(most_open, len(os.listdir("/proc/self/fd")))
    most_used = max(most_used, pool.used_bytes)
  assert set(read.values()) == {1}, "a block read twice in epoch 1"
assert pool.open_files == 128 and 128 < most_open < 200, most_open
assert most_used <= pool.budget_bytes, most_used
assert pool._held_bytes == 0
print("done")
"""


@pytest.mark.parametrize(("tasks", "steps"), [(20, 200), pytest.param(100, 300, marks=pytest.mark.soak)])
@pytest.mark.long
def test_thousands_of_files_are_read_by_a_process_that_may_open_256(checkout, tmp_path, tasks, steps):
  done = subprocess.run(
    [sys.executable, "-c", MANY_TASKS, tmp_path, str(tasks), str(steps)],
    env=os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'tests'}"},
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
