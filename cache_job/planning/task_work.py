"""The work of a task: splits to cache, and splits whose caches are complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import seqio
from etils import epath

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.building_directories import BUILDING
from anystep.cache_job.planning.selection import check_splits
from anystep.cache_job.planning.task_checks import (
  check_cache_at,
  check_indexable,
  check_lengths,
  check_options,
  check_preprocessors,
  check_source_apart,
)
from anystep.cache_job.preprocessing.bad_examples import make_unreadable_error
from anystep.cache_job.preprocessing.example_checks import STOCK_DTYPES
from anystep.cache_job.preprocessing.seqio_caches import list_cached_shards
from anystep.cache_job.state.split_job import SplitJob
from anystep.caches.cache import open_cache, read_completed
from anystep.caches.manifest import AS_IS, Manifest
from anystep.containers.containers import TFRECORD
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import names
from anystep.tasks.registry.fingerprint import check_reader, reader_part
from anystep.tasks.registry.named_tasks import find_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskWork:
  """The work of a task.

  Attributes:
    task: the registered task.
    directory: of its cache.
    splits: those asked for.
    jobs: the splits to cache.
    kept: complete splits that stay as they are, with the sha256 of their manifests.
    manifests: of the splits that were cached, once they are.
    elsewhere: another root with a complete cache of the task, for which it is left out here.
  """

  task: seqio.Task
  directory: epath.Path
  splits: Sequence[str]
  jobs: tuple[SplitJob, ...] = ()
  kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
  manifests: Mapping[str, Manifest] = dataclasses.field(default_factory=dict)
  elsewhere: str | None = None

  @property
  def left_out(self) -> str:
    """Reason that nothing is to be done, for people."""
    if self.elsewhere is not None:
      return f"a complete cache is in {self.elsewhere}, left out (not so with --ignore_other_caches)"
    return "the cache is complete, left as it is" if self.splits else "it has none of the splits, left out"

  def outcome(self) -> list[str]:
    """Return lines that tell people what was done."""
    if not self.jobs:
      return [f"{self.task.name}: {self.left_out}"]
    lines = [f"{self.task.name}: {'indexed' if self.jobs[0].options.layout == AS_IS else 'cached'}"]
    for split, manifest in sorted(self.manifests.items()):
      size = f"{sum(file.bytes for file in manifest.files) / 2**20:,.1f} MiB"
      shards = f"{manifest.num_shards:,} {'shard' if manifest.num_shards == 1 else 'shards'}"
      lines.append(f"  {split}: {manifest.num_examples:,} examples, {size} in {shards}")
      if manifest.bad_examples:
        path = self.directory / names.quarantine_name(split)
        lines.append(f"  {split}: {manifest.bad_examples:,} bad examples were left out, and listed in {path}")
      foreign = sorted(name for name, f in manifest.features.items() if f.dtype not in STOCK_DTYPES)
      if foreign and manifest.container == TFRECORD:
        lines.append(f"  {split}: stock SeqIO cannot read {', '.join(foreign)}: it parses {STOCK_DTYPES}")
    return lines


def plan_work(task_names: Iterable[str], options: CacheOptions) -> list[TaskWork]:
  """Plan the work of tasks; nothing is written.

  Raises:
    AnystepError: 64 `split_unknown`, `task_feature_lengths`; 66 `source_empty`; 76 `task_changed` and
      `cache_options` where a complete cache is of a task or options that have changed; 78
      `preprocessors_refused`; 78 `source_not_files` and `preprocessor_before_cache` for what cannot be
      indexed.
  """
  return [plan_task(task, options) for task in find_tasks(task_names, options)]


def find_tasks(task_names: Iterable[str], options: CacheOptions) -> list[seqio.Task]:
  """Return registered tasks, with their datasets where the options say.

  Raises:
    AnystepError: 64 `split_unknown` where none of them has a split that was asked for.
  """
  if options.tfds_data_dir is not None:
    seqio.set_tfds_data_dir_override(options.tfds_data_dir)
  fix = "name the module that registers it with --module_import"
  tasks = [find_task(name, fix=fix) for name in task_names]
  check_splits(options.splits or (), tasks)
  return tasks


def plan_task(task: seqio.Task, options: CacheOptions) -> TaskWork:
  """Plan the work of one task."""
  directory = names.task_directory(options.cache_dir, task.name)
  splits = [split for split in task.splits if options.splits is None or split in options.splits]
  work = TaskWork(task=task, directory=directory, splits=splits)
  if not splits:
    return work
  check_preprocessors(task)
  if not (directory / names.COMPLETED).exists():
    elsewhere = _find_complete_elsewhere(task, splits, options)
    if elsewhere is not None:
      return dataclasses.replace(work, elsewhere=elsewhere)
  remade_splits = splits if options.overwrite else []
  try:
    completed = read_completed(directory)
  except AnystepError:
    # A job that makes every split anew does not need the old marker.
    if set(remade_splits) < set(task.splits):
      raise
    completed = {}
  kept_splits = {split: sha256 for split, sha256 in completed.items() if split not in remade_splits}
  for split in splits:
    if split in kept_splits:
      cache = open_cache(options.cache_dir, task.name, split)
      check_options(cache.manifest, options)
      check_reader(task, cache.manifest, cache=cache)
  jobs = tuple(_make_split_job(task, split, options) for split in splits if split not in kept_splits)
  return dataclasses.replace(work, jobs=jobs, kept=kept_splits)


def _find_complete_elsewhere(task: seqio.Task, splits: Sequence[str], options: CacheOptions) -> str | None:
  """Return another root with these splits of the task; caches that SeqIO wrote do not count."""
  for root in options.other_cache_dirs:
    directory = names.task_directory(root, task.name)
    if not all((directory / names.manifest_name(split)).exists() for split in splits):
      continue
    if set(splits) <= read_completed(directory).keys():
      try:
        for split in splits:
          cache = open_cache(root, task.name, split)
          check_reader(task, cache.manifest, cache=cache)
      except AnystepError as error:
        error.add_note(f"The cache is in {root}; with --ignore_other_caches it is left aside.")
        raise
      return root
  return None


def _make_split_job(task: seqio.Task, split: str, options: CacheOptions) -> SplitJob:
  check_cache_at(task, options)
  check_lengths(task, options)
  if options.index_only:
    check_indexable(task)
  seqio_cache = None
  if options.seqio_cache_dir is not None:
    seqio_cache = str(names.task_directory(options.seqio_cache_dir, task.name))
  directory = names.task_directory(options.cache_dir, task.name)
  job = SplitJob(
    task=task.name,
    split=split,
    directory="",
    source_shards=_list_source_shards(task, split, seqio_cache),
    seqio_cache=seqio_cache,
    options=options,
  )
  check_source_apart(job, directory)
  reader = reader_part(task, cache_at=options.cache_at, task_feature_lengths=options.task_feature_lengths)
  return dataclasses.replace(job, directory=str(directory / BUILDING / f"{split}-{job.identity(reader)}"))


def _list_source_shards(task: seqio.Task, split: str, seqio_cache: str | None) -> tuple[str, ...]:
  """Return the names of the source's shards, at least one."""
  try:
    shards = tuple(list_cached_shards(seqio_cache, split) if seqio_cache else task.source.list_shards(split))
  except AnystepError:
    raise
  except Exception as error:
    raise make_unreadable_error(one_line(error), task=task.name, split=split) from error
  if not shards:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "source_empty",
      task=task.name,
      split=split,
      fix="check that the source's files are where the task looks for them",
    )
  return shards
