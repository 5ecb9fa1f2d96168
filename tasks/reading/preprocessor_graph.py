"""A task's preprocessors as one tf.data graph; examples and the seeds of their draws are its inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.features.feature import Feature
from anystep.features.ragged import Batch, Ragged
from anystep.tasks import seqio_internals
from anystep.tasks.tensors import all_rows, from_tensors, to_tensors

Seeds = Mapping[str, np.ndarray]
"""Seed pairs of random maps by the preprocessor's position, as text: `(rows, pairs, 2) int64`."""

_KEEP_EVERY_EXAMPLE = {
  "TensorSliceDataset",
  "MapDataset",
  "ParallelMapDataset",
  "ParallelMapDatasetV2",
  "ZipDataset",
  "OptionsDataset",
  "PrefetchDataset",
}
# Results of these operations depend on several examples.
_JOIN_EXAMPLES = re.compile("Batch|Window|Shuffle|Repeat|Take|Skip|Shard|Concatenate|Cache")


class PreprocessorGraph:
  """Graph of some preprocessors of a task.

  Args:
    task: the task, for its name and output features.
    preprocessors: the preprocessors after the cache.
    features: features of the cached examples.
    feature_lengths: SeqIO's `sequence_length`.

  Attributes:
    num_seeds: number of seed pairs of each preprocessor.
    may_drop: whether each preprocessor, or one before it, may drop examples.
    joins: whether results of each preprocessor, or of one before it, may depend on several examples.
  """

  def __init__(
    self,
    task: seqio.Task,
    preprocessors: Sequence[Callable],
    features: Mapping[str, Feature],
    feature_lengths: Mapping[str, int],
  ):
    self._task = task
    self._preprocessors = [
      seqio.utils.add_kwargs_to_transform(
        preprocessor, sequence_length=feature_lengths, output_features=task.output_features
      )
      for preprocessor in preprocessors
    ]
    self._element_spec = element_spec(features)
    self._features = {name: _make_batch_spec(feature) for name, feature in features.items()}
    self.num_seeds: list[int] = []
    self.may_drop: list[bool] = []
    self.joins: list[bool] = []
    # Tracing one takes tenths of a second.
    self._together: dict[tuple[int, int], Callable] = {}
    self._survey()

  def _survey(self) -> None:
    """Find the seeds and kind of each preprocessor by building the graph once without data."""
    with tf.Graph().as_default():
      source = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=self._element_spec)
      dataset = source
      for preprocessor in self._preprocessors:
        feed = _SeedFeed(None)
        with seqio_internals.seeds_of_random_maps(feed.take):
          dataset = preprocessor(dataset)
        self.num_seeds.append(feed.used)
        kinds = _list_kinds(source, dataset)
        self.may_drop.append(not kinds <= _KEEP_EVERY_EXAMPLE)
        self.joins.append(any(map(_JOIN_EXAMPLES.search, kinds)))

  def together(
    self, num_preprocessors: int, *, graph_seed: int = 0
  ) -> Callable[[Batch, Seeds], dict[str, Ragged | np.ndarray]]:
    """Return the first preprocessors as a function that runs on all examples of a batch as one dataset.

    Args:
      num_preprocessors: their number; if it is that of all, results are checked against the output features.
      graph_seed: TensorFlow's global seed; results must not depend on it.

    Returns:
      A function of examples and of the seeds of those that come to each random preprocessor.

    Raises:
      AnystepError: 78 `output_features`.
    """

    key = num_preprocessors, graph_seed
    if key not in self._together:

      def run(features: Mapping[str, Any], seeds: Mapping[str, tf.Tensor]) -> Any:
        dataset = self._apply(num_preprocessors, tf.data.Dataset.from_tensor_slices(features), seeds)
        if num_preprocessors == len(self._preprocessors):
          dataset = validate(self._task, dataset)
        return all_rows(dataset)

      self._together[key] = self._trace(run, num_preprocessors, graph_seed)
    function = self._together[key]
    return lambda batch, seeds: from_tensors(function(to_tensors(batch), seeds))

  def one_by_one(
    self, num_preprocessors: int
  ) -> Callable[[Batch, Seeds], tuple[dict[str, Ragged | np.ndarray], np.ndarray]]:
    """Return the first preprocessors as a function that runs on each example of a batch separately.

    Returns:
      A function of examples and of the seeds of all of them, which gives what came of them, and the row
      number of each, `(results,) int64`, ascending.
    """
    # What user code is, and only that, is to be converted as it would be outside.
    outside = tf.__internal__.autograph.control_status_ctx()

    @tf.autograph.experimental.do_not_convert
    def run_one(row: tf.Tensor, record: tuple[Mapping[str, Any], Mapping[str, tf.Tensor]]) -> tf.data.Dataset:
      features, seeds = record
      alone = tf.data.Dataset.from_tensors(features)
      with outside:
        alone = self._apply(num_preprocessors, alone, {p: pairs[tf.newaxis] for p, pairs in seeds.items()})
      return alone.map(tf.autograph.experimental.do_not_convert(lambda example: (row, example)))

    def run(features: Mapping[str, Any], seeds: Mapping[str, tf.Tensor]) -> Any:
      dataset = tf.data.Dataset.from_tensor_slices((features, dict(seeds))).enumerate()
      return all_rows(dataset.flat_map(run_one))

    function = self._trace(run, num_preprocessors, 0)

    def call(batch: Batch, seeds: Seeds) -> tuple[dict[str, Ragged | np.ndarray], np.ndarray]:
      rows, result = function(to_tensors(batch), seeds)
      return from_tensors(result), rows.numpy()

    return call

  def _apply(
    self, num_preprocessors: int, dataset: tf.data.Dataset, seeds: Mapping[str, tf.Tensor]
  ) -> tf.data.Dataset:
    for p, preprocessor in enumerate(self._preprocessors[:num_preprocessors]):
      with seqio_internals.seeds_of_random_maps(_SeedFeed(seeds.get(str(p))).take):
        dataset = preprocessor(dataset)
    return dataset

  def _trace(self, run: Callable, num_preprocessors: int, graph_seed: int) -> Callable:
    seeds = {
      str(p): tf.TensorSpec([None, count, 2], tf.int64)
      for p, count in enumerate(self.num_seeds[:num_preprocessors])
      if count
    }
    specs = (self._features, seeds)

    def run_flat(*tensors: tf.Tensor) -> Any:
      tf.random.set_seed(graph_seed)
      return run(*tf.nest.pack_sequence_as(specs, tensors, expand_composites=True))

    with tf.device("/CPU:0"):
      # As SeqIO builds its datasets: tf.data converts the functions that it maps, and nothing else is. What
      # tf.function would convert besides, SeqIO and this module, costs seconds.
      graph = tf.compat.v1.wrap_function(run_flat, tf.nest.flatten(specs, expand_composites=True))

    def call(features: Mapping[str, Any], pairs: Seeds) -> Any:
      seed_tensors = {p: tf.constant(pairs[p]) for p in seeds}
      return graph(*tf.nest.flatten((features, seed_tensors), expand_composites=True))

    return call


