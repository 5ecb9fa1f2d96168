"""Several threads take batches of one stream."""

from __future__ import annotations

import collections
import pathlib
import sys
import threading

import caches
from attacks.attack import HARMLESS, REFUSED, Attempt, Chance, Wrong
from expected_rows import ExpectedRows

from anystep.caches.read_pool import ReadPool
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

_WAIT_SECONDS = 8


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes a cache and returns the attempt."""
  built = caches.build(folder / "cache")
  plan = Plan.start(built.open(), batch_size=4, num_epochs=2, feature_lengths=caches.FEATURE_LENGTHS)
  rows = ExpectedRows(plan, [built])
  truth = [rows.digest(step) for step in range(rows.num_steps or 0)]
  # Threads take turns as often as they can.
  sys.setswitchinterval(1e-6)

  def attempt(chance: Chance) -> str:
    count, prefetch = chance.randint(2, 6), chance.choice([0, 1, 4, 16])
    closes = chance.random() < 0.1
    chance.note(f"{count} threads, prefetch_batches={prefetch}, one closes: {closes}")
    found: list[str] = []
    errors: list[BaseException] = []
    together = threading.Barrier(count)
    stream = open_stream(plan, {"demo": built.open(pool=ReadPool())}, prefetch_batches=prefetch)

    def take(number: int) -> None:
      try:
        together.wait()
        if closes and number == 0:
          for _ in range(3):
            found.append(batch_digest(next(stream)))
          stream.close()
          return
        for batch in stream:
          found.append(batch_digest(batch))
          if not 0 <= stream.get_state()["step"] <= len(truth):
            raise Wrong(f"the state is {stream.get_state()}")
      except StopIteration:
        return
      except BaseException as error:
        errors.append(error)

    threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(_WAIT_SECONDS)
      if thread.is_alive():
        return "hung"
    stream.close()
    counts, expected = collections.Counter(found), collections.Counter(truth)
    refused = errors and all(isinstance(error, AnystepError) for error in errors)
    if errors and not refused:
      raise next(error for error in errors if not isinstance(error, AnystepError))
    # Whoever is refused gets nothing; what the others get is still each step once.
    if counts - expected or (not refused and counts != expected):
      lost, twice = (expected - counts).total(), (counts - expected).total()
      raise Wrong(f"{lost} batches lost, {twice} delivered twice or unknown, of {len(truth)}")
    return REFUSED if refused else HARMLESS

  return attempt
