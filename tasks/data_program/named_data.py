"""The data that `anystep-data` is asked about: caches, a plan's file, or a model directory."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from anystep.caches.cache import Cache, read_completed
from anystep.caches.manifest import AS_IS
from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files import names
from anystep.files.json_files import MALFORMED, read_json
from anystep.limits import is_name
from anystep.order.packing import PackingPolicy
from anystep.plans.plan import Plan
from anystep.streams.stream import find_cache
from anystep.tasks.data_program.arguments import join_rates, join_values, unknown_task_error, usage_error
from anystep.tasks.registry.modules import registered_tasks
from anystep.transforms.transform import Transform

# Flags that decide the order of a cache's rows, where no plan says it.
_ORDER_FLAGS = (
  *("split", "rates", "batch_size", "seed", "num_epochs", "epoch_policy", "lanes", "rate_unit"),
  "packing",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedData:
  """Data that the command line names.

  Attributes:
    plan: the plan; None where it names caches and no batch size.
    roots: where caches are looked for.
    trained_steps: step of a model directory's newest checkpoint; None without a model directory.
    caches: of the plan's tasks, or of the tasks that are meant; none before they are opened.
    tasks: names of the tasks that are meant, which may be fewer than the plan's.
  """

  plan: Plan | None
  roots: Sequence[str]
  trained_steps: int | None
  caches: Sequence[Cache] = ()
  tasks: Sequence[str] = ()

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
    return NamedData(plan=_read_plan(epath.Path(path)), roots=roots, trained_steps=None)
  if model_dir is not None:
    data = read_model_dir(model_dir)
    # Roots on the command line may lack the caches of the run's other tasks.
    return dataclasses.replace(data, roots=join_values([roots, [*data.roots]]))
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


def read_plan_or_model_dir(path: str) -> Plan:
  """Read the plan of a file, or of a model directory.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`.
  """
  if epath.Path(path).is_dir():
    return read_model_dir(path).known_plan
  return _read_plan(epath.Path(path))


def read_model_dir(path: str) -> NamedData:
  """Read a run's plan, or else its newest checkpoint's, the roots of its caches and that checkpoint's step.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`, `caches_invalid`.
  """
  directory = epath.Path(path)
  entries = list(directory.iterdir()) if directory.is_dir() else []
  committed = [entry for entry in entries if (entry / names.COMMIT_SUCCESS).exists()]
  steps = [step for entry in committed if (step := names.checkpoint_step(entry.name)) is not None]
  directories = [directory, *(directory / names.checkpoint_name(step) for step in sorted(steps)[-1:])]
  paths = [other / names.DATA_PLAN for other in directories]
  plan_path = next((path for path in paths if path.exists()), paths[0])
  if not plan_path.exists() and (directory / names.DATA_UNCACHED).exists():
    raise AnystepError(
      ExitCode.NO_INPUT,
      "plan_missing",
      path=plan_path,
      expected="a run by a plan",
      got="one straight from its source, USE_CACHED_TASKS = False",
      fix="cache the task to know what a step saw: no plan says it of this run",
    )
  plan = _read_plan(plan_path)
  caches = directory / names.DATA_CACHES
  roots = _read_roots(caches) if caches.exists() else []
  return NamedData(plan=plan, roots=roots, trained_steps=max(steps, default=0), tasks=plan.task_names)


def list_cached_tasks(roots: Iterable[str]) -> list[str]:
  """Return names of all tasks that have a complete cache below some roots."""
  tasks: set[str] = set()
  pending: list[tuple[epath.Path, tuple[str, ...], tuple[str, ...]]]
  pending = [(epath.Path(root), (), ()) for root in roots]
  while pending:
    directory, parts, above = pending.pop()
    # A link may lead back up. A store has no links: there this changes nothing.
    real_path = os.path.realpath(directory)
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
  rates, task_names = join_rates(arguments), join_values(arguments.task)
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
  arguments: argparse.Namespace, roots: Sequence[str], rates: dict[str, str] | None, task_names: Sequence[str]
) -> NamedData:
  """Return the plan that flags describe, on its caches."""
  if not (rates or task_names):
    raise usage_error("no --task", "add --task=NAME, or --rates=A=1,B=2 for a mixture")
  caches = [open_named_cache(roots, task, arguments.split or "train") for task in rates or task_names]
  lengths = arguments.feature_lengths or {}
  plan = Plan.start(
    caches,
    rates=rates,
    batch_size=arguments.batch_size,
    feature_lengths=lengths,
    seed=0 if arguments.seed is None else arguments.seed,
    rate_unit=arguments.rate_unit or "examples",
    packing=arguments.packing or PackingPolicy.NONE,
    transforms=make_task_readers(arguments.module_import, caches, lengths),
    **{name: getattr(arguments, name) for name in ("num_epochs", "epoch_policy", "lanes")},
  )
  return NamedData(
    plan=plan, roots=roots, trained_steps=None, caches=caches, tasks=task_names or plan.task_names
  )


def make_task_readers(
  modules: Sequence[str], caches: Sequence[Cache], feature_lengths: Mapping[str, int]
) -> Mapping[str, Transform] | None:
  """Return the preprocessors after the cache, by task; None, for unknown, if no modules are named.

  Raises:
    AnystepError: as `registered_tasks` and `TaskReader`.
  """
  if not (modules and caches):
    return None
  tasks = registered_tasks(modules, caches)
  from anystep.tasks.reading.cached_tasks import make_readers

  return make_readers(tasks, caches, feature_lengths)


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


def _read_plan(path: epath.Path) -> Plan:
  fix = "give --plan a file of anystep-data plan, or --model_dir the directory of a run that has started"
  return Plan.read(path, fix=fix)


def _read_roots(path: epath.Path) -> list[str]:
  try:
    document = read_json(path)
    if document.keys() != {"version", "cache_dirs"} or document["version"] != 1:
      raise ValueError("no version 1")
    roots = document["cache_dirs"]
    if not (isinstance(roots, list) and all(map(is_name, roots))):
      raise ValueError("cache_dirs is no list of names")
  except (*MALFORMED, IsADirectoryError) as error:
    expected = '{"version": 1, "cache_dirs": ["ROOT"]}'
    fix = "say where the caches are with --cache_dir"
    raise make_file_error("caches_invalid", error, path=path, expected=expected, fix=fix) from error
  return roots
