"""Static search of the sources for the kinds of errors that they raise, with their exit codes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("anystep", "tasks", "cache_job", "train")
# Classes whose `kind` becomes the kind of an error.
KIND_HOLDERS = ("Problem",)


@dataclasses.dataclass(frozen=True)
class Raised:
  """A kind of error that a file makes, and its code; None where only a run can tell."""

  kind: str | None
  code: str | None
  path: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Function:
  """A function's definition, or a module (node is None), and where it stands."""

  node: ast.FunctionDef | None
  module: ast.Module
  path: str

  @functools.cached_property
  def parameters(self) -> dict[str, ast.expr | None]:
    """Defaults by parameter, None for those without, in their order; not `self`."""
    if self.node is None:
      return {}
    arguments = self.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    defaults = dict(zip([one.arg for one in positional], [*missing, *arguments.defaults], strict=True))
    defaults |= dict(zip([one.arg for one in arguments.kwonlyargs], arguments.kw_defaults, strict=True))
    return {name: default for name, default in defaults.items() if name not in ("self", "cls")}

  def assignments(self, name: str) -> list[ast.Assign | ast.AnnAssign]:
    """The statements that give a name a value, in this function or else in its module."""
    for tree in (self.node, self.module):
      found = [] if tree is None else [node for node in ast.walk(tree) if _assigned(node, name) is not None]
      if found:
        return found
    return []


class _NeedsCaller(Exception):
  """The value is a parameter's: only a caller of the function tells it."""


@dataclasses.dataclass(frozen=True)
class _Frame:
  """A function and the arguments that one call gives it; None where no call was chosen yet."""

  function: _Function
  arguments: dict[str, ast.expr] | None


def _assigned(node: ast.AST, name: str) -> ast.expr | None:
  """The expression that a statement assigns to a name, out of a tuple's too."""
  if isinstance(node, ast.AnnAssign) and node.value is not None and ast.unparse(node.target) == name:
    return node.value
  for target in node.targets if isinstance(node, ast.Assign) else ():
    if isinstance(target, ast.Name) and target.id == name:
      return node.value
    if isinstance(target, ast.Tuple):
      names = [getattr(one, "id", "") for one in target.elts]
      if name in names:
        return _element(node.value, names.index(name))
  return None


def _element(value: ast.expr, place: int) -> ast.expr | None:
  """An element of a tuple, or of each of two tuples between which a condition decides."""
  if isinstance(value, ast.Tuple):
    return value.elts[place]
  if isinstance(value, ast.IfExp):
    body, otherwise = _element(value.body, place), _element(value.orelse, place)
    if body is not None and otherwise is not None:
      return ast.IfExp(test=value.test, body=body, orelse=otherwise)
  return None


def source_paths() -> list[pathlib.Path]:
  """The paths of all modules of the product."""
  return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def _modules() -> dict[str, ast.Module]:
  return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in source_paths()}


@functools.cache
def _calls() -> list[tuple[ast.Call, _Function]]:
  """All calls of the sources, each with the innermost function that it stands in."""
  calls: list[tuple[ast.Call, _Function]] = []

  def visit(node: ast.AST, function: _Function) -> None:
    if isinstance(node, ast.FunctionDef):
      function = _Function(node, function.module, function.path)
    if isinstance(node, ast.Call):
      calls.append((node, function))
    for child in ast.iter_child_nodes(node):
      visit(child, function)

  for path, module in _modules().items():
    visit(module, _Function(None, module, path))
  return calls


def _name(call: ast.Call) -> str:
  return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@functools.cache
def _calls_by_name() -> dict[str, list[tuple[ast.Call, _Function]]]:
  by_name: dict[str, list[tuple[ast.Call, _Function]]] = {}
  for call, function in _calls():
    by_name.setdefault(_name(call), []).append((call, function))
  return by_name


