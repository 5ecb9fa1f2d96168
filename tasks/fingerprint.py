"""What decided a task's cached examples (design section 4, fingerprint)."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import math
import os
import platform
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.manifest import Fingerprint, Manifest

# Of what follows; a cache of another version is read by the program that wrote it.
_VERSION = 1
_LIBRARIES = ("anystep", "seqio", "tensorflow", "tensorflow-datasets", "tensorflow-text", "sentencepiece")


def cached_preprocessors(task: seqio.Task, cache_at: str) -> Sequence[Callable]:
  """What the cache job runs: what stands before the placeholder, all with `cache_at` end or without one."""
  steps = list(task.preprocessors)
  places = [k for k, step in enumerate(steps) if isinstance(step, seqio.CacheDatasetPlaceholder)]
  if not places:
    return steps
  return steps[: places[0]] if cache_at == "placeholder" else steps[: places[0]] + steps[places[0] + 1 :]


def reader_part(
  task: seqio.Task, *, cache_at: str, task_feature_lengths: Mapping[str, int] | None
) -> dict[str, Any]:
  """What a reader's registered task must have in common with the one that was cached, as JSON.

  Functions that a preprocessor merely calls are not covered.
  """
  return {
    "version": _VERSION,
    "task": task.name,
    "output_features": {name: _feature(feature) for name, feature in task.output_features.items()},
    "preprocessors": [describe(step) for step in cached_preprocessors(task, cache_at)],
    "cache_at": cache_at,
    "task_feature_lengths": dict(task_feature_lengths) if task_feature_lengths else None,
  }


def provenance_part(task: seqio.Task, *, seed: int, base_seed: int) -> dict[str, Any]:
  """Where the examples came from and what made them, as JSON; nothing in it depends on the machine."""
  return {
    "source": _qualified_name(type(task.source)),
    "source_arguments": _source_arguments(task.source),
    "python": platform.python_version(),
    "libraries": {name: _version(name) for name in _LIBRARIES},
    "seed": seed,
    "base_seed": base_seed,
  }


def check_reader(task: seqio.Task, manifest: Manifest) -> None:
  """Refuses a registered task that would not make the cached examples.

  Raises:
    AnystepError: 76 `task_changed` names the first item that differs.
  """
  registered = reader_part(
    task, cache_at=manifest.cache_at, task_feature_lengths=manifest.task_feature_lengths
  )
  difference = _first_difference(manifest.fingerprint.reader, registered)
  if difference:
    item, cached, now = difference
    raise AnystepError(
      ExitCode.MISMATCH,
      "task_changed",
      task=task.name,
      item=item,
      expected=cached,
      got=now,
      fix="undo the change to the task, or cache it again under another name or with --overwrite",
    )


def provenance_difference(task: seqio.Task, manifest: Manifest) -> str | None:
  """Where the cached examples' origin differs from what the task names now: worth a word, not refused."""
  now = provenance_part(task, seed=manifest.seed, base_seed=manifest.base_seed)
  difference = _first_difference(manifest.fingerprint.provenance, now)
  return None if difference is None else "{}: {} when it was cached, {} now".format(*difference)


def fingerprint(
  task: seqio.Task,
  *,
  cache_at: str,
  task_feature_lengths: Mapping[str, int] | None,
  seed: int,
  base_seed: int,
) -> Fingerprint:
  """The task's fingerprint for its manifest."""
  return Fingerprint(
    reader=reader_part(task, cache_at=cache_at, task_feature_lengths=task_feature_lengths),
    provenance=provenance_part(task, seed=seed, base_seed=base_seed),
  )


def describe(value: Any) -> Any:
  """A value as JSON that is the same in every process: functions by name, captured values and source.

  >>> describe(functools.partial(len, 3))
  {'partial': 'builtins.len', 'args': [3], 'kwargs': {}}
  >>> describe({"b": 1, "a": (2.5, None)})
  {'a': [2.5, None], 'b': 1}
  """
  return _describe(value, ())


