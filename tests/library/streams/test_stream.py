"""A stream gives the batches of its plan: to any hosts, from any step, however far ahead it reads."""

import concurrent.futures
import contextlib
import gc
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading

import caches
import numpy as np
import pytest
from etils import epath
from expected_rows import ExpectedRows

import oracle
from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.features.converters import EncoderDecoderConverter
from anystep.features.digest import batch_digest, row_digests
from anystep.features.ragged import Ragged
from anystep.order.epochs import EpochPolicy
from anystep.plans.plan import Plan
from anystep.streams.stream import STATE_VERSION, Stream, open_stream
from anystep.transforms.functions import MapBatch
from anystep.transforms.transform import Transform

BATCH_SIZE = 12
# 50 examples, 12 rows: batches cross epochs, and of 3 epochs the last batch has 6 rows of padding.
ORDERS = [
  {},
  {"num_epochs": 1},
  {"num_epochs": 3, "epoch_policy": "same"},
  {"num_epochs": 3, "epoch_policy": "reshuffle", "seed": 5},
  {"num_epochs": 2, "epoch_policy": "global", "seed": 5, "lanes": 6},
  {"num_epochs": 2, "lanes": 1},
]
NUM_STEPS = 13  # of 3 epochs
CONTAINERS = [containers.ARRAY_RECORD, containers.TFRECORD]


def plan_of(cache, *, batch_size=BATCH_SIZE, feature_lengths=caches.FEATURE_LENGTHS, **order):
  return Plan.start(cache.open(), batch_size=batch_size, feature_lengths=feature_lengths, **order)


def steps_of(plan, *, endless=10):
  return range(endless if plan.num_steps is None else plan.num_steps)


def opened(cache, plan=None, **settings):
  return open_stream(plan or plan_of(cache, num_epochs=3), [cache.root], **settings)


def digests_of(cache, **settings):
  """Digests of a fresh stream's batches."""
  with opened(cache, **settings) as stream:
    return [batch_digest(batch) for batch in stream]


def stream_threads():
  return {thread for thread in threading.enumerate() if thread.name.startswith("anystep-stream")}


@pytest.fixture(scope="module")
def expected_digests(shared_cache):
  """The digests of 3 epochs by the oracle."""
  return [
    caches.oracle_digest(caches.expected_batch(shared_cache, step, batch_size=BATCH_SIZE, num_epochs=3))
    for step in range(NUM_STEPS)
  ]


# What a batch is


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_batches_are_the_examples_that_the_oracle_names(shared_cache, order):
  plan = plan_of(shared_cache, **order)
  with opened(shared_cache, plan) as stream:
    for step in steps_of(plan):
      batch = next(stream)
      expected = caches.expected_batch(shared_cache, step, batch_size=BATCH_SIZE, **order)
      assert batch.keys() == expected[0].keys()
      for name, values in batch.items():
        assert caches.same_array(values, np.stack([row[name] for row in expected])), (step, name)
      assert batch_digest(batch) == caches.oracle_digest(expected)


@pytest.mark.parametrize("order", [order for order in ORDERS if order], ids=str)
def test_the_last_batch_is_filled_with_rows_of_zeros(shared_cache, order):
  plan = plan_of(shared_cache, **order)
  batches = list(opened(shared_cache, plan))
  filled = order["num_epochs"] * 50 - BATCH_SIZE * (len(batches) - 1)
  assert len(batches) == plan.num_steps
  assert 0 < filled <= BATCH_SIZE
  for row in range(BATCH_SIZE):
    is_zero = not any(values[row].any() for values in batches[-1].values())
    stripes = BATCH_SIZE // plan.segments[0].lanes
    lane, stripe = divmod(row, stripes)
    assert is_zero == (stripe * plan.segments[0].lanes + lane >= filled)


