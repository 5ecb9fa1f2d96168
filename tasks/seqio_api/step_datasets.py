"""Datasets of tf.data that read step by step; their only state is the step."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from anystep.features.converters import Rows
from anystep.features.ragged import Ragged

# When the process ends: how long no read may begin, and how long to wait for that.
_QUIET_SECONDS, _PATIENCE_SECONDS = 0.05, 10.0


def steps_dataset(read: Callable[[int], Rows], form: Rows, *, steps: range) -> tf.data.Dataset:
  """Return a dataset with one element for each step; a `Ragged` becomes a RaggedTensor.

  All its state is the step, so that tf.data's checkpoints are exact.

  Args:
    read: a function of the step alone; may be called by several threads.
    form: any rows that `read` might return.
    steps: the steps to read.
  """
  gate = _gate()
  forms = sorted(form.items())
  specs = []
  for _, feature in forms:
    values, *lengths = _flat(feature)
    dtype = tf.string if values.dtype == object else tf.as_dtype(values.dtype)
    specs += [
      tf.TensorSpec([None, *values.shape[1:]], dtype),
      *(tf.TensorSpec([None], tf.int64) for _ in lengths),
    ]

  def read_flat(step: int) -> list[Any]:
    with gate:
      rows = read(int(step))
    return [part for name, _ in forms for part in _flat(rows[name])]

  def tensors(step: tf.Tensor) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    flat = tf.numpy_function(read_flat, [step], [spec.dtype for spec in specs], stateful=False)
    parts = iter([tf.ensure_shape(part, spec.shape) for part, spec in zip(flat, specs, strict=True)])
    made = {}
    for name, feature in forms:
      made[name] = next(parts)
      for _ in _flat(feature)[1:]:
        made[name] = tf.RaggedTensor.from_row_lengths(made[name], next(parts), validate=False)
    return made

  options = tf.data.Options()
  # Threads that wait for Python must not be those that the reader's own graphs need: 0 is one a core.
  options.threading.private_threadpool_size = 0
  return tf.data.Dataset.range(steps.start, steps.stop).map(tensors).with_options(options)


def _flat(feature: Ragged | np.ndarray) -> list[np.ndarray]:
  """Return a feature's values, and the lengths of ragged rows, the innermost first."""
  return [*_flat(feature.values), feature.lengths] if isinstance(feature, Ragged) else [feature]


class _Gate:
  """Gate for TensorFlow's threads that read; it closes before the interpreter ends.

  A thread that asked for Python after that would never return, and the process would wait for it for ever.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._inside = self._entered = 0
    self._closed = False

  def __enter__(self) -> None:
    with self._lock:
      self._entered += 1
      if self._closed:
        raise RuntimeError("the process ends")
      self._inside += 1

  def __exit__(self, *exc_info: object) -> None:
    with self._lock:
      self._inside -= 1

  def close(self) -> None:
    """Refuse further reads, and wait until no thread reads or tries to."""
    self._closed = True
    deadline = time.monotonic() + _PATIENCE_SECONDS
    seen = -1
    while (self._inside or seen != self._entered) and time.monotonic() < deadline:
      seen = self._entered
      time.sleep(_QUIET_SECONDS)


@functools.cache
def _gate() -> _Gate:
  """Return the gate of the process."""
  gate = _Gate()
  atexit.register(gate.close)
  return gate
