"""Files of vocabularies, and stand-ins for files that are gone.

SeqIO reads a SentencePiece model when its vocabulary is first used, deep inside a graph or a worker.
`watch_models` adds a check there, so that a missing file gives one error with its fix.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import tensorflow as tf
from etils import epath
from google.protobuf.message import DecodeError

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.stores.local_copies import fetch
from anystep.stores.store_path import is_usable
from anystep.tasks import seqio_internals

# TensorFlow retries for minutes if a store cannot be reached.
_LOOK_SECONDS = 20.0

_stand_ins: dict[str, str] = {}


def use_file(original: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
  """Let every vocabulary of this process that names one file read another file instead.

  This holds for later vocabularies, existing ones and those that preprocessors hold, but not for those that
  have read their file already. A call in the module that registers the tasks also takes effect in workers.

  Args:
    original: the file, exactly as vocabularies name it.
    other: the file to read.

  Raises:
    AnystepError: 66 `vocabulary_missing` if the other file is missing, too.
  """
  name, target = os.fspath(original), find_file(other)
  earlier_names = [earlier for earlier, stand_in in _stand_ins.items() if stand_in == name]
  _stand_ins.update(dict.fromkeys([name, *earlier_names], target))
  watch_models()


def find_file(path: str | os.PathLike[str]) -> str:
  """Return the file to read for a vocabulary that names this one.

  Raises:
    AnystepError: 66 `vocabulary_missing`.
  """
  name = os.fspath(path)
  readable_path = _stand_ins.get(name, name)
  problem = explain_missing(readable_path)
  if problem is None:
    try:
      return fetch(readable_path)
    except OSError as error:
      # It was there when it was looked for.
      problem = one_line(error, with_type=False)
  fields = {} if readable_path == name else {"in_place_of": name}
  raise AnystepError(
    ExitCode.NO_INPUT,
    "vocabulary_missing",
    path=readable_path,
    **fields,
    expected="a file that can be read, for a vocabulary",
    got=problem,
    fix=f'put it there, or add anystep.tasks.vocabularies.use_file("{name}", "LOCAL_COPY") to the module that'
    " registers the tasks",
  )


def is_there(path: str | os.PathLike[str]) -> bool:
  """Return whether the file that a vocabulary names, or its stand-in, can be read."""
  name = os.fspath(path)
  return explain_missing(_stand_ins.get(name, name)) is None


def explain_missing(path: str) -> str | None:
  """Return the reason why a file cannot be read; None if it can."""
  return _look_for_remotely(path) if storage.is_remote(path) else _look_for(path)


def read_content(path: str | os.PathLike[str]) -> bytes:
  """Read the file that a vocabulary names, or its stand-in.

  Raises:
    AnystepError: 66 `vocabulary_missing`.
  """
  with tf.io.gfile.GFile(find_file(path), "rb") as file:
    return file.read()


def make_vocabulary_error(path: str, expected: str, error: Exception) -> AnystepError:
  """Return the error for a file that is no vocabulary's."""
  return AnystepError(
    ExitCode.DATA,
    "vocabulary_invalid",
    path=path,
    expected=expected,
    got=one_line(error),
    fix="restore the file: it may be cut short, or a Git LFS pointer",
  )


def watch_models() -> None:
  """Let SeqIO check for a SentencePiece model's file, and use its stand-in, before reading it."""
  seqio_internals.replace_model_loader(_load_model)


@functools.wraps(seqio_internals.load_sentencepiece_model)
def _load_model(sentencepiece_model_file: str, *arguments: Any, **keywords: Any) -> Any:
  path = find_file(sentencepiece_model_file)
  try:
    return seqio_internals.load_sentencepiece_model(path, *arguments, **keywords)
  except (DecodeError, RuntimeError) as error:
    raise make_vocabulary_error(path, "a SentencePiece model", error) from error


def _look_for(path: str) -> str | None:
  try:
    if is_usable(path):
      return None if epath.Path(path).is_file() else "no such file"
    if not tf.io.gfile.exists(path):
      return "no such file"
    return "a directory" if tf.io.gfile.isdir(path) else None
  except (tf.errors.OpError, OSError) as error:
    return one_line(error, with_type=False)


# Cached, because every task and feature would wait for a store that cannot be reached.
@functools.cache
def _look_for_remotely(path: str) -> str | None:
  answers: list[str | None] = [f"no answer within {_LOOK_SECONDS:g} s"]
  # A thread inside TensorFlow cannot be stopped; a daemon does not keep the program from ending.
  look = threading.Thread(target=lambda: answers.append(_look_for(path)), daemon=True)
  look.start()
  look.join(_LOOK_SECONDS)
  return answers[-1]