def test_batches_keep_dtypes_and_shapes_where_all_rows_are_padding(shared_cache):
  plan = plan_of(shared_cache, num_epochs=1, lanes=1)
  for whole, last_rows in zip(
    opened(shared_cache, plan), opened(shared_cache, plan, rows=slice(2, None)), strict=True
  ):
    for name, values in whole.items():
      assert caches.same_array(last_rows[name], values[2:])


# Layouts, containers and policies


@pytest.fixture(scope="module", params=itertools.product(["preshuffled", "as_is"], CONTAINERS), ids="-".join)
def any_cache(request, tmp_path_factory):
  """A cache of each layout in each container; as_is its files are unequal, and some are empty."""
  layout, container = request.param
  root = tmp_path_factory.mktemp(layout)
  if layout == "preshuffled":
    return caches.build(root, num_examples=50, num_shards=6, block_records=3, container=container)
  sizes = (0, 7, 19, 0, 1, 23, 0)
  return caches.build_as_is(root, shard_sizes=sizes, block_records=3, container=container)


@pytest.mark.parametrize("policy", [None, *EpochPolicy])
@pytest.mark.parametrize("lengths", [caches.FEATURE_LENGTHS, {"inputs": 5}, {}], ids=["all", "one", "none"])
def test_batches_of_any_layout_container_and_policy_are_the_oracles(any_cache, policy, lengths):
  """Through three epochs to the end, whole and by hosts; 50 examples, so that batches cross epochs."""
  plan = Plan.start(
    any_cache.open(), batch_size=12, feature_lengths=lengths, epoch_policy=policy, num_epochs=3, seed=2
  )
  expected = ExpectedRows(plan, [any_cache])
  digests = [expected.digest(step) for step in range(NUM_STEPS)]
  assert expected.num_steps == NUM_STEPS
  with open_stream(plan, any_cache.root) as stream:
    assert [batch_digest(batch) for batch in stream] == digests
  hosts = [open_stream(plan, any_cache.root, rows=(host, 3)) for host in range(3)]
  for parts, digest in zip(zip(*hosts, strict=True), digests, strict=True):
    joined = b"".join(row for part in parts for row in row_digests(part))
    assert hashlib.sha256(joined).hexdigest() == digest


def test_each_layout_has_its_own_policy_by_default(any_cache):
  policy = Plan.start(any_cache.open(), batch_size=4).epoch_policy
  assert policy == ("global" if any_cache.manifest["layout"] == "as_is" else "reshuffle")


@pytest.mark.parametrize("order", [{}, {"epoch_policy": "same"}, {"seed": 3}], ids=str)
def test_examples_are_traced_to_the_file_and_place_that_they_are_in(any_cache, order):
  plan = Plan.start(any_cache.open(), batch_size=12, **order)
  policy = plan.epoch_policy.value
  sources = {name: place for place, name in enumerate(s["name"] for s in any_cache.manifest["source_shards"])}
  for row in oracle.what_was_at(
    any_cache.manifest, 12, 0, 6, **{**order, "epoch_policy": policy, "lanes": plan.segments[0].lanes}
  ):
    found = plan.batch(row["step"], np.array([row["row"]]))
    cache = any_cache.open()
    (shard,), (place,) = cache.source_of(cache.index_of(found.shard, found.place))
    (example,) = row["examples"]
    assert (shard, place) == (example["source_shard"], example["source_place"])
    assert shard == sources[example["source_name"]]


# Hosts


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 6, 12])
def test_hosts_join_to_the_whole_batch(shared_cache, order, hosts):
  plan = plan_of(shared_cache, **order)
  streams = [opened(shared_cache, plan, rows=(host, hosts)) for host in range(hosts)]
  for step in steps_of(plan, endless=6):
    rows = [row for stream in streams for row in row_digests(next(stream))]
    expected = caches.expected_batch(shared_cache, step, batch_size=BATCH_SIZE, **order)
    assert hashlib.sha256(b"".join(rows)).hexdigest() == caches.oracle_digest(expected)
  for stream in streams:
    stream.close()


