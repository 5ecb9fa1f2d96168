"""A registered task or mixture, from its caches, as a stream of model features."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import seqio
from etils import epath

from anystep.caches.cache import Cache
from anystep.errors import AnystepError
from anystep.features.converter_names import converter_to_json
from anystep.features.converters import FeatureConverter
from anystep.files import storage
from anystep.files.json_files import canonical_json
from anystep.files.names import DATA_CACHES, DATA_CONVERTER
from anystep.inspection.read_lengths import ReadLengths, count_read_lengths
from anystep.order.packing import PackingPolicy
from anystep.plans.plan import PADDING_TASK, Plan
from anystep.plans.planned_task import without_transforms
from anystep.streams.stream import Stream
from anystep.tasks.reading.cached_tasks import CachedTasks
from anystep.tasks.registry.fingerprint import provenance_difference
from anystep.tasks.registry.named_tasks import NamedTasks
from anystep.tasks.registry.task_caches import open_task_cache
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.configured_caches import complete_fix, read_configured_plan
from anystep.train.datasets.configured_tasks import check_lengths, find_configured_tasks, find_planned_task
from anystep.train.datasets.data_state import DataState, check_same, record_state, require_plan
from anystep.train.datasets.run_data import EvaluationBatch


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A task, or the tasks of a mixture, with their caches, found and checked: a `RunDataset`.

  Attributes:
    config: the configuration.
    cached: the tasks, their caches and rates.
    cache_dirs: the roots that the caches were found in.
  """

  config: DatasetConfig
  cached: CachedTasks
  cache_dirs: tuple[str, ...]

  @classmethod
  def open(cls, config: DatasetConfig) -> Dataset:
    """Find the tasks that a configuration names, and their caches.

    Raises:
      AnystepError: as `find_configured_tasks` and `of_named`.
    """
    return cls.of_named(find_configured_tasks(config), config)

  @classmethod
  def of_named(cls, named: NamedTasks, config: DatasetConfig) -> Dataset:
    """Find the caches of tasks that were found, in the cache directories that stand with them.

    Raises:
      AnystepError: 66 `cache_missing` with the command that makes it; 78 `rates`, `feature_length`; as
        `open_task_cache`.
    """
    cached = CachedTasks.open(
      named,
      named.cache_dirs,
      sequence_length=config.task_feature_lengths,
      open_cache=lambda task: _open_cache(task, named.cache_dirs, config),
    )
    return cls(config, cached, named.cache_dirs)

  @property
  def tasks(self) -> Mapping[str, seqio.Task]:
    """Registered tasks, by name."""
    return self.cached.tasks

  def including(self, names: Iterable[str]) -> Dataset:
    """Return the dataset with tasks that a plan has and the mixture no longer has.

    Raises:
      AnystepError: as `of_named`.
    """
    new = {name: find_planned_task(name) for name in names if name not in self.tasks}
    caches = {name: _open_cache(task, self.cache_dirs, self.config) for name, task in new.items()}
    cached = dataclasses.replace(
      self.cached, tasks={**self.tasks, **new}, caches={**self.cached.caches, **caches}
    )
    return dataclasses.replace(self, cached=cached)

  def start_plan(self) -> Plan:
    """Return the plan of a run that starts at step 0 and whose data does not change.

    Raises:
      AnystepError: as `CachedTasks.start_plan`.
    """
    return self.cached.start_plan(
      batch_size=self.config.batch_size,
      seed=self.config.seed,
      num_epochs=self.config.num_epochs,
      epoch_policy=self.config.epoch_policy,
      packing=self.config.packing,
    )

  def run_order(self, checkpointed: tuple[int, DataState] | None = None) -> PlannedOrder:
    """Return the dataset with the plan to train by: the file's, else the checkpoint's, else that of a start.

    Args:
      checkpointed: a checkpoint's step and plan, whose steps are past.

    Raises:
      AnystepError: 76 `resume_contract` where the checkpoint's data before its step, or what the
        configuration says of the data, is not the plan's; 66 `plan_missing`; 65 `plan_invalid`.
    """
    if checkpointed is None:
      return PlannedOrder(self, self._configured_plan())
    step, state = checkpointed
    before = require_plan(state)
    if self.config.plan is None:
      fix = (
        "run with the configuration and cache that training started with, or in another MODEL_DIR; or change"
        " the data from a later step on with anystep-data plan change, and name its output as DATA_PLAN"
      )
      check_same({**_describe_past(before, 1), "tombstones": []}, _describe_past(self.start_plan(), 1), fix)
      return PlannedOrder(self, before)
    plan = self._configured_plan()
    fix = "change the plan from a step on that is not yet trained, or train in another MODEL_DIR"
    check_same(_describe_past(before, step), _describe_past(plan, step), fix)
    return PlannedOrder(self, _keep_known_transforms(plan, before, fix))

  def _configured_plan(self) -> Plan:
    """Return the plan of DATA_PLAN, which must agree with the configuration; without one, that of a start."""
    started = self.start_plan()
    if self.config.plan is None:
      return started
    plan = read_configured_plan(self.config.plan)
    check_same(
      _list_terms(started), _list_terms(plan), "change the configuration or DATA_PLAN: they disagree"
    )
    return plan


@dataclasses.dataclass(frozen=True)
class PlannedOrder:
  """A dataset with the plan that a run trains by: a `RunOrder`."""

  dataset: Dataset
  state: Plan

  def open(self, converter: FeatureConverter) -> PlannedDataset:
    """Return the dataset in the order of the plan, after reading the first row.

    Raises:
      AnystepError: 78 as `TaskReader` and the converter; 65 where the cache's files are not what was written.
    """
    dataset = self.dataset.including(self.state.tasks)
    plan = self.state.on_caches(dataset.cached.caches, dataset.cached.readers)
    planned = PlannedDataset(dataset, plan, converter)
    if self.state.unknown_transforms:
      print(
        _format_unknown_transforms(self.state.unknown_transforms, plan.unknown_transforms), file=sys.stderr
      )
    with planned.open_stream([0]) as stream:
      stream.batch(0)
    return planned


