"""Copying and reversing random letters: whether a model can move tokens at all, with nothing to download.

Importing this module registers `copy_8`, `copy_32`, `reverse_8` and `reverse_32`, on bytes: "reverse: abc"
gives "cba". `copying.add_task` makes others. 100,000 examples to train on and 500 each to validate and to
test with, made when they are read. Licence: none is needed.

No two examples of a task are the same, so what is evaluated on was not learned.
"""

from __future__ import annotations

import numpy as np
import seqio

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.order.permutation import Permutation
from anystep.tasks import metrics
from anystep.tasks.catalogue.text_to_text import add_task as add_text_task
from anystep.tasks.sources.numbered_source import NumberedSource

# 259 byte and special ids, up to a multiple of 128.
VOCABULARY = seqio.ByteVocabulary(extra_ids=125)
OPERATIONS = ("copy", "reverse")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

_MOST_WORDS = 2**62


class LettersSource(NumberedSource):
  """The operation and random letters in `inputs`, such as "reverse: abc"; what it makes of them in `targets`.

  The letters are words of several, each a bijection of the example's number: so the first word, and with it
  the whole, is another for each number.

  Args:
    operation: "copy" or "reverse".
    length: letters of an example.
    sizes: examples by split.
    letters: two or more different ones.

  Raises:
    AnystepError: 78 `operation_unknown`; `letters`; `length`; `too_many_examples`.
  """

  def __init__(self, operation: str, length: int, *, sizes: dict[str, int], letters: str = LETTERS):
    if operation not in OPERATIONS:
      raise AnystepError(
        ExitCode.CONFIG,
        "operation_unknown",
        expected=" or ".join(OPERATIONS),
        got=operation,
        nearest=find_nearest(operation, OPERATIONS, limit=1),
        fix="name one of these",
      )
    if len(set(letters)) != len(letters) or len(letters) < 2:
      raise AnystepError(
        ExitCode.CONFIG, "letters", expected="two or more different ones", got=letters, fix="change them"
      )
    if length < 1:
      raise AnystepError(ExitCode.CONFIG, "length", expected="1 or more", got=length, fix="lengthen it")
    self._operation, self._length, self._letters = operation, length, letters
    word_letters = 1
    while word_letters < length and len(letters) ** (word_letters + 1) <= _MOST_WORDS:
      word_letters += 1
    super().__init__(sizes, available=len(letters) ** word_letters)
    self._place_values = len(letters) ** np.arange(word_letters, dtype=np.int64)
    self._words = tuple(
      Permutation(len(letters) ** word_letters, "copying", operation, length, word)
      for word in range(-(-length // word_letters))
    )

  def texts_of(self, numbers: np.ndarray) -> tuple[list[str], list[str]]:
    words = [word(numbers)[:, None] // self._place_values % len(self._letters) for word in self._words]
    letters = np.array(list(self._letters))[np.concatenate(words, axis=1)[:, : self._length]]
    texts = ["".join(row) for row in letters.tolist()]
    results = [text[::-1] for text in texts] if self._operation == "reverse" else texts
    return [f"{self._operation}: {text}" for text in texts], results


def add_task(
  operation: str,
  length: int,
  *,
  letters: str = LETTERS,
  train_examples: int = 100_000,
  held_out_examples: int = 500,
  vocabulary: seqio.Vocabulary = VOCABULARY,
  prefix: str = "",
) -> None:
  """Registers `{operation}_{length}`.

  Args:
    operation: "copy" or "reverse".
    length: letters of an example.
    letters: those that there are.
    train_examples: to train on.
    held_out_examples: in each of `validation` and `test`.
    vocabulary: of inputs and targets.
    prefix: of the name.

  Raises:
    AnystepError: as `LettersSource`.
  """
  sizes = {"train": train_examples, "validation": held_out_examples, "test": held_out_examples}
  add_text_task(
    f"{prefix}{operation}_{length}",
    LettersSource(operation, length, sizes=sizes, letters=letters),
    preprocessors=[],
    vocabulary=vocabulary,
    metric_fns=[metrics.sequence_accuracy, metrics.edit_similarity],
  )


for _operation in OPERATIONS:
  for _length in (8, 32):
    add_task(_operation, _length)
