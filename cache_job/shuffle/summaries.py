"""Summaries of finished spills: one file for each chunk of them.

Workers summarize what a stage has finished, chunk by chunk. So the plan of the next stage, and the completion
of the cache, read one file for a thousand items.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anystep.cache_job.shuffle.spill import find_spill, parse_features
from anystep.cache_job.state.failures import report_failures
from anystep.cache_job.state.spill_files import SpillFile
from anystep.cache_job.state.split_job import (
  CHUNK_ITEMS,
  SplitJob,
  check_count,
  count_source_ranges,
  put_summary,
  read_summaries,
  read_summary,
  require_finished,
)
from anystep.cache_job.state.split_stats import join_stats
from anystep.features.feature import Feature


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpillSummary:
  """Facts about a chunk of spills for later stages.

  Attributes:
    examples: number of examples of each, after the preprocessors.
    forms: features of the examples, each with the number of the first range that has other ones than the
      range before it.
    stats: of all of them, as `SplitStats.document` gives them.
    bad: the examples that were left out.
    files: of all of them, in order.
  """

  examples: list[int]
  forms: list[tuple[int, Mapping[str, Feature]]]
  stats: Mapping[str, Any]
  bad: list[dict[str, Any]]
  files: list[SpillFile]


def summarize_spills(job: SplitJob, ranges: Sequence[int]) -> None:
  """Write the summary of a chunk of spills, all of which must be finished.

  Args:
    job: the split's.
    ranges: numbers of the source ranges, ascending.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  with report_failures(job):
    spills = require_finished(job, ranges, lambda number: find_spill(job, number), "the spill of range")
    forms: list[tuple[int, Mapping[str, Feature]]] = []
    for number, spill in zip(ranges, spills, strict=True):
      if spill.features is not None and (not forms or forms[-1][1] != spill.features):
        forms.append((number, spill.features))
    columns = [dataclasses.astuple(file) for spill in spills for file in spill.files]
    document = {
      "examples": [spill.examples for spill in spills],
      "forms": [[number, {n: dataclasses.asdict(f) for n, f in form.items()}] for number, form in forms],
      "stats": join_stats([spill.stats for spill in spills]),
      "bad": [entry for spill in spills for entry in spill.bad],
      "files": columns,
    }
    put_summary(job, "spills", ranges[0] // CHUNK_ITEMS, document)


def read_spill_summaries(job: SplitJob) -> Iterator[SpillSummary]:
  """Yield the summaries of all spills of a split, in the source's order.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  return read_summaries(job, "spills", count_source_ranges(job), _parse_spills)


def read_spill_files(job: SplitJob, *, chunk: int, place: int, count: int) -> list[SpillFile]:
  """Return files of spills that stand one after the other.

  Args:
    job: the split's.
    chunk: number of the chunk that has the first one.
    place: of the first one among the chunk's files.
    count: number of files.
  """
  chunks = (read_summary(job, "spills", number, _parse_spills) for number in itertools.count(chunk))
  files = itertools.chain.from_iterable(summary.files for summary in chunks)
  return list(itertools.islice(files, place, place + count))


def _parse_spills(document: Any) -> SpillSummary:
  return SpillSummary(
    examples=[check_count(count) for count in document["examples"]],
    forms=[(number, parse_features(form)) for number, form in document["forms"]],
    stats=document["stats"],
    bad=document["bad"],
    files=[SpillFile.of_row(row) for row in document["files"]],
  )
