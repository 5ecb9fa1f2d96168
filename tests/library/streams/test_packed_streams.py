"""Packed, filtered and randomly changed streams are the oracle's: to any hosts, from any step on."""

import hashlib
import itertools
import json
import pickle
import shutil

import caches
import numpy as np
import pytest
from expected_rows import ExpectedRows
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.caches.read_pool import ReadPool
from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest, row_digests
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.transforms.functions import Filter, Map, MapBatch, RandomMap

# Name: N, S, g. Several windows of 256 records in a shard; one task has one shard, one has an empty one.
SHAPES = {"a": (540, 2, 8), "b:x": (61, 1, 8), "c": (50, 64, 4)}
RATES = {"a": 3, "b:x": 0.5, "c": 1}
LENGTHS = {"inputs": 11, "targets": 9, "weights": 3}
SEED = 5


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """The caches of all tasks, by name."""
  root = tmp_path_factory.mktemp("packed")
  return {
    name: caches.build(
      root,
      task=name,
      num_examples=n,
      num_shards=s,
      block_records=g,
      container=containers.TFRECORD if name == "b:x" else containers.ARRAY_RECORD,
      example_of=lambda ordinal, k=k: caches.example_of(100_000 * k + ordinal),
    )
    for k, (name, (n, s, g)) in enumerate(SHAPES.items())
  }


def is_wanted(example):
  return example["number"] % 3 > 0


def is_not_wanted_in_a_shard(example):
  # All of several of c's shards, which have one record each or none.
  return example["number"] % 7 < 3


def noised(example, rng):
  return example | {"inputs": example["inputs"] + rng.integers(0, 1000, example["inputs"].shape, np.int32)}


def with_one_more(example):
  return {name: np.append(example[name], [1]).astype(np.int32) for name in ("inputs", "targets")}


def noised_by_hand(example, task, index, epoch, place):
  key = oracle.transform_keys(task, "train", SEED, epoch, place, index)
  return noised(example, np.random.Generator(np.random.Philox(key=np.array(key, np.uint64))))


def of_filtered(example, task, index, epoch):
  if not (is_wanted(example) and is_not_wanted_in_a_shard(example)):
    return None
  return noised_by_hand(example, task, index, epoch, 1)


def of_longer(example, task, index, epoch):
  longer = with_one_more(noised_by_hand(example, task, index, epoch, 0))
  return longer if is_wanted(example) else None


FILTERED = [Filter(is_wanted), RandomMap(noised), Filter(is_not_wanted_in_a_shard)]
LONGER = [RandomMap(noised), Filter(is_wanted), Map(with_one_more)]
# By name: how the plan is made, what examples go through, and the same by hand.
ORDERS = {
  "greedy": ({"packing": "greedy"}, [], None),
  "best_fit": ({"packing": "best_fit", "lanes": 4}, [], None),
  "filtered": ({"rate_unit": "units"}, FILTERED, of_filtered),
  "filtered_global": ({"epoch_policy": "global"}, FILTERED, of_filtered),
  "longer_best_fit": ({"packing": "best_fit"}, LONGER, of_longer),
  "longer_greedy_same": ({"packing": "greedy", "epoch_policy": "same"}, LONGER, of_longer),
  "longer_best_fit_global": ({"packing": "best_fit", "epoch_policy": "global"}, LONGER, of_longer),
}


def opened(built, names, *, pool=None):
  """Fresh caches of one fresh pool."""
  pool = pool or ReadPool()
  return {name: built[name].open(pool=pool) for name in names}


class Order:
  """A way to make plans, and the rows they should have."""

  def __init__(self, built, order, *, rates=RATES):
    self.settings, chain, self._change = ORDERS[order]
    self.built = built
    self.transforms = dict.fromkeys(built, chain) if chain else {}
    self.plan = self.start(rates)

  def start(self, rates, *, batch_size=24, num_epochs=2):
    return Plan.start(
      opened(self.built, rates).values(),
      rates=rates,
      batch_size=batch_size,
      feature_lengths=LENGTHS,
      num_epochs=num_epochs,
      seed=SEED,
      transforms=self.transforms,
      **self.settings,
    )

  def expected(self, plan=None):
    change = {"change": self._change} if self._change else {}
    return ExpectedRows(plan or self.plan, self.built.values(), **change)

  def digests(self, plan=None):
    expected = self.expected(plan)
    return [expected.digest(step) for step in range(expected.num_steps)]

  def stream(self, plan=None, *, pool=None, **settings):
    """A stream of fresh objects all through, the plan too."""
    plan = Plan.from_json((plan or self.plan).to_json())
    caches_by_name = opened(self.built, plan.tasks, pool=pool)
    return open_stream(plan, caches_by_name, transforms=self.transforms, **settings)


@pytest.fixture(scope="module", params=ORDERS)
def order(request, built):
  """An order of a mixture, and its batches' digests by the oracle."""
  order = Order(built, request.param)
  order.own_digests = order.digests()
  assert order.plan.num_steps == len(order.own_digests) > 4
  return order


