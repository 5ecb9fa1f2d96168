"""What there is to do for a task: which splits to cache, and which are there already."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence

import seqio
from etils import epath

from anystep import names
from anystep.cache import open_cache, read_completed
from anystep.cache_job.final_shards import bounded
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.selection import check_splits
from anystep.cache_job.spill import SplitJob, read_spill
from anystep.errors import AnystepError, ExitCode
from anystep.manifest import AS_IS, PRESHUFFLED, Fingerprint, Manifest, canonical_json
from anystep.tasks.fingerprint import cached_preprocessors, check_reader, fingerprint

BUILDING = ".building"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskWork:
  """What there is to do for a task.

  Attributes:
    task: the registered task.
    directory: of its cache.
    splits: those asked for.
    jobs: the splits to cache.
    kept: complete splits that stay as they are, with the sha256 of their manifests.
    elsewhere: another root with a complete cache of the task, for which it is left out here.
  """

  task: seqio.Task
  directory: epath.Path
  splits: Sequence[str]
  jobs: tuple[SplitJob, ...] = ()
  kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
  elsewhere: str | None = None

  @property
  def left_out(self) -> str:
    """Why there is nothing to do."""
    if self.elsewhere is not None:
      return f"a complete cache is in {self.elsewhere}, left out (not so with --ignore_other_caches)"
    return "the cache is complete, left as it is" if self.splits else "it has none of the splits, left out"

  def lines(self) -> list[str]:
    """What would be done, for people."""
    if not self.jobs:
      return [f"{self.task.name}: {self.left_out}"]
    kept = [f"  {split}: complete, left as it is" for split in sorted(self.kept)]
    return [f"{self.task.name}: to {self.directory}", *kept, *map(self._line, self.jobs)]

  def _line(self, job: SplitJob) -> str:
    number = len(job.source_shards)
    shards = f"{number} source shard{'' if number == 1 else 's'}"
    if job.layout == AS_IS:
      return f"  {job.split}: {shards}, would be indexed where they are"
    done = sum(read_spill(job.directory, k) is not None for k in range(number))
    examples = self.task.source.num_input_examples(job.split)
    facts = [
      shards,
      *([f"{done} of them preprocessed by an earlier run"] if done else []),
      *([f"{examples:,} source examples"] if examples is not None else []),
      f"would be cached as {job.container}",
    ]
    return f"  {job.split}: {', '.join(facts)}"


def plan_work(task_names: Iterable[str], options: CacheOptions) -> list[TaskWork]:
  """What there is to do for tasks; nothing is written.

  Raises:
    AnystepError: 64 `split_unknown`; 66 `source_empty`; 76 `task_changed` and `cache_options` where a
      complete cache is another task's by now, or was made otherwise; 78 `task_feature_lengths`; 78
      `source_not_files` and `preprocessor_before_cache` for what cannot be indexed.
  """
  if options.tfds_data_dir is not None:
    seqio.set_tfds_data_dir_override(options.tfds_data_dir)
  tasks = [seqio.TaskRegistry.get(name) for name in task_names]
  check_splits(options.splits or (), tasks)
  return [task_work(task, options) for task in tasks]


def task_work(task: seqio.Task, options: CacheOptions) -> TaskWork:
  """What there is to do for one task."""
  directory = names.task_directory(options.cache_dir, task.name)
  wanted = [split for split in task.splits if options.splits is None or split in options.splits]
  work = TaskWork(task=task, directory=directory, splits=wanted)
  if not wanted:
    return work
  if not (directory / names.COMPLETED).exists():
    elsewhere = _complete_elsewhere(task, wanted, options)
    if elsewhere is not None:
      return dataclasses.replace(work, elsewhere=elsewhere)
  made_anew = wanted if options.overwrite else []
  # Who makes everything anew need not be able to read what is there.
  completed = {} if set(made_anew) >= set(task.splits) else read_completed(directory)
  kept = {split: sha256 for split, sha256 in completed.items() if split not in made_anew}
  for split in wanted:
    if split in kept:
      manifest = open_cache(options.cache_dir, task.name, split).manifest
      _check_options(task, manifest, options)
      check_reader(task, manifest)
  jobs = tuple(_split_job(task, split, options) for split in wanted if split not in kept)
  return dataclasses.replace(work, jobs=jobs, kept=kept)


def task_fingerprint(task: seqio.Task, job: SplitJob) -> Fingerprint:
  """The fingerprint of what the job makes."""
  return fingerprint(
    task,
    cache_at=job.cache_at,
    task_feature_lengths=job.task_feature_lengths,
    seed=job.seed,
    base_seed=job.base_seed,
  )


def _complete_elsewhere(task: seqio.Task, splits: Sequence[str], options: CacheOptions) -> str | None:
  """Another root that has these splits of the task; caches without manifests are SeqIO's own."""
  for root in options.other_cache_dirs:
    directory = names.task_directory(root, task.name)
    if not all((directory / names.manifest_name(split)).exists() for split in splits):
      continue
    if set(splits) <= read_completed(directory).keys():
      try:
        for split in splits:
          check_reader(task, open_cache(root, task.name, split).manifest)
      except AnystepError as error:
        error.add_note(f"The cache is in {root}; with --ignore_other_caches it is left aside.")
        raise
      return root
  return None


