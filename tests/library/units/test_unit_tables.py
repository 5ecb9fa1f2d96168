"""Unit tables are the same bytes wherever and however they are made, and are not taken when they changed."""

import json
import os
import shutil

import caches
import numpy as np
import pytest

import oracle
from anystep.caches.read_pool import ReadPool
from anystep.errors import AnystepError
from anystep.files import names
from anystep.order.packing import PackingPolicy
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.transforms.functions import Filter, Map, RandomMap
from anystep.transforms.transform import Chain
from anystep.units.surveys import make_unit_table
from anystep.units.tables import find_unit_table

LENGTHS = {"inputs": 11, "targets": 9}


@pytest.fixture
def built(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
  return caches.build(tmp_path / "caches", num_examples=300, num_shards=5, block_records=8)


def is_even(example):
  return example["number"] % 2 == 0


def same(example):
  return example


def made(built, transform=None, *, packing="best_fit", lengths=LENGTHS, pool=None):
  return make_unit_table(
    built.open(pool=pool), transform, packing=PackingPolicy(packing), feature_lengths=lengths
  )


def contents(table):
  return {path.name: path.read_bytes() for path in table.directory.iterdir()}


def refusal_of(action, *arguments, **settings):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **settings)
  assert refused.value.fix
  return refused.value


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_units_are_the_oracles_packs(built, packing):
  table = made(built, packing=packing)
  packed = {"greedy": oracle.pack_greedy, "best_fit": oracle.pack_best_fit}[packing]
  for shard in range(5):
    own = built.examples[shard::5]
    lengths = [(min(len(e["inputs"]), 11), min(len(e["targets"]), 9)) for e in own]
    packs = packed(lengths, (11, 9))
    assert table.shard_units[shard] == len(packs)
    wanted = np.arange(len(packs))[::-1]
    members = table.members(shard, wanted)
    found = np.split(members.places, np.cumsum(members.counts)[:-1])
    assert [places.tolist() for places in found] == packs[::-1]
    assert members.lengths.tolist() == [list(lengths[record]) for pack in packs[::-1] for record in pack]
    for place, pack in enumerate(packs):
      assert {table.unit_of(shard, record) for record in pack} == {place}
  tokens = {
    name: int(sum(min(len(e[name]), limit) for e in built.examples)) for name, limit in LENGTHS.items()
  }
  assert table.real_tokens == tokens
  fill = {name: tokens[name] / (limit * table.num_units) for name, limit in LENGTHS.items()}
  assert table.fill(LENGTHS) == pytest.approx(fill)


def test_a_filters_units_are_what_it_keeps_in_order(built):
  table = made(built, Filter(is_even), packing="none")
  kept = [[k for k, e in enumerate(built.examples[shard::5]) if is_even(e)] for shard in range(5)]
  assert table.features == []
  for shard, records in enumerate(kept):
    assert table.members(shard, np.arange(len(records))).places.tolist() == records
    dropped = set(range(60)) - set(records)
    assert {table.unit_of(shard, record) for record in dropped} == {None}


def test_arithmetic_and_running_find_the_same_units(built):
  by_arithmetic, by_running = made(built), made(built, Map(same))
  names_of = [name for name in contents(by_arithmetic) if name != names.UNIT_TABLE]
  assert len(names_of) == 5
  for name in names_of:
    assert contents(by_arithmetic)[name] == contents(by_running)[name]


@pytest.mark.parametrize("transform", [None, Chain([Filter(is_even), Map(same)])])
def test_a_table_has_the_same_bytes_from_another_path_by_other_workers(
  built, tmp_path, monkeypatch, transform
):
  here = contents(made(built, transform))
  shutil.rmtree(built.directory / "units")
  shutil.move(built.root, tmp_path / "elsewhere")
  monkeypatch.setattr(os, "cpu_count", lambda: 7)
  there = made(built.at(tmp_path / "elsewhere"), transform, pool=ReadPool(budget_bytes=3000, open_files=1))
  assert contents(there) == here


