"""Packages that import a public name when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
  """Return a package's `__getattr__`, which imports names from modules that are slow to import.

  Args:
    package: the package's name.
    modules: the module within the package that defines a name, by public name.
  """

  def get(name: str) -> Any:
    if name not in modules:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

  return get
