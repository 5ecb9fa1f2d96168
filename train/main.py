"""`anystep-train`: trains what gin files configure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from anystep.command_line import parse_flags, run_program
from anystep.errors import AnystepError, ExitCode

if TYPE_CHECKING:
  from anystep.train.trainer import PreparedRun

_BINDING = "--gin."


def main(argv: Sequence[str]) -> int:
  """Trains, or with --dry_run checks and prints; returns the exit status."""
  prepared = prepare(argv)
  from anystep.train.configuration import configuration_text, record_configuration

  if not _parse(argv)[0].dry_run:
    record_configuration(prepared.trainer.model_dir)
    prepared.run()
    return 0
  print(configuration_text())
  start = "step 0" if prepared.restore_step is None else f"checkpoint_{prepared.restore_step}"
  print(f"# would train from {start} to step {prepared.trainer.total_steps} in {prepared.trainer.model_dir}")
  return 0


def prepare(argv: Sequence[str]) -> PreparedRun:
  """What the command line configures, its data and checkpoints checked, no device touched."""
  values, bindings = _parse(argv)
  from anystep.tasks.modules import look_here_first
  from anystep.tasks.startup import start_tensorflow

  start_tensorflow()
  # Gin files import the user's own modules.
  look_here_first()

  from anystep.train.configuration import build, load_configuration

  load_configuration(values.gin_file, bindings, search_paths=values.gin_search_paths)

  from anystep.train.trainer import Trainer

  return build(Trainer).prepare()


def _binding(argument: str) -> tuple[str, str]:
  name, separator, value = argument.removeprefix(_BINDING).partition("=")
  if not separator:
    raise AnystepError(ExitCode.USAGE, "flags", got=argument, fix="write --gin.NAME=value")
  return name, value


def _parse(argv: Sequence[str]) -> tuple[flags.FlagValues, dict[str, str]]:
  """The flags, and the gin bindings among the arguments."""
  values = flags.FlagValues()
  flags.DEFINE_multi_string(
    "gin_file",
    None,
    "A gin file; may be repeated, later ones override.",
    required=True,
    flag_values=values,
  )
  flags.DEFINE_list(
    "gin_search_paths", [], "Directories that gin files are looked for in.", flag_values=values
  )
  flags.DEFINE_boolean(
    "dry_run", False, "Check and print the configuration without training.", flag_values=values
  )
  text = f"{__doc__}\n\n  {_BINDING}NAME=value sets what a gin file would, and overrides it.\n"
  plain = [argument for argument in argv if not argument.startswith(_BINDING)]
  parse_flags(values, plain, program="anystep-train", text=text)
  return values, dict(_binding(argument) for argument in argv if argument.startswith(_BINDING))


def run() -> None:
  """The console program."""
  run_program(lambda: main(sys.argv))
