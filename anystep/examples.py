"""`tf.train.Example` records to numpy and back, with protobuf alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anystep.manifest import Feature

_KINDS = ("bytes_list", "float_list", "int64_list")


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
    return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self) else []

  def to_padded(self, length: int) -> np.ndarray:
    """`(rows, length, ...)`: each row cut or filled with zeros at its end."""
    padded = np.zeros((len(self), length, *self.values.shape[1:]), self.values.dtype)
    place = np.arange(len(self.values)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
    row = np.repeat(np.arange(len(self)), self.lengths)
    kept = place < length
    padded[row[kept], place[kept]] = self.values[kept]
    return padded


Batch = Mapping[str, Ragged | np.ndarray]
"""Features of several examples: a `Ragged` for a sequence, else an array of shape `(rows,)`."""


@functools.cache
def _example_class() -> Any:
  """The message class of tensorflow/core/example/{example,feature}.proto, in a pool of its own.

  TensorFlow registers the same names in protobuf's default pool, where two copies would clash.
  """
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  field = descriptor_pb2.FieldDescriptorProto
  file = descriptor_pb2.FileDescriptorProto(
    name="anystep/example.proto", package="tensorflow", syntax="proto3"
  )

  def add_message(name: str) -> descriptor_pb2.DescriptorProto:
    return file.message_type.add(name=name)

  for name, kind in (
    ("BytesList", field.TYPE_BYTES),
    ("FloatList", field.TYPE_FLOAT),
    ("Int64List", field.TYPE_INT64),
  ):
    add_message(name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
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
      feature.float_list.value.extend(values.astype(np.float32).tolist())
    elif values.dtype.kind == "O":
      feature.bytes_list.value.extend(
        [text.encode() if isinstance(text, str) else text for text in values.tolist()]
      )
    else:
      raise TypeError(f"Feature {name!r} is of dtype {values.dtype}, which tf.train.Example cannot hold.")
  return message.SerializeToString(deterministic=True)


def parse_example(record: bytes, features: Mapping[str, Feature]) -> dict[str, np.ndarray]:
  """One record's features: arrays of the manifest's dtype and shape; scalars have shape ()."""
  message = _example_class().FromString(record)
  return {name: _feature_array(message, name, feature) for name, feature in sorted(features.items())}


def parse_examples(
  records: Sequence[bytes], features: Mapping[str, Feature]
) -> dict[str, Ragged | np.ndarray]:
  """Several records' features, by name."""
  rows = [parse_example(record, features) for record in records]
  batch: dict[str, Ragged | np.ndarray] = {}
  for name, feature in sorted(features.items()):
    column = [row[name] for row in rows]
    if feature.sequence:
      batch[name] = Ragged.of_rows(column, _numpy_dtype(feature.dtype), tuple(feature.shape[1:]))  # type: ignore[arg-type]
    else:
      batch[name] = np.stack(column) if column else np.zeros(0, _numpy_dtype(feature.dtype))
  return batch


def _feature_array(message: Any, name: str, feature: Feature) -> np.ndarray:
  stored = message.features.feature[name]
  kind = stored.WhichOneof("kind")
  values = getattr(stored, kind).value if kind else ()
  array = np.array(values, dtype=_numpy_dtype(feature.dtype))
  return array.reshape([-1 if size is None else size for size in feature.shape])


def _numpy_dtype(name: str) -> np.dtype:
  return np.dtype(object) if name == "string" else np.dtype(name)
