"""Beam's options on our command line.

Beam takes seconds to import, and most command lines have no option of Beam: functions import it when needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from absl import flags

from anystep.errors import AnystepError, ExitCode, find_nearest, one_line
from anystep.tasks.startup import quiet_stderr

_OPTIONS_FIX = "give Beam's options as --name=value, and one whose value has a comma as a flag of its own"


def split_arguments(argv: Sequence[str], known: flags.FlagValues) -> tuple[list[str], list[str]]:
  """Split a command line into the program's own arguments and Beam's options.

  An argument is Beam's where the program has no such flag and Beam has such an option, as `--name=value`,
  `--name value` or `--name`. Where both have it, it is the program's (of anystep-cache, --dry_run alone),
  and Beam's own comes through --pipeline_options. What follows `--` is the program's. Beam is imported
  only where something is not the program's.

  Args:
    argv: the program's name and its arguments.
    known: the program's flags, which are not parsed here.

  Returns:
    The program's name and arguments, and Beam's, in the order that they came in.

  Raises:
    AnystepError: 64 `flags` for what neither knows, and for values that Beam's options do not take.
  """
  if {"--help", "-h"} & set(argv):
    return list(argv), []
  own, beams = list(argv[:1]), list[str]()
  rest = list(argv[1:])
  while rest:
    argument = rest.pop(0)
    if argument == "--":
      own += [argument, *rest]
      break
    values = _count_further_arguments(argument, known)
    if values is not None:
      own += [argument, *rest[:values]]
      del rest[:values]
    else:
      beams.append(argument)
      while rest and not rest[0].startswith("-"):
        beams.append(rest.pop(0))
  if beams:
    _check_beam_arguments(
      beams, "flags", own_names=known, fix="--help lists the flags; give values as --name=value"
    )
  return own, beams


def _count_further_arguments(argument: str, known: flags.FlagValues) -> int | None:
  """Count the further arguments that absl reads with this one; None where the program has no such flag."""
  if not argument.startswith("-"):
    return 0
  name, equals, _ = argument.lstrip("-").partition("=")
  if name in known:
    return 0 if equals or known[name].boolean else 1
  negated = name.removeprefix("no")
  return 0 if negated != name and negated in known and known[negated].boolean else None


def check_pipeline_options(arguments: Iterable[str]) -> None:
  """Refuse options that Beam does not know: Beam itself would only log them.

  Raises:
    AnystepError: 64 `pipeline_options`.
  """
  _check_beam_arguments(list(arguments), "pipeline_options", own_names=(), fix=_OPTIONS_FIX)


def _check_beam_arguments(arguments: list[str], kind: str, *, own_names: Iterable[str], fix: str) -> None:
  parser = _make_beam_parser()
  try:
    _, unknown = parser.parse_known_args(arguments)
  except argparse.ArgumentError as error:
    raise AnystepError(ExitCode.USAGE, kind, got=one_line(error, with_type=False), fix=fix) from error
  if unknown:
    name = unknown[0].lstrip("-").partition("=")[0]
    own_nearest = {"nearest": find_nearest(name, own_names)} if own_names else {}
    beams = vars(parser.parse_known_args([])[0])
    raise AnystepError(
      ExitCode.USAGE,
      kind,
      got=" ".join(unknown),
      **own_nearest,
      nearest_of_beam=find_nearest(name, beams),
      fix=fix,
    )


def _make_beam_parser() -> argparse.ArgumentParser:
  """Return a parser of the options of all Beam's classes of pipeline options."""
  with quiet_stderr():
    from apache_beam.options.pipeline_options import PipelineOptions

  parsers: list[argparse.ArgumentParser] = []
  PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
  parsers[0].exit_on_error = False
  return parsers[0]
