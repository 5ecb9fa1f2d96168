"""The arrays of a training state on disk: an Orbax checkpoint (TensorStore, OCDBT)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files.os_failures import os_failure
from anystep.train.checkpoints.earlier_leaves import earlier_names
from anystep.train.models.train_state import TrainState

# More than a restore has open at a time.
_SPARE_DESCRIPTORS = 128
# What is missing, or another kind of file, is a damaged checkpoint.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# So that another program can read parts of a large leaf.
_IN_CHUNKS = ocp.SaveArgs(chunk_byte_size=64 << 20)
_OS_ERROR = re.compile(r"OS error (\d+)")


def save_arrays(path: epath.Path, state: TrainState) -> None:
  """Writes a state into a new directory.

  Raises:
    AnystepError: 74 `checkpoint_write` with what TensorStore says.
  """
  tree = as_tree(state)
  try:
    with _silence(), ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, tree, save_args=jax.tree.map(lambda _: _IN_CHUNKS, tree))
  except OSError:
    raise
  except Exception as error:
    # TensorStore reports a full disk as a ValueError.
    raise AnystepError(
      ExitCode.IO,
      "checkpoint_write",
      path=path,
      got=_tensorstore_text(error),
      fix="check the disk or store, and run it again: it goes on from the newest whole checkpoint",
    ) from error


def restore_arrays(path: epath.Path, abstract: TrainState) -> TrainState:
  """Restore a saved state, on the devices that the abstract state names.

  Raises:
    AnystepError: 76 `checkpoint_tree` if a leaf's path, shape or dtype is not the model's;
      65 `checkpoint_corrupt` with the message of Orbax or TensorStore; as `os_failure` if the operating
      system fails for a reason outside the checkpoint, such as too many open files.
  """
  try:
    with _silence(), ocp.StandardCheckpointer() as checkpointer:
      metadata = checkpointer.metadata(path).item_metadata
      if metadata is None:
        raise ValueError("Orbax cannot read its metadata")
      saved, expected = metadata.tree, as_tree(abstract)
      names = earlier_names(saved.get("opt_state", ()), expected["opt_state"])
      if not names:
        _check_tree(path, saved, expected)
        return from_tree(checkpointer.restore(path, expected), abstract)
      opt_state = saved["opt_state"]
      renamed = {name: opt_state[earlier] for name, earlier in names.items()}
      _check_tree(path, saved | {"opt_state": renamed}, expected)
      leaves = {earlier: expected["opt_state"][name] for name, earlier in names.items()}
      # Orbax restores whole trees.
      unused = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=abstract.step.sharding)
        for name, leaf in opt_state.items()
        if name not in leaves
      }
      restored = checkpointer.restore(path, expected | {"opt_state": leaves | unused})
      leaves = {name: restored["opt_state"][earlier] for name, earlier in names.items()}
      return from_tree(restored | {"opt_state": leaves}, abstract)
  except (AnystepError, MemoryError, jax.errors.JaxRuntimeError):
    # Another model, or a device without memory, is no damage.
    raise
  except Exception as error:
    failure = _system_failure(error)
    if failure is not None:
      failure.filename = failure.filename or str(path)
      raise os_failure(failure) from error
    raise AnystepError(
      ExitCode.DATA,
      "checkpoint_corrupt",
      path=path,
      got=_tensorstore_text(error),
      fix="restore it from a copy, or remove this checkpoint to resume from the one before it",
    ) from error


def _system_failure(error: BaseException) -> OSError | None:
  """Return the failure of the operating system, if the checkpoint itself may be whole; else None.

  TensorStore's messages contain the error number.
  """
  while error.__cause__ is not None:
    error = error.__cause__
  if not isinstance(error, OSError):
    match = _OS_ERROR.search(str(error))
    if match is None:
      return _lack_of_descriptors()
    number = int(match[1])
    error = OSError(number, os.strerror(number))
  return None if error.errno in _DAMAGE else error


def _lack_of_descriptors() -> OSError | None:
  """Return the failure if the process can open hardly any more files; Orbax does not always report it."""
  descriptors = []
  try:
    for _ in range(_SPARE_DESCRIPTORS):
      descriptors.append(os.open(os.devnull, os.O_RDONLY))
  except OSError as error:
    return error
  finally:
    for descriptor in descriptors:
      os.close(descriptor)
  return None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Keep Orbax and TensorStore from printing their errors and tracebacks."""
  verbosity, hook = logging.get_verbosity(), sys.unraisablehook

  def ignore_late_answers(unraisable: sys.UnraisableHookArgs) -> None:
    # The second text comes if the event loop itself could open no file.
    if not any(text in str(unraisable.exc_value) for text in ("Event loop is closed", "'_ssock'")):
      hook(unraisable)

  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = ignore_late_answers
  try:
    yield
    # After a failure other arrays may still arrive, so the hook stays in place.
    sys.unraisablehook = hook
  finally:
    logging.set_verbosity(verbosity)


def as_tree(state: TrainState) -> dict[str, Any]:
  """Return a state as nested dicts, as it is saved: the optimizer's leaves by their paths."""
  tree = {"step": state.step, "params": state.params, "opt_state": _leaves_by_path(state.opt_state)}
  return tree | ({"mutables": state.mutables} if state.mutables else {})


def _leaves_by_path(tree: Any) -> dict[str, Any]:
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in _with_path(tree)}


def from_tree(tree: dict[str, Any], abstract: TrainState) -> TrainState:
  """Return the state that `as_tree` made a tree of; it is built like the abstract state."""
  names = list(_leaves_by_path(abstract.opt_state))
  structure = jax.tree.structure(abstract.opt_state)
  opt_state = jax.tree.unflatten(structure, [tree["opt_state"][name] for name in names])
  return TrainState(**(tree | {"opt_state": opt_state}))


def _with_path(tree: Any) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(tree)[0]


def _check_tree(path: epath.Path, saved: Any, expected: Any) -> None:
  """Refuse a checkpoint whose leaves are not the model's."""

  def describe_leaf(tree: Any) -> dict[str, tuple]:
    return {
      jax.tree_util.keystr(key, simple=True, separator="/"): (tuple(leaf.shape), str(np.dtype(leaf.dtype)))
      for key, leaf in _with_path(tree)
    }

  saved_leaves, model_leaves = describe_leaf(saved), describe_leaf(expected)
  for name in sorted(saved_leaves.keys() | model_leaves.keys()):
    if saved_leaves.get(name) != model_leaves.get(name):
      raise AnystepError(
        ExitCode.MISMATCH,
        "checkpoint_tree",
        path=path,
        leaf=name,
        expected=model_leaves.get(name, "no such leaf"),
        got=saved_leaves.get(name, "no such leaf"),
        fix="train the model that the checkpoint is of, or start anew in another MODEL_DIR",
      )


def _tensorstore_text(error: Exception) -> str:
  """Return TensorStore's text, which Orbax wraps in a description of all its settings."""
  return one_line(error.__cause__ or error)[:300]
