"""Numbers of examples by length."""

from __future__ import annotations

from typing import Any

import numpy as np

QUANTILES = (50, 90, 99)
# Lengths below this are counted in an array; the few longer ones in a dict.
_ARRAY_LENGTHS = 1 << 16


class LengthCounts:
  """Number of examples of each length of a feature. Memory grows with the lengths, not with the examples.

  >>> counts = LengthCounts()
  >>> counts.add(np.array([3, 5, 3, 100_000]))
  >>> counts.examples, counts.tokens, counts.largest, counts.quantile(50)
  (4, 100011, 100000, 3)
  >>> counts.cut(4)
  (2, 99997)
  """

  def __init__(self):
    self._short = np.zeros(_ARRAY_LENGTHS, np.int64)
    self._long: dict[int, int] = {}

  def add(self, lengths: np.ndarray) -> None:
    """Count the lengths of further examples, `(examples,)` integers >= 0."""
    short = lengths < _ARRAY_LENGTHS
    self._short += np.bincount(lengths[short], minlength=_ARRAY_LENGTHS)
    values, counts = np.unique(lengths[~short], return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
      self._long[value] = self._long.get(value, 0) + count

  @property
  def table(self) -> tuple[np.ndarray, np.ndarray]:
    """The lengths that occur, ascending, and their counts: `(lengths,) int64` each."""
    short = np.flatnonzero(self._short)
    long = sorted(self._long)
    values = np.concatenate([short, np.array(long, np.int64)])
    counts = [self._short[short], np.array([self._long[value] for value in long], np.int64)]
    return values, np.concatenate(counts)

  @property
  def examples(self) -> int:
    """The number of counted examples."""
    return int(self.table[1].sum())

  @property
  def tokens(self) -> int:
    """The sum of the lengths."""
    values, counts = self.table
    return int((values * counts).sum())

  @property
  def largest(self) -> int:
    """The largest length; 0 without examples."""
    return int(self.table[0].max(initial=0))

  def quantile(self, percent: int) -> int:
    """Return the smallest length that at least `percent` of the examples do not exceed."""
    values, counts = self.table
    if not values.size:
      return 0
    rank = -(-int(counts.sum()) * percent // 100)
    return int(values[np.searchsorted(np.cumsum(counts), rank)])

  def cut(self, length: int) -> tuple[int, int]:
    """Return the number of examples longer than a length, and of their tokens beyond it."""
    values, counts = self.table
    return int(counts[values > length].sum()), int((np.maximum(values - length, 0) * counts).sum())

  def histogram(self) -> list[tuple[int, int, int]]:
    """Return (from, to, examples) for lengths 0, 1, 2 to 3, 4 to 7, …, from the shortest to the longest."""
    values, counts = self.table
    bits = [int(value).bit_length() for value in values]
    examples = np.bincount(bits, weights=counts) if bits else np.zeros(0)
    return [
      (1 << bit >> 1, max((1 << bit) - 1, 0), int(examples[bit]))
      for bit in range(min(bits, default=0), len(examples))
    ]

  def to_json(self, length: int | None = None) -> dict[str, Any]:
    """Return the numbers as a JSON object, with what is lost to a length if one is given."""
    numbers: dict[str, Any] = {
      "tokens": self.tokens,
      "mean": self.tokens / max(self.examples, 1),
      "max": self.largest,
      **{f"p{percent}": self.quantile(percent) for percent in QUANTILES},
    }
    if length is not None:
      examples, tokens = self.cut(length)
      numbers |= {
        "feature_length": length,
        "cut_examples": examples,
        "cut_examples_percent": 100 * examples / max(self.examples, 1),
        "cut_tokens": tokens,
        "cut_tokens_percent": 100 * tokens / max(self.tokens, 1),
      }
    bins = [{"from": low, "to": high, "examples": examples} for low, high, examples in self.histogram()]
    return {**numbers, "histogram": bins}
