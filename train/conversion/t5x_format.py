"""T5X's checkpoints: trees that Orbax writes, and version 3, a msgpack file beside Zarr arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anystep.files.input_files import read_file
from anystep.files.json_files import MALFORMED
from anystep.files.names import COMMIT_SUCCESS
from anystep.programs.progress import log_notice
from anystep.train.checkpoints.integrity import INTEGRITY, UNFINISHED
from anystep.train.conversion.anystep_format import left_over_error
from anystep.train.leaves import orbax_trees
from anystep.train.leaves.leaf import (
  MOMENTS,
  MUTABLES,
  PARAMETERS,
  STEP,
  Advance,
  Leaf,
  Leaves,
  Writer,
  array_leaf,
)

_STATE, _FILE = "state", "checkpoint"
_VERSION = 3
_MAX_FILE_BYTES = 1 << 32
# Keys of a description of an array that TensorStore reads.
_SPEC = {"driver", "kvstore", "metadata"}
_COMMITTED = "Checkpoint commit was successful\n"


def is_tree(path: str) -> bool:
  """Return whether a directory is a checkpoint that Orbax wrote for T5X, and not one of ours."""
  is_ours = os.path.exists(os.path.join(path, UNFINISHED)) or os.path.exists(os.path.join(path, INTEGRITY))
  return not is_ours and os.path.exists(os.path.join(path, _STATE, orbax_trees.METADATA))


def is_version_3(path: str) -> bool:
  """Return whether a directory is a checkpoint of version 3; TensorFlow's file of that name is a text."""
  file_path = os.path.join(path, _FILE)
  if not os.path.isfile(file_path):
    return False
  with open(file_path, "rb") as file:
    # msgpack's maps of up to 15, and of more entries.
    first = file.read(1)
  return bool(first) and (first[0] & 0xF0 == 0x80 or first[0] in (0xDE, 0xDF))


def read_tree(path: str) -> dict[str, Leaf]:
  """Return the leaves of a checkpoint that Orbax wrote.

  Raises:
    AnystepError: 65 `checkpoint_corrupt`.
  """
  state = os.path.join(path, _STATE)
  leaves = {"/".join(keys): leaf for keys, leaf in orbax_trees.read_tree(state).items()}
  if not any(name.startswith(PARAMETERS) for name in leaves):
    raise orbax_trees.corrupt_error(state, ValueError(f"no leaf begins with {PARAMETERS}"))
  return leaves


def read_version_3(path: str) -> dict[str, Leaf]:
  """Return the leaves of a checkpoint of version 3.

  Raises:
    AnystepError: 65 `checkpoint_corrupt`.
  """
  from flax import serialization

  file_path = os.path.join(path, _FILE)
  try:
    document = serialization.msgpack_restore(read_file(file_path, limit_bytes=_MAX_FILE_BYTES))
    if document["version"] != _VERSION:
      raise ValueError(f"version {document['version']!r}, not {_VERSION}")
    flat = dict(_flatten(document["optimizer"]))
    specs: dict[str, dict[str, Any]] = {
      name: {"driver": "zarr", "kvstore": {"driver": "file", "path": _array_path(path, value)}}
      for name, value in flat.items()
      if isinstance(value, Mapping)
    }
    small = {name: _as_array(name, value) for name, value in flat.items() if name not in specs}
  except (*MALFORMED, FileNotFoundError) as error:
    raise orbax_trees.corrupt_error(file_path, error) from error
  arrays = orbax_trees.open_arrays(path, specs)
  for name, spec in specs.items():
    _report_missing_chunks(name, arrays[name], spec["kvstore"]["path"])
  return {name: arrays[name] if name in arrays else array_leaf(small[name]) for name in flat}


def _report_missing_chunks(name: str, leaf: Leaf, path: str) -> None:
  """Report chunks without a file, which Zarr reads as zeros: left out as such, or lost by a copy."""
  count = math.prod(-(-size // chunk) for size, chunk in zip(leaf.shape, leaf.chunk, strict=True))
  files = [file for file in os.listdir(path) if not file.startswith(".")]
  if len(files) < count:
    log_notice(f"{path} lacks {count - len(files)} of {count} chunks of {name}: they are read as zeros")


def _flatten(tree: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
  for key, value in tree.items():
    if isinstance(value, Mapping) and not value.keys() >= _SPEC:
      yield from _flatten(value, f"{start}{key}/")
    elif value is not None:
      yield f"{start}{key}", value


def _as_array(name: str, value: Any) -> np.ndarray:
  array = np.asarray(value)
  if array.dtype.kind in "OSU":
    raise ValueError(f"{name} is no array of numbers: {value!r}")
  return array


def _array_path(path: str, spec: Mapping[str, Any]) -> str:
  """Return the directory of an array: the one of its name here, wherever the checkpoint was written."""
  name = os.path.basename(spec["kvstore"]["path"].rstrip("/"))
  return os.path.join(os.path.abspath(path), name, "")


def plan_writing(leaves: Leaves) -> Writer:
  """Return what writes a checkpoint that T5X restores with Orbax.

  Args:
    leaves: leaves by T5X's names.

  Raises:
    AnystepError: 76 `checkpoint_tree` for a leaf that T5X does not have.
  """
  for name, leaf in leaves.items():
    if not (name == STEP or name.startswith((PARAMETERS, MOMENTS, MUTABLES))):
      fix = f"leave it out with --assign='{name}=>': T5X's optimizer has no such leaf"
      raise left_over_error("T5X", name, leaf, fix=fix)
  whole = {STEP: array_leaf(np.zeros((), np.int32)), **leaves}
  tree = {tuple(name.split("/")): whole[name] for name in sorted(whole)}

  def write(path: str, advance: Advance) -> None:
    os.makedirs(path)
    state = os.path.join(path, _STATE)
    orbax_trees.write_tree(state, tree, advance)
    orbax_trees.write_checkpoint_metadata(path, {_STATE: orbax_trees.TREE_HANDLER})
    for directory in (state, path):
      with open(os.path.join(directory, COMMIT_SUCCESS), "w") as file:
        file.write(_COMMITTED)

  return write
