"""Which tasks a command line names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from anystep.errors import AnystepError, ExitCode, nearest

if TYPE_CHECKING:
  import seqio


def select_tasks(included: Sequence[str], excluded: Sequence[str]) -> list[str]:
  """Registered tasks that an included pattern names and no excluded one.

  A pattern is a mixture's name, which stands for its tasks, or a regular expression of whole task names.

  Raises:
    AnystepError: 64 `task_unknown` where a pattern is none or matches none, or nothing is left.
  """
  chosen: set[str] = set()
  for pattern in included:
    matched = _named(pattern)
    if not matched:
      raise _unknown(pattern, "a registered task or mixture")
    chosen |= matched
  for pattern in excluded:
    chosen -= _named(pattern)
  if not chosen:
    raise _unknown(",".join(included), "a task that --excluded_tasks leaves")
  return sorted(chosen)


def check_splits(splits: Sequence[str], tasks: Collection[seqio.Task]) -> None:
  """Refuses splits that no selected task has.

  Raises:
    AnystepError: 64 `split_unknown`; as `splits_of`.
  """
  from anystep.tasks.sources.tfds_source import splits_of

  known = sorted({split for task in tasks for split in splits_of(task)})
  for split in splits:
    if split not in known:
      raise AnystepError(
        ExitCode.USAGE,
        "split_unknown",
        expected="a split of a selected task",
        got=split,
        nearest=nearest(split, known),
        fix="correct --splits",
      )


def _named(pattern: str) -> set[str]:
  import seqio

  if pattern in seqio.MixtureRegistry.names():
    return {task.name for task in seqio.MixtureRegistry.get(pattern).tasks}
  try:
    expression = re.compile(pattern)
  except re.error as error:
    raise _unknown(pattern, f"a regular expression ({error})") from error
  return {name for name in seqio.TaskRegistry.names() if expression.fullmatch(name)}


def _unknown(pattern: str, expected: str) -> AnystepError:
  import seqio

  registered = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
  return AnystepError(
    ExitCode.USAGE,
    "task_unknown",
    expected=expected,
    got=pattern,
    nearest=nearest(pattern, registered) or "none is registered",
    fix="correct --tasks, or name the module that registers it with --module_import",
  )
