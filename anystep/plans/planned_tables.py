"""The unit tables of a plan's tasks: made when it starts, found or made anew when it is read."""

from __future__ import annotations

from collections.abc import Mapping

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import canonical_json
from anystep.order.packing import PackingPolicy
from anystep.transforms.transform import Transform
from anystep.units.surveys import make_unit_table, needs_unit_table, table_made_for
from anystep.units.tables import UnitTable


def made_tables(
  caches: Mapping[str, Cache],
  transforms: Mapping[str, Transform],
  *,
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> dict[str, UnitTable]:
  """The unit tables of the tasks that need one, by name.

  Raises:
    AnystepError: as `make_unit_table`.
  """
  return {
    name: make_unit_table(cache, transforms.get(name), packing=packing, feature_lengths=feature_lengths)
    for name, cache in caches.items()
    if needs_unit_table(transforms.get(name), packing)
  }


def table_for(
  cache: Cache,
  transform: Transform | None,
  found: UnitTable | None,
  *,
  planned: bool,
  packing: PackingPolicy,
  feature_lengths: Mapping[str, int],
) -> UnitTable | None:
  """The table that a task is read by: the one that was found, or one made anew.

  Args:
    cache: the task's.
    transform: what its examples go through.
    found: the plan's table, where it is at hand.
    planned: whether the plan has one.
    packing, feature_lengths: the plan's.

  Raises:
    AnystepError: 76 `unit_table` where the plan was made for something else; as `make_unit_table`.
  """
  needed = needs_unit_table(transform, packing)
  if needed and planned and found is None:
    return make_unit_table(cache, transform, packing=packing, feature_lengths=feature_lengths)
  made_for = {} if found is None else found.made_for
  wanted = {}
  if needed:
    wanted = table_made_for(cache, transform, packing=packing, feature_lengths=feature_lengths)
  # Transforms first: they are why one side has a table and the other none.
  for item in sorted(made_for.keys() | wanted.keys(), key=lambda item: (item != "transforms", item)):
    if canonical_json(made_for.get(item)) != canonical_json(wanted.get(item)):
      raise AnystepError(
        ExitCode.MISMATCH,
        "unit_table",
        task=cache.manifest.task,
        item=item,
        expected=made_for.get(item),
        got=wanted.get(item),
        fix="read with the transforms that the plan was made for, or start a new plan with these",
      )
  return found


def table_missing(cache: Cache, sha256: str) -> AnystepError:
  """The error for a plan's table that is not at hand, and that nobody said how to make."""
  return AnystepError(
    ExitCode.NO_INPUT,
    "unit_table_missing",
    task=cache.manifest.task,
    expected=f"unit table {sha256} in {cache.directory / 'units'}",
    fix="open the plan with the transforms it was made for, once: the table is made anew, identically",
  )


def check_packed_alike(tables: Mapping[str, UnitTable]) -> None:
  """Refuses tasks that are packed by different features: what one lacks would leave the others' rows empty.

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
