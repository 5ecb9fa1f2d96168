"""Checks of whole numbers from callers: ints and numpy's integers, but no floats, bools or texts."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

INT64_MAX = int(np.iinfo(np.int64).max)


def whole_number(value: Any, name: str) -> int:
  """Return a number as an int.

  Args:
    value: an int, or a scalar of an integer type.
    name: the argument's name in errors.

  Raises:
    TypeError: for all other values, such as bools, floats and texts.

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
  """Return whether `whole_number` takes a value."""
  try:
    whole_number(value, "it")
  except TypeError:
    return False
  return True


def whole_numbers(values: np.ndarray | Iterable[int], name: str) -> np.ndarray:
  """Return numbers as `(values,) int64`.

  Args:
    values: ints or scalars of integer types, or an array of them with one axis. An empty array may have any
      dtype.
    name: the argument's name in errors.

  Raises:
    TypeError: for all other values, such as bools, floats and texts, and for more than one axis.
    IndexError: for a number that int64 does not hold, so that it cannot be an index.

  >>> whole_numbers([3, np.uint8(4)], "rows")
  array([3, 4])
  """
  if isinstance(values, np.ndarray) and values.dtype != object:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
      _refuse(values, name)
    numbers = [int(values.max())] if values.dtype.kind == "u" and values.size else []
  else:
    # numpy makes an array of objects of ints that no integer type holds.
    numbers = list(values)
    if not set(map(type, numbers)) <= {int}:
      numbers = [whole_number(value, name) for value in numbers]
    values = numbers
  if numbers and not (min(numbers) >= -INT64_MAX and max(numbers) <= INT64_MAX):
    raise IndexError(f"{name} take numbers of 64 bits, not {_format_value(numbers)}")
  return np.asarray(values, np.int64)


def _refuse(value: object, name: str) -> NoReturn:
  raise TypeError(f"{name} take whole numbers, not {_format_value(value)}")


def _format_value(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 80 else text[:77] + "..."
