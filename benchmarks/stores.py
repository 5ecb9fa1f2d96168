"""Reading from a store beside reading local files: S3 on loopback, with and without latency added.

The store is the tests' range server (`tests/store_servers/range_server.py`), which counts requests and serves
the very files that are read locally. Each measurement runs in a process of its own; passes take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from side_by_side.data import BUCKET, FEATURE_LENGTHS, GENERATED_TASK, SPLIT, WIDE_TASK, in_bucket
from side_by_side.report import circumstances, table, verdict, write_between_marks

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from store_servers import servers  # noqa: E402

PACKAGES = ("anystep", "obstore", "numpy")
BATCH_SIZE = 256
UNTIMED_BATCHES = 16
LATENCY_SECONDS = 0.05
LOCAL, NEAR, FAR = "local files", "S3, 0 ms added", "S3, 50 ms added"
PLACES = {LOCAL: None, NEAR: 0.0, FAR: LATENCY_SECONDS}
ORDERS = ("first epoch", "later epoch, reshuffled", "packed, greedy")
OF_LOCAL = {NEAR: 0.7, FAR: 0.6}
FIRST_BATCH_SECONDS = 3.0
CLIENTS = 64


def main() -> int:
  """Measures, prints the tables, and writes them where `--write` says; 1 where rows differ."""
  options = parse_arguments()
  if options.measure:
    measured = MEASURES[options.measure[0]](*map(json.loads, options.measure[1:]))
    print(json.dumps(measured))
    return 0
  options.work_dir.mkdir(parents=True, exist_ok=True)
  folder = in_bucket(options.work_dir, options.examples)
  with contextlib.ExitStack() as stack:
    endpoints = {
      place: stack.enter_context(servers.range_server(folder, latency_seconds=seconds))
      for place, seconds in PLACES.items()
      if seconds is not None
    }
    rates, is_same = measure_rates(folder, endpoints, options=options)
    first = [measure(endpoints, FAR, "first_batch", folder, FAR) for _ in range(options.passes)]
    clients = measure(endpoints, FAR, "clients", folder, FAR)
  text = report(rates, first, clients, options=options)
  print(text)
  if options.write:
    write_between_marks(options.write, "stores", text)
  if not is_same:
    print("other rows from the store than from local files", file=sys.stderr)
  return 0 if is_same else 1


def parse_arguments() -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--quick", action="store_true", help="40,000 examples and short passes, to try it out")
  parser.add_argument("--examples", type=int, help="generated examples (default: 200,000)")
  parser.add_argument("--passes", type=int, help="passes, of which the median counts (default: 3)")
  parser.add_argument("--pass_seconds", type=float, help="a pass is cut off after so long (default: 5)")
  parser.add_argument("--write", type=pathlib.Path, help="Markdown file that the tables go into")
  parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
  parser.add_argument(
    "--work_dir",
    type=pathlib.Path,
    default=ROOT / "build" / "benchmarks",
    help="where data is made and kept; delete it when the cache's format changes",
  )
  options = parser.parse_args()
  options.examples = options.examples or (40_000 if options.quick else 200_000)
  options.passes = options.passes or (1 if options.quick else 3)
  options.pass_seconds = options.pass_seconds or (2 if options.quick else 5)
  return options


def measure_rates(
  folder: pathlib.Path, endpoints: dict[str, str], *, options: argparse.Namespace
) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], bool]:
  """Passes of each order and place, in turns; and whether all places gave the same first batches."""
  passes: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for number in range(options.passes):
    for order in ORDERS:
      for place in PLACES:
        print(f"[{number + 1}/{options.passes}] {order}: {place}", file=sys.stderr, flush=True)
        measured = measure(endpoints, place, "rate", folder, place, order, options.pass_seconds)
        passes.setdefault((order, place), []).append(measured)
  digests = {order: {one["digest"] for place in PLACES for one in passes[order, place]} for order in ORDERS}
  return passes, all(len(of_order) == 1 for of_order in digests.values())


def measure(endpoints: dict[str, str], place: str, *request: Any) -> dict[str, Any]:
  """Runs a measurement in a process of its own; adds the requests that the store had, by kind."""
  name, folder, *arguments = request
  environment = dict(os.environ)
  if place in endpoints:
    environment |= servers.s3_environment(endpoints[place])
    servers.take_requests(endpoints[place])
  command = [sys.executable, __file__, "--measure", name]
  command += [json.dumps(argument) for argument in (str(folder), *arguments)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{name} {arguments} failed\n{done.stderr[-4000:]}")
  requests = servers.take_requests(endpoints[place]) if place in endpoints else {}
  return {**json.loads(done.stdout.splitlines()[-1]), "requests": requests}


def cache_root(folder: str, place: str) -> str:
  """The caches' root: a directory, or the bucket that a server makes of it."""
  return os.path.join(folder, BUCKET) if place == LOCAL else f"s3://{BUCKET}"