@pytest.mark.parametrize("rows", [[5, 0, 7], [11], [], [3, 3], np.array([1, 2]), range(4, 8), slice(3, 9, 2)])
def test_any_rows_are_those_of_the_whole_batch(shared_cache, rows):
  numbers = np.arange(BATCH_SIZE)[rows if isinstance(rows, slice) else np.array(rows, int)]
  with opened(shared_cache, rows=rows) as some, opened(shared_cache) as whole:
    assert some.rows_at(0).tolist() == numbers.tolist()
    for part, batch in zip(some, whole, strict=True):
      for name, values in batch.items():
        assert caches.same_array(part[name], values[numbers])


@pytest.mark.parametrize("rows", [(0, 5), (0, 24), (2, 2), (-1, 2), (0, -2)])
def test_hosts_that_cannot_share_a_batch_are_refused(shared_cache, rows):
  with pytest.raises(AnystepError) as refused:
    opened(shared_cache, rows=rows)
  assert (refused.value.code, refused.value.kind) == (78, "rows")
  assert "12 rows" in refused.value.fields["expected"]
  assert refused.value.fields["got"] == rows
  assert "[1, 2, 3, 4, 6, 12]" in refused.value.fix


@pytest.mark.parametrize("rows", [(0, 0), [12], [-1]])
def test_rows_that_no_batch_has_are_refused(shared_cache, rows):
  with pytest.raises(AnystepError) as refused:
    opened(shared_cache, rows=rows)
  assert (refused.value.code, refused.value.kind) == (78, "rows")


# Reading ahead


@pytest.mark.parametrize("prefetch_batches", [0, 1, 4, 100])
def test_reading_ahead_changes_nothing(shared_cache, expected_digests, prefetch_batches):
  assert digests_of(shared_cache, prefetch_batches=prefetch_batches) == expected_digests


@pytest.mark.parametrize("prefetch_batches", [1, 2, 4, 8, 100])
@pytest.mark.parametrize("lengths", [caches.FEATURE_LENGTHS, {}], ids=["filled", "ragged"])
def test_batches_made_ahead_are_made_once(shared_cache, monkeypatch, lengths, prefetch_batches):
  """Where several could not be made together, each would be made when asked for, and right, but late."""
  plan = Plan.start(shared_cache.open(), batch_size=12, num_epochs=3, feature_lengths=lengths)
  made = []

  def note(batch, records):
    made.extend(zip(records.epochs.tolist(), records.indices.tolist(), strict=True))
    return batch

  monkeypatch.setattr(Stream, "batch", None)
  transforms = {"demo": MapBatch(note)}
  with opened(shared_cache, plan, transforms=transforms, prefetch_batches=prefetch_batches) as stream:
    found = [batch_digest(batch) for batch in stream]
  expected = ExpectedRows(plan, [shared_cache])
  assert found == [expected.digest(step) for step in range(NUM_STEPS)]
  assert sorted(made) == [(epoch, index) for epoch in range(3) for index in range(50)]


@pytest.mark.parametrize("prefetch_batches", [1, 4])
def test_batches_are_made_ahead_of_being_asked_for(shared_cache, prefetch_batches):
  made = []
  ready = threading.Semaphore(0)

  def note(batch, records):
    made.append(len(records.indices))
    ready.release(made[-1])
    return batch

  transforms = {"demo": MapBatch(note)}
  with opened(shared_cache, transforms=transforms, prefetch_batches=prefetch_batches) as stream:
    next(stream)
    for _ in range((1 + prefetch_batches) * BATCH_SIZE):
      assert ready.acquire(timeout=30)
    assert sum(made) == (1 + prefetch_batches) * BATCH_SIZE


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_what_fails_is_raised_where_its_batch_is_asked_for(own_cache, prefetch_batches):
  plan = plan_of(own_cache, num_epochs=3)
  with opened(own_cache, plan, prefetch_batches=prefetch_batches) as stream:
    path = own_cache.directory / "train.array_record-00002-of-00004"
    caches.flip(path, 100)
    with pytest.raises(AnystepError) as refused:
      next(stream)
    assert (refused.value.code, refused.value.kind) == (65, "file_changed")
    assert str(refused.value.fields["path"]) == str(path)


