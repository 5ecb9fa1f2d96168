"""A registered task or mixture, from its caches, as a stream of model features."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import seqio
from etils import epath

from anystep.cached import cached_property
from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.features.converters import FeatureConverter
from anystep.files import storage
from anystep.files.json_files import canonical_json
from anystep.files.names import DATA_CACHES
from anystep.plans.plan import PADDING_TASK, Plan, Rate
from anystep.plans.planned_task import without_transforms
from anystep.streams import stream as stream_lib
from anystep.tasks.reading.task_reader import TaskReader
from anystep.tasks.registry.fingerprint import check_reader, provenance_difference
from anystep.train.datasets.cache_program import CacheCommand
from anystep.train.datasets.config import DatasetConfig, NamedTasks, check_lengths, find_registered
from anystep.train.datasets.data_state import DataState, check_kind, check_same
from anystep.train.datasets.run_data import EvaluationBatch, RunData, RunDataset

__all__ = ["Dataset", "DatasetConfig", "PlannedDataset"]


@dataclasses.dataclass(frozen=True)
class Dataset(RunDataset):
  """A task, or the tasks of a mixture, and their caches, found and checked; no device was touched for it.

  Attributes:
    config: what was asked for.
    tasks, caches: by task name.
    rates: the mixture's, by task name; 1 for a task.
    cache_dirs: the roots that the caches were found in.
  """

  config: DatasetConfig
  tasks: Mapping[str, seqio.Task]
  caches: Mapping[str, Cache]
  rates: Mapping[str, Rate]
  cache_dirs: tuple[str, ...]

  @classmethod
  def open(cls, config: DatasetConfig) -> Dataset:
    """Finds the tasks and their caches.

    Raises:
      AnystepError: 78 `rates`; 66 `cache_missing` with the command that makes it; as `NamedTasks.of`; 65 and
        76 as `open_cache` and `check_reader`.
    """
    return cls.of_named(NamedTasks.of(config), config)

  @classmethod
  def of_named(cls, named: NamedTasks, config: DatasetConfig) -> Dataset:
    """Finds the caches of tasks that were found.

    Raises:
      AnystepError: as `open`.
    """
    caches = {name: _open_cache(task, named.cache_dirs, config) for name, task in named.tasks.items()}
    return cls(config, named.tasks, caches, _rates(named), named.cache_dirs)

  def including(self, names: Iterable[str]) -> Dataset:
    """The dataset with tasks that a plan has and the mixture no longer has.

    Raises:
      AnystepError: as `open`.
    """
    new = {name: find_registered(name) for name in names if name not in self.tasks}
    caches = {name: _open_cache(task, self.cache_dirs, self.config) for name, task in new.items()}
    return dataclasses.replace(self, tasks={**self.tasks, **new}, caches={**self.caches, **caches})

  @cached_property
  def num_examples(self) -> int:
    """Examples of all tasks."""
    return sum(map(len, self.caches.values()))

  @cached_property
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

  def run_state(self, checkpointed: tuple[int, DataState] | None = None) -> Plan:
    """The plan to train by: the file's, else the checkpoint's, else that of a start.

    Args:
      checkpointed: a checkpoint's step and plan, whose steps are past.

    Raises:
      AnystepError: 76 `resume_contract` where the checkpoint's data before its step, or what the
        configuration says of the data, is not the plan's; 66 `plan_missing`; 65 `plan_invalid`.
    """
    if checkpointed is not None:
      check_kind(checkpointed[1], use_cached=True)
    started = self.start_plan()
    if self.config.plan is not None:
      plan = Plan.read(self.config.plan, fix="make it with anystep-data plan, or leave DATA_PLAN out")
      check_same(_terms(started), _terms(plan), "change the configuration or DATA_PLAN: they disagree")
      if checkpointed is not None:
        step, before = checkpointed
        assert isinstance(before, Plan), "check_kind"
        fix = "change the plan from a step on that is not yet trained, or train in another MODEL_DIR"
        check_same(_past(before, step), _past(plan, step), fix)
        plan = _with_known_transforms(plan, before, fix)
      return plan
    if checkpointed is None:
      return started
    fix = (
      "run with the configuration and cache that training started with, or in another MODEL_DIR; or change"
      " the data from a later step on with anystep-data plan change, and name its output as DATA_PLAN"
    )
    before = checkpointed[1]
    assert isinstance(before, Plan), "check_kind"
    check_same({**_past(before, 1), "tombstones": []}, _past(started, 1), fix)
    return before

  def under(self, state: DataState, converter: FeatureConverter) -> PlannedDataset:
    """The dataset in the order of a plan, with the first row read, so that what cannot be fails now.

    Raises:
      AnystepError: 78 as `TaskReader` and the converter; 65 where the cache's files are not what was written.
    """
    assert isinstance(state, Plan), "run_state gives one"
    dataset = self.including(state.tasks)
    planned = PlannedDataset(dataset, state.on_caches(dataset.caches, dataset.readers), converter)
    if state.unknown_transforms:
      print(_told_unknown(state.unknown_transforms, planned.plan.unknown_transforms), file=sys.stderr)
    with planned.open_stream([0]) as stream:
      stream.batch(0)
    return planned


@dataclasses.dataclass(frozen=True)
class PlannedDataset(RunData):
  """A dataset in the order of a plan, in the form that a converter gives it."""

  dataset: Dataset
  plan: Plan
  converter: FeatureConverter

  @property
  def state(self) -> Plan:
    """The plan."""
    return self.plan

  @property
  def batch_sizes(self) -> list[int]:
    """Those of the plan's segments."""
    return [segment.batch_size for segment in self.plan.segments]

  @property
  def num_examples(self) -> int:
    """Units of an epoch, of which each is an example where rows are not packed."""
    return sum(task.num_units for task in self.plan.tasks.values())

  def open_stream(self, rows: slice | Iterable[int] | tuple[int, int] = (0, 1)) -> stream_lib.Stream:
    """The plan's batches, from step 0 on; rows as `anystep.open_stream` takes them."""
    return stream_lib.open_stream(
      self.plan,
      self.dataset.caches,
      rows=rows,
      feature_converter=self.converter,
      transforms={name: self.dataset.readers[name] for name in self.plan.tasks},
      prefetch_batches=self.dataset.config.prefetch_batches,
    )

  def evaluation_batches(self) -> Iterator[EvaluationBatch]:
    """All rows of a plan that ends, in its order."""
    assert self.plan.num_steps is not None, "an evaluation ends"
    with self.open_stream() as stream:
      for step in range(self.plan.num_steps):
        planned = self.plan.batch(step)
        real = planned.task != PADDING_TASK
        examples, _ = stream.examples(planned)
        yield EvaluationBatch(examples, stream.convert(examples, real), real)

  def record(self, model_dir: epath.PathLike, step: int) -> None:
    """Writes the plan and where its caches are, for `anystep-data`; a plan that was given up is kept."""
    super().record(model_dir, step)
    roots = [root if "://" in root else os.path.abspath(root) for root in self.dataset.cache_dirs]
    caches = canonical_json({"version": 1, "cache_dirs": roots}, indent=1) + "\n"
    storage.put(epath.Path(model_dir) / DATA_CACHES, caches.encode())


