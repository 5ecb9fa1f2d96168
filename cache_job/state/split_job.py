"""Description of one split's job for its workers, and the small files that they leave in its directory."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.state.source_names import StoredNames, describe_stored
from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files import storage
from anystep.files.json_files import MALFORMED, canonical_json, read_json
from anystep.limits import is_count

# Names of the files that mark finished items.
_MARKER = re.compile(r"(count|spill|sorted|final)-(\d+)\.json\Z")
_PLAN = "final_plan.json"
_ENGINE = "engine.json"
# Jobs of version 0.1 noted their number of shards there.
_PLAN_OF_0_1 = "plan.json"
# Results of so many items stand in one file, so that no later stage reads one file for each.
CHUNK_ITEMS = 1000
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitJob:
  """One split of one task, to be cached.

  Attributes:
    task: the task's name.
    split: the split's name.
    directory: where workers leave their files.
    source_shards: names, in the source's order; workers have `StoredNames`.
    seqio_cache: the directory of the task's cache by SeqIO that is its source; None for the task's own.
    options: the command line's.
    lock_id: on a store, the job's taking of the lock, which workers keep alive.
  """

  task: str
  split: str
  directory: str
  source_shards: Sequence[str]
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
      "source_shards": list(self.source_shards),
      "seqio_cache": self.seqio_cache,
      **self.options.values_that_decide_bytes(),
    }
    return hashlib.sha256(canonical_json([job, reader]).encode()).hexdigest()[:16]

  def for_workers(self) -> SplitJob:
    """Return the job as workers get it, of a size that does not depend on the source."""
    if isinstance(self.source_shards, StoredNames):
      return self
    return dataclasses.replace(self, source_shards=describe_stored(self.directory, self.source_shards))


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
class Group:
  """Spill files that are sorted together: `files` of them in the source's order.

  Attributes:
    chunk: number of the chunk of source ranges whose summary has the first one.
    place: of the first one among the files of that chunk.
    files: their number; the summaries of the next chunks have those that this one lacks.
    records: number of their records.
  """

  chunk: int
  place: int
  files: int
  records: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalPlan:
  """Plan by which spills become shards.

  Attributes:
    num_shards: S.
    num_features: number of columns of lengths tables.
    groups: in the source's order.
  """

  num_shards: int
  num_features: int
  groups: Sequence[Group]

  @property
  def num_examples(self) -> int:
    """N, the number of the split's examples."""
    return sum(group.records for group in self.groups)


def list_source_ranges(job: SplitJob) -> list[SourceRange]:
  """Return the units of preprocessing; where source shards are cut, all counts must have been gathered."""
  if job.options.range_examples is None:
    return [SourceRange(number=k, name=name, shard=k) for k, name in enumerate(job.source_shards)]
  ranges: list[SourceRange] = []
  counts = _read_counts(job)
  for shard, (name, count) in enumerate(zip(job.source_shards, counts, strict=True)):
    # A source shard without examples keeps one range, so that the manifest names it.
    for start in range(0, max(count, 1), job.options.range_examples):
      stop = min(start + job.options.range_examples, count)
      ranges.append(
        SourceRange(number=len(ranges), name=f"{name}[{start}:{stop}]", shard=shard, start=start, stop=stop)
      )
  return ranges


