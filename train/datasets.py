"""A registered task or mixture, from its caches, as a stream of model features."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import seqio
from etils import epath

from anystep import stream as stream_lib
from anystep.cache import Cache
from anystep.converters import FeatureConverter
from anystep.errors import AnystepError, ExitCode, nearest
from anystep.manifest import canonical_json, is_count
from anystep.names import DATA_CACHES, DATA_PLAN
from anystep.packing import PackingPolicy
from anystep.plan import Plan
from anystep.tasks.fingerprint import check_reader, provenance_difference
from anystep.tasks.modules import import_modules
from anystep.tasks.reading import TaskReader


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
  """Which data, in what form.

  Attributes:
    mixture_or_task_name: a registered task or mixture; a mixture's rates are its own.
    cache_dir: root or roots that `anystep-cache` wrote to.
    task_feature_lengths: tokens per task feature that rows are cut and filled to.
    split: the split's name.
    batch_size: rows of a batch, over all hosts.
    seed: keys later epochs' order and the draws at reading.
    num_epochs: after how many epochs the data ends; None for never.
    epoch_policy: how later epochs are ordered: `reshuffle`, `same` or `global`.
    packing: how many examples share a row: `none`, `greedy` or `best_fit`.
    module: module or modules to import, which register the task.
    prefetch_batches: batches made ahead in the background.
    plan: a plan's JSON file to go by, which begins as what is said here and then changes; made with
      `anystep-data plan`. None for no changes but those that the checkpoint knows of.
  """

  mixture_or_task_name: str
  cache_dir: str | Sequence[str]
  task_feature_lengths: Mapping[str, int]
  batch_size: int
  split: str = "train"
  seed: int = 0
  num_epochs: int | None = None
  epoch_policy: str = "reshuffle"
  packing: str = "none"
  module: str | Sequence[str] | None = None
  prefetch_batches: int = 16
  plan: str | None = None

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
    packings = [policy.value for policy in PackingPolicy]
    if self.packing not in packings:
      raise ValueError(f"packing: expected {' or '.join(packings)}, got {self.packing!r}")

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
  """A task, or the tasks of a mixture, and their caches, found and checked; no device was touched for it.

  Attributes:
    config: what was asked for.
    tasks, caches: by task name.
    rates: the mixture's, by task name; 1 for a task.
  """

  config: DatasetConfig
  tasks: Mapping[str, seqio.Task]
  caches: Mapping[str, Cache]
  rates: Mapping[str, float]

  @classmethod
  def open(cls, config: DatasetConfig) -> Dataset:
    """Finds the tasks and their caches.

    Raises:
      AnystepError: 78 `task_unknown`, `rates`; 66 `cache_missing` with the command that makes it; 65 and 76
        as `open_cache` and `check_reader`.
    """
    import_modules(config.modules)
    registered = _registered(config.mixture_or_task_name)
    tasks = [registered] if isinstance(registered, seqio.Task) else registered.tasks
    by_name = {task.name: task for task in tasks}
    caches = {name: _open_cache(task, config) for name, task in by_name.items()}
    return cls(config, by_name, caches, _rates(registered, config))

  def including(self, names: Iterable[str]) -> Dataset:
    """The dataset with tasks that a plan has and the mixture no longer has.

    Raises:
      AnystepError: as `open`.
    """
    new = {name: _registered(name) for name in names if name not in self.tasks}
    caches = {name: _open_cache(task, self.config) for name, task in new.items()}
    return dataclasses.replace(self, tasks={**self.tasks, **new}, caches={**self.caches, **caches})

  @property
  def task(self) -> seqio.Task:
    """The only task.

    Raises:
      AnystepError: 78 `mixture` for a mixture of several.
    """
    if len(self.tasks) > 1:
      raise AnystepError(
        ExitCode.CONFIG,
        "mixture",
        expected=f"one task, such as {min(self.tasks)}",
        got=self.config.mixture_or_task_name,
        fix="set eval/datasets.DatasetConfig.mixture_or_task_name to one task, or EVAL_DATASET to None",
      )
    return next(iter(self.tasks.values()))

  @functools.cached_property
  def num_examples(self) -> int:
    """Examples of all tasks."""
    return sum(map(len, self.caches.values()))

  @functools.cached_property
  def readers(self) -> dict[str, TaskReader]:
    """By task name, what stands after the cache.

    Raises:
      AnystepError: 78 as `TaskReader`.
    """
    lengths = self.config.task_feature_lengths
    return {name: TaskReader(task, self.caches[name], lengths) for name, task in self.tasks.items()}

  def start_plan(self) -> Plan:
    """The plan of a run that starts at step 0 and whose data does not change.

    Raises:
      AnystepError: as `Plan.start` and `TaskReader`.
    """
    return Plan.start(
      self.caches.values(),
      rates=self.rates,
      batch_size=self.config.batch_size,
      feature_lengths=self.config.task_feature_lengths,
      seed=self.config.seed,
      num_epochs=self.config.num_epochs,
      epoch_policy=self.config.epoch_policy,
      packing=self.config.packing,
      transforms=self.readers,
    )

  def plan(self, checkpointed: tuple[int, Plan] | None = None) -> Plan:
    """The plan to train by: the file's, else the checkpoint's, else that of a start.

    Args:
      checkpointed: a checkpoint's step and plan, whose steps are past.

    Raises:
      AnystepError: 76 `resume_contract` where the checkpoint's data before its step, or what the
        configuration says of the data, is not the plan's; 66 `plan_missing`; 65 `plan_invalid`.
    """
    started = self.start_plan()
    if self.config.plan is not None:
      plan = Plan.read(self.config.plan, fix="make it with anystep-data plan, or leave DATA_PLAN out")
      _check_same(_terms(started), _terms(plan), "change the configuration or DATA_PLAN: they disagree")
      if checkpointed is not None:
        step, before = checkpointed
        fix = "change the plan from a step on that is not yet trained, or train in another MODEL_DIR"
        _check_same(_past(before, step), _past(plan, step), fix)
      return plan
    if checkpointed is None:
      return started
    fix = (
      "run with the configuration and cache that training started with, or in another MODEL_DIR; or change"
      " the data from a later step on with anystep-data plan change, and name its output as DATA_PLAN"
    )
    _check_same(_past(checkpointed[1], 1), _past(started, 1), fix)
    return checkpointed[1]

  def under(self, plan: Plan, converter: FeatureConverter) -> PlannedDataset:
    """The dataset in the order of a plan, with the first row read, so that what cannot be fails now.

    Raises:
      AnystepError: 78 as `TaskReader` and the converter; 65 where the cache's files are not what was written.
    """
    dataset = self.including(plan.tasks)
    planned = PlannedDataset(dataset, plan.on_caches(dataset.caches, dataset.readers), converter)
    with planned.open_stream([0]) as stream:
      stream.batch(0)
    return planned


@dataclasses.dataclass(frozen=True)
class PlannedDataset:
  """A dataset in the order of a plan, in the form that a converter gives it."""

  dataset: Dataset
  plan: Plan
  converter: FeatureConverter

  def open_stream(self, rows: slice | Iterable[int] = slice(None)) -> stream_lib.Stream:
    """The plan's batches, from step 0 on."""
    return stream_lib.open_stream(
      self.plan,
      self.dataset.caches,
      rows=rows,
      feature_converter=self.converter,
      transforms={name: self.dataset.readers[name] for name in self.plan.tasks},
      prefetch_batches=self.dataset.config.prefetch_batches,
    )

  def record(self, model_dir: epath.PathLike, step: int) -> None:
    """Writes the plan and where its caches are, for `anystep-data`; a plan that was given up is kept.

    Args:
      model_dir: where to.
      step: the one that training goes on with.
    """
    directory = epath.Path(model_dir)
    directory.mkdir(parents=True, exist_ok=True)
    path, text = directory / DATA_PLAN, self.plan.to_json()
    if path.exists() and (before := path.read_text()) != text:
      (directory / f"data_plan_until_step_{step}.json").write_text(before)
    path.write_text(text)
    roots = [root if "://" in root else os.path.abspath(root) for root in self.dataset.config.cache_dirs]
    caches = canonical_json({"version": 1, "cache_dirs": roots}, indent=1) + "\n"
    (directory / DATA_CACHES).write_text(caches)


