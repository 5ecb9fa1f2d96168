"""Second stage: spills sorted by the shards of their records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anystep.cache_job.preprocessing.seqio_caches import check_count
from anystep.cache_job.shuffle.spill import Spill, check_bad_examples, find_spill, list_sequence_names
from anystep.cache_job.state.failures import report_failures
from anystep.cache_job.state.spill_files import (
  FILE_BYTES,
  SortedWriter,
  SpilledRecords,
  SpillFile,
  read_spill_file,
)
from anystep.cache_job.state.split_job import (
  FinalPlan,
  SplitJob,
  choose_num_shards,
  find_marker,
  is_whole,
  list_source_ranges,
  locate_file,
  make_incomplete_error,
  put_marker,
  read_plan,
  write_plan,
)
from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.order.preshuffle import preshuffle


def plan_final(job: SplitJob) -> FinalPlan:
  """Plan the shards of a split, all of whose spills must be finished.

  Raises:
    AnystepError: 65 `feature_form_varies` and `bad_examples`; 66 `split_empty`.
  """
  with report_failures(job):
    spills = read_all_spills(job)
    _check_agreement(job, spills)
    if job.seqio_cache is not None:
      num_read = sum(spill.examples + len(spill.bad) for spill in spills)
      check_count(job.seqio_cache, job.split, num_read)
    num_examples = sum(spill.examples for spill in spills)
    files = [file for spill in spills for file in spill.files]
    record_bytes = sum(file.raw_bytes for file in files)
    plan = FinalPlan(
      num_shards=choose_num_shards(job, num_examples=num_examples, record_bytes=record_bytes),
      num_features=max(len(list_sequence_names(spill.features)) for spill in spills),
      examples=[spill.examples for spill in spills],
      groups=_group_files(files),
    )
    write_plan(job, plan)
    return plan


def read_all_spills(job: SplitJob) -> list[Spill]:
  """Return the spills of a split, in the source's order.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  spills = []
  for source in list_source_ranges(job):
    spill = find_spill(job, source.number)
    if spill is None:
      raise make_incomplete_error(job.task, job.split, job.directory, f"the spill of {source.name}")
    spills.append(spill)
  return spills


def find_sorted(job: SplitJob, plan: FinalPlan, group: int) -> str | None:
  """Return the name of a sorted file; None where it is not finished, no longer whole, or of other spills."""
  marker = find_marker(
    job, "sorted", group, lambda document: (document["spills"], str(document["file"]), document["bytes"])
  )
  if marker is None:
    return None
  spills, name, size = marker
  return name if spills == [file.name for file in plan.groups[group]] and is_whole(job, name, size) else None


def sort_group(job: SplitJob, group: int) -> None:
  """Sort a group of spills into one file; one that is finished is left as it is."""
  with report_failures(job, group=group):
    plan = read_plan(job)
    if find_sorted(job, plan, group) is not None:
      return
    records = _join(
      [read_spill_file(job.directory, file, num_features=plan.num_features) for file in plan.groups[group]]
    )
    start = sum(file.records for before in plan.groups[:group] for file in before)
    ordinals = np.arange(start, start + len(records))
    indices = preshuffle(sum(plan.examples), task=job.task, split=job.split, seed=job.options.seed)(ordinals)
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
    spills = [file.name for file in plan.groups[group]]
    put_marker(job, "sorted", group, {"file": path.name, "bytes": size, "spills": spills})


def _join(parts: Sequence[SpilledRecords]) -> SpilledRecords:
  if len(parts) == 1:
    return parts[0]
  return SpilledRecords(
    np.concatenate([part.data for part in parts]),
    np.concatenate([part.sizes for part in parts]),
    np.concatenate([part.lengths for part in parts]),
  )


def _group_files(files: Sequence[SpillFile]) -> list[list[SpillFile]]:
  """Group files in order up to the size of one file, so that small spills do not make small sorted files."""
  groups: list[list[SpillFile]] = []
  group_bytes = 0
  for file in files:
    if groups and group_bytes + file.raw_bytes <= FILE_BYTES:
      groups[-1].append(file)
      group_bytes += file.raw_bytes
    else:
      groups.append([file])
      group_bytes = file.raw_bytes
  return groups


def _check_agreement(job: SplitJob, spills: Sequence[Spill]) -> None:
  check_bad_examples(job, spills)
  if not any(spill.examples for spill in spills):
    raise AnystepError(
      ExitCode.NO_INPUT,
      "split_empty",
      expected="at least one example",
      got=f"none of {len(spills)} source shards",
      fix="leave the split out with --splits, or see why its source or its preprocessors give none",
    )
  features_by_range = [
    (number, spill.features) for number, spill in enumerate(spills) if spill.features is not None
  ]
  for number, features in features_by_range:
    if features != features_by_range[0][1]:
      name = next(
        n
        for n in sorted({*features, *features_by_range[0][1]})
        if features.get(n) != features_by_range[0][1].get(n)
      )
      raise AnystepError(
        ExitCode.DATA,
        "feature_form_varies",
        source_shard=list_source_ranges(job)[number].name,
        feature=name,
        expected=features_by_range[0][1].get(name),
        got=features.get(name),
        fix="let the preprocessors give every example of the task the same features",
      )
