"""Gin files and bindings, checked before any object is built from them."""

from __future__ import annotations

import difflib
import importlib.resources
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
from etils import epath

from anystep.errors import AnystepError, ExitCode, find_nearest, one_line
from anystep.files import storage
from anystep.files.input_files import read_file

_MACRO = "gin.macro"
_MAX_GIN_BYTES = 1 << 24


def load_configuration(
  gin_files: Sequence[str], bindings: Mapping[str, str], *, search_paths: Sequence[str] = ()
) -> None:
  """Load gin's configuration from files and bindings.

  Args:
    gin_files: found in the current directory, in search_paths, or beside anystep's own `gin_configs/`;
      later ones override earlier ones.
    bindings: `NAME` to value, as gin writes it; they override the files.
    search_paths: further directories of gin files.

  Raises:
    AnystepError: 78 `gin_file`, `gin_binding`, `gin_unknown_macro`, `gin_required`.
  """
  gin.clear_config()
  # gin would also read paths as packages of the current directory, and fail if one is incomplete.
  gin.config._FILE_READERS[:] = [(_open_gin_file, lambda path: epath.Path(path).is_file())]
  for path in [*search_paths, str(Path(str(importlib.resources.files("anystep.gin_configs"))).parent)]:
    gin.add_config_file_search_path(path)
  for name in gin_files:
    try:
      gin.parse_config_file(name)
    except Exception as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "gin_file",
        path=name,
        got=one_line(error),
        fix="correct the file, or --gin_file and --gin_search_paths",
      ) from error
  macros = {scope for (scope, selector) in gin.config._CONFIG if selector == _MACRO}
  for name, value in bindings.items():
    if _is_macro(name) and name not in macros:
      raise AnystepError(
        ExitCode.CONFIG,
        "gin_unknown_macro",
        expected="a name that the gin files define",
        got=name,
        nearest=find_nearest(name, macros),
        fix=f"correct --gin.{name}",
      )
    try:
      gin.parse_config(f"{name} = {value}")
    except Exception as error:
      example = f"--gin.{name}=\"'text'\""
      raise AnystepError(
        ExitCode.CONFIG,
        "gin_binding",
        got=f"--gin.{name}={value}: {one_line(error)}",
        fix=f"write the value as Python does; the shell needs quotes around quotes: {example}",
      ) from error
  _check_required()
  _check_used()


def _open_gin_file(path: str) -> io.StringIO:
  return io.StringIO(read_file(path, limit_bytes=_MAX_GIN_BYTES).decode())


def build(configurable: type) -> Any:
  """Build an object of a configurable class, with its arguments from the configuration.

  Raises:
    AnystepError: 78 `gin_value` with the message of the class or of one of its arguments.
  """
  try:
    return gin.get_configurable(configurable)()
  except AnystepError:
    raise
  except Exception as error:
    raise AnystepError(
      ExitCode.CONFIG, "gin_value", got=one_line(error), fix="correct the value in the gin file or flag"
    ) from error


def configuration_text() -> str:
  """Return the whole configuration, as gin formats it."""
  return gin.config_str(max_line_length=110)


def record_configuration(model_dir: epath.PathLike) -> None:
  """Write the configuration to `config.gin` in model_dir, and print the lines that changed.

  Raises:
    AnystepError: 65 `configuration_invalid` if the existing file is not text.
  """
  path = epath.Path(model_dir) / "config.gin"
  text = configuration_text()
  before = _read_recorded(path)
  if before is not None:
    for line in difflib.ndiff(before.splitlines(), text.splitlines()):
      if line.startswith(("+ ", "- ")) and not line[2:].startswith("#"):
        print(f"the configuration changed: {line}", file=sys.stderr)
  path.parent.mkdir(parents=True, exist_ok=True)
  storage.put(path, text.encode())


def _read_recorded(path: epath.Path) -> str | None:
  """Return the configuration of the previous start; None if there is none."""
  try:
    return read_file(path, limit_bytes=_MAX_GIN_BYTES).decode()
  except FileNotFoundError:
    return None
  except (ValueError, IsADirectoryError) as error:
    raise AnystepError(
      ExitCode.DATA,
      "configuration_invalid",
      path=path,
      got=one_line(error),
      fix="restore the file from a copy, or remove it: the run writes it anew",
    ) from error


def _check_required() -> None:
  """Refuse a configuration in which a REQUIRED value is missing."""
  missing = sorted(
    scope if selector == _MACRO else f"{scope}/{selector}.{parameter}".lstrip("/")
    for (scope, selector), parameters in gin.config._CONFIG.items()
    for parameter, value in parameters.items()
    if any(_is_required(reference) for reference in _references(value))
  )
  if missing:
    raise AnystepError(
      ExitCode.CONFIG,
      "gin_required",
      expected=f"values for {', '.join(missing)}",
      got="none",
      fix=f"set them in a gin file or as --gin.{missing[0]}=…",
    )


def _check_used() -> None:
  """Refuse an unused macro whose name resembles a used one; report other unused macros."""
  references = {
    str(reference).removeprefix("%")
    for parameters in gin.config._CONFIG.values()
    for value in parameters.values()
    for reference in _references(value)
    if isinstance(reference, gin.config.ConfigurableReference)
  }
  for name in sorted({scope for scope, selector in gin.config._CONFIG if selector == _MACRO} - references):
    near_names = difflib.get_close_matches(name, references, n=1, cutoff=0.8)
    if near_names:
      raise AnystepError(
        ExitCode.CONFIG,
        "gin_unknown_macro",
        expected="a name that something uses",
        got=name,
        nearest=near_names[0],
        fix=f"correct {name} in the gin files",
      )
    print(f"{name} is set and nothing uses it", file=sys.stderr)


def _references(value: Any) -> Iterator[Any]:
  yield from gin.config._iterate_flattened_values(value)


def _is_required(value: Any) -> bool:
  return isinstance(value, gin.config.ConfigurableReference) and str(value) == "%gin.REQUIRED"


def _is_macro(name: str) -> bool:
  return "." not in name and "/" not in name
