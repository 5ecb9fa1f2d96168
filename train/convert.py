"""`anystep-convert`: checkpoints of other programs for ours, and ours for theirs."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.files.names import checkpoint_name
from anystep.programs.command_line import run_program
from anystep.programs.progress import Progress, format_duration, log_notice
from anystep.tasks.data_program.arguments import Parser

if TYPE_CHECKING:
  from anystep.train.conversion.formats import SavedCheckpoint
  from anystep.train.leaves.leaf import Leaves, Writer

_EXAMPLES = """It reads our checkpoints, T5X's (Orbax's trees and version 3), the original T5's (Mesh
TensorFlow) and Hugging Face's T5, mT5, umT5 and Llama (safetensors). Each leaf's counterpart stands in
docs/checkpoints.md.

examples:
  anystep-convert --from=t5_1_1_base/checkpoint_1000000 --to=t5_1_1_base_anystep --dry_run
  anystep-convert --from=t5-v1_1-base --to=t5_1_1_base_anystep
  anystep-convert --from=runs/1 --to=exported --format=huggingface --dtype=bfloat16
  anystep-convert --from=runs/1 --to=parameters --assign='state/param_states/.*=>'
"""
_FORMATS = ("anystep", "t5x", "huggingface")
_MEGABYTE = 10**6
_WRITTEN = "written"


def main(argv: Sequence[str]) -> int:
  """Convert, or with --dry_run print what would be converted; return the exit status."""
  arguments = make_parser().parse_args(argv)
  from anystep.tasks.startup import quiet_stderr

  with quiet_stderr():
    from anystep.train.conversion import formats
    from anystep.train.conversion.assignment import parse_rules, rename
    from anystep.train.leaves.leaf import find_dtype

  rules = parse_rules(arguments.assign) if arguments.assign else []
  paths = formats.find_checkpoints(arguments.source)
  if len(paths) > 1:
    log_notice(f"of {len(paths)} checkpoints there, {os.path.basename(paths[-1])} is converted, the newest")
  saved = formats.open_checkpoint(paths[-1])
  sources = rename(saved.leaves, rules)
  leaves: Leaves = {name: saved.leaves[source] for name, source in sources.items()}
  if arguments.dtype is not None:
    leaves = formats.cast_parameters(leaves, find_dtype(arguments.dtype))
  source = os.path.abspath(saved.path)
  write = formats.plan_writing(arguments.format, leaves, source=source, settings=saved.settings)
  target = _local_path(arguments.to)
  if arguments.format != formats.HUGGING_FACE:
    target = os.path.join(target, checkpoint_name(formats.step_in(leaves)))
  else:
    leaves = _parameters_of(leaves)
  _check_absent(target)
  if arguments.dry_run:
    _print_leaves(leaves, sources)
    print(f"# would write {_describe(leaves)} to {target}, from {_describe_source(saved)}")
    return 0
  begin_seconds = time.monotonic()
  _write_whole(target, write, num_bytes=sum(leaf.num_bytes for leaf in leaves.values()))
  seconds = format_duration(time.monotonic() - begin_seconds)
  print(f"{target}: {_describe(leaves)}, from {_describe_source(saved)}, in {seconds}")
  return 0


def run() -> None:
  """Run the console program."""
  run_program(lambda: main(sys.argv[1:]))


def make_parser() -> argparse.ArgumentParser:
  """Return the parser of the command line."""
  parser = Parser(
    prog="anystep-convert",
    description=__doc__,
    epilog=_EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  text = "a checkpoint, whose format its files tell, or a directory of some: the newest"
  parser.add_argument("--from", dest="source", required=True, metavar="PATH", help=text)
  text = "directory to write to: a Hugging Face model is that directory, other checkpoints stand in it"
  parser.add_argument("--to", required=True, metavar="PATH", help=text)
  parser.add_argument(
    "--format", choices=_FORMATS, default="anystep", help="format to write; default anystep"
  )
  text = "dtype to round parameters to; by default they keep theirs, and optimizers' moments always do"
  parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=text)
  text = "rules by T5X's names of leaves: those that match as a whole get the new name; none leaves them out"
  parser.add_argument("--assign", metavar="'REGEX=>NAME,…'", help=text)
  parser.add_argument("--dry_run", action="store_true", help="check, and print the leaves, without writing")
  return parser


def _parameters_of(leaves: Leaves) -> Leaves:
  """Return the parameters among leaves, and report others."""
  from anystep.train.leaves.leaf import PARAMETERS

  left_out = [name for name in leaves if not name.startswith(PARAMETERS)]
  if left_out:
    leaves_are = "1 leaf is" if len(left_out) == 1 else f"{len(left_out)} leaves are"
    log_notice(f"{leaves_are} left out, such as {left_out[0]}: the format has parameters alone")
  return {name: leaf for name, leaf in leaves.items() if name.startswith(PARAMETERS)}


def _local_path(path: str) -> str:
  """Return a path without slashes at its end; refuse those that are not of a file system."""
  if storage.is_remote(path):
    raise AnystepError(
      ExitCode.CONFIG,
      "store_unsupported",
      expected="a directory of a file system as --to",
      got=path,
      fix="convert to a disk, and copy the directory to the store",
    )
  return os.path.normpath(path)


def _check_absent(target: str) -> None:
  if storage.is_remote(target):
    raise AnystepError(
      ExitCode.CONFIG,
      "store_unsupported",
      expected="a directory in a file system as --to",
      got=target,
      fix="mount the store, or convert to a disk and copy the directory",
    )
  if os.path.lexists(target):
    raise AnystepError(
      ExitCode.CANNOT_CREATE,
      "output_exists",
      path=target,
      expected="no such file or directory",
      got="one that exists",
      fix="name another directory as --to, or remove this one",
    )


def _write_whole(target: str, write: Writer, *, num_bytes: int) -> None:
  """Write a directory whole or not at all: in another one, from which it is moved last.

  A conversion that was killed leaves that other directory, and the next one to this target begins it anew.
  Its lock admits one conversion at a time, so that none moves what another has not written yet.
  """
  from anystep.files.directory_lock import locked_directory
  from anystep.train.checkpoints.integrity import flush_to_disk

  unfinished = f"{target}.unfinished"
  written = os.path.join(unfinished, _WRITTEN)
  done_bytes = 0

  def advance(count: int) -> None:
    nonlocal done_bytes
    done_bytes += count
    progress.update(done_bytes // _MEGABYTE)

  fix = "wait for that conversion, or name another directory as --to"
  with locked_directory(unfinished, kind="conversion_running", fix=fix):
    # Another conversion may have ended since the first look.
    _check_absent(target)
    if os.path.isdir(written):
      shutil.rmtree(written)
    with Progress("convert", total=-(-num_bytes // _MEGABYTE), unit="MB") as progress:
      try:
        write(written, advance)
      except ValueError as error:
        # TensorStore reports a full disk as a ValueError.
        raise AnystepError(
          ExitCode.IO,
          "checkpoint_write",
          path=written,
          got=str(error)[:300],
          fix="check the disk, and run it again",
        ) from error
    flush_to_disk(written)
    os.rename(written, target)
    storage.sync(os.path.dirname(os.path.abspath(target)))
  # The next conversion may hold it already.
  with contextlib.suppress(OSError):
    os.rmdir(unfinished)


def _print_leaves(leaves: Leaves, sources: dict[str, str]) -> None:
  for name, leaf in sorted(leaves.items()):
    renamed = f", from {sources[name]}" if sources[name] != name else ""
    print(f"{name}: {leaf.describe()}{renamed}")


def _describe(leaves: Leaves) -> str:
  return f"{len(leaves):,} leaves of {sum(leaf.num_bytes for leaf in leaves.values()):,} bytes"


def _describe_source(saved: SavedCheckpoint) -> str:
  return f"{saved.path} ({saved.format}, step {saved.step:,})"


if __name__ == "__main__":
  run()
