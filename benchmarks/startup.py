"""Seconds until programs end with the error of a common mistake, beside the import of TensorFlow and SeqIO.

Each mistake is a command of its own, as users run it. CPU seconds depend little on the machine's other work.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence

_IMPORTS = "import tensorflow, seqio"
_TRAIN = ("anystep-train", "--gin_file=gin_configs/examples/stdlib_tiny.gin", "--gin.MODEL_DIR='TMP/model'")
# The directory holds something: a name without a cache there may be a mixture's.
_CACHED = "--gin.CACHE_DIR='TMP'"
_CACHE = ("anystep-cache", "--output_cache_dir=TMP/cache")
_VOCAB = ("anystep-vocab", "train", "--size=99", "--output=TMP/vocabulary")
_STDLIB, _MISSPELT = "--module_import=anystep.tasks.stdlib", "--module_import=anystep.tasks.stdlb"
# Name, command line, and the kind of error with which it ends.
_MISTAKES = (
  ("a misspelt flag", (*_TRAIN, "--dryrun"), "flags"),
  ("a gin file that is not there", ("anystep-train", "--gin_file=stdlib_tiny.gin"), "gin_file"),
  ("a mistyped macro", (*_TRAIN, "--gin.BATCHSIZE=16"), "gin_unknown_macro"),
  ("a text without quotes", (*_TRAIN, "--gin.CACHE_DIR=cache"), "gin_binding"),
  ("a wrong value of the data", (*_TRAIN, "--gin.BATCH_SIZE=16.0"), "gin_value"),
  ("a misspelt module", (*_TRAIN, "--gin.MIXTURE_OR_TASK_MODULE='anystep.tasks.stdlb'"), "module_import"),
  ("a missing cache", (*_TRAIN, "--gin.CACHE_DIR='TMP/none'"), "cache_missing"),
  ("a misspelt task", (*_TRAIN, _CACHED, "--gin.MIXTURE_OR_TASK_NAME='stdlib_l'"), "task_unknown"),
  ("a misspelt parameter", (*_TRAIN, _CACHED, "--gin.trainer.Trainer.step=3"), "gin_binding"),
  ("a misspelt flag", (*_CACHE, "--task=a"), "flags"),
  ("a misspelt module", (*_CACHE, "--tasks=a", _MISSPELT), "module_import"),
  ("a misspelt task", (*_CACHE, "--tasks=stdlib_l", _STDLIB), "task_unknown"),
  ("a missing cache", ("anystep-data", "stats", "--cache_dir=TMP/none", "--task=a"), "cache_missing"),
  ("a misspelt module", ("anystep-data", "preview", "--task=a", _MISSPELT), "module_import"),
  ("a misspelt task", ("anystep-data", "preview", "--task=stdlib_l", _STDLIB), "task_unknown"),
  ("a flag that is missing", (*_VOCAB, _STDLIB), "arguments"),
  ("a misspelt module", (*_VOCAB, "--task=a", _MISSPELT), "module_import"),
  ("a misspelt task", (*_VOCAB, "--task=stdlib_l", _STDLIB), "task_unknown"),
)


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Seconds that a command took: of the processor, and on the clock."""

  cpu: float
  clock: float


def main(argv: Sequence[str]) -> None:
  """Measure and print the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--times", type=int, default=3, help="how often each is measured; the median counts")
  times = parser.parse_args(argv).times
  bare = measure([sys.executable, "-c", _IMPORTS], times=times)
  rows = [[f"`{_IMPORTS}`", "", f"{bare.cpu:.1f}", f"{bare.clock:.1f}", ""]]
  for name, (program, *arguments), kind in _MISTAKES:
    with tempfile.TemporaryDirectory() as directory:
      (pathlib.Path(directory) / "other_task").mkdir()
      command = [str(pathlib.Path(sysconfig.get_path("scripts")) / program)]
      command += [argument.replace("TMP", directory) for argument in arguments]
      taken = measure(command, times=times, kind=kind)
    above = f"{taken.cpu - bare.cpu:+.1f}" if taken.cpu > bare.cpu / 2 else ""
    rows.append([f"`{program}`: {name}", f"`{kind}`", f"{taken.cpu:.1f}", f"{taken.clock:.1f}", above])
  header = ["", "error", "CPU s", "s", "CPU s above the import"]
  for row in (header, ["---"] * len(header), *rows):
    print(f"| {' | '.join(row)} |", flush=True)


def measure(command: Sequence[str], *, times: int, kind: str = "") -> Seconds:
  """Return the medians of several runs of a command, which must end with an error of a kind."""
  taken = []
  for _ in range(times):
    begin_cpu, begin = _children_cpu_seconds(), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    taken.append(Seconds(_children_cpu_seconds() - begin_cpu, time.monotonic() - begin))
    assert not kind or f"kind={kind} " in done.stderr, done.stderr
  return Seconds(statistics.median(s.cpu for s in taken), statistics.median(s.clock for s in taken))


def _children_cpu_seconds() -> float:
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
  main(sys.argv[1:])
