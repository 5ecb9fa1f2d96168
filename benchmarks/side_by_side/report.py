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
from side_by_side.contenders import ANYSTEP, ANYSTEP_CONVERTED, GRAIN, SEQIO, TF_DATA
from side_by_side.data import FEATURE_LENGTHS, MIXTURE_TASKS, DataSet
from side_by_side.measure import FAR_STEP, OPENINGS, UNTIMED_BATCHES

TIMES_SEQIO = 20
TIMES_GRAIN = 30
OF_TF_DATA = 0.6
OF_ONE_TASK = 0.6
FAR_OF_START = 1.2
FIRST_BATCH_SECONDS = 0.05
OPEN_SECONDS = 0.5

ANYSTEP_FIRST_BATCH = "anystep, first batch"
GRAIN_FIRST_BATCH = "Grain, first batch"
ANYSTEP_OPENING = "anystep, opening"

_PACKAGES = ("anystep", "array_record", "grain", "numpy", "protobuf", "seqio", "tensorflow")

Results = Mapping[str, Mapping[str, Any]]
"""What was measured on one data set, by reader."""


def report(measured: Iterable[tuple[DataSet, Results]], *, passes: int, pass_seconds: float) -> str:
  """All tables and what they were measured on."""
  parts = ["## Readers", _method(passes, pass_seconds), circumstances()]
  for data_set, results in measured:
    parts.append(f"### {data_set.title}")
    parts.append(_one_task_table(results))
    rows = [*_own_rate_rows(results), *_opening_rows(results)]
    if rows:
      parts.append(_table(["measured", "", "target", ""], rows))
      parts.append(
        "The mixture's tasks are links to one task's files, which so share the page cache; its passes follow "
        f"each other in one stream. First batches and openings are medians of {OPENINGS}. SeqIO and tf.data "
        f"have no such figure: they reach step {FAR_STEP:,} by reading every batch before it."
      )
  return "\n\n".join(parts) + "\n"


def _method(passes: int, pass_seconds: float) -> str:
  return (
    f"Padded rows of {' + '.join(map(str, FEATURE_LENGTHS.values()))} int32 tokens in batches of "
    f"{contenders.BATCH_SIZE}; each reader in a process of its own, one after the other, files in the page "
    f"cache. A rate is the median of {passes} passes over the data (lowest and highest in brackets), each "
    f"opened anew, timed after {UNTIMED_BATCHES} batches and cut off after {pass_seconds:g} s. A pass before "
    "those sums a hash of every row: all readers delivered the same. Memory is the peak of the resident set "
    "above what imports take, and all that worker processes take. Of Grain's settings that were measured the "
    "fastest with and without worker processes are shown, of tf.data's the fastest."
  )


def circumstances() -> str:
  """The day, the machine, the versions and the command, without what names the machine."""
  processor = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
  versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
  # A path names the machine.
  arguments = [re.sub(r"(^|=)/.*", r"\1PATH", argument) for argument in sys.argv[1:]]
  return (
    f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores of "
    f"{processor[1] if processor else 'an unnamed processor'}; Python {sys.version.split()[0]}, {versions}. "
    f"Made by `{' '.join(['python benchmarks/readers.py', *arguments])}`."
  )


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
    rows.append(
      [reader, _rate(results[reader]), shown_times, _memory(results[reader]), target, _verdict(met)]
    )
  return _table(head, rows)


def _own_rate_rows(results: Results) -> list[list[str]]:
  rows = []
  for reader, title, least in (
    (contenders.ANYSTEP_LATER_EPOCH, "a later epoch, reshuffled", None),
    (contenders.ANYSTEP_MIXTURE, f"a mixture of {len(MIXTURE_TASKS)} tasks of 64 shards", OF_ONE_TASK),
  ):
    if reader not in results:
      continue
    figure, target, met = f"{_rate(results[reader])} examples/s", "", None
    if ANYSTEP in results:
      share = results[reader]["examples_per_second"] / results[ANYSTEP]["examples_per_second"]
      figure += f", {share:.2f} times one task"
      met = None if least is None else share >= least
    if least is not None:
      target = f"{least:g} times"
    rows.append([title, f"{figure}; {_memory(results[reader])} MiB", target, _verdict(met)])
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
    rows.append([title, f"{milliseconds(far)}, {far / start:.2f} times step 0's", target, _verdict(met)])
  if ANYSTEP_OPENING in results:
    result = results[ANYSTEP_OPENING]
    seconds = result["median_seconds"]
    title, target = f"opening a cache of {result['shards']:,} shards", f"under {milliseconds(OPEN_SECONDS)}"
    rows.append([title, milliseconds(seconds), target, _verdict(seconds < OPEN_SECONDS)])
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


def _verdict(met: bool | None) -> str:
  return {True: "pass", False: "**fail**", None: ""}[met]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
