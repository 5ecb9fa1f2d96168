"""Fingerprint of a task: what its cached examples depend on (docs/order.md#the-fingerprint)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio
from etils import epath

from anystep.caches.cache import Cache
from anystep.caches.manifest import Fingerprint, Manifest
from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.files.json_files import canonical_json
from anystep.tasks import seqio_internals
from anystep.tasks.registry.moved_functions import (
  MODULE,
  are_moves_accepted,
  find_changed_calls,
  hash_calls,
  report_moves,
  undo_moves,
)
from anystep.tasks.vocabularies.copies import hash_vocabularies, use_copies
from anystep.tasks.vocabularies.files import watch_models
from anystep.tasks.vocabularies.hugging_face import HuggingFaceVocabulary
from anystep.transforms.identity import describe, find_functions

# Of the fingerprint's form; a cache of another version is read by the program that wrote it.
_VERSION = 1
# The source of a cache whose examples another cache had.
SEQIO_CACHE = "a cache by seqio_cache_tasks"
# A manifest has a digest in the place of longer lists.
_MAX_LISTED = 10_000
# The key of `hash_calls` in provenance, which caches of version 0.1 have not.
CALLS = "calls"
_LIBRARIES = ("anystep", "seqio", "tensorflow", "tensorflow-datasets", "tensorflow-text", "sentencepiece")


def cached_preprocessors(task: seqio.Task, cache_at: str) -> Sequence[Callable]:
  """Return the preprocessors of the cache job: those before the placeholder, or all.

  All are meant with `cache_at="end"`, and where there is no placeholder.
  """
  steps = list(task.preprocessors)
  places = [k for k, step in enumerate(steps) if isinstance(step, seqio.CacheDatasetPlaceholder)]
  if not places:
    return steps
  return steps[: places[0]] if cache_at == "placeholder" else steps[: places[0]] + steps[places[0] + 1 :]


def reader_part(
  task: seqio.Task, *, cache_at: str, task_feature_lengths: Mapping[str, int] | None
) -> dict[str, Any]:
  """Return what a reader's registered task must have in common with the cached task, as JSON.

  Functions that a preprocessor merely calls are not covered.

  Raises:
    AnystepError: 66 `vocabulary_missing` where a vocabulary's file is not there.
  """
  watch_models()
  return {
    "version": _VERSION,
    "task": task.name,
    "output_features": {name: describe(feature) for name, feature in task.output_features.items()},
    "preprocessors": [describe(step) for step in cached_preprocessors(task, cache_at)],
    "cache_at": cache_at,
    "task_feature_lengths": dict(task_feature_lengths) if task_feature_lengths else None,
  }


def provenance_part(
  task: seqio.Task, *, seed: int, base_seed: int, seqio_cache: Sequence[str] | None = None
) -> dict[str, Any]:
  """Return where the examples came from and what made them, as JSON; nothing in it depends on the machine.

  Args:
    task: registered.
    seed: the preshuffle's. base_seed: the preprocessors'.
    seqio_cache: paths of the files of SeqIO's own cache, where one is the source.
  """
  if seqio_cache is None:
    arguments = _describe_source(task.source)
    source = {"source": describe(type(task.source)), "source_arguments": _digest_long_lists(arguments)}
  else:
    files = _digest_long_lists({"files": _describe_files(seqio_cache)})
    source = {"source": SEQIO_CACHE, "source_arguments": files}
  # Tasks without such files keep the form that their manifests had before vocabularies were recorded.
  digests = hash_vocabularies(task)
  of_vocabularies = {"vocabularies": digests} if digests else {}
  tokenizers = ("tokenizers",) if _uses_tokenizers(task) else ()
  return {
    **source,
    **of_vocabularies,
    "python": platform.python_version(),
    "libraries": {name: _find_version(name) for name in (*_LIBRARIES, *tokenizers)},
    "seed": seed,
    "base_seed": base_seed,
  }


def check_reader(task: seqio.Task, manifest: Manifest, *, cache: Cache | None = None) -> None:
  """Refuse a registered task that would not make the cached examples.

  Args:
    task: registered.
    manifest: of its cache.
    cache: whose copies stand in, from now on, for files of the task's vocabularies that are gone.

  Raises:
    AnystepError: 76 `task_changed` names the first item that differs; 66 `vocabulary_missing`.
  """
  if cache is not None:
    use_copies(task, cache)
  cached = manifest.fingerprint.reader
  registered = reader_part(
    task, cache_at=manifest.cache_at, task_feature_lengths=manifest.task_feature_lengths
  )
  if first_difference(cached, registered) is None:
    return
  functions = find_functions(cached_preprocessors(task, manifest.cache_at))
  renamed, moves = undo_moves(cached, registered, functions)
  difference = first_difference(cached, renamed)
  if difference:
    raise _make_changed_error(task, *difference, fix="undo the change to the task")
  if not are_moves_accepted():
    fix = f"move it back, or let --accept_change={MODULE} take it for the same"
    calls = manifest.fingerprint.provenance.get(CALLS)
    if calls is None:
      move = moves[0]
      raise _make_changed_error(
        task, "a function's module, and perhaps what it calls there", move.before, move.now, fix=fix
      )
    changed = find_changed_calls(calls, moves, functions)
    if changed is not None:
      function, called = changed
      raise _make_changed_error(
        task,
        f"what {function} calls in its module",
        "the same as when it was cached",
        f"another source of {', '.join(called)}",
        fix=fix,
      )
  report_moves(task.name, tuple(moves))


def _make_changed_error(task: seqio.Task, item: str, cached: Any, now: Any, *, fix: str) -> AnystepError:
  return AnystepError(
    ExitCode.MISMATCH,
    "task_changed",
    task=task.name,
    item=item,
    expected=cached,
    got=now,
    fix=f"{fix}, or cache it again under another name or with --overwrite",
  )


def provenance_difference(task: seqio.Task, manifest: Manifest) -> str | None:
  """Return in what the cached examples' origin differs from the task's now, for people; None if the same."""
  cached = manifest.fingerprint.provenance
  is_adopted = cached.get("source") == SEQIO_CACHE
  now = provenance_part(
    task, seed=manifest.seed, base_seed=manifest.base_seed, seqio_cache=() if is_adopted else None
  )
  if is_adopted:
    # The adopted files may be gone.
    now["source_arguments"] = cached.get("source_arguments")
  if "vocabularies" not in cached:
    # The cache is older than this key; the reader part has what its vocabularies hold.
    now.pop("vocabularies", None)
  if CALLS in cached:
    steps = cached_preprocessors(task, manifest.cache_at)
    # `check_reader` compares what moved functions call.
    names = find_functions(steps).keys() & cached[CALLS].keys()
    calls = hash_calls(steps)
    now[CALLS] = {name: calls.get(name, {}) for name in names}
    cached = {**cached, CALLS: {name: cached[CALLS][name] for name in names}}
  difference = first_difference(cached, now)
  return None if difference is None else "{}: {} when it was cached, {} now".format(*difference)


def fingerprint(
  task: seqio.Task,
  *,
  cache_at: str,
  task_feature_lengths: Mapping[str, int] | None,
  seed: int,
  base_seed: int,
  seqio_cache: Sequence[str] | None = None,
) -> Fingerprint:
  """Return the task's fingerprint for its manifest."""
  return Fingerprint(
    reader=reader_part(task, cache_at=cache_at, task_feature_lengths=task_feature_lengths),
    provenance={
      **provenance_part(task, seed=seed, base_seed=base_seed, seqio_cache=seqio_cache),
      CALLS: hash_calls(cached_preprocessors(task, cache_at)),
    },
  )