@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 4, 8, 100])
@pytest.mark.parametrize("step", [0, 2, 5, NUM_STEPS - 1])
def test_what_fails_is_raised_at_its_step_until_it_works_again(
  shared_cache, expected_digests, step, prefetch_batches
):
  """Not at those before, with which it may have been made, and those that follow are theirs."""
  plan = plan_of(shared_cache, num_epochs=3)
  row = next(row for row in ExpectedRows(plan, [shared_cache]).rows(step) if row)
  failing = [(row.epoch, row.index)]

  def fail(batch, records):
    made = set(zip(records.epochs.tolist(), records.indices.tolist(), strict=True))
    if made.intersection(failing):
      raise OSError("not now")
    return batch

  transforms = {"demo": MapBatch(fail)}
  with opened(shared_cache, transforms=transforms, prefetch_batches=prefetch_batches) as stream:
    found = [batch_digest(next(stream)) for _ in range(step)]
    for _ in range(2):
      with pytest.raises(OSError, match="not now"):
        next(stream)
      assert stream.step == step
    failing.clear()
    found += [batch_digest(batch) for batch in stream]
  assert found == expected_digests


@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 4, 8, 100])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_failure_that_passes_changes_no_batch(shared_cache, expected_digests, call, prefetch_batches):
  calls = itertools.count(1)

  def fail_once(batch, records):
    if next(calls) == call:
      raise OSError("this once")
    return batch

  transforms = {"demo": MapBatch(fail_once)}
  with opened(shared_cache, transforms=transforms, prefetch_batches=prefetch_batches) as stream:
    found = []
    while stream.step < NUM_STEPS:
      with contextlib.suppress(OSError):
        found.append(batch_digest(next(stream)))
  assert found == expected_digests


# Going anywhere


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_a_fresh_stream_goes_on_from_any_state(shared_cache, expected_digests, prefetch_batches):
  with opened(shared_cache, prefetch_batches=prefetch_batches) as stream:
    for step in range(NUM_STEPS + 1):
      state = json.loads(json.dumps(stream.get_state()))
      again = open_stream(
        Plan.from_json(stream.plan.to_json()), [shared_cache.root], prefetch_batches=prefetch_batches
      )
      again.set_state(state)
      assert again.step == step
      assert again.get_state() == state
      assert [batch_digest(batch) for batch in again] == expected_digests[step:]
      if step < NUM_STEPS:
        next(stream)


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_seeking_back_and_forth_gives_each_steps_batch(shared_cache, expected_digests, prefetch_batches):
  with opened(shared_cache, prefetch_batches=prefetch_batches) as stream:
    for step in (0, 7, 6, 5, 0, 0, 12, 11, 3, 4, 1):
      stream.seek(step)
      assert stream.step == step
      for after in range(min(3, NUM_STEPS - step)):
        assert batch_digest(next(stream)) == expected_digests[step + after]
        assert stream.step == step + after + 1


def test_a_batch_looked_at_on_its_own_leaves_the_stream_where_it_stands(shared_cache, expected_digests):
  with opened(shared_cache) as stream:
    next(stream)
    for step in (12, 0, 5):
      assert batch_digest(stream.batch(step)) == expected_digests[step]
    assert stream.step == 1
    assert batch_digest(next(stream)) == expected_digests[1]


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_a_stream_that_ended_stays_at_its_end(shared_cache, prefetch_batches):
  stream = opened(shared_cache, prefetch_batches=prefetch_batches)
  assert len(list(stream)) == NUM_STEPS
  assert stream.step == NUM_STEPS
  for _ in range(2):
    with pytest.raises(StopIteration):
      next(stream)
  assert stream.get_state() == {"version": STATE_VERSION, "step": NUM_STEPS}


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_a_stream_that_ended_can_go_back(shared_cache, expected_digests, prefetch_batches):
  stream = opened(shared_cache, prefetch_batches=prefetch_batches)
  assert len(list(stream)) == NUM_STEPS
  stream.seek(4)
  assert [batch_digest(batch) for batch in stream] == expected_digests[4:]


