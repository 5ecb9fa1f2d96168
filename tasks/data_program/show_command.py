"""`anystep-data show`: the rows of steps as the model gets them, or their examples as they are cached."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anystep.features.converter_names import task_feature_of
from anystep.features.converters import FeatureConverter, PassThroughConverter
from anystep.features.ragged import Ragged
from anystep.inspection.model_rows import RowParts, take_apart
from anystep.order.packing import PackingPolicy
from anystep.streams.stream import open_stream
from anystep.tasks.data_program.arguments import add_command, add_model_flag, add_steps_flag, usage_error
from anystep.tasks.data_program.named_data import (
  AFTER_CACHE_UNKNOWN,
  NamedData,
  find_converter,
  find_data,
  find_transforms,
  transforms_by_name,
)
from anystep.tasks.data_program.row_commands import (
  ANY_DATA,
  Row,
  add_row_flag,
  format_example,
  format_place,
  iterate_steps,
)
from anystep.tasks.data_program.tables import print_note, print_objects
from anystep.tasks.preview.values import Value
from anystep.tasks.registry.modules import registered_tasks
from anystep.tasks.vocabularies.decoding import (
  as_text,
  describe_feature,
  rebuild_vocabularies,
  vocabularies,
)
from anystep.transforms.transform import Transform

_Vocabularies = Mapping[str, Mapping[str, Any]]
"""Vocabularies by task and feature."""


def add_show_command(commands: Any) -> argparse.ArgumentParser:
  """Add `show`, and return it."""
  command = add_command(
    commands,
    "show",
    _run_show,
    "print the rows of some steps as the model gets them, decoded, each packed example apart",
    *ANY_DATA,
    examples=(
      "--model_dir=MODEL_DIR --steps=1500:1501 --module_import=my_tasks",
      "--model_dir=MODEL_DIR --steps=1500:1501 --row=3 --cached",
      "--plan=plan.json --cache_dir=cache --steps=0:1 --module_import=my_tasks --model=lm",
    ),
  )
  add_steps_flag(command, required=True)
  add_row_flag(command)
  add_model_flag(command, "the model that gets the rows; default that of --model_dir")
  text = "show the examples' features as they are in the cache"
  command.add_argument("--cached", action="store_true", help=text)
  return command


def _run_show(arguments: argparse.Namespace) -> None:
  if arguments.cached and arguments.model is not None:
    raise usage_error("--cached and --model", "leave one out: what is cached is no model's")
  data = find_data(arguments)
  known_vocabularies = _find_vocabularies(data, arguments)
  transforms = None
  if not arguments.cached:
    found = find_transforms(data, arguments.module_import, data.known_plan.feature_lengths)
    transforms = transforms_by_name(data.caches, found)
  if transforms is not None:
    rows_by_step = _iterate_model_rows(data, transforms, known_vocabularies, arguments)
  else:
    if not arguments.cached:
      print_note(f"examples are shown as they are cached, as --cached does: {AFTER_CACHE_UNKNOWN}")
    rows_by_step = _iterate_cached_rows(data, known_vocabularies, arguments)
  for rows in rows_by_step:
    if arguments.format == "jsonl":
      print_objects(rows)
    else:
      for row in rows:
        print(*_format_row(row, shortens_runs=transforms is not None), sep="\n")


def _find_vocabularies(data: NamedData, arguments: argparse.Namespace) -> _Vocabularies:
  caches = {task: data.by_task[task] for task in data.tasks}
  if arguments.module_import:
    return vocabularies(registered_tasks(arguments.module_import, caches.values()))
  known_vocabularies = rebuild_vocabularies(caches)
  if not all(map(known_vocabularies.get, caches)):
    print_note("token ids are shown as numbers: --module_import=MODULE_OF_THE_TASK makes text of them")
  return known_vocabularies


def _iterate_cached_rows(
  data: NamedData, known_vocabularies: _Vocabularies, arguments: argparse.Namespace
) -> Iterator[list[Row]]:
  """Yield the rows of each step with their examples' features as they are cached."""

  def add_features(example: Mapping[str, Any], task: str) -> dict[str, Any]:
    vocabulary_of = known_vocabularies.get(task, {})
    cached = data.by_task[task][example["index"]]
    features = {name: describe_feature(values, vocabulary_of.get(name)) for name, values in cached.items()}
    return {**example, "features": features}

  for rows in iterate_steps(data, arguments):
    yield [
      {**row, "examples": [add_features(example, row["task"]) for example in row["examples"]]} for row in rows
    ]


