"""The first third of the job: a source range, preprocessed once, into a durable file.

The expensive part is done here; what follows only moves bytes. The spill's marker is written last: where it
is, the spill is whole, and a job that starts again takes it as it is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from anystep import storage
from anystep.cache_job.example_batches import ExampleBatches
from anystep.cache_job.example_checks import check_output_features
from anystep.cache_job.example_datasets import count_examples, registered_task
from anystep.cache_job.failures import reported_failures
from anystep.cache_job.spill_files import SpilledRecords, SpillWriter, read_spill_file
from anystep.cache_job.split_job import SourceRange, SplitJob, file_of, find_marker, put_marker
from anystep.cache_job.split_stats import SplitStats
from anystep.errors import AnystepError, ExitCode
from anystep.examples import parse_example
from anystep.manifest import Feature
from anystep.permutation import round_keys
from anystep.tasks.fingerprint import cached_preprocessors

_HEARTBEAT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
  """A finished spill.

  Attributes:
    examples: how many came of the source range.
    raw_bytes: of their records.
    features: what they hold; None where there was none to tell.
    stats: as `SplitStats.document` gives them.
    bad: the examples that were left out, as `BadExamples` lists them.
    checked: whether a second run of the preprocessors gave the same.
    file: its name. bytes: its size. frame_bytes: of which records are the first.
  """

  examples: int
  raw_bytes: int
  features: Mapping[str, Feature] | None
  stats: Mapping[str, Any]
  bad: list[dict[str, Any]]
  checked: bool
  file: str
  bytes: int
  frame_bytes: int


def count_source(job: SplitJob, shard: int) -> None:
  """Counts a source shard's examples, where ranges are cut."""
  if find_marker(job, "count", shard) is None:
    with reported_failures(job, source_shard=job.source_shards[shard]):
      put_marker(job, "count", shard, {"examples": count_examples(registered_task(job), job, shard)})


def find_spill(job: SplitJob, number: int) -> Spill | None:
  """A finished spill; None where it is not, or no longer whole."""
  document = find_marker(job, "spill", number)
  if document is None:
    return None
  features = document["features"]
  if features is not None:
    features = {name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in features.items()}
  spill = Spill(**{**document, "features": features})
  path = file_of(job, spill.file)
  return spill if path.exists() and path.stat().length == spill.bytes else None


def write_spill(job: SplitJob, source: SourceRange) -> Spill:
  """Preprocesses a source range into its spill; one that is finished is left as it is."""
  with reported_failures(job, source_shard=source.name):
    spill = find_spill(job, source.number)
    is_checked = _is_to_be_checked(job, source)
    if spill is not None and (spill.checked or not is_checked):
      return spill
    spill = spill or _write_spill(job, source)
    if is_checked:
      _check_again(job, source, spill)
      spill = dataclasses.replace(spill, checked=True)
    put_marker(job, "spill", source.number, dataclasses.asdict(spill))
    return spill


def read_spill(job: SplitJob, spill: Spill) -> SpilledRecords:
  """A spill's records."""
  return read_spill_file(
    file_of(job, spill.file),
    num_records=spill.examples,
    num_features=len(sequence_names(spill.features)),
    frame_bytes=spill.frame_bytes,
  )


def sequence_names(features: Mapping[str, Feature] | None) -> list[str]:
  """The columns of lengths tables."""
  return sorted(name for name, feature in (features or {}).items() if feature.sequence)


def progress_path(job: SplitJob, number: int) -> epath.Path:
  """Where a worker says how many examples it has done of a source range."""
  return file_of(job, f"spill-{number:05d}.progress")


