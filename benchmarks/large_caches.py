"""Jobs and caches of very many shards: the graph, its planning, and opening the cache.

Nothing is preprocessed: the source has names alone, and the cache's files are of the right sizes but empty.
Each measurement is made in a process of its own, for its peak memory.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from side_by_side.alone import run_alone
from side_by_side.report import circumstances, table, verdict, write_between_marks

TASK, SPLIT = "many_shards", "train"
SOURCE_SHARDS_PER_SHARD = 10
EXAMPLES_PER_SOURCE_SHARD = 100
GRAPH_BYTES, PLANNING_SECONDS, PEAK_BYTES, OPEN_SECONDS = 1 << 20, 120, 2 << 30, 3
PACKAGES = ("anystep", "apache-beam", "numpy", "seqio")


def main() -> int:
  """Measure each size, print a table, and write it where `--write` says; 1 where a target is missed."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--sizes", default="10000,100000,1000000", help="numbers of source shards")
  parser.add_argument("--work_dir", type=pathlib.Path, help="where files are made and removed")
  parser.add_argument("--write", type=pathlib.Path, help="Markdown file that the table goes into")
  options = parser.parse_args()
  results = []
  for size in map(int, options.sizes.split(",")):
    folder = tempfile.mkdtemp(dir=options.work_dir, prefix="large_caches-")
    try:
      measured = {"source_shards": size, "shards": size // SOURCE_SHARDS_PER_SHARD}
      for measure in (measure_planning, measure_final_plan, make_cache, measure_opening):
        result = run_alone(measure, size, folder)
        measured |= {**result, f"{measure.__name__}_peak_bytes": result["peak_bytes"]}
    finally:
      shutil.rmtree(folder)
    print(json.dumps(measured), file=sys.stderr, flush=True)
    results.append(measured)
  text = report(results)
  print(text)
  if options.write:
    write_between_marks(options.write, "large_caches", text)
  return int(any(row[-1] == verdict(False) for row in _rows(results)))


def measure_planning(size: int, folder: str) -> dict[str, Any]:
  """Plan the job, make its directory, and build the graph as a portable runner gets it."""
  from anystep.cache_job.job import build_job_graph
  from anystep.cache_job.planning.building_directories import prepare_directories
  from anystep.cache_job.planning.task_work import plan_work

  options = _register(size, folder)
  start = time.perf_counter()
  works = plan_work([TASK], options)
  prepare_directories(works)
  graph = build_job_graph(works, options)
  return {"planning_seconds": time.perf_counter() - start, "graph_bytes": graph.graph_bytes}


def measure_final_plan(size: int, folder: str) -> dict[str, Any]:
  """Plan the sorting and the shards from the summaries that workers leave of their spills."""
  from anystep.cache_job.planning.task_work import plan_work
  from anystep.cache_job.shuffle.sorted_spills import plan_final
  from anystep.cache_job.state.split_job import CHUNK_ITEMS, put_summary

  (job,) = plan_work([TASK], _register(size, folder))[0].jobs
  feature = {"dtype": "int32", "shape": [None]}
  records = EXAMPLES_PER_SOURCE_SHARD
  for chunk in range(-(-size // CHUNK_ITEMS)):
    ranges = range(chunk * CHUNK_ITEMS, min((chunk + 1) * CHUNK_ITEMS, size))
    document = {
      "examples": [records] * len(ranges),
      "forms": [[ranges[0], {"inputs": feature}]],
      "stats": {"counts": {"examples": records * len(ranges)}, "longest": {}, "bins": {}},
      "bad": [],
      "files": [[f"spill-{k:05d}.0123456789ab", 40_000, 39_000, records, 100_000] for k in ranges],
    }
    put_summary(job, "spills", chunk, document)
  start = time.perf_counter()
  plan = plan_final(job)
  return {"final_plan_seconds": time.perf_counter() - start, "groups": len(plan.groups)}


def make_cache(size: int, folder: str) -> dict[str, Any]:
  """Make the manifest of a cache, its tables, and files of the sizes that it says."""
  from anystep.cache_job.planning.building_directories import read_fingerprint
  from anystep.cache_job.planning.task_work import plan_work
  from anystep.caches.manifest import FileEntry, Manifest, SourceShard, shard_sizes
  from anystep.features.feature import Feature
  from anystep.files import names

  (job,) = plan_work([TASK], _register(size, folder))[0].jobs
  num_shards, num_examples = size // SOURCE_SHARDS_PER_SHARD, size * EXAMPLES_PER_SOURCE_SHARD
  directory = pathlib.Path(folder, TASK)

  def make_entry(name: str, records: int, num_bytes: int) -> FileEntry:
    with open(directory / name, "wb") as file:
      file.truncate(num_bytes)
    return FileEntry(name=name, records=records, bytes=num_bytes, sha256="0" * 64, head_sha256="0" * 64)

  sizes = shard_sizes(num_examples, num_shards).tolist()
  start = time.perf_counter()
  manifest, tables = Manifest(
    task=TASK,
    split=SPLIT,
    seed=0,
    num_examples=num_examples,
    num_shards=num_shards,
    block_records=32,
    container="array_record",
    container_options="group_size:32,zstd:1",
    features={"inputs": Feature(dtype="int32", shape=(None,))},
    record_files=[
      make_entry(names.records_name(SPLIT, "array_record", k, num_shards), n, 1 << 17)
      for k, n in enumerate(sizes)
    ],
    lengths_files=[
      make_entry(names.lengths_name(SPLIT, k, num_shards), n, 128 + 4 * n) for k, n in enumerate(sizes)
    ],
    description_files=[
      make_entry(names.info_name(SPLIT), 1, 10),
      make_entry(names.stats_name(SPLIT), 1, 10),
    ],
    source_shards=[SourceShard(name=name, examples=EXAMPLES_PER_SOURCE_SHARD) for name in job.source_shards],
    fingerprint=read_fingerprint(job),
  ).with_tables()
  for name, content in tables.items():
    (directory / name).write_bytes(content)
  text = manifest.to_json().encode()
  (directory / names.manifest_name(SPLIT)).write_bytes(text)
  (directory / names.COMPLETED).write_text(f"{SPLIT} {FileEntry.of('', 1, text).sha256}\n")
  manifest_bytes = len(text) + sum(map(len, tables.values()))
  return {"making_seconds": time.perf_counter() - start, "manifest_bytes": manifest_bytes}


def measure_opening(size: int, folder: str) -> dict[str, Any]:
  """Open the cache, and trace one example to its source shard."""
  from anystep.caches.cache import open_cache

  start = time.perf_counter()
  cache = open_cache(folder, TASK, SPLIT)
  opened = time.perf_counter()
  cache.source_of(np.array([0]))
  return {"open_seconds": opened - start, "trace_seconds": time.perf_counter() - opened}


def _register(size: int, folder: str) -> Any:
  """Register a task of so many source shards, and return the options of its job."""
  import seqio

  from anystep.cache_job.options import CacheOptions

  class Names(seqio.DataSource):
    """Names without files."""

    def __init__(self):
      super().__init__(splits=[SPLIT], caching_permitted=True)

    @property
    def supports_arbitrary_sharding(self):
      return False

    def list_shards(self, split):
      return [f"/data/corpus/{SPLIT}.tfrecord-{k:07d}-of-{size:07d}" for k in range(size)]

    def get_dataset(self, *args, **kwargs):
      raise NotImplementedError

  feature = seqio.Feature(seqio.ByteVocabulary())
  steps = [seqio.CacheDatasetPlaceholder()]
  seqio.TaskRegistry.add(
    TASK, source=Names(), preprocessors=steps, output_features={"inputs": feature}, metric_fns=[]
  )
  return CacheOptions(cache_dir=folder, num_shards=size // SOURCE_SHARDS_PER_SHARD)


def report(results: Sequence[dict[str, Any]]) -> str:
  """Return the table, with targets, and what it was measured on."""
  head = ["source shards", "shards", "", "measured", "target", ""]
  about = (
    "Names of source shards of 45 characters, ten for each shard. Planning is what `anystep-cache` does"
    " before it submits; the final plan is made once all are preprocessed. Memory counts the imports."
  )
  return "\n\n".join(
    [
      "## Caches of very many shards",
      about,
      circumstances("large_caches", PACKAGES),
      table(head, list(_rows(results))),
    ]
  )


def _rows(results: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
  for r in results:
    measures = (measure_planning, measure_final_plan, measure_opening)
    peaks = [r[f"{measure.__name__}_peak_bytes"] for measure in measures]
    measured = [
      ("graph, KiB", r["graph_bytes"] / 2**10, GRAPH_BYTES / 2**10),
      ("planning, seconds", r["planning_seconds"], PLANNING_SECONDS),
      ("final plan, seconds", r["final_plan_seconds"], PLANNING_SECONDS),
      ("peak memory, MiB", max(peaks) / 2**20, PEAK_BYTES / 2**20),
      ("manifest and tables, MiB", r["manifest_bytes"] / 2**20, None),
      ("opening the cache, seconds", r["open_seconds"], OPEN_SECONDS),
    ]
    for title, value, target in measured:
      yield [
        f"{r['source_shards']:,}",
        f"{r['shards']:,}",
        title,
        f"{value:,.2f}",
        "" if target is None else f"{target:,.0f}",
        verdict(None if target is None else value <= target),
      ]


if __name__ == "__main__":
  sys.exit(main())
