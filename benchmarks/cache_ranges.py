"""The cache job's temporary files: the ranges and bytes that a dry run says, beside those that the job reads.

The examples are lines of random words, tokens of bytes, in text files of 16 MiB. Each size is measured in a
process of its own, which runs the job with DirectRunner.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from side_by_side.alone import run_alone
from side_by_side.report import circumstances, table, verdict, write_between_marks

TASK = "lines_of_words"
FILE_BYTES = 16 << 20
LINE_WORDS = 40
# The dry run's ranges are to be so near, and its bytes.
NEAR = 0.25
PACKAGES = ("anystep", "apache-beam", "numpy", "seqio", "tensorflow")


def main() -> int:
  """Measure each size, print a table, and write it where `--write` says; 1 where an estimate is not near."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--gigabytes", default="0.1,1,5", help="sizes of the texts, joined by commas")
  parser.add_argument("--worker_memory_mib", type=int, default=2048, help="as of anystep-cache")
  parser.add_argument("--work_dir", type=pathlib.Path, help="where files are made and removed")
  parser.add_argument("--write", type=pathlib.Path, help="Markdown file that the table goes into")
  options = parser.parse_args()
  results = []
  for gigabytes in map(float, options.gigabytes.split(",")):
    folder = tempfile.mkdtemp(dir=options.work_dir, prefix="cache_ranges-")
    try:
      write_texts(pathlib.Path(folder, "texts"), round(gigabytes * 1e9))
      measured = run_alone(measure_job, folder, options.worker_memory_mib)
    finally:
      shutil.rmtree(folder)
    results.append({"gigabytes": gigabytes, **measured})
    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
  text = report(results)
  print(text)
  if options.write:
    write_between_marks(options.write, "cache_ranges", text)
  return int(any(row[-1] == verdict(False) for row in _rows(results)))


def write_texts(folder: pathlib.Path, num_bytes: int) -> None:
  """Write files of lines of random words, of so many bytes together."""
  folder.mkdir()
  random = np.random.default_rng(0)
  words = [bytes(random.integers(97, 123, size, np.uint8)) for size in random.integers(2, 10, 20_000)]
  for file, start in enumerate(range(0, num_bytes, FILE_BYTES)):
    size, lines = min(FILE_BYTES, num_bytes - start), []
    while size > 0:
      lines.append(b" ".join(words[k] for k in random.zipf(1.3, LINE_WORDS) % len(words)) + b"\n")
      size -= len(lines[-1])
    (folder / f"{file:05d}.txt").write_bytes(b"".join(lines))


def measure_job(folder: str, worker_memory_mib: int) -> dict[str, Any]:
  """Run a dry run and the job; return what they say of temporary files."""
  import functools

  import seqio

  from anystep.cache_job import job
  from anystep.cache_job.options import CacheOptions
  from anystep.cache_job.planning.estimates import estimate_split
  from anystep.cache_job.planning.task_work import plan_work
  from anystep.cache_job.runners.counters import read_counters

  seqio.TaskRegistry.add(
    TASK,
    source=seqio.TextLineDataSource({"train": f"{folder}/texts/*.txt"}),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={"targets": None}),
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
    ],
    output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
    metric_fns=[],
  )
  options = CacheOptions(cache_dir=f"{folder}/cache", worker_memory_mib=worker_memory_mib)
  (work,) = plan_work([TASK], options)
  estimate = estimate_split(work.task, work.jobs[0])
  counters: dict[str, int] = {}
  job.report_counters = lambda result: counters.update(read_counters(result)[f"{TASK}/train"])
  start = time.perf_counter()
  (done,) = job.cache_tasks([TASK], options)
  return {
    "seconds": time.perf_counter() - start,
    "examples": done.manifests["train"].num_examples,
    "shards": done.manifests["train"].num_shards,
    "cache_bytes": sum(file.bytes for file in done.manifests["train"].files),
    "estimated_ranges": estimate.ranges,
    "ranges": counters["sort_ranges"] + counters["write_ranges"],
    "estimated_bytes": estimate.temporary_bytes,
    "bytes": counters["sort_range_bytes"] + counters["write_range_bytes"],
  }


def report(results: Sequence[dict[str, Any]]) -> str:
  """Return the table, and what it was measured on."""
  head = ["texts, GB", "shards", "cache, MiB", "seconds", "peak memory, MiB"]
  head += ["", "said", "read", "said ÷ read", ""]
  about = "What sorting and writing read of temporary files, beside what a dry run says of it."
  parts = ["## The cache job's temporary files", about, circumstances("cache_ranges", PACKAGES)]
  return "\n\n".join([*parts, table(head, _rows(results))])


def _rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
  rows = []
  for r in results:
    sizes = [f"{size / 2**20:,.0f}" for size in (r["cache_bytes"], r["peak_bytes"])]
    facts = [f"{r['gigabytes']:g}", f"{r['shards']}", sizes[0], f"{r['seconds']:,.0f}", sizes[1]]
    for title, name, unit in (("ranges", "ranges", 1), ("bytes", "MiB", 2**20)):
      said, read = r[f"estimated_{title}"], r[title]
      row = [*facts, name, f"{said / unit:,.0f}", f"{read / unit:,.0f}", f"{said / read:.2f}"]
      rows.append([*row, verdict(abs(said / read - 1) <= NEAR)])
  return rows


if __name__ == "__main__":
  sys.exit(main())
