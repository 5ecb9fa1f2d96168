"""Flags and exit statuses of all programs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence

from absl import flags

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files.os_failures import os_failure
from anystep.programs.progress import show_library_work

# What absl says of a flag that must be given and is not.
_MISSING_FLAG = re.compile(r"Flag (--\w+) must have a value other than None")


def parse_flags(values: flags.FlagValues, argv: Sequence[str], *, program: str, text: str) -> None:
  """Parse a command line into the flags defined on `values`; `--help` prints them and exits.

  Args:
    values: the program's flags.
    argv: the program's name and its arguments.
    program: the program's name in errors.
    text: the text that `--help` prints before the list of flags.

  Raises:
    AnystepError: 64 `flags`.
  """
  check_arguments(argv)
  if {"--help", "-h"} & set(argv):
    print(text, values.get_help(), sep="\n")
    sys.exit(0)
  try:
    positional = values(list(argv))[1:]
  except flags.Error as error:
    got, fix = one_line(error, with_type=False), f"{program} --help lists the flags"
    if missing := _MISSING_FLAG.findall(got):
      got = f"no {' and no '.join(missing)}"
      fix = f"add {' and '.join(f'{flag}=…' for flag in missing)}; {fix}"
    raise AnystepError(ExitCode.USAGE, "flags", got=got, fix=fix) from error
  if positional:
    raise AnystepError(ExitCode.USAGE, "flags", got=" ".join(positional), fix="give values as --flag=value")


def check_arguments(argv: Sequence[str]) -> None:
  """Refuse arguments with NUL or with characters that have no bytes: no file's name can have them.

  Raises:
    AnystepError: 64 `arguments`.
  """
  for argument in argv:
    try:
      is_valid = b"\0" not in os.fsencode(argument)
    except UnicodeEncodeError:
      is_valid = False
    if not is_valid:
      expected, fix = "characters that names of files may have", "remove the character"
      raise AnystepError(ExitCode.USAGE, "arguments", expected=expected, got=argument, fix=fix)


def _print_error(error: AnystepError) -> int:
  """Print an error and its notes on stderr; return the exit status."""
  for note in getattr(error, "__notes__", ()):
    print(note, file=sys.stderr)
  print(error, file=sys.stderr, flush=True)
  return int(error.code)


def _was_interrupted(error: BaseException) -> bool:
  """Return whether a Ctrl-C caused the error: Beam wraps KeyboardInterrupt in errors of its own."""
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, KeyboardInterrupt):
      return True
    cause = cause.__cause__ or cause.__context__
  return False


def run_program(main: Callable[[], int]) -> None:
  """Run a program's `main` and exit with its status; print a foreseen failure as one line on stderr."""
  try:
    with show_library_work():
      status = main()
  except AnystepError as error:
    status = _print_error(error)
  except KeyboardInterrupt:
    status = 130
  except BrokenPipeError:
    # The reader of our output has closed it. Without this Python would report that again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    status = 141
  except OSError as error:
    status = _print_error(os_failure(error))
  except KeyError as error:
    # epath looks up a path's scheme in a dictionary.
    scheme = str(error.args[0]) if error.args else ""
    if not scheme.endswith("://"):
      raise
    status = _print_error(
      AnystepError(
        ExitCode.CONFIG,
        "store_unsupported",
        expected="paths of a file system",
        got=f"one that begins with {scheme}",
        fix="mount the store, or copy its files to a disk",
      )
    )
  except MemoryError as error:
    fix = "ask for smaller batches, shorter feature lengths or fewer rows, or give the program more memory"
    got = str(error) or "MemoryError"
    status = _print_error(AnystepError(ExitCode.CONFIG, "out_of_memory", got=got, fix=fix))
  except Exception as error:
    if not _was_interrupted(error):
      raise
    status = 130
  sys.exit(status)
