"""Hugging Face's models: a `config.json` beside files of safetensors."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.files.json_files import MALFORMED, read_json
from anystep.train.conversion import hugging_face_llama, hugging_face_t5
from anystep.train.conversion.anystep_format import left_over_error, unsupported_error
from anystep.train.leaves import safetensors_files
from anystep.train.leaves.leaf import PARAMETERS, Advance, Leaf, Leaves, Writer, is_floating
from anystep.train.leaves.orbax_trees import corrupt_error
from anystep.train.leaves.safetensors_files import INDEX_FILE, ONE_FILE

CONFIG = "config.json"
_MODELS = {name: model for model in (hugging_face_t5, hugging_face_llama) for name in model.ARCHITECTURES}


def is_one(path: str) -> bool:
  """Return whether a directory is a model in safetensors."""
  files = [os.path.exists(os.path.join(path, name)) for name in (ONE_FILE, INDEX_FILE)]
  return os.path.exists(os.path.join(path, CONFIG)) and any(files)


def read(path: str) -> dict[str, Leaf]:
  """Return the parameters of a model; Hugging Face keeps no step and no optimizer's state.

  Raises:
    AnystepError: 78 `checkpoint_unsupported`; 65 `checkpoint_corrupt`; 76 `checkpoint_tree`.
  """
  config_path = os.path.join(path, CONFIG)
  model, config = _read_config(config_path)
  tensors = safetensors_files.read_tensors(path)
  unread = {name for name in tensors if not model.is_ignored(name, config)}

  def read_tensor(name: str) -> Leaf:
    if name not in tensors:
      raise AnystepError(
        ExitCode.MISMATCH,
        "checkpoint_tree",
        path=path,
        leaf=name,
        expected=f"the tensors of {config_path}",
        got=f"no such tensor; the nearest are {find_nearest(name, tensors)}",
        fix="restore the directory from a copy: its files are of different models",
      )
    unread.discard(name)
    _check_tensor(config_path, name, tensors[name], _shape_of(name, model, config))
    return tensors[name]

  with _config_errors(config_path):
    leaves = model.read_leaves(config, read_tensor)
  for name in sorted(unread):
    fix = "convert a model of this type without further parts"
    raise left_over_error(f"the model of {config_path}", name, tensors[name], fix=fix)
  return leaves


def _shape_of(name: str, model: ModuleType, config: Mapping[str, Any]) -> tuple[int | None, ...]:
  """Return the shape that a configuration gives a tensor; None for sizes that it does not say."""
  axes = next(axes for pattern, axes in model.SHAPES if re.fullmatch(pattern, name))
  sizes: list[list[Any]] = [[config.get(size) for size in axis.split(" * ")] for axis in axes]
  return tuple(None if None in factors else math.prod(factors) for factors in sizes)


def _check_tensor(config_path: str, name: str, leaf: Leaf, shape: tuple[int | None, ...]) -> None:
  fields = {"path": config_path, "leaf": name, "got": leaf.describe()}
  if not is_floating(leaf.dtype):
    raise AnystepError(
      ExitCode.CONFIG,
      "checkpoint_unsupported",
      **fields,
      expected="tensors of floating point",
      fix="convert the model before it was quantized",
    )
  is_equal = [size in (None, axis) for size, axis in zip(shape, leaf.shape, strict=False)]
  if len(shape) != len(leaf.shape) or not all(is_equal):
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    raise AnystepError(
      ExitCode.MISMATCH,
      "checkpoint_tree",
      **fields,
      expected=f"the shape ({sizes}), by the sizes of config.json",
      fix="restore the directory from a copy: its files are of different models",
    )


def _check_values(config: Mapping[str, Any], model: ModuleType) -> None:
  """Refuse values of a configuration that no model can have.

  Raises:
    ValueError: there is one.
  """
  names = {size for _, axes in model.SHAPES for axis in axes for size in axis.split(" * ")}
  for name in sorted(names | model.COUNTS):
    value = config.get(name)
    if value is not None and (type(value) is not int or value < 1):
      raise ValueError(f"{name} {value!r}, not a whole number above 0")
  if type(config["tie_word_embeddings"]) is not bool:
    raise ValueError(f"tie_word_embeddings {config['tie_word_embeddings']!r}, not true or false")


def read_settings(path: str) -> dict[str, Any]:
  """Return what a model's numbers depend on besides its leaves, see `SavedCheckpoint`.

  Raises:
    AnystepError: 78 `checkpoint_unsupported`; 65 `checkpoint_corrupt`.
  """
  config_path = os.path.join(path, CONFIG)
  model, config = _read_config(config_path)
  with _config_errors(config_path):
    return model.read_settings(config)


def _read_config(path: str) -> tuple[ModuleType, dict[str, Any]]:
  with _config_errors(path):
    config: dict[str, Any] = dict(read_json(path))
    model = _MODELS.get(config["model_type"])
    if model is None:
      raise unsupported_error(f"a model of type {', '.join(_MODELS)}", config["model_type"], path=path)
    if config.get("quantization_config") is not None:
      raise unsupported_error("a model that is not quantized", "a quantization_config", path=path)
    config = model.with_defaults(path, config)
    _check_values(config, model)
    return model, config


@contextlib.contextmanager
def _config_errors(path: str) -> Iterator[None]:
  """Report a configuration that lacks something as a corrupt file."""
  try:
    yield
  except MALFORMED as error:
    raise corrupt_error(path, error) from error


def plan_writing(
  leaves: Leaves,
  settings: Mapping[str, Any] | None = None,
  *,
  max_file_bytes: int = safetensors_files.MAX_FILE_BYTES,
) -> Writer:
  """Return what writes the parameters of a T5 or a Llama.

  Args:
    leaves: leaves by T5X's names.
    settings: what a model's numbers depend on besides its leaves, see `SavedCheckpoint`.
    max_file_bytes: see `safetensors_files.write_tensors`.

  Raises:
    AnystepError: 78 `checkpoint_unsupported` for other models; 76 `checkpoint_tree` for parameters that none
      has.
  """
  parameters = {name: leaf for name, leaf in leaves.items() if name.startswith(PARAMETERS)}
  model = hugging_face_llama if hugging_face_llama.is_one(parameters) else hugging_face_t5
  tensors, config = model.as_model(parameters, settings or {})

  def write(path: str, advance: Advance) -> None:
    os.makedirs(path)
    safetensors_files.write_tensors(path, tensors, advance, max_file_bytes=max_file_bytes)
    with open(os.path.join(path, CONFIG), "w") as file:
      json.dump(config, file, indent=2, sort_keys=True)

  return write
