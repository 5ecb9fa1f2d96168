"""The message `tf.train.Example`: its class, its lists and their names."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

# numpy's dtypes of a feature's lists. Floats are read as their bits, because Python's own floats would change
# the bits of some NaNs.
LIST_DTYPES = {
  "bytes_list": np.dtype(object),
  "float_list": np.dtype(np.uint32),
  "int64_list": np.dtype(np.int64),
}


@functools.cache
def example_class() -> Any:
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
  for number, (name, kind) in enumerate(
    zip(LIST_DTYPES, ("BytesList", "FloatList", "Int64List"), strict=True), 1
  ):
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


def wire_field(number: int, content: bytes) -> bytes:
  """Return a field of protobuf's wire format with a length."""
  size, length = len(content), b""
  while size > 127:
    size, length = size >> 7, length + bytes([size & 127 | 128])
  return bytes([number << 3 | 2]) + length + bytes([size]) + content


def row_lengths_name(name: str) -> str:
  """The name that records give to the row lengths of a feature of ragged rows."""
  return f"_rl:0:{name}"


def list_kind(name: str, dtype: np.dtype) -> str:
  """Return the name of the list that stores a feature's values.

  Raises:
    TypeError: for a dtype that no record can hold.
  """
  if dtype.kind in "iub":
    return "int64_list"
  if dtype.kind == "f" or dtype.name == "bfloat16":
    return "float_list"
  if dtype.kind == "O":
    return "bytes_list"
  raise TypeError(f"Feature {name!r} is of dtype {dtype}, which tf.train.Example cannot hold.")
