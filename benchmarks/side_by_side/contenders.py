"""The readers that are compared, each at the setting that its own guide would choose or a faster one.

A contender imports what it needs when it is called, and returns a function that opens the data anew and
yields batches: inputs `(rows, 512) int32` and targets `(rows, 114) int32`. Rows of zeros are padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from side_by_side.data import FEATURE_LENGTHS, MIXTURE_TASKS, SPLIT, DataSet

BATCH_SIZE = 256
PREFETCH_BATCHES = 8

Pair = tuple[np.ndarray, np.ndarray]
Batches = Generator[Pair, None, None]
Opener = Callable[[], Batches]

_FEATURES = tuple(FEATURE_LENGTHS)


def anystep_padded(data_set: DataSet) -> Opener:
  """This library, features as they are."""
  anystep = _anystep()
  plan = anystep.Plan.start(
    data_set.cache(), batch_size=BATCH_SIZE, feature_lengths=FEATURE_LENGTHS, num_epochs=1
  )

  def batches() -> Batches:
    with anystep.open_stream(
      plan, data_set.directory / "anystep", prefetch_batches=PREFETCH_BATCHES
    ) as stream:
      for batch in stream:
        yield batch["inputs"], batch["targets"]

  return batches


def anystep_converted(data_set: DataSet) -> Opener:
  """This library with the four features that SeqIO's converter makes."""
  anystep = _anystep()
  plan = anystep.Plan.start(
    data_set.cache(), batch_size=BATCH_SIZE, feature_lengths=FEATURE_LENGTHS, num_epochs=1
  )

  def batches() -> Batches:
    converter = anystep.EncoderDecoderConverter()
    root = data_set.directory / "anystep"
    with anystep.open_stream(
      plan, root, feature_converter=converter, prefetch_batches=PREFETCH_BATCHES
    ) as stream:
      for batch in stream:
        yield batch["encoder_input_tokens"], batch["decoder_target_tokens"]

  return batches


def anystep_later_epoch(data_set: DataSet) -> Opener:
  """This library's second epoch, reshuffled."""
  anystep = _anystep()
  plan = anystep.Plan.start(
    data_set.cache(),
    batch_size=BATCH_SIZE,
    feature_lengths=FEATURE_LENGTHS,
    num_epochs=2,
    epoch_policy="reshuffle",
  )
  start = len(data_set.cache()) // BATCH_SIZE

  def batches() -> Batches:
    with anystep.open_stream(
      plan, data_set.directory / "anystep", prefetch_batches=PREFETCH_BATCHES
    ) as stream:
      stream.seek(start)
      batch, own = next(stream), plan.batch(start).epoch == 1
      yield batch["inputs"][own], batch["targets"][own]
      for batch in stream:
        yield batch["inputs"], batch["targets"]

  return batches


class MixtureOfCaches:
  """This library on 100 tasks at equal rates.

  A pass is as many steps as an epoch of one task has, and goes on where the pass before ended: what is
  measured is a mixture that runs, not the opening of its 6,400 files, which the first pass does.
  """

  def __init__(self, data_set: DataSet):
    anystep = _anystep()
    self._data_set = data_set
    root = data_set.directory / "mixture"
    caches = [anystep.open_cache(root, task, SPLIT) for task in MIXTURE_TASKS]
    self._plan = anystep.Plan.start(
      caches,
      rates=dict.fromkeys(MIXTURE_TASKS, 1.0),
      batch_size=BATCH_SIZE,
      feature_lengths=FEATURE_LENGTHS,
    )
    self._stream = anystep.open_stream(self._plan, root, prefetch_batches=PREFETCH_BATCHES)
    self._pass_steps = -(-len(data_set.cache()) // BATCH_SIZE)

  def __call__(self) -> Batches:
    """The batches of the next pass."""
    for _ in range(self._pass_steps):
      batch = next(self._stream)
      yield batch["inputs"], batch["targets"]

  def expected(self) -> Iterator[Pair]:
    """The rows of the first pass, each task's read from the cache that all tasks are copies of."""
    taken = np.bincount(np.concatenate([self._plan.batch(step).task for step in range(self._pass_steps)]))
    examples = self._data_set.cache().read(np.arange(taken.max()))
    rows = _anystep().PassThroughConverter()(examples, FEATURE_LENGTHS)
    for num_examples in taken.tolist():
      yield rows["inputs"][:num_examples], rows["targets"][:num_examples]


def seqio_cached(data_set: DataSet) -> Opener:
  """A cached SeqIO task through the encoder-decoder converter."""
  import seqio
  import tensorflow as tf

  seqio.add_global_cache_dirs([str(data_set.directory / "seqio")])
  feature = seqio.Feature(seqio.PassThroughVocabulary(size=32000), add_eos=False)
  seqio.TaskRegistry.add(
    data_set.task,
    source=seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=[SPLIT]),
    preprocessors=[seqio.CacheDatasetPlaceholder()],
    output_features=dict.fromkeys(_FEATURES, feature),
  )

  def batches() -> Batches:
    dataset = seqio.get_dataset(
      data_set.task,
      FEATURE_LENGTHS,
      seqio.EncDecFeatureConverter(pack=False),
      dataset_split=SPLIT,
      use_cached=True,
      shuffle=False,
      num_epochs=1,
    )
    for batch in dataset.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
      yield batch["encoder_input_tokens"], batch["decoder_target_tokens"]

  return batches