def _open_cache(task: seqio.Task, config: DatasetConfig) -> Cache:
  try:
    cache = stream_lib.find_cache(config.cache_dirs, task.name, config.split)
  except AnystepError as error:
    if error.kind == "cache_missing":
      error.fix = _cache_command(task.name, config)
    if error.kind == "split_missing":
      error.fix += "; where it is the evaluation's, --gin.EVAL_DATASET=None trains without one"
    raise
  cache.check_heads()
  check_reader(task, cache.manifest)
  origin = provenance_difference(task, cache.manifest)
  if origin:
    print(f"{task.name} {config.split} comes of another origin: {origin}", file=sys.stderr)
  _check_lengths(task, config.task_feature_lengths)
  return cache


def _rates(registered: seqio.Task | seqio.Mixture, config: DatasetConfig) -> dict[str, float]:
  if isinstance(registered, seqio.Task):
    return {registered.name: 1}
  try:
    with _cache_dirs_of_seqio(config.cache_dirs):
      return {task.name: registered.get_rate(task) for task in registered.tasks}
  except (ValueError, TypeError, KeyError, OSError, NotImplementedError) as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "rates",
      mixture=registered.name,
      expected="rates that are numbers, or functions of a task that need no more than its cache",
      got=f"{type(error).__name__}: {error}",
      fix="give the mixture rates that are numbers",
    ) from error


