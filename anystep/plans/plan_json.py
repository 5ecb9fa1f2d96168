"""The JSON text of a plan and its file: equal plans are equal bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from etils import epath

from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files.input_files import read_file
from anystep.files.json_files import MALFORMED, canonical_json, parse_json
from anystep.limits import MAX_JSON_BYTES
from anystep.order.epochs import EpochPolicy
from anystep.order.packing import PackingPolicy
from anystep.plans.planned_task import PlannedTask
from anystep.plans.segments import Segment, SegmentTask
from anystep.plans.tombstones import Tombstones

PLAN_VERSION = 1
# Fields of a plan that are read from its caches, and are not in its JSON.
CACHE_FIELDS = frozenset({"unit_tables", "shard_units"})

_P = TypeVar("_P")


def format_plan(fields: Mapping[str, Any]) -> str:
  """Return the JSON text of a plan's fields."""
  left_out = CACHE_FIELDS if fields["tombstones"] else CACHE_FIELDS | {"tombstones"}
  document = {"version": PLAN_VERSION, **{n: value for n, value in fields.items() if n not in left_out}}
  for name in document.keys() & {"segments", "tombstones"}:
    document[name] = [dataclasses.asdict(entry) for entry in fields[name]]
  document["tasks"] = {name: task.to_document() for name, task in fields["tasks"].items()}
  return canonical_json(document, indent=1) + "\n"


def parse_plan(text: str | bytes, build: Callable[..., _P], *, path: object) -> _P:
  """Return the plan of a JSON text.

  Args:
    text: what `format_plan` returned.
    build: makes a plan of its fields, given by name; raises ValueError for wrong ones.
    path: names the text in errors.

  Raises:
    AnystepError: 65 `plan_invalid`.
  """
  try:
    document = parse_json(text)
    version = document.pop("version")
    if type(version) is not int or version != PLAN_VERSION:
      raise ValueError(f"version {version!r}, not {PLAN_VERSION}")
    return build(**_parse_fields(document))
  except MALFORMED as error:
    raise _plan_invalid(error, path) from error


def read_plan(path: epath.PathLike, build: Callable[..., _P], *, fix: str) -> _P:
  """Return the plan of a file.

  Args:
    path: the file.
    build: as in `parse_plan`.
    fix: for the error where there is no such file.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`.
  """
  try:
    content = read_file(path, limit_bytes=MAX_JSON_BYTES)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
    raise AnystepError(
      ExitCode.NO_INPUT, "plan_missing", path=path, expected="a plan's JSON file", fix=fix
    ) from error
  except ValueError as error:
    raise _plan_invalid(error, path) from error
  return parse_plan(content, build, path=path)


def _parse_fields(document: Mapping[str, Any]) -> dict[str, Any]:
  """Return a plan's fields from its JSON without the version."""
  unexpected = CACHE_FIELDS & document.keys()
  if unexpected:
    raise ValueError(f"{', '.join(sorted(unexpected))} is not in the file")
  return {
    **document,
    "tasks": {name: PlannedTask(**task) for name, task in document["tasks"].items()},
    "segments": tuple(_parse_segment(segment) for segment in document["segments"]),
    "packing": PackingPolicy(document["packing"]),
    "epoch_policy": EpochPolicy(document["epoch_policy"]),
    "tombstones": tuple(Tombstones(**entry) for entry in document.get("tombstones", ())),
  }


def _parse_segment(document: Mapping[str, Any]) -> Segment:
  tasks = {name: SegmentTask(**task) for name, task in document["tasks"].items()}
  return Segment(**{**document, "tasks": tasks})


def _plan_invalid(error: Exception, path: object) -> AnystepError:
  fix = "name a plan's file; if it was one, restore it from a copy, or resume from another checkpoint"
  return make_file_error("plan_invalid", error, path=path, fix=fix)
