"""`anystep-train`: trains what gin files configure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from anystep.errors import AnystepError, ExitCode
from anystep.programs.command_line import parse_flags, run_program
from anystep.tasks.registry.moved_functions import MODULE, accept_moved_functions
from anystep.train.configuration.gin_files import GinFiles
from anystep.train.runs.early_checks import check_early
from anystep.train.runs.run_lock import locked_run
from anystep.train.runs.termination import Termination

if TYPE_CHECKING:
  from anystep.train.runs.trainer import PreparedRun, Trainer

_BINDING = "--gin."
# Other programs take bindings so.
_OTHER_BINDING_FLAGS = ("--gin_bindings", "--gin_binding", "--gin")
_EXAMPLES = """--gin.NAME=value sets what a gin file would, and overrides it.

examples:
  anystep-train --gin_file=my_run.gin --dry_run
  anystep-train --gin_file=my_run.gin --gin.MODEL_DIR="'runs/1'" --gin.BATCH_SIZE=16
  anystep-train --gin_file=my_run.gin --cache_if_missing
"""


def main(argv: Sequence[str]) -> int:
  """Train, or with --dry_run check and print; return the exit status.

  Raises:
    AnystepError: 75 `preempted` after SIGTERM; a checkpoint is committed first if a step was taken.
  """
  with Termination() as termination:
    values, _ = _parse(argv)
    trainer = configure(argv)
    if values.dry_run:
      _dry_run(trainer, values)
    else:
      _train(trainer, values, termination)
  return 0


def _train(trainer: Trainer, values: flags.FlagValues, termination: Termination) -> None:
  from anystep.train.configuration.configuration import record_configuration

  with locked_run(trainer.model_dir):
    if values.cache_if_missing:
      _make_missing_caches(trainer, values)
    prepared = trainer.prepare(accept_changes=values.accept_change)
    _report_cuts(prepared)
    prepared.run(termination, started=lambda: record_configuration(trainer.model_dir))


def _dry_run(trainer: Trainer, values: flags.FlagValues) -> None:
  from rich.console import Console

  from anystep.train.configuration.configuration import configuration_text
  from anystep.train.runs.placement import describe_placement, trace_step

  # The data cannot be checked before its caches exist.
  if _print_missing_data(trainer, values):
    start = "step 0, or the newest checkpoint,"
  else:
    prepared = trainer.prepare(accept_changes=values.accept_change)
    _report_cuts(prepared)
    placement = prepared.place()
    Console().print(describe_placement(placement))
    trace_step(
      trainer.model,
      prepared.data,
      placement,
      partitioner=trainer.partitioner,
      microbatches=trainer.microbatches,
    )
    start = prepared.describe_start()
  print(configuration_text())
  print(f"# would train from {start} to step {trainer.total_steps} in {trainer.model_dir}")


def _report_cuts(prepared: PreparedRun) -> None:
  """Print what share of examples and tokens rows cut; warn where it is a large one."""
  for data in (prepared.data, *prepared.evaluation):
    for lengths in data.count_cuts():
      print(lengths.describe_cut(), flush=True)
      if lengths.cuts_much:
        fix = "raise TASK_FEATURE_LENGTHS, or cut the texts into shorter pieces before the cache"
        print(f"WARNING: much of {lengths.task} {lengths.split} is cut: {fix}", file=sys.stderr, flush=True)


def prepare(argv: Sequence[str]) -> PreparedRun:
  """Return the configured run, with its data and checkpoints checked and no device touched."""
  values, _ = _parse(argv)
  return configure(argv).prepare(accept_changes=values.accept_change)


def configure(argv: Sequence[str]) -> Trainer:
  """Return the trainer that the command line configures; its data is not read."""
  values, bindings = _parse(argv)
  files = GinFiles.read(values.gin_file, bindings, search_paths=values.gin_search_paths)
  check_early(files, makes_missing_caches=values.cache_if_missing, locks=not values.dry_run)
  from anystep.tasks.startup import imports_without_collections, quiet_stderr, start_tensorflow

  with imports_without_collections():
    start_tensorflow()
    with quiet_stderr():
      from anystep.train.configuration.configuration import build, load_configuration
      from anystep.train.runs.compile_cache import keep_compiled
      from anystep.train.runs.trainer import Trainer

    keep_compiled()
    load_configuration(files)
  return build(Trainer)


def _make_missing_caches(trainer: Trainer, values: flags.FlagValues) -> bool:
  """Make the missing caches, or with --dry_run print them; return whether any is missing."""
  from anystep.train.datasets.cache_program import cache_first
  from anystep.train.datasets.run_datasets import make_cache_commands

  commands = make_cache_commands(trainer.datasets)
  if commands:
    cache_first(commands, limit_bytes=values.cache_if_missing_limit_bytes, dry_run=values.dry_run)
  return bool(commands)


def _print_missing_data(trainer: Trainer, values: flags.FlagValues) -> bool:
  """Print which caches or descriptions of files are missing and would be made; return whether any is."""
  from anystep.train.datasets.run_datasets import make_index_commands

  if values.cache_if_missing:
    return _make_missing_caches(trainer, values)
  commands = make_index_commands(trainer.datasets, model_dir=trainer.model_dir)
  for command in commands:
    print(f"would describe files where they are: {command}")
  return bool(commands)


def _parse_binding(argument: str) -> tuple[str, str]:
  name, separator, value = argument.removeprefix(_BINDING).partition("=")
  if not separator:
    raise AnystepError(ExitCode.USAGE, "flags", got=argument, fix="write --gin.NAME=value")
  return name, value


def _parse(argv: Sequence[str]) -> tuple[flags.FlagValues, dict[str, str]]:
  """Return the flags, and the gin bindings among the arguments."""
  values = flags.FlagValues()
  flags.DEFINE_multi_string(
    "gin_file",
    None,
    "a gin file; may be repeated, later ones override",
    required=True,
    flag_values=values,
  )
  flags.DEFINE_list(
    "gin_search_paths", [], "directories that gin files are looked for in", flag_values=values
  )
  flags.DEFINE_boolean(
    "dry_run", False, "check and print the configuration without training", flag_values=values
  )
  flags.DEFINE_multi_string(
    "accept_change",
    [],
    "go on though the checkpoint was trained with another value of NAME, as the error names it, or belongs"
    " to another run; with `module`, though the task's functions were in another module when it was cached;"
    " may be repeated",
    flag_values=values,
  )
  flags.DEFINE_boolean(
    "cache_if_missing",
    False,
    "make missing caches first, on this machine, as anystep-cache does",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "cache_if_missing_limit_bytes",
    10**9,
    "largest size of the caches that --cache_if_missing makes, as anystep-cache --dry_run estimates it",
    lower_bound=0,
    flag_values=values,
  )
  plain = [argument for argument in argv if not argument.startswith(_BINDING)]
  for argument in plain:
    if argument.partition("=")[0] in _OTHER_BINDING_FLAGS:
      fix = f"write each binding as {_BINDING}NAME=value, such as {_BINDING}BATCH_SIZE=16"
      raise AnystepError(ExitCode.USAGE, "flags", got=argument, nearest=f"{_BINDING}NAME=value", fix=fix)
  parse_flags(values, plain, program="anystep-train", text=__doc__, examples=_EXAMPLES)
  if MODULE in values.accept_change:
    # Of the task, not of a value: readers of caches are told.
    accept_moved_functions()
    values["accept_change"].value = [name for name in values.accept_change if name != MODULE]
  if values["cache_if_missing_limit_bytes"].present and not values.cache_if_missing:
    got = "--cache_if_missing_limit_bytes without --cache_if_missing"
    raise AnystepError(ExitCode.USAGE, "flags", got=got, fix="add --cache_if_missing, or leave the limit out")
  return values, dict(_parse_binding(argument) for argument in argv if argument.startswith(_BINDING))


def run() -> None:
  """Run the console program."""
  run_program(lambda: main(sys.argv))


if __name__ == "__main__":
  run()
