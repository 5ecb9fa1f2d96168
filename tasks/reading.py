"""What a SeqIO task does to an example after the cache, exactly and at any step (design section 7)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.examples import Batch, Ragged
from anystep.manifest import Feature
from anystep.permutation import round_keys, sub_keys
from anystep.plan import Plan
from anystep.transforms import Records

_SEED_BITS = np.uint64(31)
_PAIRS_PER_KEYS = 4
_CHECKED_RECORDS = 32
_patch_lock = threading.Lock()

_PROBLEMS = {
  "preprocessor_not_one_to_one": {
    "expected": "one example to one, whatever stands beside it",
    "fix": "cache the task with --cache_at=end: what joins, splits or drops examples cannot run at reading",
  },
  "preprocessor_unseeded": {
    "expected": "random draws through seqio.map_over_dataset(num_seeds=n) alone",
    "fix": "take the seeds that seqio.map_over_dataset passes and use TensorFlow's stateless_* functions",
  },
}


def map_seeds(
  task: str, split: str, seed: int, preprocessor: int, records: Records, num_seeds: int
) -> np.ndarray:
  """Seed pairs of a random preprocessor for some records, `(rows, num_seeds, 2) int64`.

  A record's pairs follow from its index and epoch and the preprocessor's place after the cache, not from
  how, where or beside what it is read.
  """
  pairs = np.empty((len(records.indices), num_seeds, 2), np.int64)
  for epoch in np.unique(records.epochs).tolist():
    rows = records.epochs == epoch
    record_keys = sub_keys(round_keys("map", task, split, seed, epoch, preprocessor), records.indices[rows])
    for first in range(0, num_seeds, _PAIRS_PER_KEYS):
      words = sub_keys(record_keys, first // _PAIRS_PER_KEYS) & ((np.uint64(1) << _SEED_BITS) - np.uint64(1))
      wanted = min(_PAIRS_PER_KEYS, num_seeds - first)
      pairs[rows, first : first + wanted] = words.reshape(-1, _PAIRS_PER_KEYS, 2)[:, :wanted].astype(np.int64)
  return pairs


class TaskReader:
  """The preprocessors after the cache as one function of a batch: a `Transform` for `anystep.open_stream`.

  They run in one tf.data graph that takes examples and their seeds as data, so that a draw is the same
  wherever and beside whatever the record is read. The first block is run in several ways when the reader
  is made, and what would not be a function of the record alone is refused.

  Args:
    task: the registered task.
    cache: its cache.
    plan: gives the seed and the feature lengths.

  Raises:
    AnystepError: 78 `preprocessor_not_one_to_one`, `preprocessor_unseeded`, naming the preprocessor.
  """

  def __init__(self, task: seqio.Task, cache: Cache, plan: Plan):
    self._task = task
    self._split = plan.split
    self._seed = plan.seed
    self._feature_lengths = dict(plan.feature_lengths)
    self._features = cache.manifest.features
    self._preprocessors = post_cache_preprocessors(task, cache.manifest.cache_at)
    self._num_seeds = self._count_seeds()
    self._run = self._make_function(len(self._preprocessors), graph_seed=0)
    if self._preprocessors:
      self._check(cache)

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """Runs the preprocessors on some examples; the result has the same rows."""
    return self._call(self._run, batch, records)

  def _call(self, function: Callable, batch: Batch, records: Records) -> Batch:
    features = {name: _to_tensor(feature) for name, feature in batch.items()}
    seeds = {
      str(p): map_seeds(self._task.name, self._split, self._seed, p, records, count)
      for p, count in enumerate(self._num_seeds)
      if count
    }
    result = {name: _from_tensor(tensor) for name, tensor in function(features, seeds).items()}
    found = {len(feature) for feature in result.values()}
    if found != {len(records.indices)}:
      raise AnystepError(
        ExitCode.CONFIG,
        "preprocessor_not_one_to_one",
        task=self._task.name,
        expected=f"{len(records.indices)} examples",
        got=sorted(found),
        fix=_PROBLEMS["preprocessor_not_one_to_one"]["fix"],
      )
    return result

  def _make_function(self, num_preprocessors: int, *, graph_seed: int) -> Callable:
    """The first preprocessors as one traced function; graph_seed is TensorFlow's global seed."""
    features = {name: _tensor_spec(feature) for name, feature in self._features.items()}
    seeds = {
      str(p): tf.TensorSpec([None, count, 2], tf.int64) for p, count in enumerate(self._num_seeds) if count
    }

    def run(features: Mapping[str, Any], seeds: Mapping[str, tf.Tensor]) -> Mapping[str, Any]:
      tf.random.set_seed(graph_seed)
      dataset = tf.data.Dataset.from_tensor_slices(features)
      for p, preprocessor in enumerate(self._preprocessors[:num_preprocessors]):
        feed = _SeedFeed(seeds.get(str(p)))
        with _seeds_from(feed):
          dataset = self._bind(preprocessor)(dataset)
      if num_preprocessors == len(self._preprocessors):
        dataset = self._validated(dataset)
      # One batch of everything: a step's rows are few, and more than came in must not go unseen.
      batches = dataset.ragged_batch(tf.int32.max)
      nothing = tf.data.Dataset.from_tensors(tf.nest.map_structure(_no_rows, batches.element_spec))
      return batches.concatenate(nothing).take(1).get_single_element()

    with tf.device("/CPU:0"):
      # As SeqIO builds its datasets: tf.data converts the functions that it maps, and nothing else is. What
      # tf.function would convert besides, SeqIO and this module, costs seconds.
      specs = (features, seeds)
      graph = tf.compat.v1.wrap_function(
        lambda *tensors: run(*tf.nest.pack_sequence_as(specs, tensors, expand_composites=True)),
        tf.nest.flatten(specs, expand_composites=True),
      )
    return lambda *arguments: graph(*tf.nest.flatten(arguments, expand_composites=True))

  def _validated(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    try:
      return self._task._validate_preprocessing(dataset)
    except ValueError as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "output_features",
        task=self._task.name,
        got=str(error),
        fix="make the preprocessors and the task's output_features agree",
      ) from error

  def _bind(self, preprocessor: Callable) -> Callable:
    return seqio.utils.add_kwargs_to_transform(
      preprocessor, sequence_length=self._feature_lengths, output_features=self._task.output_features
    )

  def _count_seeds(self) -> list[int]:
    """How many seed pairs each preprocessor asks for, found by building the graph once without data."""
    counts = []
    with tf.Graph().as_default():
      specs = {name: _element_spec(feature) for name, feature in self._features.items()}
      dataset = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=specs)
      for preprocessor in self._preprocessors:
        feed = _SeedFeed(None)
        with _seeds_from(feed):
          dataset = self._bind(preprocessor)(dataset)
        counts.append(feed.used)
    return counts

  def _check(self, cache: Cache) -> None:
    """Refuses preprocessors that make, join or drop examples, or draw without a seed, by name."""
    if self._problem(len(self._preprocessors), cache) is None:
      return
    for place, preprocessor in enumerate(self._preprocessors):
      problem = self._problem(place + 1, cache)
      if problem is not None:
        raise AnystepError(
          ExitCode.CONFIG,
          problem,
          task=self._task.name,
          preprocessor=seqio.utils.function_name(preprocessor),
          **_PROBLEMS[problem],
        )

  def _problem(self, num_preprocessors: int, cache: Cache) -> str | None:
    """What is wrong with the first preprocessors, seen on the first examples; None where nothing is."""
    function = self._make_function(num_preprocessors, graph_seed=0)
    reseeded = self._make_function(num_preprocessors, graph_seed=1)
    indices = np.arange(min(_CHECKED_RECORDS, len(cache)))
    together = self._rows(function, cache, indices)
    again = (self._rows(function, cache, indices), self._rows(reseeded, cache, indices))
    if together is not None and again != (together, together):
      return "preprocessor_unseeded"
    alone = [self._rows(function, cache, indices[k : k + 1]) for k in range(len(indices))]
    if together is None or alone != [[row] for row in together]:
      return "preprocessor_not_one_to_one"
    return None

  def _rows(self, function: Callable, cache: Cache, indices: np.ndarray) -> list[dict[str, bytes]] | None:
    """The examples of some indices after a function, comparable; None where there are not as many."""
    records = Records(np.zeros_like(indices), indices)
    try:
      result = self._call(function, cache.read(indices), records)
    except AnystepError:
      return None
    columns = {name: f.rows() if isinstance(f, Ragged) else list(f) for name, f in result.items()}
    return [
      {name: _comparable(column[row]) for name, column in columns.items()} for row in range(len(indices))
    ]


