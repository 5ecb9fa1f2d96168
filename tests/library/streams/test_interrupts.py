"""Whatever interrupts a stream, and wherever, the batches that follow are those from its step on."""

import contextlib
import faulthandler
import gc
import linecache
import pathlib
import random
import signal
import sys
import threading
import time
import traceback

import caches
import numpy as np
import pytest
from expected_rows import ExpectedRows

from anystep.caches.cache import Cache
from anystep.caches.read_pool import held_bytes
from anystep.files.input_files import open_file
from anystep.plans.plan import Plan
from anystep.streams import read_ahead
from anystep.streams import stream as stream_module
from anystep.streams.stream import Stream, open_stream
from anystep.transforms.functions import Map

NUM_STEPS = 40
SECONDS_UNTIL_HUNG = 120


class Interrupt(KeyboardInterrupt):
  """What these tests interrupt with: another one is the person's who runs them."""


@pytest.fixture(autouse=True)
def hung_tests_say_where():
  faulthandler.dump_traceback_later(SECONDS_UNTIL_HUNG * 10, exit=True)
  yield
  faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def timer():
  """`timer(seconds)` raises an Interrupt in this thread after that time, 0 for never."""

  def strike(signum, frame):
    raise Interrupt

  before = signal.signal(signal.SIGALRM, strike)
  yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
  signal.setitimer(signal.ITIMER_REAL, 0)
  signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def plan(shared_cache):
  return Plan.start(shared_cache.open(), batch_size=12, feature_lengths=caches.FEATURE_LENGTHS)


@pytest.fixture(scope="module")
def expected(shared_cache, plan):
  """By step the numbers of its examples, which no two steps share."""
  rows = ExpectedRows(plan, [shared_cache])
  steps = [[int(row["number"]) for row in rows.batch(step)] for step in range(NUM_STEPS + 20)]
  assert len({tuple(numbers) for numbers in steps}) == len(steps)
  return steps


def opened(shared_cache, plan, **settings):
  return open_stream(plan, {"demo": shared_cache.open()}, **settings)


