"""Packing policies beside first fit decreasing over whole shards: how fast, and how full the rows.

Lengths are log-normal, cut to the rows' limits, as documents' lengths are. One thread packs the shards.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from side_by_side.report import circumstances, table, verdict, write_between_marks

from anystep.compiled import compiled
from anystep.order.packing import PackingPolicy, pack

PACKAGES = ("anystep", "numpy", "numba")
FIRST_FIT_DECREASING = "first fit decreasing"
SPREAD = 1.0
# With several features its search takes seconds a shard.
FIRST_FIT_DECREASING_SHARDS = 8
TARGET_EXAMPLES = 10_000_000
TARGET_POINTS = 2.0
METHOD = (
  "Shards are packed one after the other in one thread; loops were compiled, and the shard's lengths made, "
  f"before the clock started. Lengths are log-normal with σ = {SPREAD:g}, those of several features "
  "independent, rounded, and cut to 1 and to what a row holds. The fill is real tokens ÷ tokens of rows. "
  f"{FIRST_FIT_DECREASING.capitalize()} shows how full rows can be: a shard's records, heaviest first "
  "by the policy's weight, each go into the first pack of the whole shard that they fit in. "
  f"Where there are more than {FIRST_FIT_DECREASING_SHARDS} shards, it is measured on the first of them."
)

Packer = Callable[[np.ndarray, tuple[int, ...]], int]
"""From lengths and limits to the number of packs."""


class Lengths(NamedTuple):
  """Independent log-normal lengths of one or more features.

  Attributes:
    limits: tokens of a row, by feature.
    medians: of the lengths before they are cut, by feature.
    target_seconds: for 10 million examples, by policy.
  """

  limits: tuple[int, ...]
  medians: tuple[int, ...]
  target_seconds: Mapping[PackingPolicy, float]

  @property
  def title(self) -> str:
    """For people."""
    limits, medians = (" + ".join(map(str, numbers)) for numbers in (self.limits, self.medians))
    return f"Rows of {limits} tokens, examples of {medians} in the median"

  def of_shard(self, number: int, num_examples: int) -> np.ndarray:
    """`(examples, features) uint32`."""
    rng = np.random.default_rng([number, *self.medians])
    drawn = rng.lognormal(np.log(self.medians), SPREAD, (num_examples, len(self.medians)))
    return np.clip(np.rint(drawn), 1, self.limits).astype(np.uint32)


ALL_LENGTHS = [
  Lengths((512,), (200,), {PackingPolicy.GREEDY: 3, PackingPolicy.BEST_FIT: 3}),
  Lengths((512,), (50,), {PackingPolicy.GREEDY: 3, PackingPolicy.BEST_FIT: 3}),
  Lengths((512, 114), (200, 40), {PackingPolicy.GREEDY: 3, PackingPolicy.BEST_FIT: 240}),
]


class Result(NamedTuple):
  """What packing some shards took and gave; tokens by feature."""

  num_examples: int
  seconds: float
  num_packs: int
  tokens: np.ndarray


def main() -> None:
  """Measures, prints the tables, and writes them where `--write` says."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--examples", type=int, default=TARGET_EXAMPLES, help="default: %(default)s")
  parser.add_argument("--shards", type=int, default=64, help="default: %(default)s")
  parser.add_argument("--write", type=pathlib.Path, help="Markdown file that the tables go into")
  options = parser.parse_args()
  if not 1 <= options.shards <= options.examples:
    parser.error("--shards: at least 1, and no more than examples")
  shard_examples = np.diff(np.linspace(0, options.examples, options.shards + 1).astype(int)).tolist()
  parts = ["## Packing", METHOD, circumstances("packing", PACKAGES)]
  for lengths in ALL_LENGTHS:
    print(lengths.title, file=sys.stderr, flush=True)
    results = {name: measure(lengths, shard_examples, packer) for name, packer in PACKERS.items()}
    few = shard_examples[:FIRST_FIT_DECREASING_SHARDS]
    results[FIRST_FIT_DECREASING] = measure(lengths, few, packs_of_first_fit_decreasing)
    title = f"### {lengths.title}; {options.examples:,} in {options.shards} shards"
    parts += [title, table_of(lengths, results)]
  text = "\n\n".join(parts) + "\n"
  print(text)
  if options.write:
    write_between_marks(options.write, "packing", text)


