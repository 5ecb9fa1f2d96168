"""Gin files as they are written: read and checked before anything that they name is imported.

Gin imports the modules that its files name, and with them TensorFlow and JAX, which takes many seconds.
Mistakes that the text shows are found here before.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath
from gin import config_parser

from anystep.errors import AnystepError, ExitCode, find_nearest, one_line
from anystep.files.input_files import read_file

_REQUIRED = "gin.REQUIRED"
_MACRO_SELECTORS = ("macro", "gin.macro")
# Packages that define no constants of gin.
_WITHOUT_CONSTANTS = ("anystep", "gin", "seqio")
_MAX_GIN_BYTES = 1 << 24
# What Python's parser says of a word without quotes, with the address of an object.
_OBJECT = re.compile(r"malformed node or string[^<]*<[^>]*>\s*")
# What gin says of a value `%NAME` that nothing sets.
_UNSET_MACRO = re.compile(r"TypeError: macro\(\) missing .* in scope '([^']*)'")
_WORD = re.compile(r"[^\s'\"\[\]{}()%@=]+\Z")


@dataclasses.dataclass(frozen=True)
class Macro:
  """Value `%NAME`."""

  name: str


@dataclasses.dataclass(frozen=True)
class Reference:
  """Value `@scope/module.Class`, or `@scope/module.Class()` if it is called.

  Attributes:
    scope: scopes joined by slashes; empty for none.
    selector: module and name, where an import of the file names the module; else as it is written.
    is_called: whether the value is what the class or function returns.
  """

  scope: str
  selector: str
  is_called: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GinFiles:
  """Gin files and bindings, read and not yet evaluated.

  Attributes:
    names: gin files; later ones override earlier ones.
    bindings: `NAME` to value, as gin writes it; they override the files.
    search_paths: further directories of gin files.
    macros: values by macro name.
    arguments: values by (scope, selector) and parameter.
    modules: names of the modules that the files import.
  """

  names: Sequence[str]
  bindings: Mapping[str, str]
  search_paths: Sequence[str]
  macros: Mapping[str, Any]
  arguments: Mapping[tuple[str, str], Mapping[str, Any]]
  modules: Sequence[str]

  @classmethod
  def read(
    cls, names: Sequence[str], bindings: Mapping[str, str], *, search_paths: Sequence[str] = ()
  ) -> GinFiles:
    """Read files and bindings, and check the macros; report macros that nothing uses on stderr.

    Args:
      names: found in the current directory, in search_paths, or beside anystep's own `gin_configs/`.
      bindings: see the class.
      search_paths: see the class.

    Raises:
      AnystepError: 78 `gin_file`, `gin_binding`, `gin_unknown_macro`, `gin_required`.
    """
    reader = _Reader(list_search_paths(search_paths))
    for name in names:
      try:
        reader.read_file(name)
      except Exception as error:
        raise gin_file_error(name, error, **reader.find_near_files(name, error)) from error
    defined = set(reader.macros)
    for name, value in bindings.items():
      if is_macro(name) and name not in defined:
        raise AnystepError(
          ExitCode.CONFIG,
          "gin_unknown_macro",
          expected="a name that the gin files define",
          got=name,
          nearest=find_nearest(name, defined),
          fix=f"correct --gin.{name}",
        )
      try:
        reader.read_text(f"{name} = {value}")
      except Exception as error:
        raise gin_binding_error(name, value, error) from error
    files = cls(
      names=names,
      bindings=bindings,
      search_paths=search_paths,
      macros=reader.macros,
      arguments=reader.arguments,
      modules=reader.modules,
    )
    files._check_required()
    files._check_macros()
    return files

  def find_arguments(self, reference: Reference) -> dict[str, Any]:
    """Return what the files bind to the parameters of a class of anystep.

    Args:
      reference: its selector ends with the class's name.

    Returns:
      Values by parameter, with macros replaced by their values; references stay references.
    """
    scopes = reference.scope.split("/") if reference.scope else []
    bound: dict[str, Any] = {}
    for length in range(len(scopes) + 1):
      for (scope, selector), values in self.arguments.items():
        if scope == "/".join(scopes[:length]) and _are_same(selector, reference.selector):
          bound |= values
    return {parameter: self.resolve(value) for parameter, value in bound.items()}

  def resolve(self, value: Any, above: tuple[str, ...] = ()) -> Any:
    """Return a value with macros replaced by their values; a macro without a value stays."""
    if isinstance(value, Macro):
      if value.name not in self.macros or value.name in above:
        return value
      return self.resolve(self.macros[value.name], (*above, value.name))
    if isinstance(value, (list, tuple)):
      return type(value)(self.resolve(item, above) for item in value)
    if isinstance(value, dict):
      return {self.resolve(key, above): self.resolve(item, above) for key, item in value.items()}
    return value

  def _values(self) -> Iterator[tuple[str, Any]]:
    """Yield each value that is set, with its name."""
    yield from self.macros.items()
    for (scope, selector), values in self.arguments.items():
      for parameter, value in values.items():
        yield f"{scope}/{selector}.{parameter}".lstrip("/"), value

  def _check_required(self) -> None:
    """Refuse files in which a REQUIRED value is missing."""
    missing = sorted(name for name, value in self._values() if Macro(_REQUIRED) in list_parts(value))
    if missing:
      raise AnystepError(
        ExitCode.CONFIG,
        "gin_required",
        expected=f"values for {', '.join(missing)}",
        fix=f"set them in a gin file after the one that requires them, or add"
        f" {' '.join(f'--gin.{name}=…' for name in missing)}",
      )

  def _check_macros(self) -> None:
    """Refuse a macro that resembles one that is used, or defined; report others that nothing uses."""
    used = {part.name for _, value in self._values() for part in list_parts(value) if isinstance(part, Macro)}
    undefined = used - self.macros.keys() - {_REQUIRED}
    if any(module.partition(".")[0] not in _WITHOUT_CONSTANTS for module in self.modules):
      # They may be constants of a module, which gin writes as it does macros.
      used, undefined = used - undefined, set()
    for names, others, expected in (
      (undefined, self.macros.keys(), "a name that the gin files define"),
      (self.macros.keys() - used, used, "a name that something uses"),
    ):
      for name in sorted(names):
        near_names = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
        if near_names:
          raise AnystepError(
            ExitCode.CONFIG,
            "gin_unknown_macro",
            expected=expected,
            got=name,
            nearest=near_names[0],
            fix=f"correct {name} in the gin files",
          )
    for name in sorted(self.macros.keys() - used):
      print(f"{name} is set and nothing uses it", file=sys.stderr)


def list_search_paths(search_paths: Sequence[str]) -> list[str]:
  """Return the directories that gin files are looked for in, the current one first."""
  return ["", *search_paths, str(Path(str(importlib.resources.files("anystep.gin_configs"))).parent)]


def open_gin_file(path: str) -> io.StringIO:
  """Open a gin file.

  Raises:
    ValueError, OSError: for what is no file of text, or too large.
  """
  return io.StringIO(read_file(path, limit_bytes=_MAX_GIN_BYTES).decode())


def is_macro(name: str) -> bool:
  """Return whether the name of a binding is a macro's: without a configurable or a scope."""
  return "." not in name and "/" not in name


