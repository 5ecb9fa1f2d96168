"""Values of built objects by name: the values that decide parameters and losses, whatever gin's text.

Objects are walked by their fields, functions by their captured values. A function or class of a library is
known by its name only, since its source differs between versions; a user's own also by its source.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

from anystep.earlier_names import lasting_name
from anystep.files.json_files import canonical_json
from anystep.transforms.identity import class_source, describe, function_source

_LIBRARIES = ("anystep", "jax", "jaxlib", "flax", "optax", "numpy", "functools", "builtins", "ml_dtypes")
# Fields of a Linen module that do not affect what it computes.
_OF_MODULES = ("parent", "name")
_LONGEST_TEXT = 200
# Metadata of a dataclass field that is newer than version 0.1, which computed what its default does (but for
# rounding).
LEFT_OUT_AT_DEFAULT = types.MappingProxyType({"anystep_left_out_at_default": True})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Value = None | bool | int | float | str | list


class Transformation(optax.GradientTransformationExtraArgs):
  """Optax transformation with the name and arguments of the function that made it.

  Attributes:
    made_by: name of the function that made it.
    arguments: the function's arguments, defaults included.
  """

  made_by: str
  arguments: Mapping[str, Any]

  @classmethod
  def of(
    cls,
    transformation: optax.GradientTransformationExtraArgs,
    made_by: Callable,
    arguments: Mapping[str, Any],
  ) -> Transformation:
    """Return the transformation, with the name and arguments of the function that made it."""
    named = cls(*transformation)
    named.made_by, named.arguments = _qualified_name(made_by), arguments
    return named


def record_maker(function: Callable, made_by: Callable, arguments: Mapping[str, Any]) -> Callable:
  """Return a function, with the name and arguments of the function that made it as its attributes."""
  function.made_by, function.arguments = _qualified_name(made_by), arguments  # type: ignore[attr-defined]
  return function


def built_values(objects: Mapping[str, Any], *, leave_out: Iterable[str] = ()) -> dict[str, Value]:
  """Return every plain value in objects, by its path.

  Args:
    objects: objects by the first part of their paths.
    leave_out: paths that are skipped.

  Returns:
    JSON values, sorted by path.

  >>> built_values({"a": dict(rate=0.1, sizes=(1, 2)), "b": partial(math.pow, 2.0)})
  {'a.rate': 0.1, 'a.sizes': [1, 2], 'b': 'math.pow', 'b.args': [2.0]}
  """
  walk = _Walk(frozenset(leave_out))
  for name, value in objects.items():
    walk.visit(name, value, ())
  return dict(sorted(walk.values.items()))


class _Walk:
  """Collector of values. If two values have one path, the second path gets a number."""

  def __init__(self, leave_out: frozenset[str]):
    self._leave_out = leave_out
    self.values: dict[str, Value] = {}

  def visit(self, path: str, value: Any, above: tuple[int, ...]) -> None:
    """Record a value, or the values inside it."""
    if path in self._leave_out:
      return
    plain, is_plain = _to_plain(value)
    if is_plain:
      self._note(path, plain)
    elif id(value) in above:
      self._note(path, "itself")
    else:
      name, parts = _take_apart(value)
      if name is not None:
        self._note(path, name)
      for part, inner in parts:
        self.visit(f"{path}{part}", inner, (*above, id(value)))

  def _note(self, path: str, value: Value) -> None:
    free, number = path, 2
    while free in self.values and self.values[free] != value:
      free, number = f"{path}#{number}", number + 1
    self.values[free] = value


def _to_plain(value: Any) -> tuple[Value, bool]:
  """Return (JSON value, True) for a plain value, (None, False) for one that contains others."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(value), True
  if isinstance(value, enum.Enum):
    return f"{_qualified_name(type(value))}.{value.name}", True
  if value is None or isinstance(value, (bool, int, float, str)):
    return _shorten(value), True
  if isinstance(value, np.dtype):
    return value.name, True
  if isinstance(value, np.generic) and value.dtype.kind in "biuf":
    return _to_plain(value.item())
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    array = np.asarray(value)
    content = hashlib.sha256(array.tobytes()).hexdigest()
    return f"{array.dtype} {array.shape} sha256 {content}", True
  if isinstance(value, (bytes, set, frozenset)):
    return _shorten(canonical_json(describe(value))), True
  if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
    items = [_to_plain(item) for item in value]
    if all(is_plain for _, is_plain in items):
      return [item for item, _ in items], True
  return None, False


