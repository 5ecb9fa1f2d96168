"""Batches of features as TensorFlow's tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from anystep.examples import Batch, Ragged

Tensors = Mapping[str, tf.Tensor | tf.RaggedTensor]


def to_tensors(batch: Batch) -> dict[str, tf.Tensor | tf.RaggedTensor]:
  """Features of several examples: a `tf.RaggedTensor` for a sequence, else a tensor `(rows,)`."""
  return {name: _to_tensor(feature) for name, feature in batch.items()}


def from_tensors(tensors: Tensors) -> dict[str, Ragged | np.ndarray]:
  """Features of several examples, of which dense ones with a second dimension are sequences too."""
  return {name: _from_tensor(tensor) for name, tensor in tensors.items()}


def _to_tensor(feature: Ragged | np.ndarray) -> tf.Tensor | tf.RaggedTensor:
  if not isinstance(feature, Ragged):
    return tf.constant(feature)
  return tf.RaggedTensor.from_row_lengths(_to_tensor(feature.values), feature.lengths, validate=False)


def _from_tensor(tensor: tf.Tensor | tf.RaggedTensor) -> Ragged | np.ndarray:
  if isinstance(tensor, tf.RaggedTensor):
    is_nested = isinstance(tensor.values, tf.RaggedTensor)
    values = _from_tensor(tensor.values) if is_nested else tensor.values.numpy()
    return Ragged(values, tensor.row_lengths().numpy())
  array = tensor.numpy()
  if array.ndim < 2:
    return array
  rows, length = array.shape[:2]
  return Ragged(array.reshape(rows * length, *array.shape[2:]), np.full(rows, length, np.int64))
