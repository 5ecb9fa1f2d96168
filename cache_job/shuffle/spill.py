"""First stage: spills, each a source range that was preprocessed once, in durable files.

This stage is the expensive one; later stages only move bytes. The spill's marker is written last: where there
is one, the spill is whole, and a job that starts again keeps it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from anystep.cache_job.preprocessing.example_batches import ExampleBatches
from anystep.cache_job.preprocessing.example_datasets import count_examples, get_registered_task
from anystep.cache_job.state.failures import report_failures
from anystep.cache_job.state.job_lock import keep_lock
from anystep.cache_job.state.spill_files import SpillFile, SpillWriter, read_spill_file
from anystep.cache_job.state.split_job import (
  SourceRange,
  SplitJob,
  find_finished_items,
  find_marker,
  is_whole,
  locate_file,
  put_marker,
)
from anystep.cache_job.state.split_stats import Count, SplitStats, count_nowhere
from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.files import storage
from anystep.order.permutation import round_keys
from anystep.records.parsing import parse_example
from anystep.records.writing import serialize_example

_HEARTBEAT_SECONDS = 1.0
# Stores take one change of an object a second, and each costs.
_STORE_HEARTBEAT_SECONDS = 10.0
_HEARTBEAT = re.compile(r"spill-(\d+)\.progress\Z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
  """A finished spill.

  Attributes:
    examples: number of examples after the preprocessors.
    features: theirs, by name; None where there was no example.
    stats: as `SplitStats.document` gives them.
    bad: the examples that were left out, as `BadExamples` lists them.
    checked: whether a second run of the preprocessors gave the same.
    files: its files, in order; none where there is no example.
  """

  examples: int
  features: Mapping[str, Feature] | None
  stats: Mapping[str, Any]
  bad: list[dict[str, Any]]
  checked: bool
  files: list[SpillFile]


def count_source(job: SplitJob, shard: int, count: Count = count_nowhere) -> None:
  """Count a source shard's examples, where ranges are cut."""
  with report_failures(job, source_shard=job.source_shards[shard]):
    marker = find_marker(job, "count", shard, dict)
    if marker is None:
      marker = {"examples": count_examples(get_registered_task(job), job, shard)}
      put_marker(job, "count", shard, marker)
    count("examples", marker["examples"])


def find_spill(job: SplitJob, number: int) -> Spill | None:
  """Return a finished spill; None where it is not finished, or no longer whole."""
  spill = find_marker(job, "spill", number, _parse_spill)
  return spill if spill and all(is_whole(job, file.name, file.bytes) for file in spill.files) else None


def _parse_spill(document: Any) -> Spill:
  features = None if document["features"] is None else parse_features(document["features"])
  files = [SpillFile(**file) for file in document["files"]]
  return Spill(**{**document, "features": features, "files": files})


def parse_features(document: Any) -> dict[str, Feature]:
  """Return features by name from their JSON."""
  return {name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in document.items()}


def write_spill(job: SplitJob, source: SourceRange, count: Count = count_nowhere) -> Spill:
  """Preprocess a source range into its spill; one that is finished is left as it is, and counted.

  Args:
    job: the split's.
    source: the range.
    count: is told of examples, bytes of records and milliseconds as they come, and of bad examples.
  """
  with report_failures(job, source_shard=source.name):
    spill = find_spill(job, source.number)
    is_checked = _is_chosen_for_check(job, source)
    if spill is not None:
      count("examples", spill.examples)
      count("bytes", sum(file.raw_bytes for file in spill.files))
      count("bad_examples", len(spill.bad))
      if spill.checked or not is_checked:
        return spill
    spill = spill or _write_spill(job, source, count)
    if is_checked:
      _check_again(job, source, spill)
      spill = dataclasses.replace(spill, checked=True)
    put_marker(job, "spill", source.number, dataclasses.asdict(spill))
    if spill.bad:
      finished = [other for k in find_finished_items(job)["spill"] if (other := find_spill(job, k))]
      check_bad_examples(job, [entry for other in finished for entry in other.bad])
    return spill


def check_bad_examples(job: SplitJob, bad: Sequence[Mapping[str, Any]]) -> None:
  """End the job where there are more bad examples than the limit.

  Raises:
    AnystepError: 65 `bad_examples`.
  """
  if len(bad) > job.options.max_bad_examples:
    raise AnystepError(
      ExitCode.DATA,
      "bad_examples",
      expected=f"at most {job.options.max_bad_examples}",
      got=len(bad),
      first=bad[0]["got"],
      fix="mend the source or the preprocessor and cache with --noresume, or raise --max_bad_examples",
    )


def list_sequence_names(features: Mapping[str, Feature] | None) -> list[str]:
  """Return the names of the columns of lengths tables."""
  return sorted(name for name, feature in (features or {}).items() if feature.sequence)


