"""The rows of a plan's batches by the order specification alone: the oracle places them, no library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import caches
import numpy as np

import oracle
from anystep.plan import Plan


class Row(NamedTuple):
  """Where the example of a row comes from; `index` counts the task's examples."""

  task: str
  unit: int
  epoch: int
  shard: int
  place: int
  index: int


class ExpectedRows:
  """What the steps of a plan consist of.

  Args:
    plan: as its JSON tells it, which is all that is taken of it.
    built: the caches of its tasks.
  """

  def __init__(self, plan: Plan, built: Iterable[caches.SmallCache]):
    self._document = json.loads(plan.to_json())
    self._built = {cache.task: cache for cache in built}
    self._manifests = {name: cache.manifest for name, cache in self._built.items()}
    self._sizes = {name: oracle.records_per_shard(m) for name, m in self._manifests.items()}
    self._units = {name: sum(self._sizes[name]) for name in self._document["tasks"]}

  @property
  def num_steps(self) -> int | None:
    """Steps until the data ends; None where it does not."""
    last = oracle.last_step(self._document["segments"], self._units, self._document["num_epochs"])
    return None if last is None else last + 1

  def rows(self, step: int) -> list[Row | None]:
    """The rows of a step, None for padding."""
    document = self._document
    planned = oracle.rows(document["segments"], step, self._units, document["num_epochs"])
    return [None if name is None or unit is None else self._row(name, unit) for name, unit in planned]

  def _row(self, name: str, unit: int) -> Row:
    manifest, document = self._manifests[name], self._document
    epoch, shard, place = oracle.locate(
      unit,
      self._sizes[name],
      manifest["block_records"],
      name,
      document["split"],
      document["seed"],
      document["epoch_policy"],
    )
    if manifest["layout"] == "as_is":
      return Row(name, unit, epoch, shard, place, sum(self._sizes[name][:shard]) + place)
    return Row(name, unit, epoch, shard, place, place * manifest["num_shards"] + shard)

  def example(self, row: Row) -> caches.Example:
    """The example of a row, as it was cached."""
    return self._built[row.task].examples[row.index]

  def batch(self, step: int, *, features: Iterable[str] | None = None) -> list[caches.Example]:
    """A step's rows with the features named, or all: cut and filled to the plan's lengths, padding zeros.

    Sequences that the plan has no length for keep their own, and are empty in padding rows.
    """
    lengths = self._document["feature_lengths"]
    any_example = next(iter(self._built.values())).examples[0]
    names = list(any_example if features is None else features)
    padding = padding_row({name: any_example[name] for name in names}, lengths)
    rows = []
    for row in self.rows(step):
      if row is None:
        rows.append(padding)
      else:
        example = self.example(row)
        rows.append(caches.padded_row({name: example[name] for name in names}, lengths))
    return rows

  def digest(self, step: int, **features: Any) -> str:
    """The oracle's digest of `batch`."""
    return caches.oracle_digest(self.batch(step, **features))


def padding_row(example: caches.Example, lengths: Mapping[str, int]) -> caches.Example:
  """A row of no example, its features of the dtypes and ranks of those of one."""
  zeros = {}
  for name, value in caches.padded_row(example, lengths).items():
    ragged = np.ndim(value) and name not in lengths
    zeros[name] = np.zeros_like(value[:0] if ragged else value)
  return zeros
