"""The first third of the job: a source range, preprocessed once, into a durable file.

The expensive part is done here; what follows only moves bytes. The spill's marker is written last: where it
is, the spill is whole, and a job that starts again takes it as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from anystep.cache_job.preprocessing.example_batches import ExampleBatches
from anystep.cache_job.preprocessing.example_checks import check_output_features
from anystep.cache_job.preprocessing.example_datasets import count_examples, registered_task
from anystep.cache_job.state.failures import reported_failures
from anystep.cache_job.state.spill_files import SpillFile, SpillWriter, read_spill_file
from anystep.cache_job.state.split_job import (
  SourceRange,
  SplitJob,
  file_of,
  find_marker,
  finished_items,
  is_whole,
  put_marker,
)
from anystep.cache_job.state.split_stats import SplitStats
from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.order.permutation import round_keys
from anystep.records.parsing import parse_example
from anystep.records.writing import serialize_example
from anystep.tasks.registry.fingerprint import cached_preprocessors

_HEARTBEAT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
  """A finished spill.

  Attributes:
    examples: how many came of the source range.
    features: what they hold; None where there was none to tell.
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


def count_source(job: SplitJob, shard: int) -> None:
  """Counts a source shard's examples, where ranges are cut."""
  if find_marker(job, "count", shard, dict) is None:
    with reported_failures(job, source_shard=job.source_shards[shard]):
      put_marker(job, "count", shard, {"examples": count_examples(registered_task(job), job, shard)})


def find_spill(job: SplitJob, number: int) -> Spill | None:
  """A finished spill; None where it is not, or no longer whole."""
  spill = find_marker(job, "spill", number, _spill_of)
  return spill if spill and all(is_whole(job, file.name, file.bytes) for file in spill.files) else None


def _spill_of(document: Any) -> Spill:
  features = document["features"]
  if features is not None:
    features = {name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in features.items()}
  files = [SpillFile(**file) for file in document["files"]]
  return Spill(**{**document, "features": features, "files": files})


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
    if spill.bad:
      check_bad_examples(job, [found for k in finished_items(job)["spill"] if (found := find_spill(job, k))])
    return spill


def check_bad_examples(job: SplitJob, spills: Sequence[Spill]) -> None:
  """Ends the job where spills have more bad examples than are borne, though none of them alone has.

  Raises:
    AnystepError: 65 `bad_examples`.
  """
  bad = [entry for spill in spills for entry in spill.bad]
  if len(bad) > job.options.max_bad_examples:
    raise AnystepError(
      ExitCode.DATA,
      "bad_examples",
      expected=f"at most {job.options.max_bad_examples}",
      got=len(bad),
      first=bad[0]["got"],
      fix="mend the source or the preprocessor and cache with --noresume, or raise --max_bad_examples",
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
  stats = SplitStats(task.output_features, char_counts=job.options.char_counts)
  heartbeat = _Heartbeat(job, source)
  writer = SpillWriter(file_of(job, f"spill-{source.number:05d}"))
  try:
    for number, (batch, records) in enumerate(batches):
      if number == 0:
        check_end(task, job, batches)
      stats.add(batch)
      writer.add(records)
      heartbeat.beat(stats.counts["examples"])
    writer.finish()
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


def check_end(task: Any, job: SplitJob, batches: ExampleBatches) -> None:
  """Where the cache is the task's last word, it must be what the task says.

  Raises:
    AnystepError: 78 `output_feature`.
  """
  nothing_follows = len(cached_preprocessors(task, "end")) == len(
    cached_preprocessors(task, job.options.cache_at)
  )
  if nothing_follows and batches.features is not None:
    check_output_features(task, batches.features)


def _is_to_be_checked(job: SplitJob, source: SourceRange) -> bool:
  """Whether a source range is among those that are run twice: the first, and a share of the others."""
  if not job.options.determinism_check:
    return False
  drawn = round_keys("determinism_check", job.task, job.split, source.number)[0] / 2**64
  return source.number == 0 or bool(100 * drawn < job.options.determinism_check)


def _check_again(job: SplitJob, source: SourceRange, spill: Spill) -> None:
  """Runs the preprocessors of a source range again and compares each record.

  Raises:
    AnystepError: 65 `preprocessors_differ`.
  """
  expected, found = _spilled(job, spill), _preprocessed(job, source)
  for place, (first, second) in enumerate(itertools.zip_longest(expected, found)):
    if first != second:
      if first is None or second is None:
        more = f"more than {place} examples"
        shown = [f"{place} examples" if record is None else more for record in (first, second)]
        raise _differ(place, expected=shown[0], got=shown[1], features="")
      examples = [parse_example(record, spill.features or {}) for record in (first, second)]
      names = [name for name in examples[0] if _bytes_of(examples[0], name) != _bytes_of(examples[1], name)]
      shown = _shown_difference(*(example[names[0]] for example in examples))
      raise _differ(place, expected=shown[0], got=shown[1], features=",".join(names))


def _spilled(job: SplitJob, spill: Spill) -> Iterator[bytes]:
  for file in spill.files:
    records = read_spill_file(job.directory, file, num_features=len(sequence_names(spill.features)))
    yield from records.records()


def _preprocessed(job: SplitJob, source: SourceRange) -> Iterator[bytes]:
  for _, records in ExampleBatches(registered_task(job), job, source):
    yield from records.records()


def _shown_difference(first: Any, second: Any) -> list[str]:
  """Two values of a feature, from where they differ, which may be far from where they begin."""
  while isinstance(first, Ragged) and isinstance(second, Ragged):
    first, second = first.values, second.values
  values = [np.ravel(value).tolist() for value in (first, second)]
  pairs = zip(*values, strict=False)
  start = next((k for k, (one, other) in enumerate(pairs) if repr(one) != repr(other)), min(map(len, values)))
  return [f"{str(own[start : start + 8])[:300]} at {start} of {len(own)}" for own in values]


def _bytes_of(example: Mapping[str, Any], name: str) -> bytes:
  return serialize_example({name: example[name]})


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


class _Heartbeat:
  """Writes now and then how many examples there were, for whoever watches the job."""

  def __init__(self, job: SplitJob, source: SourceRange):
    self._path = progress_path(job, source.number)
    self._next_seconds = time.monotonic() + _HEARTBEAT_SECONDS

  def beat(self, examples: int) -> None:
    if time.monotonic() >= self._next_seconds:
      self._path.write_text(str(examples))
      self._next_seconds = time.monotonic() + _HEARTBEAT_SECONDS
