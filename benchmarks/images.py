"""Pictures decoded and cropped at reading: this library and Grain, with and without worker processes.

Both call the same function on the same records, JPEG files of 256 × 256 pixels, for batches of 64 crops.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from side_by_side import pictures
from side_by_side.report import circumstances, table, write_between_marks

PACKAGES = ("anystep", "array_record", "grain", "numpy", "pillow")
BATCH_SIZE = 64
ANYSTEP = "anystep"

Batches = Generator[dict[str, np.ndarray], None, None]
Opener = Callable[[pathlib.Path], Batches]


def anystep_reader(directory: pathlib.Path, *, workers: int) -> Batches:
  """This library: a stream's threads, or Grain's worker processes that share its steps."""
  import anystep

  transforms = {pictures.TASK: anystep.RandomMap(pictures.decode_and_crop)}
  cache = anystep.open_cache(directory / "anystep", pictures.TASK, pictures.SPLIT)
  plan = anystep.Plan.start(
    cache,
    batch_size=BATCH_SIZE,
    feature_lengths={"image": pictures.CROP_PIXELS},
    transforms=transforms,
  )
  if not workers:
    with anystep.open_stream(plan, directory / "anystep", transforms=transforms) as stream:
      yield from stream
    return
  grain = _grain()
  from anystep.grain_datasets import StreamDataset

  dataset = StreamDataset(plan, str(directory / "anystep"), transforms=transforms)
  yield from _closed(iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))))


def grain_reader(directory: pathlib.Path, *, workers: int) -> Batches:
  """Grain's MapDataset with its default of 16 read threads, or with worker processes."""
  grain = _grain()
  import tensorflow as tf

  source = grain.ArrayRecordDataSource([str(path) for path in sorted((directory / "grain").iterdir())])
  parse = functools.partial(pictures.parse_record, tf.train.Example)
  dataset = grain.MapDataset.source(source).seed(0).map(parse).repeat()
  dataset = dataset.random_map(pictures.decode_and_crop)
  if not workers:
    yield from _closed(iter(dataset.batch(BATCH_SIZE).to_iter_dataset()))
    return
  examples = dataset.to_iter_dataset(grain.ReadOptions(0, 0)).batch(BATCH_SIZE)
  yield from _closed(iter(examples.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))))


READERS: dict[str, Opener] = {
  f"{name}{f', {workers} workers' if workers else ''}": functools.partial(reader, workers=workers)
  for name, reader in ((ANYSTEP, anystep_reader), ("Grain, MapDataset", grain_reader))
  for workers in (0, 2)
}


def main() -> None:
  """Measures, prints the table, and writes it where `--write` says."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--pictures", type=int, default=4096, help="a multiple of 64 (default: 4096)")
  parser.add_argument("--passes", type=int, default=3, help="passes, of which the median counts (default: 3)")
  parser.add_argument("--write", type=pathlib.Path, help="Markdown file that the table goes into")
  parser.add_argument("--reader", choices=READERS, help="measure one pass of this reader alone")
  parser.add_argument(
    "--work_dir",
    type=pathlib.Path,
    default=pathlib.Path(__file__).parents[1] / "build" / "benchmarks",
    help="where pictures are made and kept",
  )
  options = parser.parse_args()
  os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
  os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parent.absolute())
  directory = options.work_dir / f"pictures-{options.pictures}"
  if options.reader:
    print(json.dumps(measure(READERS[options.reader], directory, options.pictures // BATCH_SIZE)))
    return
  if not directory.exists():
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pictures.make(partial, options.pictures)
    partial.rename(directory)
  # In turns, so that what else the machine does meets all readers.
  passes: dict[str, list[float]] = {reader: [] for reader in READERS}
  for _ in range(options.passes):
    for reader, rates in passes.items():
      result = run(reader, options)
      if result["labels"] != sum(range(options.pictures)):
        raise SystemExit(f"{reader} delivered other pictures")
      rates.append(result["examples_per_second"])
      print(f"{reader}: {rates[-1]:,.0f} pictures/s", file=sys.stderr)
  text = report(passes, options.pictures)
  print(text)
  if options.write:
    write_between_marks(options.write, "images", text)


def run(reader: str, options: argparse.Namespace) -> dict[str, Any]:
  """Measures a pass of a reader in a process of its own."""
  command = [sys.executable, __file__, f"--reader={reader}", f"--pictures={options.pictures}"]
  done = subprocess.run(
    [*command, f"--work_dir={options.work_dir}"], check=True, stdout=subprocess.PIPE, text=True
  )
  return json.loads(done.stdout.splitlines()[-1])


def measure(opener: Opener, directory: pathlib.Path, epoch_batches: int) -> dict[str, Any]:
  """Two epochs: the first sums the labels, the second is timed, when all threads and processes run."""
  shape = (BATCH_SIZE, pictures.CROP_PIXELS, pictures.CROP_PIXELS, 3)
  with contextlib.closing(opener(directory)) as batches:
    labels = 0
    for batch in itertools.islice(batches, epoch_batches):
      if batch["image"].dtype != np.uint8 or batch["image"].shape != shape:
        raise SystemExit(f"a batch of {batch['image'].dtype} {batch['image'].shape}")
      labels += int(batch["label"].sum())
    start = time.perf_counter()
    timed = sum(len(batch["image"]) for batch in itertools.islice(batches, epoch_batches))
    return {"examples_per_second": timed / (time.perf_counter() - start), "labels": labels}


def report(passes: dict[str, list[float]], num_pictures: int) -> str:
  """The table and what it was measured on."""
  medians = {reader: statistics.median(rates) for reader, rates in passes.items()}
  rows = []
  for reader, rates in passes.items():
    spread = f"{medians[reader]:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    rows.append([reader, spread, f"{medians[reader] / medians[ANYSTEP]:.2f}"])
  method = (
    f"{num_pictures:,} JPEG files of 256 × 256 pixels in the page cache, each decoded by Pillow, cropped at "
    f"random to {pictures.CROP_PIXELS} × {pictures.CROP_PIXELS} and half of them mirrored, in batches of "
    f"{BATCH_SIZE}, by one function for all readers. A rate is the median of {len(passes[ANYSTEP])} passes "
    "(lowest and highest in brackets), each in a process of its own, the readers in turns, timed in the "
    "second epoch. All delivered the same pictures. anystep's workers are Grain's and share the plan's steps."
  )
  load = f"Load of the machine at the end (a minute's average): {os.getloadavg()[0]:.1f}."
  head = ["reader", "pictures/s", "times anystep without workers"]
  return (
    "\n\n".join(["## Images", method, f"{circumstances('images', PACKAGES)} {load}", table(head, rows)])
    + "\n"
  )


def _grain() -> Any:
  import grain.python as grain
  from absl import flags

  # Grain's worker processes take its flags from the process that starts them.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  return grain


def _closed(iterator: Any) -> Batches:
  """A Grain iterator's batches; its processes end with them."""
  with contextlib.ExitStack() as stack:
    if hasattr(iterator, "close"):
      stack.callback(iterator.close)
    yield from iterator


if __name__ == "__main__":
  main()