def joined_digest(batches):
  """The digest of a batch from the parts that hosts have of it."""
  return hashlib.sha256(b"".join(row for batch in batches for row in row_digests(batch))).hexdigest()


@pytest.mark.parametrize(("hosts", "prefetch_batches"), [(1, 4), (3, 0), (8, 4)])
def test_batches_are_the_oracles_for_any_hosts(order, hosts, prefetch_batches):
  streams = [order.stream(rows=(host, hosts), prefetch_batches=prefetch_batches) for host in range(hosts)]
  middle = len(order.own_digests) // 2
  for start in (middle, 0, len(order.own_digests) - 1):
    for stream in streams:
      stream.seek(start)
    found = [joined_digest(parts) for parts in itertools.islice(zip(*streams, strict=True), 3)]
    assert found == order.own_digests[start : start + 3]
  for stream in streams:
    stream.close()


def test_fresh_objects_go_on_from_any_step(order):
  with order.stream() as stream:
    for step in range(len(order.own_digests) + 1):
      with order.stream(prefetch_batches=step % 3) as again:
        again.set_state(json.loads(json.dumps(stream.get_state())))
        found = [batch_digest(batch) for batch in itertools.islice(again, 4)]
        assert found == order.own_digests[step : step + 4]
      if step < len(order.own_digests):
        next(stream)


def test_a_budget_that_holds_next_to_nothing_changes_no_row(order):
  with order.stream(pool=ReadPool(budget_bytes=2000, open_files=2)) as stream:
    assert [batch_digest(batch) for batch in stream] == order.own_digests


def test_each_epoch_has_each_kept_example_once_and_epochs_differ(order):
  plan = order.start({"a": 1}, batch_size=16)
  expected = order.expected(plan)
  in_epochs = {}
  for step in range(expected.num_steps):
    for row in expected.rows(step):
      if row is not None:
        in_epochs.setdefault(row.epoch, []).append((row.unit, row.indices))
  first, second = (
    [index for _, own in sorted(rows) for index in own] for _, rows in sorted(in_epochs.items())
  )
  assert sorted(first) == sorted(second) == sorted(set(first))
  assert (first == second) == (plan.epoch_policy == "same")
  with order.stream(plan) as stream:
    assert [batch_digest(batch) for batch in stream] == order.digests(plan)


CHANGES = st.lists(
  st.one_of(
    st.tuples(st.just("rates"), st.sampled_from([{"a": 1}, {"a": 2, "c": 1}, {"c": 1, "b:x": 1}, RATES])),
    st.tuples(st.just("batch_size"), st.sampled_from([8, 12, 24])),
    st.tuples(st.just("skip"), st.integers(1, 3)),
  ),
  min_size=1,
  max_size=3,
)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["best_fit", "filtered", "longer_greedy_same"]), CHANGES)
def test_any_chain_of_changes_is_the_oracles_order(built, name, changes):
  order = Order(built, name, rates={"a": 1, "b:x": 1})
  plan, step = order.plan, 0
  for kind, what in changes:
    step += 2
    if plan.num_steps <= step + 3:
      break
    if kind == "skip":
      plan = plan.skip(step, step + what)
    elif kind == "batch_size":
      plan = plan.change(step, batch_size=what)
    else:
      new = [cache for key, cache in opened(built, what).items() if key not in plan.tasks]
      plan = plan.change(step, rates=what, caches=new, transforms=order.transforms)
  with order.stream(plan) as stream:
    assert [batch_digest(batch) for batch in stream] == order.digests(plan)


def test_rates_of_examples_become_shares_of_units(built):
  order = Order(built, "best_fit")
  shares = {name: order.plan.tasks[name].num_units / SHAPES[name][0] * rate for name, rate in RATES.items()}
  quotas = order.plan.segments[0].quotas
  for name, share in shares.items():
    assert quotas[name] / sum(quotas.values()) == pytest.approx(share / sum(shares.values()), rel=0.01)
  by_units = Plan.start(
    opened(built, RATES).values(),
    rates=RATES,
    batch_size=24,
    feature_lengths=LENGTHS,
    packing="best_fit",
    rate_unit="units",
  )
  assert by_units.segments[0].quotas == {"a": 6, "b:x": 1, "c": 2}


def test_files_as_they_are_can_be_packed_and_filtered(built, tmp_path):
  cache = caches.build_as_is(tmp_path, task="c")
  for packing, chain, change in [("best_fit", [], None), ("greedy", LONGER, of_longer)]:
    transforms = {"c": chain} if chain else {}
    plan = Plan.start(
      cache.open(),
      batch_size=4,
      feature_lengths=LENGTHS,
      num_epochs=2,
      seed=SEED,
      packing=packing,
      transforms=transforms,
    )
    expected = ExpectedRows(plan, [cache], **({"change": change} if change else {}))
    with open_stream(plan, tmp_path, transforms=transforms) as stream:
      digests = [expected.digest(step) for step in range(expected.num_steps)]
      assert [batch_digest(batch) for batch in stream] == digests


