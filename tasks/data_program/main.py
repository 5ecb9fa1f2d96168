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
  check_within,
  usage_error,
  write_output,
)
from anystep.tasks.data_program.example_arguments import add_example_flags, find_example_indices
from anystep.tasks.data_program.named_data import NamedData, find_data
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
  arguments = _make_parser().parse_args(argv)
  if getattr(arguments, "accept_change", ()):
    accept_moved_functions()
  return arguments.run(arguments) or 0


def run() -> None:
  """The console program."""
  # What was cached is shown, whatever characters the terminal has.
  sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
  run_program(lambda: main(sys.argv[1:]))


def _make_parser() -> argparse.ArgumentParser:
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
    commands, "what-was-at", _run_what_was_at, "print which examples the rows of some steps are", *anything
  )
  show = add(commands, "show", _run_show, "print the rows of some steps, decoded", *anything)
  for command in (what, show):
    add_steps_flag(command, required=True)
    command.add_argument("--row", type=int, help="this row alone")
  when = add(
    commands, "when-was", _run_when_was, "print every step and row that trains on an example", *anything
  )
  examples = add_example_flags(when)
  examples.add_argument("--tombstones", metavar="FILE", help="all of a list that tombstone wrote")
  add_steps_flag(when)
  text = "write a list of examples that plan tombstone takes up, to be learned from no longer"
  tombstone = add(commands, "tombstone", _run_tombstone, text, add_cache_dir_flag, add_task_flags)
  add_example_flags(tombstone)
  tombstone.add_argument("--reason", default="tombstone", help="why, for people")
  tombstone.add_argument("--output", required=True, metavar="FILE", help="where the list goes")
  tombstone.add_argument("--overwrite", action="store_true", help="replace the file that is there")
  text = "count examples and tokens, and compare a mixture's rows with its plan"
  stats = add(commands, "stats", _run_stats, text, *anything)
  add_steps_flag(stats)
  stats.add_argument("--html", metavar="FILE", help="also write a page with plots")
  stats.add_argument("--overwrite", action="store_true", help="replace the page that is there")
  text = "read every byte of caches and compare it with their manifests"
  add(commands, "verify", _run_verify, text, add_cache_dir_flag, add_task_flags, add_plan_flags)
  plans = add_plan_commands(commands, add, anything)
  preview = add_preview_command(commands, add)
  for command in (what, show, when, stats, preview, *plans):
    command.add_argument("--format", choices=["text", "jsonl"], default="text", help="default text")
  return parser


# Rows


def _run_what_was_at(arguments: argparse.Namespace) -> None:
  _print_rows(itertools.chain.from_iterable(_iterate_steps(find_data(arguments), arguments)), arguments)


def _run_show(arguments: argparse.Namespace) -> None:
  data = find_data(arguments)
  caches = {task: data.by_task[task] for task in data.tasks}
  if arguments.module_import:
    vocabularies_by_task = vocabularies(registered_tasks(arguments.module_import, caches.values()))
  else:
    vocabularies_by_task = rebuild_vocabularies(caches)
    if not all(map(vocabularies_by_task.get, caches)):
      print(
        "token ids are shown as numbers: --module_import=MODULE_OF_THE_TASK makes text of them",
        file=sys.stderr,
      )
  for rows in _iterate_steps(data, arguments):
    _print_rows(
      [_add_features(row, caches[row["task"]], vocabularies_by_task.get(row["task"], {})) for row in rows],
      arguments,
    )


def _add_features(
  row: Mapping[str, Any], cache: Cache, vocabularies_by_feature: Mapping[str, Any]
) -> dict[str, Any]:
  examples = [
    {
      **example,
      "features": {
        name: describe_feature(values, vocabularies_by_feature.get(name))
        for name, values in cache[example["index"]].items()
      },
    }
    for example in row["examples"]
  ]
  return {**row, "examples": examples}


