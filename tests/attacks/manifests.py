"""Manifests are changed and signed anew, as one would who means harm; so are headers of unit tables."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil

import caches
import numpy as np
from attacks.attack import HARMLESS, Attempt, Chance, Wrong
from attacks.damage import contents, restore
from attacks.mutations import mutated
from attacks.targets import SPLIT, TARGETS, TASK
from expected_rows import ExpectedRows

from anystep.caches.cache import open_cache
from anystep.caches.read_pool import ReadPool
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

_STEPS = 3


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes the files and returns the attempt."""
  targets = [make(folder / f"{name} files", 0) for name, make in TARGETS.items()]
  written = [contents(target.root) for target in targets]
  documents = [json.loads((target.root / TASK / f"manifest.{SPLIT}.json").read_text()) for target in targets]
  examples = [_examples(target.root) for target in targets]

  def attempt(chance: Chance) -> str:
    which = chance.randrange(len(targets))
    target, root = targets[which], targets[which].root
    chance.note(root.name)
    try:
      headers = sorted(root.glob("*/units/*/units.json"))
      if headers and chance.random() < 0.5:
        _change_header(headers[0], chance)
      elif chance.random() < 0.05:
        _change_completed(root / TASK / "COMPLETED", chance)
      else:
        _sign(root, mutated(documents[which], chance))
      _read_as_it_says(root, examples[which])
      # For the plan of the true cache it is another cache.
      target.check(target.read(root))
      return HARMLESS
    finally:
      restore(root, written[which])

  return attempt


def _examples(root: pathlib.Path) -> list[caches.Example]:
  """The true examples, by index."""
  cache = open_cache(root, TASK, SPLIT, pool=ReadPool())
  return [cache[index] for index in range(len(cache))]


def _sign(root: pathlib.Path, content: bytes) -> None:
  (root / TASK / f"manifest.{SPLIT}.json").write_bytes(content)
  sha256 = hashlib.sha256(content).hexdigest()
  (root / TASK / "COMPLETED").write_text(f"{SPLIT} {sha256}\n")


def _change_completed(path: pathlib.Path, chance: Chance) -> None:
  line = path.read_bytes()
  names = [line.upper(), line.replace(b" ", b"\0"), line.replace(b"train", b"../x"), b"\xff" + line]
  ends = [b"", b"\n", line[:-1], line.replace(b"\n", b"\r\n"), line + line, line * 100_000]
  path.write_bytes(chance.choice([*names, *ends]))


def _change_header(path: pathlib.Path, chance: Chance) -> None:
  """The header of a unit table, below a folder that is named as its content says."""
  from anystep.units.tables import table_key

  content = mutated(json.loads(path.read_text()), chance)
  path.write_bytes(content)
  try:
    key = table_key(json.loads(content)["made_for"])
  except (ValueError, KeyError, TypeError, RecursionError):
    return
  if key != path.parent.name:
    shutil.move(path.parent, path.parent.with_name(key))


def _read_as_it_says(root: pathlib.Path, examples: list[caches.Example]) -> None:
  """Starts a plan on the cache as it says it is, and compares its batches with the oracle's word on that.

  Features that it describes otherwise, or no more, are left out.
  """
  cache = open_cache(root, TASK, SPLIT, pool=ReadPool())
  known = {name: feature for name, feature in cache.manifest.features.items() if name in examples[0]}
  same = [name for name, feature in known.items() if feature.numpy_dtype == examples[0][name].dtype]
  packing = "greedy" if (root / TASK / "units").exists() else "none"
  plan = Plan.start(cache, batch_size=8, feature_lengths={"tokens": 256}, packing=packing)
  with open_stream(plan, {TASK: cache}, prefetch_batches=0) as stream:
    batches = [next(stream) for _ in range(_STEPS)]
  cache.verify()
  [cache.lengths(shard) for shard in range(len(cache.manifest.lengths_files))]
  [cache.vocabulary(sha256) for sha256 in cache.vocabularies.values()]
  if packing != "none":
    return
  rows = ExpectedRows(plan, [caches.SmallCache(root=root, task=TASK, split=SPLIT, examples=examples)])
  for step, batch in enumerate(batches):
    for number, row in enumerate(rows.rows(step)):
      assert row is not None
      for name in same:
        if not np.array_equal(batch[name][number], examples[row.index][name]):
          raise Wrong(f"{name} of row {number} of step {step} is not that of example {row.index}")
