"""Running `anystep-cache` for a run whose caches are not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence

from anystep.caches.cache import read_completed
from anystep.errors import AnystepError, ExitCode
from anystep.files import names

# What a dry run says of a split that is to be cached, and of its size where that is known.
_SPLIT_LINE = re.compile(r"  (\S+): .*would be cached as ")
_SIZE = re.compile(r": about [\d,]+ examples?, ([\d,.]+) (B|KiB|MiB|GiB|TiB) and ")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCommand:
  """A command line of `anystep-cache`; as a text, what one would type.

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
    """Runs the program, which says on this one's stdout and stderr how far it is.

    Raises:
      AnystepError: with its exit status, `cache_program`; 78 `module_missing`, `package_missing`.
    """
    self._run([])

  def dry_run(self) -> tuple[str, int | None]:
    """What the program says that it would do, and how many bytes that makes; None where it cannot tell.

    Raises:
      AnystepError: as `run`.
    """
    text = self._run(["--dry_run"], stdout=subprocess.PIPE)
    lines = [line for line in text.splitlines() if _SPLIT_LINE.match(line)]
    sizes = [_SIZE.search(line) for line in lines]
    known = [float(size[1].replace(",", "")) * _UNITS[size[2]] for size in sizes if size]
    complete = len(known) == len(lines) >= len(self.splits)
    return text, round(sum(known)) if complete else None

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


def root_without(roots: Sequence[str], task: str, split: str) -> str | None:
  """The root where a split's cache would be found, were it there; None where it is.

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


def commands_for(missing: Iterable[MissingSplit], *, index_only: bool = False) -> list[CacheCommand]:
  """The fewest command lines that make these splits' caches, and no others."""
  splits: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
  for one in missing:
    wanted = splits.setdefault((one.cache_dir, one.modules, one.task), [])
    wanted += [one.split] if one.split not in wanted else []
  tasks: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
  for (cache_dir, modules, task), wanted in splits.items():
    tasks.setdefault((cache_dir, modules, tuple(wanted)), []).append(task)
  return [
    CacheCommand(tasks=tuple(own), cache_dir=cache_dir, modules=modules, splits=wanted, index_only=index_only)
    for (cache_dir, modules, wanted), own in tasks.items()
  ]


def cache_first(commands: Sequence[CacheCommand], *, limit_bytes: int, dry_run: bool) -> None:
  """Runs command lines that cache what a run needs, where that is little; a dry run only says so.

  Raises:
    AnystepError: 78 `cache_too_large` where caches would be larger, or nobody can tell; as
      `CacheCommand.run`.
  """
  said = [(command, *command.dry_run()) for command in commands]
  sizes = [size for _, _, size in said]
  total = None if None in sizes else sum(size for size in sizes if size is not None)
  for command, text, _ in said:
    print(f"{'would cache' if dry_run else 'caching'} first, what is not cached yet: {command}")
    print(text, end="", flush=True)
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