def count_source_ranges(job: SplitJob) -> int:
  """Return the number of units of preprocessing, as `list_source_ranges`."""
  size = job.options.range_examples
  return len(job.source_shards) if size is None else sum(-(-max(n, 1) // size) for n in _read_counts(job))


def gather_counts(job: SplitJob, shards: Sequence[int]) -> None:
  """Write the numbers of examples of a chunk of source shards, all of which must be counted, to one file.

  Args:
    job: the split's.
    shards: numbers of the source shards.
  """
  counts = []
  for shard in shards:
    count = find_marker(job, "count", shard, lambda document: check_count(document["examples"]))
    if count is None:
      raise FileNotFoundError(f"count {shard} of {job.task} {job.split} is not finished")
    counts.append(count)
  put_summary(job, "counts", shards[0] // CHUNK_ITEMS, counts)


def _read_counts(job: SplitJob) -> list[int]:
  summaries = read_summaries(
    job, "counts", len(job.source_shards), lambda counts: [check_count(count) for count in counts]
  )
  return [count for counts in summaries for count in counts]


def check_count(value: Any) -> int:
  """Return a count that a file has.

  Raises:
    ValueError: for another value.
  """
  if not is_count(value):
    raise ValueError(f"{value!r} as a count")
  return value


def require_finished(
  job: SplitJob, items: Sequence[int], find: Callable[[int], _Value | None], name: str
) -> list[_Value]:
  """Return the results of items, all of which must be finished.

  Args:
    job: the split's.
    items: their numbers.
    find: returns an item's result; None where it is not finished.
    name: what an item is, before its number.

  Raises:
    AnystepError: 74 `job_incomplete`.
  """
  results = []
  for item in items:
    result = find(item)
    if result is None:
      raise make_incomplete_error(job.task, job.split, job.directory, f"{name} {item}")
    results.append(result)
  return results


def put_summary(job: SplitJob, kind: str, chunk: int, document: Any) -> None:
  """Write the results of a chunk of items to one file.

  Args:
    job: the split's.
    kind: of the file, in the plural.
    chunk: the items' number, divided by `CHUNK_ITEMS`.
    document: the results, as JSON.
  """
  storage.put(locate_file(job, f"{kind}-{chunk:05d}.json"), canonical_json(document).encode())


def read_summary(job: SplitJob, kind: str, chunk: int, parse: Callable[[Any], _Value]) -> _Value:
  """Return the results of a chunk of items.

  Raises:
    AnystepError: 74 `job_incomplete`; 65 `job_state_invalid`.
  """
  path = locate_file(job, f"{kind}-{chunk:05d}.json")
  value = find_state(path, parse)
  if value is None:
    raise make_incomplete_error(job.task, job.split, path, "a file")
  return value


def read_summaries(
  job: SplitJob, kind: str, num_items: int, parse: Callable[[Any], _Value]
) -> Iterator[_Value]:
  """Yield the results of all chunks of items, as `read_summary`."""
  for chunk in range(-(-num_items // CHUNK_ITEMS)):
    yield read_summary(job, kind, chunk, parse)


def write_plan(job: SplitJob, plan: FinalPlan) -> None:
  """Write the plan for later stages."""
  storage.put(locate_file(job, _PLAN), canonical_json(dataclasses.asdict(plan)).encode())


def find_plan(job: SplitJob) -> FinalPlan | None:
  """Return the plan; None where there is none yet."""
  return find_state(locate_file(job, _PLAN), _parse_plan)


def _parse_plan(document: Any) -> FinalPlan:
  return FinalPlan(**{**document, "groups": [Group(**group) for group in document["groups"]]})


def choose_num_shards(job: SplitJob, *, num_examples: int, record_bytes: int) -> int:
  """Return S: that of the plan that an earlier run left, which may know another default; else the options'.

  Args:
    job: the split's.
    num_examples: N.
    record_bytes: bytes of all serialized records.
  """
  for name in (_PLAN, _PLAN_OF_0_1):
    num_shards = find_state(locate_file(job, name), lambda document: int(document["num_shards"]))
    if num_shards is not None:
      return num_shards
  return job.options.choose_num_shards(num_examples, record_bytes)


def read_plan(job: SplitJob) -> FinalPlan:
  """Return the plan, which must have been made.

  Raises:
    FileNotFoundError: where it has not.
  """
  plan = find_plan(job)
  if plan is None:
    raise FileNotFoundError(f"{job.task} {job.split} has no plan")
  return plan


def note_engine_job(job: SplitJob, *, job_id: str, name: str) -> None:
  """Note the id and the name of the engine's job, for the same command where this program is gone."""
  storage.put(locate_file(job, _ENGINE), canonical_json({"job_id": job_id, "name": name}).encode())


def find_engine_job(job: SplitJob) -> tuple[str, str] | None:
  """Return id and name of the job that an engine was last given; None where there was none."""
  return find_state(locate_file(job, _ENGINE), lambda note: (str(note["job_id"]), str(note["name"])))


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
