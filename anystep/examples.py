"""`tf.train.Example` records to numpy and back: with TensorFlow where it is installed, else with protobuf."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.manifest import Feature

# A feature's lists by what numpy reads them as. Floats come as their bits: the way through Python's own
# floats would make other NaNs of some.
_KINDS = {"bytes_list": np.dtype(object), "float_list": np.dtype(np.uint32), "int64_list": np.dtype(np.int64)}
# Fewer are parsed sooner without TensorFlow, whose call takes about 0.2 ms.
_FEWEST_FOR_TENSORFLOW = 16
_HEAD_BYTES = 6
_starting_tensorflow = threading.Lock()


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
    """`(rows, length, ...)`: each row cut or filled with zeros at its end."""
    padded = np.zeros((len(self), length, *self.values.shape[1:]), self.values.dtype)
    values = self.values
    if (self.lengths > length).any():
      values = np.concatenate([row[:length] for row in self.rows()])
    padded[np.arange(length) < self.lengths[:, None]] = values
    return padded


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
  tensorflow = sys.modules.get("tensorflow") is not None and len(records) >= _FEWEST_FOR_TENSORFLOW
  return ExampleParser(features, tensorflow=tensorflow)(records)


def tensorflow_installed() -> bool:
  """Whether an `ExampleParser` may use TensorFlow; does not import it."""
  return importlib.util.find_spec("tensorflow") is not None


class ExampleParser:
  """Parses records, a batch at a time, into what a manifest says of their features.

  Thread-safe and picklable. With and without TensorFlow the arrays, or the error, are the same; with it
  a batch of 256 takes about a sixth of the time. (They can differ in records that no writer makes:
  damaged ones of the right length, which containers' checksums tell, and lists in several pieces.)

  Args:
    features: the features wanted, by name; others in the records are passed over.
    tensorflow: whether to use TensorFlow, which is imported now where it has not been: that takes seconds
      and hides the accelerators from TensorFlow, for whoever reads with it trains with something else. A
      program that wants them visible imports TensorFlow itself.
  """

  def __init__(self, features: Mapping[str, Feature], *, tensorflow: bool):
    self._features = dict(sorted(features.items()))
    self._tensorflow = tensorflow
    if tensorflow:
      _start_tensorflow()

  def __reduce__(self):
    # In another process TensorFlow is to be imported anew.
    return functools.partial(type(self), tensorflow=self._tensorflow), (self._features,)

  def __call__(self, records: Sequence[bytes]) -> dict[str, Ragged | np.ndarray]:
    """The records' features, by name: a `Ragged` for a sequence, else an array of shape `(rows,)`.

    Raises:
      AnystepError: 65 `record_invalid` for a record that is no `tf.train.Example`, or in which a feature is
        of another kind, has another number of values than its shape, or integers outside its dtype. Of
        several, one is named: its place among the records is `error.fields["position"]`.
    """
    batch = _parse_with_tensorflow(records, self._features) if self._tensorflow else None
    return _parse_with_protobuf(records, self._features) if batch is None else batch


def _start_tensorflow() -> None:
  with _starting_tensorflow:
    imported_before = sys.modules.get("tensorflow") is not None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    if not imported_before:
      tf.config.set_visible_devices([], "GPU")
    with tf.device("CPU"):
      tf.zeros([])


def _parse_with_tensorflow(
  records: Sequence[bytes], features: Mapping[str, Feature]
) -> dict[str, Ragged | np.ndarray] | None:
  """None where TensorFlow refuses a record, or would misread one: what it is, is protobuf's to say."""
  import tensorflow as tf

  if not (tf.executing_eagerly() and _are_whole(records)):
    return None
  types = {"bytes_list": tf.string, "float_list": tf.float32, "int64_list": tf.int64}
  try:
    with tf.device("CPU"):
      parsed = tf.raw_ops.ParseExampleV2(
        serialized=tf.constant(records, tf.string),
        names=tf.constant([], tf.string),
        sparse_keys=[],
        dense_keys=[],
        ragged_keys=list(features),
        dense_defaults=[],
        num_sparse=0,
        sparse_types=[],
        ragged_value_types=[types[_kind(feature)] for feature in features.values()],
        ragged_split_types=[tf.int64] * len(features),
        dense_shapes=[],
      )
  except (tf.errors.OpError, UnicodeDecodeError):  # The latter where the error's text quotes the record.
    return None
  batch = {}
  for (name, feature), values, splits in zip(
    features.items(), parsed.ragged_values, parsed.ragged_row_splits, strict=True
  ):
    # `numpy()` copies; a view of the tensor's memory is copied once, when it is cast.
    array = values.numpy() if values.dtype == tf.string else np.asarray(memoryview(values))
    batch[name] = _shaped(name, feature, array, np.diff(splits.numpy()))
  return batch


def _are_whole(records: Sequence[bytes]) -> bool:
  """Whether each record is one field 1 to its last byte, as writers write them.

  TensorFlow takes a record that was cut between two features for one without the others.
  """
  sizes = np.fromiter(map(len, records), np.int64, len(records))
  if not len(records) or sizes.min() < _HEAD_BYTES:
    return False
  heads = np.frombuffer(b"".join([record[:_HEAD_BYTES] for record in records]), np.uint8)
  heads = heads.reshape(-1, _HEAD_BYTES).astype(np.int64)
  # The field's length is a varint: 7 bits a byte from the lowest on, all bytes but the last above 127.
  digits = heads[:, 1:] & 127
  goes_on = np.cumprod(heads[:, 1:-1] > 127, axis=1)
  digits[:, 1:] *= goes_on
  lengths = digits @ (1 << 7 * np.arange(_HEAD_BYTES - 1))
  return bool(((heads[:, 0] == 10) & (sizes == 2 + goes_on.sum(axis=1) + lengths)).all())


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
  if dtype.kind in "biu" and dtype != np.int64 and len(values):
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if values.min() < low or values.max() > high:
      place = int(np.flatnonzero((values < low) | (values > high))[0])
      position = int(np.searchsorted(np.cumsum(counts), place, side="right"))
      raise _invalid(position, name, expected=f"{dtype}: {low} to {high}", got=int(values[place]))
  with np.errstate(over="ignore", invalid="ignore"):
    values = values.astype(dtype, copy=not values.flags.writeable)
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