def tf_data(data_set: DataSet, *, files: str) -> Opener:
  """tf.data that parses whole batches of records: as fast as Python gets such rows from these files.

  Args:
    data_set: the data.
    files: how records are taken from files: `interleaved`, `batches interleaved` or `in turn`.
  """
  import tensorflow as tf

  paths = [str(path) for path in sorted((data_set.directory / "seqio" / data_set.task).glob("*.tfrecord-*"))]
  description = {name: tf.io.RaggedFeature(tf.int64) for name in _FEATURES}

  def batches_of_records() -> tf.data.Dataset:
    if files == "in turn":
      return tf.data.TFRecordDataset(paths, buffer_size=1 << 20).batch(BATCH_SIZE)
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    if files == "interleaved":
      return dataset.interleave(
        tf.data.TFRecordDataset, block_length=16, num_parallel_calls=tf.data.AUTOTUNE
      ).batch(BATCH_SIZE)
    return dataset.interleave(
      lambda path: tf.data.TFRecordDataset(path).batch(BATCH_SIZE), num_parallel_calls=tf.data.AUTOTUNE
    ).rebatch(BATCH_SIZE)

  def parse(records: tf.Tensor) -> tuple[tf.Tensor, ...]:
    parsed = tf.io.parse_example(records, description)
    return tuple(
      tf.cast(parsed[name], tf.int32).to_tensor(shape=[None, length])
      for name, length in FEATURE_LENGTHS.items()
    )

  def batches() -> Batches:
    dataset = batches_of_records().map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    yield from dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

  return batches


def grain_loader(data_set: DataSet, *, workers: int) -> Opener:
  """Grain's DataLoader with its default of 16 read threads; Grain maps examples one by one."""
  grain, parse = _grain()

  class Parse(grain.MapTransform):
    def map(self, record: bytes) -> dict[str, np.ndarray]:
      return parse(record)

  source = grain_source(data_set, "grain")

  def batches() -> Batches:
    iterator = iter(
      grain.DataLoader(
        data_source=source,
        sampler=grain.IndexSampler(
          len(source), shard_options=grain.NoSharding(), shuffle=False, num_epochs=1, seed=0
        ),
        operations=[Parse(), grain.Batch(BATCH_SIZE)],
        worker_count=workers,
      )
    )
    yield from _pairs(iterator)

  return batches


def grain_map(data_set: DataSet, *, threads: int, files: str = "grain") -> Opener:
  """Grain's MapDataset, batches made by read threads."""
  grain, parse = _grain()
  source = grain_source(data_set, files)

  def batches() -> Batches:
    dataset = grain.MapDataset.source(source).map(parse).batch(BATCH_SIZE)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 1))
    yield from _pairs(iter(dataset.to_iter_dataset(options)))

  return batches


def grain_map_examples(data_set: DataSet, *, threads: int) -> Opener:
  """Grain's MapDataset, examples made by read threads and batched afterwards: the order in its guide."""
  grain, parse = _grain()
  source = grain_source(data_set, "grain")

  def batches() -> Batches:
    dataset = grain.MapDataset.source(source).map(parse)
    options = grain.ReadOptions(num_threads=threads)
    yield from _pairs(iter(dataset.to_iter_dataset(options).batch(BATCH_SIZE)))

  return batches


def grain_map_workers(data_set: DataSet, *, workers: int) -> Opener:
  """Grain's MapDataset in worker processes, without threads, which cost more than they gain there."""
  grain, parse = _grain()
  source = grain_source(data_set, "grain")

  def batches() -> Batches:
    dataset = grain.MapDataset.source(source).map(parse)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    workers_options = grain.MultiprocessingOptions(num_workers=workers)
    yield from _pairs(iter(dataset.to_iter_dataset(options).batch(BATCH_SIZE).mp_prefetch(workers_options)))

  return batches


