"""What the cache job does after the preprocessors, by itself: spills to the shards of a cache.

`python -m side_by_side.moved_records DIRECTORY` preprocesses the task into spills below the directory, then
sorts and writes them, and prints one line of JSON: examples and the seconds of that second half.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
  """Preprocesses, then times the rest."""
  from side_by_side import cache_task

  from anystep.cache_job.options import CacheOptions
  from anystep.cache_job.planning.building_directories import prepare_directories
  from anystep.cache_job.planning.task_work import plan_work
  from anystep.cache_job.shuffle.final_shards import write_shard
  from anystep.cache_job.shuffle.sorted_spills import plan_final, sort_group, summarize_sorted
  from anystep.cache_job.shuffle.spill import write_spill
  from anystep.cache_job.shuffle.summaries import summarize_spills
  from anystep.cache_job.state.split_job import list_source_ranges

  options = CacheOptions(cache_dir=sys.argv[1], modules=(cache_task.__name__,))
  works = plan_work([cache_task.TASK], options)
  prepare_directories(works)
  (job,) = works[0].jobs
  for source in list_source_ranges(job):
    write_spill(job, source)
  start = time.perf_counter()
  summarize_spills(job, range(len(job.source_shards)))
  plan = plan_final(job)
  for group in range(len(plan.groups)):
    sort_group(job, group)
  summarize_sorted(job, range(len(plan.groups)))
  for shard in range(plan.num_shards):
    write_shard(job, shard)
  print(json.dumps({"examples": plan.num_examples, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
  main()
