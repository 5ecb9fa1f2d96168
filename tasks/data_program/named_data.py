"""The data that `anystep-data` is asked about: caches, a plan's file, or a model directory."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from anystep.caches.cache import Cache, read_completed
from anystep.caches.manifest import AS_IS
from anystep.errors import AnystepError, ExitCode
from anystep.features.converter_names import CONVERTERS
from anystep.features.converters import FeatureConverter
from anystep.files import names, storage
from anystep.inspection.model_directory import read_converter, read_model_dir, read_plan
from anystep.order.packing import PackingPolicy
from anystep.plans.changes import Rate
from anystep.plans.plan import Plan
from anystep.streams.stream import find_cache
from anystep.tasks.data_program.arguments import find_rates, join_values, unknown_task_error, usage_error
from anystep.tasks.registry.modules import registered_tasks
from anystep.transforms.transform import Transform, transforms_sha256

# Flags that decide the order of a cache's rows, where no plan says it.
_ORDER_FLAGS = (
  *("split", "rates", "batch_size", "seed", "num_epochs", "epoch_policy", "lanes", "rate_unit"),
  "packing",
)

AFTER_CACHE_UNKNOWN = "to know which preprocessors follow the cache, add --module_import=MODULE_OF_THE_TASK"
"""Reason why nothing is said of what a model gets, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedData:
  """Data that the command line names.

  Attributes:
    plan: the plan; None where it names caches and no batch size.
    roots: where caches are looked for.
    trained_steps: steps of the plan done at a model directory's newest checkpoint; None without a model
      directory.
    first_step: the model's step at the plan's step 0.
    caches: of the plan's tasks, or of the tasks that are meant; none before they are opened.
    tasks: names of the tasks that are meant, which may be fewer than the plan's.
    transforms: what examples of each cache go through after it, where it was found to start the plan.
  """

  plan: Plan | None
  roots: Sequence[str]
  trained_steps: int | None
  first_step: int = 0
  caches: Sequence[Cache] = ()
  tasks: Sequence[str] = ()
  transforms: Sequence[Transform] | None = None

  @property
  def known_plan(self) -> Plan:
    """The plan, of data that has one."""
    assert self.plan is not None, "needs_plan"
    return self.plan

  @property
  def by_task(self) -> dict[str, Cache]:
    """Caches of one split, by task name."""
    return {cache.manifest.task: cache for cache in self.caches}

  @property
  def known_steps(self) -> range | None:
    """All steps: to the data's end, else those trained; None if neither is known."""
    ends = [self.plan.num_steps if self.plan else None, self.trained_steps]
    return next((range(end) for end in ends if end), None)

  def find_steps(self, arguments: argparse.Namespace) -> range | None:
    """Return the steps of the plan that the flags of `add_steps_flag` name; None if they name none.

    Raises:
      AnystepError: 64 `arguments` for steps of a model where no run is named, or before its first.
    """
    steps = arguments.model_steps
    if steps is None:
      return arguments.steps
    if self.trained_steps is None:
      raise usage_error("--model_steps without --model_dir", "add the directory of the run, or give --steps")
    if steps.start < self.first_step:
      got = f"--model_steps={steps.start}:{steps.stop} of a run that began at step {self.first_step}"
      raise usage_error(got, f"begin at {self.first_step} or later, which is --steps=0:…")
    return range(steps.start - self.first_step, steps.stop - self.first_step)

  def describe_step(self, step: int) -> str:
    """Return a step of the plan for people, with the model's where that is another."""
    return f"step {step}" + (f" (model step {step + self.first_step})" if self.first_step else "")

  def name_step(self, step: int) -> dict[str, int]:
    """Return the fields of a row that say its step: the plan's, and the model's where that is another."""
    return {"step": step, **({"model_step": step + self.first_step} if self.first_step else {})}

  @property
  def meant_caches(self) -> list[Cache]:
    """Caches of the tasks that are meant."""
    return [cache for cache in self.caches if cache.manifest.task in self.tasks]

  def require_one_task(self) -> str:
    """Return the only task that is meant.

    Raises:
      AnystepError: 64 `arguments` where there are several.
    """
    if len(self.tasks) != 1:
      raise usage_error(f"{len(self.tasks)} tasks: {', '.join(self.tasks)}", "add --task=NAME, one of them")
    return self.tasks[0]


def find_named_plan(arguments: argparse.Namespace) -> NamedData | None:
  """Return the plan that the command line names; None if it names none. No cache is opened.

  Raises:
    AnystepError: 64 `arguments`; 66 `plan_missing`; 65 `plan_invalid`, `caches_invalid`.
  """
  path, model_dir = (getattr(arguments, name, None) for name in ("plan", "model_dir"))
  if path is not None and model_dir is not None:
    raise usage_error("--plan and --model_dir", "name one of them")
  roots = join_values(getattr(arguments, "cache_dir", None))
  if path is not None:
    return NamedData(plan=read_plan(path), roots=roots, trained_steps=None)
  if model_dir is not None:
    recorded = read_model_dir(model_dir)
    return NamedData(
      plan=recorded.plan,
      # Roots on the command line may lack the caches of the run's other tasks.
      roots=join_values([roots, [*recorded.roots]]),
      trained_steps=recorded.trained_steps,
      first_step=recorded.first_step,
    )
  return None


