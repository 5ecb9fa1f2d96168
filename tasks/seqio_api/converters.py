"""SeqIO's feature converters in the place of ours: natively where they are stock, else through tf.data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.features.converters import (
  DecoderConverter,
  EncoderConverter,
  EncoderDecoderConverter,
  FeatureConverter,
  LMConverter,
  PassThroughConverter,
  PrefixLMConverter,
  Rows,
)
from anystep.features.ragged import Batch, Ragged
from anystep.tasks import seqio_internals
from anystep.tasks.tensors import Tensors, all_rows, rows_from_tensors, to_tensors


def native_converter(converter: seqio.FeatureConverter) -> FeatureConverter:
  """The converter in numpy that gives what a stock one of SeqIO's gives; a `SeqioConverter` for others.

  Rows are packed where the plan packs them, whatever `pack` says, and what is longer than its length is cut,
  whatever `apply_length_check` says.
  """
  # A subclass may convert otherwise, and features that pass through are SeqIO's own matter.
  if seqio_internals.passes_features_through(converter):
    return SeqioConverter(converter)
  if type(converter) is seqio.EncDecFeatureConverter:
    return EncoderDecoderConverter(bos_id=converter.bos_id)
  if type(converter) is seqio.LMFeatureConverter:
    return LMConverter(bos_id=converter.bos_id)
  if type(converter) is seqio.PrefixLMFeatureConverter:
    return PrefixLMConverter(loss_on_targets_only=converter.loss_on_targets_only, bos_id=converter.bos_id)
  if type(converter) is seqio.DecoderFeatureConverter:
    loss_on_targets_only = seqio_internals.loss_on_targets_only(converter)
    return DecoderConverter(loss_on_targets_only=loss_on_targets_only, bos_id=converter.bos_id)
  if type(converter) is seqio.EncoderFeatureConverter:
    return EncoderConverter(mask_id=converter.mask_id)
  if type(converter) is seqio.PassThroughFeatureConverter:
    return PassThroughConverter()
  return SeqioConverter(converter)


class SeqioConverter:
  """Any SeqIO feature converter as an `anystep.FeatureConverter`; thread-safe.

  Its tf.data graph is built once for features of one form and their lengths, and then serves every batch.
  One that packs (`pack=True`) is given a row's examples at a time and has to make one row of them; a row of
  one example where the plan does not pack.

  Args:
    converter: takes features named in the plan's feature lengths, each of which it has to know.
  """

  def __init__(self, converter: seqio.FeatureConverter):
    self._converter = converter
    self._packs = seqio_internals.packs(converter)
    self._functions: dict[Any, Callable[[Tensors], Tensors]] = {}
    self._lock = threading.Lock()

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """See `anystep.FeatureConverter`.

    Raises:
      AnystepError: 78 `converter_pack` for packed rows and a converter that does not pack; 78
        `converter_refused` where SeqIO refuses the features, the lengths or an example; 78
        `converter_rows` where it makes another number of rows than there are.
    """
    if counts is not None and not self._packs:
      raise AnystepError(
        ExitCode.CONFIG,
        "converter_pack",
        expected="a converter that packs, for packed rows",
        got=f"{type(self._converter).__name__}(pack=False)",
        fix="make the converter with pack=True, or plan without packing",
      )
    features = to_tensors(batch)
    convert = self._function(features, feature_lengths)
    num_examples = len(next(iter(batch.values())))
    if not self._packs:
      return self._convert_batch(convert, features, num_rows=num_examples)
    stops = np.cumsum(np.ones(num_examples, np.int64) if counts is None else counts).tolist()
    if not stops:
      return self._convert_batch(convert, features, num_rows=0)
    packs = [
      {name: tensor[start:stop] for name, tensor in features.items()}
      for start, stop in zip([0, *stops[:-1]], stops, strict=True)
    ]
    parts = [self._convert_batch(convert, pack, num_rows=1) for pack in packs]
    return {name: _join([part[name] for part in parts]) for name in parts[0]}

  def _convert_batch(
    self, convert: Callable[[Tensors], Tensors], features: Tensors, *, num_rows: int
  ) -> Rows:
    try:
      rows = rows_from_tensors(convert(features))
    except tf.errors.InvalidArgumentError as error:
      raise self._refusal(error) from error
    found = {len(feature) for feature in rows.values()}
    if found != {num_rows}:
      raise AnystepError(
        ExitCode.CONFIG,
        "converter_rows",
        converter=type(self._converter).__name__,
        expected=f"rows: {num_rows}",
        got=f"rows: {', '.join(map(str, sorted(found)))}",
        fix="use a converter that makes one row of each example, or with pack=True of each row's examples",
      )
    return rows

  def _refusal(self, error: Exception) -> AnystepError:
    return AnystepError(
      ExitCode.CONFIG,
      "converter_refused",
      converter=type(self._converter).__name__,
      expected="features and lengths that the converter takes",
      got=one_line(error, with_type=False, without_graph=True),
      fix="make the task's features, TASK_FEATURE_LENGTHS and the converter agree",
    )

  def _function(self, features: Tensors, feature_lengths: Mapping[str, int]) -> Callable[[Tensors], Tensors]:
    """The conversion of examples of this form, as one graph."""
    specs = {name: _any_number_of(tensor) for name, tensor in sorted(features.items())}
    key = tuple(specs.items()), tuple(sorted(feature_lengths.items()))
    with self._lock:
      if key not in self._functions:
        try:
          self._functions[key] = self._trace(specs, dict(feature_lengths))
        except ValueError as error:
          raise self._refusal(error) from error
      return self._functions[key]

  def _trace(
    self, specs: Mapping[str, tf.TypeSpec], feature_lengths: dict[str, int]
  ) -> Callable[[Tensors], Tensors]:
    def convert(*tensors: tf.Tensor) -> Tensors:
      features = tf.nest.pack_sequence_as(specs, tensors, expand_composites=True)
      dataset = self._converter(tf.data.Dataset.from_tensor_slices(features), feature_lengths)
      model_lengths = self._converter.get_model_feature_lengths(feature_lengths) or {}
      rows = all_rows(dataset)
      return {name: _with_length(tensor, model_lengths.get(name)) for name, tensor in rows.items()}

    with tf.device("/CPU:0"):
      # As SeqIO builds its datasets: tf.data converts the loops of the functions that it maps, nothing else.
      graph = tf.compat.v1.wrap_function(convert, tf.nest.flatten(specs, expand_composites=True))
    return lambda features: graph(
      *tf.nest.flatten({name: features[name] for name in specs}, expand_composites=True)
    )


def _any_number_of(tensor: tf.Tensor | tf.RaggedTensor) -> tf.TypeSpec:
  """The form of a batch of any number of such examples."""
  shape = [None, *tensor.shape[1:]]
  if isinstance(tensor, tf.RaggedTensor):
    return tf.RaggedTensorSpec(shape, tensor.dtype, ragged_rank=1, row_splits_dtype=tf.int64)
  return tf.TensorSpec(shape, tensor.dtype)


def _with_length(tensor: tf.Tensor | tf.RaggedTensor, length: int | None) -> tf.Tensor | tf.RaggedTensor:
  """Rows that are of the model feature's length, though TensorFlow could not tell."""
  if length is None or not isinstance(tensor, tf.RaggedTensor):
    return tensor
  return tensor.to_tensor(shape=[None, length])


def _join(parts: list[Ragged | np.ndarray]) -> Ragged | np.ndarray:
  values = np.concatenate([part.values if isinstance(part, Ragged) else part for part in parts])
  lengths = [part.lengths for part in parts if isinstance(part, Ragged)]
  return Ragged(values, np.concatenate(lengths)) if lengths else values
