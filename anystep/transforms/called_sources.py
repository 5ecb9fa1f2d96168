"""Hashes of what functions read from their modules: other functions, classes and plain values."""

from __future__ import annotations

import ast
import contextlib
import dis
import enum
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from anystep.earlier_names import lasting_name
from anystep.transforms.identity import class_source, describe, function_source, qualified_name

_WRAPPERS = (
  *(functools.partial, staticmethod, classmethod, property, types.MethodType),
  type(functools.cache(len)),
)
# Where they keep what they wrap.
_INNER_NAMES = ("func", "fget", "__func__", "__wrapped__")


def hash_called_sources(functions: Sequence[types.FunctionType], modules: Collection[str]) -> dict[str, str]:
  """Hash what functions read from their modules: sources of functions and classes, and plain values.

  What these functions and classes read is hashed too.

  Args:
    functions: the functions; they themselves are left out.
    modules: only what these modules define is followed; names as `describe` gives them. Functions and
      classes of others count by their names, modules and objects of others not at all.

  Returns:
    sha256 by name within the module: of sources, and of plain values and arguments of partials.
  """
  texts: dict[str, set[str]] = {}
  waiting = list(functions)
  visited = {id(function) for function in waiting}
  while waiting:
    reader = waiting.pop()
    # Descriptions of the functions themselves hold what they capture.
    captured = [] if any(reader is function for function in functions) else _list_captured(reader)
    for name, value in [*_list_read(reader), *captured]:
      described = _describe_read(value, modules)
      called = [one for one in _list_called(value) if _is_of(one, modules)]
      # A function under its own name is described by its source.
      if described is not None and [described] != [one.__qualname__ for one in called]:
        texts.setdefault(name, set()).add(repr(described))
      for one in called:
        source = class_source(one) if isinstance(one, type) else function_source(one)
        texts.setdefault(one.__qualname__, set()).add(source)
        if getattr(one, "__name__", name) != name and one is _unwrap(value):
          texts.setdefault(name, set()).add(source)
        if id(one) not in visited:
          visited.add(id(one))
          waiting.append(one)
          members = [_unwrap(member) for member in vars(one).values()] if isinstance(one, type) else ()
          methods = [member for member in members if isinstance(member, types.FunctionType)]
          waiting += [method for method in methods if _is_of(method, modules)]
  return {
    name: hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()
    for name, parts in sorted(texts.items())
  }


def _is_of(called: Any, modules: Collection[str]) -> bool:
  return lasting_name(called.__module__ or "") in modules


def _list_read(called: Any) -> list[tuple[str, Any]]:
  """Return what a function or class reads from its module, by name."""
  if isinstance(called, type):
    module_names = vars(sys.modules.get(called.__module__, types))
    names = _list_names(class_source(called))
  else:
    module_names = called.__globals__
    codes, names = [called.__code__], _list_names(function_source(called), decorators_only=True)
    for code in codes:
      codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
      steps = dis.get_instructions(code)
      names |= {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
  # `__name__` and its like are other ones in each module.
  return [(name, module_names[name]) for name in sorted(names) if name in module_names and name[:2] != "__"]


def _list_captured(called: Any) -> list[tuple[str, Any]]:
  """Return the default and captured values of a function, by name."""
  if isinstance(called, type):
    return []
  captured = [("defaults", called.__defaults__), ("keyword defaults", called.__kwdefaults__)]
  for name, cell in zip(called.__code__.co_freevars, called.__closure__ or (), strict=True):
    with contextlib.suppress(ValueError):  # A name that has no value yet.
      captured.append((name, cell.cell_contents))
  return [(f"{called.__qualname__}.{name}", value) for name, value in captured if value is not None]


def _list_names(source: str, *, decorators_only: bool = False) -> set[str]:
  """Return the names in a source, or in the decorators of the function that it defines."""
  try:
    nodes: list[ast.AST] = list(ast.parse(source).body)
  except SyntaxError:
    return set()
  if decorators_only:
    nodes = [decorator for node in nodes for decorator in getattr(node, "decorator_list", ())]
  return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _list_called(value: Any, above: tuple[int, ...] = ()) -> list[Any]:
  """Return the functions and classes in a value: in wrappers, arguments of partials, containers, objects."""
  if id(value) in above:
    return []
  if isinstance(value, type):
    return [value]
  inner: list[Any] = []
  if isinstance(value, types.FunctionType):
    # Each layer of a decorated function is one.
    return [value, *_list_called(getattr(value, "__wrapped__", None), (*above, id(value)))]
  if isinstance(value, functools.partial):
    inner = [value.func, *value.args, *value.keywords.values()]
  elif isinstance(value, types.MethodType):
    inner = [value.__func__, value.__self__]
  elif isinstance(value, _WRAPPERS):
    inner = [_unwrap(value)]
  elif isinstance(value, (list, tuple, set, frozenset)):
    inner = list(value)
  elif isinstance(value, dict):
    inner = [*value.keys(), *value.values()]
  elif not isinstance(value, types.ModuleType):
    return [type(value)]
  return [called for one in inner for called in _list_called(one, (*above, id(value)))]


def _describe_read(value: Any, modules: Collection[str], above: tuple[int, ...] = ()) -> Any:
  """Describe a value that a function reads, functions by their names; None where it does not count."""
  if id(value) in above:
    return "seen"
  again = functools.partial(_describe_read, modules=modules, above=(*above, id(value)))
  if isinstance(value, (type, types.FunctionType)):
    return value.__qualname__ if _is_of(value, modules) else qualified_name(value)
  if isinstance(value, functools.partial):
    return ["partial", again(value.func), again(value.args), again(value.keywords)]
  if isinstance(value, types.MethodType):
    return ["method", again(value.__func__), again(value.__self__)]
  if isinstance(value, _WRAPPERS):
    return again(_unwrap(value))
  if isinstance(value, (list, tuple)):
    return [again(item) for item in value]
  if isinstance(value, (set, frozenset)):
    return sorted((again(item) for item in value), key=repr)
  if isinstance(value, dict):
    return sorted(([again(key), again(item)] for key, item in value.items()), key=repr)
  if isinstance(value, (bool, int, float, str, bytes, re.Pattern)) and not isinstance(value, enum.Enum):
    return repr(value)
  if isinstance(value, (np.ndarray, np.generic)):
    return describe(value)
  if _is_of(type(value), modules):
    return [
      type(value).__qualname__,
      str(value) if isinstance(value, enum.Enum) else again(getattr(value, "__dict__", {})),
    ]
  return None


def _unwrap(value: Any) -> Any:
  """Return the function within decorators, partials, methods and properties; any other value as it is."""
  while isinstance(value, _WRAPPERS):
    value = next((inner for name in _INNER_NAMES if (inner := getattr(value, name, None))), None)
  return inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
