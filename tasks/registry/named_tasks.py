"""From a name to registered tasks and their rates; the only module that looks into SeqIO's registries."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import seqio

from anystep.errors import AnystepError, ExitCode, find_nearest, one_line
from anystep.plans.changes import Rate
from anystep.tasks.registry.mixture_files import is_mixture_text, read_mixture


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedTasks:
  """Registered tasks that a name stands for.

  Attributes:
    tasks: by name.
    cache_dirs: roots that the name itself gives, as a mixture of caches does; most names give none.
    rates: of the tasks, by name; or the registered mixture that computes them.
  """

  tasks: Mapping[str, seqio.Task]
  cache_dirs: tuple[str, ...] = ()
  rates: Mapping[str, Rate] | seqio.Mixture

  def compute_rates(self, cache_dirs: Sequence[str]) -> Mapping[str, Rate]:
    """Return the rates of the tasks, by name; 1 for a task.

    Args:
      cache_dirs: roots of caches, in which SeqIO's rate functions find how many examples a task has.

    Raises:
      AnystepError: 78 `rates` for a mixture's function that fails.
    """
    mixture = self.rates
    if not isinstance(mixture, seqio.Mixture):
      return mixture
    try:
      with _seqio_cache_dirs(cache_dirs):
        return {task.name: mixture.get_rate(task) for task in self.tasks.values()}
    except (ValueError, TypeError, KeyError, OSError, NotImplementedError) as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "rates",
        mixture=mixture.name,
        expected="rates that are numbers, or functions of a task that need no more than its cache",
        got=one_line(error),
        fix="give the mixture rates that are numbers",
      ) from error


def find_named_tasks(name: str | seqio.Task | seqio.Mixture, split: str, *, fix: str) -> NamedTasks:
  """Return the tasks of a name; of a registered mixture, those that have the split.

  Args:
    name: a registered task or mixture, or its name; or a mixture of caches, as `read_mixture` takes it.
    split: the split's name.
    fix: what to do about a name that is not registered.

  Raises:
    AnystepError: 64 `task_unknown`; 78 `split` where no task of a mixture has it; as `read_mixture`.
  """
  if isinstance(name, str) and is_mixture_text(name):
    mixture = read_mixture(name)
    tasks = {task: find_task(task, fix=fix) for task in mixture.rates}
    return NamedTasks(tasks=tasks, cache_dirs=mixture.roots, rates=mixture.rates)
  registered = find_registered(name, fix=fix) if isinstance(name, str) else name
  if isinstance(registered, seqio.Mixture):
    tasks = {task.name: task for task in _tasks_with_split(registered, split)}
    return NamedTasks(tasks=tasks, rates=registered)
  return NamedTasks(tasks={registered.name: registered}, rates={registered.name: 1})


def find_registered(name: str, *, fix: str) -> seqio.Task | seqio.Mixture:
  """Return the registered mixture or task of a name; the mixture where both have it, as in SeqIO.

  Raises:
    AnystepError: as `make_unknown_error`.
  """
  if name in seqio.MixtureRegistry.names():
    return seqio.MixtureRegistry.get(name)
  if name in seqio.TaskRegistry.names():
    return seqio.TaskRegistry.get(name)
  raise make_unknown_error(name, fix=fix)


def find_task(name: str, *, fix: str, expected: str = "a registered task") -> seqio.Task:
  """Return the registered task of a name.

  Raises:
    AnystepError: as `make_unknown_error`.
  """
  if name in seqio.TaskRegistry.names():
    return seqio.TaskRegistry.get(name)
  raise make_unknown_error(name, fix=fix, expected=expected)


def find_all_tasks(name: str, *, fix: str) -> list[seqio.Task]:
  """Return a registered task, or all tasks of a registered mixture in the order of their names.

  Raises:
    AnystepError: as `make_unknown_error`.
  """
  registered = find_registered(name, fix=fix)
  tasks = registered.tasks if isinstance(registered, seqio.Mixture) else [registered]
  return sorted(tasks, key=lambda task: task.name)


def match_names(pattern: str) -> set[str]:
  """Return names of registered tasks: those of the mixture of this name, else those that match as a whole.

  Args:
    pattern: a mixture's name, or a regular expression.

  Raises:
    re.error: for a pattern that is neither.
  """
  if pattern in seqio.MixtureRegistry.names():
    return {task.name for task in seqio.MixtureRegistry.get(pattern).tasks}
  expression = re.compile(pattern)
  return {name for name in seqio.TaskRegistry.names() if expression.fullmatch(name)}


def make_unknown_error(
  name: str, *, fix: str, expected: str = "a registered task or mixture"
) -> AnystepError:
  """Return the error 64 `task_unknown`, with the registered names that are nearest."""
  registered_names = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  return AnystepError(
    ExitCode.USAGE,
    "task_unknown",
    expected=expected,
    got=name,
    nearest=find_nearest(name, registered_names) or "none is registered",
    fix=fix,
  )


def _tasks_with_split(mixture: seqio.Mixture, split: str) -> list[seqio.Task]:
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


@contextlib.contextmanager
def _seqio_cache_dirs(cache_dirs: Sequence[str]) -> Iterator[None]:
  """Let SeqIO look for caches in these roots alone."""
  before = list(seqio.utils.get_global_cache_dirs())
  seqio.set_global_cache_dirs(list(cache_dirs))
  try:
    yield
  finally:
    seqio.set_global_cache_dirs(before)
