"""Checkpoints, whole or absent, each of one run and one step (docs/architecture.md#runs-and-checkpoints)."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Mapping, Sequence

from etils import epath

from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files import storage
from anystep.files.json_files import MALFORMED, canonical_json, read_json
from anystep.files.names import checkpoint_name, checkpoint_step
from anystep.limits import is_count
from anystep.train.checkpoints.integrity import (
  COMMITTED,
  CONVERTED,
  INTEGRITY,
  TRAINED_WITH,
  UNFINISHED,
  check_files,
  flush_to_disk,
  read_integrity,
  write_integrity,
)
from anystep.train.checkpoints.saved_arrays import restore_arrays, save_arrays
from anystep.train.configuration.built_values import Value
from anystep.train.datasets.data_state import DATA_FILES, DataState, file_name, read_state
from anystep.train.models.train_state import TrainState

# A user's file in a checkpoint that is to be kept.
PINNED = "pinned"
_STATE = "state"
_TRAINED_WITH_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """Steps whose states are saved, and which of them are kept.

  Attributes:
    period_steps: a checkpoint is written at each multiple of it, and at the end.
    steps: further steps after which one is written; 0 is the initial state.
    keep: number of newest checkpoints that are kept; None for all.
    keep_period_steps: checkpoints at multiples of it are kept for ever; None for none. One that contains a
      file named `pinned` is, too.

  Raises:
    ValueError: a period or number is below 1, or `steps` are no whole numbers.
  """

  period_steps: int
  steps: Sequence[int] = ()
  keep: int | None = None
  keep_period_steps: int | None = None

  def __post_init__(self):
    for name in ("period_steps", "keep", "keep_period_steps"):
      value = getattr(self, name)
      if not (is_count(value, least=1) or (value is None and name != "period_steps")):
        raise ValueError(f"CheckpointConfig.{name}: expected a whole number of at least 1, got {value!r}")
    if not isinstance(self.steps, Sequence) or not all(map(is_count, self.steps)):
      raise ValueError(f"CheckpointConfig.steps: expected whole numbers, got {self.steps!r}")

  def saves_at(self, step: int) -> bool:
    """Return whether the state after a number of steps is saved."""
    return step in self.steps or (step > 0 and step % self.period_steps == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
  """Contents of a checkpoint, without its arrays.

  Attributes:
    step: steps done, by the model's count.
    first_step: step that the run began at: `step - first_step` steps of its data are done.
    data: the data's state.
    run: the run that wrote it, see `run_identity`; None in those of version 1.
    trained_with: the values that decided its parameters, see `built_values`; None in those of version 1.
  """

  step: int
  first_step: int
  data: DataState
  run: str | None
  trained_with: Mapping[str, Value] | None


def checkpoint_directory(model_dir: epath.PathLike, step: int) -> epath.Path:
  """Return the path of a step's checkpoint; absolute, because Orbax needs that."""
  return epath.Path(model_dir).resolve() / checkpoint_name(step)


def checkpoint_steps(model_dir: epath.PathLike) -> list[int]:
  """Return the steps of the committed checkpoints, ascending."""
  return sorted(step for step, path in _directories(model_dir).items() if (path / COMMITTED).exists())


def save_checkpoint(
  model_dir: epath.PathLike,
  state: TrainState,
  *,
  data: DataState,
  run: str,
  trained_with: Mapping[str, Value],
  first_step: int = 0,
) -> epath.Path:
  """Write `checkpoint_{step}`. It counts once its marker, which is written last, exists.

  Args:
    model_dir: the run's directory.
    state: the training state.
    data, run, trained_with, first_step: see `Checkpoint`.

  Raises:
    AnystepError: 73 `checkpoint_foreign` if that directory is another program's; 74 `checkpoint_write`.
  """
  step = int(state.step)
  directory = checkpoint_directory(model_dir, step)
  if directory.exists():
    _check_ours(directory)
    _remove(directory)
  directory.mkdir(parents=True)
  # Written first and removed last: it tells an unfinished checkpoint from a damaged or foreign one.
  (directory / UNFINISHED).touch()
  (directory / file_name(data)).write_text(data.to_json())
  document = {"version": _TRAINED_WITH_VERSION, "values": dict(trained_with)}
  (directory / TRAINED_WITH).write_text(canonical_json(document, indent=1) + "\n")
  save_arrays(directory / _STATE, state)
  marker = write_integrity(directory, step=step, run=run, first_step=first_step)
  flush_to_disk(directory)
  # The files, and the directory's own name, are on the disk before the marker.
  storage.put(directory / COMMITTED, marker.encode())
  (directory / UNFINISHED).unlink()
  return directory


def remove_old_checkpoints(model_dir: epath.PathLike, config: CheckpointConfig) -> None:
  """Remove the checkpoints that are not kept."""
  for step in checkpoint_steps(model_dir)[: -config.keep if config.keep else 0]:
    directory = checkpoint_directory(model_dir, step)
    is_periodic = config.keep_period_steps is not None and step % config.keep_period_steps == 0
    if not is_periodic and not (directory / PINNED).exists():
      _remove(directory)


def set_aside_later_checkpoints(model_dir: epath.PathLike, step: int) -> None:
  """Rename the checkpoints after a step; they could not be read, and training resumes from this step."""
  for later in checkpoint_steps(model_dir):
    if later > step:
      directory = checkpoint_directory(model_dir, later)
      aside = directory.with_name(f"unreadable_{directory.name}_{uuid.uuid4().hex[:8]}")
      directory.rename(aside)
      print(f"checkpoint_{later} is kept as {aside.name}", file=sys.stderr)


