"""Parsing of `tf.train.Example` records: by compiled loops if numba is installed, else by protobuf."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anystep.compiled import FEWEST_TO_COMPILE_FOR
from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.records.example_message import LIST_DTYPES, example_class, row_lengths_name
from anystep.records.parsing_loops import decode_integers, gather_bytes, locate_lists, locate_texts
from anystep.records.writing import stored_lists


def parse_example(record: bytes, features: Mapping[str, Feature]) -> dict[str, Any]:
  """Parse one record: arrays of the manifest's dtype and shape, by name; scalars have shape ().

  A feature of rows whose lengths differ is a `Ragged`.

  >>> from anystep.records.writing import serialize_example
  >>> record = serialize_example({"targets": np.array([3, 1])})
  >>> parse_example(record, {"targets": Feature(dtype="int32", shape=(None,))})
  {'targets': array([3, 1], dtype=int32)}

  Raises:
    AnystepError: as `ExampleParser`.
  """
  batch = _parse_with_protobuf([record], dict(sorted(features.items())))
  return {
    name: feature.values if isinstance(feature, Ragged) else feature.reshape(())
    for name, feature in batch.items()
  }


def parse_examples(
  records: Sequence[bytes], features: Mapping[str, Feature]
) -> dict[str, Ragged | np.ndarray]:
  """Parse several records to features by name; for thousands of batches use an `ExampleParser`.

  Raises:
    AnystepError: as `ExampleParser`.
  """
  if len(records) < FEWEST_TO_COMPILE_FOR:
    return _parse_with_protobuf(records, dict(sorted(features.items())))
  return ExampleParser(features)(records)


class ExampleParser:
  """Parser of batches of records to the features of a manifest.

  Thread-safe and picklable. If numba is installed, compiled loops decode records that are encoded as writers
  encode them, without Python's lock and in a tenth of protobuf's time. Protobuf parses all other records, so
  the arrays, or the error, are always those of protobuf.

  Args:
    features: the features to parse, by name; other features in the records are skipped. Loops for them are
      compiled here, or loaded from numba's files.
  """

  def __init__(self, features: Mapping[str, Feature]):
    self._features = dict(sorted(features.items()))
    self._compiled = importlib.util.find_spec("numba") is not None
    if self._compiled:
      _decode([], self._features)

  def __reduce__(self):
    # Another process compiles its own loops.
    return type(self), (self._features,)

  def __call__(self, records: Sequence[bytes]) -> dict[str, Ragged | np.ndarray]:
    """Parse records to features by name: a `Ragged` for a sequence, else an array of shape `(rows,)`.

    Raises:
      AnystepError: 65 `record_invalid` for a record that is no `tf.train.Example`, or in which a feature has
        another kind, a number of values that does not fit its shape, or integers outside its dtype. If there
        are several such records, the error names one; `error.fields["position"]` is its position.
    """
    batch = _decode(records, self._features) if self._compiled else None
    return _parse_with_protobuf(records, self._features) if batch is None else batch


def _decode(
  records: Sequence[bytes], features: Mapping[str, Feature]
) -> dict[str, Ragged | np.ndarray] | None:
  """Decode records by compiled loops; return None if a record is not encoded as writers encode it."""
  joined = b"".join(records)
  data = np.frombuffer(joined, np.uint8)
  ends = np.cumsum(np.fromiter(map(len, records), np.int64, len(records)))
  stored = _expand_ragged(features)
  names = [name.encode() for name in stored]
  name_ends = np.cumsum([len(name) for name in names], dtype=np.int64)
  kinds = np.array([1 + list(LIST_DTYPES).index(_kind(feature)) for feature in stored.values()], np.int64)
  begins, stops, counts = np.zeros((3, len(stored), len(records)), np.int64)
  if not locate_lists(
    data, ends, np.frombuffer(b"".join(names), np.uint8), name_ends, kinds, begins, stops, counts
  ):
    return None
  lists = {}
  for k, (name, feature) in enumerate(stored.items()):
    values = _decode_lists(joined, begins[k], stops[k], int(counts[k].sum()), feature)
    if values is None:
      return None
    lists[name] = values, counts[k]
  return {name: _build_feature(name, feature, lists) for name, feature in features.items()}


def _decode_lists(
  joined: bytes, begins: np.ndarray, stops: np.ndarray, total: int, feature: Feature
) -> np.ndarray | None:
  """Decode a feature's values, list after list; return None if integers are cut off or too large."""
  data = np.frombuffer(joined, np.uint8)
  kind = _kind(feature)
  if kind == "int64_list":
    # Most tokens are int32; other dtypes are converted from int64.
    dtype: Any = np.int32 if feature.dtype == "int32" else np.int64
    values, limits = np.empty(total, dtype), np.iinfo(dtype)
    return values if decode_integers(data, begins, stops, values, limits.min, limits.max) else None
  if kind == "float_list":
    values = np.empty(total, "<f4")
    gather_bytes(data, begins, stops, values.view(np.uint8))
    return values
  bounds = np.empty((total, 2), np.int64)
  locate_texts(data, begins, stops, bounds)
  return np.fromiter((joined[begin:stop] for begin, stop in bounds.tolist()), object, total)


