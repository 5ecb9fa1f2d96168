"""A plan knows what its tasks' examples go through at reading, and refuses anything else."""

import dataclasses
import hashlib
import json

import caches
import numpy as np
import pytest

from anystep.errors import AnystepError
from anystep.inspection.history import differences, first_different_step
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.transforms.functions import Filter, Map, MapBatch, RandomMap
from anystep.transforms.transform import Transform

NOTHING = hashlib.sha256(b"null").hexdigest()


def doubled(example):
  return {"number": 2 * example["number"]}


def tripled(example):
  return {"number": 3 * example["number"]}


def drawn(example, rng):
  return {"number": rng.integers(9)}


def is_even(example):
  return example["number"] % 2 == 0


class AsItIs(Transform):
  identity = "leaves examples as they are"
  does_nothing = True

  def __call__(self, batch, records):
    return batch


TRANSFORMS = [
  Map(doubled),
  Map(tripled),
  Map(doubled, identity="mine"),
  RandomMap(drawn),
  MapBatch(lambda batch, records: batch, identity=1),
  [Map(doubled), Map(tripled)],
  [Map(tripled), Map(doubled)],
  None,
]


def plan_of(cache, transforms=None, **settings):
  by_task = None if transforms is None else {"demo": transforms}
  return Plan.start(cache.open(), batch_size=8, lanes=1, transforms=by_task, **settings)


def reread(plan):
  return Plan.from_json(plan.to_json())


def refusal_of(action, *arguments, **settings):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **settings)
  return refused.value


@pytest.mark.parametrize("made", range(len(TRANSFORMS)))
@pytest.mark.long
def test_a_plan_is_read_through_what_it_was_made_for_alone(shared_cache, made):
  plan = Plan.start(shared_cache.open(), batch_size=8, transforms={"demo": TRANSFORMS[made]})
  for read, transforms in enumerate(TRANSFORMS):
    by_task = {} if transforms is None else {"demo": transforms}
    if read == made:
      with open_stream(reread(plan), shared_cache.root, transforms=by_task) as stream:
        next(stream)
        assert stream.plan.to_json() == plan.to_json()
      continue
    refused = refusal_of(open_stream, reread(plan), shared_cache.root, transforms=by_task)
    assert (refused.code, refused.kind) == (76, "plan_transforms")
    assert refused.fields["task"] == "demo"
    assert refused.fields["expected"] == plan.tasks["demo"].transforms
    other = Plan.start(shared_cache.open(), batch_size=8, transforms=by_task)
    assert refused.fields["got"] == other.tasks["demo"].transforms
    assert (refused.fields["transforms"] == "none") == (transforms is None)


def test_a_function_of_one_name_and_another_source_is_another(shared_cache):
  def made(factor):
    return Map(lambda example: {"number": factor * example["number"]})

  plan = plan_of(shared_cache, made(2))
  with open_stream(reread(plan), shared_cache.root, transforms={"demo": made(2)}) as stream:
    assert next(stream)["number"].tolist() == [
      2 * int(shared_cache.examples[index]["number"]) for index in range(8)
    ]
  refused = refusal_of(open_stream, reread(plan), shared_cache.root, transforms={"demo": made(3)})
  assert refused.kind == "plan_transforms"


@pytest.mark.parametrize("settings", [{}, {"packing": "greedy", "feature_lengths": {"inputs": 11}}])
@pytest.mark.parametrize("start", [Filter(is_even), Map(doubled), AsItIs()])
def test_with_a_unit_table_it_knows_them_too(own_cache, settings, start):
  if settings and isinstance(start, Map):
    start = Map(lambda example: {"inputs": example["inputs"]})
  plan = plan_of(own_cache, start, **settings)
  assert len(plan.tasks["demo"].transforms) == 64
  with open_stream(reread(plan), own_cache.root, transforms={"demo": start}) as stream:
    next(stream)
  refused = refusal_of(open_stream, reread(plan), own_cache.root, transforms={"demo": Map(tripled)})
  assert (refused.code, refused.kind in ("unit_table", "plan_transforms")) == (76, True)


@pytest.mark.parametrize("nothing", [None, {}, {"demo": None}, {"demo": []}, {"demo": AsItIs()}])
@pytest.mark.parametrize("made", [{}, {"demo": None}, {"demo": [AsItIs(), AsItIs()]}])
def test_what_does_nothing_is_as_good_as_none(shared_cache, made, nothing):
  plan = Plan.start(shared_cache.open(), batch_size=8, transforms=made)
  assert plan.tasks["demo"].transforms == NOTHING
  with open_stream(reread(plan), shared_cache.root, transforms=nothing) as stream:
    next(stream)
  assert refusal_of(open_stream, plan, shared_cache.root, transforms={"demo": Map(doubled)}).code == 76


