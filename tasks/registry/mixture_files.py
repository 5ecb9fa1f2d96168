"""MaxText's ways to name a mixture, of caches in the place of data files: a JSON file, or one string.

The file is `{"name": {"path": "cache/my_task", "weight": 0.3}, ...}`, where names are for people; the string
is `cache/my_task,0.3;cache/other,0.7`. A path is the directory of a task's cache, which knows its task.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

from etils import epath

from anystep.caches.cache import read_completed, read_manifest
from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.files import names
from anystep.files.input_files import read_file
from anystep.files.json_files import parse_json
from anystep.limits import MAX_JSON_BYTES, is_name
from anystep.order.mixing import exact_share

_KEYS = {"path", "weight"}
_PATTERN = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileMixture:
  """A mixture of caches.

  Attributes:
    rates: by task name; as exact as they were written.
    roots: to look for the tasks' caches in, in this order.
  """

  rates: Mapping[str, Fraction]
  roots: tuple[str, ...]


class _Number(str):
  """A number of a JSON file as it is written there."""

  __slots__ = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
  """One part of a mixture as it is written; `place` says where, for errors."""

  place: str
  name: str
  path: str
  weight: str


def is_mixture_text(text: str) -> bool:
  """Return whether a text is a mixture's file or string, as this module reads them, and no name.

  >>> is_mixture_text("mixture.json"), is_mixture_text("cache/a,1;cache/b,2"), is_mixture_text("c4:v1")
  (True, True, False)
  """
  return text.endswith(".json") or "," in text


def read_mixture(text: str) -> FileMixture:
  """Read a mixture from the path of its JSON file, or from a string of `path,weight` joined by `;`.

  Raises:
    AnystepError: 66 `mixture_missing`; 78 `mixture_invalid` for what is neither; 78 `rates` for a weight that
      is not a number >= 0; 66 `cache_missing`, 78 `mixture_path` for a path that is no task's cache; 65 as
      `read_completed` and `read_manifest`.
  """
  entries = list(_read_entries(text) if text.endswith(".json") else _parse_entries(text))
  if not entries:
    raise _make_invalid_error(text, expected="at least one path and its weight", got="none")
  rates: dict[str, Fraction] = {}
  caches: list[tuple[str, str]] = []
  for entry in entries:
    weight = exact_share(entry.path, str(entry.weight))
    root, task = _find_cache(entry)
    if task in rates:
      raise _make_invalid_error(entry.place, expected="each task once", got=f"{task} again, at {entry.path}")
    rates[task] = weight
    caches.append((root, task))
  return FileMixture(rates=rates, roots=_order_roots(caches))


def _read_entries(path: str) -> Iterator[_Entry]:
  try:
    text = read_file(path, limit_bytes=MAX_JSON_BYTES)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "mixture_missing",
      path=path,
      expected='a JSON file, {"name": {"path": "cache/my_task", "weight": 0.3}}',
      fix="correct the path, or write the file",
    ) from error
  except ValueError as error:
    raise _make_invalid_error(path, expected="a JSON file", got=str(error)) from error
  try:
    document = parse_json(text, number=_Number)
  except ValueError as error:
    raise _make_invalid_error(path, expected="JSON in which each name stands once", got=str(error)) from error
  if not isinstance(document, dict):
    raise _make_invalid_error(path, expected="an object of names", got=document)
  for name, entry in document.items():
    place = f"{path}: {name}"
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
      raise _make_invalid_error(
        place, expected='{"path": …, "weight": …}', got=entry, **_find_misspelling(entry)
      )
    if not is_name(entry["path"]) or isinstance(entry["path"], _Number):
      raise _make_invalid_error(place, expected="a path that is a text", got=entry["path"])
    if not isinstance(entry["weight"], _Number):
      raise _make_invalid_error(place, expected="a weight that is a number", got=entry["weight"])
    yield _Entry(place=place, name=name, path=entry["path"], weight=entry["weight"])


def _parse_entries(text: str) -> Iterator[_Entry]:
  for part in text.split(";"):
    path, comma, weight = (piece.strip() for piece in part.rpartition(","))
    if not (comma and path and weight):
      raise _make_invalid_error(text, expected="path,weight joined by ;", got=part)
    yield _Entry(place=text, name=epath.Path(path).name, path=path, weight=weight)


def _find_misspelling(entry: object) -> dict[str, str]:
  """Return an unknown key and the nearest known one, for an error."""
  unknown = sorted(entry.keys() - _KEYS) if isinstance(entry, dict) else []
  return {"unknown": unknown[0], "nearest": find_nearest(unknown[0], _KEYS)} if unknown else {}


def _find_cache(entry: _Entry) -> tuple[str, str]:
  """Return the root and the task's name of the cache in an entry's directory."""
  directory = epath.Path(entry.path)
  if _PATTERN.search(entry.path) or directory.is_file():
    raise _make_path_error(entry, got="data files")
  completed = read_completed(directory)
  if not completed and directory.is_dir():
    raise _make_path_error(entry, got="a directory without COMPLETED")
  if not completed:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "cache_missing",
      mixture=entry.place,
      path=directory / names.COMPLETED,
      fix="name the directory of a task's cache, <root>/<task>, as anystep-cache wrote it",
    )
  split = min(completed)
  task = read_manifest(directory / names.manifest_name(split), completed[split]).task
  root = directory
  for _ in task.split(":"):
    root = root.parent
  if names.task_directory(root, task) != directory:
    raise AnystepError(
      ExitCode.CONFIG,
      "mixture_path",
      mixture=entry.place,
      path=entry.path,
      expected=f"the directory of {task}, {names.task_directory('<root>', task)}",
      fix="move the cache to a directory of its task's name, and name that",
    )
  return str(root), task


def _make_path_error(entry: _Entry, *, got: str) -> AnystepError:
  name = re.sub(r"\W+", "_", entry.name).strip("_") or "mine"
  return AnystepError(
    ExitCode.CONFIG,
    "mixture_path",
    mixture=entry.place,
    path=entry.path,
    expected="the directory of a task's cache, which anystep-cache wrote",
    got=got,
    fix=f"put anystep.tasks.text_task({name!r}, {entry.path!r}, vocabulary=…, style=…) in a module, run"
    f" anystep-cache --tasks={name} --module_import=MODULE --output_cache_dir=cache, and name cache/{name}",
  )


def _order_roots(caches: list[tuple[str, str]]) -> tuple[str, ...]:
  """Return roots in an order in which the first that has a task's cache is the task's own.

  Raises:
    AnystepError: 78 `mixture_roots` where a root before it has another cache of a task.
  """
  roots = tuple(dict.fromkeys(root for root, _ in caches))
  for own_root, task in caches:
    for root in roots[: roots.index(own_root)]:
      if read_completed(names.task_directory(root, task)):
        raise AnystepError(
          ExitCode.CONFIG,
          "mixture_roots",
          task=task,
          expected=f"one cache of it, in {own_root}",
          got=f"another one in {root}, where another task of the mixture is",
          fix="name caches of one root, or move one of the two away",
        )
  return roots


def _make_invalid_error(place: str, *, expected: str, got: object, **fields: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "mixture_invalid",
    mixture=place,
    expected=expected,
    got=got,
    **fields,
    fix='write {"name": {"path": "cache/my_task", "weight": 0.3}}, or cache/my_task,0.3;cache/other,0.7',
  )
