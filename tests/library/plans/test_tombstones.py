"""Tombstones: listed examples lose their loss weight from a step on, and nothing else in any batch moves."""

import json

import caches
import numpy as np
import pytest
from expected_rows import ExpectedRows
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.errors import AnystepError
from anystep.features.converters import (
  DecoderConverter,
  EncoderDecoderConverter,
  MaxTextConverter,
  PrefixLMConverter,
)
from anystep.features.digest import row_digests
from anystep.inspection.history import differences, first_different_step, totals
from anystep.inspection.rows import what_was_at, when_was
from anystep.plans.plan import Plan
from anystep.plans.tombstones import TombstoneList
from anystep.streams.stream import open_stream

# Name: N, S, g.
SHAPES = {"a": (60, 4, 4), "b:x": (31, 1, 8)}
RATES = {"a": 2, "b:x": 1}
LENGTHS = {"inputs": 11, "targets": 9}
CONVERTERS = {
  "encoder_decoder": EncoderDecoderConverter(),
  "prefix_lm": PrefixLMConverter(loss_on_targets_only=False),
  "decoder": DecoderConverter(),
  "maxtext": MaxTextConverter(),
}
ORDERS = [{}, {"packing": "best_fit"}, {"packing": "greedy", "batch_size": 4}]
# By feature, where the model's loss is weighed and the numbers of the packed examples there.
WEIGHTS = {"decoder_loss_weights": "decoder_segment_ids", "targets_segmentation": "targets_segmentation"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """The caches of all tasks, by name."""
  root = tmp_path_factory.mktemp("tombstones")
  return {
    name: caches.build(
      root,
      task=name,
      num_examples=n,
      num_shards=s,
      block_records=g,
      example_of=lambda ordinal, k=k: caches.example_of(100_000 * k + ordinal),
    )
    for k, (name, (n, s, g)) in enumerate(SHAPES.items())
  }


def opened(built):
  return {name: cache.open() for name, cache in built.items()}


def plan_of(built, **order):
  order = {"num_epochs": 2, "batch_size": 12, "seed": 3} | order
  return Plan.start(opened(built).values(), rates=RATES, feature_lengths=LENGTHS, **order)


def lists_of(built, indices):
  return [TombstoneList.of(built[task].open(), own) for task, own in indices.items() if own]


def batches_of(built, plan, converter, **settings):
  """Every step's batch by a stream of fresh objects, the plan too."""
  plan = Plan.from_json(plan.to_json())
  with open_stream(plan, opened(built), feature_converter=CONVERTERS[converter], **settings) as stream:
    return list(stream)


def silenced(batch, rows, dead, *, packed):
  """A batch whose examples that are dead have no weight, row by row and example by example."""
  batch = {name: np.array(values) for name, values in batch.items()}
  for number, row in enumerate(rows):
    for place, index in enumerate(row.indices if row else ()):
      if (row.task, index) not in dead:
        continue
      for name in batch.keys() & WEIGHTS.keys():
        # The segments are read before they are changed, where they are the weights.
        own = batch[WEIGHTS[name]][number] == place + 1 if packed else slice(None)
        batch[name][number][own] = 0
  return batch


@pytest.mark.parametrize("converter", CONVERTERS)
@pytest.mark.parametrize(
  "order", [{}, {"packing": "best_fit"}, {"packing": "greedy", "batch_size": 4}], ids=str
)
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_all_other_rows_are_identical_and_the_listed_examples_have_no_weight(built, order, converter, data):
  plan = plan_of(built, **order)
  expected, packed = ExpectedRows(plan, built.values()), bool(order)
  since = {}
  tombstoned = plan
  for _ in range(data.draw(st.integers(1, 2))):
    step = data.draw(st.integers(0, plan.num_steps - 1))
    indices = {
      name: data.draw(st.sets(st.integers(0, n - 1), max_size=9)) for name, (n, *_) in SHAPES.items()
    }
    tombstoned = tombstoned.tombstone(step, lists_of(built, indices))
    for name, own in indices.items():
      since |= {(name, index): min(step, since.get((name, index), step)) for index in own}
  before, after = (batches_of(built, p, converter) for p in (plan, tombstoned))
  assert len(before) == len(after) == plan.num_steps
  for step, (left, right) in enumerate(zip(before, after, strict=True)):
    dead = {example for example, first in since.items() if first <= step}
    assert left.keys() == right.keys()
    wanted = silenced(left, expected.rows(step), dead, packed=packed)
    for name, values in right.items():
      assert caches.same_array(values, wanted[name]), (step, name)


def test_hosts_and_batches_made_ahead_have_the_same_rows(built):
  plan = plan_of(built, packing="best_fit").tombstone(2, lists_of(built, {"a": range(40), "b:x": [0, 7]}))
  whole = batches_of(built, plan, "encoder_decoder", prefetch_batches=0)
  for hosts in (1, 2, 3):
    shares = [
      batches_of(built, plan, "encoder_decoder", rows=(host, hosts), prefetch_batches=7)
      for host in range(hosts)
    ]
    for step, batch in enumerate(whole):
      assert row_digests(batch) == [d for share in shares for d in row_digests(share[step])]


def test_a_stream_that_starts_anywhere_has_them(built):
  plan = plan_of(built).tombstone(3, lists_of(built, {"a": range(60)}))
  whole = batches_of(built, plan, "decoder")
  with open_stream(plan, opened(built), feature_converter=CONVERTERS["decoder"]) as stream:
    for step in reversed(range(plan.num_steps)):
      stream.seek(step)
      assert row_digests(next(stream)) == row_digests(whole[step])


def test_what_a_step_saw_and_when_an_example_was_seen_tell_of_it(built):
  plan = plan_of(built, packing="best_fit").tombstone(2, lists_of(built, {"a": [5, 6]}))
  found = list(when_was(plan.on_caches(opened(built)), opened(built), "a", 5, range(plan.num_steps)))
  steps = [row["step"] for row in found]
  assert len(steps) == 2
  for row in found:
    assert row in list(what_was_at(plan.on_caches(opened(built)), opened(built), row["step"]))
    for example in row["examples"]:
      assert example.get("tombstone", False) == (example["index"] in (5, 6) and row["step"] >= 2)


# The plan


def test_the_order_stays_and_the_plan_comes_back_from_its_json(built):
  plan = plan_of(built)
  changed = plan.tombstone(4, lists_of(built, {"a": [1, 3], "b:x": [2]}))
  again = Plan.from_json(changed.to_json())
  assert again == changed
  assert again.to_json() == changed.to_json()
  assert changed.sha256 != plan.sha256
  assert changed.segments == plan.segments
  assert "tombstones" not in json.loads(plan.to_json())


def test_examples_that_are_dead_by_then_are_not_taken_up_again(built):
  once = plan_of(built).tombstone(4, lists_of(built, {"a": [1, 3]}))
  assert once.tombstone(6, lists_of(built, {"a": [1, 3]})) == once
  twice = once.tombstone(6, lists_of(built, {"a": [1, 2]}))
  assert [(t.start_step, dict(t.indices)) for t in twice.tombstones] == [(4, {"a": [1, 3]}), (6, {"a": [2]})]
  earlier = once.tombstone(2, lists_of(built, {"a": [3]}))
  assert list(earlier.silent_steps.items()) == [("a", 1, 4), ("a", 3, 2)]


def test_changes_and_skips_keep_them(built):
  plan = plan_of(built).tombstone(4, lists_of(built, {"a": [1]}))
  assert plan.change(5, batch_size=6).skip(7, 9).tombstones == plan.tombstones


def test_differences_name_the_examples_and_the_step(built):
  plan = plan_of(built)
  one = plan.tombstone(4, lists_of(built, {"a": [1]}))
  other = plan.tombstone(4, lists_of(built, {"a": [1]})).tombstone(7, lists_of(built, {"a": [8]}))
  assert [tuple(difference) for difference in differences(one, other)] == [("tombstones.a[7]", None, [8])]
  assert first_different_step(one, other) == 7
  assert first_different_step(plan, one) == 4
  assert totals(other)["tombstones"] == [
    {"start_step": 4, "examples": {"a": 1}, "reason": "tombstone"},
    {"start_step": 7, "examples": {"a": 1}, "reason": "tombstone"},
  ]


# What is refused


def refusal_of(action, *arguments, **settings):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **settings)
  assert refused.value.fix
  return refused.value


