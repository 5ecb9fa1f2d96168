"""What the programs' command lines have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from absl import flags

from anystep.errors import AnystepError, ExitCode


def parse_flags(values: flags.FlagValues, argv: Sequence[str], *, program: str, text: str) -> None:
  """Parses a command line into flags that were defined on `values`; `--help` prints them and ends.

  Args:
    values: the program's flags.
    argv: the program's name and its arguments.
    program: the name that errors speak of.
    text: what `--help` says before it lists the flags.

  Raises:
    AnystepError: 64 `flags`.
  """
  if {"--help", "-h"} & set(argv):
    print(text, values.get_help(), sep="\n")
    sys.exit(0)
  try:
    rest = values(list(argv))[1:]
  except flags.Error as error:
    raise AnystepError(
      ExitCode.USAGE, "flags", got=str(error), fix=f"{program} --help lists the flags"
    ) from error
  if rest:
    raise AnystepError(ExitCode.USAGE, "flags", got=" ".join(rest), fix="give values as --flag=value")


def _os_failure(error: OSError, code: ExitCode, kind: str, fix: str) -> int:
  got = f"{type(error).__name__}: {error.strerror}"
  print(AnystepError(code, kind, path=error.filename, got=got, fix=fix), file=sys.stderr, flush=True)
  return int(code)


def run_program(main: Callable[[], int]) -> None:
  """Runs a program's `main` and exits with its status; a foreseen failure becomes one stderr line."""
  try:
    status = main()
  except AnystepError as error:
    for note in getattr(error, "__notes__", ()):
      print(note, file=sys.stderr)
    print(error, file=sys.stderr, flush=True)
    status = int(error.code)
  except KeyboardInterrupt:
    status = 130
  except BrokenPipeError:
    # Who reads our output has had enough; Python would complain once more when it closes stdout.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    status = 141
  except (NotADirectoryError, FileExistsError, PermissionError) as error:
    status = _os_failure(
      error, ExitCode.CANNOT_CREATE, "cannot_create", "choose a place that can be written to"
    )
  except OSError as error:
    status = _os_failure(error, ExitCode.IO, "io_failed", "see to the disk or store, and run it again")
  sys.exit(status)