def _write_spill(job: SplitJob, source: SourceRange) -> Spill:
  task = registered_task(job)
  batches = ExampleBatches(task, job, source)
  stats = SplitStats(task.output_features, char_counts=job.char_counts)
  path = storage.attempt_path(file_of(job, f"spill-{source.number:05d}"))
  heartbeat = _Heartbeat(job, source)
  writer = None
  try:
    with storage.new_file(path) as file:
      for batch, records in batches:
        if writer is None:
          _check_end(task, job, batches)
          writer = SpillWriter(file, num_features=len(sequence_names(batches.features)))
        stats.add(batch)
        writer.add(records)
        heartbeat.beat(stats.counts["examples"])
      writer = writer or SpillWriter(file, num_features=len(sequence_names(batches.features)))
      frame_bytes = writer.close()
      size = file.tell()
  except BaseException:
    path.unlink(missing_ok=True)
    raise
  return Spill(
    examples=stats.counts["examples"],
    raw_bytes=writer.raw_bytes,
    features=batches.features,
    stats=stats.document(),
    bad=batches.bad.entries,
    checked=False,
    file=path.name,
    bytes=size,
    frame_bytes=frame_bytes,
  )


def _check_end(task: Any, job: SplitJob, batches: ExampleBatches) -> None:
  """Where the cache is the task's last word, it must be what the task says."""
  nothing_follows = len(cached_preprocessors(task, "end")) == len(cached_preprocessors(task, job.cache_at))
  if nothing_follows and batches.features is not None:
    check_output_features(task, batches.features)


def _is_to_be_checked(job: SplitJob, source: SourceRange) -> bool:
  """Whether a source range is among those that are run twice: the first, and a share of the others."""
  if not job.determinism_check:
    return False
  drawn = round_keys("determinism_check", job.task, job.split, source.number)[0] / 2**64
  return source.number == 0 or bool(100 * drawn < job.determinism_check)


def _check_again(job: SplitJob, source: SourceRange, spill: Spill) -> None:
  """Runs the preprocessors of a source range again and compares each record.

  Raises:
    AnystepError: 65 `preprocessors_differ`.
  """
  expected = read_spill(job, spill)
  begins = np.concatenate([[0], np.cumsum(expected.sizes, dtype=np.int64)])
  place = 0
  for _, found in ExampleBatches(registered_task(job), job, source):
    part = expected.data[begins[place] : begins[min(place + len(found), len(expected))]]
    if not np.array_equal(part, found.data):
      raise _difference(expected, found, place, spill.features or {})
    place += len(found)
  if place != len(expected):
    raise _differ(place, expected=f"{len(expected)} examples", got=f"{place} examples", features="")


def _difference(
  expected: SpilledRecords, found: SpilledRecords, place: int, features: Mapping[str, Feature]
) -> AnystepError:
  """The error of the first record that differs; `found` are those from a place on."""
  for first, second in zip(_slices(expected, place), _slices(found, 0), strict=False):
    if first != second:
      examples = [parse_example(record, features) for record in (first, second)]
      names = [name for name in features if repr(examples[0][name]) != repr(examples[1][name])]
      shown = [str({name: example[name] for name in names})[:300] for example in examples]
      return _differ(place, expected=shown[0], got=shown[1], features=",".join(names))
    place += 1
  return _differ(place, expected=f"{len(expected)} examples", got="more", features="")


def _differ(place: int, *, expected: str, got: str, features: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "preprocessors_differ",
    place=place,
    features=features,
    expected=expected,
    got=got,
    fix="let preprocessors draw by the seeds of seqio.map_over_dataset alone, and depend on nothing outside",
  )


def _slices(records: SpilledRecords, first: int) -> Iterator[bytes]:
  stops = np.cumsum(records.sizes, dtype=np.int64)
  for row in range(first, len(records)):
    yield records.data[stops[row] - records.sizes[row] : stops[row]].tobytes()


class _Heartbeat:
  """Writes now and then how many examples there were, for whoever watches the job."""

  def __init__(self, job: SplitJob, source: SourceRange):
    self._path = progress_path(job, source.number)
    self._next_seconds = time.monotonic() + _HEARTBEAT_SECONDS

  def beat(self, examples: int) -> None:
    if time.monotonic() >= self._next_seconds:
      self._path.write_text(str(examples))
      self._next_seconds = time.monotonic() + _HEARTBEAT_SECONDS
