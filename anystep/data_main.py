"""`anystep-data`: what the data was, from a cache alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from anystep.cache import Cache, open_cache, read_completed
from anystep.command_line import run_program
from anystep.epochs import EpochPolicy
from anystep.errors import AnystepError, ExitCode
from anystep.names import task_directory
from anystep.plan import PADDING_TASK, Plan
from anystep.progress import Progress


def main(argv: Sequence[str]) -> int:
  """Runs the subcommand that the arguments name; returns the exit status."""
  arguments = _parser().parse_args(argv)
  return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(prog="anystep-data", description=__doc__)
  commands = parser.add_subparsers(required=True, parser_class=_Parser, metavar="COMMAND")

  def add(name: str, run, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--cache_dir", required=True, help="the root that the cache job wrote to")
    command.add_argument("--task", required=True, help="the task's name")
    return command

  what = add("what-was-at", _what_was_at, "print which examples the batches of some steps consist of")
  what.add_argument("--split", default="train")
  what.add_argument("--batch_size", type=int, required=True, help="rows of a batch, over all hosts")
  what.add_argument(
    "--steps", type=_step_range, required=True, metavar="A:B", help="from A up to, not with, B"
  )
  what.add_argument("--row", type=int, help="this row alone")
  what.add_argument("--seed", type=int, default=0, help="the plan's")
  what.add_argument("--num_epochs", type=int, help="where the data ends")
  what.add_argument("--epoch_policy", choices=[p.value for p in EpochPolicy], default="reshuffle")
  what.add_argument("--lanes", type=int, help="the plan's; the default follows from batch size and shards")
  what.add_argument("--format", choices=["text", "jsonl"], default="text")

  verify = add("verify", _verify, "read every byte of a cache and compare it with its manifests")
  verify.add_argument("--split", help="this split alone; all by default")
  return parser


class _Parser(argparse.ArgumentParser):
  """Wrong arguments end as every foreseen failure does."""

  def error(self, message: str) -> NoReturn:
    raise AnystepError(ExitCode.USAGE, "arguments", got=message, fix=f"{self.prog} --help lists them")


def _step_range(text: str) -> range:
  start, separator, stop = text.partition(":")
  if not separator or not start.isdigit() or not stop.isdigit() or int(start) >= int(stop):
    raise argparse.ArgumentTypeError(f"expected A:B with A < B, got {text!r}")
  return range(int(start), int(stop))


def _what_was_at(arguments: argparse.Namespace) -> int:
  cache = open_cache(arguments.cache_dir, arguments.task, arguments.split)
  plan = Plan.start(
    cache,
    batch_size=arguments.batch_size,
    seed=arguments.seed,
    num_epochs=arguments.num_epochs,
    epoch_policy=arguments.epoch_policy,
    lanes=arguments.lanes,
  )
  if arguments.row is not None and not 0 <= arguments.row < arguments.batch_size:
    raise AnystepError(
      ExitCode.USAGE,
      "row",
      expected=f"0 to {arguments.batch_size - 1}",
      got=arguments.row,
      fix="name a row of the batch",
    )
  for step in arguments.steps:
    for row in what_was_at(plan, cache, step):
      if arguments.row is None or row["row"] == arguments.row:
        print(json.dumps(row) if arguments.format == "jsonl" else _as_text(row))
  return 0


def what_was_at(plan: Plan, cache: Cache, step: int) -> Iterator[dict[str, Any]]:
  """The rows of a step's batch with design section 10's keys; padding rows are left out."""
  batch = plan.batch(step)
  m = cache.manifest
  rows = np.nonzero(batch.task != PADDING_TASK)[0]
  indices = batch.place[rows] * m.num_shards + batch.shard[rows]
  source_shards, source_places = cache.source_of(indices)
  for k, row in enumerate(rows.tolist()):
    place, source_shard = int(batch.place[row]), int(source_shards[k])
    yield {
      "step": step,
      "row": row,
      "task": m.task,
      "split": m.split,
      "epoch": int(batch.epoch[row]),
      "unit": int(batch.unit[row]),
      "shard": int(batch.shard[row]),
      "place": place,
      "examples": [
        {
          "index": int(indices[k]),
          "record": place,
          "source_shard": source_shard,
          "source_name": m.source_shards[source_shard].name,
          "source_place": int(source_places[k]),
        }
      ],
    }


def _as_text(row: dict[str, Any]) -> str:
  (example,) = row["examples"]
  return (
    f"step {row['step']} row {row['row']}: {row['task']} {row['split']} epoch {row['epoch']}"
    f" unit {row['unit']} = shard {row['shard']} place {row['place']}, example {example['index']}"
    f" from {example['source_name']} place {example['source_place']}"
  )


def _verify(arguments: argparse.Namespace) -> int:
  splits = (
    [arguments.split]
    if arguments.split
    else sorted(read_completed(task_directory(arguments.cache_dir, arguments.task)))
  )
  # A cache that is not there is open_cache's to report.
  caches = [open_cache(arguments.cache_dir, arguments.task, split) for split in splits or ["train"]]
  for cache in caches:
    m = cache.manifest
    total = sum(entry.bytes for entry in m.files)
    with Progress(f"verify {m.task} {m.split}", total=total, unit="bytes") as progress:
      cache.verify(progress.update)
    print(
      f"{m.task} {m.split}: {m.num_examples:,} examples in {len(m.files)} files, {total:,} bytes: as written"
    )
  return 0


def run() -> None:
  """The console program."""
  run_program(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
  run()
