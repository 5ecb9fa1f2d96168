"""How far a job is, wherever its workers run, seen from what they leave in its directories."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from anystep.cache_job.final_shards import plan_final_shards, read_shard_files
from anystep.cache_job.spill import SplitJob, read_spill, spill_path
from anystep.progress import Progress

_Item = tuple[SplitJob, int]

_POLL_SECONDS = 0.5


class Watcher:
  """Shows how far the workers of some splits are, while it is entered."""

  def __init__(self, jobs: Sequence[SplitJob]):
    self._jobs = jobs
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="anystep-cache-progress", daemon=True)

  def __enter__(self) -> None:
    self._thread.start()

  def __exit__(self, *exc_info: object) -> None:
    self._stopped.set()
    self._thread.join()

  def _watch(self) -> None:
    source_shards = [(job, k) for job in self._jobs for k in range(len(job.source_shards))]
    examples = self._follow("preprocess", "source shards", source_shards, _spilled_examples, _heartbeat)
    if len(examples) < len(source_shards):
      return
    shards = [
      (job, work.shard)
      for job in self._jobs
      for work in plan_final_shards(job, [examples[job, k] for k in range(len(job.source_shards))])
    ]
    self._follow("write", "shards", shards, _written_examples, lambda job, shard: 0)

  def _follow(
    self,
    description: str,
    unit: str,
    items: Sequence[_Item],
    finished_examples: Callable[[SplitJob, int], int | None],
    examples_so_far: Callable[[SplitJob, int], int],
  ) -> dict[_Item, int]:
    """Shows progress until all items are finished or the job ends; returns the finished ones' examples."""
    finished: dict[_Item, int] = {}
    with Progress(description, total=len(items), unit=unit) as progress:
      while len(finished) < len(items):
        stopped = self._stopped.wait(_POLL_SECONDS)
        unfinished = [item for item in items if item not in finished]
        found = {item: finished_examples(*item) for item in unfinished}
        finished.update({item: count for item, count in found.items() if count is not None})
        running = sum(examples_so_far(*item) for item, count in found.items() if count is None)
        progress.update(len(finished), examples=f"{sum(finished.values()) + running:,}")
        if stopped:
          break
    return finished


def _spilled_examples(job: SplitJob, source_shard: int) -> int | None:
  spill = read_spill(job.directory, source_shard)
  return None if spill is None else spill.examples


def _heartbeat(job: SplitJob, source_shard: int) -> int:
  try:
    return int(spill_path(job.directory, source_shard, "progress").read_text() or 0)
  except FileNotFoundError:
    return 0


def _written_examples(job: SplitJob, shard: int) -> int | None:
  files = read_shard_files(job.directory, shard)
  return None if files is None else files.records.records
