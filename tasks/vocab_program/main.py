"""`anystep-vocab`: SentencePiece models trained on a task's text, and what vocabularies' files hold."""

from __future__ import annotations

import argparse
import contextlib
import glob
import hashlib
import io
import itertools
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.files.input_files import read_file
from anystep.limits import MAX_COUNT
from anystep.programs.command_line import run_program
from anystep.programs.module_names import check_modules
from anystep.programs.progress import Progress, format_duration
from anystep.tasks.data_program.arguments import Parser, check_output
from anystep.tasks.registry.modules import import_modules
from anystep.tasks.sources.arrow_rows import find_compression, open_input
from anystep.tasks.text_formats import FORMATS, find_format, open_source
from anystep.tasks.vocab_program.training import (
  MODEL_TYPES,
  Coverage,
  TrainedModel,
  TrainingOptions,
  load_processor,
  train_model,
)
from anystep.tasks.vocabularies.decoding import escape_unprintable

_SHOWN_TEXT = "The quick brown fox jumps over 13 lazy dogs."
_SHOWN_SECONDS = 0.5
# The format whose texts are lines.
_LINES = "txt"
_EXAMPLES = """examples:
  anystep-vocab train --task=my_task --module_import=my_tasks --size=32000 --output=my.model
  anystep-vocab train --files="data/*.jsonl" --column=text --size=8000 --byte_fallback --output=my.model
  anystep-vocab show my.model --text="how is this encoded?"
"""
_MAX_FILE_BYTES = 1 << 30
_MAX_PIECES = 1 << 24


def main(argv: Sequence[str]) -> int:
  """Runs the command that the arguments name; returns the exit status."""
  arguments = make_parser().parse_args(argv)
  arguments.run(arguments)
  return 0


def run() -> None:
  """The console program."""
  sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
  run_program(lambda: main(sys.argv[1:]))