def anystep_from_step(data_set: DataSet) -> Callable[[int], Batches]:
  """This library's batches from a step on, of a plan without end."""
  anystep = _anystep()
  plan = anystep.Plan.start(data_set.cache(), batch_size=BATCH_SIZE, feature_lengths=FEATURE_LENGTHS)

  def batches(step: int) -> Batches:
    # A pool of its own, as a new process has: no file is open yet.
    cache = anystep.open_cache(data_set.directory / "anystep", data_set.task, SPLIT, pool=anystep.ReadPool())
    with anystep.open_stream(plan, {data_set.task: cache}, prefetch_batches=PREFETCH_BATCHES) as stream:
      stream.seek(step)
      for batch in stream:
        yield batch["inputs"], batch["targets"]

  return batches


def grain_from_step(data_set: DataSet) -> Callable[[int], Batches]:
  """Grain's batches from a step on, of a MapDataset that repeats."""
  grain, parse = _grain()

  def batches(step: int) -> Batches:
    dataset = grain.MapDataset.source(grain_source(data_set, "grain")).map(parse).repeat().batch(BATCH_SIZE)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    iterator = iter(dataset.to_iter_dataset(options))
    iterator.set_state({"next_index": step})
    yield from _pairs(iterator)

  return batches


def _anystep() -> Any:
  """The module, and TensorFlow, with which it parses where that is installed: both count as imports."""
  import tensorflow  # noqa: F401

  import anystep

  return anystep


def grain_source(data_set: DataSet, files: str) -> Any:
  """Grain's source: `grain` for files of its own, `anystep` for those of this library's cache."""
  import grain.python as grain

  directory = data_set.directory / (files if files == "grain" else f"{files}/{data_set.task}")
  return grain.ArrayRecordDataSource(
    [str(path) for path in sorted(directory.glob(f"{SPLIT}.array_record-*"))]
  )


def _grain() -> tuple[Any, Callable[[bytes], dict[str, np.ndarray]]]:
  """The module, and a function of a record that every worker process can be sent."""
  import grain.python as grain
  import tensorflow as tf
  from absl import flags

  # Grain's worker processes take its flags from the process that starts them.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  return grain, functools.partial(parse_record, tf.train.Example)


def parse_record(example_class: Any, record: bytes) -> dict[str, np.ndarray]:
  """One record as padded rows, 20 µs: no way of seven to copy protobuf's numbers to numpy is faster."""
  features = example_class.FromString(record).features.feature
  rows = {}
  for name, length in FEATURE_LENGTHS.items():
    values = features[name].int64_list.value[:length]
    rows[name] = np.zeros(length, np.int32)
    rows[name][: len(values)] = values
  return rows


def _pairs(iterator: Any) -> Batches:
  try:
    for batch in iterator:
      yield batch["inputs"], batch["targets"]
  finally:
    if hasattr(iterator, "close"):
      iterator.close()


ANYSTEP = "anystep"
ANYSTEP_CONVERTED = "anystep, encoder-decoder features"
ANYSTEP_LATER_EPOCH = "anystep, later epoch"
ANYSTEP_MIXTURE = "anystep, mixture"
SEQIO = "SeqIO, cached task"
# Of these the fastest counts.
TF_DATA = {
  f"tf.data, batch parsing, files {files}": functools.partial(tf_data, files=files)
  for files in ("interleaved", "batches interleaved", "in turn")
}
GRAIN = {
  "Grain, DataLoader": functools.partial(grain_loader, workers=0),
  "Grain, DataLoader, 1 worker": functools.partial(grain_loader, workers=1),
  "Grain, DataLoader, 2 workers": functools.partial(grain_loader, workers=2),
  "Grain, MapDataset": functools.partial(grain_map, threads=0),
  "Grain, MapDataset, batches by 16 threads": functools.partial(grain_map, threads=16),
  "Grain, MapDataset, examples by 16 threads": functools.partial(grain_map_examples, threads=16),
  "Grain, MapDataset, 1 worker": functools.partial(grain_map_workers, workers=1),
  "Grain, MapDataset, 2 workers": functools.partial(grain_map_workers, workers=2),
  "Grain, MapDataset, anystep's files": functools.partial(grain_map, threads=0, files="anystep"),
}
ON_ONE_TASK: dict[str, Callable[[DataSet], Opener]] = {
  ANYSTEP: anystep_padded,
  ANYSTEP_CONVERTED: anystep_converted,
  SEQIO: seqio_cached,
  **TF_DATA,
  **GRAIN,
}
FROM_STEP = {ANYSTEP: anystep_from_step, "Grain": grain_from_step}
CONTENDERS: dict[str, Callable[[DataSet], Opener]] = {
  **ON_ONE_TASK,
  ANYSTEP_LATER_EPOCH: anystep_later_epoch,
  ANYSTEP_MIXTURE: MixtureOfCaches,
}
