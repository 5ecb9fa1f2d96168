"""Checkpoints are renamed, copied from other runs, mixed or damaged before a run goes on with them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

from attacks import damage
from attacks.attack import HARMLESS, Attempt, Chance, Wrong
from attacks.mutations import mutated

TOTAL_STEPS, PERIOD = 6, 2
_MARKER = "commit_success.txt"


class Reached(BaseException):
  """A run is at its first step; nothing in the product catches it."""


def prepare(folder: pathlib.Path) -> Attempt:
  """Trains two runs that differ in their seed, and returns the attempt."""
  from fault_cases import training

  case = training(folder)
  runs = {name: folder / name for name in ("own", "others")}
  truth: dict[int, tuple[str, str]] = {}

  def see(step: int, state: str, batch: str) -> None:
    truth[step] = state, batch

  _train(case, runs["others"], lambda *_: None, "--gin.RANDOM_SEED=1")
  # The last run's truth is taken up.
  _train(case, runs["own"], see)
  model_dir = folder / "model"

  def attempt(chance: Chance) -> str:
    damage.remove(model_dir)
    shutil.copytree(runs["own"], model_dir)
    kind = chance.choice(list(KINDS))
    chance.note(kind)
    KINDS[kind](model_dir, runs["others"], chance)
    markers = [*model_dir.glob(f"checkpoint_*/{_MARKER}")]
    reached: list[tuple[int, str, str]] = []

    def stop(*seen: Any) -> None:
      reached.append(seen)
      raise Reached

    with contextlib.suppress(Reached):
      # One step more than the run had, so that there is one to be reached.
      _train(case, model_dir, stop, f"--gin.TRAIN_STEPS={TOTAL_STEPS + 1}")
    ((step, state, batch),) = reached
    if step == 0 and markers:
      raise Wrong("it started from scratch where checkpoints are")
    if step == TOTAL_STEPS and step not in truth:
      truth[step] = state, batch
    if truth.get(step) != (state, batch):
      known = [name for name, values in truth.items() if values[0] == state]
      raise Wrong(f"at step {step} it has the state of {known or 'no step'}")
    return HARMLESS

  return _after_the_last(attempt, case, runs["own"], see)


def _after_the_last(attempt: Attempt, case: Any, own: pathlib.Path, see: Callable) -> Attempt:
  """The attempt, once the state after the last step is known."""
  copy = shutil.copytree(own, own.with_name("whole"))

  def stop(*seen: Any) -> None:
    see(*seen)
    raise Reached

  with contextlib.suppress(Reached):
    _train(case, copy, stop, f"--gin.TRAIN_STEPS={TOTAL_STEPS + 1}")
  return attempt


def _train(case: Any, model_dir: pathlib.Path, see: Callable[[int, str, str], None], *more: str) -> None:
  """Runs the trainer in this process; `see` gets each step, its state and its batch as they go in."""
  import jax
  import numpy as np

  from anystep.features.digest import batch_digest
  from anystep.train import main
  from anystep.train.partitioning.batches import local_values
  from anystep.train.runs import prepared_run

  original = prepared_run.make_train_step

  def seeing(*args: Any, **kwargs: Any) -> Callable:
    train_step = original(*args, **kwargs)

    def step(state: Any, batch: Any) -> Any:
      digest = hashlib.sha256()
      for leaf in jax.tree.leaves((state.params, state.opt_state)):
        digest.update(np.asarray(leaf).tobytes())
      see(int(state.step), digest.hexdigest(), batch_digest(local_values(batch)))
      return train_step(state, batch)

    return step

  steps = (f"--gin.TRAIN_STEPS={TOTAL_STEPS}", f"--gin.CHECKPOINT_PERIOD={PERIOD}")
  prepared_run.make_train_step = seeing  # type: ignore[assignment]
  try:
    with contextlib.redirect_stdout(sys.stderr):
      main.main(["anystep-train", *case.arguments(model_dir), *steps, *more])
  finally:
    prepared_run.make_train_step = original


def _checkpoints(model_dir: pathlib.Path) -> list[pathlib.Path]:
  return sorted(model_dir.glob("checkpoint_*"))


def _renamed(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  path = chance.choice(_checkpoints(model_dir))
  target = model_dir / f"checkpoint_{chance.choice([1, 2, 3, 4, 5, 6, 50])}"
  if target != path:
    damage.remove(target)
    path.rename(target)


def _exchanged(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  one, another = chance.sample(_checkpoints(model_dir), 2)
  one.rename(model_dir / "aside")
  another.rename(one)
  (model_dir / "aside").rename(another)


def _of_another_run(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  path = chance.choice(_checkpoints(others))
  damage.remove(model_dir / path.name)
  shutil.copytree(path, model_dir / path.name)


def _all_of_another_run(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  for path in _checkpoints(others):
    damage.remove(model_dir / path.name)
    shutil.copytree(path, model_dir / path.name)


def _state_of_another(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  place = chance.choice(_checkpoints(model_dir))
  source = chance.choice([*_checkpoints(model_dir), *_checkpoints(others)])
  if source != place:
    damage.remove(place / "state")
    shutil.copytree(source / "state", place / "state")


def _files_of_another(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  """Arrays of one checkpoint under the names of another's, some with an integrity file that fits."""
  one = chance.choice(_checkpoints(model_dir))
  another = chance.choice([*_checkpoints(model_dir), *_checkpoints(others)])
  place, source = (sorted(path for path in p.glob("state/**/*") if path.is_file()) for p in (one, another))
  for path, twin in zip(place, source, strict=False):
    if chance.random() < 0.5:
      path.write_bytes(twin.read_bytes())


def _forged(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  """A file that is vouched for says something else."""
  from anystep.train.checkpoints.integrity import INTEGRITY, fingerprint

  directory = chance.choice(_checkpoints(model_dir))
  path, integrity = chance.choice(sorted(directory.rglob("*.json"))), directory / INTEGRITY
  chance.note(path.name)
  path.write_bytes(mutated(json.loads(path.read_text()), chance))
  if path != integrity:
    document = json.loads(integrity.read_text())
    document["files"][path.relative_to(directory).as_posix()] = fingerprint(path)
    integrity.write_text(json.dumps(document))
  (directory / _MARKER).write_text(hashlib.sha256(integrity.read_bytes()).hexdigest())


def _json_changed(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  path = chance.choice(sorted(model_dir.rglob("*.json")))
  path.write_bytes(mutated(json.loads(path.read_text()), chance))


def _damaged(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  """Files of a checkpoint's, or of any that the model directory has."""
  directory = chance.choice([model_dir, chance.choice(_checkpoints(model_dir))])
  for _ in range(chance.randint(1, 2)):
    damage.damage(directory, chance)


def _unmarked(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  (chance.choice(_checkpoints(model_dir)) / _MARKER).unlink()


def _copied_whole(model_dir: pathlib.Path, others: pathlib.Path, chance: Chance) -> None:
  """The directory as it is, in other files."""


KINDS: dict[str, Callable[[pathlib.Path, pathlib.Path, Chance], None]] = {
  "renamed": _renamed,
  "exchanged": _exchanged,
  "of another run": _of_another_run,
  "all of another run": _all_of_another_run,
  "state of another": _state_of_another,
  "files of another": _files_of_another,
  "forged": _forged,
  "JSON changed": _json_changed,
  "damaged": _damaged,
  "unmarked": _unmarked,
  "copied whole": _copied_whole,
}
