"""Cache jobs side by side: `anystep-cache` and `seqio_cache_tasks` on one task, and its bare preprocessors.

Each runs as its users run it, a command of its own, one after the other: start-up counts, and is also
measured by itself, with the same command on eight files of a line. The examples are lines of Python source;
at the end all caches must hold those that the preprocessors give.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import cycle, islice

from side_by_side import bare_preprocessors, moved_records, processes
from side_by_side.report import circumstances, table, verdict, write_between_marks

TASK, MODULE = "lines_of_python", "side_by_side.cache_task"
NUM_FILES = 8
STARTS = 2
TIMES_SEQIO = 10
OF_BARE = 0.8
MOVED_PER_SECOND = 100_000

SEQIO = "seqio_cache_tasks"
ANYSTEP = "anystep-cache"
MOVED = "spills to shards, one core"
_TWO_THREADS = "--pipeline_options=--direct_num_workers=2,--direct_running_mode=multi_threading"
JOBS = {
  SEQIO: ("seqio_cache_tasks",),
  ANYSTEP: ("anystep-cache",),
  "anystep-cache, 2 threads": ("anystep-cache", _TWO_THREADS),
  "anystep-cache, tfrecord": ("anystep-cache", "--output_format=tfrecord"),
  "anystep-cache, tfrecord, 2 threads": ("anystep-cache", "--output_format=tfrecord", _TWO_THREADS),
}
BARE = {f"bare: {form}": form for form in bare_preprocessors.FORMS}
PACKAGES = ("anystep", "apache-beam", "array_record", "numpy", "protobuf", "seqio", "tensorflow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """A job, or the bare preprocessors.

  Attributes:
    examples: how many there were.
    seconds: from the command to its end.
    startup_seconds: of them on `NUM_FILES` examples; of the bare preprocessors those of the imports.
    cpu_seconds, peak_bytes, written_bytes: as `processes.Run` has them.
    cache_bytes: of the files that were left.
  """

  examples: int
  seconds: float
  startup_seconds: float
  cpu_seconds: float
  peak_bytes: int
  written_bytes: int
  cache_bytes: int = 0

  @property
  def rate(self) -> float:
    """Examples a second, start-up included."""
    return self.examples / self.seconds

  @property
  def rate_without_startup(self) -> float:
    """Examples a second once it runs."""
    return self.examples / (self.seconds - self.startup_seconds)


Results = Mapping[str, Measured]


class Failed(Exception):
  """A command that ended with another status than 0."""


def main() -> int:
  """Measures, prints the tables, and writes them where `--write` says; 1 where jobs fail or caches differ."""
  options = parse_arguments()
  os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
  # The first start of each program writes the bytecode that all later ones load.
  os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
  options.work_dir.mkdir(parents=True, exist_ok=True)
  names = [name for name in (*JOBS, *BARE, MOVED) if re.search(options.only, name)]
  results, problems = {}, []
  with tempfile.TemporaryDirectory(dir=options.work_dir, prefix="cache_job-") as folder:
    bench = Bench(pathlib.Path(folder), options.examples)
    for number, name in enumerate(names, 1):
      print(f"[{number}/{len(names)}] {name}", end=" ", file=sys.stderr, flush=True)
      try:
        results[name] = bench.job(name) if name in JOBS else bench.without_a_job(name)
      except Failed as failure:
        problems.append(f"failed: {name}: {failure}")
        print("failed", file=sys.stderr)
        continue
      print(f"{results[name].seconds:.1f} s", file=sys.stderr, flush=True)
    problems += bench.differences([name for name in results if name in JOBS])
  with open(options.work_dir / "cache_job.jsonl", "w") as lines:
    lines.write(json.dumps({"about": circumstances("cache_job", PACKAGES)}) + "\n")
    for name, measured in results.items():
      lines.write(json.dumps({"name": name, **dataclasses.asdict(measured)}) + "\n")
  text = report(results, options.examples)
  print(text)
  for problem in problems:
    print(problem, file=sys.stderr)
  if problems:
    return 1
  if options.write:
    write_between_marks(options.write, "cache_job", text)
  return 0


def parse_arguments() -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--examples", type=int, default=340_000, help="lines (default: 340,000)")
  parser.add_argument("--only", default="", help="regular expression of what to measure")
  parser.add_argument("--write", type=pathlib.Path, help="Markdown file that the tables go into")
  parser.add_argument(
    "--work_dir",
    type=pathlib.Path,
    default=pathlib.Path(__file__).parents[1] / "build" / "benchmarks",
    help="where cache_job.jsonl is written, and texts and caches for as long as it runs",
  )
  options = parser.parse_args()
  if options.examples <= NUM_FILES:
    parser.error(f"--examples: more than the {NUM_FILES} that start-up is measured on")
  return options


class Bench:
  """The texts, and what is run on them, below a folder."""

  def __init__(self, folder: pathlib.Path, num_examples: int):
    self._folder = folder
    self._num_examples = num_examples
    self._texts = {"all": folder / "texts", "few": folder / "few_texts"}
    write_texts(self._texts["all"], num_examples)
    write_texts(self._texts["few"], NUM_FILES)

  def job(self, name: str) -> Measured:
    """Runs a cache job on few examples, as often as `STARTS` says, and on all of them."""
    starts = [self._run(self._command(name, f"start {k} of {name}"), texts="few") for k in range(STARTS)]
    run = self._run(self._command(name, name), texts="all")
    return Measured(
      examples=self._num_examples,
      seconds=run.wall_seconds,
      startup_seconds=min(start.wall_seconds for start in starts),
      cpu_seconds=run.cpu_seconds,
      peak_bytes=run.peak_bytes,
      written_bytes=run.written_bytes,
      cache_bytes=processes.bytes_below(self._cache(name)),
    )

  def without_a_job(self, name: str) -> Measured:
    """Iterates over the preprocessors' examples, or moves those of spills to shards; start-up is the rest."""
    if name == MOVED:
      command = [sys.executable, "-m", moved_records.__name__, str(self._cache(name))]
      run = self._run(command, texts="all", cpus=[min(os.sched_getaffinity(0))])
    else:
      run = self._run([sys.executable, "-m", bare_preprocessors.__name__, BARE[name]], texts="all")
    told = json.loads(run.lines[-1][1])
    return Measured(
      examples=told["examples"],
      seconds=run.wall_seconds,
      startup_seconds=run.wall_seconds - told["seconds"],
      cpu_seconds=run.cpu_seconds,
      peak_bytes=run.peak_bytes,
      written_bytes=run.written_bytes,
    )

  def differences(self, names: Sequence[str]) -> list[str]:
    """Caches that do not hold the preprocessors' examples."""
    directories = {name: str(self._cache(name) / TASK) for name in names}
    command = [sys.executable, "-m", "side_by_side.same_examples", *directories.values()]
    try:
      digests = json.loads(self._run(command, texts="all").lines[-1][1])
    except Failed as failure:
      return [f"not compared: {failure}"]
    problems = [
      f"other examples: {name}: {digests[directory]} in place of {digests['']}"
      for name, directory in directories.items()
      if digests[directory] != digests[""]
    ]
    if digests[""]["examples"] != self._num_examples:
      problems.append(f"{digests['']['examples']:,} examples in place of {self._num_examples:,}")
    return problems

  def _cache(self, name: str) -> pathlib.Path:
    return self._folder / "caches" / name.replace(",", "").replace(" ", "_")

  def _command(self, job: str, cache: str) -> list[str]:
    program, *flags = JOBS[job]
    return [
      str(pathlib.Path(sysconfig.get_path("scripts")) / program),
      f"--tasks={TASK}",
      f"--module_import={MODULE}",
      f"--output_cache_dir={self._cache(cache)}",
      *flags,
    ]

  def _run(self, command: Sequence[str], *, texts: str, cpus: Collection[int] | None = None) -> processes.Run:
    search_path = [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
      "CACHE_BENCHMARK_TEXTS": str(self._texts[texts].absolute()),
      "PYTHONPATH": os.pathsep.join(search_path),
    }
    run = processes.run(command, environment=environment, cpus=cpus)
    if run.status:
      raise Failed("\n".join([f"status {run.status}", *(line for _, line in run.lines[-20:])]))
    return run