def make_parser() -> argparse.ArgumentParser:
  parser = Parser(
    prog="anystep-vocab",
    description=__doc__,
    epilog=_EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  commands = parser.add_subparsers(required=True, parser_class=Parser, metavar="COMMAND")
  text = "train a SentencePiece model on a task's text, or on files, and print how well it covers them"
  train = commands.add_parser("train", help=text, description=text, allow_abbrev=False)
  train.set_defaults(run=_train)
  texts = train.add_argument_group("the texts")
  source = texts.add_mutually_exclusive_group(required=True)
  source.add_argument("--task", help="a registered task: its examples before seqio.preprocessors.tokenize")
  text = 'files, as "data/*.jsonl", whose ending says their format, as for text_task'
  source.add_argument("--files", metavar="PATTERN", help=text)
  text = "a module that registers the task; may be repeated"
  texts.add_argument("--module_import", action="append", default=[], metavar="MODULE", help=text)
  texts.add_argument("--split", help="of the task; default train")
  text = "of the task, may be repeated; default all output features that are text"
  texts.add_argument("--feature", action="append", help=text)
  text = "of the files, that has the texts; default text. Files of lines, .txt, have none"
  texts.add_argument("--column", help=text)
  text = "the ending that stands for the files' format, where they have another"
  texts.add_argument("--file_format", choices=sorted(FORMATS), help=text)
  text = "read at most so many, an equal number of each source shard or file; default 200000"
  texts.add_argument("--max_examples", type=_make_count_parser(1), default=200_000, metavar="N", help=text)
  model = train.add_argument_group("the model")
  text = "pieces, with padding, end and unknown"
  model.add_argument("--size", type=_make_count_parser(4, _MAX_PIECES), required=True, metavar="N", help=text)
  model.add_argument("--model_type", choices=MODEL_TYPES, default="unigram", help="default unigram")
  text = "share of the text's characters that get pieces; default 0.9995"
  model.add_argument("--character_coverage", type=_parse_share, default=0.9995, metavar="SHARE", help=text)
  text = "rare characters become bytes, in place of unknown; the size holds 256 pieces for them"
  model.add_argument("--byte_fallback", action="store_true", help=text)
  model.add_argument("--output", required=True, metavar="FILE", help="the model's file")
  model.add_argument("--overwrite", action="store_true", help="replace the file that is there")
  text = "print a vocabulary's size and special ids, and how it encodes a text"
  show = commands.add_parser("show", help=text, description=text, allow_abbrev=False)
  show.set_defaults(run=_show)
  show.add_argument("file", metavar="FILE", help="a SentencePiece model or a tokenizer.json")
  show.add_argument("--text", default=_SHOWN_TEXT, help="the text to encode")
  return parser


def _train(arguments: argparse.Namespace) -> None:
  check_output(arguments.output, arguments.overwrite)
  of_task, of_files = ("feature", "module_import", "split"), ("column", "file_format")
  source, other, others = (
    ("task", "files", of_files) if arguments.files is None else ("files", "task", of_task)
  )
  if given := [name for name in others if getattr(arguments, name)]:
    raise _make_usage_error(f"--{given[0]} with --{source}", f"leave it out: it is for --{other}")
  options = TrainingOptions(
    size=arguments.size,
    model_type=arguments.model_type,
    character_coverage=arguments.character_coverage,
    byte_fallback=arguments.byte_fallback,
  )
  examples = _read_files(arguments) if arguments.files is not None else _read_task_texts(arguments)
  begin_seconds = time.monotonic()
  trained = _train_with_progress(examples, options)
  seconds = time.monotonic() - begin_seconds
  coverage = Coverage.of(trained.content, trained.held_out or trained.first_texts)
  storage.put(arguments.output, trained.content)
  name = arguments.model_type
  counts = f"{arguments.size:,} pieces ({name}), {len(trained.content):,} bytes"
  print(f"{arguments.output}: {counts}, of {trained.trained_examples:,} texts in {format_duration(seconds)}")
  measured = f"{len(trained.held_out):,} texts that were held out"
  print(f"measured on {measured if trained.held_out else 'texts that it was trained on: there are few'}:")
  print(*(f"  {line}" for line in coverage.lines()), sep="\n")


def _train_with_progress(examples: Iterator[list[str]], options: TrainingOptions) -> TrainedModel:
  """A model trained on texts, with a bar while they are read, and one while it is made of them."""
  with contextlib.ExitStack() as training:

    def texts() -> Iterator[str]:
      with Progress("read", total=None, unit="examples") as progress:
        for number, of_example in enumerate(examples, start=1):
          yield from of_example
          progress.update(number)
      training.enter_context(_show_training(options))

    return train_model(texts(), options)


@contextlib.contextmanager
def _show_training(options: TrainingOptions) -> Iterator[None]:
  """Shows how long SentencePiece has been training; how far it is, it does not say."""
  done = threading.Event()
  with Progress("train", total=options.size, unit="pieces") as progress:

    def show() -> None:
      while not done.wait(_SHOWN_SECONDS):
        progress.update(0, SentencePiece="is at work")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
      yield
    finally:
      done.set()
      thread.join()
    progress.update(options.size)


def _read_task_texts(arguments: argparse.Namespace) -> Iterator[list[str]]:
  check_modules(arguments.module_import)
  from anystep.tasks.startup import quiet_stderr, start_tensorflow

  start_tensorflow()
  with quiet_stderr():
    from anystep.tasks.registry.named_tasks import find_task
    from anystep.tasks.vocab_program.task_texts import read_task_texts
  import_modules(arguments.module_import)
  fix = "correct the name, or name the module that registers it with --module_import"
  return read_task_texts(
    find_task(arguments.task, fix=fix),
    arguments.split or "train",
    features=arguments.feature,
    max_examples=arguments.max_examples,
  )


def _read_files(arguments: argparse.Namespace) -> Iterator[list[str]]:
  paths = [path for path in sorted(glob.glob(arguments.files, recursive=True)) if _may_end(path)]
  if not paths:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "files_missing",
      path=arguments.files,
      expected="files of text",
      got="none that the pattern matches",
      fix="correct the pattern, and quote it for the shell",
    )
  by_format: dict[str, list[str]] = {}
  for path in paths:
    by_format.setdefault(_find_format(path, arguments.file_format), []).append(path)
  quota = -(-arguments.max_examples // len(paths))
  column = arguments.column or "text"
  readers = [
    _read_lines(of_format, quota) if name == _LINES else _read_columns(name, of_format, column, quota)
    for name, of_format in sorted(by_format.items())
  ]
  return itertools.chain.from_iterable(readers)


def _find_format(path: str, file_format: str | None) -> str:
  """Return a file's format; a pipe's is lines of text, and so is that of text in any compression."""
  if file_format is not None:
    return file_format
  without_compression = path.removesuffix(find_compression(path))
  if os.path.splitext(without_compression)[1] == f".{_LINES}" or stat.S_ISFIFO(os.stat(path).st_mode):
    return _LINES
  return find_format(path, option="--file_format")


def _read_lines(paths: Sequence[str], quota: int) -> Iterator[list[str]]:
  return ([line] for path in paths for line in _first_lines(path, quota))


def _read_columns(name: str, paths: Sequence[str], column: str, quota: int) -> Iterator[list[str]]:
  """Return the texts of a column of files, as `text_task` reads them."""
  from anystep.tasks.startup import quiet_stderr, start_tensorflow

  start_tensorflow()
  with quiet_stderr():
    import seqio

    from anystep.tasks.vocab_program.task_texts import read_task_texts
  task = seqio.Task(
    "files",
    source=open_source(name, {"train": paths}, column),
    preprocessors=[seqio.preprocessors.tokenize],
    output_features={},
  )

  def read() -> Iterator[list[str]]:
    try:
      yield from read_task_texts(task, "train", features=[column], max_examples=quota * len(paths))
    except AnystepError as error:
      if error.kind == "source_unreadable":
        error.fix = "mend the file, or say which format it is in with --file_format"
      raise

  return read()


def _may_end(path: str) -> bool:
  """Return whether a path is a file, or a pipe such as `<(command)`; devices may give endless text."""
  mode = os.stat(path).st_mode if os.path.exists(path) else 0
  return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)