@pytest.mark.parametrize(
  "state",
  [
    {},
    {"version": STATE_VERSION},
    {"step": 3},
    {"version": STATE_VERSION + 1, "step": 3},
    {"version": None, "step": 3},
    {"version": STATE_VERSION, "step": 3, "host": 0},
    [],
    None,
    3,
  ],
)
def test_a_state_of_another_form_is_refused_with_both_sides(shared_cache, state):
  with opened(shared_cache) as stream:
    next(stream)
    with pytest.raises(AnystepError) as refused:
      stream.set_state(state)
    assert (refused.value.code, refused.value.kind) == (76, "stream_state")
    assert refused.value.fields["got"] == state
    assert refused.value.fields["expected"].keys() == {"version", "step"}
    assert stream.step == 1


@pytest.mark.parametrize("step", ["3", 3.0, None, -1])
def test_a_state_whose_step_is_none_is_refused(shared_cache, step):
  with opened(shared_cache) as stream, pytest.raises(AnystepError) as refused:
    stream.set_state({"version": STATE_VERSION, "step": step})
  assert (refused.value.code, refused.value.kind) == (76, "stream_state")


# Ending


@pytest.mark.parametrize("batches", [0, 1, NUM_STEPS])
def test_a_closed_stream_leaves_no_thread(shared_cache, batches):
  before = stream_threads()
  stream = opened(shared_cache, prefetch_batches=3)
  for _ in range(batches):
    next(stream)
  assert (1 <= len(stream_threads() - before) <= 3) == bool(batches)
  stream.close()
  stream.close()
  assert stream_threads() <= before


def test_leaving_a_with_block_closes_the_stream(shared_cache):
  before = stream_threads()
  with pytest.raises(KeyError), opened(shared_cache) as stream:  # noqa: PT012
    next(stream)
    raise KeyError
  assert stream_threads() <= before


def test_a_stream_read_to_its_end_leaves_no_thread(shared_cache):
  before = stream_threads()
  assert len(list(opened(shared_cache))) == NUM_STEPS
  assert stream_threads() <= before


@pytest.mark.parametrize("prefetch_batches", [1, 4])
def test_a_stream_closed_or_sent_elsewhere_in_the_middle_leaves_no_thread(shared_cache, prefetch_batches):
  before = stream_threads()
  stream = opened(shared_cache, prefetch_batches=prefetch_batches)
  for step in (0, 9, 3, 12, 1):
    stream.seek(step)
    next(stream)
    assert len(stream_threads() - before) <= 3
    if step in (3, 12):
      stream.close()
      assert stream_threads() <= before
  stream.close()
  assert stream_threads() <= before


def test_a_stream_that_nobody_has_any_more_ends_its_threads(shared_cache):
  before = stream_threads()
  stream = opened(shared_cache, prefetch_batches=4)
  next(stream)
  threads = stream_threads() - before
  assert threads
  del stream
  gc.collect()
  for thread in threads:
    thread.join(timeout=30)
    assert not thread.is_alive()


ABANDONED = """
import sys, pathlib
import numpy as np
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

plan = Plan.from_json(pathlib.Path(sys.argv[2]).read_text())
stream = open_stream(plan, sys.argv[1], prefetch_batches=4)
print(next(stream)["number"].tolist())
if sys.argv[3] == "raise":
  raise KeyError("something else")
if sys.argv[3] == "forget":
  del stream
"""


