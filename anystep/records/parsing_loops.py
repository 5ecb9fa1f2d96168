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
  """Find the features' lists in records.

  Args:
    data: the records' bytes, one record after the other. ends: the end of each record.
    names: the features' names, likewise joined. name_ends: the end of each name. kinds: their lists' numbers.
    begins, stops, counts: `(features, records) int64`, zeros; filled with the begin and end of the values of
      each list, and their number.

  Returns:
    True if all records are encoded as writers encode them. Else (another encoding, another kind of list, or
    damage) the arrays have no meaning.
  """

  def content(tag: Any, at: Any, stop: Any) -> tuple[Any, Any]:
    """Begin and end of the content of the field at `at`; the end is -1 if the field is another or cut off."""
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
      matching = -1
      name_begin = 0
      for k in range(len(name_ends)):
        if name_stop - name == name_ends[k] - name_begin:
          same = True
          for j in range(name_stop - name):
            same &= data[name + j] == names[name_begin + j]
          if same:
            matching = k
        name_begin = name_ends[k]
      if matching >= 0:
        if begins[matching, row]:
          return False
        begins[matching, row] = stops[matching, row] = feature_stop
      if feature == feature_stop:
        continue
      kind = np.int64(data[feature]) >> 3
      values, values_stop = content(kind << 3 | 2, feature, feature_stop)
      if values_stop != feature_stop or kind < 1 or kind > 3:
        return False
      if values == values_stop:
        continue
      if matching >= 0 and kinds[matching] != kind:
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
        elif matching >= 0:
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
      if matching >= 0:
        begins[matching, row] = values
        stops[matching, row] = values_stop
        counts[matching, row] = count
  return True


@compiled
def decode_integers(
  data: np.ndarray, begins: np.ndarray, stops: np.ndarray, values: np.ndarray, low: int, high: int
) -> bool:
  """Decode varints, list after list, into `values`, `(sum of counts,)`.

  The begin of a varint depends on the lengths of all before it, and this chain takes the time. So the two
  halves of each list are decoded side by side.

  Returns:
    True if all varints are complete and from low to high.
  """

  def of_three_bytes(at: Any) -> tuple[Any, Any, Any]:
    """The varint at `at`, its end, and whether it has more bytes than the three that are read."""
    # Unsigned indices need no test for negative ones. A branch for each length would be mispredicted.
    first, second = np.int64(data[np.uint64(at)]), np.int64(data[np.uint64(at + 1)])
    third = np.int64(data[np.uint64(at + 2)])
    two = first >> 7
    second &= -two
    three = second >> 7
    third &= -three
    return first + (second - two << 7) + (third - three << 14), at + 1 + two + three, third >> 7

  def of_any_size(at: Any, stop: Any) -> tuple[Any, Any]:
    """The varint at `at` and its end; the end is -1 if the varint is cut off or outside the bounds."""
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
  """Copy pieces of the bytes into `gathered`, one after the other."""
  k = 0
  for row in range(len(begins)):
    for byte in data[begins[row] : stops[row]]:
      gathered[k] = byte
      k += 1


@compiled
def locate_texts(data: np.ndarray, begins: np.ndarray, stops: np.ndarray, bounds: np.ndarray) -> None:
  """Fill `bounds`, `(texts, 2) int64`, with the begin and end of each text of complete lists."""
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