def find_heartbeats(job: SplitJob, finished: Collection[int]) -> list[epath.Path]:
  """Return the files where workers note the number of examples done of ranges that are not finished."""
  paths = epath.Path(job.directory).iterdir() if epath.Path(job.directory).exists() else ()
  return [path for path in paths if (match := _HEARTBEAT.match(path.name)) and int(match[1]) not in finished]


def _write_spill(job: SplitJob, source: SourceRange, count: Count) -> Spill:
  task = get_registered_task(job)
  batches = ExampleBatches(task, job, source)
  stats = SplitStats(task.output_features, char_counts=job.options.char_counts)
  heartbeat = _Heartbeat(job, source)
  writer = SpillWriter(locate_file(job, f"spill-{source.number:05d}"))
  start = time.monotonic()
  try:
    for number, (batch, records) in enumerate(batches):
      if number == 0:
        batches.check_output()
      stats.add(batch)
      writer.add(records)
      heartbeat.beat(stats.counts["examples"])
      count("examples", len(records))
      count("bytes", records.data.nbytes)
      stop = time.monotonic()
      count("milliseconds", round(1000 * stop) - round(1000 * start))
      start = stop
    writer.finish()
    count("bad_examples", len(batches.bad.entries))
  except BaseException:
    writer.remove()
    raise
  return Spill(
    examples=stats.counts["examples"],
    features=batches.features,
    stats=stats.document(),
    bad=batches.bad.entries,
    checked=False,
    files=writer.files,
  )


def _is_chosen_for_check(job: SplitJob, source: SourceRange) -> bool:
  """Tell whether a source range is run twice: the first is, and a share of the others."""
  if not job.options.determinism_check:
    return False
  drawn = round_keys("determinism_check", job.task, job.split, source.number)[0] / 2**64
  return source.number == 0 or bool(100 * drawn < job.options.determinism_check)


def _check_again(job: SplitJob, source: SourceRange, spill: Spill) -> None:
  """Run the preprocessors of a source range again and compare each record.

  Raises:
    AnystepError: 65 `preprocessors_differ`.
  """
  first_run, second_run = _read_spilled(job, spill), _preprocess_again(job, source)
  for place, (first, second) in enumerate(itertools.zip_longest(first_run, second_run)):
    if first != second:
      if first is None or second is None:
        more = f"more than {place} examples"
        sides = [f"{place} examples" if record is None else more for record in (first, second)]
        raise _make_difference_error(place, expected=sides[0], got=sides[1], features="")
      examples = [parse_example(record, spill.features or {}) for record in (first, second)]
      names = [
        name
        for name in examples[0]
        if _serialize_feature(examples[0], name) != _serialize_feature(examples[1], name)
      ]
      sides = _format_difference(*(example[names[0]] for example in examples))
      raise _make_difference_error(place, expected=sides[0], got=sides[1], features=",".join(names))


def _read_spilled(job: SplitJob, spill: Spill) -> Iterator[bytes]:
  for file in spill.files:
    records = read_spill_file(job.directory, file, num_features=len(list_sequence_names(spill.features)))
    yield from records.records()


def _preprocess_again(job: SplitJob, source: SourceRange) -> Iterator[bytes]:
  for _, records in ExampleBatches(get_registered_task(job), job, source):
    yield from records.records()


def _format_difference(first: Any, second: Any) -> list[str]:
  """Return two values of a feature as texts, from the place where they first differ."""
  while isinstance(first, Ragged) and isinstance(second, Ragged):
    first, second = first.values, second.values
  values = [np.ravel(value).tolist() for value in (first, second)]
  pairs = zip(*values, strict=False)
  start = next((k for k, (one, other) in enumerate(pairs) if repr(one) != repr(other)), min(map(len, values)))
  return [f"{str(items[start : start + 8])[:300]} at {start} of {len(items)}" for items in values]


def _serialize_feature(example: Mapping[str, Any], name: str) -> bytes:
  return serialize_example({name: example[name]})


def _make_difference_error(place: int, *, expected: str, got: str, features: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "preprocessors_differ",
    place=place,
    features=features,
    expected=expected,
    got=got,
    fix="let preprocessors draw by the seeds of seqio.map_over_dataset alone, and depend on nothing outside",
  )


class _Heartbeat:
  """Writes the number of examples so far now and then, for the watcher."""

  def __init__(self, job: SplitJob, source: SourceRange):
    self._job = job
    self._path = locate_file(job, f"spill-{source.number:05d}.progress")
    self._pause_seconds = _STORE_HEARTBEAT_SECONDS if storage.is_remote(job.directory) else _HEARTBEAT_SECONDS
    self._next_seconds = time.monotonic() + self._pause_seconds

  def beat(self, examples: int) -> None:
    if time.monotonic() >= self._next_seconds:
      self._path.write_text(str(examples))
      keep_lock(self._job)
      self._next_seconds = time.monotonic() + self._pause_seconds
