"""Plans, lists of tombstones and `data_caches.json` are changed, as one would who means harm or mistypes."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib

import caches
from attacks.attack import HARMLESS, Attempt, Chance, Wrong
from attacks.mutations import mutated
from expected_rows import ExpectedRows

from anystep.caches.cache import open_cache
from anystep.caches.read_pool import ReadPool
from anystep.features.converters import DecoderConverter
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.plans.tombstones import TombstoneList
from anystep.streams.stream import open_stream
from anystep.tasks.data_program.main import main

_STEPS = (0, 1, 2, 7)
_FEATURES = ["inputs", "targets", "number"]


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes caches, a plan of them with a change and tombstones, and what a run leaves; returns the attempt."""
  built = [
    caches.build(folder / "caches", task="a", num_examples=23),
    caches.build(folder / "caches", task="b:inner", num_examples=10, num_shards=2, block_records=2),
    caches.build_as_is(folder / "caches", task="c"),
  ]
  root = str(folder / "caches")
  opened = {cache.task: cache.open() for cache in built}
  start = Plan.start(
    [opened["a"], opened["b:inner"]],
    rates={"a": 2, "b:inner": 0.5},
    batch_size=6,
    seed=3,
    num_epochs=4,
    feature_lengths=caches.FEATURE_LENGTHS,
  )
  changed = start.change(2, rates={"a": 1, "c": 2}, caches=[opened["c"]]).skip(5, 6)
  listed = TombstoneList.of(opened["a"], [1, 4, 7])
  plans = [json.loads(plan.to_json()) for plan in (start, changed)]
  model_dir = folder / "model"
  (model_dir / "checkpoint_2").mkdir(parents=True)
  (model_dir / "checkpoint_2" / "commit_success.txt").touch()
  own = {
    "plan": folder / "plan.json",
    "list": folder / "list.json",
    "caches": model_dir / "data_caches.json",
    "model plan": model_dir / "data_plan.json",
  }
  sound = {
    "plan": changed.to_json(),
    "list": listed.to_json(),
    "caches": json.dumps({"version": 1, "cache_dirs": [root]}),
    "model plan": changed.to_json(),
  }
  at, where = ["--cache_dir", root], ["--plan", str(own["plan"])]
  model = ["--model_dir", str(model_dir)]
  rewritten = ["--overwrite", "--output", str(folder / "output.json")]
  listing = ["--list", str(own["list"]), "--step", "3"]
  commands = {
    "plan": [
      ["plan", "show", *where],
      ["plan", "batch", *where, *at, "--step", "3"],
      ["plan", "diff", str(own["plan"]), str(own["model plan"])],
      ["plan", "change", *where, "--step", "9", "--batch_size", "12", *rewritten],
      ["plan", "skip", *where, "--steps", "9:10", *rewritten],
      ["plan", "tombstone", *where, *listing, *rewritten],
      ["what-was-at", *where, *at, "--steps", "0:2"],
      ["when-was", *where, *at, "--task", "a", "--index", "3"],
      ["stats", *where, *at, "--steps", "0:2"],
    ],
    "list": [
      ["plan", "tombstone", *where, *listing, *rewritten],
      ["when-was", *where, *at, "--tombstones", str(own["list"])],
    ],
    "caches": [["what-was-at", *model, "--steps", "0:1"], ["show", *model, "--steps", "0:1"]],
    "model plan": [["plan", "show", *model], ["what-was-at", *model, "--steps", "0:1"]],
  }

  def attempt(chance: Chance) -> str:
    for name, path in own.items():
      path.write_text(sound[name])
    if chance.random() < 0.4:
      content = mutated(chance.choice(plans), chance)
      _read_as_it_says(content, built, root)
      return HARMLESS
    name = chance.choice(list(commands))
    command = chance.choice(commands[name])
    chance.note(f"{' '.join(command[:2])}, the {name} changed")
    own[name].write_bytes(mutated(json.loads(sound[name]), chance))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
      main(command)
    return HARMLESS

  return attempt


def _read_as_it_says(content: bytes, built: list[caches.SmallCache], root: str) -> None:
  """Reads the plan's batches and compares them with what the oracle makes of the file."""
  path = pathlib.Path(root, "..", "changed.json")
  path.write_bytes(content)
  plan = Plan.read(path, fix="name a plan")
  opened = {cache.task: open_cache(root, cache.task, "train", pool=ReadPool()) for cache in built}
  own = {name: opened[name] for name in plan.tasks if name in opened}
  converter = DecoderConverter() if plan.tombstones else None
  steps = [step for step in _STEPS if plan.num_steps is None or step < plan.num_steps]
  with open_stream(plan, own, prefetch_batches=0, feature_converter=converter) as stream:
    batches = [stream.batch(step) for step in steps]
  if converter is not None:
    return
  # The file as JSON has it, not as the plan understood it.
  document = json.loads(content)
  rows = ExpectedRows(_Document(document), [cache for cache in built if cache.task in plan.tasks])  # type: ignore[arg-type]
  for step, batch in zip(steps, batches, strict=True):
    if batch_digest({n: batch[n] for n in _FEATURES}) != rows.digest(step, features=_FEATURES):
      raise Wrong(f"the batch of step {step} is not what the plan's file says")


class _Document:
  """What `ExpectedRows` takes of a plan: its JSON."""

  def __init__(self, document: object):
    self._document = document

  def to_json(self) -> str:
    return json.dumps(self._document)
