"""Serialization of examples as `tf.train.Example` records: by compiled loops if numba is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anystep.compiled import FEWEST_TO_COMPILE_FOR
from anystep.features.ragged import Batch, Ragged
from anystep.records.example_message import example_class, list_kind, row_lengths_name, wire_field
from anystep.records.writing_loops import (
  lay_out,
  measure_integers,
  measure_texts,
  write_bytes,
  write_integers,
  write_texts,
)


def serialize_examples(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  """Serialize a batch: for each row the bytes of `serialize_example`, one row after the other.

  Thread-safe. If numba is installed, compiled loops write the records, without Python's lock.

  Args:
    batch: features by name: a `Ragged` for a sequence (with `Ragged` values if an example's own rows differ
      in length), else an array whose first axis counts rows. Numbers that int64, or float32, cannot hold are
      stored as numpy casts them.

  Returns:
    `(bytes,) uint8`, the records, and `(rows,) int64`, the end of each.

  Raises:
    TypeError: for a dtype that no record can hold.
    ValueError: if features differ in their number of rows, or two would be stored under one name.

  >>> data, ends = serialize_examples({"number": np.array([3, 300])})
  >>> ends
  array([19, 39])
  >>> bytes(data[: ends[0]]) == serialize_example({"number": 3})
  True
  """
  num_rows = {name: len(feature) for name, feature in batch.items()}
  if len(set(num_rows.values())) > 1:
    raise ValueError(f"rows differ: {num_rows}")
  if max(num_rows.values(), default=0) < FEWEST_TO_COMPILE_FOR or not importlib.util.find_spec("numba"):
    return _serialize_by_rows(batch)
  return _serialize_by_loops(batch)


def _serialize_by_rows(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  columns = [feature.rows() if isinstance(feature, Ragged) else feature for feature in batch.values()]
  records = [serialize_example(dict(zip(batch, row, strict=True))) for row in zip(*columns, strict=True)]
  ends = np.cumsum(np.fromiter(map(len, records), np.int64, len(records)))
  return np.frombuffer(bytearray(b"".join(records)), np.uint8), ends


def _serialize_by_loops(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  lists = _split_into_lists(batch)
  columns = {name: _to_column(name, lists[name]) for name in sorted(lists)}
  stems = [wire_field(1, name.encode()) + b"\x12" for name in columns]
  num_rows = len(next(iter(batch.values()))) if batch else 0
  sizes, begins = np.empty((2, len(columns), num_rows), np.int64)
  for column, column_sizes in zip(columns.values(), sizes, strict=True):
    column.measure(column_sizes)
  ends = np.empty(num_rows, np.int64)
  data = lay_out(
    sizes,
    np.array([column.list_number for column in columns.values()], np.int64),
    np.frombuffer(b"".join(stems), np.uint8),
    np.cumsum([len(stem) for stem in stems], dtype=np.int64),
    ends,
    begins,
  )
  for column, column_sizes, column_begins in zip(columns.values(), sizes, begins, strict=True):
    column.write(column_sizes, column_begins, data)
  return data, ends


def _split_into_lists(batch: Batch) -> dict[str, Ragged | np.ndarray]:
  """Return the lists that records hold for a batch, by name."""

  def parts_of(feature: Any) -> tuple[Ragged, Ragged] | None:
    if not (isinstance(feature, Ragged) and isinstance(feature.values, Ragged)):
      return None
    lengths = Ragged(feature.values.lengths, feature.lengths)
    return Ragged(feature.values.values, lengths.sums()), lengths

  return stored_lists(batch, parts_of)


@dataclasses.dataclass(frozen=True)
class _Integers:
  """Integers of all rows, one row after the other, and each row's number of integers."""

  values: np.ndarray
  counts: np.ndarray
  list_number = 3

  def measure(self, sizes: np.ndarray) -> None:
    """Fill `sizes`, `(rows,) int64`, with the bytes that each row's values take."""
    measure_integers(self.values, self.counts, sizes)

  def write(self, sizes: np.ndarray, begins: np.ndarray, data: np.ndarray) -> None:
    """Write each row's values into `data` from its begin on."""
    write_integers(self.values, self.counts, sizes, begins, data)


@dataclasses.dataclass(frozen=True)
class _Floats:
  """Floats of all rows, one row after the other, and each row's number of floats."""

  values: np.ndarray
  counts: np.ndarray
  list_number = 2

  def measure(self, sizes: np.ndarray) -> None:
    """See `_Integers`."""
    np.multiply(self.counts, 4, out=sizes)

  def write(self, sizes: np.ndarray, begins: np.ndarray, data: np.ndarray) -> None:
    """See `_Integers`."""
    write_bytes(self.values.view(np.uint8), sizes, begins, data)