def test_a_table_is_made_once(built, monkeypatch):
  table = made(built)
  monkeypatch.setattr("anystep.units.surveys.pack", None)
  assert made(built).sha256 == table.sha256
  assert find_unit_table(built.open(), table.sha256).directory == table.directory
  assert find_unit_table(built.open(), "f" * 64) is None


def test_a_header_that_is_a_link_to_nothing_is_an_invalid_table(own_cache):
  directory = own_cache.directory / "units" / "some_table"
  directory.mkdir(parents=True)
  os.symlink("nothing", directory / names.UNIT_TABLE)
  with pytest.raises(AnystepError) as refused:
    find_unit_table(own_cache.open(), "f" * 64)
  assert (refused.value.code, refused.value.kind) == (65, "unit_table_invalid")


def test_other_lengths_policies_and_transforms_have_tables_of_their_own(built):
  tables = [
    made(built),
    made(built, packing="greedy"),
    made(built, lengths={"inputs": 11}),
    made(built, Filter(is_even)),
    made(built, Filter(same)),
    made(built, Map(same)),
  ]
  assert len({table.sha256 for table in tables}) == len({table.directory for table in tables}) == 6


def test_where_the_cache_cannot_be_written_the_users_folder_has_the_table(built, tmp_path):
  beside = contents(made(built))
  shutil.rmtree(built.directory / "units")
  (built.directory / "units").write_text("no directory")
  table = made(built)
  assert table.directory.is_relative_to(tmp_path / "home" / "anystep" / "units")
  assert contents(table) == beside
  assert find_unit_table(built.open(), table.sha256).directory == table.directory


def test_where_nothing_can_be_written_that_is_said(built, tmp_path):
  (built.directory / "units").write_text("no directory")
  (tmp_path / "home").write_text("no directory")
  error = refusal_of(made, built)
  assert (error.code, error.kind) == (73, "unit_table_write")


def test_a_file_that_cannot_be_written_is_named(built):
  directory = made(built).directory
  shutil.rmtree(directory)
  path = directory / names.units_name("train", 3, 5)
  path.mkdir(parents=True)
  error = refusal_of(made, built)
  assert (error.code, error.kind) == (73, "unit_table_write")
  assert path.name in error.fields["got"]


