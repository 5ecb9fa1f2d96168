"""Tables of what was measured, with targets, as Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from side_by_side import contenders
from side_by_side.contenders import (
  ANYSTEP,
  ANYSTEP_CONVERTED,
  ANYSTEP_CORRUPTED,
  ANYSTEP_ENDED,
  ANYSTEP_PACKED,
  GRAIN,
  GRAIN_PACKED,
  SEQIO,
  SEQIO_CORRUPTED,
  SEQIO_ENDED,
  SEQIO_PACKED,
  TF_DATA,
)
from side_by_side.data import FEATURE_LENGTHS, MIXTURE_TASKS, DataSet
from side_by_side.measure import FAR_STEP, OPENINGS, UNTIMED_BATCHES

TIMES_SEQIO = 20
TIMES_GRAIN = 30
OF_TF_DATA = 0.6
OF_ONE_TASK = 0.6
TIMES_SEQIO_PACKED = 15
TIMES_SEQIO_CORRUPTED = 3
ENDED_OF_CONVERTED = 0.75
FAR_OF_START = 1.2
FIRST_BATCH_SECONDS = 0.05
OPEN_SECONDS = 0.5

ANYSTEP_FIRST_BATCH = "anystep, first batch"
GRAIN_FIRST_BATCH = "Grain, first batch"
ANYSTEP_OPENING = "anystep, opening"

PACKAGES = ("anystep", "array_record", "grain", "numba", "numpy", "protobuf", "seqio", "tensorflow")

Results = Mapping[str, Mapping[str, Any]]
"""What was measured on one data set, by reader."""


def report(measured: Iterable[tuple[DataSet, Results]], *, passes: int, pass_seconds: float) -> str:
  """All tables and what they were measured on."""
  parts = ["## Readers", _method(passes, pass_seconds), circumstances("readers", PACKAGES)]
  for data_set, results in measured:
    parts.append(f"### {data_set.title}")
    if results.keys() & contenders.ON_ONE_TASK.keys():
      parts.append(_one_task_table(results))
    parts += _tables_beside_seqio(results)
    rows = [*_own_rate_rows(results), *_opening_rows(results)]
    if rows:
      parts.append(table(["measured", "", "target", ""], rows))
      parts.append(
        "The mixture's tasks are links to one task's files, which so share the page cache; its passes follow "
        f"each other in one stream. First batches and openings are medians of {OPENINGS}. SeqIO and tf.data "
        f"have no such figure: they reach step {FAR_STEP:,} by reading every batch before it."
      )
  return "\n\n".join(parts) + "\n"


def _method(passes: int, pass_seconds: float) -> str:
  return (
    f"Rows of {' + '.join(map(str, FEATURE_LENGTHS.values()))} int32 tokens, of one example each where they "
    f"are not packed, in batches of {contenders.BATCH_SIZE}; each reader in a process of its own, one after "
    f"the other, files in the page cache. A rate is the median of {passes} passes over the data (lowest and "
    f"highest in brackets), each opened anew, timed after {UNTIMED_BATCHES} batches and cut off after "
    f"{pass_seconds:g} s. It counts examples, also of packed rows. A pass before those sums a hash of every "
    "example, those of packed rows taken apart: all readers delivered the same, but for spans that are "
    "corrupted at reading, whose number is the same. Memory is the peak of the resident set above what "
    "imports take, and all that worker processes take; that of packed rows includes the search for packs, "
    "unless an earlier run left them beside the cache. Of Grain's settings that were measured the fastest "
    "with and without worker processes are shown, of tf.data's the fastest. The fill is real tokens ÷ tokens "
    "of rows."
  )


def circumstances(program: str, packages: Sequence[str]) -> str:
  """The day, the machine, the versions and the command, without what names the machine."""
  processor = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
  versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
  # A path names the machine.
  arguments = [re.sub(r"(^|=)/.*", r"\1PATH", argument) for argument in sys.argv[1:]]
  return (
    f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores of "
    f"{processor[1] if processor else 'an unnamed processor'}; Python {sys.version.split()[0]}, {versions}. "
    f"Made by `{' '.join([f'python benchmarks/{program}.py', *arguments])}`."
  )


def write_between_marks(path: pathlib.Path, section: str, text: str) -> None:
  """Puts the text between a section's two marks in a file, at its end where it has none."""
  begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
  content = path.read_text() if path.exists() else "# Benchmarks\n"
  if begin not in content:
    content = f"{content.rstrip()}\n\n{begin}\n{end}\n"
  before, after = content.partition(begin)[0], content.partition(end)[2]
  path.write_text(f"{before}{begin}\n{text}{end}{after}")


def _one_task_table(results: Results) -> str:
  """A line for each reader, and for the fastest settings of those that were tried with several."""
  rates = {reader: result["examples_per_second"] for reader, result in results.items() if "passes" in result}
  fastest = sorted(rates, key=rates.__getitem__, reverse=True)
  shown = [ANYSTEP, ANYSTEP_CONVERTED, SEQIO]
  shown += [reader for reader in fastest if reader in GRAIN and "worker" not in reader][:1]
  shown += [reader for reader in fastest if reader in GRAIN and "worker" in reader][:1]
  shown += [reader for reader in fastest if reader in TF_DATA][:1]
  head = ["reader", "examples/s", "anystep is … times as fast", "memory, MiB", "target", ""]
  rows = []
  for reader in shown:
    if reader not in rates:
      rows.append([reader, "not measured", "", "", "", ""])
      continue
    ours, target, least = ANYSTEP, "", 0.0
    if reader == SEQIO:
      ours, target, least = ANYSTEP_CONVERTED, f"{TIMES_SEQIO} times, with the same features", TIMES_SEQIO
    elif reader in GRAIN:
      target, least = f"{TIMES_GRAIN} times", TIMES_GRAIN
    elif reader in TF_DATA:
      target, least = f"{OF_TF_DATA:g} times", OF_TF_DATA
    times = rates[ours] / rates[reader] if ours in rates else None
    met = times >= least if target and times is not None else None
    shown_times = "" if times is None else f"{times:.3g}"
    rows.append([reader, _rate(results[reader]), shown_times, _memory(results[reader]), target, verdict(met)])
  return table(head, rows)