@dataclasses.dataclass(frozen=True)
class PlannedDataset:
  """A dataset in the order of a plan, in the form that a converter gives it: a `RunData`."""

  dataset: Dataset
  plan: Plan
  converter: FeatureConverter

  @property
  def state(self) -> Plan:
    """The plan."""
    return self.plan

  @property
  def batch_sizes(self) -> list[int]:
    """Batch sizes of the plan's segments, in order."""
    return [segment.batch_size for segment in self.plan.segments]

  @property
  def num_examples(self) -> int:
    """Units of an epoch, of which each is an example where rows are not packed."""
    return sum(task.num_units for task in self.plan.tasks.values())

  def count_cuts(self) -> list[ReadLengths]:
    """Count, task by task, what the lengths of rows cut of the examples; of large caches in a sample."""
    cached = self.dataset.cached
    return [
      count_read_lengths(
        cached.caches[name],
        cached.readers[name],
        feature_lengths=self.plan.feature_lengths,
        converter=self.converter,
        packing=PackingPolicy(self.plan.packing),
      )
      for name in self.plan.task_names
    ]

  @property
  def caveat(self) -> None:
    """Nothing: a plan guarantees all."""
    return None

  def open_stream(self, rows: slice | Iterable[int] | tuple[int, int] = (0, 1)) -> Stream:
    """Open the plan's batches, from step 0 on; rows as `anystep.open_stream` takes them."""
    return self.dataset.cached.open_stream(
      self.plan,
      rows,
      feature_converter=self.converter,
      prefetch_batches=self.dataset.config.prefetch_batches,
    )

  def evaluation_batches(self) -> Iterator[EvaluationBatch]:
    """Yield all rows of a plan that ends, in its order."""
    assert self.plan.num_steps is not None, "an evaluation ends"
    with self.open_stream() as stream:
      for step in range(self.plan.num_steps):
        planned = self.plan.batch(step)
        real = planned.task != PADDING_TASK
        examples, _ = stream.examples(planned)
        yield EvaluationBatch(examples, stream.convert(examples, real), real)

  def record(self, model_dir: epath.PathLike, step: int) -> None:
    """Write what `anystep-data` goes by: the plan, where its caches are, and the model's converter.

    A plan that was given up is kept.
    """
    record_state(model_dir, self.plan, step)
    roots = [root if "://" in root else os.path.abspath(root) for root in self.dataset.cache_dirs]
    caches = canonical_json({"version": 1, "cache_dirs": roots}, indent=1) + "\n"
    storage.put(epath.Path(model_dir) / DATA_CACHES, caches.encode())
    converter = canonical_json(converter_to_json(self.converter), indent=1) + "\n"
    storage.put(epath.Path(model_dir) / DATA_CONVERTER, converter.encode())


def _open_cache(task: seqio.Task, roots: Sequence[str], config: DatasetConfig) -> Cache:
  try:
    cache = open_task_cache(task, config.split, roots)
  except AnystepError as error:
    complete_fix(error, task.name, roots, config)
    raise
  cache.check_heads()
  origin = provenance_difference(task, cache.manifest)
  if origin:
    print(f"{task.name} {config.split} comes of another origin: {origin}", file=sys.stderr)
  check_lengths(task, config.task_feature_lengths)
  return cache


def _list_terms(plan: Plan) -> dict[str, object]:
  """Return what a plan and a configuration both say and no change of a plan changes."""
  names = ("split", "seed", "num_epochs", "feature_lengths", "epoch_policy", "packing", "rate_unit")
  return {name: getattr(plan, name) for name in names}


def _describe_past(plan: Plan, step: int) -> dict[str, object]:
  """Return what decided the batches before a step."""
  segments = [s for s in plan.segments if s.start_step < step]
  names = sorted({name for segment in segments for name in segment.tasks})
  return {
    **_list_terms(plan),
    "tasks": {name: without_transforms(dataclasses.asdict(plan.tasks[name])) for name in names},
    "segments": [{**dataclasses.asdict(segment), "reason": None} for segment in segments],
    "tombstones": [dataclasses.asdict(entry) for entry in plan.tombstones if entry.start_step < step],
  }


def _format_unknown_transforms(names: Sequence[str], still: Sequence[str]) -> str:
  """Return a line about a plan that does not know some tasks' transforms, and never can those in `still`."""
  text = f"the plan does not say what examples of {', '.join(names)} go through after the cache: "
  if still:
    return text + f"of {', '.join(still)} it cannot, for nothing names that in every process"
  return text + "what they do now is taken for it, and recorded from now on"


def _keep_known_transforms(plan: Plan, before: Plan, fix: str) -> Plan:
  """Return a plan with the transforms that it does not know and the plan before it does.

  Raises:
    AnystepError: 76 `resume_contract` where both know and differ.
  """
  tasks = dict(plan.tasks)
  for name in plan.tasks.keys() & before.tasks.keys():
    recorded, now = before.tasks[name].transforms, plan.tasks[name].transforms
    if recorded is not None:
      field = f"tasks.{name}.transforms"
      check_same({field: recorded}, {field: now or recorded}, fix)
      tasks[name] = dataclasses.replace(tasks[name], transforms=recorded)
  return dataclasses.replace(plan, tasks=tasks)