def _comparable(value: object) -> bytes:
  array = np.asarray(value)
  return repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


def post_cache_preprocessors(task: seqio.Task, cache_at: str) -> Sequence[Callable]:
  """What runs at reading: what stands after the placeholder, and nothing where the cache holds it all."""
  if cache_at == "end" or not task.supports_caching:
    return []
  places = [
    place
    for place, preprocessor in enumerate(task.preprocessors)
    if isinstance(preprocessor, seqio.CacheDatasetPlaceholder)
  ]
  return list(task.preprocessors[places[0] + 1 :])


class _SeedFeed:
  """Hands a preprocessor's seed pairs to the random maps that it makes, in order."""

  def __init__(self, seeds: tf.Tensor | None):
    self._seeds = seeds
    self.used = 0

  def take(self, num_seeds: int) -> tf.data.Dataset:
    """The next num_seeds pairs of each row, as tuples of tuples of two int64 scalars, SeqIO's own form."""
    first, self.used = self.used, self.used + num_seeds
    seeds = tf.zeros([1, self.used, 2], tf.int64) if self._seeds is None else self._seeds
    pairs = seeds[:, first : self.used]
    columns = tuple((pairs[:, j, 0], pairs[:, j, 1]) for j in range(num_seeds))
    return tf.data.Dataset.from_tensor_slices(columns)


