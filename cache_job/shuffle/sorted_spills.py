"""Second stage: spills sorted by the shards of their records."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.cache_job.preprocessing.seqio_caches import check_count
from anystep.cache_job.shuffle.spill import check_bad_examples, list_sequence_names
from anystep.cache_job.shuffle.summaries import read_spill_files, read_spill_summaries
from anystep.cache_job.state.failures import report_failures
from anystep.cache_job.state.group_sizes import group_files
from anystep.cache_job.state.spill_files import (
  SortedWriter,
  SpilledRecords,
  SpillFile,
  read_spill_file,
)
from anystep.cache_job.state.split_job import (
  CHUNK_ITEMS,
  FinalPlan,
  Group,
  SplitJob,
  choose_num_shards,
  count_source_ranges,
  find_marker,
  is_whole,
  list_source_ranges,
  locate_file,
  put_marker,
  put_summary,
  read_plan,
  read_summaries,
  require_finished,
  write_plan,
)
from anystep.cache_job.state.split_stats import Count, count_nowhere
from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.files import storage
from anystep.order.preshuffle import preshuffle


def plan_final(job: SplitJob) -> FinalPlan:
  """Plan the shards of a split, all of whose spills must be finished and summarized.

  Raises:
    AnystepError: 65 `feature_form_varies` and `bad_examples`; 66 `split_empty`.
  """
  with report_failures(job):
    num_read, bad, forms = 0, list[dict[str, Any]](), list[tuple[int, Mapping[str, Feature]]]()
    raw_bytes, records, chunk_files = list[int](), list[int](), [0]
    for summary in read_spill_summaries(job):
      num_read += sum(summary.examples) + len(summary.bad)
      bad += summary.bad
      forms += summary.forms
      raw_bytes += [file.raw_bytes for file in summary.files]
      records += [file.records for file in summary.files]
      chunk_files.append(len(raw_bytes))
    check_bad_examples(job, bad)
    num_examples = sum(records)
    if not num_examples:
      raise _make_empty_error(job)
    _check_forms(job, forms)
    if job.seqio_cache is not None:
      check_count(job.seqio_cache, job.split, num_read)
    plan = FinalPlan(
      num_shards=choose_num_shards(job, num_examples=num_examples, record_bytes=sum(raw_bytes)),
      num_features=len(list_sequence_names(forms[0][1])),
      groups=[
        _make_group(files, records=records, chunk_files=chunk_files)
        for files in group_files(raw_bytes, records, memory_bytes=job.options.worker_memory_mib << 20)
      ],
    )
    write_plan(job, plan)
    return plan


def find_sorted(job: SplitJob, plan: FinalPlan, group: int) -> str | None:
  """Return the name of a sorted file; None where it is not finished, no longer whole, or of other spills."""
  marker = find_marker(
    job, "sorted", group, lambda document: (document["spills"], str(document["file"]), document["bytes"])
  )
  if marker is None:
    return None
  spills, name, size = marker
  return name if spills == _digest_names(read_group(job, plan, group)) and is_whole(job, name, size) else None


def summarize_sorted(job: SplitJob, groups: Sequence[int]) -> None:
  """Write the names of a chunk of sorted files, all of which must be finished, to one file.

  Args:
    job: the split's.
    groups: their numbers, ascending.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  with report_failures(job):
    plan = read_plan(job)
    names = require_finished(job, groups, lambda group: find_sorted(job, plan, group), "sorted group")
    put_summary(job, "sorteds", groups[0] // CHUNK_ITEMS, names)


def read_sorted_names(job: SplitJob, plan: FinalPlan) -> list[str]:
  """Return the names of all sorted files."""
  summaries = read_summaries(job, "sorteds", len(plan.groups), lambda names: list(map(str, names)))
  return [name for summary in summaries for name in summary]


def read_group(job: SplitJob, plan: FinalPlan, group: int) -> list[SpillFile]:
  """Return the files of a group."""
  first = plan.groups[group]
  return read_spill_files(job, chunk=first.chunk, place=first.place, count=first.files)


def _digest_names(files: Iterable[SpillFile]) -> str:
  """Return a digest of files' names, each of which is of one attempt."""
  return hashlib.sha256(" ".join(file.name for file in files).encode()).hexdigest()


def sort_group(job: SplitJob, group: int, count: Count = count_nowhere) -> None:
  """Sort a group of spills into one file; one that is finished is left as it is, and counted."""
  with report_failures(job, group=group):
    plan = read_plan(job)
    count("examples", plan.groups[group].records)
    if find_sorted(job, plan, group) is not None:
      return
    files = read_group(job, plan, group)
    records = _read_together(job, files, num_features=plan.num_features)
    count("ranges", len(files))
    count("range_bytes", sum(file.bytes for file in files))
    start = sum(before.records for before in plan.groups[:group])
    ordinals = np.arange(start, start + len(records))
    indices = preshuffle(plan.num_examples, task=job.task, split=job.split, seed=job.options.seed)(ordinals)
    shards = indices % plan.num_shards
    order = np.lexsort((indices, shards))
    stops = np.cumsum(np.bincount(shards, minlength=plan.num_shards)).tolist()
    path = storage.attempt_path(locate_file(job, f"sorted-{group:05d}"))
    with storage.new_file(path) as file:
      writer = SortedWriter(file)
      for begin, stop in zip([0, *stops[:-1]], stops, strict=True):
        writer.add(records, order[begin:stop])
      writer.close()
      size = file.tell()
    count("bytes", size)
    put_marker(job, "sorted", group, {"file": path.name, "bytes": size, "spills": _digest_names(files)})


def _read_together(job: SplitJob, files: Sequence[SpillFile], *, num_features: int) -> SpilledRecords:
  """Read files one after the other into one array, so that memory holds their records once."""
  data = np.empty(sum(file.raw_bytes for file in files), np.uint8)
  sizes, lengths, end = [], [], 0
  for file in files:
    records = read_spill_file(job.directory, file, num_features=num_features)
    data[end : end + len(records.data)] = records.data
    end += len(records.data)
    sizes.append(records.sizes)
    lengths.append(records.lengths)
  return SpilledRecords(data, np.concatenate(sizes), np.concatenate(lengths))


def _make_group(files: range, *, records: Sequence[int], chunk_files: Sequence[int]) -> Group:
  """Return the group of a range of files.

  Args:
    files: their numbers.
    records: of each file.
    chunk_files: number of files before each chunk.
  """
  chunk = bisect.bisect_right(chunk_files, files.start) - 1
  return Group(
    chunk=chunk,
    place=files.start - chunk_files[chunk],
    files=len(files),
    records=sum(records[files.start : files.stop]),
  )


def _make_empty_error(job: SplitJob) -> AnystepError:
  return AnystepError(
    ExitCode.NO_INPUT,
    "split_empty",
    expected="at least one example",
    got=f"none of {count_source_ranges(job)} source shards",
    fix="leave the split out with --splits, or see why its source or its preprocessors give none",
  )


def _check_forms(job: SplitJob, forms: Sequence[tuple[int, Mapping[str, Feature]]]) -> None:
  """Refuse ranges whose examples have other features than the first one's."""
  (_, expected), *others = forms
  for number, features in others:
    if features != expected:
      name = next(n for n in sorted({*features, *expected}) if features.get(n) != expected.get(n))
      raise AnystepError(
        ExitCode.DATA,
        "feature_form_varies",
        source_shard=list_source_ranges(job)[number].name,
        feature=name,
        expected=expected.get(name),
        got=features.get(name),
        fix="let the preprocessors give every example of the task the same features",
      )
