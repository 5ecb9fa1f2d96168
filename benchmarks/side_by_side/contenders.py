"""The readers that are compared, each at the setting that its own guide would choose or a faster one.

A contender imports what it needs when it is called, and returns a function that opens the data anew and
yields batches of `Rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from side_by_side.data import FEATURE_LENGTHS, MIXTURE_TASKS, SPLIT, VOCABULARY_SIZE, DataSet
from side_by_side.rows import Rows

BATCH_SIZE = 256
PREFETCH_BATCHES = 16

Batches = Generator[Rows, None, None]
Opener = Callable[[], Batches]
RegisteredTask = Callable[[DataSet], Any]
"""From a data set to its task in SeqIO's registry, with what examples go through after the cache."""

_FEATURES = tuple(FEATURE_LENGTHS)


def anystep_reader(
  data_set: DataSet,
  *,
  model_features: bool = True,
  packing: str = "none",
  task: RegisteredTask | None = None,
  epoch: int = 0,
) -> Opener:
  """This library.

  Args:
    data_set: the data.
    model_features: whether the features are an encoder-decoder's, as SeqIO's converter makes them, or the
      task's as they are.
    packing: how rows are packed.
    task: the task whose preprocessors after the cache run; none do by default.
    epoch: the only epoch that is read; later ones are reshuffled.
  """
  anystep = _anystep()
  registered = None if task is None else task(data_set)
  if registered is not None:
    from anystep.tasks.reading.task_reader import TaskReader

  def batches() -> Batches:
    cache, transforms = data_set.cache(), {}
    if registered is not None:
      transforms[data_set.task] = TaskReader(registered, cache, FEATURE_LENGTHS)
    plan = anystep.Plan.start(
      cache,
      batch_size=BATCH_SIZE,
      feature_lengths=FEATURE_LENGTHS,
      num_epochs=epoch + 1,
      packing=packing,
      transforms=transforms,
    )
    start = epoch * len(cache) // BATCH_SIZE
    with anystep.open_stream(
      plan,
      data_set.directory / "anystep",
      feature_converter=anystep.EncoderDecoderConverter() if model_features else None,
      transforms=transforms,
      prefetch_batches=PREFETCH_BATCHES,
    ) as stream:
      stream.seek(start)
      own = plan.batch(start).epoch == epoch
      yield Rows.of({name: feature[own] for name, feature in next(stream).items()})
      yield from map(Rows.of, stream)

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
      yield Rows.of(next(self._stream))

  def expected(self) -> Iterator[Rows]:
    """The rows of the first pass, each task's read from the cache that all tasks are copies of."""
    taken = np.bincount(np.concatenate([self._plan.batch(step).task for step in range(self._pass_steps)]))
    examples = self._data_set.cache().read(np.arange(taken.max()))
    rows = _anystep().PassThroughConverter()(examples, FEATURE_LENGTHS)
    for num_examples in taken.tolist():
      yield Rows(rows["inputs"][:num_examples], rows["targets"][:num_examples])


def task_of_cache(data_set: DataSet, *, append_eos: bool = False) -> Any:
  """A task whose cached examples stay as they are, or get end tokens after the cache."""
  import seqio

  vocabulary = seqio.PassThroughVocabulary(size=VOCABULARY_SIZE, eos_id=1)
  feature = seqio.Feature(vocabulary, add_eos=append_eos)
  after_cache = [seqio.preprocessors.append_eos_after_trim] if append_eos else []
  return seqio.TaskRegistry.add(
    data_set.task,
    source=seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=[SPLIT]),
    preprocessors=[seqio.CacheDatasetPlaceholder(), *after_cache],
    output_features=dict.fromkeys(_FEATURES, feature),
  )


def stdlib_task(data_set: DataSet) -> Any:
  """The standard library's task, which corrupts spans and appends end tokens after the cache."""
  import seqio

  import anystep.tasks.stdlib  # noqa: F401

  return seqio.TaskRegistry.get(data_set.task)