def _iterate_model_rows(
  data: NamedData,
  transforms: Mapping[str, Transform],
  known_vocabularies: _Vocabularies,
  arguments: argparse.Namespace,
) -> Iterator[list[Row]]:
  """Yield the rows of each step with the features that a model gets, of which digests are made."""
  converter, problem = find_converter(arguments)
  if converter is None:
    print_note(f"which model gets these rows is not known, so they have the task's features: {problem}")
    converter = PassThroughConverter()
  plan = data.known_plan
  is_packed = plan.packing is not PackingPolicy.NONE
  row_numbers = slice(None) if arguments.row is None else slice(arguments.row, arguments.row + 1)
  with open_stream(
    plan,
    data.by_task,
    rows=row_numbers,
    feature_converter=converter,
    transforms=transforms,
    prefetch_batches=0,
  ) as stream:
    for rows in iterate_steps(data, arguments):
      if not rows:
        continue
      step = rows[0]["step"]
      batch = stream.batch(step)
      position_of = {number: position for position, number in enumerate(stream.rows_at(step).tolist())}
      yield [
        _add_model_features(
          row,
          take_apart(batch, position_of[row["row"]], len(row["examples"]) if is_packed else None),
          converter,
          known_vocabularies.get(row["task"], {}),
        )
        for row in rows
      ]


def _add_model_features(
  row: Row, parts: RowParts, converter: FeatureConverter, vocabulary_of: Mapping[str, Any]
) -> Row:
  """Return a row with the model's features: of each example, of the row itself, and how full it is."""

  def describe(features: Mapping[str, np.ndarray | Ragged]) -> dict[str, Any]:
    return {
      name: Value(
        values=values, vocabulary=vocabulary_of.get(task_feature_of(converter, name) or "")
      ).to_json()
      for name, values in features.items()
    }

  examples = [
    {**example, "features": describe(features)}
    for example, features in zip(row["examples"], parts.examples, strict=True)
  ]
  of_row = {"features": describe(parts.rest)} if parts.rest else {}
  used = {"used": {name: list(counts) for name, counts in parts.used.items()}} if parts.used else {}
  return {**row, "examples": examples, **of_row, **used}


def _format_row(row: Mapping[str, Any], *, shortens_runs: bool) -> Iterator[str]:
  for example in row["examples"]:
    yield format_example(row, example)
    yield from _format_features(example["features"], shortens_runs=shortens_runs)
  yield from _format_features(row.get("features", {}), shortens_runs=shortens_runs)
  if "used" in row:
    counts = [f"{name} {used:,} of {total:,}" for name, (used, total) in row["used"].items()]
    yield f"{format_place(row)}: places used by examples: {', '.join(counts)}"


def _format_features(features: Mapping[str, Mapping[str, Any]], *, shortens_runs: bool) -> Iterator[str]:
  for name, feature in features.items():
    yield f"  {name}{as_text(_shorten_runs(feature) if shortens_runs else feature)}"


def _shorten_runs(feature: Mapping[str, Any]) -> Mapping[str, Any]:
  """Return a feature with runs of its numbers shortened, where that makes them fewer than half as many.

  >>> _shorten_runs({"length": 6, "values": [0, 1, 2, 3, 0, 0]})
  {'length': 6, 'text': '0 to 3, 0 ×2'}
  """
  values = feature.get("values")
  if not isinstance(values, list) or not all(type(value) is int for value in values):
    return feature
  # Of each run its first value, the difference between neighbours, and the number of values.
  runs: list[tuple[int, int, int]] = []
  for value in values:
    first, difference, count = runs[-1] if runs else (value, 0, 0)
    if count == 1:
      difference = value - first
    if runs and difference in (0, 1) and value == first + difference * count:
      runs[-1] = (first, difference, count + 1)
    else:
      runs.append((value, 0, 1))
  if 2 * len(runs) >= len(values):
    return feature
  return {"length": feature["length"], "text": ", ".join(_format_run(*run) for run in runs)}


def _format_run(first: int, difference: int, count: int) -> str:
  if count == 1:
    return str(first)
  return f"{first} to {first + count - 1}" if difference else f"{first} ×{count}"
