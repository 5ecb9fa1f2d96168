"""Streams of caches on a store are those of the same files on a disk, or errors, whatever the store does."""

import itertools
import os
import shutil
import time

import caches
import numpy as np
import pytest
from attacks import targets
from etils import epath
from store_servers import servers
from store_servers.bad_proxy import FAULTS
from store_servers.fixtures import SCHEMES, store_root
from store_servers.served_folders import served_folder

from anystep.caches.cache import open_cache
from anystep.caches.read_pool import ReadPool
from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.features.feature import Feature
from anystep.plans.plan import Plan
from anystep.plans.tombstones import TombstoneList
from anystep.stores.disk_cache import DiskCache
from anystep.stores.range_fetcher import FetchBudget
from anystep.streams.stream import open_stream

NUMBERS = itertools.count()
LENGTHS = {"inputs": 11, "targets": 9, "weights": 3}
# Beyond these, a request through the bad proxy takes at most some of the client's pauses.
BOUND_SECONDS = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory):
  with served_folder(tmp_path_factory.mktemp("store")) as served:
    yield served


@pytest.fixture
def bucket(store):
  """The folder of a new bucket."""
  folder = store.folder / f"bucket{next(NUMBERS)}"
  folder.mkdir()
  return folder


def build_as_is(bucket, container):
  if container == containers.PARQUET:
    return targets.parquet(bucket, 0).root
  return caches.build_as_is(bucket, shard_sizes=(13, 0, 20, 17), container=container, block_records=4).root


def build(bucket, container):
  return caches.build(bucket, num_examples=120, num_shards=5, container=container).root


CACHES = {
  "array_record": lambda bucket: build(bucket, containers.ARRAY_RECORD),
  "tfrecord": lambda bucket: build(bucket, containers.TFRECORD),
  "array_record as is": lambda bucket: build_as_is(bucket, containers.ARRAY_RECORD),
  "tfrecord as is": lambda bucket: build_as_is(bucket, containers.TFRECORD),
  "parquet as is": lambda bucket: build_as_is(bucket, containers.PARQUET),
}


def open_at(root, **budgets):
  fetch_budget = FetchBudget(**budgets) if budgets else None
  return open_cache(root, "demo", "train", pool=ReadPool(fetch_budget=fetch_budget))


def digests(plan, cache, *, start=0, prefetch_batches=0):
  """Digests of a plan's batches from a step on."""
  with open_stream(plan, {"demo": cache}, prefetch_batches=prefetch_batches) as stream:
    stream.seek(start)
    return [batch_digest(batch) for batch in stream]