def _check_options(task: seqio.Task, manifest: Manifest, options: CacheOptions) -> None:
  """Refuses to leave a complete cache that was made otherwise than is asked now."""
  asked: dict[str, object] = {"layout": AS_IS if options.index_only else PRESHUFFLED}
  if not options.index_only:
    num_shards = bounded(manifest.num_shards, options.min_shards, options.max_shards)
    asked |= {
      "seed": options.seed,
      "base_seed": options.base_seed,
      "block_records": options.block_records,
      "num_shards": options.num_shards or num_shards,
      "container": options.container,
      "cache_at": _cache_at(task, options),
      "task_feature_lengths": options.task_feature_lengths,
    }
  for name, value in asked.items():
    if getattr(manifest, name) != value:
      raise AnystepError(
        ExitCode.MISMATCH,
        "cache_options",
        task=manifest.task,
        split=manifest.split,
        option=name,
        expected=value,
        got=getattr(manifest, name),
        fix="ask for the options that the cache was made with, or make it anew with --overwrite",
      )


def _split_job(task: seqio.Task, split: str, options: CacheOptions) -> SplitJob:
  source_shards = tuple(task.source.list_shards(split))
  if not source_shards:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "source_empty",
      task=task.name,
      split=split,
      fix="check that the source's files are where the task looks for them",
    )
  _check_lengths(task, options)
  if options.index_only:
    _check_indexable(task)
  directory = names.task_directory(options.cache_dir, task.name)
  job = SplitJob(
    task=task.name,
    split=split,
    directory="",
    modules=options.modules,
    source_shards=source_shards,
    seed=options.seed,
    base_seed=options.base_seed,
    num_shards=options.num_shards,
    min_shards=options.min_shards,
    max_shards=options.max_shards,
    block_records=options.block_records,
    container=options.container,
    layout=AS_IS if options.index_only else PRESHUFFLED,
    cache_at=_cache_at(task, options),
    task_feature_lengths=options.task_feature_lengths,
    tfds_data_dir=options.tfds_data_dir,
  )
  # What an earlier run left is taken up only by a job that would have made the same.
  identity = canonical_json([dataclasses.asdict(job), dataclasses.asdict(task_fingerprint(task, job))])
  building = directory / BUILDING / f"{split}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
  return dataclasses.replace(job, directory=str(building))


def _cache_at(task: seqio.Task, options: CacheOptions) -> str:
  """Where the cache stands: at the end of a task that has no placeholder for it."""
  return options.cache_at if task.supports_caching else "end"


def _check_lengths(task: seqio.Task, options: CacheOptions) -> None:
  """Refuses to run preprocessors that take feature lengths without any."""
  if options.task_feature_lengths is not None:
    return
  for preprocessor in cached_preprocessors(task, _cache_at(task, options)):
    parameter = inspect.signature(preprocessor).parameters.get("sequence_length")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
      raise AnystepError(
        ExitCode.CONFIG,
        "task_feature_lengths",
        task=task.name,
        preprocessor=seqio.utils.function_name(preprocessor),
        expected="the lengths that the examples are cached for",
        got="none",
        fix='name them, as --task_feature_lengths=\'{"inputs": 512, "targets": 114}\'',
      )


def _check_indexable(task: seqio.Task) -> None:
  """Refuses to describe what readers could not make the task's examples of."""
  if not isinstance(task.source, seqio.FileDataSource):
    raise AnystepError(
      ExitCode.CONFIG,
      "source_not_files",
      task=task.name,
      expected="a seqio.FileDataSource, such as seqio.TFExampleDataSource",
      got=type(task.source).__name__,
      fix="cache the task without --index_only",
    )
  before = cached_preprocessors(task, "placeholder")
  if before:
    raise AnystepError(
      ExitCode.CONFIG,
      "preprocessor_before_cache",
      task=task.name,
      preprocessor=seqio.utils.function_name(before[0]),
      expected="seqio.CacheDatasetPlaceholder() before every preprocessor: files as they are have run none",
      fix="move the placeholder to the front, or cache the task without --index_only",
    )