def find_plan(arguments: argparse.Namespace, *, needs_plan: bool = True) -> NamedData:
  """Return the plan that the command line names or describes; for a named plan no cache is opened.

  Args:
    arguments: values of the flags that `anystep.tasks.data_program.arguments` adds, or of some.
    needs_plan: whether a plan is required; else caches suffice, all below the root if no task is named.

  Raises:
    AnystepError: 64 `arguments`, `task_unknown`; 66 `plan_missing`; 65 `plan_invalid`, `caches_invalid`; of
      caches also as `open_cache` and `Plan.start`.
  """
  data = find_named_plan(arguments)
  if data is None:
    return _find_in_caches(arguments, needs_plan)
  # Lengths for counts of tokens go with any plan.
  flags = [*_ORDER_FLAGS, "feature_lengths"] if needs_plan else _ORDER_FLAGS
  clash = [f"--{name}" for name in flags if getattr(arguments, name, None) is not None]
  if clash:
    raise usage_error(f"a plan and {', '.join(clash)}", f"leave out {', '.join(clash)}: the plan says it")
  tasks = join_values(arguments.task)
  for task in tasks:
    if task not in data.known_plan.tasks:
      raise unknown_task_error(task, data.known_plan.tasks)
  return dataclasses.replace(data, tasks=tasks or data.known_plan.task_names)


def find_data(arguments: argparse.Namespace, *, needs_plan: bool = True) -> NamedData:
  """Return what the command line names with its caches opened; arguments are those of `find_plan`.

  Raises:
    AnystepError: as `find_plan`; 76 `plan_cache` for caches that the plan was not made for.
  """
  data = find_plan(arguments, needs_plan=needs_plan)
  return data if data.plan is None or data.caches else open_caches(data)


def open_caches(data: NamedData) -> NamedData:
  """Return a named plan with its caches opened.

  Raises:
    AnystepError: 64 `arguments` where nothing says where they are; as `open_cache` and `Plan.on_caches`.
  """
  plan = data.known_plan
  if not data.roots:
    raise usage_error("no --cache_dir", "add --cache_dir=ROOT, where the caches of the plan's tasks are")
  caches = {name: find_cache(data.roots, name, plan.split) for name in plan.task_names}
  return dataclasses.replace(data, plan=plan.on_caches(caches), caches=tuple(caches.values()))


def find_order(arguments: argparse.Namespace) -> Plan:
  """Return the plan that the command line names or describes, ready to locate units.

  Raises:
    AnystepError: as `find_data`.
  """
  data = find_plan(arguments)
  tasks = data.known_plan.tasks.values()
  if not data.caches and any(task.layout == AS_IS or task.unit_table for task in tasks):
    data = find_data(arguments)
  return data.known_plan


def list_cached_tasks(roots: Iterable[str]) -> list[str]:
  """Return names of all tasks that have a complete cache below some roots."""
  tasks: set[str] = set()
  pending: list[tuple[epath.Path, tuple[str, ...], tuple[str, ...]]]
  pending = [(epath.Path(root), (), ()) for root in roots]
  while pending:
    directory, parts, above = pending.pop()
    # A link may lead back up. A store has no links: there this changes nothing.
    real_path = storage.find_real(directory)
    if real_path in above:
      continue
    try:
      entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
      continue
    if parts and any(entry.name == names.COMPLETED for entry in entries):
      tasks.add(":".join(parts))
    # On a store each `is_dir` is a request: do not make it for a cache's files.
    folders = [entry for entry in entries if _is_task_part(entry.name) and "-of-" not in entry.name]
    pending += [(entry, (*parts, entry.name), (*above, real_path)) for entry in folders if entry.is_dir()]
  return sorted(tasks, key=str.encode)


def open_named_cache(roots: Sequence[str], task: str, split: str) -> Cache:
  """Open the cache of a task that the command line names.

  Raises:
    AnystepError: as `find_cache`, and 64 `task_unknown` where there are caches, but none of it.
  """
  try:
    return find_cache(roots, task, split)
  except AnystepError as error:
    if error.kind != "cache_missing" or not (existing := list_cached_tasks(roots)):
      raise
    raise unknown_task_error(task, existing, f"correct the name, or make its cache: {error.fix}") from error


