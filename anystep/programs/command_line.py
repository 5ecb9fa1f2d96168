"""What the programs' command lines have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from absl import flags

from anystep.errors import AnystepError, ExitCode
from anystep.files.os_failures import os_failure
from anystep.programs.progress import shown_library_work


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
  check_arguments(argv)
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


def check_arguments(argv: Sequence[str]) -> None:
  """Refuses arguments that no shell can give, for no file's name holds them: NUL, and what has no bytes.

  Raises:
    AnystepError: 64 `arguments`.
  """
  for argument in argv:
    try:
      held = b"\0" not in os.fsencode(argument)
    except UnicodeEncodeError:
      held = False
    if not held:
      expected, fix = "characters that names of files may have", "leave the character out"
      raise AnystepError(ExitCode.USAGE, "arguments", expected=expected, got=argument, fix=fix)


def _end(error: AnystepError) -> int:
  for note in getattr(error, "__notes__", ()):
    print(note, file=sys.stderr)
  print(error, file=sys.stderr, flush=True)
  return int(error.code)


def _was_interrupted(error: BaseException) -> bool:
  """Whether an error stands for a Ctrl-C, as Beam makes one of it while it runs."""
  above: BaseException | None = error
  while above is not None:
    if isinstance(above, KeyboardInterrupt):
      return True
    above = above.__cause__ or above.__context__
  return False


def run_program(main: Callable[[], int]) -> None:
  """Runs a program's `main` and exits with its status; a foreseen failure becomes one stderr line."""
  try:
    with shown_library_work():
      status = main()
  except AnystepError as error:
    status = _end(error)
  except KeyboardInterrupt:
    status = 130
  except BrokenPipeError:
    # Who reads our output has had enough; Python would complain once more when it closes stdout.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    status = 141
  except OSError as error:
    status = _end(os_failure(error))
  except KeyError as error:
    # epath looks a path's scheme up in a dictionary.
    scheme = str(error.args[0]) if error.args else ""
    if not scheme.endswith("://"):
      raise
    status = _end(
      AnystepError(
        ExitCode.CONFIG,
        "store_unsupported",
        expected="paths of a file system",
        got=f"one that begins with {scheme}",
        fix="mount the store, or copy what is on it to a disk",
      )
    )
  except MemoryError as error:
    fix = "ask for smaller batches, shorter feature lengths or fewer rows, or give the program more memory"
    got = str(error) or "MemoryError"
    status = _end(AnystepError(ExitCode.CONFIG, "out_of_memory", got=got, fix=fix))
  except Exception as error:
    if not _was_interrupted(error):
      raise
    status = 130
  sys.exit(status)
