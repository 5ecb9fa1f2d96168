"""Ctrl-C comes at any microsecond while a stream is used, and who uses it goes on."""

from __future__ import annotations

import pathlib
import signal
import time

import caches
from attacks.attack import HARMLESS, Attempt, Chance, Hung, Wrong
from expected_rows import ExpectedRows

from anystep.caches.read_pool import ReadPool
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import Stream, open_stream

# A stream goes through so many interrupts; closing it takes at most this long.
_TRIES_A_STREAM = 40
_CLOSE_SECONDS = 1.0


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes a cache and returns the attempt."""
  built = caches.build(folder / "cache")
  plan = Plan.start(built.open(), batch_size=8, num_epochs=60, feature_lengths=caches.FEATURE_LENGTHS)
  rows = ExpectedRows(plan, [built])
  num_steps = rows.num_steps or 0
  truth = [rows.digest(step) for step in range(num_steps)]
  streams: dict[int, Stream] = {}
  # Loops are compiled now: on a busy machine that takes as long as a try may.
  with open_stream(plan, {"demo": built.open(pool=ReadPool())}, prefetch_batches=0) as stream:
    next(stream)

  def attempt(chance: Chance) -> str:
    prefetch = [0, 4, 16][chance.number % 3]
    if prefetch not in streams or chance.number // 3 % _TRIES_A_STREAM == 0:
      if prefetch in streams:
        _close(streams.pop(prefetch))
      cache = built.open(pool=ReadPool())
      streams[prefetch] = open_stream(plan, {"demo": cache}, prefetch_batches=prefetch)
    stream = streams[prefetch]
    if stream.step > num_steps - 200:
      stream.seek(chance.randrange(num_steps // 2))
    calls = chance.choice(["next", "next", "next", "seek and next", "batch", "close and next"])
    # Of a batch that is there, and of one that has to be made.
    delay_seconds = chance.choice([5e-5, 5e-4, 5e-3]) * chance.random() + 1e-6
    chance.note(f"prefetch_batches={prefetch}, {calls}, at step {stream.step}, after {delay_seconds:.6f} s")
    # A stream that failed is not gone on with.
    del streams[prefetch]
    _interrupt(stream, calls, delay_seconds, chance, num_steps)
    for _ in range(chance.randint(1, 4)):
      step = stream.step
      if stream.get_state()["step"] != step:
        raise Wrong(f"the state is {stream.get_state()} at step {step}")
      found = batch_digest(next(stream))
      if found != truth[step]:
        known = truth.index(found) if found in truth else "no batch"
        raise Wrong(f"after an interrupt step {step} gave {known}")
      if stream.step != step + 1:
        raise Wrong(f"the step after {step} is {stream.step}")
    streams[prefetch] = stream
    return HARMLESS

  return attempt


def _interrupt(stream: Stream, calls: str, delay_seconds: float, chance: Chance, num_steps: int) -> None:
  """Uses the stream until the interrupt strikes."""
  outer = signal.getsignal(signal.SIGALRM)
  left = signal.getitimer(signal.ITIMER_REAL)[0]
  struck = False

  def strike(*_: object) -> None:
    nonlocal struck
    struck = True
    # The next one is that of a try that hangs.
    signal.signal(signal.SIGALRM, outer)
    signal.setitimer(signal.ITIMER_REAL, left, 1)
    raise KeyboardInterrupt

  try:
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, delay_seconds)
    # Where Python runs a destructor it drops the exception.
    while not struck:
      if calls == "batch":
        stream.batch(stream.step)
      elif calls == "seek and next":
        stream.seek(chance.randrange(num_steps // 2))
        next(stream)
      elif calls == "close and next":
        stream.close()
        next(stream)
      elif stream.step < num_steps - 10:
        next(stream)
      else:
        stream.seek(0)
  except KeyboardInterrupt:
    return


def _close(stream: Stream) -> None:
  start = time.monotonic()
  stream.close()
  if time.monotonic() - start > _CLOSE_SECONDS:
    raise Hung(f"close() took {time.monotonic() - start:.1f} s")
