"""`anystep-data`: what the data of any step is, from a cache, a plan or a model directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.inspection.read_lengths import ReadLengths, count_read_lengths
from anystep.inspection.stats import CacheStats, mixture_shares
from anystep.order.packing import PackingPolicy
from anystep.plans.tombstones import TombstoneList
from anystep.programs.command_line import run_program
from anystep.programs.progress import Progress
from anystep.tasks.data_program.arguments import (
  Parser,
  add_cache_dir_flag,
  add_command,
  add_example_flags,
  add_model_flag,
  add_plan_flags,
  add_steps_flag,
  add_task_flags,
  check_output,
  find_example_indices,
  format_examples,
  usage_error,
  write_output,
)
from anystep.tasks.data_program.named_data import (
  AFTER_CACHE_UNKNOWN,
  NamedData,
  find_converter,
  find_data,
  find_transforms,
)
from anystep.tasks.data_program.plan_commands import add_plan_commands
from anystep.tasks.data_program.preview_command import add_preview_command
from anystep.tasks.data_program.row_commands import ANY_DATA, add_row_commands
from anystep.tasks.data_program.show_command import add_show_command
from anystep.tasks.data_program.stats_page import stats_page
from anystep.tasks.data_program.tables import print_note, print_objects, print_stats
from anystep.tasks.registry.moved_functions import accept_moved_functions


def main(argv: Sequence[str]) -> int:
  """Runs the command that the arguments name; returns the exit status."""
  arguments = make_parser().parse_args(argv)
  if getattr(arguments, "accept_change", ()):
    accept_moved_functions()
  return arguments.run(arguments) or 0


def run() -> None:
  """The console program."""
  # What was cached is shown, whatever characters the terminal has.
  sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
  run_program(lambda: main(sys.argv[1:]))


def make_parser() -> argparse.ArgumentParser:
  """Return the parser of the program's command line."""
  parser = Parser(
    prog="anystep-data",
    description="asks what the data of any step is, from a cache, a plan or a model directory",
    epilog=format_examples(
      "anystep-data",
      (
        "preview --task=my_task --module_import=my_tasks",
        "verify --cache_dir=cache --task=my_task",
        "show --model_dir=MODEL_DIR --steps=1500:1501 --module_import=my_tasks",
        "plan start --help",
      ),
    ),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  commands = parser.add_subparsers(required=True, parser_class=Parser, metavar="COMMAND")
  row_commands = add_row_commands(commands)
  show = add_show_command(commands)
  _add_tombstone_command(commands)
  stats = _add_stats_command(commands)
  add_command(
    commands,
    "verify",
    _run_verify,
    "read every byte of caches and compare it with their manifests",
    add_cache_dir_flag,
    add_task_flags,
    add_plan_flags,
    examples=("--cache_dir=cache --task=my_task", "--model_dir=MODEL_DIR"),
  )
  plans = add_plan_commands(commands)
  preview = add_preview_command(commands)
  for command in (*row_commands, show, stats, preview, *plans):
    command.add_argument("--format", choices=["text", "jsonl"], default="text", help="default text")
  return parser


def _add_tombstone_command(commands: Any) -> None:
  command = add_command(
    commands,
    "tombstone",
    _run_tombstone,
    "write a list of examples that plan tombstone takes up, to be learned from no longer",
    add_cache_dir_flag,
    add_task_flags,
    add_example_flags,
    examples=(
      '--cache_dir=cache --task=c4 --index=4711 --index=4712 --reason="test questions" --output=leaked.json',
    ),
  )
  command.add_argument("--reason", default="tombstone", help="why, for people")
  command.add_argument("--output", required=True, metavar="FILE", help="where the list goes")
  command.add_argument("--overwrite", action="store_true", help="replace the file that is there")


def _run_tombstone(arguments: argparse.Namespace) -> None:
  check_output(arguments.output, arguments.overwrite)
  arguments.split = arguments.split or "train"
  data = find_data(arguments, needs_plan=False)
  cache = data.by_task[data.require_one_task()]
  tombstones = TombstoneList.of(cache, find_example_indices(arguments, cache), reason=arguments.reason)
  write_output(arguments.output, tombstones.to_json(), arguments.overwrite)
  count = len(tombstones.indices)
  print(f"{arguments.output}: {count:,} examples of {tombstones.task} {tombstones.split}")


def _run_verify(arguments: argparse.Namespace) -> None:
  for cache in find_data(arguments, needs_plan=False).meant_caches:
    m = cache.manifest
    total = sum(entry.bytes for entry in m.files)
    with Progress(f"verify {m.task} {m.split}", total=total, unit="bytes") as progress:
      cache.verify(progress.update)
    counts = f"{m.num_examples:,} examples in {len(m.files)} files, {total:,} bytes"
    print(f"{m.task} {m.split}: {counts}: as written", flush=True)


def _add_stats_command(commands: Any) -> argparse.ArgumentParser:
  command = add_command(
    commands,
    "stats",
    _run_stats,
    "count examples and tokens, what lengths cut of them, and a mixture's rows beside those planned",
    *ANY_DATA,
    examples=(
      "--cache_dir=cache",
      "--model_dir=MODEL_DIR --module_import=my_tasks --html=stats.html",
      """--cache_dir=cache --task=c4 --module_import=my_tasks --feature_lengths='{"targets": 512}'""",
      "--cache_dir=cache --rates=c4=0.7,code=0.3 --batch_size=128 --steps=0:1000",
    ),
  )
  add_steps_flag(command)
  add_model_flag(command, "the model that gets the rows, for what is cut; default that of --model_dir")
  command.add_argument("--html", metavar="FILE", help="also write a page with plots")
  command.add_argument("--overwrite", action="store_true", help="replace the page that is there")
  return command


def _run_stats(arguments: argparse.Namespace) -> None:
  if arguments.html is not None:
    check_output(arguments.html, arguments.overwrite)
  data = find_data(arguments, needs_plan=False)
  plan_lengths = data.plan.feature_lengths if data.plan else {}
  lengths = plan_lengths if arguments.feature_lengths is None else arguments.feature_lengths
  steps = data.find_steps(arguments) or data.known_steps
  if arguments.steps and data.plan is None:
    raise usage_error("--steps without a plan", "add --batch_size, --plan or --model_dir")
  if data.plan is not None and steps is not None:
    data.plan.units(steps.start)  # Steps that there are not are refused before anything is counted.
  read_lengths = _count_read_lengths(data, lengths, arguments)
  stats = [_count(cache) for cache in data.meant_caches]
  caches = []
  for counts in stats:
    read = None if read_lengths is None else read_lengths[counts.task, counts.split].to_json()
    caches.append({**counts.to_json(), "read": read})
  shares = []
  if data.plan is not None and steps is not None:
    shares = mixture_shares(
      data.plan,
      steps,
      {counts.task: counts for counts in stats},
      feature_lengths=lengths,
      read_lengths={task: counts for (task, _), counts in (read_lengths or {}).items()},
    )
  if arguments.format == "jsonl":
    print_objects([*caches, *shares])
  else:
    print_stats(caches, shares)
    if read_lengths is None:
      reason = AFTER_CACHE_UNKNOWN if lengths else "no lengths of rows are named: add --feature_lengths"
      print(f"What rows cut is not known: {reason}.")
  if arguments.html is not None:
    write_output(arguments.html, stats_page(caches, shares), arguments.overwrite)
    print_note(f"{arguments.html}: a page of {', '.join(dict.fromkeys(data.tasks))}")


def _count_read_lengths(
  data: NamedData, feature_lengths: Mapping[str, int], arguments: argparse.Namespace
) -> dict[tuple[str, str], ReadLengths] | None:
  """Count the lengths of each cache's examples as they are read, by task and split; None if not known."""
  if not feature_lengths:
    return None
  transforms = find_transforms(data, arguments.module_import, feature_lengths)
  if transforms is None:
    return None
  converter, _ = find_converter(arguments)
  counts = {}
  for cache, transform in zip(data.caches, transforms, strict=True):
    m = cache.manifest
    if m.task in data.tasks:
      counts[m.task, m.split] = count_read_lengths(
        cache,
        transform,
        feature_lengths=feature_lengths,
        converter=converter,
        packing=data.plan.packing if data.plan else PackingPolicy.NONE,
        all_lengths=True,
      )
  return counts


def _count(cache: Cache) -> CacheStats:
  m = cache.manifest
  if m.layout == AS_IS:
    return CacheStats.of(cache)
  with Progress(f"stats {m.task} {m.split}", total=m.num_examples, unit="examples") as progress:
    return CacheStats.of(cache, progress.update)


if __name__ == "__main__":
  run()
