"""Preprocessors that stand in another module than when their task was cached.

A fingerprint names a function by its module, so a task that moves to another one has another fingerprint. Its
examples are the same if the function's source is, and the sources of what the function calls in its module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from anystep.programs.progress import log_notice
from anystep.transforms.called_sources import hash_called_sources
from anystep.transforms.identity import find_functions

MODULE = "module"
"""What `--accept_change` calls a function's move to another module."""

Calls = Mapping[str, Mapping[str, str]]
"""sha256 of the sources that functions call in their modules, by the names of both."""

_are_accepted = False


class Move(NamedTuple):
  """A function's name when the task was cached, and its name now."""

  before: str
  now: str


def accept_moved_functions() -> None:
  """Let this process read caches of tasks whose functions have moved, whatever they call in their modules.

  It is needed where a cache has no hashes of what they call, as those of version 0.1, or where that changed.
  A call in the module that registers the tasks does what `--accept_change=module` does.
  """
  global _are_accepted
  _are_accepted = True


def are_moves_accepted() -> bool:
  """Return whether `accept_moved_functions` was called."""
  return _are_accepted


def hash_calls(preprocessors: Sequence[Any]) -> Calls:
  """Hash the sources of what the functions of preprocessors call in their own modules, for a manifest."""
  named = {
    name: hash_called_sources(functions, {name.removesuffix(_suffix_of(functions))})
    for name, functions in find_functions(preprocessors).items()
  }
  return {name: called for name, called in named.items() if called}


def undo_moves(
  cached: Any, registered: Any, functions: Mapping[str, Sequence[FunctionType]]
) -> tuple[Any, list[Move]]:
  """Return a registered description with the names that its functions had in the cached one, and the moves.

  Args:
    cached, registered: descriptions, as JSON.
    functions: those of the registered one, by name.
  """
  moves: list[Move] = []

  def undo(before: Any, now: Any) -> Any:
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
      return [undo(*pair) for pair in zip(before, now, strict=True)]
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
      return now
    renamed = {key: undo(before.get(key), value) for key, value in now.items()}
    name, new_name = before.get("function"), now.get("function")
    # What a preprocessor was given may look like a description.
    if not isinstance(name, str) or not isinstance(new_name, str) or new_name not in functions:
      return renamed
    if name != new_name and name.endswith(_suffix_of(functions[new_name])):
      moves.append(Move(name, new_name))
      renamed["function"] = name
    return renamed

  return undo(cached, registered), list(dict.fromkeys(moves))


def find_changed_calls(
  calls: Calls, moves: Iterable[Move], functions: Mapping[str, Sequence[FunctionType]]
) -> tuple[str, list[str]] | None:
  """Return a moved function that calls others than when it was cached, and their names; None if none does.

  Args:
    calls: the cache's.
    moves: the moves.
    functions: the registered ones, by name.
  """
  for move in moves:
    moved = functions[move.now]
    # What did not move along may be imported from where it was.
    modules = {name.removesuffix(_suffix_of(moved)) for name in move}
    before, now = calls.get(move.before, {}), hash_called_sources(moved, modules)
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
      return move.now, changed
  return None


@functools.cache
def report_moves(task: str, moves: tuple[Move, ...]) -> None:
  """Tell once that a task is read whose functions have moved."""
  names = ", ".join(f"{move.before} is {move.now} now" for move in moves)
  log_notice(f"{task}: {names}; its source is the same, and the cache is read")


def _suffix_of(functions: Sequence[FunctionType]) -> str:
  """Return what stands behind the module in the name of functions."""
  return f".{functions[0].__qualname__}"
