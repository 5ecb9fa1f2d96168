"""`tf.train.Example` records to numpy and back: by compiled loops where numba is installed, else protobuf."""

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
  """One record's features: arrays of the manifest's dtype and shape; scalars have shape ().

  A feature of rows whose lengths differ is a `Ragged`.

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
  """Several records' features, by name; who parses thousands of batches makes an `ExampleParser`.

  Raises:
    AnystepError: as `ExampleParser`.
  """
  if len(records) < FEWEST_TO_COMPILE_FOR:
    return _parse_with_protobuf(records, dict(sorted(features.items())))
  return ExampleParser(features)(records)


class ExampleParser:
  """Parses records, a batch at a time, into what a manifest says of their features.

  Thread-safe and picklable. Where numba is installed, what writers write is decoded by compiled loops,
  without Python's lock and in a tenth of protobuf's time; any other record is protobuf's to parse, so the
  arrays, or the error, are always protobuf's.

  Args:
    features: the features wanted, by name; others in the records are passed over. The loops for them are
      compiled here, or taken from where numba keeps them.
  """

  def __init__(self, features: Mapping[str, Feature]):
    self._features = dict(sorted(features.items()))
    self._compiled = importlib.util.find_spec("numba") is not None
    if self._compiled:
      _decode([], self._features)

  def __reduce__(self):
    # Another process compiles for itself.
    return type(self), (self._features,)

  def __call__(self, records: Sequence[bytes]) -> dict[str, Ragged | np.ndarray]:
    """The records' features, by name: a `Ragged` for a sequence, else an array of shape `(rows,)`.

    Raises:
      AnystepError: 65 `record_invalid` for a record that is no `tf.train.Example`, or in which a feature is
        of another kind, has another number of values than its shape, or integers outside its dtype. Of
        several, one is named: its place among the records is `error.fields["position"]`.
    """
    batch = _decode(records, self._features) if self._compiled else None
    return _parse_with_protobuf(records, self._features) if batch is None else batch


def _decode(
  records: Sequence[bytes], features: Mapping[str, Feature]
) -> dict[str, Ragged | np.ndarray] | None:
  """None where a record is not as writers write it: what it is, is protobuf's to say."""
  joined = b"".join(records)
  data = np.frombuffer(joined, np.uint8)
  ends = np.cumsum(np.fromiter(map(len, records), np.int64, len(records)))
  stored = _stored(features)
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
  return {name: _shaped(name, feature, lists) for name, feature in features.items()}


def _decode_lists(
  joined: bytes, begins: np.ndarray, stops: np.ndarray, total: int, feature: Feature
) -> np.ndarray | None:
  """A feature's values, list after list; None where integers are cut or too large."""
  data = np.frombuffer(joined, np.uint8)
  kind = _kind(feature)
  if kind == "int64_list":
    # Most tokens are int32; what else there is, is made of int64.
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
  wanted: list[tuple[str, str, list[np.ndarray]]] = [
    (name, _kind(feature), []) for name, feature in _stored(features).items()
  ]
  for position, record in enumerate(records):
    try:
      stored = message.FromString(record).features.feature
    except DecodeError as error:
      got = f"{len(record)} bytes: {error}"
      raise _invalid(position, None, expected="a serialized tf.train.Example", got=got) from error
    for name, kind, rows in wanted:
      feature = stored[name]
      found = feature.WhichOneof("kind") or kind
      values = getattr(feature, found).value
      if found != kind and len(values):
        raise _invalid(position, name, expected=kind, got=found)
      rows.append(np.fromiter(values, LIST_DTYPES[kind], len(values)))
  lists = {}
  for name, kind, rows in wanted:
    values = np.concatenate(rows) if rows else np.zeros(0, LIST_DTYPES[kind])
    values = values.view(np.float32) if kind == "float_list" else values
    lists[name] = values, np.array([len(row) for row in rows], np.int64)
  return {name: _shaped(name, feature, lists) for name, feature in features.items()}


def _stored(features: Mapping[str, Feature]) -> dict[str, Feature]:
  """The lists that records hold of features."""
  return stored_lists(
    features,
    lambda feature: (feature, Feature(dtype="int64", shape=(None,))) if feature.ragged else None,
  )


_Lists = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Lists by name: the values of all records, one record after the other, and how many each has."""


def _shaped(name: str, feature: Feature, lists: _Lists) -> Ragged | np.ndarray:
  """The feature as its lists have it."""
  if feature.ragged:
    return _of_ragged_rows(name, feature, lists)
  values, counts = lists[name]
  size = math.prod(known for known in feature.shape if known is not None)
  if None in feature.shape:
    expected = f"a multiple of {size}"
    wrong = counts % size if size else counts
  else:
    expected = str(size)
    wrong = counts != size
  if wrong.any():
    position = int(np.flatnonzero(wrong)[0])
    raise _invalid(position, name, expected=f"values: {expected}", got=f"values: {counts[position]}")
  values = _of_dtype(name, feature, values, counts)
  if not feature.sequence:
    return values
  length, *inner = feature.shape
  lengths = counts // max(size, 1) if length is None else np.full(len(counts), length)
  return Ragged(values.reshape(lengths.sum(), *inner), lengths)


def _of_ragged_rows(name: str, feature: Feature, lists: _Lists) -> Ragged:
  """The feature as the list of its values and that of its row lengths have it."""
  values, counts = lists[name]
  rows = Ragged(*lists[row_lengths_name(name)])
  # Lengths beyond what there is could add up to anything.
  outside = (rows.values < 0) | (rows.values > len(values))
  if outside.any():
    place = int(np.flatnonzero(outside)[0])
    position = int(np.searchsorted(np.cumsum(rows.lengths), place, side="right"))
    expected = f"row lengths: 0 to {len(values)}"
    raise _invalid(position, name, expected=expected, got=f"row lengths: {rows.values[place]}")
  totals = rows.sums() * math.prod(known for known in feature.shape if known is not None)
  if (totals != counts).any():
    position = int(np.flatnonzero(totals != counts)[0])
    expected, got = f"values: {totals[position]}, as its rows' lengths add up", f"values: {counts[position]}"
    raise _invalid(position, name, expected=expected, got=got)
  values = _of_dtype(name, feature, values, counts)
  return Ragged(Ragged(values.reshape(-1, *feature.shape[2:]), rows.values), rows.lengths)


def _of_dtype(name: str, feature: Feature, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """The values of records that have so many each, as what the manifest says they are."""
  dtype = feature.numpy_dtype
  if dtype.kind in "biu" and dtype != values.dtype and len(values):
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if values.min() < low or values.max() > high:
      place = int(np.flatnonzero((values < low) | (values > high))[0])
      position = int(np.searchsorted(np.cumsum(counts), place, side="right"))
      raise _invalid(position, name, expected=f"{dtype}: {low} to {high}", got=int(values[place]))
  with np.errstate(over="ignore", invalid="ignore"):
    return values.astype(dtype, copy=False)


def _invalid(position: int, name: str | None, *, expected: str, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "record_invalid",
    position=position,
    feature=name,
    expected=expected,
    got=got,
    fix="restore the cache from where it was made, or cache the task again with --overwrite",
  )


def _kind(feature: Feature) -> str:
  kind = feature.numpy_dtype.kind
  return "bytes_list" if kind == "O" else "int64_list" if kind in "biu" else "float_list"
