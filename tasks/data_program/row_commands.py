"""`anystep-data what-was-at` and `when-was`: the examples of rows, and the rows of examples."""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.inspection.rows import what_was_at, when_was
from anystep.plans.tombstones import TombstoneList
from anystep.tasks.data_program.arguments import (
  add_cache_dir_flag,
  add_command,
  add_example_flags,
  add_order_flags,
  add_plan_flags,
  add_steps_flag,
  add_task_flags,
  check_within,
  find_example_indices,
  usage_error,
)
from anystep.tasks.data_program.named_data import NamedData, find_data
from anystep.tasks.data_program.tables import print_objects
from anystep.tasks.vocabularies.decoding import escape_unprintable

ANY_DATA = (add_cache_dir_flag, add_task_flags, add_plan_flags, add_order_flags)
"""What adds the flags that name data of every kind."""

Row = dict[str, Any]


def add_row_commands(commands: Any) -> list[argparse.ArgumentParser]:
  """Add the commands, and return them."""
  what = add_command(
    commands,
    "what-was-at",
    _run_what_was_at,
    "print which examples the rows of some steps are",
    *ANY_DATA,
    examples=(
      "--model_dir=MODEL_DIR --steps=1500:1510",
      "--model_dir=MODEL_DIR --model_steps=1001500:1001510",
      "--plan=plan.json --cache_dir=cache --steps=0:1 --row=5",
      "--cache_dir=cache --task=my_task --batch_size=128 --steps=1000000:1000001 --format=jsonl",
    ),
  )
  add_steps_flag(what, required=True)
  add_row_flag(what)
  when = add_command(
    commands,
    "when-was",
    _run_when_was,
    "print every step and row that trains on an example",
    *ANY_DATA,
    examples=(
      "--model_dir=MODEL_DIR --task=c4 --index=4711",
      "--model_dir=MODEL_DIR --task=c4 --source=part-00017.jsonl --place=88",
      "--model_dir=MODEL_DIR --tombstones=leaked.json",
    ),
  )
  examples = add_example_flags(when)
  examples.add_argument("--tombstones", metavar="FILE", help="all examples of a list that tombstone wrote")
  add_steps_flag(when)
  return [what, when]


def add_row_flag(parser: argparse.ArgumentParser) -> None:
  """The flag for one row."""
  parser.add_argument("--row", type=int, help="this row alone")


def iterate_steps(data: NamedData, arguments: argparse.Namespace) -> Iterator[list[Row]]:
  """Yield the rows that the arguments name, step by step, as `what_was_at` gives them."""
  plan, rows = data.known_plan, None
  if arguments.row is not None:
    check_within("row", arguments.row, max(segment.batch_size for segment in plan.segments))
    rows = np.array([arguments.row])
  for step in data.find_steps(arguments) or ():
    if rows is None or arguments.row < plan.segment_at(step).batch_size:
      rows_of_step = what_was_at(plan, data.by_task, step, rows)
      yield [row | data.name_step(step) for row in rows_of_step if row["task"] in data.tasks]


def format_example(row: Mapping[str, Any], example: Mapping[str, Any]) -> str:
  """Format one example of a row on a line."""
  where = (
    f"{format_place(row)}: {row['task']} {row['split']} epoch {row['epoch']}"
    f" unit {row['unit']} = shard {row['shard']} place {row['place']}"
  )
  origin = f"{escape_unprintable(example['source_name'])} place {example['source_place']}"
  silent = ", a tombstone: no loss" if "tombstone" in example else ""
  return f"{where}, example {example['index']} from {origin}{silent}"


def format_place(row: Mapping[str, Any]) -> str:
  """Format a row's step and number, with the model's step where that is another."""
  model_step = f" (model step {row['model_step']})" if "model_step" in row else ""
  return f"step {row['step']}{model_step} row {row['row']}"


def _run_what_was_at(arguments: argparse.Namespace) -> None:
  rows = itertools.chain.from_iterable(iterate_steps(find_data(arguments), arguments))
  if arguments.format == "jsonl":
    print_objects(rows)
    return
  for row in rows:
    for example in row["examples"]:
      print(format_example(row, example))


def _run_when_was(arguments: argparse.Namespace) -> None:
  tombstones = None if arguments.tombstones is None else TombstoneList.read(arguments.tombstones)
  if tombstones is not None and arguments.task is None:
    arguments.task = [[tombstones.task]]
  data = find_data(arguments)
  task = data.require_one_task()
  steps = data.find_steps(arguments) or data.known_steps
  if steps is None:
    raise usage_error("a plan without an end, and no --steps to look in", "add --steps=A:B, such as 0:10000")
  plan, cache = data.known_plan, data.by_task[task]
  if tombstones is None:
    indices: Sequence[int] = find_example_indices(arguments, cache)
  else:
    plan.tasks[task].check_manifest(tombstones.task, tombstones.manifest_sha256)
    tombstones.check_indices(cache)
    indices = tombstones.indices
  merged = _merge_rows(when_was(plan, data.by_task, task, index, steps) for index in indices)
  rows = (row | data.name_step(row["step"]) for row in merged)
  if arguments.format == "jsonl":
    print_objects(rows)
    return
  for row in rows:
    for line in _format_hits(row, set(indices)):
      print(line)


def _merge_rows(rows_by_index: Iterable[Iterator[Row]]) -> Iterator[Row]:
  """Yield rows in the order of steps; a row that has several of the examples, once."""
  rows = heapq.merge(*rows_by_index, key=_get_place)
  return (next(same_rows) for _, same_rows in itertools.groupby(rows, _get_place))


def _get_place(row: Mapping[str, Any]) -> tuple[int, int]:
  return row["step"], row["row"]


def _format_hits(row: Mapping[str, Any], indices: set[int]) -> Iterator[str]:
  """Format those examples of a row that are searched for, with their number where the row has several."""
  examples = row["examples"]
  for number, example in enumerate(examples, 1):
    if example["index"] in indices:
      position = f", number {number} of {len(examples)} in the row" if len(examples) > 1 else ""
      yield format_example(row, example) + position
