"""Names of Python modules that users give, checked before any module is imported."""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence

from anystep.earlier_names import list_earlier_names
from anystep.errors import AnystepError, ExitCode

# Likeness of a name to another in its package, by difflib, above which it is a slip. tensorflow.compat, which
# TensorFlow makes, comes near tensorflow/compiler with 0.71.
_SLIP_CUTOFF = 0.85


def check_modules(names: Iterable[str]) -> None:
  """Refuse modules that are not there, looking in the current directory first, as imports do from now on.

  Nothing is imported, also not the packages that the modules are in.

  Raises:
    AnystepError: 78 `module_import`, with the name that comes nearest.
  """
  prefer_current_directory()
  for name in names:
    missing = _find_missing(name)
    if missing is None:
      continue
    part, search_path = missing
    package, dot, wrong = part.rpartition(".")
    # A package may make modules of its own as it is imported, so there only a likely slip is refused.
    cutoff = 0.6 if search_path is None else _SLIP_CUTOFF
    near_names = difflib.get_close_matches(wrong, _list_modules(package, search_path), n=1, cutoff=cutoff)
    if near_names or search_path is None or name.endswith(".py"):
      raise AnystepError(
        ExitCode.CONFIG,
        "module_import",
        module=name,
        got=f"ModuleNotFoundError: No module named {part!r}",
        **({"nearest": package + dot + near_names[0] + name.removeprefix(part)} if near_names else {}),
        fix=fix_of_missing(name),
      )


def fix_of_missing(name: str) -> str:
  """Return what to do about a module that is not there."""
  if name.endswith(".py"):
    return f"name the module without .py: {name.removesuffix('.py').replace(os.sep, '.')}"
  return "correct the module's name, or run in the directory that it is in"


def prefer_current_directory() -> None:
  """Make Python look for modules in the current directory first."""
  here = os.getcwd()
  if sys.path[:1] != [here]:
    sys.path.insert(0, here)


def _find_missing(name: str) -> tuple[str, Sequence[str] | None] | None:
  """Return the first part of a dotted name that is not there, and its package's path; None if all are."""
  parts = name.split(".")
  search_path: Sequence[str] | None = None
  for count in range(1, len(parts) + 1):
    module = ".".join(parts[:count])
    if module in sys.modules:
      search_path = getattr(sys.modules[module], "__path__", ())
      continue
    spec = _find_spec(module, search_path)
    if spec is None:
      return module, search_path
    search_path = spec.submodule_search_locations or ()
  return None


def _find_spec(module: str, search_path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
  for finder in sys.meta_path:
    try:
      spec = finder.find_spec(module, search_path)
    except (ValueError, ImportError):
      # Names with NUL, or relative ones.
      continue
    except KeyError:
      # A folder without __init__.py, in a package that is not imported yet.
      spec = _make_folder_spec(module, search_path or ())
    if spec is not None:
      return spec
  return None


def _make_folder_spec(module: str, search_path: Iterable[str]) -> importlib.machinery.ModuleSpec:
  """Return the spec of a package that is a folder without `__init__.py`, or several."""
  spec = importlib.machinery.ModuleSpec(module, None, is_package=True)
  folder_name = module.rpartition(".")[2]
  spec.submodule_search_locations = [os.path.join(path, folder_name) for path in search_path]
  return spec


def _list_modules(package: str, search_path: Sequence[str] | None) -> list[str]:
  """Return names in a package that could be meant by one that is not there.

  Of modules outside packages, those of the user come into question: in the current directory and PYTHONPATH.
  """
  if search_path is None:
    search_path = [sys.path[0], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
  earlier_names = [name.rpartition(".") for name in list_earlier_names()]
  return [
    *(module.name for module in pkgutil.iter_modules(search_path)),
    *(name for above, _, name in earlier_names if above == package),
  ]