@pytest.mark.parametrize(("ending", "status"), [("end", 0), ("raise", 1), ("forget", 0)])
def test_a_stream_that_is_left_open_does_not_keep_the_program_from_ending(
  checkout, shared_cache, tmp_path, ending, status
):
  plan = plan_of(shared_cache)
  (tmp_path / "plan.json").write_text(plan.to_json())
  done = subprocess.run(
    [sys.executable, "-c", ABANDONED, shared_cache.root, tmp_path / "plan.json", ending],
    env=os.environ | {"PYTHONPATH": str(checkout)},
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )
  assert done.returncode == status, done.stderr
  numbers = [int(row["number"]) for row in ExpectedRows(plan, [shared_cache]).batch(0)]
  assert json.loads(done.stdout) == numbers


def test_batches_asked_for_by_several_threads_are_each_steps_own(shared_cache, expected_digests):
  steps = [*range(NUM_STEPS)] * 3
  with opened(shared_cache) as stream, concurrent.futures.ThreadPoolExecutor(4) as threads:
    found = list(threads.map(lambda step: batch_digest(stream.batch(step)), steps))
  assert found == [expected_digests[step] for step in steps]


# What examples go through


def test_transforms_see_the_examples_of_each_batch_with_their_epochs_and_indices(shared_cache):
  order = {"num_epochs": 3, "seed": 3}
  seen = []

  def transform(batch, records):
    seen.append((records.epochs.tolist(), records.indices.tolist()))
    values = batch["inputs"].values + np.repeat(records.epochs * 10_000, batch["inputs"].lengths)
    return {"inputs": Ragged(values, batch["inputs"].lengths), "number": batch["number"]}

  plan = plan_of(shared_cache, **order)
  transforms = {"demo": MapBatch(transform)}
  with opened(shared_cache, plan, transforms=transforms, prefetch_batches=0) as stream:
    for step in steps_of(plan):
      batch = next(stream)
      expected = oracle.what_was_at(shared_cache.manifest, BATCH_SIZE, step, step + 1, **order)
      indices = [row["examples"][0]["index"] for row in expected]
      assert seen[-1] == ([row["epoch"] for row in expected], indices)
      assert batch.keys() == {"inputs", "number"}
      assert batch["inputs"].shape == (BATCH_SIZE, 5)
      for row, index in zip(expected, indices, strict=True):
        example = shared_cache.examples[index]
        shifted = caches.padded_row({"inputs": example["inputs"] + 10_000 * row["epoch"]})
        assert batch["inputs"][row["row"]].tolist() == shifted["inputs"].tolist()


def test_transforms_of_other_tasks_are_not_called(shared_cache, expected_digests):
  transforms = {"other": MapBatch(None, identity="never called"), "demo": None}
  assert digests_of(shared_cache, transforms=transforms) == expected_digests


def test_a_misspelled_task_is_refused(shared_cache):
  with pytest.raises(AnystepError) as refused:
    opened(shared_cache, transforms={"Demo": MapBatch(None, identity="never called")})
  assert (refused.value.code, refused.value.kind) == (64, "task_unknown")


def test_the_converter_gets_examples_and_lengths_and_its_features_are_the_batch(shared_cache):
  def converter(batch, feature_lengths, counts):
    assert feature_lengths == caches.FEATURE_LENGTHS
    assert counts is None
    return {"twice": 2 * batch["number"]}

  with opened(shared_cache, feature_converter=converter) as converted, opened(shared_cache) as plain:
    for batch, expected in zip(converted, plain, strict=True):
      assert batch.keys() == {"twice"}
      assert caches.same_array(batch["twice"], 2 * expected["number"])


class SeqiosConverter:
  def get_model_feature_lengths(self):
    pass

  def __call__(self, dataset, lengths):
    pass


@pytest.mark.parametrize(
  ("converter", "fix"),
  [
    (SeqiosConverter(), "native_converter"),
    (EncoderDecoderConverter, "instance"),
    ("encoder-decoder", "instance"),
  ],
)
def test_what_is_no_converter_is_refused_before_anything_is_read(shared_cache, converter, fix):
  with pytest.raises(AnystepError) as refused:
    opened(shared_cache, feature_converter=converter)
  assert (refused.value.code, refused.value.kind) == (78, "feature_converter")
  assert fix in refused.value.fix