def validate(task: seqio.Task, dataset: Any) -> Any:
  """Return a dataset, or any object with an `element_spec`, if SeqIO finds the task's output features in it.

  Raises:
    AnystepError: 78 `output_features`.
  """
  try:
    return seqio_internals.validate_preprocessing(task, dataset)
  except ValueError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "output_features",
      task=task.name,
      got=one_line(error, with_type=False),
      fix="make the preprocessors and the task's output_features agree",
    ) from error


class _SeedFeed:
  """Supply of seed pairs for the random maps of a preprocessor, in order."""

  def __init__(self, seeds: tf.Tensor | None):
    self._seeds = seeds
    self.used = 0

  def take(self, num_seeds: int) -> tf.data.Dataset:
    """Return the next num_seeds pairs of each row in SeqIO's form: tuples of tuples of two int64 scalars."""
    first, self.used = self.used, self.used + num_seeds
    seeds = tf.zeros([1, self.used, 2], tf.int64) if self._seeds is None else self._seeds
    # With one row more, an example more than there should be is not passed over.
    pairs = tf.pad(seeds[:, first : self.used], [[0, 1], [0, 0], [0, 0]])
    columns = tuple((pairs[:, j, 0], pairs[:, j, 1]) for j in range(num_seeds))
    return tf.data.Dataset.from_tensor_slices(columns)


def _list_kinds(source: tf.data.Dataset, dataset: tf.data.Dataset) -> set[str]:
  """List the types of a dataset's operations, down to the source and to slices of tensors."""
  kinds, operations = set(), [dataset._variant_tensor.op]
  visited_names = {source._variant_tensor.op.name}
  while operations:
    operation = operations.pop()
    if operation.name in visited_names:
      continue
    visited_names.add(operation.name)
    kinds.add(operation.type)
    if operation.type != "TensorSliceDataset":
      operations += [tensor.op for tensor in operation.inputs if tensor.dtype == tf.variant]
  return kinds


def element_spec(features: Mapping[str, Feature]) -> dict[str, tf.TensorSpec | tf.RaggedTensorSpec]:
  """Return the `element_spec` of a dataset of single examples with these features."""
  return {name: _make_spec(feature, feature.shape, int(feature.ragged)) for name, feature in features.items()}


def _make_batch_spec(feature: Feature) -> tf.TensorSpec | tf.RaggedTensorSpec:
  return _make_spec(feature, (None, *feature.shape), int(feature.sequence) + int(feature.ragged))


def _make_spec(
  feature: Feature, shape: Sequence[int | None], ragged_rank: int
) -> tf.TensorSpec | tf.RaggedTensorSpec:
  dtype = tf.dtypes.as_dtype(feature.dtype)
  if not ragged_rank:
    return tf.TensorSpec(shape, dtype)
  return tf.RaggedTensorSpec(shape, dtype, ragged_rank=ragged_rank, row_splits_dtype=tf.int64)
