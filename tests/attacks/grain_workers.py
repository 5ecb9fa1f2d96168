"""Grain's worker processes read a plan's batches while their parent has files and a stream open."""

from __future__ import annotations

import pathlib

from attacks.attack import HARMLESS, Attempt, Chance, Wrong
from attacks.targets import SPLIT, TARGETS, TASK

from anystep.caches.cache import open_cache
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes the files and returns the attempt."""
  import grain
  from absl import flags

  from anystep.streams.grain import StreamDataset

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  names = ("array_record", "tfrecord", "parquet as_is")
  targets = {name: TARGETS[name](folder / f"{name} files", 0) for name in names}

  def attempt(chance: Chance) -> str:
    name, workers = chance.choice(names), chance.randint(1, 3)
    chance.note(f"{name}, {workers} workers")
    root, truth = targets[name].root, targets[name].truth
    cache = open_cache(root, TASK, SPLIT)
    plan = Plan.start(cache, batch_size=8, num_epochs=2, epoch_policy="reshuffle")
    with open_stream(plan, {TASK: cache}, prefetch_batches=chance.choice([0, 4])) as stream:
      next(stream)
      options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
      found = [batch_digest(batch) for batch in StreamDataset(plan, str(root)).mp_prefetch(options)]
      found_here = [batch_digest(batch) for batch in stream]
    expected = truth[1 : 1 + (plan.num_steps or 0)]
    if found != expected or found_here != expected[1:]:
      raise Wrong("Grain's workers, or their parent, read other batches")
    return HARMLESS

  return attempt
