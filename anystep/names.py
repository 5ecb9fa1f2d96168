"""The names of a cache's files. Names become paths only through these functions."""

from __future__ import annotations

import re

from etils import epath

from anystep.errors import AnystepError, ExitCode

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")

COMPLETED = "COMPLETED"


def task_directory(root: epath.PathLike, task: str) -> epath.Path:
  """`<root>/<task name, ':' as '/'>`, the directory of a task's cache (design section 4)."""
  for part in task.split(":"):
    _check(part, "task")
  return epath.Path(root).joinpath(*task.split(":"))


def manifest_name(split: str) -> str:
  """The manifest's file name."""
  return f"manifest.{_check(split, 'split')}.json"


def info_name(split: str) -> str:
  """SeqIO's name for the description of a cached split's features."""
  return f"info.{_check(split, 'split')}.json"


def stats_name(split: str) -> str:
  """SeqIO's name for a cached split's counts."""
  return f"stats.{_check(split, 'split')}.json"


def records_name(split: str, container: str, shard: int, num_shards: int) -> str:
  """The name of a shard's records, as SeqIO writes it."""
  return f"{_check(split, 'split')}.{container}-{shard:05d}-of-{num_shards:05d}"


def lengths_name(split: str, shard: int, num_shards: int) -> str:
  """The name of a shard's table of token counts."""
  return f"{_check(split, 'split')}.lengths-{shard:05d}-of-{num_shards:05d}.npy"


def shard_pattern(split: str) -> re.Pattern[str]:
  """Matches the name of any shard, lengths or offsets file that could be taken for one of this split."""
  return re.compile(
    rf"{re.escape(_check(split, 'split'))}\.(array_record|tfrecord|lengths)-\d+-of-\d+(-offsets)?(\.npy)?\Z"
  )


def _check(name: str, what: str) -> str:
  if not isinstance(name, str) or not _PART.match(name):
    raise AnystepError(
      ExitCode.UNSAFE,
      f"{what}_name",
      expected="letters, digits, '_', '-', '.' (not first)",
      got=repr(name),
      fix=f"rename the {what}: its name becomes part of a path",
    )
  return name