@pytest.mark.parametrize(
  ("settings", "kind"),
  [
    ({"rates": {"demo": 1, "dmo": 1}}, "task_unknown"),
    ({"batch_size": 0}, "batch_size"),
    ({"lanes": 7}, "lanes"),
    ({"rates": {"demo": -1}}, "rates"),
  ],
)
def test_what_no_plan_can_have_is_refused_before_units_are_looked_for(built, settings, kind):
  start = {"batch_size": 10, "feature_lengths": LENGTHS, "packing": "greedy", **settings}
  assert refusal_of(Plan.start, built.open(), **start).kind == kind
  assert not (built.directory / "units").exists()


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_file_stops_the_reader(built, how):
  plan = Plan.start(built.open(), batch_size=10, feature_lengths=LENGTHS, packing="greedy")
  path = next(iter(plan.unit_tables.values())).directory / names.units_name("train", 2, 5)
  if how == "gone":
    path.unlink()
  elif how == "cut":
    path.write_bytes(path.read_bytes()[:-1])
  else:
    caches.flip(path, path.stat().length // 2)
  with open_stream(Plan.from_json(plan.to_json()), built.root, prefetch_batches=0) as stream:
    error = refusal_of(stream.batch, 0)
  assert (error.code, error.kind) == (65, "file_missing" if how == "gone" else "file_changed")
  assert error.fields["path"] == path


@pytest.mark.parametrize(
  "change",
  [
    {"version": 2},
    {"shard_units": [1, 2]},
    {"shard_units": None},
    {"features": ["inputs"]},
    {"num_examples": 10},
    {"num_examples": -1},
    {"files": [{"name": "../units.npy", "records": 60, "bytes": 1, "sha256": "", "head_sha256": ""}] * 5},
  ],
)
def test_a_header_that_is_not_a_tables_is_refused(built, change):
  path = made(built).directory / names.UNIT_TABLE
  path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
  error = refusal_of(made, built)
  assert (error.code, error.kind, error.fields["path"]) == (65, "unit_table_invalid", path)


def test_a_table_under_another_tables_name_is_refused(built):
  path, other = made(built).directory, made(built, packing="greedy").directory
  shutil.rmtree(path)
  shutil.move(other, path)
  error = refusal_of(made, built)
  assert (error.code, error.kind, error.fields["path"]) == (65, "unit_table_invalid", path / names.UNIT_TABLE)


def test_a_header_of_another_table_is_not_the_plans(built):
  plan = Plan.start(built.open(), batch_size=10, feature_lengths=LENGTHS, packing="greedy")
  path = next(iter(plan.unit_tables.values())).directory / names.UNIT_TABLE
  document = json.loads(path.read_text())
  document["shard_units"] = document["shard_units"][::-1]
  path.write_text(json.dumps(document))
  again = Plan.from_json(plan.to_json())
  assert refusal_of(again.on_caches, {"demo": built.open()}).kind == "unit_table_missing"


def test_a_host_loads_the_shards_that_it_reads(built):
  plan = Plan.start(built.open(), batch_size=10, feature_lengths=LENGTHS, packing="greedy", lanes=5)
  with open_stream(Plan.from_json(plan.to_json()), built.root, rows=(0, 5), prefetch_batches=0) as stream:
    stream.batch(0)
    (table,) = stream.plan.unit_tables.values()
    assert list(table._shards) == [0]


def test_a_transform_that_another_process_would_not_know_has_no_table(built):
  generator = np.random.default_rng(0)

  def drawn_once(example):
    return generator is not None

  error = refusal_of(made, built, Filter(drawn_once), packing="none")
  assert (error.code, error.kind) == (78, "transform_identity")
  assert error.fields["got"].startswith("Generator(PCG64) at 0x")
  assert made(built, Filter(drawn_once, identity="drawn once"), packing="none").num_units == 300


def test_what_a_changed_function_keeps_is_found_anew_as_the_error_says(built):
  """Where a filter only calls it, no name tells."""
  kept = {number for number in range(300) if number % 3}
  transforms = {"demo": Filter(lambda example: int(example["number"]) in kept, identity="mine")}

  def started():
    return Plan.start(built.open(), batch_size=10, num_epochs=1, transforms=transforms)

  def numbers(plan):
    with open_stream(plan, built.root, transforms=transforms) as stream:
      return [int(number) for batch in stream for number in batch["number"]]

  assert set(numbers(started())) == kept
  kept -= {7}
  error = refusal_of(lambda: numbers(started()))
  assert (error.code, error.kind) == (65, "example_dropped")
  assert "units/" in error.fix
  shutil.rmtree(built.directory / "units")
  assert set(numbers(started())) - {0} == kept


def random_length(example, rng):
  return {"inputs": np.zeros(rng.integers(1, 5), np.int32)}


@pytest.mark.parametrize(
  ("transform", "packing", "lengths", "code", "kind"),
  [
    (None, "greedy", {}, 78, "packing_features"),
    (None, "greedy", {"number": 4}, 78, "packing_features"),
    (None, "greedy", {"weights": 4}, 78, "packing_features"),
    (None, "best_fit", {"inputs": 0}, 78, "packing_features"),
    (Map(same), "best_fit", {"weights": 4}, 78, "packing_features"),
    (RandomMap(random_length), "best_fit", {"inputs": 4}, 78, "unit_random"),
    (Filter(lambda example: False), "none", {}, 66, "units_empty"),
  ],
)
def test_what_makes_no_table_is_refused(built, transform, packing, lengths, code, kind):
  error = refusal_of(made, built, transform, packing=packing, lengths=lengths)
  assert (error.code, error.kind) == (code, kind)


def test_draws_that_decide_no_length_are_no_reason_to_refuse(built):
  def drawn(example, rng):
    return {"inputs": rng.integers(0, 9, example["inputs"].shape)}

  table = made(built, RandomMap(drawn), lengths={"inputs": 11})
  assert contents(table).keys() == contents(made(built, lengths={"inputs": 11})).keys()
