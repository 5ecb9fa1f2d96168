"""Files that vocabularies are made of: where they lie, and which stand in for those that are gone.

SeqIO reads a SentencePiece model when its vocabulary is first used, somewhere deep in a graph or a worker.
`watch_models` makes that place look first, so that a missing file is one error that says what to do.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError

from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.tasks import seqio_internals

# A store that cannot be reached lets TensorFlow try again for minutes.
_LOOK_SECONDS = 20.0

_stand_ins: dict[str, str] = {}


def use_file(original: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
  """Lets every vocabulary of this process that names one file read another in its place.

  Those that are made later, those that are there already and those that preprocessors hold; not those that
  have read their file. In the module that registers the tasks it reaches workers as well.

  Args:
    original: the file, exactly as vocabularies name it.
    other: the file to read.

  Raises:
    AnystepError: 66 `vocabulary_missing` where the other is not there either.
  """
  name, target = os.fspath(original), found(other)
  for known in [name, *(known for known, stand_in in _stand_ins.items() if stand_in == name)]:
    _stand_ins[known] = target
  watch_models()


def found(path: str | os.PathLike[str]) -> str:
  """The file to read for a vocabulary that names this one.

  Raises:
    AnystepError: 66 `vocabulary_missing`.
  """
  name = os.fspath(path)
  place = _stand_ins.get(name, name)
  problem = why_missing(place)
  if problem is None:
    return place
  stands_in = {} if place == name else {"in_place_of": name}
  raise AnystepError(
    ExitCode.NO_INPUT,
    "vocabulary_missing",
    path=place,
    **stands_in,
    expected="a file that can be read, for a vocabulary",
    got=problem,
    fix=f'put it there, or add anystep.tasks.vocabularies.use_file("{name}", "LOCAL_COPY") to the module that'
    " registers the tasks",
  )


def is_there(path: str | os.PathLike[str]) -> bool:
  """Whether what a vocabulary names, or what stands in for it, can be read."""
  name = os.fspath(path)
  return why_missing(_stand_ins.get(name, name)) is None


def why_missing(path: str) -> str | None:
  """Why a file cannot be read; None where it can."""
  return _looked_for_remotely(path) if storage.is_remote(path) else _looked_for(path)


def content_of(path: str | os.PathLike[str]) -> bytes:
  """The bytes of the file that a vocabulary names, or of what stands in for it.

  Raises:
    AnystepError: 66 `vocabulary_missing`.
  """
  with tf.io.gfile.GFile(found(path), "rb") as file:
    return file.read()


def vocabulary_invalid(path: str, expected: str, got: object) -> AnystepError:
  """The error for a file that is not what a vocabulary is made of."""
  return AnystepError(
    ExitCode.DATA,
    "vocabulary_invalid",
    path=path,
    expected=expected,
    got=str(got).partition("\n")[0] or type(got).__name__,
    fix="restore the file: it may be cut short, or a Git LFS pointer",
  )


def watch_models() -> None:
  """Makes SeqIO look whether a SentencePiece model is there, and what stands in for it, before reading it."""
  seqio_internals.replace_model_loader(_load_model)


@functools.wraps(seqio_internals.load_sentencepiece_model)
def _load_model(sentencepiece_model_file: str, *arguments: Any, **keywords: Any) -> Any:
  path = found(sentencepiece_model_file)
  try:
    return seqio_internals.load_sentencepiece_model(path, *arguments, **keywords)
  except (DecodeError, RuntimeError) as error:
    raise vocabulary_invalid(path, "a SentencePiece model", error) from error


def _looked_for(path: str) -> str | None:
  try:
    if not tf.io.gfile.exists(path):
      return "no such file"
    return "a directory" if tf.io.gfile.isdir(path) else None
  except (tf.errors.OpError, OSError) as error:
    return str(error).partition("\n")[0]


# One answer is enough: a store that is out of reach is asked for every task and feature.
@functools.cache
def _looked_for_remotely(path: str) -> str | None:
  answers: list[str | None] = [f"no answer within {_LOOK_SECONDS:g} s"]
  # A thread that TensorFlow holds cannot be ended; as a daemon it does not keep the program from ending.
  look = threading.Thread(target=lambda: answers.append(_looked_for(path)), daemon=True)
  look.start()
  look.join(_LOOK_SECONDS)
  return answers[-1]