@pytest.mark.parametrize("epoch_policy", ["same", "reshuffle", "global"])
@pytest.mark.parametrize("kind", CACHES)
def test_batches_are_those_of_local_files_from_every_step_on(store, bucket, kind, epoch_policy):
  root = CACHES[kind](bucket)
  plan = Plan.start(open_at(root), batch_size=8, num_epochs=2, epoch_policy=epoch_policy)
  expected = digests(plan, open_at(root))
  for start, prefetch_batches in ((0, 16), (1, 0), (len(expected) // 2, 3), (len(expected) - 1, 16)):
    cache = open_at(store.path(root))
    got = digests(plan, cache, start=start, prefetch_batches=prefetch_batches)
    assert got == expected[start:], (start, prefetch_batches)


@pytest.mark.parametrize("budgets", [{"requests": 1, "ahead_bytes": 0}, {"requests": 3, "ahead_bytes": 3000}])
def test_no_budget_is_too_small(store, bucket, budgets):
  root = build(bucket, containers.TFRECORD)
  plan = Plan.start(open_at(root), batch_size=8, num_epochs=2)
  assert digests(plan, open_at(store.path(root), **budgets), prefetch_batches=8) == digests(
    plan, open_at(root)
  )


def test_a_plan_made_on_the_store_is_the_plan_made_locally(store, bucket):
  root = build(bucket, containers.ARRAY_RECORD)
  there, here = (Plan.start(open_at(path), batch_size=8) for path in (store.path(root), root))
  assert there.to_json() == here.to_json()


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_unit_tables_are_read_from_the_store(store, bucket, packing, monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  root = build(bucket, containers.ARRAY_RECORD)
  plan = Plan.start(open_at(root), batch_size=4, num_epochs=2, packing=packing, feature_lengths=LENGTHS)
  there = Plan.start(
    open_at(store.path(root)), batch_size=4, num_epochs=2, packing=packing, feature_lengths=LENGTHS
  )
  assert there.to_json() == plan.to_json()
  assert not list(tmp_path.iterdir()), "the table stands beside the cache"
  expected = digests(plan, open_at(root))
  for start in (0, len(expected) // 2):
    got = digests(Plan.from_json(plan.to_json()), open_at(store.path(root)), start=start, prefetch_batches=8)
    assert got == expected[start:]


def test_a_unit_table_is_written_to_the_store(store, bucket, monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  root = build(bucket, containers.ARRAY_RECORD)
  order = {"batch_size": 4, "packing": "greedy", "feature_lengths": LENGTHS}
  there = Plan.start(open_at(store.path(root)), **order)
  written = {path.name: path.read_bytes() for path in (root / "demo" / "units").rglob("*") if path.is_file()}
  shutil.rmtree(root / "demo" / "units")
  assert Plan.start(open_at(root), **order).to_json() == there.to_json()
  made_here = {
    path.name: path.read_bytes() for path in (root / "demo" / "units").rglob("*") if path.is_file()
  }
  assert written == made_here != {}


def test_plans_tombstones_lengths_and_vocabularies_are_read_from_the_store(store, bucket):
  target = targets.preshuffled(bucket, 0, container=containers.TFRECORD)
  here, there = open_at(target.root), open_at(store.path(target.root))
  plan = Plan.start(here, batch_size=8)
  (bucket / "plan.json").write_text(plan.to_json())
  assert Plan.read(store.path(bucket / "plan.json"), fix="").to_json() == plan.to_json()
  tombstones = TombstoneList.of(here, [3, 7])
  (bucket / "tombstones.json").write_text(tombstones.to_json())
  assert TombstoneList.read(store.path(bucket / "tombstones.json")) == tombstones
  for shard in range(here.manifest.num_shards):
    assert np.array_equal(here.lengths(shard), there.lengths(shard))
  (sha256,) = here.vocabularies.values()
  assert there.vocabulary(sha256) == targets.VOCABULARY
  there.check_heads()
  there.verify()


def test_a_cache_on_a_store_is_a_random_access_source(store, bucket):
  root = build(bucket, containers.ARRAY_RECORD)
  here, there = open_at(root), open_at(store.path(root))
  indices = [5, 119, 0, 64, 5]
  got, expected = there.__getitems__(indices), here.__getitems__(indices)
  assert [{n: v.tolist() for n, v in e.items()} for e in got] == [
    {n: v.tolist() for n, v in e.items()} for e in expected
  ]


def test_one_task_may_be_on_a_store_and_another_on_a_disk(store, bucket, tmp_path):
  far = caches.build(bucket, task="far", num_examples=60, example_of=lambda k: caches.example_of(1000 + k))
  near = caches.build(tmp_path, task="near", num_examples=40)
  plan = Plan.start([far.open(), near.open()], rates={"far": 2, "near": 1}, batch_size=8)
  by_place = []
  for root in (far.root, store.path(far.root)):
    with open_stream(plan, [root, near.root], prefetch_batches=4) as stream:
      by_place.append([batch_digest(batch) for batch in itertools.islice(stream, 30)])
  assert by_place[0] == by_place[1]


def test_opening_costs_one_listing_and_no_request_for_a_file(store, bucket):
  for num_shards, listings, reads in ((5, 1, 2), (700, 2, 3)):
    root = caches.build(bucket / str(num_shards), num_examples=720, num_shards=num_shards).root
    store.take_requests()
    open_at(store.path(root))
    # COMPLETED and the manifest, a large one in two reads; 1,000 names at a time.
    assert store.take_requests() == {"GET": reads, "LIST": listings}


def test_blocks_that_lie_together_are_one_request(store, bucket):
  root = caches.build(bucket, num_examples=2000, num_shards=2, container=containers.TFRECORD).root
  plan = Plan.start(open_at(root), batch_size=8, num_epochs=1)
  cache = open_at(store.path(root))
  store.take_requests()
  digests(plan, cache, prefetch_batches=16)
  # 500 blocks; the first batches are fetched alone, later ones in chunks that grow.
  assert store.take_requests()["GET"] < 60


def test_a_disk_cache_serves_later_processes_and_epochs(store, bucket, tmp_path):
  replaced = Replaced(store, bucket)
  for attempt in range(2):
    store.take_requests()
    disk_cache = DiskCache(tmp_path, budget_bytes=1 << 30)
    cache = open_at(store.path(replaced.root), disk_cache=disk_cache)
    assert digests(replaced.plan, cache, prefetch_batches=8) == replaced.expected
    requests = store.take_requests()
    if attempt:
      # What opening reads is read of the store.
      assert requests == {"GET": 2, "LIST": 1}
  replace_by_others(replaced)
  with pytest.raises(AnystepError, match="file_changed"):
    digests(replaced.plan, open_at(store.path(replaced.root), disk_cache=disk_cache))


def test_a_closed_stream_leaves_nothing_fetched(store, bucket):
  root = build(bucket, containers.TFRECORD)
  cache = open_at(store.path(root))
  fetcher = cache.pool.fetcher
  with open_stream(Plan.start(cache, batch_size=8), {"demo": cache}, prefetch_batches=0) as stream:
    next(stream)
    # What later steps have, and nobody reads.
    cache.files.fetch_blocks({0: [4, 5]})
    assert fetcher.free_bytes < fetcher.budget.ahead_bytes
  assert fetcher.free_bytes == fetcher.budget.ahead_bytes


class Replaced:
  """A cache on the store whose first step was read, and another of files of the same sizes."""

  def __init__(self, store, bucket):
    self.root, self.other = (
      caches.build(
        bucket / name,
        num_examples=120,
        num_shards=5,
        container=containers.TFRECORD,
        features={"values": Feature(dtype="float32", shape=(175,))},
        example_of=lambda k, first=first: {
          "values": np.random.default_rng(first + k).random(175, np.float32),
        },
      ).root
      for name, first in (("cache", 0), ("other", 1000))
    )
    self.plan = Plan.start(open_at(self.root), batch_size=8, num_epochs=1)
    self.expected = digests(self.plan, open_at(self.root))
    self.stream = open_stream(self.plan, {"demo": open_at(store.path(self.root))}, prefetch_batches=0)
    assert batch_digest(next(self.stream)) == self.expected[0]

  def files(self):
    return sorted((self.root / "demo").glob("*.tfrecord-?????-of-?????"))

  def read(self):
    """What the stream gives from here on, and the kind of the error that ends it."""
    got = []
    try:
      for batch in self.stream:
        got.append(batch_digest(batch))
    except AnystepError as error:
      return got, (error.code, error.kind)
    return got, None


def put(path, content):
  """Replaces a file as a store replaces an object."""
  path.with_name("attempt").write_bytes(content)
  os.replace(path.with_name("attempt"), path)


def replace_by_others(replaced):
  for path in replaced.files():
    put(path, (replaced.other / "demo" / path.name).read_bytes())


def truncate(replaced):
  for path in replaced.files():
    put(path, path.read_bytes()[:-100])


def change_a_byte(replaced):
  for path in replaced.files():
    content = path.read_bytes()
    put(path, content[:-1] + bytes([content[-1] ^ 1]))


def remove(replaced):
  for path in replaced.files():
    path.unlink()


CHANGES = {
  replace_by_others: "file_changed",
  truncate: "file_changed",
  change_a_byte: "file_changed",
  remove: "file_missing",
}


@pytest.mark.parametrize(("change", "kind"), CHANGES.items())
def test_an_object_that_changes_under_a_stream_is_an_error(store, bucket, change, kind):
  replaced = Replaced(store, bucket)
  change(replaced)
  got, error = replaced.read()
  assert error == (65, kind)
  assert got == replaced.expected[1 : 1 + len(got)]


def test_an_object_that_is_put_again_with_its_content_is_read_on(store, bucket):
  replaced = Replaced(store, bucket)
  for path in replaced.files():
    put(path, path.read_bytes())
  assert replaced.read() == (replaced.expected[1:], None)


@pytest.mark.parametrize(("change", "kind"), {**CHANGES, truncate: "file_size"}.items())
def test_a_damaged_cache_is_refused_when_it_is_opened_or_read(store, bucket, change, kind):
  replaced = Replaced(store, bucket)
  change(replaced)
  with pytest.raises(AnystepError) as caught:
    open_at(store.path(replaced.root)).verify()
  assert (caught.value.code, caught.value.kind) == (65, kind)


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_come_right_and_in_time_through_a_store_that_fails(store, bucket, fault):
  root = build(bucket, containers.TFRECORD)
  plan = Plan.start(open_at(root), batch_size=8, num_epochs=3)
  expected = digests(plan, open_at(root))
  with store.spoiled({fault: 0.1}, seed=2) as proxy:
    start, counts = time.monotonic(), {}
    while not counts.get(fault):
      cache = open_at(store.path(root), ahead_bytes=2000)
      assert digests(plan, cache, prefetch_batches=4) == expected
      counts = servers.count_faults(proxy)
    assert time.monotonic() - start < BOUND_SECONDS


def test_a_listing_that_lacks_new_objects_is_not_believed(store, bucket):
  half = build(bucket, containers.TFRECORD)
  aside = bucket.with_name("aside")
  names = sorted(path.name for path in (half / "demo").glob("*-00003-of-*"))
  aside.mkdir(exist_ok=True)
  for name in names:
    (half / "demo" / name).rename(aside / name)
  with store.spoiled({}) as proxy:
    with pytest.raises(AnystepError, match="file_missing"):
      open_at(store.path(half))
    for name in names:
      (aside / name).rename(half / "demo" / name)
    servers.set_rates(proxy, {"stale": 1.0})
    assert len(open_at(store.path(half))) == 120
    assert servers.count_faults(proxy)["stale"]


def test_a_forked_process_is_refused_by_name(store, bucket):
  root = build(bucket, containers.TFRECORD)
  cache = open_at(store.path(root))
  reader, writer = os.pipe()
  child = os.fork()
  if not child:
    try:
      cache[0]
      os.write(writer, b"read")
    except AnystepError as error:
      os.write(writer, error.kind.encode())
    finally:
      os._exit(0)
  os.waitpid(child, 0)
  os.close(writer)
  with os.fdopen(reader, "rb") as answers:
    assert answers.read() == b"forked_process"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_streams_come_end_to_end_from_servers_of_each_store(scheme, tmp_path):
  local = build(tmp_path, containers.ARRAY_RECORD)
  plan = Plan.start(open_at(local), batch_size=8, num_epochs=2)
  expected = digests(plan, open_at(local))
  with store_root(scheme) as bucket:
    for path in sorted(path for path in local.rglob("*") if path.is_file()):
      (epath.Path(bucket) / path.relative_to(local).as_posix()).write_bytes(path.read_bytes())
    assert digests(plan, open_at(bucket), prefetch_batches=8) == expected
    cache = open_at(bucket)
    changed = epath.Path(bucket) / "demo" / cache.manifest.record_files[2].name
    changed.write_bytes(b"another content")
    with pytest.raises(AnystepError, match="file_changed"):
      digests(plan, cache)
    changed.unlink()
    with pytest.raises(AnystepError, match="file_missing"):
      digests(plan, cache)
