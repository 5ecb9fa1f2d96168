"""Batches of examples to `tf.train.Example` records: by compiled loops where numba is installed."""

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
  """A batch's records one after the other: of each row the bytes that `serialize_example` makes.

  Thread-safe. Where numba is installed compiled loops write the records, without Python's lock.

  Args:
    batch: features by name: a `Ragged` for a sequence, one of `Ragged` values where an example's own rows
      differ in length, else an array whose first axis counts rows. Numbers that int64, or float32, does not
      hold are stored as numpy casts them.

  Returns:
    `(bytes,) uint8`, the records, and `(rows,) int64`, where each ends.

  Raises:
    TypeError: for a dtype that no record holds.
    ValueError: where features differ in their number of rows, or two would be stored under one name.

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
    return _row_by_row(batch)
  return _by_compiled_loops(batch)


def _row_by_row(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  columns = [feature.rows() if isinstance(feature, Ragged) else feature for feature in batch.values()]
  records = [serialize_example(dict(zip(batch, row, strict=True))) for row in zip(*columns, strict=True)]
  ends = np.cumsum(np.fromiter(map(len, records), np.int64, len(records)))
  return np.frombuffer(bytearray(b"".join(records)), np.uint8), ends


def _by_compiled_loops(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  lists = _lists_of(batch)
  columns = {name: _column(name, lists[name]) for name in sorted(lists)}
  stems = [wire_field(1, name.encode()) + b"\x12" for name in columns]
  num_rows = len(next(iter(batch.values()))) if batch else 0
  sizes, places = np.empty((2, len(columns), num_rows), np.int64)
  for column, own_sizes in zip(columns.values(), sizes, strict=True):
    column.measure(own_sizes)
  ends = np.empty(num_rows, np.int64)
  data = lay_out(
    sizes,
    np.array([column.list_number for column in columns.values()], np.int64),
    np.frombuffer(b"".join(stems), np.uint8),
    np.cumsum([len(stem) for stem in stems], dtype=np.int64),
    ends,
    places,
  )
  for column, own_sizes, own_places in zip(columns.values(), sizes, places, strict=True):
    column.write(own_sizes, own_places, data)
  return data, ends


def _lists_of(batch: Batch) -> dict[str, Ragged | np.ndarray]:
  """By name the lists that records hold."""

  def parts_of(feature: Any) -> tuple[Ragged, Ragged] | None:
    if not (isinstance(feature, Ragged) and isinstance(feature.values, Ragged)):
      return None
    lengths = Ragged(feature.values.lengths, feature.lengths)
    return Ragged(feature.values.values, lengths.sums()), lengths

  return stored_lists(batch, parts_of)


@dataclasses.dataclass(frozen=True)
class _Integers:
  """Integers, all rows' one after the other, and how many each row has."""

  values: np.ndarray
  counts: np.ndarray
  list_number = 3

  def measure(self, sizes: np.ndarray) -> None:
    """Fills in how many bytes each row's values take."""
    measure_integers(self.values, self.counts, sizes)

  def write(self, sizes: np.ndarray, places: np.ndarray, data: np.ndarray) -> None:
    """Writes each row's values to its place."""
    write_integers(self.values, self.counts, sizes, places, data)


@dataclasses.dataclass(frozen=True)
class _Floats:
  """Floats, likewise."""

  values: np.ndarray
  counts: np.ndarray
  list_number = 2

  def measure(self, sizes: np.ndarray) -> None:
    """See `_Integers`."""
    np.multiply(self.counts, 4, out=sizes)

  def write(self, sizes: np.ndarray, places: np.ndarray, data: np.ndarray) -> None:
    """See `_Integers`."""
    write_bytes(self.values.view(np.uint8), sizes, places, data)


@dataclasses.dataclass(frozen=True)
class _Texts:
  """Texts, joined, with how many bytes each has."""

  joined: np.ndarray
  text_sizes: np.ndarray
  counts: np.ndarray
  list_number = 1

  def measure(self, sizes: np.ndarray) -> None:
    """See `_Integers`."""
    measure_texts(self.text_sizes, self.counts, sizes)

  def write(self, sizes: np.ndarray, places: np.ndarray, data: np.ndarray) -> None:
    """See `_Integers`."""
    write_texts(self.joined, self.text_sizes, self.counts, places, data)


def _column(name: str, feature: Ragged | np.ndarray) -> _Integers | _Floats | _Texts:
  """A feature as what is written of it."""
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
    # Two dtypes are all that loops are compiled for.
    dtype = np.int32 if np.can_cast(values.dtype, np.int32) else np.int64
    return _Integers(_read_only(values.astype(dtype, copy=False)), counts)
  if kind == "float_list":
    with np.errstate(over="ignore", invalid="ignore"):
      return _Floats(_read_only(values.astype("<f4", copy=False)), counts)
  texts = [text.encode() if isinstance(text, str) else text for text in values.tolist()]
  joined = np.frombuffer(b"".join(texts), np.uint8)
  return _Texts(joined, np.fromiter(map(len, texts), np.int64, len(texts)), counts)


def _read_only(values: np.ndarray) -> np.ndarray:
  """The values, contiguous: numba compiles anew for arrays that may be written to."""
  view = np.ascontiguousarray(values).view()
  view.flags.writeable = False
  return view


def serialize_example(example: Mapping[str, Any]) -> bytes:
  """One record: a serialized `tf.train.Example`, features sorted by name (docs/order.md#files-of-a-cache).

  Integers and bools are stored as int64, floats as float32, text as bytes, arrays flattened. Rows whose
  lengths differ, a `Ragged`, are stored as SeqIO does: their values, and their lengths under another name.

  >>> example = {"targets": np.array([3, 1])}
  >>> parse_example(serialize_example(example), {"targets": Feature(dtype="int32", shape=(None,))})
  {'targets': array([3, 1], dtype=int32)}
  """
  lists = stored_lists(
    example, lambda value: (value.values, value.lengths) if isinstance(value, Ragged) else None
  )
  # One by one, for protobuf's implementations sort names differently.
  entries = b"".join(_serialize_entry(name, lists[name]) for name in sorted(lists))
  return wire_field(1, entries) if entries else b""


def _serialize_entry(name: str, value: Any) -> bytes:
  """A list's entry among a record's features."""
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
  """By name the lists that records hold of features: of ragged rows their values and their lengths.

  Args:
    features: by name, in any form.
    parts_of: tells of a feature of ragged rows what those two are in that form, of another None.

  Raises:
    ValueError: where two lists would have one name.

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