def _take_apart(value: Any) -> tuple[str | None, Iterator[tuple[str, Any]]]:
  """Return the name of a value's kind, and the values inside it as (rest of the path, value)."""
  if hasattr(value, "made_by") and hasattr(value, "arguments"):
    return value.made_by, _list_members(value.arguments)
  if isinstance(value, optax.GradientTransformation):
    return None, _take_apart_transformation(value)
  if isinstance(value, Mapping):
    return None, _list_members({str(key): item for key, item in value.items()})
  if hasattr(value, "_fields"):
    return _qualified_name(type(value)), _list_members(value._asdict())
  if isinstance(value, (list, tuple)):
    return None, ((f"[{index}]", item) for index, item in enumerate(value))
  if isinstance(value, partial):
    parts = {"args": value.args, **{f"args.{name}": item for name, item in value.keywords.items()}}
    name, inner = _take_apart(value.func)
    return name, itertools.chain(
      _list_members({name: item for name, item in parts.items() if item != ()}), inner
    )
  if isinstance(value, types.MethodType):
    return _qualified_name(value.__func__), _list_members({"self": value.__self__})
  if callable(value) and isinstance(inspect.unwrap(value), types.FunctionType):
    return _take_apart_function(value)
  if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType, np.ufunc)):
    return _qualified_name(value), iter(())
  if dataclasses.is_dataclass(value):
    left_out = _OF_MODULES if isinstance(value, nn.Module) else ()
    fields = [field for field in dataclasses.fields(value) if field.name not in left_out]
    members = {field.name: getattr(value, field.name) for field in fields if not _is_left_out(field, value)}
    return _class_name(type(value)), _list_members(members | getattr(value, "deciding_values", {}))
  if hasattr(value, "__dict__"):
    return _class_name(type(value)), _list_members(vars(value))
  return _shorten(_ADDRESS.sub("", repr(value))), iter(())


def _is_left_out(field: dataclasses.Field, value: Any) -> bool:
  return field.metadata.items() >= LEFT_OUT_AT_DEFAULT.items() and getattr(value, field.name) == field.default


def _take_apart_transformation(value: optax.GradientTransformation) -> Iterator[tuple[str, Any]]:
  """Yield both functions under one name, since most capture the same values."""
  for function in (value.update, value.init):
    yield "", function


def _take_apart_function(function: Callable) -> tuple[str | None, Iterator[tuple[str, Any]]]:
  """Return a function's name and captured values; for a user's own also defaults and source."""
  inner = inspect.unwrap(function)
  captured = inspect.getclosurevars(inner).nonlocals if inner.__closure__ else {}
  if inner is optax.init_empty_state:
    return None, iter(())
  if _qualified_name(inner) == "optax.with_extra_args_support.<locals>.update":
    # optax wraps transformations without further arguments; the wrapper itself has no meaning.
    return None, _take_apart_transformation(captured["tx"])
  name = _qualified_name(inner)
  for half in ("init", "update"):
    # One optax function makes both functions of a transformation, and its name is recorded.
    name = name.removesuffix(f".<locals>.{half}_fn").removesuffix(f".<locals>.{half}")
  parts = {_join_names(variable): item for variable, item in captured.items()}
  bound = _find_gin_bindings(function)
  if not _is_of_library(inner):
    parts |= {"defaults": [inner.__defaults__, inner.__kwdefaults__]}
    name += f" {_source_hash(inner)}"
  return name, itertools.chain(_list_members(parts), _list_members(bound))


def _join_names(variable: str) -> str:
  """Return one name for a value that a transformation's two functions captured under two names."""
  return variable.removeprefix("init_").removeprefix("update_")


def _find_gin_bindings(function: Callable) -> dict[str, Any]:
  """Return the arguments that gin will bind when the function is called."""
  gin = sys.modules.get("gin")
  if gin is None:
    return {}
  try:
    return dict(gin.get_bindings(function, resolve_references=True))
  except ValueError:
    return {}


def _list_members(members: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  return ((f".{name}", item) for name, item in sorted(members.items()))


def _class_name(kind: type) -> str:
  return _qualified_name(kind) if _is_of_library(kind) else f"{_qualified_name(kind)} {_source_hash(kind)}"


def _source_hash(value: Any) -> str:
  source = function_source(value) if isinstance(value, types.FunctionType) else class_source(value)
  return f"source {hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _is_of_library(value: Any) -> bool:
  return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _qualified_name(value: Any) -> str:
  """Return a qualified name; for libraries without the module, which may move between versions."""
  name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or repr(value)
  module = getattr(value, "__module__", None) or ""
  if _is_of_library(value) and not module.startswith("anystep."):
    module = module.partition(".")[0]
  return f"{lasting_name(module)}.{name}" if module else name


def _shorten(value: Any) -> Any:
  """Return a short text unchanged, and the hash of a long one."""
  if isinstance(value, str) and len(value) > _LONGEST_TEXT:
    return f"sha256 {hashlib.sha256(value.encode()).hexdigest()}"
  return value