@pytest.mark.parametrize("prefetch_batches", [-1, 1.5, True, None])
def test_a_number_of_batches_ahead_that_is_none_is_refused(shared_cache, prefetch_batches):
  with pytest.raises(AnystepError) as refused:
    opened(shared_cache, prefetch_batches=prefetch_batches)
  assert (refused.value.code, refused.value.kind) == (78, "prefetch_batches")


def test_sequences_of_one_length_are_sequences(shared_cache):
  def dense(batch, records):
    return {"inputs": np.arange(3 * len(records.indices), dtype=np.int32).reshape(-1, 3)}

  plan = plan_of(shared_cache, feature_lengths={"inputs": 5})
  with opened(shared_cache, plan, transforms={"demo": MapBatch(dense)}) as stream:
    assert next(stream)["inputs"].shape[1] == 5


class Dropping(Transform):
  identity = "drops the last"

  def __call__(self, batch, records):
    return {"number": batch["number"][:-1]}


def test_a_transform_that_drops_unseen_is_refused(shared_cache):
  with opened(shared_cache, transforms={"demo": Dropping()}, prefetch_batches=0) as stream:
    with pytest.raises(AnystepError) as refused:
      stream.batch(0)
    assert (refused.value.code, refused.value.kind) == (78, "transform_output")


class Nameless(Transform):
  def __call__(self, batch, records):
    return batch


def test_a_transform_without_an_identity_is_refused(shared_cache):
  with pytest.raises(AnystepError) as refused:
    opened(shared_cache, transforms={"demo": Nameless()})
  assert (refused.value.code, refused.value.kind) == (78, "transform")


def test_texts_are_filled_with_empty_ones(shared_cache):
  def texts(batch, records):
    return {"words": Ragged.of_rows([np.array([b"a"] * (k % 3), object) for k in records.indices], object)}

  plan = plan_of(shared_cache, feature_lengths={"words": 2}, num_epochs=1)
  with opened(shared_cache, plan, transforms={"demo": MapBatch(texts)}) as stream:
    words = np.concatenate([batch["words"] for batch in stream])
  assert set(words.reshape(-1).tolist()) == {b"a", b""}


# Where caches are


@pytest.mark.parametrize("as_path", [str, epath.Path, lambda path: [path], lambda path: (str(path),)])
def test_a_root_is_any_path_or_several(shared_cache, as_path, expected_digests):
  plan = plan_of(shared_cache, num_epochs=3)
  with open_stream(plan, as_path(shared_cache.root)) as stream:
    assert batch_digest(next(stream)) == expected_digests[0]


def test_a_root_is_a_plain_path_as_for_open_cache(shared_cache, expected_digests):
  with open_stream(plan_of(shared_cache, num_epochs=3), pathlib.Path(shared_cache.root)) as stream:
    assert batch_digest(next(stream)) == expected_digests[0]


def test_the_first_root_that_has_the_cache_is_read(shared_cache, own_cache, tmp_path):
  (tmp_path / "empty").mkdir()
  plan = plan_of(shared_cache, num_epochs=3)
  caches.flip(shared_cache.at(own_cache.root).directory / "COMPLETED", -2)
  with open_stream(plan, [tmp_path / "empty", shared_cache.root, own_cache.root]) as stream:
    next(stream)
  with pytest.raises(AnystepError) as refused:
    open_stream(plan, [tmp_path / "empty", own_cache.root, shared_cache.root])
  assert refused.value.kind == "manifest_changed"


def test_a_cache_that_no_root_has_is_missed_in_the_first(shared_cache, tmp_path):
  with pytest.raises(AnystepError) as refused:
    open_stream(plan_of(shared_cache), [tmp_path / "one", tmp_path / "other"])
  assert (refused.value.code, refused.value.kind) == (66, "cache_missing")
  assert "one" in str(refused.value.fields["path"])