def _describe(value: Any, seen: tuple[int, ...]) -> Any:
  if isinstance(value, float) and not math.isfinite(value):
    return {"float": str(value)}
  if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
    return value
  if id(value) in seen:
    return {"seen": type(value).__qualname__}
  again = functools.partial(_describe, seen=(*seen, id(value)))
  if isinstance(value, enum.Enum):
    return {"enum": f"{_qualified_name(type(value))}.{value.name}"}
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
  if isinstance(value, seqio.Vocabulary):
    return _vocabulary(value)
  if isinstance(value, seqio.Feature):
    return _feature(value)
  if isinstance(value, types.MethodType):
    return {"method": again(value.__func__), "of": again(value.__self__)}
  if isinstance(value, types.FunctionType):
    return _function(value, again)
  if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
    return _qualified_name(value)
  if dataclasses.is_dataclass(value):
    fields = {field.name: again(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"object": _qualified_name(type(value)), "fields": fields}
  if hasattr(value, "numpy"):
    return again(np.asarray(value))
  return _object(value, again)


def _object(value: Any, again: Callable[[Any], Any]) -> dict[str, Any]:
  """An object by its class, its attributes or else its repr, and its code where it can be called."""
  described: dict[str, Any] = {"object": _qualified_name(type(value))}
  if hasattr(value, "__dict__"):
    described["fields"] = again(vars(value))
  elif type(value).__repr__ is not object.__repr__:
    described["repr"] = repr(value)
  if callable(value) and isinstance(type(value).__call__, types.FunctionType):
    described["call"] = again(type(value).__call__)
  return described


def _function(function: types.FunctionType, again: Callable[[Any], Any]) -> dict[str, Any]:
  """A function by name, captured and default values and source; of a decorated one, what it wraps."""
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
  return {
    "function": _qualified_name(inner),
    "captured": layers,
    "defaults": again([inner.__defaults__, inner.__kwdefaults__]),
    "source": _source(inner),
  }


@functools.cache
def _parsed(file: str) -> ast.Module | None:
  try:
    with open(file, encoding="utf-8") as source:
      return ast.parse(source.read())
  except (OSError, SyntaxError):
    return None


def _source(function: types.FunctionType) -> str:
  """The source as `ast.unparse` gives it without docstrings; the bytecode's sha256 where there is none."""
  code = function.__code__
  tree = _parsed(inspect.getsourcefile(function) or "")
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
    return "bytecode:" + _sha256(repr(_code_parts(code)).encode())
  return ast.unparse(_without_docstrings(nodes[0]))


def _code_parts(code: types.CodeType) -> list[Any]:
  constants = [_code_parts(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
  return [code.co_code, code.co_names, constants]


def _body_column(node: Any) -> int:
  body = node.body[0] if isinstance(node.body, list) else node.body
  return body.col_offset


def _without_docstrings(node: ast.AST) -> ast.AST:
  copy = ast.parse(ast.unparse(node))
  for inner in ast.walk(copy):
    body = getattr(inner, "body", None)
    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(
      inner, clean=False
    ):
      inner.body = body[1:] or [ast.Pass()]  # type: ignore[index]
  return copy


def _feature(feature: seqio.Feature) -> dict[str, Any]:
  return {
    "class": _qualified_name(type(feature)),
    "vocabulary": _vocabulary(feature.vocabulary),
    "add_eos": feature.add_eos,
    "required": feature.required,
    "dtype": feature.dtype.name if hasattr(feature.dtype, "name") else str(feature.dtype),
    "rank": feature.rank,
  }


def _vocabulary(vocabulary: seqio.Vocabulary) -> dict[str, Any]:
  described = {
    "class": _qualified_name(type(vocabulary)),
    "size": vocabulary.vocab_size,
    "extra_ids": vocabulary.extra_ids,
    "pad_id": vocabulary.pad_id,
    "eos_id": vocabulary.eos_id,
    "unk_id": vocabulary.unk_id,
  }
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    return described | {"content_sha256": _sha256(vocabulary.sp_model)}
  if type(vocabulary) in (seqio.ByteVocabulary, seqio.PassThroughVocabulary):
    return described
  return described | {"values": _plain_attributes(vocabulary)}


def _plain_attributes(vocabulary: seqio.Vocabulary) -> dict[str, Any]:
  """What a vocabulary of another kind is made of: its plain values, files by their content."""
  attributes = {}
  for name, value in sorted(vars(vocabulary).items()):
    if isinstance(value, str) and os.path.isfile(value):
      with open(value, "rb") as file:
        attributes[name] = _sha256(file.read())
    elif isinstance(value, (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)):
      attributes[name] = describe(value)
  return attributes


def _source_arguments(source: seqio.DataSource) -> dict[str, Any]:
  """What a source reads, as far as its kind shows it; places on this machine are left out."""
  plain = {
    name.lstrip("_"): value
    for name, value in sorted(vars(source).items())
    if isinstance(value, (bool, int, float, str, tuple, list, dict)) and "/" not in str(value)
  }
  described = {name: describe(value) for name, value in plain.items()}
  if isinstance(source, seqio.FunctionDataSource):
    described["function"] = describe(source._dataset_fn)
  if isinstance(source, seqio.TfdsDataSource):
    described["tfds_name"] = source.tfds_dataset.name
  if isinstance(source, seqio.FileDataSource):
    described["files"] = {split: _files(source.list_shards(split)) for split in source.splits}
  return described


def _files(paths: Sequence[str]) -> list[list[Any]]:
  """Names and sizes, in the order in which they are read."""
  return [[os.path.basename(path), epath.Path(path).stat().length] for path in paths]


def _first_difference(cached: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
  if isinstance(cached, Mapping) and isinstance(now, Mapping):
    for key in sorted({*cached, *now}):
      difference = _first_difference(cached.get(key), now.get(key), f"{path}.{key}".lstrip("."))
      if difference:
        return difference
    return None
  if isinstance(cached, list) and isinstance(now, list) and len(cached) == len(now):
    for place, (left, right) in enumerate(zip(cached, now, strict=True)):
      difference = _first_difference(left, right, f"{path}[{place}]")
      if difference:
        return difference
    return None
  return None if cached == now else (path, cached, now)


def _qualified_name(value: Any) -> str:
  name = getattr(value, "__qualname__", None) or value.__name__
  module = getattr(value, "__module__", None)
  return f"{module}.{name}" if module else name


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()
