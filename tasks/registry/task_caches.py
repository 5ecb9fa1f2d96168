"""The cache of a registered task: found, and made of the task as it is registered now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import seqio

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.files import names
from anystep.streams.stream import find_cache
from anystep.tasks.registry.fingerprint import check_reader


def open_task_cache(task: seqio.Task, split: str, cache_dirs: Sequence[str]) -> Cache:
  """Open the cache of a registered task in the first root that has one.

  Raises:
    AnystepError: 66 `cache_missing` and `cache_of_seqio` with the command that makes it, `split_missing`;
      78 `cache_dirs` for no root; 65 and 76 as `open_cache` and `check_reader`.
  """
  try:
    cache = find_cache(cache_dirs, task.name, split)
  except AnystepError as error:
    if error.kind == "completed_invalid" and _is_of_seqio(error.fields["path"], split):
      command = f"anystep-cache --tasks={task.name} --output_cache_dir=ANOTHER_DIRECTORY"
      raise AnystepError(
        ExitCode.NO_INPUT,
        "cache_of_seqio",
        task=task.name,
        path=error.fields["path"],
        expected="a cache that anystep-cache wrote",
        got="one of SeqIO's own cache job",
        fix=f"{command} --module_import=MODULE_OF_THE_TASK, and name that directory to SeqIO first",
      ) from error
    raise
  check_reader(task, cache.manifest, cache=cache)
  return cache


def _is_of_seqio(completed: Any, split: str) -> bool:
  """Return whether a COMPLETED file stands beside none of our manifests."""
  return not (completed.parent / names.manifest_name(split)).exists()
