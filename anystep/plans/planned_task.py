"""What a plan remembers of a task's cache (docs/order.md#plans-segments-rows)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS, PRESHUFFLED
from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import canonical_json
from anystep.limits import MAX_SHARDS, is_count, is_sha256, refuse_wrong
from anystep.transforms.transform import Transform, transforms_sha256
from anystep.units.tables import UnitTable

# Of what a reader does, in an error.
_SHOWN_CHARACTERS = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTask:
  """The cache, unit table and transforms that a plan was made for: on any other it is refused.

  `transforms` is what `transforms_sha256` gives of them; None where nobody who made the plan knew them.
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
    """What a plan remembers of a cache, whose units are its examples where it has no table.

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
    """The task in a plan's JSON: `transforms` is there where it is known."""
    document = dataclasses.asdict(self)
    return document if self.transforms is not None else without_transforms(document)

  def knowing(self, transform: Transform | None, *, task: str) -> PlannedTask:
    """The same of what the task's examples go through.

    Raises:
      AnystepError: as `identity_of`.
    """
    return dataclasses.replace(self, transforms=transforms_sha256(transform, task=task))

  def read_through(self, transform: Transform | None, *, task: str) -> PlannedTask:
    """The same, of what its examples go through at reading; what cannot be told stays unknown.

    Raises:
      AnystepError: 76 `plan_transforms` where the plan was made for others; where it was made for any, as
        `identity_of`.
    """
    try:
      found = self.knowing(transform, task=task)
    except AnystepError:
      if self.transforms is None:
        return self
      raise
    if self.transforms not in (None, found.transforms):
      raise AnystepError(
        ExitCode.MISMATCH,
        "plan_transforms",
        task=task,
        expected=self.transforms,
        got=found.transforms,
        transforms="none" if transform is None else canonical_json(transform.identity)[:_SHOWN_CHARACTERS],
        fix="read with the transforms that the plan was made for, or start a new plan with these",
      )
    return found

  def check(self, cache: Cache, table: UnitTable | None, feature_lengths: Mapping[str, int]) -> None:
    """Refuses a cache or table other than the plan was made for, or a cache that was made for other lengths.

    Raises:
      AnystepError: 76 `plan_cache` with both sides of the first difference, `feature_lengths`.
    """
    name = cache.manifest.task
    found = dataclasses.asdict(PlannedTask.of(cache, table))
    for field, value in without_transforms(dataclasses.asdict(self)).items():
      if found[field] != value:
        raise _other_cache(name, field, expected=value, got=found[field])
    for feature, length in (cache.manifest.task_feature_lengths or {}).items():
      if feature_lengths.get(feature, length) != length:
        raise AnystepError(
          ExitCode.MISMATCH,
          "feature_lengths",
          task=name,
          feature=feature,
          expected=feature_lengths[feature],
          got=length,
          fix="ask for the lengths that the task was cached for, or cache it for these",
        )

  def check_manifest(self, name: str, manifest_sha256: str) -> None:
    """Refuses what was said of another cache of the task.

    Raises:
      AnystepError: 76 `plan_cache`.
    """
    if manifest_sha256 != self.manifest_sha256:
      raise _other_cache(name, "manifest_sha256", expected=self.manifest_sha256, got=manifest_sha256)


def without_transforms(document: dict[str, Any]) -> dict[str, Any]:
  """What a task's JSON says besides."""
  return {name: value for name, value in document.items() if name != "transforms"}


def _other_cache(task: str, field: str, *, expected: object, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.MISMATCH,
    "plan_cache",
    task=task,
    field=field,
    expected=expected,
    got=got,
    fix="point the run at the cache that it started with, or start anew in another MODEL_DIR",
  )
