"""Loops that write `tf.train.Example` records in protobuf's wire format, a column of lists at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from anystep.compiled import compiled


@compiled
def measure_integers(values: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> None:
  """Fill `sizes`, `(rows,) int64`, with the bytes of each list's varints; a row has `counts` values."""
  k = np.uint64(0)
  for row in range(len(counts)):
    stop = k + np.uint64(counts[row])
    size, every_bit = stop - k, np.uint64(0)
    # The compiler vectorizes a plain sum over unsigned indices.
    for j in range(k, stop):
      number = np.uint64(values[j])
      every_bit |= number
      size += (
        np.uint64(number > np.uint64(0x7F))
        + np.uint64(number > np.uint64(0x3FFF))
        + np.uint64(number > np.uint64(0x1FFFFF))
      )
    if every_bit >> np.uint64(28):
      for j in range(k, stop):
        for shift in range(28, 64, 7):
          size += np.uint64(np.uint64(values[j]) >> np.uint64(shift) != 0)
    sizes[row] = size
    k = stop


@compiled
def measure_texts(text_sizes: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> None:
  """Fill `sizes`, `(rows,) int64`, with the bytes that each list's texts and their headers take."""
  k = 0
  for row in range(len(counts)):
    size = np.int64(0)
    for text_size in text_sizes[k : k + counts[row]]:
      size += 2 + text_size
      while text_size > 127:
        text_size >>= 7
        size += 1
    sizes[row] = size
    k += counts[row]


@compiled
def lay_out(
  sizes: np.ndarray,
  kinds: np.ndarray,
  stems: np.ndarray,
  stem_ends: np.ndarray,
  ends: np.ndarray,
  begins: np.ndarray,
) -> np.ndarray:
  """Write the records without the lists' values.

  Args:
    sizes: `(features, rows) int64`, bytes of the values of each list.
    kinds: `(features,) int64`, the lists' numbers.
    stems: first bytes of each feature's entry, joined. stem_ends: the end of each stem.
    ends: `(rows,) int64`; filled with the end of each record.
    begins: `(features, rows) int64`; filled with the begin of the values of each list.

  Returns:
    The records, `(bytes,) uint8`.
  """

  def with_head(size: Any) -> Any:
    """Bytes of a field with a content of `size` bytes, its tag and length included."""
    whole = size + 2
    while size > 127:
      size >>= 7
      whole += 1
    return whole

  def write_head(data: Any, at: Any, tag: Any, size: Any) -> Any:
    """Write a field's tag and length; return the begin of its content."""
    data[at] = tag
    at += 1
    while size > 127:
      data[at] = size & 127 | 128
      size >>= 7
      at += 1
    data[at] = size
    return at + 1

  num_features, num_rows = sizes.shape
  total = np.int64(0)
  for row in range(num_rows):
    entries = np.int64(0)
    stem = np.int64(0)
    for f in range(num_features):
      size = sizes[f, row]
      if kinds[f] > 1 and size:
        size = with_head(size)
      entries += with_head(stem_ends[f] - stem + with_head(with_head(size)) - 1)
      stem = stem_ends[f]
    # Until the second pass, `ends` has the size of each record's one field.
    ends[row] = entries
    total += with_head(entries)
  data = np.empty(total, np.uint8)
  at = np.int64(0)
  for row in range(num_rows):
    at = write_head(data, at, 0x0A, ends[row])
    stem = np.int64(0)
    for f in range(num_features):
      size = sizes[f, row]
      list_size = with_head(size) if kinds[f] > 1 and size else size
      feature_size = with_head(list_size)
      at = write_head(data, at, 0x0A, stem_ends[f] - stem + with_head(feature_size) - 1)
      for j in range(stem, stem_ends[f] - 1):
        data[at] = stems[j]
        at += 1
      stem = stem_ends[f]
      at = write_head(data, at, stems[stem - 1], feature_size)
      at = write_head(data, at, kinds[f] << 3 | 2, list_size)
      if list_size > size:
        at = write_head(data, at, 0x0A, size)
      begins[f, row] = at
      at += size
    ends[row] = at
  return data


@compiled
def write_integers(
  values: np.ndarray, counts: np.ndarray, sizes: np.ndarray, begins: np.ndarray, data: np.ndarray
) -> None:
  """Write each list's varints, of `sizes` bytes, from its begin on."""
  k = 0
  for row in range(len(counts)):
    at, stop = begins[row], k + counts[row]
    if sizes[row] == counts[row]:
      for j in range(counts[row]):
        data[np.uint64(at + j)] = values[np.uint64(k + j)]
      k = stop
    while k < stop:
      # If three more numbers follow, four bytes may always be written, so that no branch depends on the size.
      while k < stop - 3:
        number = np.uint64(values[np.uint64(k)])
        if number >> np.uint64(28):
          break
        two, three, four = number > 0x7F, number > 0x3FFF, number > 0x1FFFFF
        data[np.uint64(at)] = number & np.uint64(127) | np.uint64(two) << np.uint64(7)
        data[np.uint64(at + 1)] = (number >> np.uint64(7)) & np.uint64(127) | np.uint64(three) << np.uint64(7)
        data[np.uint64(at + 2)] = (number >> np.uint64(14)) & np.uint64(127) | np.uint64(four) << np.uint64(7)
        data[np.uint64(at + 3)] = number >> np.uint64(21)
        at += 1 + two + three + four
        k += 1
      number = np.uint64(values[np.uint64(k)])
      while number > 127:
        data[np.uint64(at)] = number & np.uint64(127) | np.uint64(128)
        number >>= np.uint64(7)
        at += 1
      data[np.uint64(at)] = number
      at += 1
      k += 1


@compiled
def write_texts(
  joined: np.ndarray, text_sizes: np.ndarray, counts: np.ndarray, begins: np.ndarray, data: np.ndarray
) -> None:
  """Write each list's texts, which are joined, from its begin on."""
  begin = np.int64(0)
  k = 0
  for row in range(len(counts)):
    at = begins[row]
    for text_size in text_sizes[k : k + counts[row]]:
      data[at] = 0x0A
      at += 1
      size = text_size
      while size > 127:
        data[at] = size & 127 | 128
        size >>= 7
        at += 1
      data[at] = size
      at += 1
      for j in range(text_size):
        data[np.uint64(at + j)] = joined[np.uint64(begin + j)]
      at += text_size
      begin += text_size
    k += counts[row]


@compiled
def write_bytes(content: np.ndarray, sizes: np.ndarray, begins: np.ndarray, data: np.ndarray) -> None:
  """Write consecutive pieces of the content, of `sizes` bytes, each from its begin on."""
  begin = np.int64(0)
  for row in range(len(sizes)):
    at = begins[row]
    for j in range(sizes[row]):
      data[np.uint64(at + j)] = content[np.uint64(begin + j)]
    begin += sizes[row]