def seqio_cached(data_set: DataSet, *, task: RegisteredTask = task_of_cache, pack: bool = False) -> Opener:
  """A cached SeqIO task through the encoder-decoder converter."""
  import seqio
  import tensorflow as tf

  seqio.add_global_cache_dirs([str(data_set.directory / "seqio")])
  registered = task(data_set)

  def batches() -> Batches:
    dataset = seqio.get_dataset(
      registered.name,
      FEATURE_LENGTHS,
      seqio.EncDecFeatureConverter(pack=pack),
      dataset_split=SPLIT,
      use_cached=True,
      shuffle=False,
      num_epochs=1,
      seed=0,
    )
    yield from map(Rows.of, dataset.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE).as_numpy_iterator())

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

  def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
    parsed = tf.io.parse_example(records, description)
    return {
      name: tf.cast(parsed[name], tf.int32).to_tensor(shape=[None, length])
      for name, length in FEATURE_LENGTHS.items()
    }

  def batches() -> Batches:
    dataset = batches_of_records().map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    yield from map(Rows.of, dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator())

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
    yield from _closed(iterator)

  return batches


def grain_batches(data_set: DataSet, *, threads: int, files: str = "grain") -> Opener:
  """Grain's MapDataset, whole batches made by read threads."""
  grain, parse = _grain()
  source = grain_source(data_set, files)

  def batches() -> Batches:
    dataset = grain.MapDataset.source(source).map(parse).batch(BATCH_SIZE)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 1))
    yield from _closed(iter(dataset.to_iter_dataset(options)))

  return batches


def grain_examples(data_set: DataSet, *, threads: int = 0, workers: int = 0, packing_bins: int = 0) -> Opener:
  """Grain's MapDataset, examples made one by one and batched afterwards: the order in its guide.

  Args:
    data_set: the data.
    threads: that read; in worker processes they cost more than they gain.
    workers: processes that make batches.
    packing_bins: rows that Grain's best fit packs at a time; 0 for rows of one example each.
  """
  grain, parse = _grain(padded=not packing_bins)
  source = grain_source(data_set, "grain")

  def batches() -> Batches:
    options = grain.ReadOptions(num_threads=threads) if threads else grain.ReadOptions(0, 0)
    dataset = grain.MapDataset.source(source).map(parse).to_iter_dataset(options)
    if packing_bins:
      dataset = grain.experimental.BestFitPackIterDataset(
        dataset, length_struct=FEATURE_LENGTHS, num_packing_bins=packing_bins, shuffle_bins=False
      )
    dataset = dataset.batch(BATCH_SIZE)
    if workers:
      dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    yield from _closed(iter(dataset))

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
      yield from map(Rows.of, stream)

  return batches


def grain_from_step(data_set: DataSet) -> Callable[[int], Batches]:
  """Grain's batches from a step on, of a MapDataset that repeats."""
  grain, parse = _grain()

  def batches(step: int) -> Batches:
    dataset = grain.MapDataset.source(grain_source(data_set, "grain")).map(parse).repeat().batch(BATCH_SIZE)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    iterator = iter(dataset.to_iter_dataset(options))
    iterator.set_state({"next_index": step})
    yield from _closed(iterator)

  return batches


def _anystep() -> Any:
  """The module, and numba, which it imports when it first parses: both count as imports."""
  import numba  # noqa: F401

  import anystep

  return anystep


def grain_source(data_set: DataSet, files: str) -> Any:
  """Grain's source: `grain` for files of its own, `anystep` for those of this library's cache."""
  import grain.python as grain

  directory = data_set.directory / (files if files == "grain" else f"{files}/{data_set.task}")
  return grain.ArrayRecordDataSource(
    [str(path) for path in sorted(directory.glob(f"{SPLIT}.array_record-*"))]
  )


def _grain(*, padded: bool = True) -> tuple[Any, Callable[[bytes], dict[str, np.ndarray]]]:
  """The module, and a function of a record that every worker process can be sent."""
  import grain.python as grain
  import tensorflow as tf
  from absl import flags

  # Grain's worker processes take its flags from the process that starts them.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  return grain, functools.partial(parse_record, tf.train.Example, padded=padded)


def parse_record(example_class: Any, record: bytes, *, padded: bool) -> dict[str, np.ndarray]:
  """One record's rows, 20 µs: no way of seven to copy protobuf's numbers to numpy is faster."""
  features = example_class.FromString(record).features.feature
  rows = {}
  for name, length in FEATURE_LENGTHS.items():
    values = features[name].int64_list.value[:length]
    rows[name] = np.zeros(length if padded else len(values), np.int32)
    rows[name][: len(values)] = values
  return rows


