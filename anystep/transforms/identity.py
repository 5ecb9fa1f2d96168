"""Descriptions of values and functions as JSON; equal values have equal descriptions in every process."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import math
import os
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anystep.earlier_names import lasting_name


def describe(value: Any) -> Any:
  """Describe a value as JSON, equally in every process; functions by name, captured values and source.

  >>> describe(functools.partial(len, 3))
  {'partial': 'builtins.len', 'args': [3], 'kwargs': {}}
  >>> describe({"b": 1, "a": (2.5, None)})
  {'a': [2.5, None], 'b': 1}
  """
  return _describe(value, (), {})


def find_functions(value: Any) -> dict[str, list[types.FunctionType]]:
  """Return the functions whose sources a value's description holds, by the names that they have there."""
  functions: dict[str, list[types.FunctionType]] = {}
  _describe(value, (), functions)
  return functions


def _describe(value: Any, seen: tuple[int, ...], functions: dict[str, list[types.FunctionType]]) -> Any:
  if isinstance(value, float) and not math.isfinite(value):
    return {"float": str(value)}
  if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
    return value
  if id(value) in seen:
    return {"seen": type(value).__qualname__}
  again = functools.partial(_describe, seen=(*seen, id(value)), functions=functions)
  if isinstance(value, enum.Enum):
    return {"enum": f"{qualified_name(type(value))}.{value.name}"}
  if isinstance(value, bytes):
    return {"bytes_sha256": hashlib.sha256(value).hexdigest()}
  if isinstance(value, np.ndarray) and value.dtype.hasobject:
    return {"array": "objects", "values": again(value.tolist())}
  if isinstance(value, (np.ndarray, np.generic)):
    return {"array": str(value.dtype), "shape": list(value.shape), "sha256": _sha256(value.tobytes())}
  if isinstance(value, Mapping):
    return {str(key): again(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
  if isinstance(value, (list, tuple)):
    return [again(item) for item in value]
  if isinstance(value, (set, frozenset)):
    return {"set": sorted((again(item) for item in value), key=str)}
  if isinstance(value, functools.partial):
    return {"partial": again(value.func), "args": again(value.args), "kwargs": again(value.keywords)}
  if isinstance(value, _get_seqio_class("Vocabulary")):
    return _describe_vocabulary(value)
  if isinstance(value, _get_seqio_class("Feature")):
    return _describe_feature(value)
  if isinstance(value, types.MethodType):
    return {"method": again(value.__func__), "of": again(value.__self__)}
  if isinstance(value, types.FunctionType):
    inner = inspect.unwrap(value)
    functions.setdefault(qualified_name(inner), []).append(inner)
    return _describe_function(value, again)
  if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
    return qualified_name(value)
  if dataclasses.is_dataclass(value):
    fields = {field.name: again(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"object": qualified_name(type(value)), "fields": fields}
  if hasattr(value, "numpy"):
    return again(np.asarray(value))
  return _describe_object(value, again)


def _describe_object(value: Any, again: Callable[[Any], Any]) -> dict[str, Any]:
  """Describe an object by its class, its attributes or else its repr, and its code if it can be called."""
  described: dict[str, Any] = {"object": qualified_name(type(value))}
  if hasattr(value, "__dict__"):
    described["fields"] = again(vars(value))
  elif type(value).__repr__ is not object.__repr__:
    described["repr"] = repr(value)
  if callable(value) and isinstance(type(value).__call__, types.FunctionType):
    described["call"] = again(type(value).__call__)
  return described


def _describe_function(function: types.FunctionType, again: Callable[[Any], Any]) -> dict[str, Any]:
  """Describe a function by name, captured and default values and source; a decorated one by the inner one."""
  inner = inspect.unwrap(function)
  layers, layer = [], function
  while True:
    captured = inspect.getclosurevars(layer).nonlocals if layer.__closure__ else {}
    layers.append(
      {
        name: again(item)
        for name, item in sorted(captured.items())
        if item is not getattr(layer, "__wrapped__", None)
      }
    )
    if layer is inner:
      break
    layer = layer.__wrapped__  # type: ignore[attr-defined]
  described = {
    "function": qualified_name(inner),
    "captured": layers,
    "defaults": again([inner.__defaults__, inner.__kwdefaults__]),
    "source": function_source(inner),
  }
  bound = _get_gin_bindings(function)
  return {**described, "gin": bound} if bound else described


def _get_gin_bindings(function: types.FunctionType) -> dict[str, str]:
  """Return the arguments that a gin configuration binds for a function; none if gin does not know it."""
  gin = sys.modules.get("gin")
  if gin is None:
    return {}
  try:
    bindings = gin.get_bindings(function, resolve_references=False)
  except ValueError:
    return {}
  return {name: repr(value) for name, value in sorted(bindings.items())}


@functools.cache
def _parse_file(file: str) -> ast.Module | None:
  try:
    with open(file, encoding="utf-8") as source:
      return ast.parse(source.read())
  except (OSError, SyntaxError):
    return None


def function_source(function: types.FunctionType) -> str:
  """Return the source as of `ast.unparse` without docstrings; the bytecode's sha256 if there is no source."""
  code = function.__code__
  tree = _parse_file(inspect.getsourcefile(function) or "")
  nodes = [
    node
    for node in (ast.walk(tree) if tree else ())
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    and min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) == code.co_firstlineno
    and getattr(node, "name", "<lambda>") == code.co_name
  ]
  if len(nodes) > 1:
    columns = {column for _, _, column, _ in code.co_positions() if column is not None}
    nodes = [node for node in nodes if _body_column(node) in columns] or nodes
  if not nodes:
    return "bytecode:" + _sha256(repr(_list_code_parts(code)).encode())
  return ast.unparse(_remove_docstrings(nodes[0]))


def class_source(kind: type) -> str:
  """Return a class's source as of `ast.unparse` without docstrings; an empty text if there is no source."""
  try:
    return ast.unparse(_remove_docstrings(ast.parse(textwrap.dedent(inspect.getsource(kind)))))
  except (OSError, TypeError, SyntaxError):
    return ""


def _list_code_parts(code: types.CodeType) -> list[Any]:
  constants = [_list_code_parts(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
  return [code.co_code, code.co_names, constants]


def _body_column(node: Any) -> int:
  body = node.body[0] if isinstance(node.body, list) else node.body
  return body.col_offset


def _remove_docstrings(node: ast.AST) -> ast.AST:
  copy = ast.parse(ast.unparse(node))
  for inner in ast.walk(copy):
    body = getattr(inner, "body", None)
    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(
      inner, clean=False
    ):
      inner.body = body[1:] or [ast.Pass()]  # type: ignore[index]
  return copy


def _get_seqio_class(name: str) -> Any:
  """Return a class of SeqIO for `isinstance`; `()` if SeqIO is not loaded, since then no value is of it."""
  return getattr(sys.modules.get("seqio"), name, ())


def _describe_feature(feature: Any) -> dict[str, Any]:
  return {
    "class": qualified_name(type(feature)),
    "vocabulary": _describe_vocabulary(feature.vocabulary),
    "add_eos": feature.add_eos,
    "required": feature.required,
    "dtype": feature.dtype.name if hasattr(feature.dtype, "name") else str(feature.dtype),
    "rank": feature.rank,
  }


def _describe_vocabulary(vocabulary: Any) -> dict[str, Any]:
  described = {
    "class": qualified_name(type(vocabulary)),
    "size": vocabulary.vocab_size,
    "extra_ids": vocabulary.extra_ids,
    "pad_id": vocabulary.pad_id,
    "eos_id": vocabulary.eos_id,
    "unk_id": vocabulary.unk_id,
  }
  if isinstance(vocabulary, _get_seqio_class("SentencePieceVocabulary")):
    return described | {"content_sha256": _sha256(vocabulary.sp_model)}
  if hasattr(type(vocabulary), "content_sha256") and hasattr(type(vocabulary), "special_tokens"):
    # A vocabulary that describes its file and its way of reading it.
    return described | {
      "content_sha256": vocabulary.content_sha256,
      "special_tokens": describe(vocabulary.special_tokens),
    }
  if type(vocabulary) in (_get_seqio_class("ByteVocabulary"), _get_seqio_class("PassThroughVocabulary")):
    return described
  return described | {"values": _describe_attributes(vocabulary)}


def _describe_attributes(vocabulary: Any) -> dict[str, Any]:
  """Describe a vocabulary of another kind by its plain attributes, and files by their content."""
  attributes = {}
  for name, value in sorted(vars(vocabulary).items()):
    if isinstance(value, str) and os.path.isfile(value):
      with open(value, "rb") as file:
        attributes[name] = _sha256(file.read())
    elif isinstance(value, (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)):
      attributes[name] = describe(value)
  return attributes


def qualified_name(value: Any) -> str:
  name = getattr(value, "__qualname__", None) or value.__name__
  module = getattr(value, "__module__", None)
  return f"{lasting_name(module)}.{name}" if module else name


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()
