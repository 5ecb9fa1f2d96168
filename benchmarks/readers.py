"""Readers side by side: this library, SeqIO, Grain and tf.data on the same records, on one machine.

Each reader runs in a process of its own, one after the other. All deliver rows of 512 + 114 tokens in batches
of 256, of one example each or packed, and all must deliver the same examples: a sum over a hash of each
decides. Only of those that corrupt spans, each with draws of its own, the number has to be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from side_by_side import contenders, data
from side_by_side.data import DataSet
from side_by_side.report import (
  ANYSTEP_FIRST_BATCH,
  ANYSTEP_OPENING,
  GRAIN_FIRST_BATCH,
  PACKAGES,
  circumstances,
  milliseconds,
  report,
  write_between_marks,
)


class Job(NamedTuple):
  """One process: what it measures, of whom, on which data, and how."""

  measure: str
  reader: str
  data_set: DataSet
  options: dict[str, Any]

  @property
  def name(self) -> str:
    """For people."""
    return f"{self.data_set.title}: {self.reader}"


def main() -> int:
  """Measures, prints the tables, and writes them where `--write` says; 1 where readers fail or differ."""
  options = parse_arguments()
  os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
  options.work_dir.mkdir(parents=True, exist_ok=True)
  data_sets = [
    data.generated(options.work_dir, options.examples),
    data.stdlib(options.work_dir, corrupted=True),
    data.stdlib(options.work_dir, corrupted=False),
  ]
  jobs = [job for job in all_jobs(*data_sets, options=options) if re.search(options.only, job.name)]
  results: dict[str, dict[str, Any]] = {data_set.title: {} for data_set in data_sets}
  problems = []
  with open(options.work_dir / "readers.jsonl", "w") as lines:
    lines.write(json.dumps({"about": circumstances("readers", PACKAGES)}) + "\n")
    for number, job in enumerate(jobs, 1):
      print(f"[{number}/{len(jobs)}] {job.name}", end=" ", file=sys.stderr, flush=True)
      start = time.monotonic()
      result = run(job)
      if result is None:
        problems.append(f"failed: {job.name}")
        continue
      print(f"{in_short(result)} ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
      results[job.data_set.title][job.reader] = result
      lines.write(json.dumps({"data": job.data_set.title, "reader": job.reader, **result}) + "\n")
      lines.flush()
  measured = [(data_set, results[data_set.title]) for data_set in data_sets if results[data_set.title]]
  for data_set, by_reader in measured:
    problems += [f"other rows: {data_set.title}: {difference}" for difference in differences(by_reader)]
  text = report(measured, passes=options.passes, pass_seconds=options.pass_seconds)
  print(text)
  for problem in problems:
    print(problem, file=sys.stderr)
  if problems:
    return 1
  if options.write:
    write_between_marks(options.write, "readers", text)
  return 0


def parse_arguments() -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--quick", action="store_true", help="20,000 examples and short passes, to try it out")
  parser.add_argument("--examples", type=int, help="generated examples (default: 200,000)")
  parser.add_argument("--passes", type=int, default=3, help="passes, of which the median counts (default: 3)")
  parser.add_argument("--pass_seconds", type=float, help="a pass is cut off after so long (default: 5)")
  parser.add_argument("--only", default="", help="regular expression of what to measure")
  parser.add_argument("--write", type=pathlib.Path, help="Markdown file that the tables go into")
  parser.add_argument(
    "--work_dir",
    type=pathlib.Path,
    default=pathlib.Path(__file__).parents[1] / "build" / "benchmarks",
    help="where data is made and kept, and readers.jsonl written; delete it when the cache's format changes",
  )
  options = parser.parse_args()
  options.examples = options.examples or (20_000 if options.quick else 200_000)
  if options.examples < 10_000:
    parser.error("--examples: at least 10,000, for SeqIO keeps what is smaller in memory")
  options.pass_seconds = options.pass_seconds or (2 if options.quick else 5)
  return options


def all_jobs(
  generated: DataSet, stdlib: DataSet, uncorrupted: DataSet, *, options: argparse.Namespace
) -> Iterator[Job]:
  """What is measured, in order."""
  timing = {"passes": options.passes, "pass_seconds": options.pass_seconds}
  for data_set, readers in (
    (generated, contenders.ON_GENERATED),
    (stdlib, contenders.ON_ONE_TASK),
    (uncorrupted, contenders.CORRUPTED),
  ):
    for reader in readers:
      yield Job("rates", reader, data_set, {"reader": reader, **timing})
  yield Job("first_batch", ANYSTEP_FIRST_BATCH, generated, {"reader": contenders.ANYSTEP})
  yield Job("first_batch", GRAIN_FIRST_BATCH, generated, {"reader": "Grain"})
  yield Job("open_wide", ANYSTEP_OPENING, generated, {})


def run(job: Job) -> dict[str, Any] | None:
  """Runs a job in a process of its own; None where it fails, with its reason on stderr."""
  request = {
    "measure": job.measure,
    "title": job.data_set.title,
    "directory": str(job.data_set.directory.absolute()),
    "task": job.data_set.task,
    "options": job.options,
  }
  done = subprocess.run(
    [sys.executable, "-m", "side_by_side.measure", json.dumps(request)],
    env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    print(f"failed\n{done.stderr[-4000:]}", file=sys.stderr, flush=True)
    return None
  return json.loads(done.stdout.splitlines()[-1])


def in_short(result: Mapping[str, Any]) -> str:
  """A result in a few words."""
  if "passes" in result:
    return f"{result['examples_per_second']:,.0f} examples/s"
  timed = [result, *(value for value in result.values() if isinstance(value, dict))]
  return ", ".join(milliseconds(one["median_seconds"]) for one in timed if "median_seconds" in one)


def differences(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """Readers that did not deliver what they had to: what the first one of their kind did, or their own."""
  problems = []
  first: dict[str, Any] = {}
  for reader, result in results.items():
    if "checked" not in result:
      continue
    delivered = result["checked"]
    if reader in contenders.CORRUPTED:
      delivered = {"examples": delivered["examples"]}
    kind = "ended" if reader in contenders.ENDED else ""
    expected = result["expected"] if "expected" in result else first.setdefault(kind, delivered)
    if delivered != expected:
      problems.append(f"{reader} delivered {delivered} in place of {expected}")
  return problems


if __name__ == "__main__":
  sys.exit(main())