def find_checkpoint(model_dir: epath.PathLike, *, before_step: int | None = None) -> Checkpoint | None:
  """Return the newest readable checkpoint; None if there is no checkpoint.

  An unreadable one is reported, and the one before it is tried.

  Args:
    model_dir: the run's directory.
    before_step: only checkpoints before this step are tried.

  Raises:
    AnystepError: 65 `checkpoints_unreadable` if there are checkpoints and none can be read; codes other
      than 65 for failures of the system.
  """
  directories = _directories(model_dir)
  committed = checkpoint_steps(model_dir)
  if before_step is None:
    for step in sorted(directories.keys() - set(committed)):
      print(f"checkpoint_{step} was never finished and does not count", file=sys.stderr)
  for step in reversed(committed):
    if before_step is not None and step >= before_step:
      continue
    try:
      return _read(directories[step], step)
    except AnystepError as error:
      # Only damage makes a checkpoint unreadable; failures of the system end the program.
      if error.code != ExitCode.DATA:
        raise
      report_unreadable(step, error)
  # A checkpoint whose save was killed counts as absent.
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


def report_unreadable(step: int, error: AnystepError) -> None:
  """Print why a checkpoint is not used."""
  print(f"checkpoint_{step} cannot be read: {error}", file=sys.stderr)


def restore_state(model_dir: epath.PathLike, step: int, abstract: TrainState) -> TrainState:
  """Return the state of a checkpoint, on the devices that the abstract state names.

  Raises:
    AnystepError: 76 `checkpoint_tree` if a leaf's path, shape or dtype is not the model's;
      65 `checkpoint_corrupt`; 65 `checkpoint_step` if the state's step is not the directory's.
  """
  directory = checkpoint_directory(model_dir, step)
  state = restore_arrays(directory / _STATE, abstract)
  _check_step(directory, step, int(state.step))
  return state


def _directories(model_dir: epath.PathLike) -> dict[int, epath.Path]:
  """Return all checkpoint directories by step, without a look into them."""
  root = epath.Path(model_dir).resolve()
  if not root.exists():
    return {}
  steps = ((path, checkpoint_step(path.name)) for path in root.iterdir())
  return {step: path for path, step in steps if step is not None}


def _is_unfinished(directory: epath.Path) -> bool:
  """Return whether one of our saves or removals was interrupted."""
  names = {path.name for path in directory.iterdir()}
  # Version 1 had no file that says so.
  begun = UNFINISHED in names or (not names.isdisjoint(DATA_FILES) and INTEGRITY not in names)
  return not names or (begun and COMMITTED not in names)


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


def _remove(directory: epath.Path) -> None:
  """Remove a checkpoint: its marker first, and last the file that says it is ours."""
  (directory / UNFINISHED).touch()
  (directory / COMMITTED).unlink(missing_ok=True)
  for path in directory.iterdir():
    if path.is_dir():
      path.rmtree()
    elif path.name != UNFINISHED:
      path.unlink()
  (directory / UNFINISHED).unlink()
  directory.rmdir()


def _read(directory: epath.Path, step: int) -> Checkpoint:
  """Read a checkpoint, and compare each file with the writer's record.

  Raises:
    AnystepError: 65 `checkpoint_integrity`, `checkpoint_step`, `checkpoint_file`; 76 `checkpoint_converted`;
      as `read_state`, `open_file`.
  """
  integrity = read_integrity(directory)
  if integrity.step is not None:
    _check_step(directory, step, integrity.step)
  check_files(directory, integrity)
  noted = integrity.files.keys()
  if CONVERTED in noted:
    raise AnystepError(
      ExitCode.MISMATCH,
      "checkpoint_converted",
      path=directory,
      expected="a checkpoint that a run wrote, with the state of its data",
      got="one that anystep-convert wrote",
      fix="train in another MODEL_DIR, from this checkpoint as checkpoints.RestoreConfig.path",
    )
  data_files = noted & set(DATA_FILES)
  if len(data_files) != 1 or (integrity.run is not None and TRAINED_WITH not in noted):
    raise AnystepError(
      ExitCode.DATA,
      "checkpoint_integrity",
      path=directory / INTEGRITY,
      got="not what a checkpoint consists of",
      fix="restore it from a copy, or remove this checkpoint to resume from the one before it",
    )
  values = None
  if integrity.run is not None:
    values = _read_values(directory / TRAINED_WITH)
  # Only the file in the integrity record is read.
  data = read_state(directory / data_files.pop())
  return Checkpoint(
    step=step, first_step=integrity.first_step, data=data, run=integrity.run, trained_with=values
  )


def _read_values(path: epath.Path) -> Mapping[str, Value]:
  try:
    document = read_json(path)
    if document["version"] != _TRAINED_WITH_VERSION:
      raise ValueError(f"version {document['version']!r}, not {_TRAINED_WITH_VERSION}")
    if not isinstance(document["values"], Mapping):
      raise ValueError("values are no object")
    return document["values"]
  except MALFORMED as error:
    fix = "restore it from a copy, or remove this checkpoint to resume from the one before it"
    raise make_file_error("checkpoint_integrity", error, path=path, fix=fix) from error


def _check_step(directory: epath.Path, step: int, inside: int) -> None:
  """Refuse a checkpoint whose directory was renamed or copied to another name."""
  if inside != step:
    raise AnystepError(
      ExitCode.DATA,
      "checkpoint_step",
      path=directory,
      expected=f"the state of step {step}",
      got=f"the state of step {inside}",
      fix=f"rename it back to checkpoint_{inside}, or remove it to resume from the one before it",
    )
