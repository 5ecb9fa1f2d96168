"""Sums and products of whole numbers of some digits: reasoning at tiny scale, with nothing to download.

Importing this module registers `arithmetic_addition_2`, `_4` and `_8` and `arithmetic_multiplication_2` and
`_4`, on bytes: "12+34" gives "46". `arithmetic.add_task` makes others. 3,000 or 100,000 examples to train on
and 500 each to validate and to test with, made when they are read. Licence: none is needed.

A pair of numbers comes once, in one order, and so in one split alone: what is evaluated on was not learned,
neither as it stands nor the other way round.
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
OPERATIONS = {"addition": "+", "multiplication": "*"}

_MOST_DIGITS = 9


class ArithmeticSource(NumberedSource):
  """Exercises such as "12+34" in `inputs`, and their results in `targets`.

  Args:
    operation: "addition" or "multiplication".
    digits: of both operands, which have no leading zeros; 1 to 9, so that products fit in 64 bits.
    sizes: examples by split.

  Raises:
    AnystepError: 78 `operation_unknown`; `digits`; `too_many_examples` for more than the pairs there are.
  """

  def __init__(self, operation: str, digits: int, *, sizes: dict[str, int]):
    if operation not in OPERATIONS:
      raise AnystepError(
        ExitCode.CONFIG,
        "operation_unknown",
        expected=" or ".join(OPERATIONS),
        got=operation,
        nearest=find_nearest(operation, OPERATIONS, limit=1),
        fix="name one of these",
      )
    if not 1 <= digits <= _MOST_DIGITS:
      raise AnystepError(
        ExitCode.CONFIG, "digits", expected=f"1 to {_MOST_DIGITS}", got=digits, fix="take fewer or more"
      )
    self._operation, self._digits = operation, digits
    self._smallest = 10 ** (digits - 1) if digits > 1 else 0
    self._operands = 10**digits - self._smallest
    pairs = self._operands * (self._operands + 1) // 2
    super().__init__(sizes, available=pairs)
    self._order = Permutation(pairs, "arithmetic", operation, digits)
    self._orders = Permutation(2 * pairs, "arithmetic orders", operation, digits)

  def texts_of(self, numbers: np.ndarray) -> tuple[list[str], list[str]]:
    left, right = _pair(self._order(numbers), self._operands)
    swapped = self._orders(numbers) % 2 == 1
    left, right = np.where(swapped, right, left), np.where(swapped, left, right)
    left, right = left + self._smallest, right + self._smallest
    results = left + right if self._operation == "addition" else left * right
    sign = OPERATIONS[self._operation]
    inputs = [f"{a}{sign}{b}" for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    return inputs, [str(result) for result in results.tolist()]


def _pair(numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
  """The unordered pair a <= b < n of each number below n (n + 1) / 2; n is even.

  The triangle of pairs is a rectangle of n + 1 rows and n / 2 columns whose upper part is turned round.
  """
  row, column = np.divmod(numbers, n // 2)
  turned = row <= column
  return np.where(turned, n - 1 - column, column), np.where(turned, n - 1 - row, row - 1)


def add_task(
  operation: str,
  digits: int,
  *,
  train_examples: int = 100_000,
  held_out_examples: int = 500,
  vocabulary: seqio.Vocabulary = VOCABULARY,
  prefix: str = "",
) -> None:
  """Registers `arithmetic_{operation}_{digits}`.

  Args:
    operation: "addition" or "multiplication".
    digits: of both operands, 1 to 9.
    train_examples: to train on.
    held_out_examples: in each of `validation` and `test`.
    vocabulary: of inputs and targets.
    prefix: of the name.

  Raises:
    AnystepError: as `ArithmeticSource`.
  """
  sizes = {"train": train_examples, "validation": held_out_examples, "test": held_out_examples}
  add_text_task(
    f"{prefix}arithmetic_{operation}_{digits}",
    ArithmeticSource(operation, digits, sizes=sizes),
    preprocessors=[],
    vocabulary=vocabulary,
    metric_fns=[metrics.sequence_accuracy, metrics.edit_similarity],
  )


add_task("addition", 2, train_examples=3_000)
add_task("addition", 4)
add_task("addition", 8)
add_task("multiplication", 2, train_examples=3_000)
add_task("multiplication", 4)
