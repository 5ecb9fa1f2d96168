"""Progress of a job, read from its directories, wherever its workers run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from etils import epath

from anystep.cache_job.shuffle.spill import find_heartbeats, find_spill
from anystep.cache_job.state.split_job import (
  SplitJob,
  count_source_ranges,
  find_finished_items,
  find_plan,
)
from anystep.errors import AnystepError
from anystep.files import storage
from anystep.programs.progress import Progress

_POLL_SECONDS = 0.5
# Each look at a store is a listing.
_STORE_POLL_SECONDS = 5.0
# Of many items a look takes long: so many times as long the watcher waits.
_WAITS_PER_LOOK = 20


class Watcher:
  """Shows the progress of splits while it is entered."""

  def __init__(self, jobs: Sequence[SplitJob]):
    self._jobs = jobs
    on_store = any(storage.is_remote(job.directory) for job in jobs)
    self._poll_seconds = _STORE_POLL_SECONDS if on_store else _POLL_SECONDS
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="anystep-cache-progress", daemon=True)

  def __enter__(self) -> None:
    self._thread.start()

  def __exit__(self, *exc_info: object) -> None:
    self._stopped.set()
    self._thread.join()

  def _watch(self) -> None:
    # The job's workers and parent report what cannot be read.
    with contextlib.suppress(AnystepError, OSError, ValueError):
      self._watch_all()

  def _watch_all(self) -> None:
    counted = [job for job in self._jobs if job.options.range_examples is not None]
    if counted and not self._follow("count", "source shards", "count", _total(counted, _count_shards)):
      return
    self._wait_for(lambda: all(_are_counts_gathered(job) for job in counted))
    ranges = _total(self._jobs, count_source_ranges)
    if not self._follow("preprocess", "source shards", "spill", ranges, examples=_ExampleCounts()):
      return
    # The plan is made once the last spill is finished.
    self._wait_for(lambda: all(find_plan(job) is not None for job in self._jobs))
    plans = {job: plan for job in self._jobs if (plan := find_plan(job)) is not None}
    if self._follow("sort", "groups", "sorted", {job: len(plan.groups) for job, plan in plans.items()}):
      self._follow("write", "shards", "final", {job: plan.num_shards for job, plan in plans.items()})

  def _wait_for(self, condition: Callable[[], bool]) -> None:
    while not self._stopped.is_set() and not condition():
      self._stopped.wait(self._poll_seconds)

  def _follow(
    self,
    description: str,
    unit: str,
    kind: str,
    num_items: Mapping[SplitJob, int],
    *,
    examples: Callable[[SplitJob, Collection[int]], int] | None = None,
  ) -> bool:
    """Show progress until all items are finished or the job ends; return whether they are.

    Args:
      description: the stage.
      unit: of its items, in the plural.
      kind: of the markers of finished items.
      num_items: by job.
      examples: counts a job's examples so far, from the numbers of its finished items.
    """
    total = sum(num_items.values())
    finished, facts, seconds = _look(kind, num_items, examples)
    with Progress(description, total=total, unit=unit, start=finished) as progress:
      while True:
        pause = max(self._poll_seconds, _WAITS_PER_LOOK * seconds) if finished < total else 0
        stopped = self._stopped.wait(pause)
        finished, new_facts, seconds = _look(kind, num_items, examples)
        facts = new_facts or facts
        progress.update(finished, **facts)
        if stopped or finished == total:
          return finished == total


def _look(
  kind: str,
  num_items: Mapping[SplitJob, int],
  examples: Callable[[SplitJob, Collection[int]], int] | None,
) -> tuple[int, dict[str, str], float]:
  """Return the number of finished items, facts about them, and the seconds that it took to look.

  The last stage removes a job's directory: all of its items are finished then, and there are no facts.
  """
  start = time.monotonic()
  num_finished, num_examples = 0, 0
  for job, count in num_items.items():
    if not epath.Path(job.directory).exists():
      num_finished += count
      examples = None
      continue
    finished = {number for number in find_finished_items(job)[kind] if number < count}
    num_finished += len(finished)
    if examples is not None:
      num_examples += examples(job, finished)
  facts = {} if examples is None else {"examples": f"{num_examples:,}"}
  return num_finished, facts, time.monotonic() - start


def _total(jobs: Sequence[SplitJob], count: Callable[[SplitJob], int]) -> dict[SplitJob, int]:
  return {job: count(job) for job in jobs}


def _count_shards(job: SplitJob) -> int:
  return len(job.source_shards)


def _are_counts_gathered(job: SplitJob) -> bool:
  try:
    return count_source_ranges(job) > 0
  except AnystepError:
    return False


class _ExampleCounts:
  """Counter of examples so far, which reads each finished spill once."""

  def __init__(self):
    self._of_finished: dict[tuple[SplitJob, int], int] = {}

  def __call__(self, job: SplitJob, finished: Collection[int]) -> int:
    for number in finished:
      if (job, number) not in self._of_finished:
        spill = find_spill(job, number)
        self._of_finished[job, number] = spill.examples if spill else 0
    of_finished = sum(self._of_finished.get((job, number), 0) for number in finished)
    return of_finished + sum(map(_read_heartbeat, find_heartbeats(job, finished)))


def _read_heartbeat(path: epath.Path) -> int:
  try:
    return int(path.read_text() or 0)
  except FileNotFoundError:
    return 0
