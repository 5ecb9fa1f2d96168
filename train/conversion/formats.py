"""Formats of checkpoints: how each is recognised, read and written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.files.names import checkpoint_step
from anystep.files.storage import is_remote
from anystep.train.conversion import anystep_format, hugging_face, mesh_tensorflow, t5x_format
from anystep.train.leaves.leaf import PARAMETERS, STEP, Leaf, Leaves, Writer, cast, is_floating
from anystep.train.leaves.orbax_trees import corrupt_error

ANYSTEP, T5X, HUGGING_FACE = "anystep", "t5x", "huggingface"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
  """A checkpoint of any format.

  Attributes:
    path: its directory, or the beginning of its files' names.
    format: the format's name.
    leaves: leaves by T5X's names.
    settings: by their names in the network's configuration, what its numbers depend on and no leaf's shape
      says, such as a Llama's `rope_theta`; as far as the format has it.
  """

  path: str
  format: str
  leaves: Leaves
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def step(self) -> int:
    """Steps that it was trained for; 0 where the format does not say."""
    return step_in(self.leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Format:
  is_one: Callable[[str], bool]
  read: Callable[[str], dict[str, Leaf]]
  label: str
  read_settings: Callable[[str], dict[str, Any]] = lambda path: {}


# In this order: our checkpoints are Orbax's trees too.
_FORMATS = {
  ANYSTEP: _Format(
    is_one=anystep_format.is_one,
    read=anystep_format.read,
    label="ours",
    read_settings=anystep_format.read_settings,
  ),
  T5X: _Format(is_one=t5x_format.is_tree, read=t5x_format.read_tree, label="T5X's, by Orbax"),
  "t5x_version_3": _Format(
    is_one=t5x_format.is_version_3, read=t5x_format.read_version_3, label="T5X's version 3"
  ),
  HUGGING_FACE: _Format(
    is_one=hugging_face.is_one,
    read=hugging_face.read,
    label="Hugging Face's safetensors",
    read_settings=hugging_face.read_settings,
  ),
  "mesh_tensorflow": _Format(
    is_one=mesh_tensorflow.is_one, read=mesh_tensorflow.read, label="Mesh TensorFlow's T5"
  ),
}
WRITTEN = (ANYSTEP, T5X, HUGGING_FACE)
"""Formats that conversions write."""


def find_checkpoints(path: str) -> list[str]:
  """Return the checkpoint at a path, or those in a directory, by step, ascending.

  Raises:
    AnystepError: 66 `checkpoint_missing`; 78 `store_unsupported`.
  """
  if is_remote(path):
    raise AnystepError(
      ExitCode.CONFIG,
      "store_unsupported",
      expected="checkpoints in a file system",
      got=path,
      fix="mount the store, or copy the checkpoint to a disk",
    )
  path = os.path.normpath(path)
  if _recognise(path) is not None:
    return [path]
  steps: dict[int, str] = {}
  for name in os.listdir(path) if os.path.isdir(path) else ():
    step, inner = checkpoint_step(name), os.path.join(path, name)
    prefix = inner.removesuffix(mesh_tensorflow.INDEX)
    number = prefix.rpartition("-")[2]
    if step is not None and _recognise(inner) is not None:
      steps[step] = inner
    elif prefix != inner and number.isdecimal():
      steps[int(number)] = prefix
  if not steps:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "checkpoint_missing",
      path=path,
      expected=f"a checkpoint, or a directory of some: {', '.join(one.label for one in _FORMATS.values())}",
      got=_describe_path(path),
      fix="name the directory that holds it; docs/checkpoints.md says which files tell the formats",
    )
  return [steps[step] for step in sorted(steps)]


def _describe_path(path: str) -> str:
  if not os.path.isdir(path):
    return "a file" if os.path.exists(path) else "no directory"
  return ", ".join(sorted(os.listdir(path))[:5]) or "an empty directory"


def find_step(paths: list[str], step: int) -> str:
  """Return the checkpoint of a step.

  Raises:
    AnystepError: 66 `checkpoint_missing`.
  """
  by_step = {number: path for path in paths if (number := step_of(path)) is not None}
  if step in by_step:
    return by_step[step]
  raise AnystepError(
    ExitCode.NO_INPUT,
    "checkpoint_missing",
    path=os.path.dirname(paths[0]),
    expected=f"a checkpoint of step {step}",
    got=f"those of {', '.join(map(str, sorted(by_step))) or 'no step'}",
    fix="choose one of these steps",
  )


def step_in(leaves: Leaves) -> int:
  """Return the step that leaves are of; 0 where none says it.

  Raises:
    AnystepError: 65 `checkpoint_corrupt` for a step that is no number of steps.
  """
  if STEP not in leaves:
    return 0
  leaf = leaves[STEP]
  step = leaf.read_whole() if leaf.shape == () and np.issubdtype(leaf.dtype, np.integer) else None
  if step is None or step < 0:
    raise corrupt_error(
      STEP, ValueError(f"{leaf.describe() if step is None else step}, not a number of steps")
    )
  return int(step)


def step_of(path: str) -> int | None:
  """Return the step that a checkpoint's name says; None where it says none."""
  name = os.path.basename(path)
  if mesh_tensorflow.is_one(path):
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else None
  return checkpoint_step(name)


def open_checkpoint(path: str) -> SavedCheckpoint:
  """Return the checkpoint at a path; its arrays are read later.

  Raises:
    AnystepError: 66 `checkpoint_missing`; of its format 65 `checkpoint_corrupt`, `checkpoint_integrity`,
      `checkpoint_file`; 76 `checkpoint_tree`; 78 `checkpoint_unsupported`.
  """
  name = _recognise(path)
  if name is None:
    (path,) = find_checkpoints(path)[-1:]
    name = _recognise(path)
  assert name is not None, "find_checkpoints recognised it"
  one = _FORMATS[name]
  leaves = one.read(path)
  return SavedCheckpoint(path=path, format=name, leaves=leaves, settings=one.read_settings(path))


def _recognise(path: str) -> str | None:
  return next((name for name, one in _FORMATS.items() if one.is_one(path)), None)


def plan_writing(
  format_name: str, leaves: Leaves, *, source: str, settings: Mapping[str, Any] | None = None
) -> Writer:
  """Return what writes leaves into a new directory.

  Args:
    format_name: one of `WRITTEN`.
    leaves: leaves by T5X's names.
    source: where they come from, for people.
    settings: see `SavedCheckpoint`; T5X's format has none.

  Raises:
    AnystepError: 76 `checkpoint_tree`, 78 `checkpoint_unsupported` for leaves without a place in the format.
  """
  if not any(name.startswith(PARAMETERS) for name in leaves):
    raise AnystepError(
      ExitCode.MISMATCH,
      "checkpoint_tree",
      path=source,
      expected=f"parameters, whose names begin with {PARAMETERS}",
      got=f"{len(leaves)} other leaves",
      fix="correct --assign, or name a checkpoint of a model",
    )
  if format_name == ANYSTEP:
    return anystep_format.plan_writing(leaves, settings or {}, source=source)
  return (
    t5x_format.plan_writing(leaves) if format_name == T5X else hugging_face.plan_writing(leaves, settings)
  )


def cast_parameters(leaves: Leaves, dtype: np.dtype) -> dict[str, Leaf]:
  """Return leaves with the parameters of floating point rounded to a dtype; moments stay as they are."""
  return {
    name: cast(leaf, dtype) if name.startswith(PARAMETERS) and is_floating(leaf.dtype) else leaf
    for name, leaf in leaves.items()
  }