def _closed(iterator: Any) -> Batches:
  """A Grain iterator's batches; its processes end with them."""
  try:
    yield from map(Rows.of, iterator)
  finally:
    if hasattr(iterator, "close"):
      iterator.close()


ANYSTEP = "anystep"
ANYSTEP_CONVERTED = "anystep, encoder-decoder features"
ANYSTEP_LATER_EPOCH = "anystep, later epoch"
ANYSTEP_MIXTURE = "anystep, mixture"
ANYSTEP_ENDED = "anystep, end tokens after the cache"
ANYSTEP_CORRUPTED = "anystep, spans corrupted after the cache"
SEQIO = "SeqIO, cached task"
SEQIO_PACKED = "SeqIO, packed"
SEQIO_ENDED = "SeqIO, end tokens after the cache"
SEQIO_CORRUPTED = "SeqIO, spans corrupted after the cache"
# Of these the fastest counts.
TF_DATA = {
  f"tf.data, batch parsing, files {files}": functools.partial(tf_data, files=files)
  for files in ("interleaved", "batches interleaved", "in turn")
}
GRAIN = {
  "Grain, DataLoader": functools.partial(grain_loader, workers=0),
  "Grain, DataLoader, 1 worker": functools.partial(grain_loader, workers=1),
  "Grain, DataLoader, 2 workers": functools.partial(grain_loader, workers=2),
  "Grain, MapDataset": functools.partial(grain_batches, threads=0),
  "Grain, MapDataset, batches by 16 threads": functools.partial(grain_batches, threads=16),
  "Grain, MapDataset, examples by 16 threads": functools.partial(grain_examples, threads=16),
  "Grain, MapDataset, 1 worker": functools.partial(grain_examples, workers=1),
  "Grain, MapDataset, 2 workers": functools.partial(grain_examples, workers=2),
  "Grain, MapDataset, anystep's files": functools.partial(grain_batches, threads=0, files="anystep"),
}
ON_ONE_TASK: dict[str, Callable[[DataSet], Opener]] = {
  ANYSTEP: functools.partial(anystep_reader, model_features=False),
  ANYSTEP_CONVERTED: anystep_reader,
  SEQIO: seqio_cached,
  **TF_DATA,
  **GRAIN,
}
ANYSTEP_PACKED = {
  f"anystep, packed, {policy}": functools.partial(anystep_reader, packing=policy)
  for policy in ("greedy", "best_fit")
}
GRAIN_PACKED = {
  f"Grain, best fit of {bins} rows{title}": functools.partial(
    grain_examples, packing_bins=bins, workers=workers
  )
  for workers, title in ((0, ""), (2, ", 2 workers"))
  for bins in (16, 64, 256)
}
PACKED: dict[str, Callable[[DataSet], Opener]] = {
  **ANYSTEP_PACKED,
  SEQIO_PACKED: functools.partial(seqio_cached, pack=True),
  **GRAIN_PACKED,
}
# Their rows are longer than the records by an end token, or as long as a row is.
_task_with_ends = functools.partial(task_of_cache, append_eos=True)
ENDED: dict[str, Callable[[DataSet], Opener]] = {
  ANYSTEP_ENDED: functools.partial(anystep_reader, task=_task_with_ends),
  SEQIO_ENDED: functools.partial(seqio_cached, task=_task_with_ends),
}
# Each draws in its own way, so that their rows differ.
CORRUPTED: dict[str, Callable[[DataSet], Opener]] = {
  ANYSTEP_CORRUPTED: functools.partial(anystep_reader, task=stdlib_task),
  SEQIO_CORRUPTED: functools.partial(seqio_cached, task=stdlib_task),
}
ON_GENERATED: dict[str, Callable[[DataSet], Opener]] = {
  **ON_ONE_TASK,
  ANYSTEP_LATER_EPOCH: functools.partial(anystep_reader, model_features=False, epoch=1),
  ANYSTEP_MIXTURE: MixtureOfCaches,
  **PACKED,
  **ENDED,
}
CONTENDERS = ON_GENERATED | CORRUPTED
FROM_STEP = {ANYSTEP: anystep_from_step, "Grain": grain_from_step}