def _open_cache(task: seqio.Task, roots: Sequence[str], config: DatasetConfig) -> Cache:
  try:
    cache = stream_lib.find_cache(roots, task.name, config.split)
  except AnystepError as error:
    if error.kind == "cache_missing":
      command = CacheCommand(tasks=(task.name,), cache_dir=roots[0], modules=config.modules)
      error.fix = f"{command}; or add --cache_if_missing"
    if error.kind == "split_missing":
      error.fix += "; where it is the evaluation's, --gin.EVAL_DATASET=None trains without one"
    raise
  cache.check_heads()
  check_reader(task, cache.manifest, cache=cache)
  origin = provenance_difference(task, cache.manifest)
  if origin:
    print(f"{task.name} {config.split} comes of another origin: {origin}", file=sys.stderr)
  check_lengths(task, config.task_feature_lengths)
  return cache


def _rates(named: NamedTasks) -> Mapping[str, Rate]:
  if named.rates is not None:
    return named.rates
  registered = named.registered
  assert registered is not None, "a mixture of caches has rates"
  if isinstance(registered, seqio.Task):
    return {registered.name: 1}
  try:
    with _cache_dirs_of_seqio(named.cache_dirs):
      return {task.name: registered.get_rate(task) for task in named.tasks.values()}
  except (ValueError, TypeError, KeyError, OSError, NotImplementedError) as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "rates",
      mixture=registered.name,
      expected="rates that are numbers, or functions of a task that need no more than its cache",
      got=one_line(error),
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
    "tasks": {name: without_transforms(dataclasses.asdict(plan.tasks[name])) for name in names},
    "segments": [{**dataclasses.asdict(segment), "reason": None} for segment in segments],
    "tombstones": [dataclasses.asdict(entry) for entry in plan.tombstones if entry.start_step < step],
  }


def _told_unknown(names: Sequence[str], still: Sequence[str]) -> str:
  """What is said of a plan that does not know some tasks' transforms, or even now cannot."""
  told = f"the plan does not say what examples of {', '.join(names)} go through after the cache: "
  if still:
    return told + f"of {', '.join(still)} it cannot, for nothing names that in every process"
  return told + "what they do now is taken for it, and recorded from now on"


def _with_known_transforms(plan: Plan, before: Plan, fix: str) -> Plan:
  """A plan with what the one before knows of transforms where it does not know itself.

  Raises:
    AnystepError: 76 `resume_contract` where both know and differ.
  """
  tasks = dict(plan.tasks)
  for name in plan.tasks.keys() & before.tasks.keys():
    known, now = before.tasks[name].transforms, plan.tasks[name].transforms
    if known is not None:
      field = f"tasks.{name}.transforms"
      check_same({field: known}, {field: now or known}, fix)
      tasks[name] = dataclasses.replace(tasks[name], transforms=known)
  return dataclasses.replace(plan, tasks=tasks)
