"""What was at a step is what the order specification says; when an example was is its exact inverse."""

import dataclasses

import numpy as np
import pytest
from explained_rows import build_mixture, explained_rows

from anystep.inspection.rows import index_of_source, split_by_segment, what_was_at, when_was
from anystep.plans.plan import Plan

RATES = {"a": 2, "b:inner": 1, "c": 1}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  return build_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def opened(built):
  return {name: cache.open() for name, cache in built.items()}


def start(opened, *, rates=RATES, batch_size=6, epoch_policy="reshuffle", **settings):
  caches = [opened[name] for name in rates]
  return Plan.start(caches, rates=rates, batch_size=batch_size, epoch_policy=epoch_policy, **settings)


def packed(opened, **settings):
  lengths = {"inputs": 9, "targets": 8}
  return start(opened, feature_lengths=lengths, batch_size=8, lanes=4, num_epochs=3, **settings)


def changed(opened):
  """A task leaves and another comes, the batch grows, and the first one returns, with a skip between."""
  plan = start(opened, rates={"a": 1, "b:inner": 2}, seed=5)
  plan = plan.change(4, rates={"b:inner": 1, "c": 1}, caches=[opened["c"]])
  plan = plan.skip(6, 9)
  plan = plan.change(10, rates={"a": 3, "c": 1}, batch_size=8)
  return plan.on_caches(opened)


PLANS = {
  "one task": lambda opened: start(opened, rates={"a": 1}, batch_size=12),
  "layout as_is": lambda opened: start(opened, rates={"c": 1}, batch_size=4, epoch_policy=None),
  "a mixture": start,
  "a mixture that ends": lambda opened: start(opened, num_epochs=2, seed=3),
  "epochs that are the same": lambda opened: start(opened, epoch_policy="same"),
  "global epochs": lambda opened: start(opened, epoch_policy="global", num_epochs=3),
  "lanes": lambda opened: start(opened, batch_size=8, lanes=4, num_epochs=3),
  "batches larger than an epoch": lambda opened: start(opened, rates={"a": 1}, batch_size=64, lanes=4),
  "packed": lambda opened: packed(opened, packing="best_fit"),
  "packed, global epochs": lambda opened: packed(opened, packing="greedy", epoch_policy="global"),
  "skipped": lambda opened: start(opened).skip(2, 7).skip(4, 5),
  "changed": changed,
  "changed, and ends": lambda opened: dataclasses.replace(changed(opened), num_epochs=4),
}


@pytest.fixture(params=PLANS)
def plan(request, opened):
  return PLANS[request.param](opened)


def test_rows_are_the_order_specifications(plan, built, opened):
  expected = explained_rows(plan, built, range(24))
  steps = range(24 if plan.num_steps is None else min(24, plan.num_steps))
  assert [row for step in steps for row in what_was_at(plan, opened, step)] == expected
  assert len({(row["step"], row["row"]) for row in expected}) == len(expected) > 20


def test_rows_that_are_asked_for_are_those_of_the_batch(plan, opened):
  wanted = np.array([3, 0])
  alone = list(what_was_at(plan, opened, 3, wanted))
  assert alone == [row for number in wanted for row in what_was_at(plan, opened, 3) if row["row"] == number]


@pytest.mark.parametrize("steps", [range(24), range(3, 9), range(7, 8), range(23, 24)], ids=str)
def test_when_an_example_was_is_every_row_that_has_it(plan, built, opened, steps):
  rows = explained_rows(plan, built, steps)
  found = 0
  for task in plan.task_names:
    for index in range(len(opened[task])):
      of_task = [row for row in rows if row["task"] == task]
      expected = [row for row in of_task if index in [example["index"] for example in row["examples"]]]
      assert list(when_was(plan, opened, task, index, steps)) == expected
      found += len(expected)
  assert found == sum(len(row["examples"]) for row in rows)


def test_no_step_is_gone_through_to_find_an_example(opened, monkeypatch):
  plan = start(opened)
  far = range(10**12, 10**12 + 40)
  rows = [row for step in far for row in what_was_at(plan, opened, step)]
  monkeypatch.setattr(Plan, "batch", None)
  monkeypatch.setattr(Plan, "units", None)
  for index in range(len(opened["b:inner"])):
    found = list(when_was(plan, opened, "b:inner", index, far))
    assert found == [r for r in rows if r["task"] == "b:inner" and r["examples"][0]["index"] == index]
    assert len(found) >= 4


def test_more_epochs_than_are_looked_at_together_are_all_found(opened):
  plan = start(opened, rates={"b:inner": 1}, batch_size=25)
  found = list(when_was(plan, opened, "b:inner", 4, range(1000)))
  assert [row["epoch"] for row in found] == list(range(2500))
  places = [(row["step"], row["row"]) for row in found]
  assert places == sorted(set(places))


def test_rows_of_a_plan_that_goes_back_are_found_twice(built, opened):
  plan = start(opened, rates={"a": 1}, batch_size=8)
  again = dataclasses.replace(plan.segments[0], start_step=2, reason="once more")
  plan = dataclasses.replace(plan, segments=(*plan.segments, again))
  rows = explained_rows(plan, built, range(4))
  found = list(when_was(plan, opened, "a", 3, range(4)))
  assert found == [row for row in rows if row["examples"][0]["index"] == 3]
  assert [row["step"] for row in found] == [0, 2]


def test_steps_after_the_datas_end_have_no_rows(opened):
  plan = start(opened, num_epochs=1)
  assert list(when_was(plan, opened, "a", 0, range(plan.num_steps, 10**9))) == []
  assert len(list(when_was(plan, opened, "b:inner", 0, range(10**9)))) == 1


@pytest.mark.parametrize("task", RATES)
def test_an_examples_index_follows_from_its_source(opened, task):
  cache = opened[task]
  indices = np.arange(len(cache))
  shards, places = cache.source_of(indices)
  pairs = zip(shards.tolist(), places.tolist(), strict=True)
  assert [index_of_source(cache, *pair) for pair in pairs] == indices.tolist()


@pytest.mark.parametrize(("shard", "place"), [(-1, 0), (4, 0), (0, -1), (0, 11), (1, 0)])
def test_a_source_without_the_example_is_refused(opened, shard, place):
  with pytest.raises(IndexError):
    index_of_source(opened["a"], shard, place)


@pytest.mark.parametrize("index", [-1, 23])
def test_an_index_that_the_split_does_not_have_is_refused(opened, index):
  with pytest.raises(IndexError):
    list(when_was(start(opened), opened, "a", index, range(4)))


def test_stretches_are_the_segments_that_have_steps_in_a_range(opened):
  plan = changed(opened)

  def found(steps):
    return [(segment.start_step, stretch) for segment, stretch in split_by_segment(plan, steps)]

  assert found(range(2, 8)) == [(0, range(2, 4)), (4, range(4, 6)), (6, range(6, 8))]
  assert found(range(4, 5)) == [(4, range(4, 5))]
  assert found(range(100, 200)) == [(10, range(100, 200))]