def _calls_of(function: _Function) -> Iterator[tuple[dict[str, ast.expr], _Function]]:
  """The arguments, by parameter, of every call of a function, and the function that calls it."""
  assert function.node is not None
  name = function.node.name
  is_method = any(one.arg in ("self", "cls") for one in function.node.args.args[:1])
  for call, caller in _calls_by_name().get(name, ()):
    if is_method and isinstance(call.func, ast.Name):
      continue
    holder = getattr(call.func, "value", None)
    imported = name if holder is None else getattr(holder, "id", "")
    if caller.path != function.path and not (is_method or _imports(caller.module, imported)):
      continue
    given = dict(zip(function.parameters, call.args, strict=False))
    yield given | {one.arg: one.value for one in call.keywords if one.arg}, caller


def _imports(module: ast.Module, name: str) -> bool:
  statements = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
  return any(name == alias.name for node in statements for alias in node.names)


def _values(node: ast.expr, frames: tuple[_Frame, ...]) -> list[str | None]:
  """The texts that an expression can be; None for one that only a run can tell.

  Raises:
    _NeedsCaller: the last frame's arguments are not known yet.
  """
  frame = frames[0]
  if isinstance(node, ast.Constant):
    return [str(node.value)]
  if isinstance(node, ast.IfExp):
    return [*_values(node.body, frames), *_values(node.orelse, frames)]
  if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ExitCode":
    return [node.attr]
  if isinstance(node, ast.JoinedStr):
    parts = [
      _values(part.value if isinstance(part, ast.FormattedValue) else part, frames) for part in node.values
    ]
    return [None if None in texts else "".join(texts) for texts in itertools.product(*parts)]
  if not isinstance(node, ast.Name):
    return [None]
  if node.id in frame.function.parameters:
    if frame.arguments is None:
      raise _NeedsCaller
    if node.id in frame.arguments:
      return _values(frame.arguments[node.id], frames[1:])
    default = frame.function.parameters[node.id]
    return [None] if default is None else _values(default, frames)
  found = frame.function.assignments(node.id)
  if found:
    return [text for one in found for text in _values(_assigned(one, node.id), frames)]
  for module in _modules().values():
    for statement in module.body:
      value = _assigned(statement, node.id)
      if isinstance(value, ast.Constant):
        return [str(value.value)]
  return [None]


def _pairs(code: ast.expr, kind: ast.expr, frames: tuple[_Frame, ...]) -> Iterator[tuple[str | None, ...]]:
  """The kinds and codes of one call, over all the calls that lead to it."""
  try:
    function = frames[0].function
    names = {node.id for node in (code, kind) if isinstance(node, ast.Name)}
    if isinstance(code, ast.Name) and isinstance(kind, ast.Name) and not names & function.parameters.keys():
      for one in function.assignments(kind.id):
        codes, kinds = _assigned(one, code.id), _assigned(one, kind.id)
        yield from itertools.product(_values(kinds, frames), _values(codes, frames))
    else:
      yield from itertools.product(_values(kind, frames), _values(code, frames))
  except _NeedsCaller:
    *inner, last = frames
    for arguments, caller in _calls_of(last.function):
      chosen = (*inner, _Frame(last.function, arguments), _Frame(caller, None))
      if sum(frame.function.node is caller.node for frame in frames) < 2:
        yield from _pairs(code, kind, chosen)


def raised_kinds() -> list[Raised]:
  """Every kind that the sources raise, as far as reading them tells."""
  found = []
  for call, function in _calls():
    frames = (_Frame(function, None),)
    given = {one.arg: one.value for one in call.keywords}
    if _name(call) == "AnystepError" and len(call.args) == 2:
      found += [Raised(kind, code, function.path) for kind, code in _pairs(*call.args, frames)]
    elif _name(call) in KIND_HOLDERS and "kind" in given:
      found += [
        Raised(kind, "DATA", function.path) for kind, _ in _pairs(ast.Constant("DATA"), given["kind"], frames)
      ]
  return list(dict.fromkeys(found))
