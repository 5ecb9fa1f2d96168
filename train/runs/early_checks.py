"""Checks of a run's configuration before TensorFlow and JAX, which take many seconds, are imported."""

from __future__ import annotations

from typing import Any

from anystep.files import storage
from anystep.limits import is_name
from anystep.programs.module_names import check_modules
from anystep.train.configuration.gin_files import (
  GinFiles,
  Macro,
  Reference,
  gin_value_error,
  list_parts,
)
from anystep.train.configuration.resume_contract import AcceptedChanges
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.configured_caches import check_caches
from anystep.train.runs.run_identity import read_run
from anystep.train.runs.run_lock import locked_run

_TRAINER = Reference("", "anystep.train.trainer.Trainer", is_called=True)


def check_early(files: GinFiles, *, makes_missing_caches: bool, locks: bool) -> None:
  """Check what gin files name: modules, caches, the plan's file, and the run's directory.

  What the text of the files does not say, such as a path that a function returns, is left to the checks that
  follow when the configuration is built.

  Args:
    files: the gin files, read.
    makes_missing_caches: whether the run makes the caches that it lacks.
    locks: whether to check that no other run trains in the directory.

  Raises:
    AnystepError: 78 `module_import`, `gin_value`; as `check_caches`; 73 `run_active`; 65 `run_invalid`,
      `accepted_change_invalid`.
  """
  check_modules(files.modules)
  trainer = files.find_arguments(_TRAINER)
  for name in ("train_dataset", "eval_dataset"):
    config = _find_dataset(files, trainer.get(name))
    if config is not None:
      check_modules(config.modules)
      check_caches(config, makes_missing=makes_missing_caches)
  model_dir = trainer.get("model_dir")
  if isinstance(model_dir, str) and is_name(model_dir):
    read_run(model_dir)
    AcceptedChanges.read(model_dir)
    if locks and not storage.is_remote(model_dir):
      with locked_run(model_dir):
        pass


def _find_dataset(files: GinFiles, value: Any) -> DatasetConfig | None:
  """Return the configuration of data that a value stands for; None where the text does not say all of it.

  Raises:
    AnystepError: 78 `gin_value`.
  """
  if not isinstance(value, Reference) or not value.is_called:
    return None
  if not (value.selector.startswith("anystep.train.") and value.selector.endswith(".DatasetConfig")):
    return None
  arguments = files.find_arguments(value)
  if any(isinstance(part, (Macro, Reference)) for part in list_parts(arguments)):
    return None
  try:
    return DatasetConfig(**arguments)
  except TypeError:
    # A parameter is missing or misspelt: gin says where.
    return None
  except ValueError as error:
    raise gin_value_error(error) from error
