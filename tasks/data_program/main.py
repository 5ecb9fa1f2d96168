"""`anystep-data`: what the data of any step is, from a cache, a plan or a model directory."""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.inspection.rows import what_was_at, when_was
from anystep.inspection.stats import CacheStats, mixture_shares
from anystep.plans.tombstones import TombstoneList
from anystep.programs.command_line import run_program
from anystep.programs.progress import Progress
from anystep.tasks.data_program.arguments import (
  Parser,
  add_cache_dir_flag,
  add_order_flags,
  add_plan_flags,
  add_steps_flag,
  add_task_flags,
  check_output,
  usage,
  within,
  write_output,
)
from anystep.tasks.data_program.asked_data import AskedData, find_data
from anystep.tasks.data_program.example_arguments import add_example_flags, example_indices
from anystep.tasks.data_program.plan_commands import add_plan_commands
from anystep.tasks.data_program.preview_command import add_preview_command
from anystep.tasks.data_program.stats_page import stats_page
from anystep.tasks.data_program.tables import print_objects, print_stats
from anystep.tasks.registry.modules import registered_tasks
from anystep.tasks.registry.moved_functions import accept_moved_functions
from anystep.tasks.vocabularies.decoding import (
  as_text,
  describe_feature,
  escape_unprintable,
  rebuild_vocabularies,
  vocabularies,
)


def main(argv: Sequence[str]) -> int:
  """Runs the command that the arguments name; returns the exit status."""
  arguments = _parser().parse_args(argv)
  if getattr(arguments, "accept_change", ()):
    accept_moved_functions()
  return arguments.run(arguments) or 0


def run() -> None:
  """The console program."""
  # What was cached is shown, whatever characters the terminal has.
  sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
  run_program(lambda: main(sys.argv[1:]))


def _parser() -> argparse.ArgumentParser:
  parser = Parser(prog="anystep-data", description=__doc__, allow_abbrev=False)
  commands = parser.add_subparsers(required=True, parser_class=Parser, metavar="COMMAND")

  def add(commands: Any, name: str, run: Callable, text: str, *flags: Callable) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    command.set_defaults(run=run)
    for add_flags in flags:
      add_flags(command)
    return command

  anything = (add_cache_dir_flag, add_task_flags, add_plan_flags, add_order_flags)
  what = add(
    commands, "what-was-at", _what_was_at, "print which examples the rows of some steps are", *anything
  )
  show = add(commands, "show", _show, "print the rows of some steps, decoded", *anything)
  for command in (what, show):
    add_steps_flag(command, required=True)
    command.add_argument("--row", type=int, help="this row alone")
  when = add(commands, "when-was", _when_was, "print every step and row that trains on an example", *anything)
  examples = add_example_flags(when)
  examples.add_argument("--tombstones", metavar="FILE", help="all of a list that tombstone wrote")
  add_steps_flag(when)
  text = "write a list of examples that plan tombstone takes up, to be learned from no longer"
  tombstone = add(commands, "tombstone", _tombstone, text, add_cache_dir_flag, add_task_flags)
  add_example_flags(tombstone)
  tombstone.add_argument("--reason", default="tombstone", help="why, for people")
  tombstone.add_argument("--output", required=True, metavar="FILE", help="where the list goes")
  tombstone.add_argument("--overwrite", action="store_true", help="replace the file that is there")
  text = "count examples and tokens, and compare a mixture's rows with its plan"
  stats = add(commands, "stats", _stats, text, *anything)
  add_steps_flag(stats)
  stats.add_argument("--html", metavar="FILE", help="also write a page with plots")
  stats.add_argument("--overwrite", action="store_true", help="replace the page that is there")
  text = "read every byte of caches and compare it with their manifests"
  add(commands, "verify", _verify, text, add_cache_dir_flag, add_task_flags, add_plan_flags)
  plans = add_plan_commands(commands, add, anything)
  preview = add_preview_command(commands, add)
  for command in (what, show, when, stats, preview, *plans):
    command.add_argument("--format", choices=["text", "jsonl"], default="text", help="default text")
  return parser


# Rows


def _what_was_at(arguments: argparse.Namespace) -> None:
  _print_rows(itertools.chain.from_iterable(_rows_by_step(find_data(arguments), arguments)), arguments)


def _show(arguments: argparse.Namespace) -> None:
  asked = find_data(arguments)
  caches = {task: asked.by_task[task] for task in asked.tasks}
  if arguments.module_import:
    known = vocabularies(registered_tasks(arguments.module_import, caches.values()))
  else:
    known = rebuild_vocabularies(caches)
    if not all(map(known.get, caches)):
      print(
        "token ids are shown as numbers: --module_import=MODULE_OF_THE_TASK makes text of them",
        file=sys.stderr,
      )
  for rows in _rows_by_step(asked, arguments):
    _print_rows(
      [_with_features(row, caches[row["task"]], known.get(row["task"], {})) for row in rows], arguments
    )


def _with_features(row: Mapping[str, Any], cache: Cache, known: Mapping[str, Any]) -> dict[str, Any]:
  examples = [
    {
      **example,
      "features": {
        name: describe_feature(values, known.get(name)) for name, values in cache[example["index"]].items()
      },
    }
    for example in row["examples"]
  ]
  return {**row, "examples": examples}