@pytest.mark.parametrize("name", ["greedy", "best_fit", "filtered", "longer_best_fit"])
@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_of_an_epoch_that_was_read_nothing_is_held(built, name, prefetch_batches):
  order, pool = Order(built, name, rates={"a": 1}), ReadPool()
  plan = order.start({"a": 1}, num_epochs=1)
  stream = order.stream(plan, pool=pool, prefetch_batches=prefetch_batches)
  used_bytes = [pool.used_bytes for _ in stream]
  # Indexes of the two open files.
  assert pool.used_bytes < 1000 < max(used_bytes)


def test_tasks_that_are_packed_by_different_features_are_not_mixed(built):
  def without(batch, records):
    return {name: feature for name, feature in batch.items() if name != "inputs"}

  transforms = {"b:x": MapBatch(without)}
  error = refusal_of(
    Plan.start,
    opened(built, ["a", "b:x"]).values(),
    rates={"a": 1, "b:x": 1},
    batch_size=4,
    feature_lengths=LENGTHS,
    packing="greedy",
    transforms=transforms,
  )
  assert (error.code, error.kind) == (78, "packing_features")
  assert error.fields["got"] == {"a": ["inputs", "targets"], "b:x": ["targets"]}


# What is refused


def refusal_of(action, *arguments, **settings):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **settings)
  assert refused.value.fix
  return refused.value


def test_a_stream_through_other_transforms_than_the_plans_is_refused(built):
  filtered, packed = Order(built, "filtered"), Order(built, "greedy")
  plain = Plan.start(built["a"].open(), batch_size=8)
  other = {name: [Filter(is_wanted)] for name in built}
  for plan, transforms, item in [
    (filtered.plan, {}, "transforms"),
    (filtered.plan, other, "transforms"),
    (packed.plan, other, "transforms"),
    (plain, other, "transforms"),
  ]:
    error = refusal_of(open_stream, plan, opened(built, plan.tasks), transforms=transforms)
    assert (error.code, error.kind, error.fields["item"]) == (76, "unit_table", item)


def test_a_record_of_another_length_than_planned_stops_the_reader(built):
  changed = []

  def cut(batch, records):
    if not changed:
      return batch
    feature = batch["inputs"]
    rows = [
      row[:-1] if index == changed[0] else row
      for index, row in zip(records.indices, feature.rows(), strict=True)
    ]
    return {**batch, "inputs": type(feature).of_rows(rows, np.int32)}

  transforms = {"a": MapBatch(cut, identity="cut")}
  plan = Plan.start(
    built["a"].open(), batch_size=8, feature_lengths=LENGTHS, packing="greedy", transforms=transforms
  )
  row = ExpectedRows(plan, built.values()).rows(3)[5]
  changed.append(next(i for i in row.indices if len(built["a"].examples[i]["inputs"])))
  with open_stream(plan, opened(built, ["a"]), transforms=transforms, prefetch_batches=0) as stream:
    stream.batch(2)
    error = refusal_of(stream.batch, 3)
  length = len(built["a"].examples[changed[0]]["inputs"])
  assert (error.code, error.kind, error.fields["feature"]) == (65, "record_length", "inputs")
  assert (error.fields["expected"], error.fields["got"]) == (length, length - 1)


def test_a_plan_whose_units_nobody_knows_needs_its_caches(built):
  plan = Plan.from_json(Order(built, "best_fit").plan.to_json())
  for action in (lambda: plan.batch(0), lambda: plan.change(1, rates={"a": 1, "c": 2})):
    error = refusal_of(action)
    assert (error.code, error.kind) == (78, "plan_caches")
  known = plan.on_caches(opened(built, plan.tasks)).change(1, rates={"a": 1, "c": 2})
  assert plan.change(1, rates={"a": 1, "c": 2}, caches=opened(built, plan.tasks).values()) == known


def test_a_plan_with_its_tables_travels_to_other_processes(order):
  again = pickle.loads(pickle.dumps(order.plan))
  assert again == order.plan
  step = len(order.own_digests) - 1
  batch, expected = again.batch(step), order.plan.batch(step)
  assert all(np.array_equal(column, other) for column, other in zip(batch, expected, strict=True))
  for name, table in order.plan.unit_tables.items():
    units = np.arange(table.shard_units[0])
    for column, other in zip(again.unit_tables[name].members(0, units), table.members(0, units), strict=True):
      assert np.array_equal(column, other)


def test_data_at_another_path_resumes_with_its_table_or_makes_it_anew(built, tmp_path):
  order = Order(built, "longer_best_fit", rates={"a": 1})
  digests = order.digests()
  for kept in (True, False):
    root = tmp_path / str(kept)
    shutil.copytree(built["a"].root / "a", root / "a")
    if not kept:
      shutil.rmtree(root / "a" / "units")
      error = refusal_of(
        order.plan.__class__.from_json(order.plan.to_json()).on_caches, {"a": built["a"].at(root).open()}
      )
      assert (error.code, error.kind) == (66, "unit_table_missing")
    with open_stream(Plan.from_json(order.plan.to_json()), root, transforms=order.transforms) as stream:
      assert [batch_digest(batch) for batch in stream] == digests
