"""Refusals of tasks and options that no cache can be made of."""

from __future__ import annotations

import inspect
import os

import seqio
from etils import epath

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.state.split_job import SplitJob
from anystep.caches.manifest import Manifest
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import names, storage
from anystep.tasks.registry.fingerprint import SEQIO_CACHE, cached_preprocessors


def check_preprocessors(task: seqio.Task) -> None:
  """Refuse a preprocessor before the placeholder that takes feature lengths, as SeqIO does."""
  try:
    _ = task.preprocessors
  except ValueError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "preprocessors_refused",
      task=task.name,
      got=one_line(error),
      fix="move the placeholder before it, and cache the task with --cache_at=end and --task_feature_lengths",
    ) from error


def check_cache_at(task: seqio.Task, options: CacheOptions) -> None:
  """Refuse a task without a placeholder, where the options do not say what to cache."""
  if not task.supports_caching and options.cache_at == "placeholder" and not options.index_only:
    raise AnystepError(
      ExitCode.CONFIG,
      "placeholder_missing",
      task=task.name,
      expected="seqio.CacheDatasetPlaceholder() among its preprocessors",
      got="none",
      fix="add it where the cache is to stand, cache everything with --cache_at=end, or leave the task out"
      " with --excluded_tasks",
    )


def check_lengths(task: seqio.Task, options: CacheOptions) -> None:
  """Refuse preprocessors that take feature lengths where none are given."""
  if options.task_feature_lengths is not None or options.seqio_cache_dir is not None:
    return
  for preprocessor in cached_preprocessors(task, options.cache_at):
    parameter = inspect.signature(preprocessor).parameters.get("sequence_length")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
      raise AnystepError(
        ExitCode.USAGE,
        "task_feature_lengths",
        task=task.name,
        preprocessor=seqio.utils.function_name(preprocessor),
        expected="the lengths that the examples are cached for",
        got="none",
        fix='name them, as --task_feature_lengths=\'{"inputs": 512, "targets": 114}\'',
      )


def check_indexable(task: seqio.Task) -> None:
  """Refuse a task of whose files as they are readers could not make its examples."""
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


def check_source_apart(job: SplitJob, directory: epath.Path) -> None:
  """Refuse a source whose files stand where the cache's shards would: they would be lost."""
  pattern = names.shard_pattern(job.split)
  for name in job.source_shards if job.seqio_cache is None else ():
    folder, file = os.path.split(name)
    if pattern.match(file) and storage.find_absolute(folder) == storage.find_absolute(directory):
      raise AnystepError(
        ExitCode.UNSAFE,
        "source_in_cache",
        task=job.task,
        split=job.split,
        path=name,
        expected="a source that is not in the directory of the task's cache, under the names of its shards",
        fix="give another --output_cache_dir, or rename the task or its source's files",
      )


def check_options(manifest: Manifest, options: CacheOptions) -> None:
  """Refuse options that differ from those of a complete cache."""
  requested: dict[str, object] = {"layout": options.layout}
  if not options.index_only:
    num_shards = options.bound_num_shards(manifest.num_shards)
    requested |= {
      "seed": options.seed,
      "base_seed": options.base_seed,
      "block_records": options.block_records,
      "num_shards": options.num_shards or num_shards,
      "container": options.container,
      "range_examples": options.range_examples,
      "cache_at": options.cache_at,
      "task_feature_lengths": options.task_feature_lengths,
    }
  made_with = {name: getattr(manifest, name) for name in requested}
  made_with["from_seqio_cache"] = manifest.fingerprint.provenance["source"] == SEQIO_CACHE
  requested["from_seqio_cache"] = options.seqio_cache_dir is not None
  for name, value in requested.items():
    if made_with[name] != value:
      raise AnystepError(
        ExitCode.MISMATCH,
        "cache_options",
        task=manifest.task,
        split=manifest.split,
        option=name,
        expected=value,
        got=made_with[name],
        fix="ask for the options that the cache was made with, or make it anew with --overwrite",
      )
