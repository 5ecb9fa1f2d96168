"""Description of one split's job for its workers, and the small files that they leave in its directory."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.state.spill_files import SpillFile
from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files import storage
from anystep.files.json_files import MALFORMED, canonical_json, read_json
from anystep.limits import is_count

# Names of the files that mark finished items.
_MARKER = re.compile(r"(count|spill|sorted|final)-(\d+)\.json\Z")
_PLAN = "plan.json"
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
    lock_id: on a store, the job's taking of the lock, which workers keep alive.
  """

  task: str
  split: str
  directory: str
  source_shards: tuple[str, ...]
  seqio_cache: str | None
  options: CacheOptions
  lock_id: str = ""

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
  """Unit of preprocessing: a source shard, or a range of one where they are cut.

  Attributes:
    number: its place among all ranges, which decides its seeds.
    name: as manifests have it.
    shard: the source shard's number.
    start: the first of its examples, as the source gives them.
    stop: the end of its examples; None for all.
  """

  number: int
  name: str
  shard: int
  start: int = 0
  stop: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalPlan:
  """Plan by which spills become shards.

  Attributes:
    num_shards: S.
    num_features: number of columns of lengths tables.
    examples: number of examples of each spill.
    groups: the files of spills that are sorted together.
  """

  num_shards: int
  num_features: int
  examples: Sequence[int]
  groups: Sequence[Sequence[SpillFile]]


def list_source_ranges(job: SplitJob) -> list[SourceRange]:
  """Return the units of preprocessing; where source shards are cut, all of them must have been counted."""
  if job.options.range_examples is None:
    return [SourceRange(number=k, name=name, shard=k) for k, name in enumerate(job.source_shards)]
  ranges: list[SourceRange] = []
  for shard, name in enumerate(job.source_shards):
    count = find_marker(job, "count", shard, _parse_count)
    if count is None:
      raise FileNotFoundError(f"count {shard} of {job.task} {job.split} is not finished")
    # A source shard without examples keeps one range, so that the manifest names it.
    for start in range(0, max(count, 1), job.options.range_examples):
      stop = min(start + job.options.range_examples, count)
      ranges.append(
        SourceRange(number=len(ranges), name=f"{name}[{start}:{stop}]", shard=shard, start=start, stop=stop)
      )
  return ranges


def write_plan(job: SplitJob, plan: FinalPlan) -> None:
  """Write the plan for later stages."""
  storage.put(locate_file(job, _PLAN), canonical_json(dataclasses.asdict(plan)).encode())


def find_plan(job: SplitJob) -> FinalPlan | None:
  """Return the plan; None where there is none yet."""
  return find_state(locate_file(job, _PLAN), _parse_plan)


def _parse_plan(document: Any) -> FinalPlan:
  groups = [[SpillFile(**file) for file in group] for group in document["groups"]]
  return FinalPlan(**{**document, "groups": groups})


def _parse_count(document: Any) -> int:
  if not is_count(document["examples"]):
    raise ValueError(f"{document['examples']!r} examples")
  return document["examples"]


def choose_num_shards(job: SplitJob, *, num_examples: int, record_bytes: int) -> int:
  """Return S: that of the plan that an earlier run left, which may know another default; else the options'.

  Args:
    job: the split's.
    num_examples: N.
    record_bytes: bytes of all serialized records.
  """
  plan = find_plan(job)
  return job.options.choose_num_shards(num_examples, record_bytes) if plan is None else plan.num_shards


def read_plan(job: SplitJob) -> FinalPlan:
  """Return the plan, which must have been made.

  Raises:
    FileNotFoundError: where it has not.
  """
  plan = find_plan(job)
  if plan is None:
    raise FileNotFoundError(f"{job.task} {job.split} has no plan")
  return plan


def put_marker(job: SplitJob, kind: str, number: int, document: Mapping[str, Any]) -> None:
  """Mark an item of work as finished, with its result: the last file that a worker writes."""
  storage.put(locate_file(job, f"{kind}-{number:05d}.json"), canonical_json(document).encode())


def find_marker(job: SplitJob, kind: str, number: int, read: Callable[[Any], _Value]) -> _Value | None:
  """Return the result of a finished item, as `find_state`; None where it is not finished."""
  return find_state(locate_file(job, f"{kind}-{number:05d}.json"), read)


def find_state(path: epath.Path, read: Callable[[Any], _Value]) -> _Value | None:
  """Return the value of a job's JSON file; None where there is no file.

  Args:
    path: the file.
    read: makes a value of its document.

  Raises:
    AnystepError: 65 `job_state_invalid` for a file that no job wrote.
  """
  try:
    return read(read_json(path))
  except FileNotFoundError:
    return None
  except (*MALFORMED, IsADirectoryError) as error:
    raise make_file_error(
      "job_state_invalid",
      error,
      path=path,
      expected="what an earlier run of the job left",
      fix="run the job once with --noresume, which starts anew",
    ) from error


def find_finished_items(job: SplitJob) -> dict[str, set[int]]:
  """Return the numbers of the finished items by kind."""
  finished: dict[str, set[int]] = {"count": set(), "spill": set(), "sorted": set(), "final": set()}
  for name in storage.list_sizes(job.directory):
    if match := _MARKER.match(name):
      finished[match.group(1)].add(int(match.group(2)))
  return finished


def locate_file(job: SplitJob, name: str) -> epath.Path:
  """Return the path of a file in the job's directory."""
  return epath.Path(job.directory) / name


def make_incomplete_error(task: str, split: str, path: epath.PathLike, expected: str) -> AnystepError:
  """Return the error of a file that workers should have left."""
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
  """Tell whether a file is in the job's directory, with a size in bytes."""
  return storage.size_of(locate_file(job, name)) == size