def _describe_source(source: seqio.DataSource) -> dict[str, Any]:
  """Return what a source reads, as far as its kind shows it, without paths of this machine."""
  if hasattr(source, "described"):
    return source.described()
  plain = {
    name.lstrip("_"): value
    for name, value in sorted(vars(source).items())
    if isinstance(value, (bool, int, float, str, tuple, list, dict)) and "/" not in str(value)
  }
  described = {name: describe(value) for name, value in plain.items()}
  if isinstance(source, seqio.FunctionDataSource):
    described["function"] = describe(seqio_internals.dataset_function(source))
  if isinstance(source, seqio.TfdsDataSource):
    described["tfds_name"] = source.tfds_dataset.name
  if isinstance(source, seqio.FileDataSource):
    # Patterns begin where the program runs; the files that they name stand here.
    described.pop("split_to_filepattern", None)
    described["reader"] = describe(seqio_internals.file_reader(source))
    described["files"] = {split: _describe_files(source.list_shards(split)) for split in source.splits}
  return described


def _describe_files(paths: Sequence[str]) -> list[list[Any]]:
  """Return names and sizes of files, in bytes, in the order of reading."""
  return [[os.path.basename(path), _measure(path)] for path in paths]


def _measure(path: str) -> int:
  # Of a million files it counts that this takes a tenth of epath's time.
  return int(epath.Path(path).stat().length) if storage.is_remote(path) else os.stat(path).st_size


def _digest_long_lists(value: Any) -> Any:
  """Return a JSON value with the number of items and a digest in the place of each list of many files."""
  if isinstance(value, Mapping):
    return {name: _digest_long_lists(item) for name, item in value.items()}
  if not isinstance(value, (list, tuple)) or len(value) <= _MAX_LISTED:
    return value
  return {"items": len(value), "sha256": hashlib.sha256(canonical_json(value).encode()).hexdigest()}


def first_difference(cached: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
  """Return the path of the first item in which two JSON documents differ, and both values; None if equal."""
  if isinstance(cached, list) and isinstance(now, Mapping):
    # Version 0.1 noted every file.
    cached = _digest_long_lists(cached)
  if isinstance(cached, Mapping) and isinstance(now, Mapping):
    for key in sorted({*cached, *now}):
      difference = first_difference(cached.get(key), now.get(key), f"{path}.{key}".lstrip("."))
      if difference:
        return difference
    return None
  if isinstance(cached, list) and isinstance(now, list) and len(cached) == len(now):
    for position, (left, right) in enumerate(zip(cached, now, strict=True)):
      difference = first_difference(left, right, f"{path}[{position}]")
      if difference:
        return difference
    return None
  return None if cached == now else (path, cached, now)


def _uses_tokenizers(task: seqio.Task) -> bool:
  return any(isinstance(f.vocabulary, HuggingFaceVocabulary) for f in task.output_features.values())


def _find_version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None