@contextlib.contextmanager
def _cache_dirs_of_seqio(cache_dirs: Sequence[str]) -> Iterator[None]:
  """Lets SeqIO's own rate functions find how many examples a cache has."""
  before = list(seqio.utils.get_global_cache_dirs())
  seqio.set_global_cache_dirs(list(cache_dirs))
  try:
    yield
  finally:
    seqio.set_global_cache_dirs(before)


def _terms(plan: Plan) -> dict[str, object]:
  """What a plan and a configuration both say, and no change of plan changes."""
  names = ("split", "seed", "num_epochs", "feature_lengths", "epoch_policy", "packing", "rate_unit")
  return {name: getattr(plan, name) for name in names}


def _past(plan: Plan, step: int) -> dict[str, object]:
  """What decided the batches before a step."""
  segments = [s for s in plan.segments if s.start_step < step]
  names = sorted({name for segment in segments for name in segment.tasks})
  return {
    **_terms(plan),
    "tasks": {name: dataclasses.asdict(plan.tasks[name]) for name in names},
    "segments": [{**dataclasses.asdict(segment), "reason": None} for segment in segments],
  }


def _check_same(before: Mapping[str, object], now: Mapping[str, object], fix: str) -> None:
  for field, value in before.items():
    if now[field] != value:
      raise AnystepError(
        ExitCode.MISMATCH, "resume_contract", field=field, expected=value, got=now[field], fix=fix
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


def _registered(name: str) -> seqio.Task | seqio.Mixture:
  tasks, mixtures = set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())
  if name in tasks | mixtures:
    return (seqio.TaskRegistry if name in tasks else seqio.MixtureRegistry).get(name)
  raise AnystepError(
    ExitCode.CONFIG,
    "task_unknown",
    expected="a registered task or mixture",
    got=name,
    nearest=nearest(name, tasks | mixtures) or "none is registered",
    fix="correct MIXTURE_OR_TASK_NAME, or name the module that registers it in MIXTURE_OR_TASK_MODULE",
  )


def _cache_command(task: str, config: DatasetConfig) -> str:
  modules = "".join(f" --module_import={module}" for module in config.modules)
  return f"anystep-cache --tasks={task} --output_cache_dir={config.cache_dirs[0]}{modules}"
