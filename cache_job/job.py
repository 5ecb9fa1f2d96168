"""The job: which splits to cache, the Beam pipeline, and the files that make it a cache."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import apache_beam as beam
import seqio
from apache_beam.options.pipeline_options import PipelineOptions
from etils import epath

from anystep import containers, names
from anystep.cache import open_cache, read_completed
from anystep.cache_job.final_shards import plan_final_shards, read_shard_files, write_final_shard
from anystep.cache_job.spill import (
  Spill,
  SplitJob,
  failure_path,
  publish,
  read_failure,
  read_spill,
  spill_path,
  write_spill,
)
from anystep.errors import AnystepError, ExitCode
from anystep.manifest import Feature, FileEntry, Fingerprint, Manifest, SourceShard, canonical_json
from anystep.progress import Progress
from anystep.tasks.fingerprint import cached_preprocessors, check_reader, fingerprint

_Result = TypeVar("_Result")
_Item = tuple[SplitJob, int]

_BUILDING = ".building"
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
  """How tasks are cached.

  Attributes:
    cache_dir: the root that caches are written below.
    modules: what workers import to find the tasks.
    seed: of the preshuffle. base_seed: of the preprocessors.
    num_shards: S; None for the default. block_records: g.
    cache_at: `placeholder`, or `end` to cache what stands after it too.
    task_feature_lengths: the lengths that `end` caches for.
    overwrite: whether a complete cache is made anew.
    pipeline_options: Beam's own, as on its command line.
  """

  cache_dir: str
  modules: tuple[str, ...] = ()
  seed: int = 0
  base_seed: int = 0
  num_shards: int | None = None
  block_records: int = 32
  cache_at: str = "placeholder"
  task_feature_lengths: Mapping[str, int] | None = None
  overwrite: bool = False
  pipeline_options: tuple[str, ...] = ()


def cache_tasks(task_names: Iterable[str], options: CacheOptions) -> list[str]:
  """Caches tasks that have no complete cache yet.

  Args:
    task_names: registered tasks.
    options: how.

  Returns:
    The tasks that were cached; the others were complete.

  Raises:
    AnystepError: 76 `task_changed` where a complete cache is another task's by now; 66 `source_empty`.
  """
  tasks = [seqio.TaskRegistry.get(name) for name in task_names]
  to_cache = [task for task in tasks if options.overwrite or not _is_complete(task, options)]
  jobs = {task.name: [_split_job(task, split, options) for split in task.splits] for task in to_cache}
  if jobs:
    _run_pipeline([job for split_jobs in jobs.values() for job in split_jobs], options)
  for task in to_cache:
    _finish(task, jobs[task.name], options)
  return [task.name for task in to_cache]


def _is_complete(task: seqio.Task, options: CacheOptions) -> bool:
  completed = read_completed(names.task_directory(options.cache_dir, task.name))
  if not set(task.splits) <= completed.keys():
    return False
  for split in task.splits:
    manifest = open_cache(options.cache_dir, task.name, split).manifest
    _check_options(task, manifest, options)
    check_reader(task, manifest)
  return True


def _check_options(task: seqio.Task, manifest: Manifest, options: CacheOptions) -> None:
  """Refuses to leave a complete cache that was made otherwise than is asked now."""
  asked = {
    "seed": options.seed,
    "base_seed": options.base_seed,
    "block_records": options.block_records,
    "num_shards": options.num_shards or manifest.num_shards,
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
    block_records=options.block_records,
    cache_at=_cache_at(task, options),
    task_feature_lengths=options.task_feature_lengths,
  )
  # What an earlier run left is taken up only by a job that would have made the same.
  identity = canonical_json([dataclasses.asdict(job), dataclasses.asdict(_fingerprint(task, job, options))])
  building = directory / _BUILDING / f"{split}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
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


def _fingerprint(task: seqio.Task, job: SplitJob, options: CacheOptions) -> Fingerprint:
  return fingerprint(
    task,
    cache_at=job.cache_at,
    task_feature_lengths=job.task_feature_lengths,
    seed=options.seed,
    base_seed=options.base_seed,
  )


def _run_pipeline(jobs: Sequence[SplitJob], options: CacheOptions) -> None:
  for job in jobs:
    epath.Path(job.directory).mkdir(parents=True, exist_ok=True)
    if failure_path(job.directory).exists():
      failure_path(job.directory).unlink()
  try:
    with _Watcher(jobs):
      _run(jobs, options)
  except Exception as error:
    failures = [failure for job in jobs if (failure := read_failure(job.directory))]
    raise (failures[0] if failures else _foreseen_within(error)) from error


def _foreseen_within(error: BaseException) -> BaseException:
  """The foreseen failure that a runner in this process made its own exception of; else that exception."""
  cause: BaseException | None = error
  while cause is not None and not isinstance(cause, AnystepError):
    cause = cause.__cause__ or cause.__context__
  return cause or error


def _run(jobs: Sequence[SplitJob], options: CacheOptions) -> None:
  with beam.Pipeline(options=PipelineOptions(list(options.pipeline_options))) as pipeline:
    for job in jobs:
      label = f"{job.task}/{job.split}"
      spills = (
        pipeline
        | f"{label}/source_shards" >> beam.Create(range(len(job.source_shards)))
        | f"{label}/spread_source" >> beam.Reshuffle()
        | f"{label}/spill" >> beam.Map(_spill, job)
      )
      _ = (
        pipeline
        | f"{label}/split" >> beam.Create([job])
        | f"{label}/plan" >> beam.FlatMap(_plan, beam.pvalue.AsDict(spills))
        | f"{label}/spread_final" >> beam.Reshuffle()
        | f"{label}/write" >> beam.Map(write_final_shard)
      )


def _spill(source_shard: int, job: SplitJob) -> tuple[int, int]:
  return source_shard, write_spill(job, source_shard).examples


def _plan(job: SplitJob, examples: Mapping[int, int]):
  return plan_final_shards(job, [examples[k] for k in range(len(job.source_shards))])


def _finish(task: seqio.Task, jobs: Sequence[SplitJob], options: CacheOptions) -> None:
  """Writes manifests, moves the files into place, and says last that the cache is complete."""
  directory = names.task_directory(options.cache_dir, task.name)
  manifests = {job.split: _describe(task, job, options) for job in jobs}
  (directory / names.COMPLETED).unlink(missing_ok=True)
  for job in jobs:
    manifest = manifests[job.split]
    for entry in manifest.files:
      (epath.Path(job.directory) / entry.name).replace(directory / entry.name)
    (directory / names.manifest_name(job.split)).write_text(manifest.to_json())
    _remove_foreign_shards(directory, manifest)
  completed = [
    f"{split} {hashlib.sha256(manifest.to_json().encode()).hexdigest()}\n"
    for split, manifest in sorted(manifests.items())
  ]
  (directory / _BUILDING).rmtree()
  for attempt in directory.glob(f"{names.COMPLETED}.*"):
    attempt.unlink()
  publish(directory / names.COMPLETED, lambda path: path.write_text("".join(completed)))


def _remove_foreign_shards(directory: epath.Path, manifest: Manifest) -> None:
  """Removes shards of the cache that was here before, which no reader could tell from this one's."""
  pattern, kept = names.shard_pattern(manifest.split), {entry.name for entry in manifest.files}
  for path in directory.iterdir():
    if pattern.match(path.name) and path.name not in kept:
      path.unlink()