def rate(folder: str, place: str, order: str, pass_seconds: float) -> dict[str, Any]:
  """Examples a second, timed once the stream runs."""
  import anystep

  root = cache_root(folder, place)
  cache = anystep.open_cache(root, GENERATED_TASK, SPLIT)
  packing = "greedy" if order.startswith("packed") else "none"
  epoch = int(order.startswith("later"))
  plan = anystep.Plan.start(
    cache,
    batch_size=BATCH_SIZE,
    feature_lengths=FEATURE_LENGTHS,
    num_epochs=epoch + 1,
    packing=packing,
  )
  digest, examples, elapsed = hashlib.sha256(), 0, 0.0
  with anystep.open_stream(plan, root, feature_converter=anystep.EncoderDecoderConverter()) as stream:
    stream.seek(epoch * len(cache) // BATCH_SIZE)
    for _ in range(UNTIMED_BATCHES):
      digest.update(next(stream)["decoder_target_tokens"].tobytes())
    start, cpu_start = time.perf_counter(), time.process_time()
    for batch in stream:
      segments = batch.get("decoder_segment_ids")
      examples += BATCH_SIZE if segments is None else int(segments.max(axis=1).sum())
      elapsed = time.perf_counter() - start
      if elapsed > pass_seconds:
        break
    cpu_seconds = time.process_time() - cpu_start
  return {
    "examples_per_second": examples / elapsed,
    "cpu_share": cpu_seconds / elapsed,
    "digest": digest.hexdigest(),
  }


def first_batch(folder: str, place: str) -> dict[str, Any]:
  """Seconds from nothing open to a batch that has a row of each of 1,024 shards.

  Of a process that begins, with what it imports, and of one that has read before.
  """
  seconds, open_seconds = [], []
  for _ in range(2):
    start = time.perf_counter()
    import anystep

    cache = anystep.open_cache(cache_root(folder, place), WIDE_TASK, SPLIT, pool=anystep.ReadPool())
    open_seconds.append(time.perf_counter() - start)
    num_shards = cache.manifest.num_shards
    plan = anystep.Plan.start(cache, batch_size=num_shards, feature_lengths=FEATURE_LENGTHS)
    with anystep.open_stream(plan, {WIDE_TASK: cache}) as stream:
      next(stream)
      seconds.append(time.perf_counter() - start)
  return {"seconds": seconds, "open_seconds": open_seconds, "shards": num_shards}


def clients(folder: str, place: str) -> dict[str, Any]:
  """Seconds until 64 processes that begin together have each opened a cache of 1,024 shards."""
  import multiprocessing

  # Imported, and not used: the processes are forks, whose clients are their own.
  import anystep  # noqa: F401

  context = multiprocessing.get_context("fork")
  barrier, results = context.Barrier(CLIENTS), context.SimpleQueue()
  processes = [
    context.Process(target=_open_at_once, args=(cache_root(folder, place), barrier, results))
    for _ in range(CLIENTS)
  ]
  for process in processes:
    process.start()
  seconds = sorted(results.get() for _ in processes)
  for process in processes:
    process.join()
  return {"median_seconds": statistics.median(seconds), "longest_seconds": seconds[-1]}


def _open_at_once(root: str, barrier: Any, results: Any) -> None:
  import anystep

  barrier.wait()
  start = time.perf_counter()
  anystep.open_cache(root, WIDE_TASK, SPLIT)
  results.put(time.perf_counter() - start)


MEASURES = {"rate": rate, "first_batch": first_batch, "clients": clients}


def report(
  rates: dict[tuple[str, str], list[dict[str, Any]]],
  first: list[dict[str, Any]],
  opened: dict[str, Any],
  *,
  options: argparse.Namespace,
) -> str:
  """The section of docs/benchmarks.md."""
  passes = "one pass" if options.passes == 1 else f"{options.passes} passes"
  about = (
    f"{options.examples:,} examples as in [Readers](#readers), read by this library from local files and from"
    " a server that speaks S3 on the same machine and shares its cores, with no time or 50 ms added to each"
    f" request. A rate is the median of {passes} in processes of their own, in turns, timed"
    f" after {UNTIMED_BATCHES} batches, cut off after {options.pass_seconds:g} s; all began with the same"
    " batches. Requests are those of a whole pass, with opening; CPU is the reader's."
  )
  head = ["order", "from", "examples/s", "of local", "CPU", "requests", "MiB", "target", ""]
  others = [*_first_batch_rows(first), _clients_row(opened)]
  parts = ["## Stores", about, circumstances("stores", PACKAGES), table(head, _rate_rows(rates))]
  return "\n\n".join([*parts, table(["measured", "", "requests", "target", ""], others)]) + "\n"


def _rate_rows(rates: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterator[list[str]]:
  medians = {key: statistics.median(one["examples_per_second"] for one in rates[key]) for key in rates}
  for (order, place), passes in rates.items():
    speeds = [one["examples_per_second"] for one in passes]
    share = medians[order, place] / medians[order, LOCAL]
    # The bars are those of the first row of the readers' benchmark.
    least = OF_LOCAL.get(place) if order == ORDERS[0] else None
    requests = passes[-1]["requests"]
    yield [
      order,
      place,
      f"{medians[order, place]:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
      "" if place == LOCAL else f"{share:.2f}",
      f"{statistics.median(one['cpu_share'] for one in passes):.2f} cores",
      _count(requests),
      f"{requests['bytes'] / 2**20:,.0f}" if requests else "",
      f"{least:g} times" if least else "",
      verdict(share >= least if least else None),
    ]


def _first_batch_rows(first: list[dict[str, Any]]) -> Iterator[list[str]]:
  for again, process in enumerate(("a process that begins", "a process that has read before")):
    seconds = statistics.median(one["seconds"][again] for one in first)
    opening = statistics.median(one["open_seconds"][again] for one in first)
    yield [
      f"first batch, a row of each of {first[0]['shards']:,} shards, {FAR}: {process}",
      f"{seconds:.2f} s, of them {opening:.2f} s to open the cache",
      _count({kind: count // 2 for kind, count in first[-1]["requests"].items()}),
      f"under {FIRST_BATCH_SECONDS:g} s",
      verdict(seconds < FIRST_BATCH_SECONDS),
    ]


def _clients_row(opened: dict[str, Any]) -> list[str]:
  per_client = {kind: count / CLIENTS for kind, count in opened["requests"].items() if kind != "bytes"}
  return [
    f"{CLIENTS} processes open that cache at once, {FAR}",
    f"median {opened['median_seconds']:.2f} s, longest {opened['longest_seconds']:.2f} s",
    "each " + ", ".join(f"{count:g} {kind}" for kind, count in sorted(per_client.items())),
    "bounded",
    "",
  ]


def _count(requests: dict[str, int]) -> str:
  return ", ".join(f"{count:,} {kind}" for kind, count in sorted(requests.items()) if kind != "bytes")


if __name__ == "__main__":
  sys.exit(main())
