"""Checkpoints: whole or not at all, and never taken for what they are not (design section 8)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
import uuid
from typing import Any

import google_crc32c
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from anystep import storage
from anystep.errors import AnystepError, ExitCode
from anystep.manifest import canonical_json
from anystep.names import COMMIT_SUCCESS
from anystep.train.data_state import DATA_FILES, DataState, file_name, read_state
from anystep.train.train_state import TrainState

COMMITTED = COMMIT_SUCCESS
_STATE, _INTEGRITY = "state", "integrity.json"
_DIRECTORY = re.compile(r"checkpoint_(\d+)\Z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """When checkpoints are written.

  Attributes:
    period_steps: one at each multiple of it, and one at the end.
    keep: how many of the newest stay; None for all.
  """

  period_steps: int
  keep: int | None = None

  def __post_init__(self):
    if self.period_steps < 1 or (self.keep is not None and self.keep < 1):
      raise ValueError(f"period_steps and keep are at least 1, not {self.period_steps} and {self.keep}")


def checkpoint_directory(model_dir: epath.PathLike, step: int) -> epath.Path:
  """Where the checkpoint of a step is; absolute, as Orbax asks."""
  return epath.Path(model_dir).resolve() / f"checkpoint_{step}"


def checkpoint_steps(model_dir: epath.PathLike) -> list[int]:
  """Steps of the committed checkpoints, ascending."""
  return sorted(step for step, path in _directories(model_dir).items() if (path / COMMITTED).exists())


def save_checkpoint(model_dir: epath.PathLike, state: TrainState, data: DataState) -> epath.Path:
  """Writes `checkpoint_{step}`; it counts from the moment that its marker, written last, is there.

  Raises:
    AnystepError: 73 `checkpoint_foreign` where that directory is another program's.
  """
  directory = checkpoint_directory(model_dir, int(state.step))
  if directory.exists():
    _check_ours(directory)
    directory.rmtree()
  directory.mkdir(parents=True)
  # The data's state comes first: it tells an unfinished checkpoint of ours from another program's.
  (directory / file_name(data)).write_text(data.to_json())
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(directory / _STATE, _as_tree(state))
  files = {name: _fingerprint(directory / name) for name in _file_names(directory)}
  integrity = canonical_json({"version": 1, "files": files}, indent=1) + "\n"
  (directory / _INTEGRITY).write_text(integrity)
  _flush_to_disk(directory)
  (directory / COMMITTED).write_text(_sha256(integrity))
  return directory


def remove_old_checkpoints(model_dir: epath.PathLike, keep: int | None) -> None:
  """Removes all but the newest checkpoints; a removed one first stops being committed."""
  for step in checkpoint_steps(model_dir)[: -keep if keep else 0]:
    directory = checkpoint_directory(model_dir, step)
    (directory / COMMITTED).unlink()
    directory.rmtree()


def set_aside_later_checkpoints(model_dir: epath.PathLike, step: int) -> None:
  """Renames the checkpoints after a step that training goes on from: they could not be read."""
  for later in checkpoint_steps(model_dir):
    if later > step:
      directory = checkpoint_directory(model_dir, later)
      aside = directory.with_name(f"unreadable_{directory.name}_{uuid.uuid4().hex[:8]}")
      directory.rename(aside)
      print(f"checkpoint_{later} is kept as {aside.name}", file=sys.stderr)


def restore_data(model_dir: epath.PathLike) -> tuple[int, DataState] | None:
  """The newest checkpoint that can be read, and its data's state; None where there is no checkpoint.

  One that cannot be read is reported and the one before it is tried.

  Raises:
    AnystepError: 65 `checkpoints_unreadable` where there are checkpoints and none can be read.
  """
  directories = _directories(model_dir)
  committed = checkpoint_steps(model_dir)
  for step in sorted(directories.keys() - set(committed)):
    print(f"checkpoint_{step} was never finished and does not count", file=sys.stderr)
  for step in reversed(committed):
    try:
      return step, _check(directories[step])
    except AnystepError as error:
      print(f"checkpoint_{step} cannot be read: {error}", file=sys.stderr)
  # An unfinished checkpoint of ours holds no integrity file yet: it was killed, and counts as never begun.
  finished = {step for step, path in directories.items() if not _is_unfinished(path)}
  if finished:
    raise AnystepError(
      ExitCode.DATA,
      "checkpoints_unreadable",
      path=model_dir,
      got=f"{len(finished)} checkpoints, none readable",
      fix="restore one from a copy, or train from step 0 in another MODEL_DIR",
    )
  return None


def restore_state(model_dir: epath.PathLike, step: int, abstract: TrainState) -> TrainState:
  """The state of a checkpoint, on the devices that the abstract state names.

  Raises:
    AnystepError: 76 `checkpoint_tree` where a leaf's path, shape or dtype is another than the model's;
      65 `checkpoint_corrupt`.
  """
  path = checkpoint_directory(model_dir, step) / _STATE
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      _check_tree(path, checkpointer.metadata(path).item_metadata.tree, _as_tree(abstract))
      return TrainState(**_from_tree(checkpointer.restore(path, _as_tree(abstract)), abstract))
  except AnystepError:
    raise
  except Exception as error:
    raise AnystepError(
      ExitCode.DATA,
      "checkpoint_corrupt",
      path=path,
      got=" ".join(f"{type(error).__name__}: {error}".split())[:300],
      fix="remove this checkpoint to resume from the one before it, or restore it from a copy",
    ) from error


def _directories(model_dir: epath.PathLike) -> dict[int, epath.Path]:
  """All checkpoint directories by step, whatever is in them."""
  root = epath.Path(model_dir).resolve()
  if not root.exists():
    return {}
  matches = ((path, _DIRECTORY.match(path.name)) for path in root.iterdir())
  return {int(match[1]): path for path, match in matches if match}


def _is_unfinished(directory: epath.Path) -> bool:
  names = {path.name for path in directory.iterdir()}
  return not names or (not names.isdisjoint(DATA_FILES) and not names & {_INTEGRITY, COMMITTED})


def _check_ours(directory: epath.Path) -> None:
  if not _is_unfinished(directory) and not any((directory / name).exists() for name in DATA_FILES):
    raise AnystepError(
      ExitCode.CANNOT_CREATE,
      "checkpoint_foreign",
      path=directory,
      expected="no directory, or a checkpoint of this run",
      got="another program's files",
      fix="train in another MODEL_DIR",
    )


def _check(directory: epath.Path) -> DataState:
  """Compares every file with what its writer noted; returns the data's state.

  A flipped bit passes through TensorStore unseen: sizes alone would not do.
  """
  for name, noted in _read_integrity(directory).items():
    _compare(directory / name, noted, _fingerprint(directory / name))
  return read_state(directory)


def _flush_to_disk(directory: epath.Path) -> None:
  """Makes a local file system write out the files before the marker that vouches for them."""
  if not os.path.isdir(directory):
    return
  for folder, _, names in os.walk(directory):
    for path in [*(os.path.join(folder, name) for name in names), folder]:
      storage.sync(path)


def _compare(path: epath.Path, noted: dict[str, Any], found: dict[str, Any]) -> None:
  if noted != found:
    raise AnystepError(
      ExitCode.DATA,
      "checkpoint_file",
      path=path,
      expected=noted,
      got=found,
      fix="restore the file from a copy, or remove this checkpoint to resume from the one before it",
    )


def _read_integrity(directory: epath.Path) -> dict[str, Any]:
  path = directory / _INTEGRITY
  try:
    text = path.read_text()
    files = json.loads(text)["files"]
    vouched = (directory / COMMITTED).read_text() == _sha256(text)
    of_ours = len(files.keys() & set(DATA_FILES)) == 1
    if vouched and of_ours and all(noted.keys() == {"bytes", "crc32c"} for noted in files.values()):
      return files
    reason = "not what a checkpoint consists of"
  except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
    reason = f"{type(error).__name__}: {error}"
  raise AnystepError(
    ExitCode.DATA,
    "checkpoint_integrity",
    path=path,
    got=reason,
    fix="restore the file from a copy, or remove this checkpoint to resume from the one before it",
  )


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _file_names(directory: epath.Path) -> list[str]:
  """All files below the directory, by their path in it."""
  names = []
  for path in sorted(directory.iterdir()):
    inner = [f"{path.name}/{name}" for name in _file_names(path)] if path.is_dir() else [path.name]
    names.extend(inner)
  return names


def _fingerprint(path: epath.Path) -> dict[str, Any]:
  if not path.exists():
    return {"bytes": None, "crc32c": None}
  content = path.read_bytes()
  return {"bytes": len(content), "crc32c": f"{google_crc32c.value(content):08x}"}


def _as_tree(state: TrainState) -> dict[str, Any]:
  return {"step": state.step, "params": state.params, "opt_state": _leaves_by_path(state.opt_state)}


def _leaves_by_path(tree: Any) -> dict[str, Any]:
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in _with_path(tree)}


def _from_tree(tree: dict[str, Any], abstract: TrainState) -> dict[str, Any]:
  names = list(_leaves_by_path(abstract.opt_state))
  structure = jax.tree.structure(abstract.opt_state)
  return tree | {"opt_state": jax.tree.unflatten(structure, [tree["opt_state"][name] for name in names])}


def _with_path(tree: Any) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(tree)[0]


def _check_tree(path: epath.Path, saved: Any, expected: Any) -> None:
  """Refuses a checkpoint whose leaves are not the model's."""

  def described(tree: Any) -> dict[str, tuple]:
    return {
      jax.tree_util.keystr(key, simple=True, separator="/"): (tuple(leaf.shape), str(np.dtype(leaf.dtype)))
      for key, leaf in _with_path(tree)
    }

  found, wanted = described(saved), described(expected)
  for name in sorted(found.keys() | wanted.keys()):
    if found.get(name) != wanted.get(name):
      raise AnystepError(
        ExitCode.MISMATCH,
        "checkpoint_tree",
        path=path,
        leaf=name,
        expected=wanted.get(name, "no such leaf"),
        got=found.get(name, "no such leaf"),
        fix="train the model that the checkpoint is of, or start anew in another MODEL_DIR",
      )