def was_inside_next(error):
  return any(frame.f_code is Stream.__next__.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def interrupted_next(stream, expected):
  """One `next` that may be interrupted; whether it was, within. What comes is always the step's own."""
  before = stream.step
  try:
    batch = next(stream)
  except Interrupt as error:
    if not was_inside_next(error):
      # Before it began or after its end, when nobody had the batch yet.
      assert stream.step in (before, before + 1)
      raise
    assert stream.step == before
    return True
  assert batch["number"].tolist() == expected[before]
  assert stream.step == before + 1
  assert stream.get_state() == {"version": 1, "step": before + 1}
  return False


# At random moments


def strike_at_random(shared_cache, plan, expected, timer, *, prefetch_batches, strikes, seed):
  """Interrupts within `next` at random microseconds, each after a few batches of a stream that goes on."""
  rng = random.Random(seed)
  struck_within = struck = 0
  with opened(shared_cache, plan, prefetch_batches=prefetch_batches) as stream:
    while struck_within < strikes:
      try:
        timer(rng.choice([20e-6, 200e-6, 2e-3]) * rng.random() + 1e-6)
        while True:
          if stream.step >= NUM_STEPS or rng.random() < 0.02:
            stream.seek(rng.randrange(NUM_STEPS))
          struck_within += interrupted_next(stream, expected)
          if struck_within > struck:
            break
      except Interrupt:
        # Anywhere else: in `seek`, or between.
        pass
      finally:
        timer(0)
      struck = struck_within
      if rng.random() < 0.01:
        stream.close()
      assert next(stream)["number"].tolist() == expected[stream.step - 1]
    pool = stream._examples._reader._pool
    held = [(size, value) for value, size in pool._held.values()]
    assert pool.used_bytes == sum(size for size, _ in held) + pool._index_bytes
    assert all(size == held_bytes(window.records.tolist()) for size, window in held)
  return struck_within


@pytest.mark.parametrize("prefetch_batches", [0, 4, 16])
def test_an_interrupt_at_a_random_moment_loses_and_repeats_nothing(
  shared_cache, plan, expected, timer, prefetch_batches
):
  struck = strike_at_random(
    shared_cache, plan, expected, timer, prefetch_batches=prefetch_batches, strikes=300, seed=0
  )
  assert struck >= 300


@pytest.mark.soak
@pytest.mark.parametrize("prefetch_batches", [0, 4, 16])
def test_ten_thousand_interrupts_at_random_moments_lose_and_repeat_nothing(
  shared_cache, plan, expected, timer, prefetch_batches
):
  struck = strike_at_random(
    shared_cache, plan, expected, timer, prefetch_batches=prefetch_batches, strikes=10_000, seed=1
  )
  print(f"tried {struck}, wrong 0, hung 0")
  assert struck >= 10_000


# At every line


class StrikesAtLine:
  """Raises an Interrupt at the n-th line that this thread traces, of any file but this.

  Not at a line that begins with `with`: tracing also stops there on the way out, before the lock is let go,
  where Python itself looks for no signal.
  """

  def __init__(self, number):
    self.left = number
    self.struck_at = None

  def __call__(self, frame, event, arg):
    if event == "line" and self.struck_at is None and frame.f_code.co_filename != __file__:
      line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
      if not line.startswith("with "):
        self.left -= 1
        if self.left < 0:
          self.struck_at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
          self.strike()
    return self

  def strike(self):
    raise Interrupt

  @contextlib.contextmanager
  def tracing(self):
    before = sys.gettrace()
    sys.settrace(self)
    try:
      yield
    finally:
      sys.settrace(before)


def strike_at_line(shared_cache, plan, expected, number, *, prefetch_batches, first_steps):
  """Interrupts a stream's `next` at a line; where it struck, or None after its last line."""
  strikes = StrikesAtLine(number)
  with opened(shared_cache, plan, prefetch_batches=prefetch_batches) as stream:
    for step in range(first_steps):
      assert next(stream)["number"].tolist() == expected[step]
    batch = None
    with contextlib.suppress(Interrupt), strikes.tracing():
      batch = next(stream)
    got = [] if batch is None else [batch["number"].tolist()]
    assert stream.step == first_steps + len(got)
    got += [next(stream)["number"].tolist() for _ in range(6 - len(got))]
    assert got == expected[first_steps : first_steps + 6]
    assert stream.get_state()["step"] == first_steps + 6
  return strikes.struck_at


def strike_at_lines(shared_cache, plan, expected, *, stride, **how):
  number, struck = 0, []
  while where := strike_at_line(shared_cache, plan, expected, number, **how):
    struck.append(where)
    number += stride
  # The last lines too: there the batch has been taken, and nobody has it.
  for last in range(max(number - stride, 0), number):
    if where := strike_at_line(shared_cache, plan, expected, last, **how):
      struck.append(where)
  return struck


@pytest.mark.parametrize("first_steps", [0, 3])
@pytest.mark.parametrize(("prefetch_batches", "stride"), [(0, 61), (4, 7), (16, 7)])
@pytest.mark.long
def test_an_interrupt_at_a_line_loses_and_repeats_nothing(
  shared_cache, plan, expected, prefetch_batches, stride, first_steps
):
  how = {"prefetch_batches": prefetch_batches, "first_steps": first_steps}
  struck = strike_at_lines(shared_cache, plan, expected, stride=stride, **how)
  assert len(struck) > 5
  assert any(where.startswith(stream_module.__file__) for where in struck)


@pytest.mark.soak
@pytest.mark.parametrize("first_steps", [0, 3])
@pytest.mark.parametrize(("prefetch_batches", "stride"), [(0, 6), (4, 1), (16, 1)])
def test_an_interrupt_at_any_line_loses_and_repeats_nothing(
  shared_cache, plan, expected, prefetch_batches, stride, first_steps
):
  """Without reading ahead a batch takes thousands of lines, of which every sixth has its turn."""
  how = {"prefetch_batches": prefetch_batches, "first_steps": first_steps}
  struck = strike_at_lines(shared_cache, plan, expected, stride=stride, **how)
  print(f"tried {len(struck)}, wrong 0, hung 0")
  assert len(set(struck)) > 20


# Slow reads


@pytest.fixture
def stuck_reads(monkeypatch):
  """Reads that wait, and hold their locks, until they are let go."""

  class Stuck:
    begun, let_go = threading.Event(), threading.Event()

  def read_blocks(self, shard, blocks, *, original=Cache.read_blocks):
    with self.pool.lock:
      Stuck.begun.set()
      assert Stuck.let_go.wait(SECONDS_UNTIL_HUNG)
      return original(self, shard, blocks)

  monkeypatch.setattr(Cache, "read_blocks", read_blocks)
  yield Stuck
  Stuck.let_go.set()


@pytest.mark.parametrize("prefetch_batches", [1, 4, 16])
def test_a_stream_closes_while_a_read_is_stuck_and_after_an_interrupt(
  shared_cache, plan, expected, timer, stuck_reads, prefetch_batches
):
  stream = opened(shared_cache, plan, prefetch_batches=prefetch_batches)
  with pytest.raises(Interrupt):  # noqa: PT012
    timer(0.2)
    next(stream)
  assert stuck_reads.begun.is_set()
  stream.close()
  # Who waited for the read would not get here.
  assert not stuck_reads.let_go.is_set()
  assert stream.step == 0
  stuck_reads.let_go.set()
  assert [next(stream)["number"].tolist() for _ in range(5)] == expected[:5]
  stream.close()
  for thread in threading.enumerate():
    if thread.name.startswith("anystep-stream"):
      thread.join(SECONDS_UNTIL_HUNG)
      assert not thread.is_alive()


def test_what_a_stuck_read_leaves_behind_goes_when_it_ends(shared_cache, plan, timer, stuck_reads):
  stream = opened(shared_cache, plan, prefetch_batches=2)
  with pytest.raises(Interrupt):  # noqa: PT012
    timer(0.2)
    next(stream)
  stream.close()
  pool = stream._examples._reader._pool
  closed = threading.Event()
  closing = pool.drop_where
  pool.drop_where = lambda wanted: [closing(wanted), closed.set()]
  stuck_reads.let_go.set()
  assert closed.wait(SECONDS_UNTIL_HUNG)
  assert not pool._held


# Several threads


def in_threads(number, function):
  """What a function returns in each of several threads that start together."""
  together, results = threading.Barrier(number), [None] * number

  def run(k):
    together.wait()
    results[k] = function(k)

  threads = [threading.Thread(target=run, args=(k,)) for k in range(number)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(SECONDS_UNTIL_HUNG)
    assert not thread.is_alive()
  return results


@pytest.fixture
def frequent_switches():
  before = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  yield
  sys.setswitchinterval(before)


@pytest.mark.parametrize("prefetch_batches", [0, 1, 4, 16])
def test_each_step_goes_to_one_of_four_threads(
  shared_cache, plan, expected, frequent_switches, prefetch_batches
):
  steps_of = {tuple(numbers): step for step, numbers in enumerate(expected)}
  for _ in range(5):
    with opened(shared_cache, plan, prefetch_batches=prefetch_batches) as stream:
      taken = in_threads(
        4, lambda _: [steps_of[tuple(next(stream)["number"].tolist())] for _ in range(NUM_STEPS // 4)]
      )
      assert stream.step == NUM_STEPS
    assert all(steps == sorted(steps) for steps in taken)
    assert sorted(step for steps in taken for step in steps) == list(range(NUM_STEPS))


@pytest.mark.parametrize("prefetch_batches", [0, 4, 16])
def test_threads_may_also_look_at_batches_go_elsewhere_and_close(
  shared_cache, plan, expected, frequent_switches, prefetch_batches
):
  known = {tuple(numbers) for numbers in expected}

  def use(k):
    rng = random.Random(k)
    for _ in range(60):
      action = rng.random()
      if action < 0.6:
        if stream.step < NUM_STEPS:
          assert tuple(next(stream)["number"].tolist()) in known
      elif action < 0.8:
        step = rng.randrange(NUM_STEPS)
        assert stream.batch(step)["number"].tolist() == expected[step]
      elif action < 0.97:
        stream.seek(rng.randrange(NUM_STEPS))
      else:
        stream.close()
    return True

  with opened(shared_cache, plan, prefetch_batches=prefetch_batches) as stream:
    assert in_threads(4, use) == [True] * 4
    for _ in range(3):
      assert next(stream)["number"].tolist() == expected[stream.step - 1]


def test_threads_that_go_on_take_no_step_twice_while_one_is_interrupted(shared_cache, plan, expected, timer):
  """Threads run to their end: the interrupted one's step is the next again unless others went on."""
  steps_of = {tuple(numbers): step for step, numbers in enumerate(expected)}
  struck, taken, done = 0, [], threading.Event()
  with opened(shared_cache, plan, prefetch_batches=4) as stream:

    def take():
      while not done.is_set() and stream.step < NUM_STEPS:
        taken.append(steps_of[tuple(next(stream)["number"].tolist())])
        time.sleep(0)

    others = [threading.Thread(target=take) for _ in range(3)]
    rng = random.Random(0)
    for thread in others:
      thread.start()
    while stream.step < NUM_STEPS:
      batch = None
      try:
        timer(rng.random() * 1e-3 + 1e-6)
        while stream.step < NUM_STEPS:
          batch = None
          batch = next(stream)
          taken.append(steps_of[tuple(batch["number"].tolist())])
          batch = None
      except Interrupt:
        struck += 1
        if batch is not None and steps_of[tuple(batch["number"].tolist())] not in taken:
          taken.append(steps_of[tuple(batch["number"].tolist())])
      finally:
        timer(0)
    done.set()
    for thread in others:
      thread.join(SECONDS_UNTIL_HUNG)
      assert not thread.is_alive()
  assert len(taken) == len(set(taken))
  assert len(set(range(NUM_STEPS)) - set(taken)) <= struck


def test_a_signal_handler_may_seek_the_stream_that_it_interrupts(shared_cache, plan, expected, timer):
  """As a handler of SIGTERM does that asks where training stands."""
  calls = []

  def handle(signum, frame):
    calls.append(stream.get_state()["step"])
    stream.seek(stream.step)

  with opened(shared_cache, plan, prefetch_batches=4) as stream:
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    got = [next(stream)["number"].tolist() for _ in range(NUM_STEPS)]
    signal.setitimer(signal.ITIMER_REAL, 0)
  assert got == expected[:NUM_STEPS]
  assert calls


class HandlesAtLine(StrikesAtLine):
  """Runs a function at a line, as a signal's handler, and goes on."""

  def __init__(self, number, handle):
    super().__init__(number)
    self._handle = handle

  def strike(self):
    self._handle()


@pytest.mark.parametrize(
  ("prefetch_batches", "stride"), [(0, 1500), (4, 23), pytest.param(4, 1, marks=pytest.mark.soak)]
)
def test_a_signal_handler_may_close_the_stream_that_it_interrupts(
  shared_cache, plan, expected, prefetch_batches, stride
):
  number, struck = 0, True
  while struck:
    with opened(shared_cache, plan, prefetch_batches=prefetch_batches) as stream:
      handles = HandlesAtLine(number, stream.close)
      with handles.tracing():
        got = [next(stream)["number"].tolist()]
      got += [next(stream)["number"].tolist() for _ in range(3)]
      assert got == expected[:4], number
    struck, number = handles.struck_at, number + stride
  assert number > 3 * stride


def test_a_signal_handler_may_not_read_the_stream_that_it_interrupts(shared_cache, plan, expected):
  """It would have the batch that its stream is about to return."""
  refused = []

  def handle():
    try:
      next(stream)
    except ValueError as error:
      refused.append(str(error))

  for number in range(3, 300, 7):
    with opened(shared_cache, plan, prefetch_batches=4) as stream:
      handles = HandlesAtLine(number, handle)
      with handles.tracing():
        got = [next(stream)["number"].tolist()]
      got += [next(stream)["number"].tolist() for _ in range(3)]
      # Where it came before or after the lock it may well read; then its batch is missing here.
      assert got == [batch for batch in expected[:5] if batch in got]
  assert refused
  assert all("next() within next()" in text for text in refused)


def test_a_stream_whose_closing_was_interrupted_reads_ahead_again(shared_cache, plan, expected, monkeypatch):
  with opened(shared_cache, plan, prefetch_batches=4) as stream:
    next(stream)

    def interrupted(self, original=read_ahead._Workers.end):
      original(self)
      raise Interrupt

    with monkeypatch.context() as patch:
      patch.setattr(read_ahead._Workers, "end", interrupted)
      with pytest.raises(Interrupt):
        stream.close()
    made = []
    monkeypatch.setattr(
      stream, "batch", lambda step, original=stream.batch: made.append(step) or original(step)
    )
    assert [next(stream)["number"].tolist() for _ in range(4)] == expected[1:5]
    assert not made


@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_a_transform_that_raises_stop_iteration_ends_no_loop(shared_cache, plan, prefetch_batches):
  def fail(example):
    return example if example["number"] != 30 else next(iter(()))

  given = 0
  opened_with = {"transforms": {"demo": Map(fail)}, "prefetch_batches": prefetch_batches}

  def read_all(stream):
    nonlocal given
    for _ in stream:
      given += 1
      assert given < NUM_STEPS

  stream = open_stream(plan, {"demo": shared_cache.open()}, **opened_with)
  with stream, pytest.raises(RuntimeError) as error:
    read_all(stream)
  assert "raised StopIteration" in str(error.value)


def test_an_interrupt_while_a_file_is_opened_stays_one_and_leaves_nothing_open(tmp_path):
  (tmp_path / "file").write_bytes(b"content")

  def times_open():
    return sum(path.resolve() == tmp_path / "file" for path in pathlib.Path("/proc/self/fd").iterdir())

  number, struck = 0, True
  while struck:
    strikes = StrikesAtLine(number)
    with contextlib.suppress(Interrupt), strikes.tracing(), open_file(tmp_path / "file") as file:
      assert file.read() == b"content"
    struck, number = strikes.struck_at, number + 1
    gc.collect()
    assert not times_open()
  assert number > 5


def test_expected_numbers_are_the_streams(shared_cache, plan, expected):
  with opened(shared_cache, plan) as stream:
    assert np.array_equal([next(stream)["number"] for _ in range(NUM_STEPS)], expected[:NUM_STEPS])
