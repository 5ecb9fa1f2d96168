"""Command lines of `anystep-cache` that make the caches that a run lacks."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from anystep.caches.cache import read_completed
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import names
from anystep.files.json_files import MALFORMED, parse_json

# The version of the program's document (docs/caching.md, A dry run for programs).
_DOCUMENT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
  """The part of a dry run's document that decides whether its job is run.

  Attributes:
    lines: the dry run as text for people.
    cache_bytes: bytes of all caches that would be written, about; None where one of them is unknown.
  """

  lines: Sequence[str]
  cache_bytes: int | None

  @classmethod
  def from_document(cls, document: Any) -> DryRun:
    """Read the document.

    Raises:
      ValueError, KeyError, TypeError: for another document, or another version of it.
    """
    if document["version"] != _DOCUMENT_VERSION:
      raise ValueError(f"version {document['version']}")
    splits = [split for task in document["tasks"] for split in task["splits"]]
    sizes = [split["cache_bytes"] for split in splits if split["action"] != "keep"]
    return cls(lines=document["lines"], cache_bytes=None if None in sizes else sum(sizes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCommand:
  """A command line of `anystep-cache`; its text is what one would type.

  Attributes:
    tasks: their names.
    cache_dir: the root.
    modules: which register the tasks.
    splits: those to cache; all of a task where none are named.
    index_only: whether the tasks' files are described where they are.
  """

  tasks: tuple[str, ...]
  cache_dir: str
  modules: tuple[str, ...] = ()
  splits: tuple[str, ...] = ()
  index_only: bool = False

  @property
  def arguments(self) -> list[str]:
    """The program's flags."""
    return [
      # The program takes regular expressions.
      f"--tasks={','.join(map(re.escape, self.tasks))}",
      f"--output_cache_dir={self.cache_dir}",
      *(f"--module_import={module}" for module in self.modules),
      *([f"--splits={','.join(self.splits)}"] if self.splits else []),
      *(["--index_only"] if self.index_only else []),
    ]

  def __str__(self) -> str:
    return " ".join(["anystep-cache", *map(shlex.quote, self.arguments)])

  def run(self) -> None:
    """Run the program, which prints its progress on this one's stdout and stderr.

    Raises:
      AnystepError: with its exit status, `cache_program`; 78 `module_missing`, `package_missing`.
    """
    self._run([])

  def dry_run(self) -> DryRun:
    """Ask the program what it would do.

    Raises:
      AnystepError: as `run`; 74 `cache_program` for an answer that is no document of its dry run.
    """
    text = self._run(["--format=json", "--dry_run"], stdout=subprocess.PIPE)
    try:
      return DryRun.from_document(parse_json(text))
    except MALFORMED as error:
      raise AnystepError(
        ExitCode.IO,
        "cache_program",
        command=self,
        expected=f"a dry run as a document of version {_DOCUMENT_VERSION}",
        got=one_line(error),
        fix="install one version of anystep for all programs, and run the same command again",
      ) from error

  def _run(self, flags: Sequence[str], stdout: int | None = None) -> str:
    self._check()
    sys.stdout.flush()
    # As its console script runs it: the current directory comes in by its own doing.
    program = [sys.executable, "-P", "-m", "anystep.cache_job"]
    done = subprocess.run([*program, *self.arguments, *flags], stdout=stdout, text=True, check=False)
    if done.returncode:
      status = done.returncode
      raise AnystepError(
        ExitCode(status) if status in list(ExitCode) else ExitCode.IO,
        "cache_program",
        command=self,
        got=f"exit status {status}",
        fix="see what it says above; where it was killed, run the same command again",
      )
    return done.stdout or ""

  def _check(self) -> None:
    if not self.modules:
      raise AnystepError(
        ExitCode.CONFIG,
        "module_missing",
        expected=f"the module that registers {', '.join(self.tasks)}",
        got="none",
        fix="name it in MIXTURE_OR_TASK_MODULE: anystep-cache imports it too",
      )
    if importlib.util.find_spec("apache_beam") is None:
      raise AnystepError(
        ExitCode.CONFIG,
        "package_missing",
        expected="the packages of anystep-cache",
        got="no apache_beam",
        fix="pip install 'anystep[cache]'",
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissingSplit:
  """A split of a task that no root has a cache of, and the root that is to get one."""

  task: str
  split: str
  cache_dir: str
  modules: tuple[str, ...]


def find_root_without(roots: Sequence[str], task: str, split: str) -> str | None:
  """Return the root that lacks a split's cache; None where some root has it.

  Raises:
    AnystepError: 65 `completed_invalid`.
  """
  for root in roots:
    completed = read_completed(names.task_directory(root, task))
    if split in completed:
      return None
    if completed:
      return root
  return roots[0]


def make_commands(missing: Iterable[MissingSplit], *, index_only: bool = False) -> list[CacheCommand]:
  """Return the fewest command lines that make these splits' caches, and no others."""
  splits: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
  for entry in missing:
    task_splits = splits.setdefault((entry.cache_dir, entry.modules, entry.task), [])
    task_splits += [entry.split] if entry.split not in task_splits else []
  tasks: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
  for (cache_dir, modules, task), task_splits in splits.items():
    tasks.setdefault((cache_dir, modules, tuple(task_splits)), []).append(task)
  return [
    CacheCommand(
      tasks=tuple(task_names), cache_dir=cache_dir, modules=modules, splits=same_splits, index_only=index_only
    )
    for (cache_dir, modules, same_splits), task_names in tasks.items()
  ]


def cache_first(commands: Sequence[CacheCommand], *, limit_bytes: int, dry_run: bool) -> None:
  """Run command lines that cache what a run needs, where that is little; a dry run only prints them.

  Raises:
    AnystepError: 78 `cache_too_large` where caches would be larger, or their size is unknown; as
      `CacheCommand.run` and `CacheCommand.dry_run`.
  """
  dry_runs = [command.dry_run() for command in commands]
  sizes = [answer.cache_bytes for answer in dry_runs]
  total = None if None in sizes else sum(size for size in sizes if size is not None)
  for command, answer in zip(commands, dry_runs, strict=True):
    print(f"{'would cache' if dry_run else 'caching'} first, what is not cached yet: {command}")
    print(*answer.lines, sep="\n", flush=True)
  if total is None or total > limit_bytes:
    raise AnystepError(
      ExitCode.CONFIG,
      "cache_too_large",
      expected=f"caches of at most {limit_bytes:,} bytes",
      got="nobody knows how many" if total is None else f"about {total:,}",
      fix=f"cache first: {'; '.join(map(str, commands))}"
      + ("" if total is None else "; or raise --cache_if_missing_limit_bytes"),
    )
  for command in [] if dry_run else commands:
    command.run()
