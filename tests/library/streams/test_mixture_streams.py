"""A mixture's batches are the oracle's: to any hosts, from any step, through any chain of changes."""

import contextlib
import hashlib
import itertools
import json

import caches
import numpy as np
import pytest
from expected_rows import ExpectedRows
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.caches.read_pool import ReadPool
from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest, row_digests
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.plans.plan import PADDING_TASK, Plan
from anystep.streams.stream import Stream, open_stream
from anystep.transforms.functions import Map, MapBatch

CONTAINERS = [containers.ARRAY_RECORD, containers.TFRECORD]
# Name: N, S, g. One task has one shard, one has blocks that its shards' sizes are no multiples of.
SHAPES = {"a": (50, 4, 4), "b:x": (31, 1, 8), "c": (97, 6, 3), "d": (64, 8, 2)}
RATES = {"a": 1, "b:x": 0.5, "c": 2}
BATCH_SIZE = 24
# Each number of hosts, each number of batches made ahead, and the extremes of both; the rest is for the soak.
IN_CI = [(1, 0), (1, 10), (2, 4), (3, 1), (4, 10), (6, 0), (8, 1), (8, 10)]
HOSTS_AND_AHEAD = [
  pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.soak)
  for pair in itertools.product([1, 2, 3, 4, 6, 8], [0, 1, 4, 10])
]
OF_TASK = {name: 100_000 * k for k, name in enumerate(SHAPES)}


@pytest.fixture(scope="module", params=CONTAINERS)
def built(request, tmp_path_factory):
  """The caches of all tasks, by name."""
  root = tmp_path_factory.mktemp("mixture")
  return {
    name: caches.build(
      root,
      task=name,
      num_examples=n,
      num_shards=s,
      block_records=g,
      container=request.param,
      example_of=lambda ordinal, name=name: caches.example_of(OF_TASK[name] + ordinal),
    )
    for name, (n, s, g) in SHAPES.items()
  }


def opened(built, names):
  """Fresh caches of one fresh pool."""
  pool = ReadPool()
  return {name: built[name].open(pool=pool) for name in names}


def plan_of(built, *, rates=RATES, batch_size=BATCH_SIZE, lengths=caches.FEATURE_LENGTHS, **order):
  return Plan.start(
    opened(built, rates).values(), rates=rates, batch_size=batch_size, feature_lengths=lengths, **order
  )


def stream_of(built, plan, **settings):
  """A stream of fresh objects all through, the plan too."""
  return open_stream(Plan.from_json(plan.to_json()), opened(built, plan.tasks), **settings)


def refusal_of(action, *arguments, **settings):
  with pytest.raises(AnystepError) as refused:
    action(*arguments, **settings)
  assert refused.value.fix
  return refused.value


def joined_digest(batches):
  """The digest of a batch from the parts that hosts have of it."""
  return hashlib.sha256(b"".join(row for batch in batches for row in row_digests(batch))).hexdigest()


# What a batch is, to whom it goes, and where one starts


ORDERS = {
  "one task": {"rates": {"c": 1}, "num_epochs": 2},
  "one task, 12 lanes": {"rates": {"c": 1}, "num_epochs": 2, "lanes": 12},
  "three tasks": {"num_epochs": 2},
  "three tasks, 4 lanes": {"num_epochs": 2, "lanes": 4, "seed": 3},
}


@pytest.fixture(scope="module", params=ORDERS)
def planned(request, built):
  """A plan and the oracle's digests of its batches."""
  plan = plan_of(built, **ORDERS[request.param])
  expected = ExpectedRows(plan, built.values())
  assert plan.num_steps == expected.num_steps > 4
  return plan, [expected.digest(step) for step in range(expected.num_steps)]