def write_texts(directory: pathlib.Path, num_lines: int) -> None:
  """Writes so many lines of the standard library, from its start again where it ends, into `NUM_FILES`."""
  lines = list(islice(cycle(_lines_of_stdlib()), num_lines))
  directory.mkdir()
  for k in range(NUM_FILES):
    own = lines[num_lines * k // NUM_FILES : num_lines * (k + 1) // NUM_FILES]
    (directory / f"{k}.txt").write_bytes(b"".join(line + b"\n" for line in own))


def _lines_of_stdlib() -> Iterator[bytes]:
  """Those of files in UTF-8: anystep refuses other texts, which SeqIO caches."""
  directory = pathlib.Path(sysconfig.get_path("stdlib"))
  for path in sorted(directory.rglob("*.py")):
    if path.relative_to(directory).parts[0] not in ("site-packages", "dist-packages"):
      content = path.read_bytes()
      with contextlib.suppress(UnicodeDecodeError):
        content.decode()
        yield from content.splitlines()


def report(results: Results, num_examples: int) -> str:
  """All tables and what they were measured on."""
  parts = ["## The cache job", _method(num_examples), circumstances("cache_job", PACKAGES)]
  jobs = {name: measured for name, measured in results.items() if name in JOBS}
  bare = {name: measured for name, measured in results.items() if name in BARE}
  if jobs:
    parts.append(_table_of_jobs(jobs))
  if bare:
    parts.append(_table_of_bare(bare))
  targets = _target_rows(jobs, bare, results.get(MOVED))
  if targets:
    parts.append(table(["measured", "", "target", ""], targets))
  return "\n\n".join(parts) + "\n"


def _method(num_examples: int) -> str:
  return (
    f"{num_examples:,} lines of the standard library's Python source in {NUM_FILES} text files, tokens of "
    "bytes, the texts kept beside them; commands in processes of their own, one after the other, with their "
    f"default options where none are named. Start-up is the least of {STARTS} runs of the same command on "
    f"{NUM_FILES} files of a line, for the bare preprocessors that of Python and the imports. CPU is that of "
    "all cores, memory the peak of the resident sets of all processes together, start-up included in both. "
    "Bytes written are those handed to the system, to pipes as well. All caches held the examples that the "
    "bare preprocessors gave: digests of each, sorted, decide. Python keeps its bytecode, as for users."
  )


def _table_of_jobs(jobs: Results) -> str:
  head = ["job", "seconds", "of them start-up", "examples/s", "without start-up", "CPU seconds"]
  head += ["memory, MiB", "cache, MiB", "written ÷ cache", f"times as fast as {SEQIO}", "target", ""]
  rows = []
  for name, job in jobs.items():
    times, target, met = "", "", None
    if SEQIO in jobs:
      ratio = job.rate / jobs[SEQIO].rate
      times = f"{ratio:.3g}"
      if name == ANYSTEP:
        target, met = f"{TIMES_SEQIO} times", ratio >= TIMES_SEQIO
    row = [name, *_cells(job), f"{job.cache_bytes / 2**20:,.1f}"]
    rows.append([*row, f"{job.written_bytes / job.cache_bytes:.2f}", times, target, verdict(met)])
  return table(head, rows)


def _table_of_bare(bare: Results) -> str:
  head = ["nothing written", "seconds", "of them start-up", "examples/s", "without start-up", "CPU seconds"]
  return table([*head, "memory, MiB"], [[name, *_cells(measured)] for name, measured in bare.items()])


def _cells(measured: Measured) -> list[str]:
  return [
    f"{measured.seconds:.1f}",
    f"{measured.startup_seconds:.1f}",
    f"{measured.rate:,.0f}",
    f"{measured.rate_without_startup:,.0f}",
    f"{measured.cpu_seconds:.1f}",
    f"{measured.peak_bytes / 2**20:,.0f}",
  ]


def _target_rows(jobs: Results, bare: Results, moved: Measured | None) -> list[list[str]]:
  rows = []
  if bare:
    fastest, limit = max(bare.items(), key=lambda item: item[1].rate_without_startup)
    for name in [name for name in jobs if name != SEQIO]:
      share = jobs[name].rate_without_startup / limit.rate_without_startup
      target, met = (f"{OF_BARE} times", share >= OF_BARE) if name == ANYSTEP else ("", None)
      title = f"{name} beside the fastest {fastest}, both without start-up"
      rows.append([title, f"{share:.2f} times", target, verdict(met)])
  if moved is not None:
    rate = moved.rate_without_startup
    met = rate >= MOVED_PER_SECOND
    rows.append([MOVED, f"{rate:,.0f} records/s", f"{MOVED_PER_SECOND:,}", verdict(met)])
  return rows


if __name__ == "__main__":
  sys.exit(main())
