"""Loops over `tf.train.Example` records in protobuf's wire format, which find and decode lists of values."""

from __future__ import annotations

from typing import Any

import numpy as np

from anystep.compiled import compiled

# The first byte of a field 1, or 2, that has a length.
_FIRST, _SECOND = 0x0A, 0x12


@compiled
def locate_lists(
  data: np.ndarray,
  ends: np.ndarray,
  names: np.ndarray,
  name_ends: np.ndarray,
  kinds: np.ndarray,
  begins: np.ndarray,
  stops: np.ndarray,
  counts: np.ndarray,
) -> bool:
  """Finds the wanted features' lists in records that stand one after the other.

  Args:
    data: the records' bytes. ends: where each ends.
    names: the wanted features' names, likewise. name_ends: where each ends. kinds: their lists' numbers.
    begins, stops, counts: `(features, records) int64`, zeros: here go where the values of each list begin
      and end, and how many they are.

  Returns:
    Whether all is as writers write it. Where it is not (an encoding no writer chooses, another kind of list,
    damage) nothing is said.
  """

  def content(tag: Any, at: Any, stop: Any) -> tuple[Any, Any]:
    """Where the content of the field at a place begins and ends: -1 if that is no such field, or is cut."""
    if at < stop and data[at] == tag:
      length = np.int64(0)
      for shift in range(0, 28, 7):
        at += 1
        if at >= stop:
          break
        byte = np.int64(data[at])
        length |= (byte & 127) << shift
        if byte < 128:
          at += 1
          return at, at + length if length <= stop - at else -1
    return at, -1

  begin = 0
  for row in range(len(ends)):
    at, stop = content(_FIRST, begin, ends[row])
    if stop != ends[row]:
      return False
    begin = stop
    while at < stop:
      entry, at = content(_FIRST, at, stop)
      if at < 0:
        return False
      name, name_stop = content(_FIRST, entry, at)
      if name_stop < 0:
        return False
      feature, feature_stop = content(_SECOND, name_stop, at)
      if feature_stop != at:
        return False
      wanted = -1
      name_begin = 0
      for k in range(len(name_ends)):
        if name_stop - name == name_ends[k] - name_begin:
          same = True
          for place in range(name_stop - name):
            same &= data[name + place] == names[name_begin + place]
          if same:
            wanted = k
        name_begin = name_ends[k]
      if wanted >= 0:
        if begins[wanted, row]:
          return False
        begins[wanted, row] = stops[wanted, row] = feature_stop
      if feature == feature_stop:
        continue
      kind = np.int64(data[feature]) >> 3
      values, values_stop = content(kind << 3 | 2, feature, feature_stop)
      if values_stop != feature_stop or kind < 1 or kind > 3:
        return False
      if values == values_stop:
        continue
      if wanted >= 0 and kinds[wanted] != kind:
        return False
      count = 0
      if kind == 1:
        at_item = values
        while at_item < values_stop:
          _, at_item = content(_FIRST, at_item, values_stop)
          if at_item < 0:
            return False
          count += 1
      else:
        values, packed_stop = content(_FIRST, values, values_stop)
        if packed_stop != values_stop:
          return False
        if kind == 2:
          if (values_stop - values) & 3:
            return False
          count = (values_stop - values) >> 2
        elif wanted >= 0:
          for byte in data[values:values_stop]:
            count += byte < 128
        else:
          run = 0
          for byte in data[values:values_stop]:
            if run == 9 and byte > 1:
              return False
            run = run + 1 if byte > 127 else 0
          if run:
            return False
      if wanted >= 0:
        begins[wanted, row] = values
        stops[wanted, row] = values_stop
        counts[wanted, row] = count
  return True


@compiled
def decode_integers(
  data: np.ndarray, begins: np.ndarray, stops: np.ndarray, values: np.ndarray, low: int, high: int
) -> bool:
  """Decodes varints, list after list, into `(sum of counts,)`; whether all are whole and from low to high.

  A varint's place follows from the lengths of those before it, which is what takes the time: so each list is
  decoded in two halves at once.
  """

  def of_three_bytes(at: Any) -> tuple[Any, Any, Any]:
    """The varint at a place, where it ends, and whether it has more than the three bytes that are read."""
    # Unsigned places need no test for negative ones; a branch for each length could only be guessed.
    first, second = np.int64(data[np.uint64(at)]), np.int64(data[np.uint64(at + 1)])
    third = np.int64(data[np.uint64(at + 2)])
    two = first >> 7
    second &= -two
    three = second >> 7
    third &= -three
    return first + (second - two << 7) + (third - three << 14), at + 1 + two + three, third >> 7

  def of_any_size(at: Any, stop: Any) -> tuple[Any, Any]:
    """The varint at a place and where it ends: -1 where it is cut, or outside the bounds."""
    value = np.int64(0)
    for shift in range(0, 70, 7):
      if at >= stop:
        break
      byte = np.int64(data[at])
      at += 1
      value |= (byte & 127) << shift
      if byte < 128:
        # The tenth byte has room for one bit.
        whole = low <= value <= high and (shift < 63 or byte < 2)
        return value, at if whole else -1
    return value, -1

  k = 0
  for row in range(len(begins)):
    at, stop = begins[row], stops[row]
    middle = at + stop + 1 >> 1
    while middle < stop and data[middle - 1] > 127:
      middle += 1
    other_at, other_k = middle, k
    for byte in data[at:middle]:
      other_k += byte < 128
    while at < middle or other_at < stop:
      for _ in range(min(middle - at, stop - other_at) // 3):
        value, next_at, longer = of_three_bytes(at)
        other_value, other_next_at, other_longer = of_three_bytes(other_at)
        if longer | other_longer:
          break
        values[np.uint64(k)], values[np.uint64(other_k)] = value, other_value
        k, other_k = k + 1, other_k + 1
        at, other_at = next_at, other_next_at
      if at < middle:
        value, at = of_any_size(at, middle)
        if at < 0:
          return False
        values[k] = value
        k += 1
      if other_at < stop:
        value, other_at = of_any_size(other_at, stop)
        if other_at < 0:
          return False
        values[other_k] = value
        other_k += 1
    k = other_k
  return True


@compiled
def gather_bytes(data: np.ndarray, begins: np.ndarray, stops: np.ndarray, gathered: np.ndarray) -> None:
  """Copies pieces of the bytes, one after the other."""
  k = 0
  for row in range(len(begins)):
    for byte in data[begins[row] : stops[row]]:
      gathered[k] = byte
      k += 1


@compiled
def locate_texts(data: np.ndarray, begins: np.ndarray, stops: np.ndarray, bounds: np.ndarray) -> None:
  """Finds where the texts of lists that are whole begin and end, `(texts, 2) int64`."""
  k = 0
  for row in range(len(begins)):
    at = begins[row]
    while at < stops[row]:
      length = np.int64(0)
      shift = 0
      more = np.int64(1)
      while more:
        at += 1
        byte = np.int64(data[at])
        length |= (byte & 127) << shift
        shift += 7
        more = byte >> 7
      bounds[k, 0] = at + 1
      at += 1 + length
      bounds[k, 1] = at
      k += 1