def test_no_roots_are_refused(shared_cache):
  with pytest.raises(AnystepError) as refused:
    open_stream(plan_of(shared_cache), [])
  assert (refused.value.code, refused.value.kind) == (78, "cache_dirs")


def test_another_cache_of_the_same_task_is_refused_with_both_sides(shared_cache, tmp_path):
  other = caches.build(tmp_path, seed=1)
  with pytest.raises(AnystepError) as refused:
    open_stream(plan_of(shared_cache), [other.root])
  assert (refused.value.code, refused.value.kind) == (76, "plan_cache")
  fields = refused.value.fields
  assert (fields["task"], fields["field"]) == ("demo", "manifest_sha256")
  assert fields["expected"] == shared_cache.open().manifest_sha256
  assert fields["got"] == other.open().manifest_sha256


# Where the data lies


@pytest.fixture(params=["copy", "symlink", "relative", "symlinked task"])
def elsewhere(request, any_cache, tmp_path, monkeypatch):
  """Another way to the same data."""
  if request.param == "copy":
    return shutil.copytree(any_cache.root, tmp_path / "copy")
  if request.param == "symlink":
    (tmp_path / "link").symlink_to(any_cache.root, target_is_directory=True)
    return tmp_path / "link"
  if request.param == "relative":
    monkeypatch.chdir(any_cache.root.parent)
    return pathlib.Path("..") / any_cache.root.parent.name / any_cache.root.name
  (tmp_path / "root").mkdir()
  for name in os.listdir(any_cache.root):
    (tmp_path / "root" / name).symlink_to(any_cache.root / name, target_is_directory=True)
  return tmp_path / "root"


def test_data_that_moved_goes_on_by_the_same_plan(any_cache, elsewhere):
  plan = plan_of(any_cache, num_epochs=2)
  expected = ExpectedRows(plan, [any_cache])
  with open_stream(Plan.from_json(plan.to_json()), elsewhere) as stream:
    stream.set_state({"version": 1, "step": 4})
    assert [batch_digest(batch) for batch in stream] == [
      expected.digest(step) for step in range(4, expected.num_steps)
    ]
  moved = any_cache.at(elsewhere).open()
  assert repr(moved) == repr(any_cache.open())
  assert plan_of(any_cache.at(elsewhere), num_epochs=2).to_json() == plan.to_json()


READ_ELSEWHERE = """
import json, pickle, sys
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

given = pickle.load(sys.stdin.buffer)
found = {}
for number, (cache, plan_json) in enumerate(given):
  with open_stream(Plan.from_json(plan_json), {cache.manifest.task: cache}) as stream:
    found[number] = [repr(cache), repr(cache[3]["number"]), [batch_digest(batch) for batch in stream]]
print(json.dumps(list(found.values())))
"""


def test_a_pickled_cache_reads_the_same_in_another_process(checkout, tmp_path):
  built = [
    caches.build_as_is(tmp_path / container, shard_sizes=(9, 0, 11), container=container)
    if as_is
    else caches.build(tmp_path / container, task="of:b", num_examples=20, container=container)
    for container in CONTAINERS
    for as_is in (True, False)
  ]
  plans = [plan_of(cache, num_epochs=2) for cache in built]
  opened_caches = [cache.open() for cache in built]
  opened_caches[0][1]  # what is open and held stays here
  done = subprocess.run(
    [sys.executable, "-c", READ_ELSEWHERE],
    input=pickle.dumps([(c, plan.to_json()) for c, plan in zip(opened_caches, plans, strict=True)]),
    env=os.environ | {"PYTHONPATH": str(checkout)},
    capture_output=True,
    check=False,
    timeout=120,
  )
  assert (done.returncode, done.stderr.decode()) == (0, "")
  expected = [ExpectedRows(plan, [cache]) for cache, plan in zip(built, plans, strict=True)]
  assert json.loads(done.stdout) == [
    [repr(cache), repr(cache[3]["number"]), [rows.digest(step) for step in range(rows.num_steps)]]
    for cache, rows in zip(opened_caches, expected, strict=True)
  ]
