"""A run's datasets, found in caches, in files that are read in place, or straight from their sources."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from etils import epath

from anystep.caches.cache import open_cache
from anystep.caches.manifest import AS_IS
from anystep.errors import AnystepError, ExitCode, require
from anystep.tasks.registry.fingerprint import cached_preprocessors
from anystep.tasks.registry.named_tasks import NamedTasks
from anystep.tasks.sources import in_place as sources
from anystep.train.datasets.cache_program import CacheCommand, MissingSplit, find_root_without, make_commands
from anystep.train.datasets.cached import Dataset
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.configured_tasks import find_configured, find_configured_tasks
from anystep.train.datasets.run_data import RunDataset
from anystep.train.datasets.uncached import UncachedDataset

# Folder of a run's directory with descriptions of files that it reads in place.
INDEX_FOLDER = "as_is"
# Exit codes of anystep-cache for files, or names, that cannot be read in place. Damaged files are not meant:
# no other way of reading helps them.
_REFUSALS = (ExitCode.CONFIG, ExitCode.UNSAFE)


def find_datasets(configs: Sequence[DatasetConfig], *, model_dir: epath.PathLike) -> list[RunDataset]:
  """Find and check the dataset of each configuration.

  With `use_cached=False`, files with random access are described below model_dir, by `anystep-cache
  --index_only`, where neither it nor a cache directory has their description yet.

  Raises:
    AnystepError: as `Dataset.open`, `find_configured_tasks` and `CacheCommand.run`.
  """
  refused: dict[str, str] = {}
  for command in make_index_commands(configs, model_dir=model_dir):
    print(f"describing files where they are: {command}", flush=True)
    try:
      command.run()
    except AnystepError as error:
      if error.kind != "cache_program" or error.code not in _REFUSALS:
        raise
      print("they are read through SeqIO instead", file=sys.stderr)
      reason = f"anystep-cache --index_only refuses {', '.join(command.tasks)}"
      refused |= dict.fromkeys(command.tasks, reason)
  return [_find(config, str(epath.Path(model_dir) / INDEX_FOLDER), refused) for config in configs]


def _find(config: DatasetConfig, index_dir: str, refused: Mapping[str, str]) -> RunDataset:
  named = find_configured_tasks(config)
  if config.use_cached:
    return Dataset.of_named(named, config)
  reason = _why_not_in_place(named, config)
  reason = reason or next((refused[name] for name in named.tasks if name in refused), None)
  if reason is None:
    roots = (_describe_in_place(named, config) or index_dir,)
    return Dataset.of_named(dataclasses.replace(named, cache_dirs=roots), config)
  return UncachedDataset(config, named.tasks, find_configured(config), reason)


def make_index_commands(configs: Sequence[DatasetConfig], *, model_dir: epath.PathLike) -> list[CacheCommand]:
  """Return the command lines that describe files which are read in place and not described yet.

  Raises:
    AnystepError: as `find_configured_tasks`.
  """
  index_dir = str(epath.Path(model_dir) / INDEX_FOLDER)
  missing: list[MissingSplit] = []
  for config in configs:
    if config.use_cached:
      continue
    named = find_configured_tasks(config)
    if _why_not_in_place(named, config) is None and not _describe_in_place(named, config):
      missing += _list_missing(named, config, [index_dir])
  return make_commands(missing, index_only=True)


def make_cache_commands(configs: Sequence[DatasetConfig]) -> list[CacheCommand]:
  """Return the command lines that make the missing caches of configurations.

  Raises:
    AnystepError: 78 `use_cached` where no cache is to be used; as `find_configured_tasks`.
  """
  missing: list[MissingSplit] = []
  for config in configs:
    fix = "leave --cache_if_missing out, or set USE_CACHED_TASKS = True"
    require(config.use_cached, "use_cached", expected="True with --cache_if_missing", got=False, fix=fix)
    named = find_configured_tasks(config)
    missing += _list_missing(named, config, named.cache_dirs)
  return make_commands(missing)


def _list_missing(named: NamedTasks, config: DatasetConfig, roots: Sequence[str]) -> list[MissingSplit]:
  return [
    MissingSplit(task=name, split=config.split, cache_dir=root, modules=config.modules)
    for name, task in named.tasks.items()
    if config.split in task.splits and (root := find_root_without(roots, name, config.split)) is not None
  ]


def _describe_in_place(named: NamedTasks, config: DatasetConfig) -> str | None:
  """Return the first cache directory where all tasks' files are described as they are; None if none."""
  for root in config.cache_dirs:
    if all(_is_described(root, name, config.split) for name in named.tasks):
      return root
  return None


def _is_described(root: str, task: str, split: str) -> bool:
  if find_root_without([root], task, split) is not None:
    return False
  return open_cache(root, task, split).manifest.layout == AS_IS


def _why_not_in_place(named: NamedTasks, config: DatasetConfig) -> str | None:
  """Return why no plan can say which examples of the tasks come; None if one can."""
  for name, task in named.tasks.items():
    if not sources.random_access(task.source):
      return f"the source of {name}, a {type(task.source).__name__}, has no random access"
    if not task.supports_caching:
      return f"{name} has no seqio.CacheDatasetPlaceholder(), after which it is preprocessed at reading"
    if cached_preprocessors(task, "placeholder"):
      return f"preprocessors of {name} stand before its seqio.CacheDatasetPlaceholder()"
  if not config.modules:
    return "MIXTURE_OR_TASK_MODULE names no module for anystep-cache --index_only"
  return None
