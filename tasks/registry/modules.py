"""The user's modules that register tasks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.programs.module_names import check_modules, fix_of_missing


def import_modules(names: Iterable[str]) -> None:
  """Import modules that register tasks, from the current directory first.

  Raises:
    AnystepError: 78 `module_import`, with the error of the import.
  """
  names = list(names)
  check_modules(names)
  if "seqio" in sys.modules:
    from anystep.tasks.vocabularies.files import watch_models

    # A module may read a vocabulary as it is imported.
    watch_models()
  for name in names:
    try:
      importlib.import_module(name)
    except AnystepError:
      raise
    except Exception as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "module_import",
        module=name,
        got=one_line(error),
        fix=_choose_fix(name, error),
      ) from error


def _choose_fix(name: str, error: Exception) -> str:
  """Return what to do about a module that cannot be imported: another name or place, or a change in it."""
  missing = error.name if isinstance(error, ModuleNotFoundError) else None
  if name.endswith(".py") or (missing and f"{name}.".startswith(f"{missing}.")):
    return fix_of_missing(name)
  return "mend the module: it was found, but its import failed"


def registered_tasks(modules: Sequence[str], caches: Iterable[Cache]) -> dict[str, Any]:
  """Return the tasks that caches were made of, by name, as modules register them.

  Imports the modules, and with them SeqIO and TensorFlow.

  Args:
    modules: their names.
    caches: of the tasks.

  Raises:
    AnystepError: 78 `module_import`; 64 `task_unknown` for a task that they do not register; 76
      `task_changed` for one that has changed since it was cached.
  """
  check_modules(modules)
  from anystep.tasks.startup import quiet_stderr, start_tensorflow

  start_tensorflow()
  with quiet_stderr():
    from anystep.tasks.registry.fingerprint import check_reader
    from anystep.tasks.registry.named_tasks import find_task

  import_modules(modules)
  tasks = {}
  for cache in caches:
    task = find_task(
      cache.manifest.task,
      expected="a task that --module_import registers",
      fix="name the module that registers it with --module_import, or leave that out",
    )
    check_reader(task, cache.manifest, cache=cache)
    tasks[task.name] = task
  return tasks
