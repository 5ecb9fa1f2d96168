"""Caches that a configuration names, checked before the registered tasks are known."""

from __future__ import annotations

import os
from collections.abc import Sequence

from anystep.caches.cache import Cache, read_completed
from anystep.errors import AnystepError, ExitCode, require
from anystep.files import names, storage
from anystep.plans.plan import Plan
from anystep.streams.stream import find_cache
from anystep.tasks.registry.mixture_files import is_mixture_text, read_mixture
from anystep.train.datasets.cache_program import CacheCommand
from anystep.train.datasets.config import DatasetConfig

_CACHED_FIX = "set USE_CACHED_TASKS = True, or name a registered mixture in MIXTURE_OR_TASK_NAME"
_CACHE_DIR_FIX = "set CACHE_DIR, or USE_CACHED_TASKS = False to train straight from the source"


def check_caches(config: DatasetConfig, *, makes_missing: bool = False) -> None:
  """Check the caches and the plan's file that a configuration names, as far as no registered task is needed.

  A name without a cache may be a mixture's, so it passes where the cache directories hold anything.

  Args:
    config: the configuration.
    makes_missing: whether caches that are missing will be made.

  Raises:
    AnystepError: as `check_cache_options`, `read_mixture` and `open_cache`; 66 `plan_missing`; 65
      `plan_invalid`.
  """
  roots, tasks = config.cache_dirs, [config.mixture_or_task_name]
  if is_mixture_text(config.mixture_or_task_name):
    mixture = read_mixture(config.mixture_or_task_name)
    roots, tasks = (*mixture.roots, *roots), list(mixture.rates)
  check_cache_options(config)
  if not config.use_cached:
    return
  if config.plan is not None:
    read_configured_plan(config.plan)
  for task in tasks:
    try:
      splits = {split for root in roots for split in read_completed(names.task_directory(root, task))}
    except AnystepError as error:
      # The registry says what such a name is, and the task's own check what stands at its cache.
      if error.code == ExitCode.UNSAFE or error.kind == "completed_invalid":
        continue
      raise
    is_required = not makes_missing and (bool(splits) or not any(map(_has_entries, roots)))
    if config.split in splits or is_required:
      _open_cache(task, roots, config).check_heads()


def check_cache_options(config: DatasetConfig) -> None:
  """Refuse a configuration that says nowhere where its caches are, or that does not use a mixture of caches.

  Raises:
    AnystepError: 78 `cache_dir`, `use_cached`.
  """
  names_caches = is_mixture_text(config.mixture_or_task_name)
  has_roots = names_caches or bool(config.cache_dirs) or not config.use_cached
  expected = "the root that anystep-cache wrote to"
  require(has_roots, "cache_dir", expected=expected, got="None", fix=_CACHE_DIR_FIX)
  expected = "True, for a mixture of caches"
  can_be_read = config.use_cached or not names_caches
  require(can_be_read, "use_cached", expected=expected, got="False", fix=_CACHED_FIX)


def read_configured_plan(path: str) -> Plan:
  """Read the plan that DATA_PLAN names.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`.
  """
  return Plan.read(path, fix="make it with anystep-data plan, or leave DATA_PLAN out")


def complete_fix(error: AnystepError, task: str, roots: Sequence[str], config: DatasetConfig) -> None:
  """Complete the fix of an error about a task's cache by what the configuration says."""
  # Where the root is a wrong one, the fix says so already.
  if error.kind == "cache_missing" and error.fix.startswith("anystep-cache "):
    command = CacheCommand(tasks=(task,), cache_dir=roots[0], modules=config.modules)
    error.fix = f"{command}; or add --cache_if_missing"
  if error.kind == "cache_of_seqio":
    command = CacheCommand(tasks=(task,), cache_dir="ANOTHER_DIRECTORY", modules=config.modules)
    error.fix = f"{command}, and set CACHE_DIR to that directory"
  if error.kind == "split_missing":
    error.fix += "; where it is the evaluation's, --gin.EVAL_DATASET=None trains without one"


def _open_cache(task: str, roots: Sequence[str], config: DatasetConfig) -> Cache:
  try:
    return find_cache(roots, task, config.split)
  except AnystepError as error:
    complete_fix(error, task, roots, config)
    raise


def _has_entries(root: str) -> bool:
  """Return whether a directory holds anything; stores are slow to list and count as ones that do."""
  if storage.is_remote(root):
    return True
  return os.path.isdir(root) and any(os.scandir(root))
