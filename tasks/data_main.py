"""`anystep-data`: what the data of any step is, from a cache, a plan or a model directory."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.cache import Cache
from anystep.command_line import run_program
from anystep.data_stats import CacheStats, mixture_shares
from anystep.errors import nearest
from anystep.inspection import index_of_source, what_was_at, when_was
from anystep.manifest import AS_IS
from anystep.progress import Progress
from anystep.tasks.data_arguments import (
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
  wrong,
)
from anystep.tasks.data_sources import Source, find_data
from anystep.tasks.data_tables import print_objects, print_stats
from anystep.tasks.decoding import as_text, described, printable, vocabularies
from anystep.tasks.modules import registered_tasks
from anystep.tasks.plan_commands import add_plan_commands
from anystep.tasks.stats_page import stats_page


def main(argv: Sequence[str]) -> int:
  """Runs the command that the arguments name; returns the exit status."""
  arguments = _parser().parse_args(argv)
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
  example = when.add_mutually_exclusive_group(required=True)
  example.add_argument("--index", type=int, help="the example's index in its task's cache")
  example.add_argument("--source", metavar="NAME_OR_NUMBER", help="its source shard, with --place")
  when.add_argument("--place", type=int, help="its place among its source shard's examples")
  add_steps_flag(when)
  text = "count examples and tokens, and compare a mixture's rows with its plan"
  stats = add(commands, "stats", _stats, text, *anything)
  add_steps_flag(stats)
  stats.add_argument("--html", metavar="FILE", help="also write a page with plots")
  stats.add_argument("--overwrite", action="store_true", help="replace the page that is there")
  text = "read every byte of caches and compare it with their manifests"
  add(commands, "verify", _verify, text, add_cache_dir_flag, add_task_flags, add_plan_flags)
  plans = add_plan_commands(commands, add, anything)
  for command in (what, show, when, stats, *plans):
    command.add_argument("--format", choices=["text", "jsonl"], default="text", help="default text")
  return parser


# Rows


def _what_was_at(arguments: argparse.Namespace) -> None:
  _print_rows(itertools.chain.from_iterable(_rows_by_step(find_data(arguments), arguments)), arguments)


def _show(arguments: argparse.Namespace) -> None:
  source = find_data(arguments)
  caches = {task: source.by_task[task] for task in source.tasks}
  known: dict[str, dict[str, Any]] = {}
  if arguments.module_import:
    known = vocabularies(registered_tasks(arguments.module_import, caches.values()))
  else:
    print(
      "token ids are shown as numbers: --module_import=MODULE_OF_THE_TASK makes text of them", file=sys.stderr
    )
  for rows in _rows_by_step(source, arguments):
    _print_rows(
      [_with_features(row, caches[row["task"]], known.get(row["task"], {})) for row in rows], arguments
    )


def _with_features(row: Mapping[str, Any], cache: Cache, known: Mapping[str, Any]) -> dict[str, Any]:
  examples = [
    {
      **example,
      "features": {
        name: described(values, known.get(name)) for name, values in cache[example["index"]].items()
      },
    }
    for example in row["examples"]
  ]
  return {**row, "examples": examples}


def _when_was(arguments: argparse.Namespace) -> None:
  source = find_data(arguments)
  if len(source.tasks) != 1:
    raise usage(f"{len(source.tasks)} tasks: {', '.join(source.tasks)}", "add --task=NAME, one of them")
  steps = arguments.steps or source.known_steps
  if steps is None:
    raise usage("a plan that never ends, of which nothing is trained", "add --steps=A:B")
  (task,) = source.tasks
  index = _example_index(arguments, source.by_task[task])
  _print_rows(when_was(source.known_plan, source.by_task, task, index, steps), arguments)


def _example_index(arguments: argparse.Namespace, cache: Cache) -> int:
  """The index of the example that the arguments name.

  Raises:
    AnystepError: 64 `index`, `source`, `place` where there is none.
  """
  m = cache.manifest
  if arguments.index is not None:
    if arguments.place is not None:
      raise usage("--place and --index", "leave one out: --place belongs to --source")
    return within("index", arguments.index, m.num_examples)
  if arguments.place is None:
    raise usage("--source without --place", "add --place, the example's number in its source shard")
  named = [k for k, shard in enumerate(m.source_shards) if shard.name == arguments.source]
  if len(named) > 1:
    raise wrong("source", f"one of the numbers {named} that have this name", arguments.source)
  if not named and not arguments.source.isdecimal():
    raise wrong(
      "source", nearest(arguments.source, {shard.name for shard in m.source_shards}), arguments.source
    )
  source_shard = named[0] if named else within("source", int(arguments.source), len(m.source_shards))
  place = within("place", arguments.place, m.source_shards[source_shard].examples)
  return index_of_source(cache, source_shard, place)


def _rows_by_step(source: Source, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
  """The rows that the arguments name, step by step."""
  plan, rows = source.known_plan, None
  if arguments.row is not None:
    within("row", arguments.row, max(segment.batch_size for segment in plan.segments))
    rows = np.array([arguments.row])
  for step in arguments.steps:
    if rows is None or arguments.row < plan.segment_at(step).batch_size:
      found = what_was_at(plan, source.by_task, step, rows)
      yield [row for row in found if row["task"] in source.tasks]


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
    origin = f"{printable(example['source_name'])} place {example['source_place']}"
    lines.append(f"{where}, example {example['index']} from {origin}")
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
  source = find_data(arguments, needs_plan=False)
  plan_lengths = source.plan.feature_lengths if source.plan else {}
  lengths = plan_lengths if arguments.feature_lengths is None else arguments.feature_lengths
  steps = arguments.steps or source.known_steps
  if arguments.steps and source.plan is None:
    raise usage("--steps without a plan", "add --batch_size, --plan or --model_dir")
  if source.plan is not None and steps is not None:
    source.plan.units(steps.start)  # Steps that there are not are refused before anything is counted.
  stats = [_counted(cache) for cache in _caches_of(source)]
  caches = [found.to_json(lengths) for found in stats]
  shares = []
  if source.plan is not None and steps is not None:
    by_task = {found.task: found for found in stats}
    shares = mixture_shares(source.plan, steps, by_task, feature_lengths=lengths)
  if arguments.format == "jsonl":
    print_objects([*caches, *shares])
  else:
    print_stats(caches, shares)
  if arguments.html is not None:
    write_output(arguments.html, stats_page(caches, shares), arguments.overwrite)


def _counted(cache: Cache) -> CacheStats:
  m = cache.manifest
  if m.layout == AS_IS:
    return CacheStats.of(cache)
  with Progress(f"stats {m.task} {m.split}", total=m.num_examples, unit="examples") as progress:
    return CacheStats.of(cache, progress.update)


def _caches_of(source: Source) -> list[Cache]:
  return [cache for cache in source.caches if cache.manifest.task in source.tasks]


if __name__ == "__main__":
  run()