def measure(lengths: Lengths, shard_examples: list[int], packer: Packer) -> Result:
  """Packs shards of so many examples, having compiled before."""
  packer(lengths.of_shard(0, 1000), lengths.limits)
  seconds, num_packs, tokens = 0.0, 0, np.zeros(len(lengths.limits), np.int64)
  for number, num_examples in enumerate(shard_examples):
    shard = lengths.of_shard(number, num_examples)
    tokens += shard.sum(axis=0, dtype=np.int64)
    start = time.perf_counter()
    num_packs += packer(shard, lengths.limits)
    seconds += time.perf_counter() - start
  return Result(sum(shard_examples), seconds, num_packs, tokens)


def packs_of_policy(lengths: np.ndarray, limits: tuple[int, ...], *, policy: PackingPolicy) -> int:
  """The number of packs that the library makes."""
  starts, _ = pack(lengths, limits, policy)
  return len(starts) - 1


def packs_of_first_fit_decreasing(lengths: np.ndarray, limits: tuple[int, ...]) -> int:
  """The number of packs where each record, heaviest first, joins the first that it fits in."""
  order = np.argsort(-(lengths / limits).sum(axis=1), kind="stable")
  return _first_fit(lengths.astype(np.int64)[order], np.array(limits, np.int64))


PACKERS: dict[str, Packer] = {
  policy.value: functools.partial(packs_of_policy, policy=policy) for policy in PackingPolicy
}


@compiled
def _first_fit(lengths: np.ndarray, limits: np.ndarray) -> int:
  """Searches a tree whose leaves are packs and whose nodes hold the most room, by feature, below them."""
  num_records, num_features = lengths.shape
  num_leaves = 1
  while num_leaves < num_records:
    num_leaves *= 2
  room = np.empty((2 * num_leaves, num_features), np.int64)
  room[:] = limits
  last = num_leaves - 1
  for record in range(num_records):
    # Down and to the left where it may fit, else to the next subtree on the right; unused packs are there.
    node = 1
    while True:
      fits = True
      for feature in range(num_features):
        fits &= lengths[record, feature] <= room[node, feature]
      if fits and node >= num_leaves:
        break
      if fits:
        node *= 2
      else:
        while node % 2:
          node //= 2
        node += 1
    last = max(last, node)
    for feature in range(num_features):
      room[node, feature] -= lengths[record, feature]
    while node > 1:
      node //= 2
      for feature in range(num_features):
        room[node, feature] = max(room[2 * node, feature], room[2 * node + 1, feature])
  return last - num_leaves + 1


def table_of(lengths: Lengths, results: Mapping[str, Result]) -> str:
  """A line for each way to pack."""
  limits = np.array(lengths.limits)
  fills = {name: fill(result, limits) for name, result in results.items()}
  head = ["policy", "seconds", "examples/s", "target", "", "fill"]
  head += [f"of {limit}" for limit in lengths.limits if len(limits) > 1]
  head += [f"points below {FIRST_FIT_DECREASING}", "target", ""]
  rows = []
  for name, (num_examples, seconds, *_) in results.items():
    target, met = "", None
    if name in lengths.target_seconds:
      most = lengths.target_seconds[PackingPolicy(name)]
      target, met = f"under {most:g} s for 10 million", seconds / num_examples < most / TARGET_EXAMPLES
    row = [
      f"{name}, {num_examples:,} examples",
      f"{seconds:.3g}",
      f"{num_examples / seconds:,.0f}",
      target,
      verdict(met),
    ]
    points = 100 * (fills[FIRST_FIT_DECREASING][0] - fills[name][0])
    target, met = "", None
    if name == PackingPolicy.BEST_FIT and len(limits) == 1:
      target, met = f"at most {TARGET_POINTS:g}", points <= TARGET_POINTS
    row += [*(f"{share:.2%}" for share in fills[name]), f"{points:.2f}", target, verdict(met)]
    rows.append(row)
  return table(head, rows)


def fill(result: Result, limits: np.ndarray) -> list[float]:
  """Real tokens ÷ tokens of rows: of all features, then of each where there are several."""
  by_feature = result.tokens / (result.num_packs * limits)
  overall = result.tokens.sum() / (result.num_packs * limits.sum())
  return [overall, *by_feature] if len(limits) > 1 else [overall]


if __name__ == "__main__":
  main()
