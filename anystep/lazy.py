"""Packages whose public names are imported when somebody asks for one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
  """Return a package's `__getattr__`: its names are those of modules that are heavy to import.

  Args:
    package: the package's name.
    modules: by public name, the module that defines it, within the package.
  """

  def get(name: str) -> Any:
    if name not in modules:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

  return get
