"""What workers need to know to cache one split of one task, and what they leave in its directory."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.state.spill_files import SpillFile
from anystep.errors import AnystepError, ExitCode, invalid_file
from anystep.files import storage
from anystep.files.json_files import MALFORMED, canonical_json, read_json
from anystep.limits import is_count

# The numbers in the names of what is finished.
_MARKER = re.compile(r"(count|spill|sorted|final)-(\d+)\.json\Z")
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitJob:
  """One split of one task, to be cached.

  Attributes:
    task: the task's name.
    split: the split's name.
    directory: where workers leave their files.
    source_shards: names, in the source's order.
    seqio_cache: the directory of the task's cache by SeqIO that is its source; None for the task's own.
    options: the command line's.
  """

  task: str
  split: str
  directory: str
  source_shards: tuple[str, ...]
  seqio_cache: str | None
  options: CacheOptions

  def identity(self, reader: Mapping[str, Any]) -> str:
    """Return a digest of everything that decides bytes, which names the job's directory.

    A job goes on in a directory of the same identity, also of one that an earlier version left.

    Args:
      reader: the reader part of the task's fingerprint.
    """
    job = {
      "task": self.task,
      "split": self.split,
      "source_shards": self.source_shards,
      "seqio_cache": self.seqio_cache,
      **self.options.values_that_decide_bytes(),
    }
    return hashlib.sha256(canonical_json([job, reader]).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceRange:
  """What is preprocessed at a time: a source shard, or a range of one where they are cut.

  Attributes:
    number: the place among all ranges, which seeds are drawn for.
    name: as manifests have it.
    shard: the source shard's number; start and stop: examples of it, as the source gives them.
  """

  number: int
  name: str
  shard: int
  start: int = 0
  stop: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalPlan:
  """How spills become shards.

  Attributes:
    num_shards: S.
    num_features: columns of lengths tables.
    examples: of each spill.
    groups: the files of spills that are sorted together.
  """

  num_shards: int
  num_features: int
  examples: Sequence[int]
  groups: Sequence[Sequence[SpillFile]]


def source_ranges(job: SplitJob) -> list[SourceRange]:
  """What is preprocessed at a time; where source shards are cut, all of them must have been counted."""
  if job.options.range_examples is None:
    return [SourceRange(number=k, name=name, shard=k) for k, name in enumerate(job.source_shards)]
  ranges: list[SourceRange] = []
  for shard, name in enumerate(job.source_shards):
    count = find_marker(job, "count", shard, _count_of)
    if count is None:
      raise FileNotFoundError(f"count {shard} of {job.task} {job.split} is not finished")
    # Of a source shard without examples one range is left, so that it stands in the manifest.
    for start in range(0, max(count, 1), job.options.range_examples):
      stop = min(start + job.options.range_examples, count)
      ranges.append(
        SourceRange(number=len(ranges), name=f"{name}[{start}:{stop}]", shard=shard, start=start, stop=stop)
      )
  return ranges


def write_plan(job: SplitJob, plan: FinalPlan) -> None:
  """Leaves the plan for those who follow it."""
  storage.put(_plan_path(job), canonical_json(dataclasses.asdict(plan)).encode())


def find_plan(job: SplitJob) -> FinalPlan | None:
  """The plan; None where there is none yet."""
  return find_state(_plan_path(job), _plan_of)


def _plan_of(document: Any) -> FinalPlan:
  groups = [[SpillFile(**file) for file in group] for group in document["groups"]]
  return FinalPlan(**{**document, "groups": groups})


def _count_of(document: Any) -> int:
  if not is_count(document["examples"]):
    raise ValueError(f"{document['examples']!r} examples")
  return document["examples"]


def read_plan(job: SplitJob) -> FinalPlan:
  """The plan, which must have been made.

  Raises:
    FileNotFoundError: where it has not.
  """
  plan = find_plan(job)
  if plan is None:
    raise FileNotFoundError(f"{job.task} {job.split} has no plan")
  return plan


def put_marker(job: SplitJob, kind: str, number: int, document: Mapping[str, Any]) -> None:
  """Says that an item of work is finished, and what came of it: the last thing that a worker writes."""
  storage.put(epath.Path(job.directory) / f"{kind}-{number:05d}.json", canonical_json(document).encode())


def find_marker(job: SplitJob, kind: str, number: int, read: Callable[[Any], _Value]) -> _Value | None:
  """What a worker said of a finished item, as `find_state`; None where none did."""
  return find_state(epath.Path(job.directory) / f"{kind}-{number:05d}.json", read)


def find_state(path: epath.Path, read: Callable[[Any], _Value]) -> _Value | None:
  """What a job left in a JSON file; None where there is none.

  Args:
    path: the file.
    read: makes a value of its document.

  Raises:
    AnystepError: 65 `job_state_invalid` for what a job does not leave.
  """
  try:
    return read(read_json(path))
  except FileNotFoundError:
    return None
  except (*MALFORMED, IsADirectoryError) as error:
    raise invalid_file(
      "job_state_invalid",
      error,
      path=path,
      expected="what an earlier run of the job left",
      fix="run the job once with --noresume, which starts anew",
    ) from error


def finished_items(job: SplitJob) -> dict[str, set[int]]:
  """Numbers of the finished items by kind."""
  finished: dict[str, set[int]] = {"count": set(), "spill": set(), "sorted": set(), "final": set()}
  directory = epath.Path(job.directory)
  for path in directory.iterdir() if directory.exists() else ():
    if match := _MARKER.match(path.name):
      finished[match.group(1)].add(int(match.group(2)))
  return finished


def file_of(job: SplitJob, name: str) -> epath.Path:
  """A file in the job's directory."""
  return epath.Path(job.directory) / name


def job_incomplete(task: str, split: str, path: epath.PathLike, expected: str) -> AnystepError:
  """The error of what workers should have left and did not."""
  return AnystepError(
    ExitCode.IO,
    "job_incomplete",
    task=task,
    split=split,
    path=path,
    expected=expected,
    fix="run the same command again; what is finished is kept",
  )


def is_whole(job: SplitJob, name: str, size: int) -> bool:
  """Whether a file in the job's directory is there, with its size in bytes."""
  path = file_of(job, name)
  return path.exists() and path.stat().length == size


def _plan_path(job: SplitJob) -> epath.Path:
  return epath.Path(job.directory) / "plan.json"
