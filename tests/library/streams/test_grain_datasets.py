"""Grain sees a plan's batches as a dataset, a cache as a source, and a mixture as a selection map."""

import pickle

import caches
import grain
import pytest
from absl import flags
from expected_rows import ExpectedRows

from anystep.errors import AnystepError
from anystep.features.converters import MaxTextConverter
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.grain import PlanSelectionMap, StreamDataset
from anystep.transforms.functions import Filter

RATES = {"a": 1, "b": 2, "c": 5}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  root = tmp_path_factory.mktemp("caches")
  sizes = {"a": (50, 4), "b": (57, 2), "c": (64, 1)}
  return {
    name: caches.build(root, task=name, num_examples=examples, num_shards=shards)
    for name, (examples, shards) in sizes.items()
  }


@pytest.fixture
def opened(built):
  return [cache.open() for cache in built.values()]


@pytest.fixture
def plan(opened):
  start = Plan.start(opened, rates=RATES, batch_size=8, feature_lengths=caches.FEATURE_LENGTHS, num_epochs=1)
  return start.change(3, batch_size=4)


def test_a_plans_batches_are_a_dataset_that_passes_grains_own_test(plan, built):
  grain.experimental.assert_equal_output_after_checkpoint(StreamDataset(plan, built["a"].root))


def test_the_batches_are_the_streams_also_through_grains_transformations(plan, built):
  dataset = StreamDataset(plan, built["a"].root, prefetch_batches=0).map(batch_digest)
  expected = ExpectedRows(plan, built.values())
  assert list(dataset) == [expected.digest(step) for step in range(expected.num_steps)]


def test_packed_rows_under_other_names_pass_grains_own_test(opened, built):
  lengths = {"inputs": 16, "targets": 12}
  plan = Plan.start(
    opened, rates=RATES, batch_size=4, feature_lengths=lengths, num_epochs=1, packing="best_fit"
  )
  dataset = StreamDataset(plan, built["a"].root, feature_converter=MaxTextConverter())
  features = {f"{name}{end}" for name in lengths for end in ("", "_position", "_segmentation")}
  batches = list(dataset)
  assert len(batches) == plan.num_steps > 4
  assert {frozenset(batch) for batch in batches} == {frozenset(features)}
  assert max(batch["targets_segmentation"].max() for batch in batches) > 1
  grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_worker_processes_share_the_steps_out(plan, built):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  dataset = StreamDataset(plan, str(built["a"].root))
  options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
  apart = [batch_digest(batch) for batch in dataset.mp_prefetch(options)]
  assert apart == [batch_digest(batch) for batch in dataset]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_workers_share_is_resumed_where_it_was(plan, built, workers):
  for worker in range(workers):
    dataset = StreamDataset(plan, built["a"].root)
    dataset.set_slice(slice(worker, None, workers))
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_workers_do_not_take_stretches_of_steps(plan, built):
  with pytest.raises(ValueError, match="take turns"):
    StreamDataset(plan, built["a"].root).set_slice(slice(0, None, 2), sequential_slice=True)


def test_a_closed_iterator_gives_nothing(plan, built):
  iterator = iter(StreamDataset(plan, built["a"].root))
  next(iterator)
  iterator.close()
  with pytest.raises(ValueError, match="closed"):
    next(iterator)


def test_a_cache_is_a_source_of_examples(built, opened):
  assert isinstance(opened[0], grain.sources.RandomAccessDataSource)
  examples = list(grain.MapDataset.source(opened[0]))
  for found, expected in zip(examples, built["a"].examples, strict=True):
    assert found.keys() == expected.keys()
    assert all(caches.same_array(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_selection_map_gives_the_plans_rows(plan, built, opened, order):
  sources = [opened[k] for k in order]
  selection = pickle.loads(pickle.dumps(PlanSelectionMap(plan, sources)))
  dataset = grain.MapDataset.select_from_datasets([grain.MapDataset.source(s) for s in sources], selection)
  expected = ExpectedRows(plan, built.values())
  rows = [row for step in range(expected.num_steps) for row in expected.rows(step)]
  # The last batch has padding, for which there is no example to give.
  assert len(selection) == len(rows) - len(expected.rows(expected.num_steps - 1))
  for k in range(len(selection)):
    example = expected.example(rows[k])
    assert all(caches.same_array(dataset[k][name], example[name]) for name in example)


def test_a_selection_map_of_an_endless_plan_needs_a_number_of_steps(opened):
  endless = Plan.start(opened, rates=RATES, batch_size=8)
  with pytest.raises(AnystepError) as refused:
    PlanSelectionMap(endless, opened)
  assert (refused.value.code, refused.value.kind) == (78, "num_steps")
  assert len(PlanSelectionMap(endless, opened, num_steps=10**6)) == 8 * 10**6


def test_a_selection_map_does_not_go_beyond_the_data(plan, opened):
  with pytest.raises(AnystepError) as refused:
    PlanSelectionMap(plan, opened, num_steps=plan.num_steps + 1)
  assert (refused.value.code, refused.value.kind) == (78, "num_steps")
  selection = PlanSelectionMap(plan, opened)
  with pytest.raises(IndexError):
    selection[len(selection)]


def keeps_some(example):
  return example["number"] % 3 > 0


@pytest.mark.parametrize("packing", ["none", "greedy"])
def test_a_mixture_of_single_examples_is_not_made_of_a_plan_that_packs_or_filters(opened, packing):
  transforms = {cache.manifest.task: Filter(keeps_some) for cache in opened}
  lengths = {"inputs": 16}
  plan = Plan.start(
    opened, rates=RATES, batch_size=4, feature_lengths=lengths, packing=packing, transforms=transforms
  )
  with pytest.raises(AnystepError) as refused:
    PlanSelectionMap(plan, opened, num_steps=3)
  assert (refused.value.code, refused.value.kind) == (78, "unit_tables")
