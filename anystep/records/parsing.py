"""`tf.train.Example` records to numpy and back: by compiled loops where numba is installed, else protobuf."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.cached import cached_property
from anystep.caches.manifest import Feature
from anystep.compiled import compiled
from anystep.errors import AnystepError, ExitCode
from anystep.records.parsing_loops import decode_integers, gather_bytes, locate_lists, locate_texts

# A feature's lists by what numpy reads them as. Floats come as their bits: the way through Python's own
# floats would make other NaNs of some.
_KINDS = {"bytes_list": np.dtype(object), "float_list": np.dtype(np.uint32), "int64_list": np.dtype(np.int64)}
# Fewer are parsed before numba is imported, which takes 0.4 s.
_FEWEST_TO_COMPILE_FOR = 16


@dataclasses.dataclass(frozen=True)
class Ragged:
  """A feature of several rows whose lengths differ.

  Where an example is itself a sequence of rows whose lengths differ, the values of a batch are a `Ragged` as
  well: its rows are those of all examples, and an example, a row of the batch, is a `Ragged` of its own.

  Attributes:
    values: `(sum of lengths, ...)`, the rows one after the other.
    lengths: `(rows,) int64`.
  """

  values: np.ndarray | Any
  lengths: np.ndarray

  def __post_init__(self):
    if int(self.lengths.sum()) != len(self.values) or self.lengths.min(initial=0) < 0:
      raise ValueError(f"lengths add up to {self.lengths.sum()}, values are {len(self.values)}")

  def __len__(self) -> int:
    return len(self.lengths)

  def __array__(self, *_: Any, **__: Any) -> np.ndarray:
    raise TypeError(
      "A Ragged is no array, for its rows' lengths differ: rows() lists them, to_padded fills them."
    )

  def __getitem__(self, rows: slice) -> Ragged:
    """Rows that stand side by side, as views."""
    if not isinstance(rows, slice) or rows.step not in (None, 1):
      raise TypeError(f"A Ragged is cut by slices without steps, not by {rows!r}: rows() lists its rows.")
    first, stop, _ = rows.indices(len(self))
    stop = max(first, stop)
    return Ragged(self.values[self._bounds[first] : self._bounds[stop]], self.lengths[first:stop])

  @cached_property
  def _bounds(self) -> np.ndarray:
    """Where each row begins, and the last ends: `(rows + 1,) int64`."""
    return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

  @property
  def dtype(self) -> np.dtype:
    """The values'."""
    return self.values.dtype

  @property
  def shape(self) -> tuple[int | None, ...]:
    """The number of rows, None for their lengths, and what dimensions the values have besides."""
    return (len(self), None, *self.values.shape[1:])

  @property
  def ndim(self) -> int:
    """How many dimensions there are, the rows among them."""
    return len(self.shape)

  @classmethod
  def of_rows(cls, rows: Sequence[Any], dtype: np.dtype, inner_shape: tuple[Any, ...] = ()) -> Ragged:
    """Joins rows, which are `Ragged` where inner_shape begins with None.

    Otherwise dtype and inner_shape matter where there is no row.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    if inner_shape[:1] == (None,):
      return cls(cls.of_rows([part for row in rows for part in row.rows()], dtype, inner_shape[1:]), lengths)
    values = np.concatenate(rows) if len(rows) else np.zeros((0, *inner_shape), dtype)
    return cls(values.astype(dtype, copy=False), lengths)

  def sums(self) -> np.ndarray:
    """The sum of each row's values, where they are numbers: `(rows,) int64`."""
    return np.diff(np.concatenate([[0], np.cumsum(self.values, dtype=np.int64)])[self._bounds])

  def rows(self) -> list[Any]:
    """The rows, as views: arrays, or `Ragged` ones where the values are."""
    bounds = self._bounds.tolist()
    return [self.values[start:stop] for start, stop in itertools.pairwise(bounds)]

  def to_padded(self, length: int) -> np.ndarray:
    """`(rows, length, ...)`: each row cut or filled with zeros, texts with empty ones, at its end.

    Raises:
      AnystepError: 78 `feature_ragged` for rows of rows whose lengths differ.
    """
    if isinstance(self.values, Ragged):
      raise AnystepError(
        ExitCode.CONFIG,
        "feature_ragged",
        expected="a feature whose first dimension alone varies",
        got=f"{self.dtype} of shape (rows, None, {', '.join(map(str, self.values.shape[1:]))})",
        fix="make it dense in a preprocessor after the cache, or give no length of it",
      )
    padded = padding((len(self), length, *self.values.shape[1:]), self.values.dtype)
    starts = np.zeros(len(self), np.int64)
    self.write(padded, rows=np.arange(len(self)), starts=starts, lengths=np.minimum(self.lengths, length))
    return padded

  def write(self, out: np.ndarray, *, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
    """Writes the first values of each sequence into a row.

    Args:
      out: contiguous, `(rows, length, ...)`, of the values' dtype and inner shape.
      rows, starts, lengths: of each sequence, the row of `out`, the first place in it, and how many values.
    """
    size = math.prod(self.values.shape[1:])
    values, flat = self.values.reshape(-1), out.reshape(out.shape[0], out.shape[1] * size)
    places = (self.lengths * size, rows, starts * size, lengths * size)
    if len(self) < _FEWEST_TO_COMPILE_FOR or values.dtype.hasobject:
      _write.plain(values, *places, flat)
    else:
      # As unsigned words: numba compiles for a few sizes, and need not know the dtype.
      words = np.dtype(f"u{values.itemsize}")
      _write(values.view(words), *places, flat.view(words))


@compiled
def _write(values, sizes, rows, starts, lengths, out):
  first = 0
  for k in range(len(sizes)):
    out[rows[k], starts[k] : starts[k] + lengths[k]] = values[first : first + lengths[k]]
    first += sizes[k]


def padding(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
  """What stands where there is no data: zeros, for objects empty bytes, as TensorFlow pads."""
  return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


def as_sequences(feature: Ragged | np.ndarray) -> Ragged | np.ndarray:
  """Rows of sequences of one length, `(rows, length, ...)`, as a `Ragged` like any others."""
  if isinstance(feature, Ragged) or feature.ndim < 2:
    return feature
  rows, length, *inner = feature.shape
  return Ragged(feature.reshape(rows * length, *inner), np.full(rows, length, np.int64))


def selected(feature: Ragged | np.ndarray, kept: np.ndarray) -> Ragged | np.ndarray:
  """The rows for which `kept`, `(rows,) bool`, is true."""
  if isinstance(feature, Ragged):
    return Ragged(selected(feature.values, np.repeat(kept, feature.lengths)), feature.lengths[kept])
  return feature[kept]


Batch = Mapping[str, Ragged | np.ndarray]
"""Features of several examples: a `Ragged` for a sequence, else an array of shape `(rows,)`."""


@functools.cache
def _example_class() -> Any:
  """The message class of tensorflow/core/example/{example,feature}.proto, in a pool of its own.

  TensorFlow registers the same names in protobuf's default pool, where two copies would clash. The bytes
  are the same, but names need not be UTF-8 (proto2), as in TensorFlow's parser, and floats are their bits.
  """
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  field = descriptor_pb2.FieldDescriptorProto
  file = descriptor_pb2.FileDescriptorProto(
    name="anystep/example.proto", package="tensorflow", syntax="proto2"
  )

  def add_message(name: str) -> descriptor_pb2.DescriptorProto:
    return file.message_type.add(name=name)

  for name, kind, options in (
    ("BytesList", field.TYPE_BYTES, {}),
    ("FloatList", field.TYPE_FIXED32, {"packed": True}),
    ("Int64List", field.TYPE_INT64, {"packed": True}),
  ):
    add_message(name).field.add(
      name="value", number=1, type=kind, label=field.LABEL_REPEATED, options=options
    )
  feature = add_message("Feature")
  feature.oneof_decl.add(name="kind")
  for number, (name, kind) in enumerate(zip(_KINDS, ("BytesList", "FloatList", "Int64List"), strict=True), 1):
    feature.field.add(
      name=name,
      number=number,
      type=field.TYPE_MESSAGE,
      label=field.LABEL_OPTIONAL,
      type_name=f".tensorflow.{kind}",
      oneof_index=0,
    )
  features = add_message("Features")
  entry = features.nested_type.add(name="FeatureEntry", options={"map_entry": True})
  entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
  entry.field.add(
    name="value",
    number=2,
    type=field.TYPE_MESSAGE,
    label=field.LABEL_OPTIONAL,
    type_name=".tensorflow.Feature",
  )
  features.field.add(
    name="feature",
    number=1,
    type=field.TYPE_MESSAGE,
    label=field.LABEL_REPEATED,
    type_name=".tensorflow.Features.FeatureEntry",
  )
  add_message("Example").field.add(
    name="features",
    number=1,
    type=field.TYPE_MESSAGE,
    label=field.LABEL_OPTIONAL,
    type_name=".tensorflow.Features",
  )
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def serialize_example(example: Mapping[str, Any]) -> bytes:
  """One record: a serialized `tf.train.Example`, features in sorted name order (design section 4).

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


def wire_field(number: int, content: bytes) -> bytes:
  """A field of protobuf's wire format that has a length."""
  size, length = len(content), b""
  while size > 127:
    size, length = size >> 7, length + bytes([size & 127 | 128])
  return bytes([number << 3 | 2]) + length + bytes([size]) + content


def _serialize_entry(name: str, value: Any) -> bytes:
  """A list's entry among a record's features."""
  features = _example_class()().features
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


def row_lengths_name(name: str) -> str:
  """What records call the lengths of the rows of a feature of ragged rows."""
  return f"_rl:0:{name}"


def list_kind(name: str, dtype: np.dtype) -> str:
  """The list that a feature's values are stored in.

  Raises:
    TypeError: for a dtype that no record holds.
  """
  if dtype.kind in "iub":
    return "int64_list"
  if dtype.kind == "f" or dtype.name == "bfloat16":
    return "float_list"
  if dtype.kind == "O":
    return "bytes_list"
  raise TypeError(f"Feature {name!r} is of dtype {dtype}, which tf.train.Example cannot hold.")


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
  if len(records) < _FEWEST_TO_COMPILE_FOR:
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
  kinds = np.array([1 + list(_KINDS).index(_kind(feature)) for feature in stored.values()], np.int64)
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

  example_class = _example_class()
  wanted: list[tuple[str, str, list[np.ndarray]]] = [
    (name, _kind(feature), []) for name, feature in _stored(features).items()
  ]
  for position, record in enumerate(records):
    try:
      stored = example_class.FromString(record).features.feature
    except DecodeError as error:
      got = f"{len(record)} bytes: {error}"
      raise _invalid(position, None, expected="a serialized tf.train.Example", got=got) from error
    for name, kind, rows in wanted:
      feature = stored[name]
      found = feature.WhichOneof("kind") or kind
      values = getattr(feature, found).value
      if found != kind and len(values):
        raise _invalid(position, name, expected=kind, got=found)
      rows.append(np.fromiter(values, _KINDS[kind], len(values)))
  lists = {}
  for name, kind, rows in wanted:
    values = np.concatenate(rows) if rows else np.zeros(0, _KINDS[kind])
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