def list_parts(value: Any) -> list[Any]:
  """Return a value and all values inside it."""
  inner: list[Any] = []
  if isinstance(value, (list, tuple)):
    inner = list(value)
  if isinstance(value, dict):
    inner = [*value.keys(), *value.values()]
  return [value, *(part for item in inner for part in list_parts(item))]


def gin_file_error(name: str, error: Exception, **fields: object) -> AnystepError:
  """Return the error 78 `gin_file` for what reading a file raised."""
  fix = "correct the file, or --gin_file and --gin_search_paths"
  return AnystepError(
    ExitCode.CONFIG, "gin_file", path=name, **fields, got=_OBJECT.sub("", one_line(error)), fix=fix
  )


def gin_binding_error(name: str, value: str, error: Exception, **fields: object) -> AnystepError:
  """Return the error 78 `gin_binding` for what reading a binding raised."""
  fix = f"write the value as Python does: --gin.{name}=3, or for texts --gin.{name}=\"'text'\""
  if _WORD.match(value):
    fix = f"put quotes around the text, and quotes for the shell around those: --gin.{name}=\"'{value}'\""
  if fields:
    fix = f"correct --gin.{name}"
  if "No configurable matching reference" in str(error):
    fix = "write it in a gin file that imports the module of what the value names"
  return AnystepError(
    ExitCode.CONFIG,
    "gin_binding",
    **fields,
    got=f"--gin.{name}={value}: {_OBJECT.sub('', one_line(error))}",
    fix=fix,
  )


