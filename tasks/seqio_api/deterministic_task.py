"""SeqIO tasks and mixtures that are read from anystep's caches in anystep's order, by SeqIO's own callers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.features.converters import FeatureConverter, Rows
from anystep.files import names
from anystep.limits import is_count
from anystep.order.epochs import EpochPolicy
from anystep.plans.changes import Rate
from anystep.plans.plan import Plan
from anystep.streams.stream import Stream, find_cache, open_stream
from anystep.tasks import seqio_internals
from anystep.tasks.reading.task_reader import TaskReader
from anystep.tasks.registry.fingerprint import check_reader
from anystep.tasks.registry.mixture_files import is_mixture_text, read_mixture
from anystep.tasks.seqio_api.step_datasets import steps_dataset

SequenceLength = Mapping[str, Any]

# Examples that TensorFlow is given at a time.
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
      AnystepError: as `CachedTasks.open` and `Plan.start`. What fails later is in TensorFlow's error's text.
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
    cached = CachedTasks.open(self, split, sequence_length)
    dataset = cached.examples(shuffle=shuffle, seed=seed, shard_info=shard_info, num_epochs=num_epochs)
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
      AnystepError: as `CachedTasks.open` and `Plan.start`.
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
    cached = CachedTasks.open(self, split, sequence_length)
    dataset = cached.examples(shuffle=shuffle, seed=seed, shard_info=shard_info, num_epochs=num_epochs)
    kept = {*self.output_features, *(passthrough_features or ())}
    if copy_pretokenized:
      kept |= {f"{name}_pretokenized" for name in self.output_features}
    dataset = dataset.map(lambda example: {name: example[name] for name in example if name in kept})
    if trim_output_features:
      dataset = seqio.utils.trim_dataset(dataset, sequence_length, self.output_features)
    return dataset.prefetch(tf.data.AUTOTUNE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedTasks:
  """Registered tasks, their caches, and what their examples go through at reading.

  Attributes:
    caches, readers: by task name.
    rates: the mixture's, by task name.
    feature_lengths: those of `sequence_length` that are of one dimension.
  """

  caches: Mapping[str, Cache]
  readers: Mapping[str, TaskReader]
  rates: Mapping[str, Rate]
  feature_lengths: Mapping[str, int]

  @classmethod
  def open(
    cls, registered: seqio.Task | seqio.Mixture | str, split: str, sequence_length: SequenceLength | None
  ) -> CachedTasks:
    """Finds the caches of a task, or of those of a mixture's tasks that have the split.

    A text is the name of either, or a mixture of caches as MaxText writes it, whose tasks are registered.

    Raises:
      AnystepError: 66 `cache_missing` with the command that makes it, `cache_of_seqio` for one of SeqIO's own
        job; 78 `cache_dirs`, `split` where no task has it, and as `TaskReader`; 65 and 76 as `open_cache` and
        `check_reader`.
    """
    if isinstance(registered, str) and is_mixture_text(registered):
      mixture = read_mixture(registered)
      tasks = [seqio.TaskRegistry.get(name) for name in mixture.rates]
      return cls._of(tasks, split, sequence_length, rates=mixture.rates, roots=mixture.roots)
    if isinstance(registered, str):
      registered = seqio.get_mixture_or_task(registered)
    tasks, rates = [registered], {registered.name: 1.0}
    if isinstance(registered, seqio.Mixture):
      tasks = tasks_with_split(registered, split)
      rates = {task.name: registered.get_rate(task) for task in tasks}
    return cls._of(tasks, split, sequence_length, rates=rates, roots=seqio.utils.get_global_cache_dirs())

  @classmethod
  def _of(
    cls,
    tasks: Sequence[seqio.Task],
    split: str,
    sequence_length: SequenceLength | None,
    *,
    rates: Mapping[str, Rate],
    roots: Sequence[str],
  ) -> CachedTasks:
    caches = {task.name: _find_cache(task, split, roots) for task in tasks}
    lengths = dict(sequence_length or {})
    return cls(
      caches=caches,
      readers={task.name: TaskReader(task, caches[task.name], lengths) for task in tasks},
      rates=rates,
      feature_lengths={name: length for name, length in lengths.items() if is_count(length)},
    )

  def start_plan(
    self, *, batch_size: int, shuffle: bool, seed: int | None, num_epochs: int | None, **options: Any
  ) -> Plan:
    """The plan of these tasks; seed, num_epochs and shuffle mean what they mean to `DeterministicTask`.

    Raises:
      AnystepError: as `Plan.start`, which takes the options.
    """
    return Plan.start(
      self.caches.values(),
      batch_size=batch_size,
      rates=self.rates,
      feature_lengths=self.feature_lengths,
      seed=0 if seed is None else int(seed),
      num_epochs=None if num_epochs == -1 else num_epochs,
      epoch_policy=None if shuffle else EpochPolicy.SAME,
      transforms=self.readers,
      **options,
    )

  def open_stream(self, plan: Plan, rows: Any, feature_converter: FeatureConverter | None = None) -> Stream:
    """The plan's batches, each made when it is asked for."""
    return open_stream(
      plan,
      self.caches,
      rows=rows,
      feature_converter=feature_converter,
      transforms=self.readers,
      prefetch_batches=0,
    )

  def examples(
    self, *, shuffle: bool, seed: int | None, shard_info: seqio.ShardInfo | None, num_epochs: int | None
  ) -> tf.data.Dataset:
    """A shard's examples in the plan's order, one by one and unpadded, as the readers leave them.

    Raises:
      AnystepError: 78 `shard_info` for a shard that is not there; as `start_plan`.
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
    plan = self.start_plan(batch_size=batch_size, shuffle=shuffle, seed=seed, num_epochs=num_epochs, lanes=1)
    stream = self.open_stream(plan, slice(index, None, num_shards))

    def read(step: int) -> Rows:
      examples, _ = stream.examples(plan.batch(step, stream.rows_at(step)))
      return dict(examples)

    # A shard of the last step may have no row, and the form of an example is any's.
    form, _ = stream.examples(plan.batch(0, np.zeros(1, np.int64)))
    dataset = steps_dataset(read, dict(form), steps=range(plan.num_steps or tf.int64.max))
    # Unbatched rows of a ragged tensor are dense to what follows a map.
    return dataset.unbatch().map(lambda example: example)


def tasks_with_split(mixture: seqio.Mixture, split: str) -> list[seqio.Task]:
  """The tasks that a mixture mixes for a split: as in SeqIO, those that have it.

  Raises:
    AnystepError: 78 `split` where none has.
  """
  tasks = [task for task in mixture.tasks if split in task.splits]
  if not tasks:
    raise AnystepError(
      ExitCode.CONFIG,
      "split",
      mixture=mixture.name,
      expected=" or ".join(sorted(mixture.splits)),
      got=split,
      fix="name a split that some task of the mixture has",
    )
  return tasks


def _find_cache(task: seqio.Task, split: str, roots: Sequence[str]) -> Cache:
  if not roots:
    raise AnystepError(
      ExitCode.CONFIG,
      "cache_dirs",
      task=task.name,
      expected="at least one directory",
      got="none",
      fix="call seqio.add_global_cache_dirs with what anystep-cache was given as --output_cache_dir",
    )
  try:
    cache = find_cache(roots, task.name, split)
  except AnystepError as error:
    if error.kind == "completed_invalid" and _is_of_seqio(error.fields["path"], split):
      command = f"anystep-cache --tasks={task.name} --output_cache_dir=ANOTHER_DIRECTORY"
      raise AnystepError(
        ExitCode.NO_INPUT,
        "cache_of_seqio",
        task=task.name,
        path=error.fields["path"],
        expected="a cache that anystep-cache wrote",
        got="one of SeqIO's own cache job",
        fix=f"{command} --module_import=MODULE_OF_THE_TASK, and name that directory to SeqIO first",
      ) from error
    raise
  check_reader(task, cache.manifest, cache=cache)
  return cache


def _is_of_seqio(completed: Any, split: str) -> bool:
  """Whether what COMPLETED stands for has none of our manifests."""
  return not (completed.parent / names.manifest_name(split)).exists()
