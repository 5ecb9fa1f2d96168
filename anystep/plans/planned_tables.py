"""The unit tables of a plan's tasks: made when the plan starts, found again when its caches are opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import canonical_json
from anystep.order.packing import PackingPolicy
from anystep.plans.planned_task import PlannedTask
from anystep.transforms.transform import Transform
from anystep.units.surveys import make_unit_table, needs_unit_table, table_made_for
from anystep.units.tables import UnitTable, find_unit_table


def plan_tasks(
  caches: Mapping[str, Cache],
  transforms: Mapping[str, Transform] | None,
  *,
  with_tables: Collection[str],
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> tuple[dict[str, PlannedTask], dict[str, UnitTable]]:
  """Return what a plan records of caches, and the unit tables of those that need one, by task name.

  Args:
    caches: by task name.
    transforms: of the tasks that have any; None where transforms are not known.
    with_tables: tasks whose tables are made.
    packing, feature_lengths: the plan's.

  Raises:
    AnystepError: as `make_unit_table`, `PlannedTask.of` and `identity_of`.
  """
  by_task = transforms or {}
  tables = {
    name: make_unit_table(cache, by_task.get(name), packing=packing, feature_lengths=feature_lengths)
    for name, cache in caches.items()
    if name in with_tables and needs_unit_table(by_task.get(name), packing)
  }
  tasks = {name: PlannedTask.of(cache, tables.get(name)) for name, cache in caches.items()}
  if transforms is not None:
    tasks = {name: task.with_transform(by_task.get(name), task=name) for name, task in tasks.items()}
  return tasks, tables


def check_caches(
  tasks: Mapping[str, PlannedTask],
  caches: Mapping[str, Cache],
  tables: Mapping[str, UnitTable],
  transforms: Mapping[str, Transform] | None,
  *,
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> tuple[dict[str, PlannedTask], dict[str, UnitTable], dict[str, np.ndarray]]:
  """Return a plan's tasks and unit tables, compared with those caches that are given.

  The third are units of each shard, `(S,) int64`, of those caches whose shards may differ by more than one.

  Args:
    tasks, tables, packing, feature_lengths: the plan's.
    caches: by task name.
    transforms: of the tasks that have any; None where transforms are not known.

  Raises:
    AnystepError: as `Plan.on_caches`.
  """
  checked_tasks, checked_tables, shard_units = dict(tasks), dict(tables), dict[str, np.ndarray]()
  for name in tasks.keys() & caches.keys():
    task, cache = tasks[name], caches[name]
    table = _find_table(
      cache, task.unit_table, tables.get(name), transforms, packing=packing, feature_lengths=feature_lengths
    )
    task.check(cache, table, feature_lengths)
    if transforms is not None:
      checked_tasks[name] = task.check_transform(transforms.get(name), task=name)
    if table is not None:
      checked_tables[name], shard_units[name] = table, table.shard_units
    elif cache.manifest.layout == AS_IS:
      shard_units[name] = cache.manifest.shard_records
  _check_packed_alike(checked_tables)
  return checked_tasks, checked_tables, shard_units


def _find_table(
  cache: Cache,
  sha256: str | None,
  planned: UnitTable | None,
  transforms: Mapping[str, Transform] | None,
  *,
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> UnitTable | None:
  """Return the unit table that a plan reads a cache by; None where its units are its examples.

  Args:
    cache: the task's.
    sha256: of the plan's table; None where it has none.
    planned: the table, where the plan holds it.
    transforms: of the tasks that have any; None where transforms are not known. Where they are, a table that
      is not there is made anew.
    packing, feature_lengths: the plan's.

  Raises:
    AnystepError: 66 `unit_table_missing`; 76 `unit_table` for other transforms; as `make_unit_table`.
  """
  table = planned
  if table is None and sha256 is not None:
    table = find_unit_table(cache, sha256)
  if transforms is not None:
    transform = transforms.get(cache.manifest.task)
    if table is None and sha256 is not None and needs_unit_table(transform, packing):
      return make_unit_table(cache, transform, packing=packing, feature_lengths=feature_lengths)
    _check_made_for(cache, transform, table, packing=packing, feature_lengths=feature_lengths)
  if table is None and sha256 is not None:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "unit_table_missing",
      task=cache.manifest.task,
      expected=f"unit table {sha256} in {cache.directory / 'units'}",
      fix="open the plan with the transforms it was made for, once: the table is made anew, identically",
    )
  return table


def _check_made_for(
  cache: Cache,
  transform: Transform | None,
  table: UnitTable | None,
  *,
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> None:
  """Refuse a table that was made for something else; None where there is no table."""
  made_for = {} if table is None else table.made_for
  read_for = {}
  if needs_unit_table(transform, packing):
    read_for = table_made_for(cache, transform, packing=packing, feature_lengths=feature_lengths)
  # Transforms first: they are why one side has a table and the other none.
  for item in sorted(made_for.keys() | read_for.keys(), key=lambda item: (item != "transforms", item)):
    if canonical_json(made_for.get(item)) != canonical_json(read_for.get(item)):
      raise AnystepError(
        ExitCode.MISMATCH,
        "unit_table",
        task=cache.manifest.task,
        item=item,
        expected=made_for.get(item),
        got=read_for.get(item),
        fix="read with the transforms that the plan was made for, or start a new plan with these",
      )


def _check_packed_alike(tables: Mapping[str, UnitTable]) -> None:
  """Refuse tasks that are packed by different features: where one lacks a feature, rows would stay empty.

  Raises:
    AnystepError: 78 `packing_features`.
  """
  packed = {name: list(table.features) for name, table in tables.items() if table.features}
  if len({tuple(features) for features in packed.values()}) > 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "packing_features",
      expected="the same features of rank 1 with a length in all tasks of a mixture",
      got=packed,
      fix="mix tasks whose preprocessors make the same features, or give lengths of those they share alone",
    )