def _tables_beside_seqio(results: Results) -> list[str]:
  """Where SeqIO does the same, with the same features: a table for each thing that was measured."""
  fastest = sorted(
    results.keys() & GRAIN_PACKED.keys(), key=lambda reader: -results[reader]["examples_per_second"]
  )
  grain = [reader for reader in fastest if "worker" not in reader][:1]
  grain += [reader for reader in fastest if "worker" in reader][:1]
  tables = []
  for what, ours, seqio, others, least in (
    ("packed rows", [*ANYSTEP_PACKED], SEQIO_PACKED, grain, TIMES_SEQIO_PACKED),
    ("end tokens appended after the cache", [ANYSTEP_ENDED], SEQIO_ENDED, [], None),
    ("spans corrupted after the cache", [ANYSTEP_CORRUPTED], SEQIO_CORRUPTED, [], TIMES_SEQIO_CORRUPTED),
  ):
    rows = []
    for reader in [*ours, seqio, *others]:
      if reader not in results:
        continue
      result, times, target, met = results[reader], "", "", None
      if least is not None and reader in ours:
        target = f"{least} times"
      if seqio in results:
        ratio = result["examples_per_second"] / results[seqio]["examples_per_second"]
        times, met = f"{ratio:.3g}", ratio >= least if target else None
      rows.append(
        [reader, _rate(result), times, f"{result['fill']:.1%}", _memory(result), target, verdict(met)]
      )
    if rows:
      head = [what, "examples/s", "times as fast as SeqIO", "fill", "memory, MiB", "target", ""]
      tables.append(table(head, rows))
  return tables


def _own_rate_rows(results: Results) -> list[list[str]]:
  rows = []
  mixture = f"a mixture of {len(MIXTURE_TASKS)} tasks of 64 shards"
  for reader, title, other, named, least in (
    (contenders.ANYSTEP_LATER_EPOCH, "a later epoch, reshuffled", ANYSTEP, "one task", None),
    (contenders.ANYSTEP_MIXTURE, mixture, ANYSTEP, "one task", OF_ONE_TASK),
    (ANYSTEP_ENDED, "end tokens after the cache", ANYSTEP_CONVERTED, "without", ENDED_OF_CONVERTED),
  ):
    if reader not in results:
      continue
    figure, target, met = f"{_rate(results[reader])} examples/s", "", None
    if other in results:
      share = results[reader]["examples_per_second"] / results[other]["examples_per_second"]
      figure += f", {share:.2f} times {named}"
      met = None if least is None else share >= least
    if least is not None:
      target = f"{least:g} times"
    rows.append([title, f"{figure}; {_memory(results[reader])} MiB", target, verdict(met)])
  return rows


def _opening_rows(results: Results) -> list[list[str]]:
  rows = []
  for reader in (ANYSTEP_FIRST_BATCH, GRAIN_FIRST_BATCH):
    if reader not in results:
      continue
    start, far = (results[reader][place]["median_seconds"] for place in ("start", "far"))
    target, met = "", None
    if reader == ANYSTEP_FIRST_BATCH:
      target = f"under {milliseconds(FIRST_BATCH_SECONDS)}, at most {FAR_OF_START} times"
      met = far < FIRST_BATCH_SECONDS and far <= FAR_OF_START * start
    name = reader.partition(",")[0]
    rows.append([f"{name}: from opening to the first batch, step 0", milliseconds(start), "", ""])
    title = f"{name}: from opening to the first batch, step {FAR_STEP:,}"
    rows.append([title, f"{milliseconds(far)}, {far / start:.2f} times step 0's", target, verdict(met)])
  if ANYSTEP_OPENING in results:
    result = results[ANYSTEP_OPENING]
    seconds = result["median_seconds"]
    title, target = f"opening a cache of {result['shards']:,} shards", f"under {milliseconds(OPEN_SECONDS)}"
    rows.append([title, milliseconds(seconds), target, verdict(seconds < OPEN_SECONDS)])
  return rows


def milliseconds(seconds: float) -> str:
  """A time in milliseconds.

  >>> milliseconds(0.02849)
  '28.5 ms'
  """
  return f"{1000 * seconds:.3g} ms"


def _rate(result: Mapping[str, Any]) -> str:
  rates = [one["examples_per_second"] for one in result["passes"]]
  return f"{result['examples_per_second']:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def _memory(result: Mapping[str, Any]) -> str:
  cell = f"{result['peak_bytes_above_imports'] / 2**20:,.0f}"
  workers = result["peak_bytes_of_workers"]
  return f"{cell} + {workers / 2**20:,.0f} of workers" if workers else cell


def verdict(met: bool | None) -> str:
  """Whether a target was met; None where there is none."""
  return {True: "pass", False: "**fail**", None: ""}[met]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table."""
  return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
