"""A forked process reads the same data, or says at once why it cannot."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback

import caches
import pytest

from anystep.caches.read_pool import ReadPool
from anystep.containers import containers
from anystep.containers.array_record_library import open_reader
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

LIMIT_SECONDS = 60


def in_child(action):
  """What `action()` returns in a fork, as text, or its error's kind; a crash or hang fails."""
  read_end, write_end = os.pipe()
  pid = os.fork()
  if pid == 0:
    signal.alarm(LIMIT_SECONDS)
    try:
      found = str(action())
    except AnystepError as error:
      found = error.kind
    except BaseException:
      found = traceback.format_exc()
    os.write(write_end, found.encode())
    os._exit(0)
  os.close(write_end)
  with os.fdopen(read_end) as pipe:
    found = pipe.read()
  status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
  assert status == 0, f"ended with {status}"
  return found


@pytest.fixture(scope="module", params=containers.CONTAINERS)
def built(request, tmp_path_factory):
  return caches.build(
    tmp_path_factory.mktemp("cache"), num_examples=120, num_shards=4, block_records=4, container=request.param
  )


def digests(cache, *, steps=range(6), prefetch_batches=4):
  plan = Plan.start(cache, batch_size=8, feature_lengths=caches.FEATURE_LENGTHS)
  with open_stream(plan, {"demo": cache}, prefetch_batches=prefetch_batches) as stream:
    stream.seek(steps.start)
    return [batch_digest(next(stream)) for _ in steps]


def test_a_child_opens_a_cache_after_its_parent_read_it(built):
  expected = digests(built.open())
  for _ in range(5):
    assert in_child(lambda: digests(built.open(pool=ReadPool()))) == str(expected)
    assert in_child(lambda: digests(built.open())) == str(expected)


def test_a_child_reads_with_its_parents_cache(built):
  cache = built.open()
  expected = digests(cache)
  assert in_child(lambda: digests(cache)) == str(expected)


@pytest.mark.parametrize("prefetch_batches", [0, 1, 4])
def test_a_child_goes_on_with_its_parents_stream(built, prefetch_batches):
  cache = built.open()
  plan = Plan.start(cache, batch_size=8, feature_lengths=caches.FEATURE_LENGTHS)
  with open_stream(plan, {"demo": cache}, prefetch_batches=prefetch_batches) as stream:
    expected = digests(cache, steps=range(12))
    for step in range(6):
      rest = in_child(lambda: [batch_digest(next(stream)) for _ in range(6)])
      assert rest == str(expected[step : step + 6])
      assert in_child(stream.close) == "None"
      assert batch_digest(next(stream)) == expected[step]


def test_a_child_does_not_wait_for_threads_that_it_does_not_have(built):
  """Its parent's other threads are anywhere in what they do, locks in hand."""
  cache = built.open(pool=ReadPool(open_files=2))
  plan = Plan.start(cache, batch_size=8, feature_lengths=caches.FEATURE_LENGTHS)
  expected = str(digests(built.open()))
  stop = threading.Event()

  def keep_reading():
    with open_stream(plan, {"demo": cache}) as stream:
      while not stop.is_set():
        next(stream)

  readers = [threading.Thread(target=keep_reading) for _ in range(3)]
  for reader in readers:
    reader.start()
  try:
    for _ in range(15):
      time.sleep(0.01)
      assert in_child(lambda: digests(cache)) == expected
  finally:
    stop.set()
    for reader in readers:
      reader.join()


@pytest.mark.parametrize("holder", ["pool", "compiler", "preparing"])
def test_a_lock_that_another_thread_holds_is_open_in_a_child(built, holder):
  from numba.core.compiler_lock import global_compiler_lock

  from anystep import compiled

  cache = built.open()
  expected = str(digests(cache))
  lock = {"pool": cache.pool.lock, "compiler": global_compiler_lock, "preparing": compiled._preparing}[holder]
  held, done = threading.Event(), threading.Event()

  def hold():
    with lock:
      held.set()
      # A fork waits for those who compile; they must come to an end.
      done.wait(None if holder == "pool" else 0.2)

  thread = threading.Thread(target=hold)
  thread.start()
  held.wait()
  try:
    assert in_child(lambda: digests(cache)) == expected
  finally:
    done.set()
    thread.join()
  # And it is free again in the parent.
  assert digests(cache) == digests(built.open())


def _digests_of(task):
  cache, step = task
  return digests(cache, steps=range(step, step + 1))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_pools_of_processes_read_the_same(built, method):
  cache = built.open()
  expected = digests(cache)
  # pytest's own modules are not importable by name in a spawned process.
  if method == "fork":
    with multiprocessing.get_context(method).Pool(2) as pool:
      found = pool.map(_digests_of, [(cache, step) for step in range(6)])
    assert [digest for digests_of_step in found for digest in digests_of_step] == expected
    return
  context = multiprocessing.get_context(method)
  with context.Pool(2) as pool:
    assert pool.map(cache.__class__.__len__, [cache, cache]) == [120, 120]
    examples = pool.map(cache.__class__.__getitem__.__get__(cache), [3, 7])
  assert [set(example) for example in examples] == [set(cache[3]), set(cache[7])]


@pytest.fixture
def foreign(tmp_path, monkeypatch):
  """A cache of ArrayRecord files whose chunks are not its blocks."""
  monkeypatch.setattr(containers, "container_options", lambda *_: "group_size:3,zstd:1")
  shared = {"shard_sizes": (9, 8), "block_records": 4, "container": containers.ARRAY_RECORD}
  return caches.build_as_is(tmp_path, **shared)


def test_what_only_the_library_reads_is_refused_in_a_child_of_a_process_that_used_it(foreign):
  built, cache = foreign, foreign.open()
  expected = digests(cache, steps=range(1))
  assert in_child(lambda: digests(cache, steps=range(1))) == "forked_process"
  assert in_child(lambda: digests(built.open(pool=ReadPool()), steps=range(1))) == "forked_process"
  assert digests(cache, steps=range(1)) == expected


def test_a_fresh_process_may_fork_before_it_uses_the_library(foreign):
  """In a process of its own: this one has used it."""
  path = next(path for path in foreign.root.rglob("*array_record*") if path.is_file())
  program = (
    "import os, sys; from anystep.containers.array_record_library import open_reader\n"
    "pid = os.fork()\n"
    "records = open_reader(sys.argv[1]).num_records()\n"
    "status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0\n"
    "sys.exit(status or records not in (8, 9))\n"
  )
  assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program, str(path)]) == 0


def test_the_refusal_says_how_to_start_processes(tmp_path):
  path = tmp_path / "shard"
  containers.write_array_record(path, [b"a"], options="")
  open_reader(path).close()

  def refused():
    with contextlib.suppress(AnystepError):
      try:
        open_reader(path)
      except AnystepError as error:
        return f"{error.code} {error.fields['path']} {'spawn or forkserver' in error.fix}"

  assert in_child(refused) == f"78 {path} True"
