"""A registered task's cache as a stream of model features."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence

import seqio

from anystep import stream as stream_lib
from anystep.cache import Cache
from anystep.converters import FeatureConverter
from anystep.errors import AnystepError, ExitCode, nearest
from anystep.manifest import is_count
from anystep.plan import Plan
from anystep.tasks.fingerprint import check_reader, provenance_difference
from anystep.tasks.modules import import_modules
from anystep.tasks.reading import TaskReader


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
  """Which data, in what form.

  Attributes:
    mixture_or_task_name: a registered task.
    cache_dir: root or roots that `anystep-cache` wrote to.
    task_feature_lengths: tokens per task feature that rows are cut and filled to.
    split: the split's name.
    batch_size: rows of a batch, over all hosts.
    seed: keys later epochs' order and the draws at reading.
    num_epochs: after how many epochs the data ends; None for never.
    epoch_policy: how later epochs are ordered: `reshuffle`, `same` or `global`.
    module: module or modules to import, which register the task.
    prefetch_batches: batches made ahead in the background.
  """

  mixture_or_task_name: str
  cache_dir: str | Sequence[str]
  task_feature_lengths: Mapping[str, int]
  batch_size: int
  split: str = "train"
  seed: int = 0
  num_epochs: int | None = None
  epoch_policy: str = "reshuffle"
  module: str | Sequence[str] | None = None
  prefetch_batches: int = 2

  def __post_init__(self):
    counts = {
      "batch_size": is_count(self.batch_size),
      "seed": is_count(self.seed),
      "num_epochs": self.num_epochs is None or is_count(self.num_epochs, least=1),
      "prefetch_batches": is_count(self.prefetch_batches),
      "task_feature_lengths": isinstance(self.task_feature_lengths, Mapping)
      and all(is_count(length, least=1) for length in self.task_feature_lengths.values()),
    }
    wrong = [f"{name}={getattr(self, name)!r}" for name, right in counts.items() if not right]
    if wrong:
      raise ValueError(f"expected whole numbers, got {', '.join(wrong)}")

  @property
  def cache_dirs(self) -> tuple[str, ...]:
    """The roots as a tuple."""
    return (self.cache_dir,) if isinstance(self.cache_dir, str) else tuple(self.cache_dir)

  @property
  def modules(self) -> tuple[str, ...]:
    """The modules as a tuple."""
    if self.module is None:
      return ()
    return (self.module,) if isinstance(self.module, str) else tuple(self.module)


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A task and its cache, found and checked; no device was touched for it."""

  config: DatasetConfig
  task: seqio.Task
  cache: Cache

  @classmethod
  def open(cls, config: DatasetConfig) -> Dataset:
    """Finds the task and its cache.

    Raises:
      AnystepError: 78 `task_unknown`; 66 `cache_missing` with the command that makes it; 65 and 76 as
        `open_cache` and `check_reader`.
    """
    import_modules(config.modules)
    task = _registered_task(config.mixture_or_task_name)
    try:
      cache = stream_lib.find_cache(config.cache_dirs, task.name, config.split)
    except AnystepError as error:
      if error.kind == "cache_missing":
        error.fix = _cache_command(config)
      if error.kind == "split_missing":
        error.fix += "; where it is the evaluation's, --gin.EVAL_DATASET=None trains without one"
      raise
    cache.check_heads()
    check_reader(task, cache.manifest)
    origin = provenance_difference(task, cache.manifest)
    if origin:
      print(f"{task.name} {config.split} comes of another origin: {origin}", file=sys.stderr)
    _check_lengths(task, config.task_feature_lengths)
    return cls(config, task, cache)

  def start_plan(self) -> Plan:
    """The plan of a run that starts at step 0."""
    return Plan.start(
      self.cache,
      batch_size=self.config.batch_size,
      feature_lengths=self.config.task_feature_lengths,
      seed=self.config.seed,
      num_epochs=self.config.num_epochs,
      epoch_policy=self.config.epoch_policy,
    )

  def under(self, plan: Plan, converter: FeatureConverter) -> PlannedDataset:
    """The dataset in the order of a plan, with the first row read, so that what cannot be fails now.

    Raises:
      AnystepError: 78 as `TaskReader` and the converter; 65 where the cache's files are not what was written.
    """
    planned = PlannedDataset(self, plan, converter, TaskReader(self.task, self.cache, plan))
    with planned.open_stream([0]) as stream:
      stream.batch(0)
    return planned


@dataclasses.dataclass(frozen=True)
class PlannedDataset:
  """A dataset in the order of a plan, in the form that a converter gives it."""

  dataset: Dataset
  plan: Plan
  converter: FeatureConverter
  reader: TaskReader

  def open_stream(self, rows: slice | Iterable[int] = slice(None)) -> stream_lib.Stream:
    """The plan's batches, from step 0 on."""
    config = self.dataset.config
    return stream_lib.open_stream(
      self.plan,
      {self.dataset.task.name: self.dataset.cache},
      rows=rows,
      feature_converter=self.converter,
      transforms={self.dataset.task.name: self.reader},
      prefetch_batches=config.prefetch_batches,
    )


def _check_lengths(task: seqio.Task, lengths: Mapping[str, int]) -> None:
  features = [name for name, feature in task.output_features.items() if feature.required and feature.rank]
  missing = [name for name in features if name not in lengths]
  if missing:
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_length",
      task=task.name,
      expected=f"lengths for {', '.join(features)}",
      got=dict(lengths),
      fix=f"add {', '.join(missing)} to TASK_FEATURE_LENGTHS",
    )


def _registered_task(name: str) -> seqio.Task:
  tasks, mixtures = set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())
  if name in tasks:
    return seqio.TaskRegistry.get(name)
  raise AnystepError(
    ExitCode.CONFIG,
    "task_unknown",
    expected="a registered task" + (", not a mixture" if name in mixtures else ""),
    got=name,
    nearest=nearest(name, tasks) or "none is registered",
    fix="correct MIXTURE_OR_TASK_NAME, or name the module that registers it in MIXTURE_OR_TASK_MODULE",
  )


def _cache_command(config: DatasetConfig) -> str:
  modules = "".join(f" --module_import={module}" for module in config.modules)
  return (
    f"anystep-cache --tasks={config.mixture_or_task_name} --output_cache_dir={config.cache_dirs[0]}{modules}"
  )
