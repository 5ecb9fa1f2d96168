"""Rows of a batch, of one example each or packed, whoever made them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_TASK_NAMES = ("inputs", "targets", "inputs_segment_ids", "targets_segment_ids")
_MODEL_NAMES = (
  "encoder_input_tokens",
  "decoder_target_tokens",
  "encoder_segment_ids",
  "decoder_segment_ids",
)


class Rows(NamedTuple):
  """Rows of a batch; those of zeros are padding.

  Attributes:
    inputs, targets: `(rows, 512) int32` and `(rows, 114) int32`.
    input_segments, target_segments: of those shapes, from 1 a row's examples, 0 behind the last. None where
      every row is one example.
  """

  inputs: np.ndarray
  targets: np.ndarray
  input_segments: np.ndarray | None = None
  target_segments: np.ndarray | None = None

  @classmethod
  def of(cls, batch: Mapping[str, Any]) -> Rows:
    """Picks them from a task's features or from an encoder-decoder's."""
    return cls(*map(batch.get, _MODEL_NAMES if _MODEL_NAMES[0] in batch else _TASK_NAMES))

  def num_examples(self) -> int:
    """How many examples they hold, told fast: unpacked rows of padding count as well."""
    if self.target_segments is None:
      return len(self.inputs)
    return int(self.target_segments.max(axis=1).sum())

  def unpacked(self) -> Rows:
    """A row for each example.

    Raises:
      ValueError: where a row has not the same examples in both features, one of them is in pieces, or there
        is something where there is no example.

    >>> inputs, segments = np.array([[5, 6, 7, 0]]), np.array([[1, 1, 2, 0]])
    >>> Rows(inputs, inputs, segments, segments).unpacked().inputs
    array([[5, 6, 0, 0],
           [7, 0, 0, 0]])
    """
    if self.input_segments is None or self.target_segments is None:
      return self
    counts = self.input_segments.max(axis=1)
    if (counts != self.target_segments.max(axis=1)).any():
      raise ValueError("a packed row has not as many inputs as targets")
    return Rows(
      _unpacked(self.inputs, self.input_segments, counts),
      _unpacked(self.targets, self.target_segments, counts),
    )


def _unpacked(tokens: np.ndarray, segments: np.ndarray, counts: np.ndarray) -> np.ndarray:
  if tokens[segments == 0].any():
    raise ValueError("a packed row has tokens outside its examples")
  rows, places = np.nonzero(segments)
  examples = (np.cumsum(counts) - counts)[rows] + segments[rows, places] - 1
  if (np.diff(examples) < 0).any():
    raise ValueError("examples of a packed row do not follow each other")
  lengths = np.bincount(examples, minlength=counts.sum())
  firsts = np.cumsum(lengths) - lengths
  unpacked = np.zeros((len(lengths), tokens.shape[1]), tokens.dtype)
  unpacked[examples, np.arange(len(examples)) - firsts[examples]] = tokens[rows, places]
  return unpacked