def _find_in_caches(arguments: argparse.Namespace, needs_plan: bool) -> NamedData:
  roots = join_values(arguments.cache_dir)
  if not roots:
    raise usage_error(
      "no data",
      "add --cache_dir=ROOT and --task=NAME, or --plan=FILE and --cache_dir=ROOT, or --model_dir=DIR",
    )
  rates = find_rates(arguments, roots, arguments.split or "train")
  task_names = join_values(arguments.task)
  for task in task_names if rates else ():
    if task not in (rates or ()):
      raise unknown_task_error(task, rates or ())
  if getattr(arguments, "batch_size", None) is not None:
    return _start_plan(arguments, roots, rates, task_names)
  order = [f"--{name}" for name in _ORDER_FLAGS[1:] if getattr(arguments, name, None) is not None]
  if order or needs_plan:
    got = f"{', '.join(order) or 'caches'} without --batch_size"
    raise usage_error(got, "add --batch_size, or name a plan with --plan or --model_dir")
  tasks = task_names or list_cached_tasks(roots)
  if not tasks:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "cache_missing",
      path=", ".join(roots),
      expected="the caches of some tasks",
      fix="name the directory that anystep-cache wrote to as --output_cache_dir",
    )
  caches = [
    open_named_cache(roots, task, split)
    for task in tasks
    for split in ([arguments.split] if arguments.split else _list_splits(roots, task))
  ]
  return NamedData(plan=None, roots=roots, trained_steps=None, caches=caches, tasks=tasks)


def _start_plan(
  arguments: argparse.Namespace,
  roots: Sequence[str],
  rates: dict[str, Rate] | None,
  task_names: Sequence[str],
) -> NamedData:
  """Return the plan that flags describe, on its caches."""
  if not (rates or task_names):
    raise usage_error("no --task", "add --task=NAME, or --rates=A=1,B=2 for a mixture")
  caches = [open_named_cache(roots, task, arguments.split or "train") for task in rates or task_names]
  lengths = arguments.feature_lengths or {}
  transforms = make_task_readers(arguments.module_import, caches, lengths)
  plan = Plan.start(
    caches,
    rates=rates,
    batch_size=arguments.batch_size,
    feature_lengths=lengths,
    seed=0 if arguments.seed is None else arguments.seed,
    rate_unit=arguments.rate_unit or "examples",
    packing=arguments.packing or PackingPolicy.NONE,
    transforms=transforms_by_name(caches, transforms),
    **{name: getattr(arguments, name) for name in ("num_epochs", "epoch_policy", "lanes")},
  )
  return NamedData(
    plan=plan,
    roots=roots,
    trained_steps=None,
    caches=caches,
    tasks=task_names or plan.task_names,
    transforms=transforms,
  )


def make_task_readers(
  modules: Sequence[str], caches: Sequence[Cache], feature_lengths: Mapping[str, int]
) -> list[Transform] | None:
  """Return the preprocessors after each cache; None, for unknown, if no modules are named.

  Raises:
    AnystepError: as `registered_tasks` and `TaskReader`.
  """
  if not (modules and caches):
    return None
  tasks = registered_tasks(modules, caches)
  from anystep.tasks.reading.task_reader import TaskReader

  return [TaskReader(tasks[cache.manifest.task], cache, feature_lengths) for cache in caches]


def transforms_by_name(
  caches: Sequence[Cache], transforms: Sequence[Transform | None] | None
) -> dict[str, Transform] | None:
  """Return the transforms of caches of one split by task name; None where they are not known."""
  if transforms is None:
    return None
  names = [cache.manifest.task for cache in caches]
  return {name: transform for name, transform in zip(names, transforms, strict=True) if transform is not None}


def find_transforms(
  data: NamedData, modules: Sequence[str], feature_lengths: Mapping[str, int]
) -> Sequence[Transform | None] | None:
  """Return what examples of each of the data's caches go through after it; None where that is not known.

  It is known without the tasks' modules where everything ran before the cache, or the plan says that nothing
  comes after it.

  Raises:
    AnystepError: as `make_task_readers`.
  """
  if data.transforms is not None:
    return data.transforms
  if modules:
    return make_task_readers(modules, data.caches, feature_lengths)
  return [None] * len(data.caches) if all(_ends_at_cache(data, cache) for cache in data.caches) else None


def _ends_at_cache(data: NamedData, cache: Cache) -> bool:
  m = cache.manifest
  planned = data.plan.tasks.get(m.task) if data.plan else None
  return m.cache_at == "end" or (
    planned is not None and planned.transforms == transforms_sha256(None, task=m.task)
  )


def find_converter(arguments: argparse.Namespace) -> tuple[FeatureConverter | None, str]:
  """Return the feature converter of the model that the command line names; where none is known, None and why.

  Raises:
    AnystepError: 65 `converter_invalid`.
  """
  if arguments.model is not None:
    return CONVERTERS[arguments.model](), ""
  if getattr(arguments, "model_dir", None) is None:
    return None, "add --model=NAME, or name a run with --model_dir"
  recorded = read_converter(arguments.model_dir)
  return recorded.converter, f"{recorded.problem}: add --model=NAME" if recorded.problem else ""


def _is_task_part(name: str) -> bool:
  try:
    names.task_directory("", name)
  except AnystepError:
    return False
  return True


def _list_splits(roots: Sequence[str], task: str) -> list[str]:
  for root in roots:
    splits = sorted(read_completed(names.task_directory(root, task)))
    if splits:
      return splits
  # `open_cache` reports a cache that is not there.
  return ["train"]
