"""Finding the tasks that a user registers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

from anystep.errors import AnystepError, ExitCode


def import_modules(names: Iterable[str]) -> None:
  """Imports modules that register tasks, from the current directory first.

  Raises:
    AnystepError: 78 `module_import`, with what the import said.
  """
  look_here_first()
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
        got=f"{type(error).__name__}: {error}",
        fix="run where the module can be found, or mend what it raised",
      ) from error


def look_here_first() -> None:
  """Makes the current directory the first place that modules are looked for in."""
  here = os.getcwd()
  if sys.path[:1] != [here]:
    sys.path.insert(0, here)