def _describe(task: seqio.Task, job: SplitJob, options: CacheOptions) -> Manifest:
  """The split's manifest, and SeqIO's own descriptions beside its shards."""
  spills = [
    _finished(job, read_spill(job.directory, k), f"source shard {name}")
    for k, name in enumerate(job.source_shards)
  ]
  examples = [spill.examples for spill in spills]
  shards = [
    _finished(job, read_shard_files(job.directory, work.shard), f"shard {work.shard}")
    for work in plan_final_shards(job, examples)
  ]
  features = spills[0].features
  descriptions = {
    names.info_name(job.split): {
      "num_shards": len(shards),
      "features": {name: {"dtype": f["dtype"], "shape": f["shape"]} for name, f in features.items()},
      "seqio_version": seqio.__version__,
    },
    names.stats_name(job.split): _stats(spills),
  }
  entries = []
  for name, document in descriptions.items():
    content = canonical_json(document, indent=2).encode()
    (epath.Path(job.directory) / name).write_bytes(content)
    entries.append(FileEntry.of(name, 1, content))
  return Manifest(
    task=job.task,
    split=job.split,
    seed=job.seed,
    base_seed=job.base_seed,
    num_examples=sum(examples),
    num_shards=len(shards),
    block_records=job.block_records,
    container=containers.ARRAY_RECORD,
    container_options=containers.container_options(containers.ARRAY_RECORD, job.block_records),
    features={name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in features.items()},
    record_files=[shard.records for shard in shards],
    lengths_files=[shard.lengths for shard in shards],
    description_files=entries,
    source_shards=[
      SourceShard(name=name, examples=count) for name, count in zip(job.source_shards, examples, strict=True)
    ],
    fingerprint=_fingerprint(task, job, options),
    cache_at=job.cache_at,
    task_feature_lengths=job.task_feature_lengths,
  )