def _first_lines(path: str, count: int) -> Iterator[str]:
  with io.TextIOWrapper(open_input(path), encoding="utf-8", errors="replace") as file:
    for _, line in zip(range(count), file, strict=False):
      yield line.rstrip("\n")


def _show(arguments: argparse.Namespace) -> None:
  try:
    content = read_file(arguments.file, limit_bytes=_MAX_FILE_BYTES)
  except ValueError as error:
    raise _make_invalid_error(arguments.file, one_line(error)) from error
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "vocabulary_missing",
      path=arguments.file,
      expected="a SentencePiece model or a tokenizer.json",
      got=error.strerror,
      fix="name the file of a vocabulary",
    ) from error
  lines = _describe_tokenizer if content.lstrip()[:1] == b"{" else _describe_model
  print(*lines(arguments.file, content, arguments.text), sep="\n")
  print(f"sha256: {hashlib.sha256(content).hexdigest()}")


def _describe_model(path: str, content: bytes, text: str) -> list[str]:
  try:
    processor = load_processor(content)
  except RuntimeError as error:
    raise _make_invalid_error(path, one_line(error)) from error
  size = processor.get_piece_size()
  if not size:
    raise _make_invalid_error(path, "no pieces")
  special = {
    "padding": processor.pad_id(),
    "end": processor.eos_id(),
    "unknown": processor.unk_id(),
    "begin": processor.bos_id(),
  }
  ids = ", ".join(f"{name} {'none' if token < 0 else token}" for name, token in special.items())
  lines = [f"SentencePiece model, {size:,} pieces", f"ids: {ids}"]
  if special["padding"] != 0:
    lines.append("SeqIO takes id 0 for padding: train the model with pad_id=0, eos_id=1, unk_id=2")
  return lines + _format_encoding(processor.encode_as_pieces(text), processor.encode_as_ids(text))


def _describe_tokenizer(path: str, content: bytes, text: str) -> list[str]:
  # As a vocabulary reads it; of special tokens the file alone does not say which is which.
  from anystep.tasks.startup import quiet_stderr, start_tensorflow

  start_tensorflow()
  with quiet_stderr():
    from anystep.tasks.vocabularies.hugging_face import HuggingFaceVocabulary
  tokenizer = HuggingFaceVocabulary(path, pad=None, eos=None, unk=None).tokenizer
  special = sorted((token, added.content) for token, added in tokenizer.get_added_tokens_decoder().items())
  encoding = tokenizer.encode(text, add_special_tokens=False)
  return [
    f"tokenizer.json ({type(tokenizer.model).__name__}), {tokenizer.get_vocab_size():,} tokens",
    f"added: {', '.join(f'{name} {token}' for token, name in special[:20]) or 'none'}"
    + (f", … {len(special):,} in all" if len(special) > 20 else ""),
    *_format_encoding(encoding.tokens, encoding.ids),
  ]


def _format_encoding(tokens: Sequence[str], ids: Sequence[int]) -> list[str]:
  pairs = " ".join(f"{escape_unprintable(token)}={number}" for token, number in zip(tokens, ids, strict=True))
  return [f"{len(ids)} tokens: {pairs}"]


def _make_invalid_error(path: str, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "vocabulary_invalid",
    path=path,
    expected="a SentencePiece model or a tokenizer.json",
    got=got,
    fix="restore the file: it may be cut short, or a Git LFS pointer",
  )


def _make_usage_error(got: str, fix: str) -> AnystepError:
  return AnystepError(ExitCode.USAGE, "arguments", got=got, fix=f"{fix}; anystep-vocab --help lists them")


def _make_count_parser(least: int, most: int = MAX_COUNT) -> Any:
  def parse(text: str) -> int:
    # Python reads no number of thousands of digits.
    if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
      raise argparse.ArgumentTypeError(f"expected a whole number, {least} to {most}, got {text!r}")
    return int(text)

  return parse


def _parse_share(text: str) -> float:
  try:
    share = float(text)
  except ValueError:
    share = 0.0
  if not 0 < share <= 1:
    raise argparse.ArgumentTypeError(f"expected a share above 0 and at most 1, got {text!r}")
  return share


if __name__ == "__main__":
  run()
