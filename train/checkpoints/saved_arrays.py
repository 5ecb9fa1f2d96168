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
from anystep.train.models.train_state import TrainState

# More than a restore has open at a time.
_SPARE_DESCRIPTORS = 128
# What is missing, or another kind of file, is a damaged checkpoint.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_OS_ERROR = re.compile(r"OS error (\d+)")


def save_arrays(path: epath.Path, state: TrainState) -> None:
  """Writes a state into a new directory.

  Raises:
    AnystepError: 74 `checkpoint_write` with what TensorStore says.
  """
  try:
    with _silenced(), ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, _as_tree(state))
  except OSError:
    raise
  except Exception as error:
    # TensorStore reports a full disk as a ValueError.
    raise AnystepError(
      ExitCode.IO,
      "checkpoint_write",
      path=path,
      got=_tensorstore_text(error),
      fix="see to the disk or store, and run it again: it goes on from the newest whole checkpoint",
    ) from error


def restore_arrays(path: epath.Path, abstract: TrainState) -> TrainState:
  """A saved state, on the devices that the abstract state names.

  Raises:
    AnystepError: 76 `checkpoint_tree` where a leaf's path, shape or dtype is another than the model's;
      65 `checkpoint_corrupt` with what Orbax or TensorStore says; as `os_failure` where the system refuses
      what has nothing to do with the checkpoint, as another open file.
  """
  try:
    with _silenced(), ocp.StandardCheckpointer() as checkpointer:
      metadata = checkpointer.metadata(path).item_metadata
      if metadata is None:
        raise ValueError("Orbax cannot read its metadata")
      _check_tree(path, metadata.tree, _as_tree(abstract))
      return TrainState(**_from_tree(checkpointer.restore(path, _as_tree(abstract)), abstract))
  except (AnystepError, MemoryError, jax.errors.JaxRuntimeError):
    # Neither another model nor a device without room is damage.
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
  """What the operating system refused, where that says nothing of the checkpoint: it may be whole.

  TensorStore tells it by a number in its text.
  """
  while error.__cause__ is not None:
    error = error.__cause__
  if not isinstance(error, OSError):
    told = _OS_ERROR.search(str(error))
    if told is None:
      return _lack_of_descriptors()
    number = int(told[1])
    error = OSError(number, os.strerror(number))
  return None if error.errno in _DAMAGE else error


def _lack_of_descriptors() -> OSError | None:
  """The failure of a process that may open hardly any more files, of which Orbax does not always tell."""
  held = []
  try:
    for _ in range(_SPARE_DESCRIPTORS):
      held.append(os.open(os.devnull, os.O_RDONLY))
  except OSError as error:
    return error
  finally:
    for descriptor in held:
      os.close(descriptor)
  return None


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
  """Keeps Orbax and TensorStore from printing what the error says, tracebacks among it."""
  verbosity, hook = logging.get_verbosity(), sys.unraisablehook

  def ignore_late_answers(unraisable: sys.UnraisableHookArgs) -> None:
    # The second where no file could be opened for the event loop itself.
    if not any(text in str(unraisable.exc_value) for text in ("Event loop is closed", "'_ssock'")):
      hook(unraisable)

  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = ignore_late_answers
  try:
    yield
    # Where it failed, other arrays may come later still: nobody waits for them.
    sys.unraisablehook = hook
  finally:
    logging.set_verbosity(verbosity)


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


def _tensorstore_text(error: Exception) -> str:
  """Return TensorStore's text, which Orbax wraps in a description of all its settings."""
  return one_line(error.__cause__ or error)[:300]
