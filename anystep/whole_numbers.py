"""Whole numbers that callers give: ints and numpy's own. What would have to be cut or guessed is refused."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

INT64_MAX = int(np.iinfo(np.int64).max)


def whole_number(value: Any, name: str) -> int:
  """A number as an int.

  Args:
    value: an int, or a scalar of an integer type.
    name: what it is, for errors.

  Raises:
    TypeError: for anything else: bools, floats and texts, whatever they hold.

  >>> whole_number(np.int32(7), "step")
  7
  """
  if type(value) is int:
    return value
  try:
    if getattr(value, "dtype", None) == np.bool_ or isinstance(value, bool):
      _refuse(value, name)
    return operator.index(value)
  except TypeError:
    _refuse(value, name)


def is_whole_number(value: object) -> bool:
  """Whether a value is what `whole_number` takes."""
  try:
    whole_number(value, "it")
  except TypeError:
    return False
  return True


def whole_numbers(values: np.ndarray | Iterable[int], name: str) -> np.ndarray:
  """Numbers as `(values,) int64`.

  Args:
    values: ints or scalars of integer types, or an array of them with one axis. Of none, any type will do.
    name: what they are, for errors.

  Raises:
    TypeError: for anything else: bools, floats and texts, whatever they hold, and further axes.
    IndexError: for a number that int64 does not hold, which is no place of anything.

  >>> whole_numbers([3, np.uint8(4)], "rows")
  array([3, 4])
  """
  if isinstance(values, np.ndarray) and values.dtype != object:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
      _refuse(values, name)
    listed = [int(values.max())] if values.dtype.kind == "u" and values.size else []
  else:
    # An array of objects is what numpy makes of ints that no integer type holds.
    listed = list(values)
    if not set(map(type, listed)) <= {int}:
      listed = [whole_number(value, name) for value in listed]
    values = listed
  if listed and not (min(listed) >= -INT64_MAX and max(listed) <= INT64_MAX):
    raise IndexError(f"{name} take numbers of 64 bits, not {_shown(listed)}")
  return np.asarray(values, np.int64)


def _refuse(value: object, name: str) -> NoReturn:
  raise TypeError(f"{name} take whole numbers, not {_shown(value)}")


def _shown(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 80 else text[:77] + "..."