def _finished(job: SplitJob, result: _Result | None, what: str) -> _Result:
  """What the workers left, which must be there by now."""
  if result is None:
    raise AnystepError(
      ExitCode.IO,
      "job_incomplete",
      task=job.task,
      split=job.split,
      path=job.directory,
      expected=what,
      fix="run the same command again; what is finished is kept",
    )
  return result


def _stats(spills: Sequence[Spill]) -> dict[str, int]:
  """Counts under SeqIO's names."""
  stats = {"examples": sum(spill.examples for spill in spills)}
  for name in spills[0].tokens:
    stats[f"{name}_tokens"] = sum(spill.tokens[name] for spill in spills)
    stats[f"{name}_max_tokens"] = max(spill.max_tokens[name] for spill in spills)
  return stats


class _Watcher:
  """Shows how far the workers are, wherever they run, from what they leave in the job's directories."""

  def __init__(self, jobs: Sequence[SplitJob]):
    self._jobs = jobs
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="anystep-cache-progress", daemon=True)

  def __enter__(self) -> None:
    self._thread.start()

  def __exit__(self, *exc_info: object) -> None:
    self._stopped.set()
    self._thread.join()

  def _watch(self) -> None:
    source_shards = [(job, k) for job in self._jobs for k in range(len(job.source_shards))]
    examples = self._follow("preprocess", "source shards", source_shards, _spilled_examples, _heartbeat)
    if len(examples) < len(source_shards):
      return
    shards = [
      (job, work.shard)
      for job in self._jobs
      for work in plan_final_shards(job, [examples[job, k] for k in range(len(job.source_shards))])
    ]
    self._follow("write", "shards", shards, _written_examples, lambda job, shard: 0)

  def _follow(
    self,
    description: str,
    unit: str,
    items: Sequence[_Item],
    finished_examples: Callable[[SplitJob, int], int | None],
    examples_so_far: Callable[[SplitJob, int], int],
  ) -> dict[_Item, int]:
    """Shows progress until all items are finished or the job ends; returns the finished ones' examples."""
    finished: dict[_Item, int] = {}
    with Progress(description, total=len(items), unit=unit) as progress:
      while len(finished) < len(items):
        stopped = self._stopped.wait(_POLL_SECONDS)
        unfinished = [item for item in items if item not in finished]
        found = {item: finished_examples(*item) for item in unfinished}
        finished.update({item: count for item, count in found.items() if count is not None})
        running = sum(examples_so_far(*item) for item, count in found.items() if count is None)
        progress.update(len(finished), examples=f"{sum(finished.values()) + running:,}")
        if stopped:
          break
    return finished


def _spilled_examples(job: SplitJob, source_shard: int) -> int | None:
  spill = read_spill(job.directory, source_shard)
  return None if spill is None else spill.examples


def _heartbeat(job: SplitJob, source_shard: int) -> int:
  try:
    return int(spill_path(job.directory, source_shard, "progress").read_text() or 0)
  except FileNotFoundError:
    return 0


def _written_examples(job: SplitJob, shard: int) -> int | None:
  files = read_shard_files(job.directory, shard)
  return None if files is None else files.records.records
