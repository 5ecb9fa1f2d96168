"""`anystep-train`: trains what gin files configure."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from anystep.errors import AnystepError, ExitCode, run_program

if TYPE_CHECKING:
  from anystep.train.trainer import PreparedRun

_BINDING = "--gin."


def main(argv: Sequence[str]) -> int:
  """Trains, or with --dry_run checks and prints; returns the exit status."""
  prepared = prepare(argv)
  if not _parse(argv)[0].dry_run:
    prepared.run()
    return 0
  from anystep.train.configuration import configuration_text

  print(configuration_text())
  start = "step 0" if prepared.restore_step is None else f"checkpoint_{prepared.restore_step}"
  print(f"# would train from {start} to step {prepared.trainer.total_steps} in {prepared.trainer.model_dir}")
  return 0


def prepare(argv: Sequence[str]) -> PreparedRun:
  """What the command line configures, its data and checkpoints checked, no device touched."""
  values, bindings = _parse(argv)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # The current directory holds the user's own modules, which gin files import.
  sys.path.insert(0, os.getcwd())

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
  bindings = dict(_binding(argument) for argument in argv if argument.startswith(_BINDING))
  argv = [argument for argument in argv if not argument.startswith(_BINDING)]
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_multi_string(
    "gin_file", None, "A gin file; may be repeated, later ones override.", required=True, **define
  )
  flags.DEFINE_list("gin_search_paths", [], "Directories that gin files are looked for in.", **define)
  flags.DEFINE_boolean("dry_run", False, "Check and print the configuration without training.", **define)
  try:
    if {"--help", "-h"} & set(argv):
      print(__doc__, values.get_help(), f"  {_BINDING}NAME=value: a gin binding.", sep="\n")
      sys.exit(0)
    rest = values(list(argv))[1:]
  except flags.Error as error:
    raise AnystepError(
      ExitCode.USAGE, "flags", got=str(error), fix="anystep-train --help lists the flags"
    ) from error
  if rest:
    raise AnystepError(ExitCode.USAGE, "flags", got=" ".join(rest), fix="give values as --flag=value")
  return values, bindings


def run() -> None:
  """The console program."""
  run_program(lambda: main(sys.argv))
