"""A stream gives the batches of its plan: to any hosts, from any step, however far ahead it reads."""

import hashlib
import json
import pathlib
import threading

import caches
import numpy as np
import pytest
from etils import epath

import oracle
from anystep.digest import batch_digest, row_digests
from anystep.errors import AnystepError
from anystep.examples import Ragged
from anystep.plan import Plan
from anystep.stream import STATE_VERSION, open_stream

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


def plan_of(cache, *, batch_size=BATCH_SIZE, **order):
  return Plan.start(cache.open(), batch_size=batch_size, feature_lengths=caches.FEATURE_LENGTHS, **order)


def steps_of(plan, *, endless=10):
  return range(endless if plan.num_steps is None else plan.num_steps)


def opened(cache, plan=None, **settings):
  return open_stream(plan or plan_of(cache, num_epochs=3), [cache.root], **settings)


def digests_of(cache, **settings):
  """Digests of a fresh stream's batches."""
  with opened(cache, **settings) as stream:
    return [batch_digest(batch) for batch in stream]


def stream_threads():
  return [thread for thread in threading.enumerate() if thread.name.startswith("anystep-stream")]


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
    assert some.rows.tolist() == numbers.tolist()
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


@pytest.mark.parametrize("prefetch_batches", [1, 4])
def test_batches_are_made_ahead_of_being_asked_for(shared_cache, prefetch_batches):
  made = []
  ready = threading.Semaphore(0)

  def note(batch, records):
    made.append(len(records.indices))
    ready.release()
    return batch

  with opened(shared_cache, transforms={"demo": note}, prefetch_batches=prefetch_batches) as stream:
    next(stream)
    for _ in range(1 + prefetch_batches):
      assert ready.acquire(timeout=30)
    assert len(made) == 1 + prefetch_batches


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


@pytest.mark.parametrize(
  "prefetch_batches",
  [
    0,
    pytest.param(
      2,
    ),
  ],
)
def test_a_batch_that_failed_once_is_made_when_asked_for_again(
  shared_cache, expected_digests, prefetch_batches
):
  calls = []

  def fail_once(batch, records):
    calls.append(records)
    if len(calls) == 3:
      raise OSError("the third batch, this once")
    return batch

  with opened(shared_cache, transforms={"demo": fail_once}, prefetch_batches=prefetch_batches) as stream:
    found = [batch_digest(next(stream)) for _ in range(2)]
    with pytest.raises(OSError, match="this once"):
      next(stream)
    assert stream.step == 2
    found += [batch_digest(next(stream)) for _ in range(4)]
  assert found == expected_digests[:6]


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


@pytest.mark.parametrize(
  "prefetch_batches",
  [
    0,
    pytest.param(
      2,
    ),
  ],
)
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
  assert batches == 0 or len(stream_threads()) == len(before) + 1
  stream.close()
  stream.close()
  assert stream_threads() == before


def test_leaving_a_with_block_closes_the_stream(shared_cache):
  before = stream_threads()
  with pytest.raises(KeyError), opened(shared_cache) as stream:  # noqa: PT012
    next(stream)
    raise KeyError
  assert stream_threads() == before


def test_a_stream_read_to_its_end_leaves_no_thread(shared_cache):
  before = stream_threads()
  assert len(list(opened(shared_cache))) == NUM_STEPS
  assert stream_threads() == before


# What examples go through


def test_transforms_see_the_examples_of_each_batch_with_their_epochs_and_indices(shared_cache):
  order = {"num_epochs": 3, "seed": 3}
  seen = []

  def transform(batch, records):
    seen.append((records.epochs.tolist(), records.indices.tolist()))
    values = batch["inputs"].values + np.repeat(records.epochs * 10_000, batch["inputs"].lengths)
    return {"inputs": Ragged(values, batch["inputs"].lengths), "number": batch["number"]}

  plan = plan_of(shared_cache, **order)
  with opened(shared_cache, plan, transforms={"demo": transform}, prefetch_batches=0) as stream:
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
  assert digests_of(shared_cache, transforms={"other": None}) == expected_digests


def test_the_converter_gets_examples_and_lengths_and_its_features_are_the_batch(shared_cache):
  def converter(batch, feature_lengths):
    assert feature_lengths == caches.FEATURE_LENGTHS
    return {"twice": 2 * batch["number"]}

  with opened(shared_cache, feature_converter=converter) as converted, opened(shared_cache) as plain:
    for batch, expected in zip(converted, plain, strict=True):
      assert batch.keys() == {"twice"}
      assert caches.same_array(batch["twice"], 2 * expected["number"])


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
