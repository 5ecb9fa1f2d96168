"""Batches of features as TensorFlow's tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from anystep.features.ragged import Batch, Ragged, as_sequences
from anystep.forks import UnforkableLibrary

Tensors = Mapping[str, tf.Tensor | tf.RaggedTensor]
_tensorflow = UnforkableLibrary("TensorFlow")


def to_tensors(batch: Batch) -> dict[str, tf.Tensor | tf.RaggedTensor]:
  """Features of several examples: a `tf.RaggedTensor` for a sequence, else a tensor `(rows, ...)`.

  Raises:
    AnystepError: 78 `forked_process`.
  """
  _tensorflow.use("give the stream transforms in Python (anystep.Map and others)")
  return {name: _to_tensor(feature) for name, feature in batch.items()}


def from_tensors(tensors: Tensors) -> dict[str, Ragged | np.ndarray]:
  """Features of several examples, of which dense ones with a second dimension are sequences too."""
  return {name: as_sequences(_from_tensor(tensor)) for name, tensor in tensors.items()}


def rows_from_tensors(tensors: Tensors) -> dict[str, Ragged | np.ndarray]:
  """Rows that a model is given: arrays, but a `Ragged` of a `tf.RaggedTensor`."""
  return {name: _from_tensor(tensor) for name, tensor in tensors.items()}


def all_rows(dataset: tf.data.Dataset) -> Any:
  """All elements as one batch, which may be of no row: more than are expected must not go unseen."""
  batches = dataset.ragged_batch(tf.int32.max)
  nothing = tf.data.Dataset.from_tensors(tf.nest.map_structure(_no_rows, batches.element_spec))
  return batches.concatenate(nothing).take(1).get_single_element()


def _to_tensor(feature: Ragged | np.ndarray) -> tf.Tensor | tf.RaggedTensor:
  if not isinstance(feature, Ragged):
    return tf.constant(feature)
  return tf.RaggedTensor.from_row_lengths(_to_tensor(feature.values), feature.lengths, validate=False)


def _from_tensor(tensor: tf.Tensor | tf.RaggedTensor) -> Ragged | np.ndarray:
  if isinstance(tensor, tf.RaggedTensor):
    return Ragged(_from_tensor(tensor.values), tensor.row_lengths().numpy())
  return tensor.numpy()


def _no_rows(spec: tf.TensorSpec | tf.RaggedTensorSpec) -> tf.Tensor | tf.RaggedTensor:
  """A batch of no rows."""
  if not isinstance(spec, tf.RaggedTensorSpec):
    return tf.zeros([0, *spec.shape[1:]], spec.dtype)
  inner = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]]
  splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
  return tf.RaggedTensor.from_nested_row_splits(tf.zeros([0, *inner], spec.dtype), splits)