@dataclasses.dataclass(frozen=True)
class _Texts:
  """Texts of all rows, joined, with the bytes of each text and each row's number of texts."""

  joined: np.ndarray
  text_sizes: np.ndarray
  counts: np.ndarray
  list_number = 1

  def measure(self, sizes: np.ndarray) -> None:
    """See `_Integers`."""
    measure_texts(self.text_sizes, self.counts, sizes)

  def write(self, sizes: np.ndarray, begins: np.ndarray, data: np.ndarray) -> None:
    """See `_Integers`."""
    write_texts(self.joined, self.text_sizes, self.counts, begins, data)


def _to_column(name: str, feature: Ragged | np.ndarray) -> _Integers | _Floats | _Texts:
  """Return the list of a feature that is written."""
  if isinstance(feature, Ragged):
    values, counts = np.asarray(feature.values), feature.lengths
  else:
    values, counts = feature, np.ones(len(feature), np.int64)
  counts = counts.astype(np.int64) * math.prod(values.shape[1:])
  values = values.reshape(-1)
  if values.dtype.kind in "SU":
    values = values.astype(object)
  kind = list_kind(name, values.dtype)
  if kind == "int64_list":
    # Loops are compiled for these two dtypes only.
    dtype = np.int32 if np.can_cast(values.dtype, np.int32) else np.int64
    return _Integers(_as_read_only(values.astype(dtype, copy=False)), counts)
  if kind == "float_list":
    with np.errstate(over="ignore", invalid="ignore"):
      return _Floats(_as_read_only(values.astype("<f4", copy=False)), counts)
  texts = [text.encode() if isinstance(text, str) else text for text in values.tolist()]
  joined = np.frombuffer(b"".join(texts), np.uint8)
  return _Texts(joined, np.fromiter(map(len, texts), np.int64, len(texts)), counts)


def _as_read_only(values: np.ndarray) -> np.ndarray:
  """Return a contiguous read-only view: numba would compile once more for writable arrays."""
  view = np.ascontiguousarray(values).view()
  view.flags.writeable = False
  return view


def serialize_example(example: Mapping[str, Any]) -> bytes:
  """Serialize one record as a `tf.train.Example`, features sorted by name (docs/order.md#files-of-a-cache).

  Integers and bools are stored as int64, floats as float32, text as bytes, arrays flattened. A `Ragged` is
  stored as SeqIO stores it: its values, and the lengths of its rows under another name.

  >>> len(serialize_example({"targets": np.array([3, 1])}))
  21
  """
  lists = stored_lists(
    example, lambda value: (value.values, value.lengths) if isinstance(value, Ragged) else None
  )
  # Entry by entry, because protobuf's implementations sort names differently.
  entries = b"".join(_serialize_entry(name, lists[name]) for name in sorted(lists))
  return wire_field(1, entries) if entries else b""


def _serialize_entry(name: str, value: Any) -> bytes:
  """Serialize a list's entry among a record's features."""
  features = example_class()().features
  values = np.asarray(value)
  if values.dtype.kind in "SU":
    # numpy's own text types drop zero bytes at the end.
    values = np.asarray(value, object)
  values = values.reshape(-1)
  feature = features.feature[name]
  kind = list_kind(name, values.dtype)
  if kind == "int64_list":
    feature.int64_list.value.extend(values.astype(np.int64).tolist())
  elif kind == "float_list":
    feature.float_list.value.extend(values.astype(np.float32).view(np.uint32).tolist())
  else:
    feature.bytes_list.value.extend(
      [text.encode() if isinstance(text, str) else text for text in values.tolist()]
    )
  return features.SerializeToString()


def stored_lists(
  features: Mapping[str, Any], parts_of: Callable[[Any], tuple[Any, Any] | None]
) -> dict[str, Any]:
  """Return the lists that records hold for features, by name; ragged rows have two: values and lengths.

  Args:
    features: features by name, in any form.
    parts_of: returns these two lists for a feature of ragged rows, in the same form, and None for others.

  Raises:
    ValueError: if two lists would have the same name.

  Source: `dict_to_tfexample` and `tfexample_ragged_length_key` of seqio/utils.py.
  """
  lists = dict(features)
  for name, feature in features.items():
    parts = parts_of(feature)
    if parts is not None:
      lengths_name = row_lengths_name(name)
      if lengths_name in features:
        raise ValueError(f"Feature {lengths_name!r} has the name of the row lengths of feature {name!r}.")
      lists[name], lists[lengths_name] = parts
  return lists