def _run_when_was(arguments: argparse.Namespace) -> None:
  listed = None if arguments.tombstones is None else TombstoneList.read(arguments.tombstones)
  if listed is not None and arguments.task is None:
    arguments.task = [[listed.task]]
  data = find_data(arguments)
  task = _require_one_task(data)
  steps = arguments.steps or data.known_steps
  if steps is None:
    raise usage_error("a plan without an end, and no --steps to look in", "add --steps=A:B, such as 0:10000")
  plan, cache = data.known_plan, data.by_task[task]
  if listed is None:
    indices: Sequence[int] = find_example_indices(arguments, cache)
  else:
    plan.tasks[task].check_manifest(listed.task, listed.manifest_sha256)
    listed.check_indices(cache)
    indices = listed.indices
  rows = [when_was(plan, data.by_task, task, index, steps) for index in indices]
  _print_rows(heapq.merge(*rows, key=lambda row: (row["step"], row["row"])), arguments)


def _run_tombstone(arguments: argparse.Namespace) -> None:
  check_output(arguments.output, arguments.overwrite)
  arguments.split = arguments.split or "train"
  data = find_data(arguments, needs_plan=False)
  cache = data.by_task[_require_one_task(data)]
  listed = TombstoneList.of(cache, find_example_indices(arguments, cache), reason=arguments.reason)
  write_output(arguments.output, listed.to_json(), arguments.overwrite)
  print(f"{arguments.output}: {len(listed.indices):,} examples of {listed.task} {listed.split}")


def _require_one_task(data: NamedData) -> str:
  if len(data.tasks) != 1:
    raise usage_error(f"{len(data.tasks)} tasks: {', '.join(data.tasks)}", "add --task=NAME, one of them")
  return data.tasks[0]


def _iterate_steps(data: NamedData, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
  """The rows that the arguments name, step by step."""
  plan, rows = data.known_plan, None
  if arguments.row is not None:
    check_within("row", arguments.row, max(segment.batch_size for segment in plan.segments))
    rows = np.array([arguments.row])
  for step in arguments.steps:
    if rows is None or arguments.row < plan.segment_at(step).batch_size:
      rows_of_step = what_was_at(plan, data.by_task, step, rows)
      yield [row for row in rows_of_step if row["task"] in data.tasks]


def _print_rows(rows: Iterable[dict[str, Any]], arguments: argparse.Namespace) -> None:
  if arguments.format == "jsonl":
    print_objects(rows)
  else:
    for row in rows:
      print(_format_row(row))


def _format_row(row: Mapping[str, Any]) -> str:
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


def _run_verify(arguments: argparse.Namespace) -> None:
  for cache in _select_caches(find_data(arguments, needs_plan=False)):
    m = cache.manifest
    total = sum(entry.bytes for entry in m.files)
    with Progress(f"verify {m.task} {m.split}", total=total, unit="bytes") as progress:
      cache.verify(progress.update)
    counts = f"{m.num_examples:,} examples in {len(m.files)} files, {total:,} bytes"
    print(f"{m.task} {m.split}: {counts}: as written", flush=True)


def _run_stats(arguments: argparse.Namespace) -> None:
  if arguments.html is not None:
    check_output(arguments.html, arguments.overwrite)
  data = find_data(arguments, needs_plan=False)
  plan_lengths = data.plan.feature_lengths if data.plan else {}
  lengths = plan_lengths if arguments.feature_lengths is None else arguments.feature_lengths
  steps = arguments.steps or data.known_steps
  if arguments.steps and data.plan is None:
    raise usage_error("--steps without a plan", "add --batch_size, --plan or --model_dir")
  if data.plan is not None and steps is not None:
    data.plan.units(steps.start)  # Steps that there are not are refused before anything is counted.
  stats = [_count(cache) for cache in _select_caches(data)]
  caches = [counts.to_json(lengths) for counts in stats]
  shares = []
  if data.plan is not None and steps is not None:
    by_task = {counts.task: counts for counts in stats}
    shares = mixture_shares(data.plan, steps, by_task, feature_lengths=lengths)
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


def _select_caches(data: NamedData) -> list[Cache]:
  return [cache for cache in data.caches if cache.manifest.task in data.tasks]


if __name__ == "__main__":
  run()
