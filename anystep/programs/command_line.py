"""Flags and exit statuses of all programs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from absl import flags

from anystep.errors import AnystepError, ExitCode, exception_chain, one_line
from anystep.files.os_failures import os_failure
from anystep.programs.progress import show_library_work

# What absl says of a flag that must be given and is not.
_REQUIRED = "must have a value other than None"
_MISSING_FLAG = re.compile(rf"Flag (--\w+) {_REQUIRED}")
# What absl adds to a flag's text: an enum's values, and that a flag may be repeated.
_OF_ABSL = re.compile(r"^<[^>]*>: |;\s+repeat this option to specify a list of values$")
# What stands for a flag's value in help, by absl's class of its parser.
_METAVARS = {
  "ListParser": "A,B",
  "WhitespaceSeparatedListParser": "A,B",
  "IntegerParser": "N",
  "FloatParser": "X",
}


def parse_flags(
  values: flags.FlagValues, argv: Sequence[str], *, program: str, text: str, examples: str = ""
) -> None:
  """Parse a command line into the flags defined on `values`; `--help` prints them and exits.

  Args:
    values: the program's flags.
    argv: the program's name and its arguments.
    program: the program's name in errors.
    text: the text that `--help` prints before the list of flags.
    examples: what it prints after it.

  Raises:
    AnystepError: 64 `flags`.
  """
  check_arguments(argv)
  if {"--help", "-h"} & set(argv):
    print(_format_help(values, program, text, examples))
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


def _format_help(values: flags.FlagValues, program: str, text: str, examples: str) -> str:
  """Format a program's flags as argparse formats those of the programs that have commands."""
  parser = argparse.ArgumentParser(
    prog=program,
    description=text,
    epilog=examples,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  for name in values:
    flag = values[name]
    shown_help = _OF_ABSL.sub("", flag.help).rstrip(".").replace("%", "%%")
    if flag.boolean:
      parser.add_argument(f"--{name}", f"--no{name}", action="store_true", help=shown_help)
      continue
    choices = getattr(flag.parser, "enum_values", None)
    metavar = f"{{{','.join(choices)}}}" if choices else _METAVARS.get(type(flag.parser).__name__, "TEXT")
    is_required = any(_REQUIRED in validator.message for validator in flag.validators)
    value = ",".join(flag.value) if isinstance(flag.value, list) else flag.value
    default = "" if value in (None, "") else f"; default {value}"
    parser.add_argument(f"--{name}", metavar=metavar, required=is_required, help=f"{shown_help}{default}")
  return parser.format_help().rstrip("\n")


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
    # Beam wraps KeyboardInterrupt in errors of its own.
    if not any(isinstance(cause, KeyboardInterrupt) for cause in exception_chain(error)):
      raise
    status = 130
  sys.exit(status)
