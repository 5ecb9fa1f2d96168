"""tf.data datasets of source ranges, after the preprocessors before the cache."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from anystep.cache_job.preprocessing.bad_examples import make_unreadable_error
from anystep.cache_job.runners.worker_failures import import_in_worker
from anystep.cache_job.state.split_job import SourceRange, SplitJob
from anystep.errors import AnystepError, one_line
from anystep.order.permutation import preprocess_seed

# TensorFlow's seed and SeqIO's counter of seeds belong to the whole process, whatever its threads.
_building = threading.Lock()


def get_registered_task(job: SplitJob) -> Any:
  """Return the job's task, registered by its modules in this process."""
  import seqio

  from anystep.tasks.registry.named_tasks import find_task

  import_in_worker(job.options.modules)
  if job.options.tfds_data_dir is not None:
    seqio.set_tfds_data_dir_override(job.options.tfds_data_dir)
  fix = "name the module that registers it with --module_import"
  return find_task(job.task, fix=fix)


def count_examples(task: Any, job: SplitJob, shard: int) -> int:
  """Count the examples of a source shard, before any preprocessor.

  Raises:
    AnystepError: 66 `source_unreadable`.
  """
  whole = SourceRange(number=shard, name=job.source_shards[shard], shard=shard)
  try:
    with _building:
      dataset = _build_source_dataset(task, job, whole)
    cardinality = int(dataset.cardinality())
    return cardinality if cardinality >= 0 else int(dataset.reduce(np.int64(0), lambda count, _: count + 1))
  except AnystepError:
    raise
  except Exception as error:
    raise make_unreadable_error(one_line(error), source_shard=whole.name) from error


def build_dataset(task: Any, job: SplitJob, source: SourceRange, *, num_steps: int | None = None) -> Any:
  """Build the dataset of a source range after every preprocessor before the cache.

  Args:
    task: the registered task.
    job: its split.
    source: the range.
    num_steps: only so many of the first preprocessors, with the seeds that they have among all of them.
  """
  import seqio
  import tensorflow as tf

  seed = preprocess_seed(job.task, job.split, job.options.base_seed, source.number)
  with _building:
    tf.random.set_seed(0)
    dataset = _build_source_dataset(task, job, source)
    if job.seqio_cache is None:
      if num_steps is not None:
        task = seqio.Task(
          task.name,
          source=task.source,
          output_features=task.output_features,
          preprocessors=_take_first_steps(task, num_steps),
        )
      dataset = task.preprocess_precache(dataset, seed=seed)
      if job.options.cache_at == "end":
        dataset = task.preprocess_postcache(
          dataset, sequence_length=job.options.task_feature_lengths, seed=seed
        )
      if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"a tf.data.Dataset is to be returned, not {type(dataset).__name__}")
    return dataset


def _build_source_dataset(task: Any, job: SplitJob, source: SourceRange) -> Any:
  import seqio

  if job.seqio_cache is not None:
    from anystep.cache_job.preprocessing.seqio_caches import read_cached_shard

    dataset = read_cached_shard(job.seqio_cache, job.split, source.shard)
  else:
    dataset = task.source.get_dataset(
      split=job.split,
      shuffle=False,
      seed=preprocess_seed(job.task, job.split, job.options.base_seed, source.number),
      shard_info=seqio.ShardInfo(index=source.shard, num_shards=len(job.source_shards)),
    )
  if source.stop is not None:
    dataset = dataset.skip(source.start).take(source.stop - source.start)
  return dataset


def _take_first_steps(task: Any, num_steps: int) -> list[Any]:
  """Return the first preprocessors, and the placeholder, which SeqIO counts for the seeds of later ones."""
  import seqio

  steps = list(task.preprocessors)
  places = [k for k, step in enumerate(steps) if isinstance(step, seqio.CacheDatasetPlaceholder)]
  if not places:
    return steps[:num_steps]
  before = steps[: places[0]]
  after = steps[places[0] + 1 :]
  return [*before[:num_steps], steps[places[0]], *after[: max(num_steps - len(before), 0)]]