@contextlib.contextmanager
def _seeds_from(feed: _SeedFeed) -> Iterator[None]:
  """Makes `seqio.map_over_dataset(num_seeds=n)` take its seeds from the feed while a graph is built.

  SeqIO draws them from stateful random datasets that follow the stream's position, fixed when the graph
  is built; it offers no other way in. tests/tasks/test_reading.py pins what this relies on.
  """
  random_map = seqio.utils._GrainRandomMapFn

  def call(self, dataset: tf.data.Dataset, *args: Any, **kwargs: Any) -> tf.data.Dataset:
    def apply(element, seeds):
      named = {"seed": seeds[0]} if self.num_seeds == 1 else {"seeds": seeds}
      return self._map_fn_with_special_kwargs(element, *args, **named, **kwargs)

    return tf.data.Dataset.zip((dataset, feed.take(self.num_seeds))).map(
      apply, num_parallel_calls=self.num_parallel_calls
    )

  with _patch_lock:
    original = random_map.__call__
    random_map.__call__ = call
    try:
      yield
    finally:
      random_map.__call__ = original


def _element_spec(feature: Feature) -> tf.TensorSpec:
  return tf.TensorSpec(feature.shape, tf.dtypes.as_dtype(feature.dtype))


def _tensor_spec(feature: Feature) -> tf.TensorSpec | tf.RaggedTensorSpec:
  shape, dtype = [None, *feature.shape], tf.dtypes.as_dtype(feature.dtype)
  if feature.sequence:
    return tf.RaggedTensorSpec(shape, dtype, ragged_rank=1, row_splits_dtype=tf.int64)
  return tf.TensorSpec(shape, dtype)


def _no_rows(spec: tf.TensorSpec | tf.RaggedTensorSpec) -> tf.Tensor | tf.RaggedTensor:
  """A batch of no rows."""
  inner = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]] if _is_ragged(spec) else spec.shape[1:]
  values = tf.zeros([0, *inner], spec.dtype)
  return tf.RaggedTensor.from_row_splits(values, tf.constant([0], tf.int64)) if _is_ragged(spec) else values


def _is_ragged(spec: tf.TypeSpec) -> bool:
  return isinstance(spec, tf.RaggedTensorSpec)


def _to_tensor(feature: Ragged | np.ndarray) -> tf.Tensor | tf.RaggedTensor:
  if isinstance(feature, Ragged):
    return tf.RaggedTensor.from_row_lengths(feature.values, feature.lengths, validate=False)
  return tf.constant(feature)


def _from_tensor(tensor: tf.Tensor | tf.RaggedTensor) -> Ragged | np.ndarray:
  if isinstance(tensor, tf.RaggedTensor):
    return Ragged(tensor.values.numpy(), tensor.row_lengths().numpy())
  array = tensor.numpy()
  if array.ndim < 2:
    return array
  rows, length = array.shape[:2]
  return Ragged(array.reshape(rows * length, *array.shape[2:]), np.full(rows, length, np.int64))
