"""Saves while the steps go on: the state is copied to the hosts' memory, and a thread writes the copy."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from etils import epath

from anystep.train.checkpoints.checkpoints import CheckpointConfig, remove_old_checkpoints, save_checkpoint
from anystep.train.configuration.built_values import Value
from anystep.train.datasets.data_state import DataState
from anystep.train.models.train_state import TrainState


class CheckpointSaver:
  """Writer of a run's checkpoints, one after another, in a thread of its own.

  Steps wait for the copy of the state, and for a save before it that is still being written, so that the
  hosts hold one copy at most. As a context manager it waits for the last save, also after an error.

  Args:
    model_dir: the run's directory.
    config: which checkpoints are kept.
    run, trained_with, first_step: see `checkpoints.Checkpoint`.
  """

  def __init__(
    self,
    model_dir: epath.PathLike,
    config: CheckpointConfig,
    *,
    run: str,
    trained_with: Mapping[str, Value],
    first_step: int = 0,
  ):
    self._model_dir, self._config = model_dir, config
    self._run, self._trained_with, self._first_step = run, trained_with, first_step
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
    self._save: Future[None] | None = None

  def __enter__(self) -> CheckpointSaver:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    try:
      # The error that ends the run says more than that of a save.
      self.wait() if kind is None else self._thread.shutdown()
    finally:
      self._thread.shutdown()

  def save(self, state: TrainState, data: DataState) -> None:
    """Begin to write the checkpoint of a state, whose arrays the next step may then overwrite.

    Raises:
      AnystepError: as `checkpoints.save_checkpoint`, if the save before failed.
    """
    self.wait()
    self._save = self._thread.submit(self._write, copy_to_hosts(state), data)

  @property
  def is_idle(self) -> bool:
    """Return whether nothing is being written."""
    return self._save is None or self._save.done()

  def raise_failure(self) -> None:
    """Raise the error of a save that failed; return at once where it is still being written."""
    if self.is_idle:
      self.wait()

  def wait(self) -> None:
    """Wait until the last checkpoint is written.

    Raises:
      AnystepError: as `checkpoints.save_checkpoint`.
    """
    save, self._save = self._save, None
    if save is not None:
      save.result()

  def _write(self, state: TrainState, data: DataState) -> None:
    save_checkpoint(
      self._model_dir,
      state,
      data=data,
      run=self._run,
      trained_with=self._trained_with,
      first_step=self._first_step,
    )
    remove_old_checkpoints(self._model_dir, self._config)


def copy_to_hosts(state: TrainState) -> TrainState:
  """Return a copy of a state in the memory of the devices' hosts, split as the state is.

  The copies may still be under way; a step that is given the state's memory waits for them on the device.
  """
  return jax.tree.map(
    lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")),
    state,
  )
