"""Gin files and bindings, checked before any object is built from them."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import traceback
import types
from typing import Any

import gin
from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.files.input_files import read_file
from anystep.train.configuration.gin_files import (
  GinFiles,
  gin_binding_error,
  gin_file_error,
  gin_value_error,
  list_search_paths,
  open_gin_file,
)

_MAX_CONFIG_BYTES = 1 << 24
# Texts of gin's errors about names that are not there.
_UNKNOWN_PARAMETER = re.compile(r"Configurable '([^']*)' doesn't have a parameter named '([^']*)'")
_UNKNOWN_ATTRIBUTE = re.compile(r"<module '([^']*)'[^>]*> has no attribute ([\w]+)")
_UNKNOWN_CONFIGURABLE = re.compile(r"No configurable matching '([^']*)'")


def load_configuration(files: GinFiles) -> None:
  """Load gin's configuration from files and bindings, with the modules that they name.

  Raises:
    AnystepError: 78 `gin_file`, `gin_binding`.
  """
  gin.clear_config()
  # gin would also read paths as packages of the current directory, and fail if one is incomplete.
  gin.config._FILE_READERS[:] = [(open_gin_file, lambda path: epath.Path(path).is_file())]
  gin.config._LOCATION_PREFIXES[:] = list_search_paths(files.search_paths)
  for name in files.names:
    try:
      gin.parse_config_file(name)
    except Exception as error:
      raise gin_file_error(name, error, **_list_names(error)) from error
  for name, value in files.bindings.items():
    try:
      gin.parse_config(f"{name} = {value}")
    except Exception as error:
      raise gin_binding_error(name, value, error, **_list_names(error)) from error


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
    raise gin_value_error(error, **_locate(error)) from error


def _locate(error: Exception) -> dict[str, str]:
  """Return the file and line in the user's own code that an exception came from; nothing if there is none."""
  places = [
    f"{frame.f_code.co_filename}:{line}"
    for frame, line in traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").partition(".")[0] not in ("anystep", *sys.stdlib_module_names)
    and "site-packages" not in frame.f_code.co_filename
  ]
  return {"at": places[-1]} if places else {}


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
    return read_file(path, limit_bytes=_MAX_CONFIG_BYTES).decode()
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


def _list_names(error: Exception) -> dict[str, str]:
  """Return, for an error about a name that is not there, the names that are and those that come near."""
  text = str(error)
  if match := _UNKNOWN_PARAMETER.search(text):
    selector, wrong = match.groups()
    # Registered under the name that some import gave it.
    name = selector.rpartition(".")[2]
    wrapped = next((one for one in gin.config._INVERSE_REGISTRY if one.__name__ == name), None)
    if wrapped is None:
      return {}
    names, kind = list(inspect.signature(wrapped).parameters), "a parameter of"
  elif match := _UNKNOWN_ATTRIBUTE.search(text):
    module, wrong = match.groups()
    names, selector, kind = _list_public(sys.modules[module]), module, "a name of"
  elif match := _UNKNOWN_CONFIGURABLE.search(text):
    wrong, selector, kind = match[1], "", "a configurable"
    # Module and name: bindings on the command line are written so.
    names = sorted({".".join(full.split(".")[-2:]) for full in gin.config._REGISTRY._selector_map})
  else:
    return {}
  near_names = difflib.get_close_matches(wrong, names, n=1)
  nearest = {"nearest": near_names[0]} if near_names else {}
  return {"expected": f"{kind} {selector}".strip() + f": {', '.join(names)}", **nearest}


def _list_public(module: types.ModuleType) -> list[str]:
  """Return a module's public names; without `__all__`, of the classes and functions that it defines."""
  defined = [
    name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
  ]
  return sorted(getattr(module, "__all__", [name for name in defined if not name.startswith("_")]))
