"""Progress of a job, read from its directories, wherever its workers run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from anystep.cache_job.shuffle.spill import find_spill, locate_progress
from anystep.cache_job.state.split_job import SplitJob, find_finished_items, find_plan, list_source_ranges
from anystep.errors import AnystepError
from anystep.files import storage
from anystep.programs.progress import Progress

_POLL_SECONDS = 0.5
# Each look at a store is a listing.
_STORE_POLL_SECONDS = 5.0
_Item = tuple[SplitJob, int]


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
    shards = [(job, k) for job in counted for k in range(len(job.source_shards))]
    if counted and not self._follow("count", "source shards", "count", shards):
      return
    sources = [(job, source.number) for job in self._jobs for source in list_source_ranges(job)]
    if not self._follow("preprocess", "source shards", "spill", sources, examples=_ExampleCounts()):
      return
    # The plan is made once the last spill is finished.
    while not self._stopped.is_set() and any(find_plan(job) is None for job in self._jobs):
      self._stopped.wait(self._poll_seconds)
    plans = [(job, plan) for job in self._jobs if (plan := find_plan(job)) is not None]
    groups = [(job, group) for job, plan in plans for group in range(len(plan.groups))]
    written = [(job, shard) for job, plan in plans for shard in range(plan.num_shards)]
    if self._follow("sort", "groups", "sorted", groups):
      self._follow("write", "shards", "final", written)

  def _follow(
    self,
    description: str,
    unit: str,
    kind: str,
    items: Sequence[_Item],
    *,
    examples: Callable[[Sequence[_Item], Sequence[_Item]], int] | None = None,
  ) -> bool:
    """Show progress until all items are finished or the job ends; return whether they are."""
    item_of_key = {(job.directory, number): (job, number) for job, number in items}
    finished = self._find_finished(kind)
    with Progress(
      description, total=len(items), unit=unit, start=len(finished & item_of_key.keys())
    ) as progress:
      while True:
        stopped = self._stopped.wait(self._poll_seconds if finished < item_of_key.keys() else 0)
        finished = self._find_finished(kind) & item_of_key.keys()
        facts = {}
        if examples is not None:
          running = [item_of_key[key] for key in item_of_key.keys() - finished]
          facts = {"examples": f"{examples([item_of_key[key] for key in finished], running):,}"}
        progress.update(len(finished), **facts)
        if stopped or len(finished) == len(item_of_key):
          return len(finished) == len(item_of_key)

  def _find_finished(self, kind: str) -> set[tuple[str, int]]:
    """Return the finished items of a kind, with one listing of each directory."""
    return {(job.directory, number) for job in self._jobs for number in find_finished_items(job)[kind]}


class _ExampleCounts:
  """Counter of examples so far, which reads each finished spill once."""

  def __init__(self):
    self._of_finished: dict[tuple[str, int], int] = {}

  def __call__(self, finished: Sequence[_Item], running: Sequence[_Item]) -> int:
    for job, number in finished:
      if (job.directory, number) not in self._of_finished:
        spill = find_spill(job, number)
        self._of_finished[job.directory, number] = spill.examples if spill else 0
    return sum(self._of_finished.values()) + sum(_read_heartbeat(*item) for item in running)


def _read_heartbeat(job: SplitJob, number: int) -> int:
  try:
    return int(locate_progress(job, number).read_text() or 0)
  except FileNotFoundError:
    return 0
