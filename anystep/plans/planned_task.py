"""The record that a plan keeps of a task's cache (docs/order.md#plans-segments-rows)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS, PRESHUFFLED
from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import canonical_json
from anystep.limits import MAX_SHARDS, is_count, is_sha256, refuse_wrong
from anystep.order.epochs import TaskUnits
from anystep.transforms.transform import Transform, transforms_sha256
from anystep.units.tables import UnitTable

# Of a transform's description, in an error.
_SHOWN_CHARACTERS = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTask:
  """The cache, unit table and transforms that a plan was made for: others are refused.

  `transforms` is their `transforms_sha256`; None where the plan was made before they were known.
  """

  fingerprint: str
  manifest_sha256: str
  num_shards: int
  block_records: int
  num_units: int
  unit_table: str | None = None
  layout: str = PRESHUFFLED
  transforms: str | None = None

  def __post_init__(self):
    refuse_wrong(
      fingerprint=isinstance(self.fingerprint, str),
      manifest_sha256=isinstance(self.manifest_sha256, str),
      num_shards=is_count(self.num_shards, least=1, most=MAX_SHARDS),
      block_records=is_count(self.block_records, least=1),
      num_units=is_count(self.num_units, least=1),
      unit_table=self.unit_table is None or is_sha256(self.unit_table),
      layout=self.layout in (PRESHUFFLED, AS_IS),
      transforms=self.transforms is None or is_sha256(self.transforms),
    )

  @classmethod
  def of(cls, cache: Cache, table: UnitTable | None = None) -> PlannedTask:
    """Return the record of a cache; without a table its units are its examples.

    Raises:
      AnystepError: 66 `cache_empty`.
    """
    m = cache.manifest
    if m.num_examples == 0:
      raise AnystepError(
        ExitCode.NO_INPUT,
        "cache_empty",
        task=m.task,
        split=m.split,
        path=cache.directory,
        fix="cache the task from a source that yields examples for this split",
      )
    return cls(
      fingerprint=m.fingerprint.reader_sha256,
      manifest_sha256=cache.manifest_sha256,
      num_shards=m.num_shards,
      block_records=m.block_records,
      num_units=m.num_examples if table is None else table.num_units,
      unit_table=None if table is None else table.sha256,
      layout=m.layout,
    )

  def to_document(self) -> dict[str, Any]:
    """Return the task's part of a plan's JSON, with `transforms` only where they are known."""
    document = dataclasses.asdict(self)
    return document if self.transforms is not None else without_transforms(document)

  def to_task_units(self, name: str, shard_units: np.ndarray | None) -> TaskUnits:
    """Return what the order of the task's units depends on.

    Args:
      name: the task's.
      shard_units: units of each shard, `(S,) int64`; None where unit u is in shard u mod S.
    """
    return TaskUnits(
      task=name,
      num_units=self.num_units,
      num_shards=self.num_shards,
      block_records=self.block_records,
      shard_units=shard_units,
    )

  def with_transform(self, transform: Transform | None, *, task: str) -> PlannedTask:
    """Return the same cache and table, read through a transform.

    Raises:
      AnystepError: as `identity_of`.
    """
    return dataclasses.replace(self, transforms=transforms_sha256(transform, task=task))

  def check_transform(self, transform: Transform | None, *, task: str) -> PlannedTask:
    """Return the task read through a transform, after comparing it with the plan's.

    A transform that has no identity leaves unknown transforms unknown.

    Raises:
      AnystepError: 76 `plan_transforms` where the plan was made for others; where it was made for any, as
        `identity_of`.
    """
    try:
      read_task = self.with_transform(transform, task=task)
    except AnystepError:
      if self.transforms is None:
        return self
      raise
    if self.transforms not in (None, read_task.transforms):
      raise AnystepError(
        ExitCode.MISMATCH,
        "plan_transforms",
        task=task,
        expected=self.transforms,
        got=read_task.transforms,
        transforms="none" if transform is None else canonical_json(transform.identity)[:_SHOWN_CHARACTERS],
        fix="read with the transforms that the plan was made for, or start a new plan with these",
      )
    return read_task

  def check(self, cache: Cache, table: UnitTable | None, feature_lengths: Mapping[str, int]) -> None:
    """Refuse a cache or table other than the plan was made for, or a cache that was made for other lengths.

    Raises:
      AnystepError: 76 `plan_cache` with both sides of the first difference; 78 `feature_lengths`.
    """
    name = cache.manifest.task
    record = dataclasses.asdict(PlannedTask.of(cache, table))
    for field, value in without_transforms(dataclasses.asdict(self)).items():
      if record[field] != value:
        raise _other_cache_error(name, field, expected=value, got=record[field])
    for feature, length in (cache.manifest.task_feature_lengths or {}).items():
      if feature_lengths.get(feature, length) != length:
        raise AnystepError(
          ExitCode.CONFIG,
          "feature_lengths",
          task=name,
          feature=feature,
          expected=feature_lengths[feature],
          got=length,
          fix="ask for the lengths that the task was cached for, or cache it for these",
        )

  def check_manifest(self, name: str, manifest_sha256: str) -> None:
    """Refuse a list that was made for another cache of the task.

    Raises:
      AnystepError: 76 `plan_cache`.
    """
    if manifest_sha256 != self.manifest_sha256:
      raise _other_cache_error(name, "manifest_sha256", expected=self.manifest_sha256, got=manifest_sha256)


def without_transforms(document: dict[str, Any]) -> dict[str, Any]:
  """Return a task's part of a plan's JSON without its transforms."""
  return {name: value for name, value in document.items() if name != "transforms"}


def _other_cache_error(task: str, field: str, *, expected: object, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.MISMATCH,
    "plan_cache",
    task=task,
    field=field,
    expected=expected,
    got=got,
    fix="point the run at the cache that it started with, or start anew in another MODEL_DIR",
  )