# Plans that do not know


def test_a_plan_that_was_made_without_knowing_says_nothing_in_its_json(shared_cache):
  plan = plan_of(shared_cache)
  assert plan.unknown_transforms == ["demo"]
  assert "transforms" not in json.loads(plan.to_json())["tasks"]["demo"]
  assert reread(plan) == plan


@pytest.mark.parametrize("first", [{}, {"demo": Map(doubled)}])
def test_the_first_reader_that_knows_tells_its_plan(shared_cache, first):
  plan = plan_of(shared_cache)
  with open_stream(plan, shared_cache.root, transforms=first) as stream:
    told = stream.plan
  assert told.unknown_transforms == []
  started = Plan.start(shared_cache.open(), batch_size=8, lanes=1, transforms=first)
  assert told.to_json() == started.to_json()
  assert refusal_of(open_stream, told, shared_cache.root, transforms={"demo": Map(tripled)}).code == 76
  # The plan itself is what it was.
  assert plan.unknown_transforms == ["demo"]


def test_who_needs_no_transforms_opens_any_plan(shared_cache):
  for transforms in (None, Map(doubled)):
    plan = reread(plan_of(shared_cache, transforms))
    known = plan.on_caches({"demo": shared_cache.open()})
    assert known.to_json() == plan.to_json()
    assert known.batch(3).unit.tolist() == list(range(24, 32))
    assert plan.change(3, batch_size=4).tasks["demo"] == plan.tasks["demo"]


def test_a_change_knows_the_transforms_of_new_tasks_if_it_is_told(shared_cache, tmp_path):
  other = caches.build(tmp_path, task="other").open()
  plan = plan_of(shared_cache, Map(doubled))
  rates = {"demo": 1, "other": 1}
  untold = plan.change(3, rates=rates, caches=[other])
  assert untold.unknown_transforms == ["other"]
  assert untold.tasks["demo"] == plan.tasks["demo"]
  told = plan.change(3, rates=rates, caches=[other], transforms={"other": Map(tripled)})
  assert told.unknown_transforms == []
  assert told.tasks["other"].transforms == plan_of(shared_cache, Map(tripled)).tasks["demo"].transforms


@pytest.mark.parametrize("transforms", ["f" * 63, "z" * 64, 1, ["f" * 64]])
def test_a_hash_that_is_none_is_refused(shared_cache, transforms):
  document = json.loads(plan_of(shared_cache).to_json())
  document["tasks"]["demo"]["transforms"] = transforms
  assert refusal_of(Plan.from_json, json.dumps(document)).kind == "plan_invalid"


# Transforms that no other process would know


class Nameless(Transform):
  def __init__(self):
    self.identity = {"of": repr(object())}

  def __call__(self, batch, records):
    return batch


class OfNoJson(Nameless):
  def __init__(self):
    self.identity = {1, 2}


@pytest.mark.parametrize("transform", [Nameless(), OfNoJson()])
def test_a_plan_is_not_made_for_what_no_other_process_would_know(shared_cache, transform):
  refused = refusal_of(plan_of, shared_cache, transform)
  assert (refused.code, refused.kind) == (78, "transform_identity")
  assert refused.fields["task"] == "demo"
  plan = plan_of(shared_cache, Map(doubled))
  refused = refusal_of(open_stream, plan, shared_cache.root, transforms={"demo": transform})
  assert (refused.code, refused.kind) == (78, "transform_identity")


@pytest.mark.parametrize("transform", [Nameless(), OfNoJson()])
def test_a_plan_that_does_not_know_is_read_through_it_as_before(shared_cache, transform):
  plan = plan_of(shared_cache)
  with open_stream(plan, shared_cache.root, transforms={"demo": transform}) as stream:
    assert stream.plan.unknown_transforms == ["demo"]
    assert stream.plan.to_json() == plan.to_json()
    assert np.array_equal(next(stream)["number"], [shared_cache.examples[k]["number"] for k in range(8)])


def test_two_plans_of_which_one_does_not_know_have_the_same_rows(shared_cache):
  unknown, known = plan_of(shared_cache), plan_of(shared_cache, Map(doubled))
  assert first_different_step(unknown, known) is None
  assert [difference.field for difference in differences(unknown, known)] == ["tasks.demo.transforms"]
  other = dataclasses.replace(known.tasks["demo"], transforms=NOTHING)
  assert first_different_step(known, dataclasses.replace(known, tasks={"demo": other})) == 0
