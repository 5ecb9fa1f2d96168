"""Selection of tasks by a command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from anystep.errors import AnystepError, ExitCode, find_nearest

if TYPE_CHECKING:
  import seqio


def select_tasks(included: Sequence[str], excluded: Sequence[str]) -> list[str]:
  """Return registered tasks that an included pattern names and no excluded one.

  A pattern is a mixture's name, which stands for its tasks, or a regular expression of whole task names.

  Raises:
    AnystepError: 64 `task_unknown` where a pattern is none or matches none, or nothing is left.
  """
  chosen: set[str] = set()
  for pattern in included:
    matched = _match_tasks(pattern)
    if not matched:
      raise _make_unknown_error(pattern, "a registered task or mixture")
    chosen |= matched
  for pattern in excluded:
    chosen -= _match_tasks(pattern)
  if not chosen:
    raise _make_unknown_error(",".join(included), "a task that --excluded_tasks leaves")
  return sorted(chosen)


def check_splits(splits: Sequence[str], tasks: Collection[seqio.Task]) -> None:
  """Refuse splits that no selected task has.

  Raises:
    AnystepError: 64 `split_unknown`; as `list_splits`.
  """
  from anystep.tasks.sources.tfds_source import list_splits

  all_splits = sorted({split for task in tasks for split in list_splits(task)})
  for split in splits:
    if split not in all_splits:
      raise AnystepError(
        ExitCode.USAGE,
        "split_unknown",
        expected="a split of a selected task",
        got=split,
        nearest=find_nearest(split, all_splits),
        fix="name splits of the selected tasks with --splits",
      )


def _match_tasks(pattern: str) -> set[str]:
  from anystep.tasks.registry.named_tasks import match_names

  try:
    return match_names(pattern)
  except re.error as error:
    raise _make_unknown_error(pattern, f"a regular expression ({error})") from error


def _make_unknown_error(pattern: str, expected: str) -> AnystepError:
  from anystep.tasks.registry.named_tasks import make_unknown_error

  fix = "correct --tasks, or name the module that registers it with --module_import"
  return make_unknown_error(pattern, expected=expected, fix=fix)