def _parse_with_protobuf(
  records: Sequence[bytes], features: Mapping[str, Feature]
) -> dict[str, Ragged | np.ndarray]:
  from google.protobuf.message import DecodeError

  message = example_class()
  rows_by_feature: list[tuple[str, str, list[np.ndarray]]] = [
    (name, _kind(feature), []) for name, feature in _expand_ragged(features).items()
  ]
  for position, record in enumerate(records):
    try:
      stored = message.FromString(record).features.feature
    except DecodeError as error:
      got = f"{len(record)} bytes: {error}"
      raise _record_invalid(position, None, expected="a serialized tf.train.Example", got=got) from error
    for name, kind, rows in rows_by_feature:
      feature = stored[name]
      stored_kind = feature.WhichOneof("kind") or kind
      values = getattr(feature, stored_kind).value
      if stored_kind != kind and len(values):
        raise _record_invalid(position, name, expected=kind, got=stored_kind)
      rows.append(np.fromiter(values, LIST_DTYPES[kind], len(values)))
  lists = {}
  for name, kind, rows in rows_by_feature:
    values = np.concatenate(rows) if rows else np.zeros(0, LIST_DTYPES[kind])
    values = values.view(np.float32) if kind == "float_list" else values
    lists[name] = values, np.array([len(row) for row in rows], np.int64)
  return {name: _build_feature(name, feature, lists) for name, feature in features.items()}


def _expand_ragged(features: Mapping[str, Feature]) -> dict[str, Feature]:
  """Return the lists that records hold for features, each as a feature."""
  return stored_lists(
    features,
    lambda feature: (feature, Feature(dtype="int64", shape=(None,))) if feature.ragged else None,
  )


_Lists = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Lists by name: the values of all records, one record after the other, and the number of values of each."""


def _build_feature(name: str, feature: Feature, lists: _Lists) -> Ragged | np.ndarray:
  """Build a feature from its lists."""
  if feature.ragged:
    return _build_ragged_rows(name, feature, lists)
  values, counts = lists[name]
  size = math.prod(axis_size for axis_size in feature.shape if axis_size is not None)
  if None in feature.shape:
    expected = f"a multiple of {size}"
    wrong = counts % size if size else counts
  else:
    expected = str(size)
    wrong = counts != size
  if wrong.any():
    position = int(np.flatnonzero(wrong)[0])
    raise _record_invalid(position, name, expected=f"values: {expected}", got=f"values: {counts[position]}")
  values = _cast(name, feature, values, counts)
  if not feature.sequence:
    return values
  length, *inner = feature.shape
  lengths = counts // max(size, 1) if length is None else np.full(len(counts), length)
  return Ragged(values.reshape(lengths.sum(), *inner), lengths)


def _build_ragged_rows(name: str, feature: Feature, lists: _Lists) -> Ragged:
  """Build a feature of ragged rows from the lists of its values and of its row lengths."""
  values, counts = lists[name]
  rows = Ragged(*lists[row_lengths_name(name)])
  # The sum of longer lengths could overflow.
  outside = (rows.values < 0) | (rows.values > len(values))
  if outside.any():
    row = int(np.flatnonzero(outside)[0])
    position = int(np.searchsorted(np.cumsum(rows.lengths), row, side="right"))
    expected = f"row lengths: 0 to {len(values)}"
    raise _record_invalid(position, name, expected=expected, got=f"row lengths: {rows.values[row]}")
  totals = rows.sums() * math.prod(axis_size for axis_size in feature.shape if axis_size is not None)
  if (totals != counts).any():
    position = int(np.flatnonzero(totals != counts)[0])
    expected, got = f"values: {totals[position]}, as its rows' lengths add up", f"values: {counts[position]}"
    raise _record_invalid(position, name, expected=expected, got=got)
  values = _cast(name, feature, values, counts)
  return Ragged(Ragged(values.reshape(-1, *feature.shape[2:]), rows.values), rows.lengths)


def _cast(name: str, feature: Feature, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Convert values to the feature's dtype; counts are the records' numbers of values, `(records,) int64`."""
  dtype = feature.numpy_dtype
  if dtype.kind in "biu" and dtype != values.dtype and len(values):
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if values.min() < low or values.max() > high:
      k = int(np.flatnonzero((values < low) | (values > high))[0])
      position = int(np.searchsorted(np.cumsum(counts), k, side="right"))
      raise _record_invalid(position, name, expected=f"{dtype}: {low} to {high}", got=int(values[k]))
  with np.errstate(over="ignore", invalid="ignore"):
    return values.astype(dtype, copy=False)


def _record_invalid(position: int, name: str | None, *, expected: str, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "record_invalid",
    position=position,
    feature=name,
    expected=expected,
    got=got,
    fix="restore the cache from its original, or cache the task again with --overwrite",
  )


def _kind(feature: Feature) -> str:
  kind = feature.numpy_dtype.kind
  return "bytes_list" if kind == "O" else "int64_list" if kind in "biu" else "float_list"
