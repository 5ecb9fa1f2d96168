"""Surveys of units: arithmetic on lengths, or a pass that runs the transforms (docs/order.md#unit-tables)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.cached import cached_property
from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.errors import AnystepError, ExitCode
from anystep.features.ragged import Batch, Ragged
from anystep.order.packing import PackingPolicy, pack
from anystep.programs.progress import library_progress
from anystep.records.parsing import ExampleParser
from anystep.transforms.transform import Records, Transform, identity_of
from anystep.units.tables import (
  TABLE_VERSION,
  ShardUnits,
  UnitTable,
  open_unit_table,
  table_key,
  write_unit_table,
)

_SURVEYED_RECORDS = 1024


def needs_unit_table(transform: Transform | None, packing: PackingPolicy) -> bool:
  """Return whether a task's units are not simply its cache's records."""
  return packing is not PackingPolicy.NONE or (transform is not None and transform.may_drop)


def table_made_for(
  cache: Cache,
  transform: Transform | None,
  *,
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> dict[str, Any]:
  """Return everything from which a table follows, as JSON.

  Raises:
    AnystepError: as `identity_of`, for without an identity no other process would find the table.
  """
  return {
    "version": TABLE_VERSION,
    "task": cache.manifest.task,
    "split": cache.manifest.split,
    "manifest_sha256": cache.manifest_sha256,
    "transforms": identity_of(transform, task=cache.manifest.task),
    "feature_lengths": dict(feature_lengths),
    "packing": packing.value,
  }


def make_unit_table(
  cache: Cache,
  transform: Transform | None,
  *,
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> UnitTable:
  """Return the table of a cache's units: one that is there, or a new one with the same bytes everywhere.

  A new one needs only arithmetic on the cache's lengths files where the transform at most cuts and appends,
  else one pass that runs it. Several shards are read at a time, with a progress line.

  Raises:
    AnystepError: 78 `packing_features` where there is nothing to pack, `unit_random` where a draw decides
      what is dropped or how long it is; as `table_made_for`; 66 `units_empty` where everything is dropped;
      73 `unit_table_write`; 65 for a damaged cache or table.
  """
  made_for = table_made_for(cache, transform, packing=packing, feature_lengths=feature_lengths)
  table = open_unit_table(cache, table_key(made_for))
  if table is None:
    survey = _Survey(cache, transform, packing=packing, feature_lengths=feature_lengths)
    # Closed first, so that the progress line does not come after the error of a failed write.
    with contextlib.closing(survey.shards()) as shards:
      table = write_unit_table(cache, made_for, survey.features, shards)
  if not table.num_units:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "units_empty",
      task=cache.manifest.task,
      split=cache.manifest.split,
      expected="at least one example that is kept",
      got=f"{len(cache)} examples, all dropped",
      fix="correct the filter that stands after the cache",
    )
  return table


class _Survey:
  """The units of each shard of a cache.

  Attributes:
    features: names of the features that are packed, sorted.
  """

  def __init__(
    self,
    cache: Cache,
    transform: Transform | None,
    *,
    packing: PackingPolicy,
    feature_lengths: Mapping[str, int],
  ):
    self._cache = cache
    self._transform = transform
    self._packing = packing
    self._feature_lengths = feature_lengths
    self._parser = ExampleParser(cache.manifest.features)
    appended: Mapping[str, int] | None = {}
    if cache.manifest.layout == AS_IS:
      appended = None
    elif transform is not None:
      appended = None if transform.may_drop else transform.appended_tokens
    self._appended = appended
    self.features = [] if packing is PackingPolicy.NONE else self._find_packed_features()
    self._limits = np.array([feature_lengths[name] for name in self.features], np.int64)

  def _find_packed_features(self) -> list[str]:
    ranks = {}
    if self._appended is not None:
      ranks = {name: len(feature.shape) for name, feature in self._cache.manifest.features.items()}
    else:
      for shard in range(self._cache.manifest.num_shards):
        kept = next((batch for batch, places in self._iterate_chunks(shard) if len(places)), None)
        if kept is not None:
          ranks = {name: f.values.ndim if isinstance(f, Ragged) else 0 for name, f in kept.items()}
          break
    features = sorted(name for name, rank in ranks.items() if rank == 1 and name in self._feature_lengths)
    if not features or not all(self._feature_lengths[name] for name in features):
      raise AnystepError(
        ExitCode.CONFIG,
        "packing_features",
        task=self._cache.manifest.task,
        expected="lengths of at least 1 of features of rank 1",
        got=dict(self._feature_lengths),
        ranks=ranks,
        fix="give lengths of the features that rows are packed with, or set packing to none",
      )
    return features

  def shards(self) -> Generator[ShardUnits, None, None]:
    """Yield the units of each shard, in shard order."""
    m = self._cache.manifest
    done = units = 0
    tokens = np.zeros(len(self.features), np.int64)
    with (
      library_progress(f"units of {m.task} {m.split}", total=m.num_examples, unit="examples") as progress,
      concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, m.num_shards)) as executor,
    ):
      for number, shard in enumerate(executor.map(self._survey_shard, range(m.num_shards))):
        yield shard
        done += int(m.shard_records[number])
        units += len(shard.starts) - 1
        tokens += shard.lengths.sum(axis=0, dtype=np.int64)
        fill = (tokens / np.maximum(units * self._limits, 1)).tolist()
        filled = ", ".join(f"{name} {share:.1%}" for name, share in zip(self.features, fill, strict=True))
        progress.update(done, units=f"{units:,}", **({"filled": filled} if filled else {}))

  def _survey_shard(self, shard: int) -> ShardUnits:
    if self._appended is None:
      parts = [
        (places, self._cut_lengths(batch, self.features, len(places)))
        for batch, places in self._iterate_chunks(shard)
      ]
      nothing = np.zeros(0, np.int64), np.zeros((0, len(self.features)), np.int64)
      kept, lengths = (np.concatenate(column) for column in zip(nothing, *parts, strict=True))
    else:
      columns = [self._cache.manifest.sequence_features.index(name) for name in self.features]
      more = np.array([self._appended.get(name, 0) for name in self.features], np.int64)
      lengths = np.minimum(self._cache.lengths(shard)[:, columns] + more, self._limits)
      kept = np.arange(len(lengths))
    starts, records = pack(lengths, self._limits, self._packing)
    return ShardUnits(starts, kept[records], lengths[records])

  def _iterate_chunks(self, shard: int) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield the shard's records after the transform, some at a time, and places of those that are kept."""
    num_records = int(self._cache.manifest.shard_records[shard])
    for start in range(0, num_records, self._chunk_records):
      yield self._survey(shard, np.arange(start, min(start + self._chunk_records, num_records)))

  @cached_property
  def _chunk_records(self) -> int:
    """Number of records of a chunk: whole blocks."""
    block_records = self._cache.manifest.block_records
    return max(_SURVEYED_RECORDS // block_records, 1) * block_records

  def _survey(self, shard: int, places: np.ndarray) -> tuple[Batch, np.ndarray]:
    blocks = np.unique(places // self._cache.manifest.block_records).tolist()
    records = [record for block in self._cache.read_blocks(shard, blocks) for record in block]
    batch = self._parser(records)
    if self._transform is None:
      return batch, places
    m = self._cache.manifest
    indices = self._cache.index_of(np.full_like(places, shard), places)
    which = Records(np.zeros_like(indices), indices, task=m.task, split=m.split, seed=0)
    kept_batch, kept = self._transform.survey(batch, which)
    if self._transform.is_random:
      other = which._replace(epochs=np.ones_like(indices), seed=1)
      self._check_same(kept_batch, kept, *self._transform.survey(batch, other))
    return kept_batch, places[kept]

  def _check_same(self, batch: Batch, kept: np.ndarray, other_batch: Batch, other_kept: np.ndarray) -> None:
    """Refuse random draws that decide which examples are kept, or a length."""
    same = np.array_equal(kept, other_kept)
    if same and self._packing is not PackingPolicy.NONE:
      names = [name for name in self._feature_lengths if isinstance(batch.get(name), Ragged)]
      lengths, others = (self._cut_lengths(b, names, len(kept)) for b in (batch, other_batch))
      same = np.array_equal(lengths, others)
    if not same:
      raise AnystepError(
        ExitCode.CONFIG,
        "unit_random",
        task=self._cache.manifest.task,
        expected="the same examples kept, of the same lengths, whatever is drawn",
        got="a difference between two seeds",
        fix="cache the task with --cache_at=end, or let no draw decide lengths or what is dropped",
      )

  def _cut_lengths(self, batch: Batch, names: Sequence[str], num_records: int) -> np.ndarray:
    """Return lengths of sequences, cut to those of rows: `(records, names) int64`."""
    lengths = np.zeros((num_records, len(names)), np.int64)
    # Without examples a transform may make no features.
    for column, name in enumerate(names if num_records else []):
      feature = batch[name]
      assert isinstance(feature, Ragged)
      lengths[:, column] = np.minimum(feature.lengths, self._feature_lengths[name])
    return lengths
