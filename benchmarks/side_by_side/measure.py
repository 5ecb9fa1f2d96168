"""Measures one reader in a process of its own: `python -m side_by_side.measure '{"title": …}'`.

The result is the last line of stdout, as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from side_by_side import contenders
from side_by_side.data import FEATURE_LENGTHS, SPLIT, WIDE_TASK, DataSet
from side_by_side.rows import Rows

FAR_STEP = 10**6
OPENINGS = 9
UNTIMED_BATCHES = 16

_MULTIPLIERS = (
  np.random.default_rng(1).integers(2**64, size=sum(FEATURE_LENGTHS.values()), dtype=np.uint64) | 1
)


class RowSum:
  """The sum of a 64-bit hash of each example: the same for the same examples in any order.

  Attributes:
    examples: how many there were.
    tokens: that are not padding, in all of them.
  """

  def __init__(self):
    self.examples = 0
    self.tokens = 0
    self._sum = 0

  def add(self, examples: Rows) -> None:
    """Adds rows of one example each; those of zeros are padding."""
    for values, length in zip((examples.inputs, examples.targets), FEATURE_LENGTHS.values(), strict=True):
      if values.dtype != np.int32 or values.shape[1:] != (length,):
        raise ValueError(f"a batch of {values.dtype} {values.shape} in place of int32 (rows, {length})")
    rows = np.concatenate([examples.inputs, examples.targets], axis=1)
    rows = rows[rows.any(axis=1)]
    hashes = (rows.astype(np.uint64) * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
    hashes = (hashes ^ hashes >> np.uint64(31)) * np.uint64(0x9E3779B97F4A7C15)
    self.examples += len(rows)
    self.tokens += np.count_nonzero(rows)
    self._sum = (self._sum + int((hashes ^ hashes >> np.uint64(29)).sum(dtype=np.uint64))) % 2**64

  def result(self) -> dict[str, Any]:
    """Number of examples and their sum, to be compared."""
    return {"examples": self.examples, "row_sum": f"{self._sum:016x}"}


def rates(data_set: DataSet, *, reader: str, passes: int, pass_seconds: float) -> dict[str, Any]:
  """Reads everything once and sums the examples, then reads for speed."""
  opener = contenders.CONTENDERS[reader](data_set)
  after_imports = peak_bytes("self")
  row_sum = RowSum()
  filled_rows = workers_bytes = 0
  with contextlib.closing(opener()) as batches:
    for number, batch in enumerate(batches):
      filled_rows += np.count_nonzero(batch.inputs.any(axis=1))
      row_sum.add(batch.unpacked())
      if number % 16 == 0:
        workers_bytes = max(workers_bytes, children_peak_bytes())
  measured = [_timed_pass(opener, row_sum.examples, pass_seconds) for _ in range(passes)]
  result = {
    "examples_per_second": statistics.median(one["examples_per_second"] for one in measured),
    "passes": measured,
    "checked": row_sum.result(),
    "fill": row_sum.tokens / (filled_rows * sum(FEATURE_LENGTHS.values())),
    "peak_bytes_above_imports": peak_bytes("self") - after_imports,
    "peak_bytes_of_workers": workers_bytes,
    "peak_bytes_after_imports": after_imports,
  }
  if hasattr(opener, "expected"):
    expected = RowSum()
    for rows in opener.expected():
      expected.add(rows)
    result["expected"] = expected.result()
  return result


def _timed_pass(opener: contenders.Opener, all_examples: int, pass_seconds: float) -> dict[str, Any]:
  """One pass, timed once it runs: opening does not count. A slow reader is cut off."""
  with contextlib.closing(opener()) as batches:
    untimed = sum(batch.num_examples() for batch in itertools.islice(batches, UNTIMED_BATCHES))
    counted, elapsed = 0, 0.0
    start, cpu_start = time.perf_counter(), time.process_time()
    for batch in batches:
      counted += batch.num_examples()
      elapsed = time.perf_counter() - start
      if elapsed > pass_seconds:
        break
    cpu_seconds = time.process_time() - cpu_start
  # The last batch may have rows of padding.
  examples = min(counted, all_examples - untimed)
  return {
    "examples": examples,
    "seconds": elapsed,
    "cpu_seconds": cpu_seconds,  # of all threads, without worker processes
    "examples_per_second": examples / elapsed,
  }


def first_batch(data_set: DataSet, *, reader: str) -> dict[str, Any]:
  """Seconds from opening to the first batch, at step 0 and far on, in turns."""
  from_step = contenders.FROM_STEP[reader](data_set)
  seconds: dict[int, list[float]] = {0: [], FAR_STEP: []}
  for opening in range(OPENINGS + 1):
    for step, taken in seconds.items():
      start = time.perf_counter()
      with contextlib.closing(from_step(step)) as batches:
        next(batches)
        if opening:  # the first brings the files into the page cache
          taken.append(time.perf_counter() - start)
  return {
    name: {"median_seconds": statistics.median(taken), "seconds": taken}
    for name, taken in (("start", seconds[0]), ("far", seconds[FAR_STEP]))
  }


def open_wide(data_set: DataSet) -> dict[str, Any]:
  """Seconds to open a cache of many shards."""
  import anystep

  seconds = []
  for _ in range(OPENINGS):
    start = time.perf_counter()
    cache = anystep.open_cache(data_set.directory / "wide", WIDE_TASK, SPLIT)
    seconds.append(time.perf_counter() - start)
  return {
    "shards": cache.manifest.num_shards,
    "median_seconds": statistics.median(seconds),
    "seconds": seconds,
  }


def peak_bytes(process: str) -> int:
  """The most memory that a process had at once (its resident set), in bytes."""
  return _status(process, "VmHWM") * 1024


def children_peak_bytes() -> int:
  """The sum of the peaks of the processes that this one started, directly or not."""
  processes = [path.name for path in pathlib.Path("/proc").glob("[0-9]*")]
  parents = {process: str(_status(process, "PPid")) for process in processes}
  generation, descendants = {str(os.getpid())}, set[str]()
  while generation:
    generation = {process for process, parent in parents.items() if parent in generation}
    descendants |= generation
  return sum(peak_bytes(process) for process in descendants)


def _status(process: str, field: str) -> int:
  """A number of /proc/…/status; 0 for a process that has ended."""
  try:
    text = pathlib.Path(f"/proc/{process}/status").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return 0
  match = re.search(rf"^{field}:\s+(\d+)", text, re.MULTILINE)
  return int(match[1]) if match else 0


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
  "rates": rates,
  "first_batch": first_batch,
  "open_wide": open_wide,
}


def main() -> None:
  """Runs what the argument says."""
  request = json.loads(sys.argv[1])
  data_set = DataSet(
    title=request["title"], directory=pathlib.Path(request["directory"]), task=request["task"]
  )
  result = MEASURES[request["measure"]](data_set, **request["options"])
  print(json.dumps(result))


if __name__ == "__main__":
  main()