def test_a_converter_without_loss_weights_is_refused_at_the_first_batch(built):
  plan = plan_of(built).tombstone(10, lists_of(built, {"a": [1]}))
  with open_stream(plan, opened(built)) as stream:
    error = refusal_of(next, stream)
  assert (error.kind, error.fields["got"]) == ("tombstones_converter", "inputs, number, targets, weights")


@pytest.mark.parametrize("indices", [[60], [-1, 3], []])
def test_examples_that_a_cache_does_not_have_make_no_list(built, indices):
  error = refusal_of(TombstoneList.of, built["a"].open(), indices)
  assert (error.kind, error.fields["expected"]) == ("index", "at least one index, 0 to 59")


def test_a_list_of_another_cache_is_refused_with_both_sides(built, tmp_path):
  other = caches.build(tmp_path, task="a", num_examples=60, seed=9)
  error = refusal_of(plan_of(built).tombstone, 0, [TombstoneList.of(other.open(), [1])])
  assert (error.kind, error.fields["field"]) == ("plan_cache", "manifest_sha256")
  assert error.fields["got"] == other.open().manifest_sha256


def test_a_list_of_a_task_or_split_that_the_plan_does_not_have_is_refused(built, tmp_path):
  new = caches.build(tmp_path, task="c")
  assert refusal_of(plan_of(built).tombstone, 0, [TombstoneList.of(new.open(), [1])]).kind == "task_unknown"
  held_out = caches.build(tmp_path, task="a", split="validation")
  error = refusal_of(plan_of(built).tombstone, 0, [TombstoneList.of(held_out.open(), [1])])
  assert (error.kind, error.fields["got"]) == ("split", "'validation of a'")


