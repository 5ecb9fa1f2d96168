"""SeqIO tasks and mixtures that are read from anystep's caches in anystep's order, by SeqIO's own callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.features.converters import Rows
from anystep.order.epochs import EpochPolicy
from anystep.tasks import seqio_internals
from anystep.tasks.reading.cached_tasks import CachedTasks
from anystep.tasks.registry.named_tasks import find_named_tasks
from anystep.tasks.registry.task_caches import open_task_cache
from anystep.tasks.seqio_api.step_datasets import steps_dataset

SequenceLength = Mapping[str, Any]

# Number of examples that TensorFlow gets at a time.
_ROWS_AT_A_TIME = 256


class DeterministicTask(seqio.Task):
  """A `seqio.Task` whose cached examples come from `anystep-cache`, in the same order on every machine.

  `seqio.TaskRegistry.add(..., task_cls=anystep.DeterministicTask)` is all that changes. The cache is looked
  for in SeqIO's cache directories (`seqio.add_global_cache_dirs`), also that of a task without a
  `seqio.CacheDatasetPlaceholder`.
  """

  def get_dataset(
    self,
    sequence_length: SequenceLength | None = None,
    split: str = "train",
    use_cached: bool = False,
    shuffle: bool = True,
    shuffle_buffer_size: int | None = None,
    seed: int | None = None,
    shard_info: seqio.ShardInfo | None = None,
    num_epochs: int | None = 1,
    trim_output_features: bool = True,
    try_in_mem_cache: bool = True,
  ) -> tf.data.Dataset:
    """As `seqio.Task.get_dataset`; with `use_cached`, units v = index, index + num_shards, ... of the order.

    Args:
      sequence_length, split, trim_output_features: as SeqIO's.
      use_cached: whether to read anystep's cache; all else is SeqIO's own.
      shuffle: whether each epoch has an order of its own; without, all are in the cache's, which is shuffled.
      seed: the plan's, of later epochs' order and of the draws after the cache; None is 0.
      shard_info: every `num_shards`-th unit from `index` on; together the shards are the whole.
      num_epochs: None or -1 for no end.
      shuffle_buffer_size, try_in_mem_cache: for `use_cached=False`.

    Raises:
      AnystepError: as `open_cached_tasks` and `Plan.start`. What fails later is in TensorFlow's error's text.
    """
    if not use_cached:
      return super().get_dataset(
        sequence_length=sequence_length,
        split=split,
        use_cached=False,
        shuffle=shuffle,
        shuffle_buffer_size=shuffle_buffer_size,
        seed=seed,
        shard_info=shard_info,
        num_epochs=num_epochs,
        trim_output_features=trim_output_features,
        try_in_mem_cache=try_in_mem_cache,
      )
    cached = open_cached_tasks(self, split, sequence_length)
    dataset = _examples(cached, shuffle=shuffle, seed=seed, shard_info=shard_info, num_epochs=num_epochs)
    if trim_output_features:
      dataset = seqio.utils.trim_dataset(dataset, sequence_length, self.output_features)
    return dataset.prefetch(tf.data.AUTOTUNE)

  def replace(self, **kwargs: Any) -> DeterministicTask:
    """As `seqio.Task.replace`, and of this class."""
    replaced = super().replace(**kwargs)
    return type(self)(
      name=replaced.name,
      source=replaced.source,
      output_features=replaced.output_features,
      postprocess_fn=replaced.postprocessor,
      shuffle_buffer_size=replaced.shuffle_buffer_size,
      **seqio_internals.task_arguments(replaced),
    )


class DeterministicMixture(seqio.Mixture):
  """A `seqio.Mixture` whose cached examples come from `anystep-cache`, mixed in the plan's order.

  `seqio.MixtureRegistry.add(..., mixture_cls=anystep.DeterministicMixture)` is all that changes; its tasks
  may be of any class. Rates are the mixture's, over the tasks that have the split.
  """

  def get_dataset(
    self,
    sequence_length: SequenceLength | None = None,
    split: str = "train",
    use_cached: bool = False,
    shuffle: bool = True,
    seed: int | None = None,
    shard_info: seqio.ShardInfo | None = None,
    num_epochs: int | None = None,
    copy_pretokenized: bool = False,
    compute_stats_empirically: bool = False,
    log_mixing_proportions: bool = True,
    passthrough_features: Sequence[str] | None = None,
    trim_output_features: bool = True,
    try_in_mem_cache: bool = True,
  ) -> tf.data.Dataset:
    """As `seqio.Mixture.get_dataset`; with `use_cached`, rows index, index + num_shards, ... of the mixture.

    Args:
      copy_pretokenized, passthrough_features: which features come besides the tasks' output features.
      compute_stats_empirically, log_mixing_proportions, try_in_mem_cache: for `use_cached=False`.
      **others: see `DeterministicTask.get_dataset`. The data ends when some task's epochs do.

    Raises:
      AnystepError: as `open_cached_tasks` and `Plan.start`.
    """
    if not use_cached:
      return super().get_dataset(
        sequence_length=sequence_length,
        split=split,
        use_cached=False,
        shuffle=shuffle,
        seed=seed,
        shard_info=shard_info,
        num_epochs=num_epochs,
        copy_pretokenized=copy_pretokenized,
        compute_stats_empirically=compute_stats_empirically,
        log_mixing_proportions=log_mixing_proportions,
        passthrough_features=passthrough_features,
        trim_output_features=trim_output_features,
        try_in_mem_cache=try_in_mem_cache,
      )
    self._check_compatible_features()
    cached = open_cached_tasks(self, split, sequence_length)
    dataset = _examples(cached, shuffle=shuffle, seed=seed, shard_info=shard_info, num_epochs=num_epochs)
    kept = {*self.output_features, *(passthrough_features or ())}
    if copy_pretokenized:
      kept |= {f"{name}_pretokenized" for name in self.output_features}
    dataset = dataset.map(lambda example: {name: example[name] for name in example if name in kept})
    if trim_output_features:
      dataset = seqio.utils.trim_dataset(dataset, sequence_length, self.output_features)
    return dataset.prefetch(tf.data.AUTOTUNE)


def open_cached_tasks(
  named: seqio.Task | seqio.Mixture | str, split: str, sequence_length: SequenceLength | None
) -> CachedTasks:
  """Open the caches of a task, or of those of a mixture's tasks that have the split.

  Args:
    named: a task or mixture, or the name of a registered one, whose caches are looked for in SeqIO's cache
      directories; or a mixture of caches as MaxText writes it, whose tasks are registered.
    split: the split's name.
    sequence_length: SeqIO's.

  Raises:
    AnystepError: 78 `cache_dirs` where SeqIO knows none; as `find_named_tasks`, `open_task_cache` and
      `NamedTasks.compute_rates`.
  """
  tasks = find_named_tasks(named, split, fix="correct the name, or import the module that registers it")
  roots = tasks.cache_dirs or tuple(seqio.utils.get_global_cache_dirs())

  def open_cache(task: seqio.Task) -> Cache:
    if not roots:
      raise AnystepError(
        ExitCode.CONFIG,
        "cache_dirs",
        task=task.name,
        expected="at least one directory",
        got="none",
        fix="call seqio.add_global_cache_dirs with what anystep-cache was given as --output_cache_dir",
      )
    return open_task_cache(task, split, roots)

  return CachedTasks.open(tasks, roots, sequence_length=dict(sequence_length or {}), open_cache=open_cache)


def order_options(*, shuffle: bool, seed: int | None, num_epochs: int | None) -> dict[str, Any]:
  """Return the options of `CachedTasks.start_plan` for what SeqIO's arguments of these names mean.

  Args:
    shuffle: whether each epoch has an order of its own.
    seed: None is 0.
    num_epochs: None or -1 for no end.
  """
  return {
    "seed": 0 if seed is None else int(seed),
    "num_epochs": None if num_epochs == -1 else num_epochs,
    "epoch_policy": None if shuffle else EpochPolicy.SAME,
  }


def _examples(
  cached: CachedTasks,
  *,
  shuffle: bool,
  seed: int | None,
  shard_info: seqio.ShardInfo | None,
  num_epochs: int | None,
) -> tf.data.Dataset:
  """Return a shard's examples in the plan's order, one by one and unpadded, as the readers leave them.

  Raises:
    AnystepError: 78 `shard_info` for a shard that is not there; as `CachedTasks.start_plan`.
  """
  index, num_shards = (shard_info.index, shard_info.num_shards) if shard_info else (0, 1)
  if not 0 <= index < num_shards:
    raise AnystepError(
      ExitCode.CONFIG,
      "shard_info",
      expected="0 <= index < num_shards",
      got=shard_info,
      fix="number the shards from 0",
    )
  # With one lane a row is a stripe: row r of step t is the mixture's t·B + r.
  batch_size = num_shards * max(_ROWS_AT_A_TIME // num_shards, 1)
  order = order_options(shuffle=shuffle, seed=seed, num_epochs=num_epochs)
  plan = cached.start_plan(batch_size=batch_size, lanes=1, **order)
  stream = cached.open_stream(plan, slice(index, None, num_shards))

  def read(step: int) -> Rows:
    examples, _ = stream.examples(plan.batch(step, stream.rows_at(step)))
    return dict(examples)

  # A shard of the last step may have no row, and the form of an example is any's.
  form, _ = stream.examples(plan.batch(0, np.zeros(1, np.int64)))
  dataset = steps_dataset(read, dict(form), steps=range(plan.num_steps or tf.int64.max))
  # Unbatched rows of a ragged tensor are dense to what follows a map.
  return dataset.unbatch().map(lambda example: example)
