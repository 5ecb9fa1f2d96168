"""What the order specification says of every row of a plan over small caches (docs/order.md#seeing-it)."""

import functools
import json

import caches
from expected_rows import ExpectedRows

import oracle


def build_mixture(root):
  """Three tasks below a root: two preshuffled, of which one lies deeper, and one as it was."""
  return {
    "a": caches.build(root, task="a", num_examples=23),
    "b:inner": caches.build(root, task="b:inner", num_examples=10, num_shards=2, block_records=2),
    "c": caches.build_as_is(root, task="c"),
  }


def explained_rows(plan, built, steps):
  """The rows of some steps by the oracle, with the keys of docs/order.md#seeing-it; padding is left out.

  Args:
    plan: of which the JSON is taken.
    built: the caches by task name, as `caches.build` returns them.
    steps: the steps, of which those after the data's end have no rows.
  """
  expected = ExpectedRows(plan, built.values())
  stop = steps.stop if expected.num_steps is None else min(steps.stop, expected.num_steps)
  manifests = {name: json.dumps(cache.manifest) for name, cache in built.items()}
  return [
    {"step": step, "row": number, "task": row.task, "split": plan.split, "epoch": row.epoch}
    | {"unit": row.unit, "shard": row.shard, "place": row.place}
    | {"examples": [_example(manifests[row.task], row.shard, record) for record in row.records]}
    for step in range(steps.start, stop)
    for number, row in enumerate(expected.rows(step))
    if row is not None
  ]


@functools.cache
def _example(manifest, shard, place):
  return oracle.example_at(json.loads(manifest), shard, place)
