"""The rows of a plan's batches by the order specification alone: the oracle places them, no library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import caches
import numpy as np

import oracle
from anystep.plans.plan import Plan

Change = Callable[[caches.Example, str, int, int], caches.Example | None]
"""What becomes of an example, given its task, index and epoch; None where it is dropped."""


class Row(NamedTuple):
  """Where the examples of a row come from: of each its record in the shard and its index in the task."""

  task: str
  unit: int
  epoch: int
  shard: int
  place: int
  records: tuple[int, ...]
  indices: tuple[int, ...]

  @property
  def index(self) -> int:
    (index,) = self.indices
    return index


class ExpectedRows:
  """What the steps of a plan consist of.

  Args:
    plan: as its JSON tells it, which is all that is taken of it.
    built: the caches of its tasks.
    change: what examples go through at reading; lengths and drops are the same in every epoch.
  """

  def __init__(
    self,
    plan: Plan,
    built: Iterable[caches.SmallCache],
    *,
    change: Change = lambda example, task, index, epoch: example,
  ):
    self._document = json.loads(plan.to_json())
    self._built = {cache.task: cache for cache in built}
    self._manifests = {name: cache.manifest for name, cache in self._built.items()}
    self._change = change
    # By task and shard, the records of each unit.
    self._shards = {name: self._units_of(name) for name in self._document["tasks"]}
    self._sizes = {name: [len(units) for units in shards] for name, shards in self._shards.items()}
    self._units = {name: sum(sizes) for name, sizes in self._sizes.items()}

  @property
  def num_units(self) -> dict[str, int]:
    """U of each task."""
    return self._units

  @property
  def num_steps(self) -> int | None:
    """Steps until the data ends; None where it does not."""
    last = oracle.last_step(self._document["segments"], self._units, self._document["num_epochs"])
    return None if last is None else last + 1

  def _units_of(self, name: str) -> list[list[tuple[int, ...]]]:
    shards = []
    for shard, size in enumerate(oracle.records_per_shard(self._manifests[name])):
      made = {record: self._example(name, shard, record, epoch=0) for record in range(size)}
      kept = {record: example for record, example in made.items() if example is not None}
      shards.append(self._packs(kept))
    return shards

  def _packs(self, kept: Mapping[int, caches.Example]) -> list[tuple[int, ...]]:
    policy = self._document["packing"]
    if policy == "none":
      return [(record,) for record in kept]
    records, lengths = list(kept), self._document["feature_lengths"]
    names = sorted(
      n for n, value in next(iter(kept.values()), {}).items() if n in lengths and value.ndim == 1
    )
    sizes = [tuple(min(len(kept[record][n]), lengths[n]) for n in names) for record in records]
    packed = {"greedy": oracle.pack_greedy, "best_fit": oracle.pack_best_fit}[policy]
    packs = packed(sizes, tuple(lengths[n] for n in names))
    return [tuple(records[k] for k in pack) for pack in packs]

  def _index(self, name: str, shard: int, record: int) -> int:
    return oracle.example_at(self._manifests[name], shard, record)["index"]

  def _example(self, name: str, shard: int, record: int, *, epoch: int) -> caches.Example | None:
    index = self._index(name, shard, record)
    return self._change(self._built[name].examples[index], name, index, epoch)

  def rows(self, step: int) -> list[Row | None]:
    """The rows of a step, None for padding."""
    document = self._document
    planned = oracle.rows(document["segments"], step, self._units, document["num_epochs"])
    return [None if name is None or unit is None else self._row(name, unit) for name, unit in planned]

  def _row(self, name: str, unit: int) -> Row:
    document = self._document
    epoch, shard, place = oracle.locate(
      unit,
      self._sizes[name],
      self._manifests[name]["block_records"],
      name,
      document["split"],
      document["seed"],
      document["epoch_policy"],
    )
    records = self._shards[name][shard][place]
    indices = tuple(self._index(name, shard, record) for record in records)
    return Row(name, unit, epoch, shard, place, records, indices)

  def examples(self, row: Row) -> list[caches.Example]:
    """The examples of a row, as they are read."""
    made = [self._example(row.task, row.shard, record, epoch=row.epoch) for record in row.records]
    return [example for example in made if example is not None]

  def example(self, row: Row) -> caches.Example:
    """The only example of a row."""
    (example,) = self.examples(row)
    return example

  def batch(self, step: int, *, features: Iterable[str] | None = None) -> list[caches.Example]:
    """A step's rows with the features named, or all: cut and filled to the plan's lengths, padding zeros.

    Sequences that the plan has no length for keep their own, and are empty in padding rows. Packed rows
    have only those of rank 1 that it has a length for, each with segment ids and positions.
    """
    name = next(iter(self._shards))
    first = next(units[0] for units in self._shards[name] if units)[0]
    shard = next(s for s, units in enumerate(self._shards[name]) if units)
    any_example = self._example(name, shard, first, epoch=0)
    assert any_example is not None
    names = list(any_example if features is None else features)
    padding = {key: np.zeros_like(value) for key, value in self._filled([any_example], names).items()}
    for key in padding if self._document["packing"] == "none" else []:
      if padding[key].ndim and key not in self._document["feature_lengths"]:
        padding[key] = padding[key][:0]
    rows = self.rows(step)
    return [padding if row is None else self._filled(self.examples(row), names) for row in rows]

  def _filled(self, examples: list[caches.Example], names: list[str]) -> caches.Example:
    lengths = self._document["feature_lengths"]
    if self._document["packing"] == "none":
      (example,) = examples
      return caches.padded_row({name: example[name] for name in names}, lengths)
    row = {}
    for name in names:
      if name in lengths and examples[0][name].ndim == 1:
        row |= packed_row(name, [example[name] for example in examples], lengths[name])
    return row

  def digest(self, step: int, **features: Any) -> str:
    """The oracle's digest of `batch`."""
    return caches.oracle_digest(self.batch(step, **features))


def packed_row(name: str, values: list[np.ndarray], length: int) -> caches.Example:
  """Several examples' values of a feature in one row, with segment ids from 1 and positions from 0."""
  row = {
    name: np.zeros(length, values[0].dtype),
    f"{name}_segment_ids": np.zeros(length, np.int32),
    f"{name}_positions": np.zeros(length, np.int32),
  }
  start = 0
  for segment, value in enumerate(values, 1):
    stop = start + min(len(value), length)
    row[name][start:stop] = value[:length]
    row[f"{name}_segment_ids"][start:stop] = segment
    row[f"{name}_positions"][start:stop] = range(stop - start)
    start = stop
  return row