def gin_value_error(error: Exception, **fields: object) -> AnystepError:
  """Return the error for what building an object of the configuration raised.

  It is 78 `gin_value`, or `gin_required` where a value `%NAME` is named that nothing sets.
  """
  got = one_line(error)
  if unset := _UNSET_MACRO.match(got):
    fix = f"write {unset[1]} = … in a gin file, or correct the name"
    return AnystepError(ExitCode.CONFIG, "gin_required", expected=f"a value for {unset[1]}", fix=fix)
  return AnystepError(
    ExitCode.CONFIG, "gin_value", **fields, got=got, fix="correct the value in the gin file or flag"
  )


def _are_same(selector: str, known: str) -> bool:
  """Return whether a binding's selector is that of a class; classes of anystep have several import paths."""
  if selector.startswith("anystep."):
    return known.startswith("anystep.") and selector.rpartition(".")[2] == known.rpartition(".")[2]
  # Bindings of the command line have no imports: gin completes them.
  return known == selector or known.endswith(f".{selector}")


class _Reader(config_parser.ParserDelegate):
  """Reader of statements; values that later statements set replace earlier ones."""

  def __init__(self, search_paths: Sequence[str]):
    self._search_paths = search_paths
    # Paths of the files that include each other down to the one that is read.
    self._open_paths: list[str] = []
    # Modules by their names in the file that is read.
    self._imports: dict[str, str] = {}
    self.macros: dict[str, Any] = {}
    self.arguments: dict[tuple[str, str], dict[str, Any]] = {}
    self.modules: list[str] = []

  def read_file(self, name: str) -> None:
    """Read a file, and those that it includes."""
    path = self._find(name)
    if path in self._open_paths:
      raise ValueError(f"{name} includes itself")
    imports_above, self._imports = self._imports, {}
    self._open_paths.append(path)
    with open_gin_file(path) as file:
      self._read(file)
    self._open_paths.pop()
    self._imports = imports_above

  def read_text(self, text: str) -> None:
    """Read statements."""
    self._read(io.StringIO(text))

  def find_near_files(self, name: str, error: Exception) -> dict[str, str]:
    """Return, for an error about a file that is not there, the names of files that are."""
    if not isinstance(error, FileNotFoundError):
      return {}
    missing = Path(error.filename or name)
    folders = {Path(path) / missing.parent for path in self._search_paths}
    file_names = sorted({path.name for folder in folders for path in folder.glob("*.gin")})
    near_names = difflib.get_close_matches(missing.name, file_names, n=1)
    return {"nearest": str(missing.parent / near_names[0])} if near_names else {}

  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference | Macro:
    """See `ParserDelegate`."""
    scope, _, selector = scoped_configurable_name.rpartition("/")
    if selector in _MACRO_SELECTORS and evaluate:
      return self.macro(scope)
    return Reference(scope, self._add_module(selector), evaluate)

  def macro(self, macro_name: str) -> Macro:
    """See `ParserDelegate`."""
    return Macro(_REQUIRED if macro_name == "REQUIRED" else macro_name)

  def _find(self, name: str) -> str:
    for folder in self._search_paths:
      path = epath.Path(folder) / name
      if path.is_file():
        return str(path)
    if epath.Path(name).exists():
      # Reading it says what it is.
      return name
    raise FileNotFoundError(2, "no such file in the current directory or in --gin_search_paths", name)

  def _read(self, file: io.StringIO) -> None:
    for statement in config_parser.ConfigParser(file, self):
      if isinstance(statement, config_parser.BindingStatement):
        self._bind(statement)
      elif isinstance(statement, config_parser.IncludeStatement):
        self.read_file(statement.filename)
      elif isinstance(statement, config_parser.ImportStatement):
        self._import(statement)

  def _bind(self, statement: config_parser.BindingStatement) -> None:
    scope, selector, parameter, value, _ = statement
    if not parameter:
      self.macros[f"{scope}/{selector}" if scope else selector] = value
    elif parameter == "value" and selector in _MACRO_SELECTORS:
      self.macros[scope] = value
    else:
      selector = self._add_module(selector)
      for (other_scope, known), values in self.arguments.items():
        if other_scope == scope and _are_same(selector, known):
          values.pop(parameter, None)
      self.arguments.setdefault((scope, selector), {})[parameter] = value

  def _import(self, statement: config_parser.ImportStatement) -> None:
    if not statement.module.startswith("__gin__."):
      self.modules.append(statement.module)
      module = statement.module if statement.is_from or statement.alias else statement.bound_name()
      self._imports[statement.bound_name()] = module

  def _add_module(self, selector: str) -> str:
    """Return a selector with the module that an import of this file gives to its first part."""
    first, dot, rest = selector.partition(".")
    return f"{self._imports.get(first, first)}{dot}{rest}"
