"""A model's rows taken apart: the features of each example of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from anystep.features.converters import Rows
from anystep.features.ragged import Ragged

_SEGMENTS = ("_segment_ids", "_segmentation")


class RowParts(NamedTuple):
  """A row of a model, example by example.

  Attributes:
    examples: the features of each example, in the row's order; of packed rows the example's own part.
    rest: features of packed rows that belong to no example alone.
    used: number of a packed row's tokens that belong to examples, and of all its tokens, by the feature that
      numbers its examples.
  """

  examples: list[dict[str, Any]]
  rest: dict[str, Any]
  used: dict[str, tuple[int, int]]


def take_apart(rows: Rows, position: int, num_examples: int | None) -> RowParts:
  """Take a row apart.

  Args:
    rows: a model's features of several rows.
    position: of the row among them.
    num_examples: number of examples in the row; None if rows are not packed: then the example has the row.
  """
  row = {name: _take_row(feature, position) for name, feature in rows.items()}
  if num_examples is None:
    return RowParts([row], {}, {})
  segments_of = {name: _find_segments(name, row) for name in row}
  examples = [
    {name: row[name][row[segments] == number] for name, segments in segments_of.items() if segments}
    for number in range(1, num_examples + 1)
  ]
  rest = {name: row[name] for name, segments in segments_of.items() if segments is None}
  numberings = sorted({segments for segments in segments_of.values() if segments})
  used = {name: (int(np.count_nonzero(row[name])), len(row[name])) for name in numberings}
  return RowParts(examples, rest, used)


def _take_row(feature: np.ndarray | Ragged, position: int) -> Any:
  if isinstance(feature, Ragged):
    (row,) = feature[position : position + 1].rows()
    return row
  # Of a feature of numbers, `(rows,)`, an array too.
  return np.asarray(feature[position], feature.dtype)


def _find_segments(name: str, row: Mapping[str, Any]) -> str | None:
  """Return the feature that numbers the examples of another; None if there is none.

  It has the longest beginning in common: `encoder_segment_ids` for `encoder_input_tokens`,
  `inputs_segmentation` for `inputs` and `inputs_position`.
  """
  parts = name.split("_")
  for count in range(len(parts), 0, -1):
    beginning = "_".join(parts[:count])
    for ending in _SEGMENTS:
      if beginning + ending in row:
        return beginning + ending
  return None
