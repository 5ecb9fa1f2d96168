"""`tf.train.Example` records to numpy and back: by compiled loops where numba is installed, else protobuf."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anystep.compiled import compiled
from anystep.errors import AnystepError, ExitCode
from anystep.example_loops import decode_integers, gather_bytes, locate_lists, locate_texts
from anystep.manifest import Feature

# A feature's lists by what numpy reads them as. Floats come as their bits: the way through Python's own
# floats would make other NaNs of some.
_KINDS = {"bytes_list": np.dtype(object), "float_list": np.dtype(np.uint32), "int64_list": np.dtype(np.int64)}
# Fewer are parsed before numba is imported, which takes 0.4 s.
_FEWEST_TO_COMPILE_FOR = 16


@dataclasses.dataclass(frozen=True)
class Ragged:
  """A feature of several rows whose lengths differ.

  Attributes:
    values: `(sum of lengths, ...)`, the rows one after the other.
    lengths: `(rows,) int64`.
  """

  values: np.ndarray
  lengths: np.ndarray

  def __post_init__(self):
    if int(self.lengths.sum()) != len(self.values):
      raise ValueError(f"lengths add up to {self.lengths.sum()}, values are {len(self.values)}")

  def __len__(self) -> int:
    return len(self.lengths)

  @classmethod
  def of_rows(cls, rows: Sequence[np.ndarray], dtype: np.dtype, inner_shape: tuple[int, ...] = ()) -> Ragged:
    """Joins rows; dtype and inner_shape matter where there is none."""
    values = np.concatenate(rows) if len(rows) else np.zeros((0, *inner_shape), dtype)
    return cls(values.astype(dtype, copy=False), np.array([len(row) for row in rows], np.int64))

  def rows(self) -> list[np.ndarray]:
    """The rows, as views."""
    stops = np.cumsum(self.lengths).tolist()
    return (
      [self.values[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)] if stops else []
    )

  def to_padded(self, length: int) -> np.ndarray:
    """`(rows, length, ...)`: each row cut or filled with zeros, texts with empty ones, at its end."""
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
  """One record: a serialized `tf.train.Example`, features in sorted name order.

  Integers and bools are stored as int64, floats as float32, text as bytes, arrays flattened.

  >>> example = {"targets": np.array([3, 1])}
  >>> parse_example(serialize_example(example), {"targets": Feature(dtype="int32", shape=(None,))})
  {'targets': array([3, 1], dtype=int32)}
  """
  message = _example_class()()
  for name, value in example.items():
    values = np.asarray(value)
    if values.dtype.kind in "SU":
      # numpy's own text types drop zero bytes at the end.
      values = np.asarray(value, object)
    values = values.reshape(-1)
    feature = message.features.feature[name]
    if values.dtype.kind in "iub":
      feature.int64_list.value.extend(values.astype(np.int64).tolist())
    elif values.dtype.kind == "f" or values.dtype.name == "bfloat16":
      feature.float_list.value.extend(values.astype(np.float32).view(np.uint32).tolist())
    elif values.dtype.kind == "O":
      feature.bytes_list.value.extend(
        [text.encode() if isinstance(text, str) else text for text in values.tolist()]
      )
    else:
      raise TypeError(f"Feature {name!r} is of dtype {values.dtype}, which tf.train.Example cannot hold.")
  return message.SerializeToString(deterministic=True)


def parse_example(record: bytes, features: Mapping[str, Feature]) -> dict[str, np.ndarray]:
  """One record's features: arrays of the manifest's dtype and shape; scalars have shape ().

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
  names = [name.encode() for name in features]
  name_ends = np.cumsum([len(name) for name in names], dtype=np.int64)
  kinds = np.array([1 + list(_KINDS).index(_kind(feature)) for feature in features.values()], np.int64)
  begins, stops, counts = np.zeros((3, len(features), len(records)), np.int64)
  if not locate_lists(
    data, ends, np.frombuffer(b"".join(names), np.uint8), name_ends, kinds, begins, stops, counts
  ):
    return None
  lists = []
  for k, feature in enumerate(features.values()):
    values = _decode_lists(joined, begins[k], stops[k], int(counts[k].sum()), feature)
    if values is None:
      return None
    lists.append(values)
  return {
    name: _shaped(name, feature, values, own)
    for (name, feature), values, own in zip(features.items(), lists, counts, strict=True)
  }


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
    (name, _kind(feature), []) for name, feature in features.items()
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
  batch = {}
  for name, kind, rows in wanted:
    values = np.concatenate(rows) if rows else np.zeros(0, _KINDS[kind])
    values = values.view(np.float32) if kind == "float_list" else values
    batch[name] = _shaped(name, features[name], values, np.array([len(row) for row in rows], np.int64))
  return batch


def _shaped(name: str, feature: Feature, values: np.ndarray, counts: np.ndarray) -> Ragged | np.ndarray:
  """The feature whose lists hold `values`, record after record, `counts` of each."""
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
  dtype = _numpy_dtype(feature.dtype)
  if dtype.kind in "biu" and dtype != values.dtype and len(values):
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if values.min() < low or values.max() > high:
      place = int(np.flatnonzero((values < low) | (values > high))[0])
      position = int(np.searchsorted(np.cumsum(counts), place, side="right"))
      raise _invalid(position, name, expected=f"{dtype}: {low} to {high}", got=int(values[place]))
  with np.errstate(over="ignore", invalid="ignore"):
    values = values.astype(dtype, copy=False)
  if not feature.sequence:
    return values
  length, *inner = feature.shape
  lengths = counts // max(size, 1) if length is None else np.full(len(counts), length)
  return Ragged(values.reshape(lengths.sum(), *inner), lengths)


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
  kind = _numpy_dtype(feature.dtype).kind
  return "bytes_list" if kind == "O" else "int64_list" if kind in "biu" else "float_list"


def _numpy_dtype(name: str) -> np.dtype:
  return np.dtype(object) if name == "string" else np.dtype(name)