@pytest.mark.parametrize(("hosts", "prefetch_batches"), HOSTS_AND_AHEAD)
def test_batches_are_the_oracles_for_any_hosts_however_far_ahead_from_any_start(
  built, planned, hosts, prefetch_batches
):
  plan, digests = planned
  with contextlib.ExitStack() as stack:
    streams = [
      stack.enter_context(stream_of(built, plan, rows=(host, hosts), prefetch_batches=prefetch_batches))
      for host in range(hosts)
    ]
    for start in (len(digests) - 1, len(digests) // 2, 0):
      for stream in streams:
        stream.set_state({"version": 1, "step": start})
      found = [joined_digest(parts) for parts in itertools.islice(zip(*streams, strict=True), 3)]
      assert found == digests[start : start + 3]


@pytest.mark.parametrize("prefetch_batches", [0, pytest.param(1, marks=pytest.mark.soak), 4])
def test_fresh_objects_go_on_from_any_step(built, planned, prefetch_batches):
  plan, digests = planned
  with stream_of(built, plan, prefetch_batches=prefetch_batches) as stream:
    for step in range(len(digests) + 1):
      state = stream.get_state()
      assert state == {"version": 1, "step": step}
      with stream_of(built, plan, prefetch_batches=prefetch_batches) as again:
        again.set_state(json.loads(json.dumps(state)))
        assert [batch_digest(batch) for batch in again] == digests[step:]
      if step < len(digests):
        next(stream)


@pytest.mark.parametrize("policy", ["same", "reshuffle", "global"])
def test_later_epochs_have_the_policys_order(built, policy):
  plan = plan_of(built, epoch_policy=policy, seed=7)
  expected = ExpectedRows(plan, built.values())
  # Task b:x is in its sixth epoch by then, c in its third.
  with stream_of(built, plan) as stream:
    for step in [0, 3, 10, 11, 25, 45]:
      stream.seek(step)
      assert batch_digest(next(stream)) == expected.digest(step)
  assert max(row.epoch for row in expected.rows(45)) >= 5


@pytest.mark.parametrize("lanes", [1, 8])
def test_rows_after_the_end_are_zeros_and_ragged_ones_empty(built, lanes):
  plan = plan_of(built, num_epochs=1, lanes=lanes, lengths={"inputs": 5})
  expected = ExpectedRows(plan, built.values())
  last = expected.num_steps - 1
  padding = [number for number, row in enumerate(expected.rows(last)) if row is None]
  assert 0 < len(padding) < BATCH_SIZE
  with stream_of(built, plan) as stream:
    batches = list(stream)
  assert [batch_digest(batch) for batch in batches] == [expected.digest(step) for step in range(last + 1)]
  for name in ("targets", "weights"):
    assert isinstance(batches[last][name], Ragged)
    assert not batches[last][name].lengths[padding].any()
  assert not batches[last]["number"][padding].any()
  assert not batches[last]["inputs"][padding].any()


@pytest.mark.parametrize(
  "transforms",
  [{}, {"b:x": MapBatch(lambda batch, records: batch)}, {"b:x": Map(dict)}],
  ids=["none", "of batches", "of examples"],
)
def test_a_host_whose_rows_are_all_padding_gets_rows_of_the_same_form(built, transforms):
  plan = plan_of(built, num_epochs=1, lanes=1, lengths={"inputs": 5})
  last = plan.num_steps - 1
  padding = np.flatnonzero(plan.batch(last).task == PADDING_TASK).tolist()
  with stream_of(built, plan, rows=padding, transforms=transforms) as stream:
    batch = stream.batch(last)
    before = stream.batch(0)
  assert batch.keys() == before.keys()
  for name, values in batch.items():
    assert len(values) == len(padding)
    if isinstance(values, Ragged):
      assert values.values.shape == (0, *before[name].values.shape[1:])
      assert values.values.dtype == before[name].values.dtype
    else:
      assert (values.dtype, values.shape) == (before[name].dtype, before[name].shape)
      assert not values.any()


# Chains of changes


def changed(plan, built):
  """The plan through rates, batch size, lanes, and tasks that leave, return and come anew; [step, plan]."""
  chain = [(0, plan)]

  def then(step, made):
    chain.append((step, made))
    return made

  plan = then(2, plan.change(2, rates={"a": 3, "b:x": 1, "c": 1}))
  plan = then(4, plan.change(4, batch_size=36))
  plan = then(6, plan.change(6, lanes=6))
  plan = then(7, plan.change(7, rates={"a": 1, "c": 2}))
  plan = then(9, plan.change(9, rates={"a": 1, "c": 2, "d": 5}, caches=[built["d"].open()], batch_size=24))
  plan = then(11, plan.change(11, rates={"b:x": 2, "d": 1}))
  plan = then(13, plan.skip(13, 17))
  plan = then(15, plan.change(15, rates={"a": 1, "b:x": 1, "c": 1, "d": 1}, lanes=4))
  return chain


@pytest.mark.parametrize("policy", ["reshuffle", "global"])
def test_data_through_a_chain_of_changes_is_the_oracles(built, policy):
  chain = changed(plan_of(built, epoch_policy=policy), built)
  past = []
  for step, plan in chain:
    expected = ExpectedRows(plan, built.values())
    digests = [expected.digest(number) for number in range(step + 4)]
    # What was trained on is never edited.
    assert digests[:step] == past[:step]
    past = digests
    with stream_of(built, plan) as stream:
      assert [batch_digest(batch) for batch in itertools.islice(stream, step + 4)] == digests


def test_every_example_comes_as_often_as_any_other_through_changes(built):
  *_, (_, plan) = [(step, plan) for step, plan in changed(plan_of(built), built) if step < 13]
  with stream_of(built, plan) as stream:
    numbers = np.concatenate([batch["number"] for batch in itertools.islice(stream, 40)])
  for name, (num_examples, _, _) in SHAPES.items():
    own = numbers[(numbers >= OF_TASK[name]) & (numbers < OF_TASK[name] + num_examples)]
    counts = np.bincount(own - OF_TASK[name], minlength=num_examples)
    assert counts.max() - counts.min() <= 1, name
    assert len(own) > num_examples or name == "c"


def test_a_skip_makes_a_step_what_a_later_one_was(built):
  before = plan_of(built)
  after = before.skip(5, 9)
  with stream_of(built, before) as old, stream_of(built, after) as new:
    for step in range(5):
      assert batch_digest(new.batch(step)) == batch_digest(old.batch(step))
    for step in range(5, 12):
      assert batch_digest(new.batch(step)) == batch_digest(old.batch(step + 4))


@given(data=st.data())
@settings(deadline=None, max_examples=25, derandomize=True)
def test_data_through_any_chain_is_the_oracles(built, data):
  rates = st.dictionaries(st.sampled_from(sorted(SHAPES)), st.sampled_from([0.5, 1, 2, 3]), min_size=1)
  plan = plan_of(built, rates=data.draw(rates), num_epochs=data.draw(st.sampled_from([None, None, 6])))
  step = 0
  for action in data.draw(st.lists(st.sampled_from(["rates", "batch_size", "lanes", "skip"]), max_size=5)):
    step += data.draw(st.integers(0, 3))
    with contextlib.suppress(AnystepError):  # The data may end before.
      if action == "rates":
        new = data.draw(rates)
        unknown = [built[name].open() for name in new if name not in plan.tasks]
        plan = plan.change(step, rates=new, caches=unknown)
      elif action == "batch_size":
        plan = plan.change(step, batch_size=data.draw(st.sampled_from([6, 24, 30])))
      elif action == "lanes":
        plan = plan.change(step, lanes=data.draw(st.sampled_from([1, 2, 6])))
      else:
        plan = plan.skip(step, step + data.draw(st.integers(1, 4)))
  expected = ExpectedRows(plan, built.values())
  assert plan.num_steps == expected.num_steps
  stop = step + 4 if plan.num_steps is None else min(step + 4, plan.num_steps)
  with stream_of(built, plan, prefetch_batches=data.draw(st.sampled_from([0, 2]))) as stream:
    found = [batch_digest(batch) for batch in itertools.islice(stream, stop)]
  assert found == [expected.digest(number) for number in range(stop)]


def test_batches_of_several_sizes_and_mixtures_are_made_together(built, monkeypatch):
  *_, (_, plan) = changed(plan_of(built), built)
  expected = ExpectedRows(plan, built.values())
  monkeypatch.setattr(Stream, "batch", None)  # to which one batch at a time would fall back
  with stream_of(built, plan, prefetch_batches=20) as stream:
    found = [batch_digest(batch) for batch in itertools.islice(stream, 25)]
  assert found == [expected.digest(step) for step in range(25)]


# Rows where batches change their size


@pytest.mark.parametrize(
  "rows",
  [slice(None), slice(3, None, 5), slice(-4, None), [5, 0, 7], [], (0, 2), (2, 3), (11, 12)],
  ids=str,
)
def test_rows_are_those_of_each_batch_whatever_its_size(built, rows):
  plan = plan_of(built).change(2, batch_size=36).change(4, batch_size=12)
  expected = ExpectedRows(plan, built.values())
  with stream_of(built, plan, rows=rows) as stream:
    for step, size in enumerate([24, 24, 36, 36, 12, 12]):
      if isinstance(rows, slice):
        numbers = list(range(size))[rows]
      elif isinstance(rows, tuple):
        host, hosts = rows
        numbers = list(range(host * size // hosts, (host + 1) * size // hosts))
      else:
        numbers = rows
      assert stream.rows_at(step).tolist() == numbers
      whole = expected.batch(step)
      assert batch_digest(next(stream)) == caches.oracle_digest([whole[number] for number in numbers])


def test_rows_may_come_from_what_can_be_read_but_once(built):
  plan = plan_of(built).change(1, batch_size=36)
  with stream_of(built, plan, rows=iter([1, 5])) as stream:
    assert [stream.rows_at(step).tolist() for step in (0, 1)] == [[1, 5], [1, 5]]


@pytest.mark.parametrize("rows", [(0, 5), (0, 8), (0, 36), (0, 24), (3, 3), (-1, 2), (0, 0)])
def test_hosts_that_cannot_share_every_batch_are_refused_with_those_that_can(built, rows):
  plan = plan_of(built).change(2, batch_size=36)
  error = refusal_of(stream_of, built, plan, rows=rows)
  assert (error.code, error.kind) == (78, "rows")
  assert error.fields["expected"].endswith("divides batches of 24 and of 36 rows")
  assert error.fields["got"] == rows
  assert error.fix.endswith("[1, 2, 3, 4, 6, 12]")


@pytest.mark.parametrize("rows", [[24], [3, 35], [-1]])
def test_rows_that_some_batch_does_not_have_are_refused(built, rows):
  plan = plan_of(built).change(2, batch_size=36)
  assert refusal_of(stream_of, built, plan, rows=rows).kind == "rows"


# Features


def feature(dtype, *shape):
  return Feature(dtype=dtype, shape=shape)


@pytest.fixture
def of_features(tmp_path):
  """Builds a task of 12 examples whose features are made by functions of the ordinal."""

  def build(name, **features):
    return caches.build(
      tmp_path,
      task=name,
      num_examples=12,
      num_shards=2,
      features={key: described for key, (described, _) in features.items()},
      example_of=lambda ordinal: {key: make(ordinal) for key, (_, make) in features.items()},
    )

  return build


NUMBER = (feature("int64"), np.int64)
NEGATIVE = (feature("int64"), lambda ordinal: np.int64(-1 - ordinal))
TOKENS = (feature("int32", None), lambda ordinal: np.arange(ordinal % 4, dtype=np.int32) + ordinal)
FLOATS = (feature("float32", None), lambda ordinal: np.full(ordinal % 3, ordinal, np.float32))


def filled_to(size):
  return feature("int32", size), lambda ordinal: np.full(size, ordinal, np.int32)


def pair(one, other, *, lengths=None, batch_size=6, **settings):
  """A stream of two tasks in turns, what the oracle expects of it, and its pool."""
  built = {cache.task: cache for cache in (one, other)}
  plan = plan_of(
    built, rates=dict.fromkeys(built, 1), batch_size=batch_size, lengths=lengths or {}, num_epochs=1
  )
  caches_by_name = opened(built, built)
  stream = open_stream(plan, caches_by_name, **settings)
  return stream, ExpectedRows(plan, built.values()), next(iter(caches_by_name.values())).pool


def test_features_that_all_tasks_have_are_kept(of_features):
  one = of_features("one", number=NUMBER, tokens=TOKENS, own=TOKENS)
  other = of_features("other", tokens=TOKENS, number=NEGATIVE, more=FLOATS, another=NUMBER)
  for lengths in ({}, {"tokens": 2, "more": 5}):
    stream, expected, _ = pair(one, other, lengths=lengths)
    with stream:
      for step, batch in enumerate(stream):
        assert batch.keys() == {"number", "tokens"}
        assert batch_digest(batch) == expected.digest(step, features=["number", "tokens"])


@pytest.mark.parametrize(
  ("one", "other"),
  [
    (TOKENS, FLOATS),
    (TOKENS, (feature("int64", None), lambda ordinal: np.arange(3))),
    (TOKENS, (feature("int32"), np.int32)),
    (TOKENS, (feature("int32", None, 2), lambda ordinal: np.zeros((1, 2), np.int32))),
    ((feature("int32", None, 3), lambda ordinal: np.zeros((1, 3), np.int32)),
     (feature("int32", None, 2), lambda ordinal: np.zeros((1, 2), np.int32))),
    (NUMBER, (feature("string"), lambda ordinal: np.array(b"x", object))),
  ],
  ids=["kind", "width", "rank 0", "rank 2", "inner shape", "text"],
)  # fmt: skip
def test_a_feature_of_two_forms_is_refused(of_features, one, other):
  caches_of = of_features("one", same=NUMBER, value=one), of_features("other", same=NUMBER, value=other)
  error = refusal_of(pair, *caches_of)
  assert (error.code, error.kind) == (78, "mixture_features")
  assert error.fields["feature"] == "value"
  assert error.fields["got"].keys() == {"one", "other"}
  assert len(set(error.fields["got"].values())) == 2


def test_tasks_without_a_feature_in_common_are_refused(of_features):
  error = refusal_of(pair, of_features("one", a=NUMBER, b=TOKENS), of_features("other", c=NUMBER))
  assert (error.code, error.kind) == (78, "mixture_features")
  assert error.fields["got"] == {"one": ["a", "b"], "other": ["c"]}


def test_sequences_of_fixed_lengths_that_differ_are_sequences(of_features):
  one = of_features("one", number=NUMBER, value=filled_to(3))
  for task, value in (("five", filled_to(5)), ("any", TOKENS)):
    other = of_features(task, number=NUMBER, value=value)
    for lengths in ({}, {"value": 4}):
      stream, expected, _ = pair(one, other, lengths=lengths)
      with stream:
        assert [batch_digest(batch) for batch in stream] == [
          expected.digest(step) for step in range(expected.num_steps)
        ]


# Transforms


def without(name):
  return MapBatch(lambda batch, records: {key: values for key, values in batch.items() if key != name})


def test_rows_keep_their_order_where_some_tasks_are_transformed(built):
  seen = []

  def shift(batch, records):
    seen.append((records.epochs.tolist(), records.indices.tolist()))
    return {**batch, "number": batch["number"] + 1_000_000 * (1 + records.epochs)}

  plan = plan_of(built, num_epochs=2)
  expected = ExpectedRows(plan, built.values())
  with stream_of(built, plan, transforms={"c": MapBatch(shift)}, prefetch_batches=0) as stream:
    for step, batch in enumerate(stream):
      rows = expected.batch(step)
      of_c = [(number, row) for number, row in enumerate(expected.rows(step)) if row and row.task == "c"]
      for number, row in of_c:
        rows[number] = {**rows[number], "number": rows[number]["number"] + 1_000_000 * (1 + row.epoch)}
      assert batch_digest(batch) == caches.oracle_digest(rows)
      # Beside what it is shown once to know its features.
      assert ([row.epoch for _, row in of_c], [row.index for _, row in of_c]) in seen


def test_transforms_see_their_own_tasks_features_and_can_make_them_alike(of_features):
  one = of_features("one", value=TOKENS, more=NUMBER)
  other = of_features("other", value=FLOATS, extra=(feature("int32"), np.int32))

  def of_one(batch, records):
    assert batch.keys() == {"value", "more"}
    return {"length": batch["value"].lengths, "number": batch["more"]}

  def of_other(batch, records):
    assert batch.keys() == {"value", "extra"}
    return {"length": batch["value"].lengths + 10, "number": batch["extra"].astype(np.int64)}

  transforms = {"one": MapBatch(of_one), "other": MapBatch(of_other)}
  stream, expected, _ = pair(one, other, transforms=transforms)
  with stream:
    for step, batch in enumerate(stream):
      assert batch.keys() == {"length", "number"}
      for number, row in enumerate(expected.rows(step)):
        if row is not None:
          example = expected.example(row)
          added, name = (0, "more") if row.task == "one" else (10, "extra")
          assert batch["length"][number] == len(example["value"]) + added
          assert batch["number"][number] == example[name]


def test_a_feature_that_one_transform_removes_is_left_out_of_all(built):
  plan = plan_of(built, num_epochs=1)
  expected = ExpectedRows(plan, built.values())
  with stream_of(built, plan, transforms={"a": without("weights"), "c": without("inputs")}) as stream:
    for step, batch in enumerate(stream):
      assert batch.keys() == {"number", "targets"}
      assert batch_digest(batch) == expected.digest(step, features=["number", "targets"])


def test_a_feature_that_one_transform_adds_is_left_out_and_one_that_all_add_is_kept(built):
  def add(*names):
    return MapBatch(lambda batch, records: {**batch, **dict.fromkeys(names, -batch["number"])})

  plan = plan_of(built, num_epochs=1)
  transforms = {"a": add("x", "y"), "b:x": add("x"), "c": add("x", "y")}
  with stream_of(built, plan, transforms=transforms) as stream:
    for batch in stream:
      assert batch.keys() == {*caches.FEATURES, "x"}
      assert batch["x"].tolist() == (-batch["number"]).tolist()


@pytest.mark.parametrize("lengths", [{}, caches.FEATURE_LENGTHS], ids=["ragged", "filled"])
def test_a_host_whose_rows_are_all_padding_has_the_features_of_the_others(built, lengths):
  def add_and_fill(batch, records):
    return {**batch, "extra": batch["number"], "inputs": batch["inputs"].to_padded(7)}

  plan = plan_of(built, num_epochs=1, lanes=1, lengths=lengths)
  last = plan.num_steps - 1
  padding = np.flatnonzero(plan.batch(last).task == PADDING_TASK)
  assert 0 < len(padding) < BATCH_SIZE
  forms = []
  for rows in (slice(None), padding):
    transforms = {"a": MapBatch(add_and_fill)}
    with stream_of(built, plan, transforms=transforms, rows=rows, prefetch_batches=0) as stream:
      batch = stream.batch(last)
    forms.append(
      {
        name: (type(feature), values.dtype, values.shape[1:])
        for name, feature in batch.items()
        for values in [feature.values if isinstance(feature, Ragged) else feature]
      }
    )
  assert forms[0] == forms[1]


@pytest.mark.parametrize("rows", [slice(None), [0]])
def test_a_feature_that_a_transform_makes_another_is_refused_at_the_first_batch(built, rows):
  """Also where the rows wanted are of one task alone."""

  def widen(batch, records):
    return {**batch, "number": batch["number"].astype(np.float64)}

  with stream_of(built, plan_of(built), transforms={"b:x": MapBatch(widen)}, rows=rows) as stream:
    error = refusal_of(next, stream)
  assert (error.code, error.kind) == (78, "mixture_features")
  assert error.fields["feature"] == "number"
  assert error.fields["got"]["b:x"] != error.fields["got"]["a"] == error.fields["got"]["c"]


def test_features_missing_after_transforms_are_refused(built):
  only = {name: MapBatch(lambda batch, records, name=name: {name: batch["number"]}) for name in RATES}
  with stream_of(built, plan_of(built), transforms=only) as stream:
    assert refusal_of(next, stream).kind == "mixture_features"


@pytest.mark.parametrize("lengths", [{}, {"tokens": 4}])
@pytest.mark.parametrize(
  "filled", [{"one": 5}, {"other": 5}, {"one": 5, "other": 3}, {"one": 3, "other": 3}], ids=str
)
def test_sequences_that_transforms_filled_join_with_others(of_features, filled, lengths):
  """Filled to one length in all tasks they are left as they are where the plan has no length for them."""

  def fill(length):
    return MapBatch(lambda batch, records: {**batch, "tokens": batch["tokens"].to_padded(length)})

  one = of_features("one", number=NUMBER, tokens=TOKENS)
  other = of_features("other", number=NEGATIVE, tokens=TOKENS)
  are_sequences = filled != {"one": 3, "other": 3} or bool(lengths)
  transforms = {name: fill(length) for name, length in filled.items()}
  stream, expected, _ = pair(one, other, lengths=lengths, transforms=transforms)
  with stream:
    for step, batch in enumerate(stream):
      assert isinstance(batch["tokens"], Ragged) == (are_sequences and not lengths)
      tokens = batch["tokens"].rows() if isinstance(batch["tokens"], Ragged) else batch["tokens"]
      for number, row in enumerate(expected.rows(step)):
        if row is not None:
          made = {"tokens": expected.example(row)["tokens"]}
          if row.task in filled:
            made = caches.padded_row(made, {"tokens": filled[row.task]})
          if are_sequences:
            made = caches.padded_row(made, lengths)
          assert caches.same_array(tokens[number], made["tokens"])
          assert batch["number"][number] == expected.example(row)["number"]


@pytest.mark.parametrize("transforms", [{}, {"one": without("x")}])
@pytest.mark.parametrize("policy", ["reshuffle", "global"])
def test_a_closed_stream_holds_nothing(of_features, transforms, policy):
  one, other = (of_features(name, number=NUMBER, tokens=TOKENS) for name in ("one", "other"))
  built = {"one": one, "other": other}
  caches_by_name = opened(built, built)
  pool = caches_by_name["one"].pool
  plan = plan_of(built, rates={"one": 1, "other": 2}, batch_size=3, lengths={}, epoch_policy=policy)
  stream = open_stream(plan, caches_by_name, transforms=transforms)
  for _ in range(3):
    next(stream)
  assert pool._held_bytes > 0
  stream.close()
  assert pool._held_bytes == 0
  assert batch_digest(next(stream)) == ExpectedRows(plan, built.values()).digest(3)
  stream.close()


# Caches


def test_missing_caches_are_refused_and_others_ignored(built):
  plan = plan_of(built)
  error = refusal_of(open_stream, plan, opened(built, ["a", "d"]))
  assert (error.code, error.kind) == (64, "task_unknown")
  assert (error.fields["expected"], error.fields["got"]) == ("caches of a, b:x, c", "a, d")
  assert "b:x, c" in error.fix
  with open_stream(plan, opened(built, SHAPES)) as stream:
    assert batch_digest(next(stream)) == ExpectedRows(plan, built.values()).digest(0)


def test_caches_are_found_in_several_roots(built, tmp_path):
  elsewhere = caches.build(tmp_path, task="other", num_examples=20, example_of=caches.example_of)
  together = {**built, "other": elsewhere}
  plan = plan_of(together, rates={"a": 1, "other": 1})
  with open_stream(plan, [built["a"].root, tmp_path]) as stream:
    assert batch_digest(next(stream)) == ExpectedRows(plan, together.values()).digest(0)
  assert refusal_of(open_stream, plan, [built["a"].root]).kind == "cache_missing"


def test_caches_may_have_pools_of_their_own(built):
  plan = plan_of(built, num_epochs=1)
  expected = ExpectedRows(plan, built.values())
  with open_stream(plan, {name: built[name].open() for name in RATES}) as stream:
    assert [batch_digest(batch) for batch in stream] == [
      expected.digest(step) for step in range(plan.num_steps)
    ]


def test_a_cache_in_another_tasks_place_is_refused(built):
  caches_by_name = opened(built, RATES)
  caches_by_name["a"], caches_by_name["c"] = caches_by_name["c"], caches_by_name["a"]
  error = refusal_of(open_stream, plan_of(built), caches_by_name)
  assert (error.code, error.kind) == (76, "plan_cache")