def _when_was(arguments: argparse.Namespace) -> None:
  listed = None if arguments.tombstones is None else TombstoneList.read(arguments.tombstones)
  if listed is not None and arguments.task is None:
    arguments.task = [[listed.task]]
  asked = find_data(arguments)
  task = _only_task(asked)
  steps = arguments.steps or asked.known_steps
  if steps is None:
    raise usage("a plan without an end, and no --steps to look in", "add --steps=A:B, such as 0:10000")
  plan, cache = asked.known_plan, asked.by_task[task]
  if listed is None:
    indices: Sequence[int] = example_indices(arguments, cache)
  else:
    plan.tasks[task].check_manifest(listed.task, listed.manifest_sha256)
    listed.check_indices(cache)
    indices = listed.indices
  rows = [when_was(plan, asked.by_task, task, index, steps) for index in indices]
  _print_rows(heapq.merge(*rows, key=lambda row: (row["step"], row["row"])), arguments)


def _tombstone(arguments: argparse.Namespace) -> None:
  check_output(arguments.output, arguments.overwrite)
  arguments.split = arguments.split or "train"
  asked = find_data(arguments, needs_plan=False)
  cache = asked.by_task[_only_task(asked)]
  listed = TombstoneList.of(cache, example_indices(arguments, cache), reason=arguments.reason)
  write_output(arguments.output, listed.to_json(), arguments.overwrite)
  print(f"{arguments.output}: {len(listed.indices):,} examples of {listed.task} {listed.split}")


def _only_task(asked: AskedData) -> str:
  if len(asked.tasks) != 1:
    raise usage(f"{len(asked.tasks)} tasks: {', '.join(asked.tasks)}", "add --task=NAME, one of them")
  return asked.tasks[0]


def _rows_by_step(asked: AskedData, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
  """The rows that the arguments name, step by step."""
  plan, rows = asked.known_plan, None
  if arguments.row is not None:
    within("row", arguments.row, max(segment.batch_size for segment in plan.segments))
    rows = np.array([arguments.row])
  for step in arguments.steps:
    if rows is None or arguments.row < plan.segment_at(step).batch_size:
      found = what_was_at(plan, asked.by_task, step, rows)
      yield [row for row in found if row["task"] in asked.tasks]


def _print_rows(rows: Iterable[dict[str, Any]], arguments: argparse.Namespace) -> None:
  if arguments.format == "jsonl":
    print_objects(rows)
  else:
    for row in rows:
      print(_row_text(row))


def _row_text(row: Mapping[str, Any]) -> str:
  where = (
    f"step {row['step']} row {row['row']}: {row['task']} {row['split']} epoch {row['epoch']}"
    f" unit {row['unit']} = shard {row['shard']} place {row['place']}"
  )
  lines = []
  for example in row["examples"]:
    origin = f"{escape_unprintable(example['source_name'])} place {example['source_place']}"
    silent = ", a tombstone: no loss" if "tombstone" in example else ""
    lines.append(f"{where}, example {example['index']} from {origin}{silent}")
    lines += [f"  {name}{as_text(feature)}" for name, feature in example.get("features", {}).items()]
  return "\n".join(lines)


# Caches


def _verify(arguments: argparse.Namespace) -> None:
  for cache in _caches_of(find_data(arguments, needs_plan=False)):
    m = cache.manifest
    total = sum(entry.bytes for entry in m.files)
    with Progress(f"verify {m.task} {m.split}", total=total, unit="bytes") as progress:
      cache.verify(progress.update)
    counts = f"{m.num_examples:,} examples in {len(m.files)} files, {total:,} bytes"
    print(f"{m.task} {m.split}: {counts}: as written", flush=True)


def _stats(arguments: argparse.Namespace) -> None:
  if arguments.html is not None:
    check_output(arguments.html, arguments.overwrite)
  asked = find_data(arguments, needs_plan=False)
  plan_lengths = asked.plan.feature_lengths if asked.plan else {}
  lengths = plan_lengths if arguments.feature_lengths is None else arguments.feature_lengths
  steps = arguments.steps or asked.known_steps
  if arguments.steps and asked.plan is None:
    raise usage("--steps without a plan", "add --batch_size, --plan or --model_dir")
  if asked.plan is not None and steps is not None:
    asked.plan.units(steps.start)  # Steps that there are not are refused before anything is counted.
  stats = [_count(cache) for cache in _caches_of(asked)]
  caches = [found.to_json(lengths) for found in stats]
  shares = []
  if asked.plan is not None and steps is not None:
    by_task = {found.task: found for found in stats}
    shares = mixture_shares(asked.plan, steps, by_task, feature_lengths=lengths)
  if arguments.format == "jsonl":
    print_objects([*caches, *shares])
  else:
    print_stats(caches, shares)
  if arguments.html is not None:
    write_output(arguments.html, stats_page(caches, shares), arguments.overwrite)


def _count(cache: Cache) -> CacheStats:
  m = cache.manifest
  if m.layout == AS_IS:
    return CacheStats.of(cache)
  with Progress(f"stats {m.task} {m.split}", total=m.num_examples, unit="examples") as progress:
    return CacheStats.of(cache, progress.update)


def _caches_of(asked: AskedData) -> list[Cache]:
  return [cache for cache in asked.caches if cache.manifest.task in asked.tasks]


if __name__ == "__main__":
  run()