def test_steps_that_are_trained_are_past(built):
  lists = lists_of(built, {"a": [1]})
  assert refusal_of(plan_of(built).tombstone, 4, lists, trained_steps=5).kind == "step_trained"
  assert refusal_of(plan_of(built).tombstone, 10_000, lists).kind == "data_ended"


def test_a_list_comes_back_from_its_file(built, tmp_path):
  wanted = TombstoneList.of(built["a"].open(), [7, 3, 3], reason="a leaked answer")
  (tmp_path / "list.json").write_text(wanted.to_json())
  assert TombstoneList.read(tmp_path / "list.json") == wanted
  assert wanted.indices == [3, 7]


@pytest.mark.parametrize(
  "change",
  [{"version": 2}, {"indices": [3, 1]}, {"indices": []}, {"indices": [True]}, {"task": 1}, {"other": 1}],
  ids=str,
)
def test_a_file_that_is_no_list_is_refused(built, tmp_path, change):
  document = json.loads(TombstoneList.of(built["a"].open(), [3]).to_json()) | change
  (tmp_path / "list.json").write_text(json.dumps(document))
  error = refusal_of(TombstoneList.read, tmp_path / "list.json")
  assert (error.kind, error.fields["path"]) == ("tombstones_invalid", tmp_path / "list.json")
  assert refusal_of(TombstoneList.read, tmp_path / "none.json").kind == "tombstones_missing"


@pytest.mark.parametrize(
  "entry",
  [
    {"start_step": -1, "indices": {"a": [1]}, "reason": ""},
    {"start_step": 0, "indices": {}, "reason": ""},
    {"start_step": 0, "indices": {"a": [2, 1]}, "reason": ""},
    {"start_step": 0, "indices": {"a": [1]}},
  ],
  ids=str,
)
def test_a_plan_whose_tombstones_are_none_is_refused(built, entry):
  document = json.loads(plan_of(built).to_json()) | {"tombstones": [entry]}
  assert refusal_of(Plan.from_json, json.dumps(document)).kind == "plan_invalid"
