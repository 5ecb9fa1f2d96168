"""What is no whole number is refused where one is asked for, never cut to one."""

import numpy as np
import pytest

from anystep.errors import AnystepError
from anystep.order.permutation import Permutation
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.whole_numbers import is_whole_number, whole_number, whole_numbers

NOT_WHOLE = [1.0, 1.7, True, np.True_, np.float32(1), "1", b"1", None, [1], np.array([1]), 1j]
WHOLE = [1, np.int8(1), np.uint64(1), np.array(1)]


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_no_whole_number_is_refused(value):
  with pytest.raises(TypeError, match="step take whole numbers"):
    whole_number(value, "step")
  assert not is_whole_number(value)
  if not isinstance(value, (list, np.ndarray)):
    with pytest.raises(TypeError, match="rows take whole numbers"):
      whole_numbers([2, value], "rows")


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_whole_numbers_of_any_type_are_taken(value):
  assert type(whole_number(value, "step")) is int
  assert whole_number(value, "step") == 1
  assert is_whole_number(value)
  assert whole_numbers([0, value], "rows").tolist() == [0, 1]


@pytest.mark.parametrize(
  "values",
  [
    np.ones((2, 2), int),
    [[1], [2]],
    [[1], [2, 3]],
    np.array(1),
    np.ones(3, bool),
    np.ones(3),
    np.array(["1"]),
    np.array([1, 1.5], object),
    np.array([1, True], object),
    [1, "2"],
  ],
  ids=repr,
)
def test_arrays_of_anything_else_are_refused(values):
  with pytest.raises(TypeError, match="take whole numbers"):
    whole_numbers(values, "rows")


@pytest.mark.parametrize("values", [[2**63], [2**70, 1], [-(2**70)], np.array([2**63], np.uint64)], ids=repr)
def test_numbers_beyond_int64_are_no_places(values):
  with pytest.raises(IndexError, match="64 bits"):
    whole_numbers(values, "rows")


@pytest.mark.parametrize("values", [[], (), np.zeros(0), range(0)])
def test_of_none_any_type_will_do(values):
  assert whole_numbers(values, "rows").dtype == np.int64
  assert whole_numbers(values, "rows").shape == (0,)


# Steps


@pytest.mark.parametrize("step", NOT_WHOLE, ids=repr)
def test_a_step_that_is_no_whole_number_is_refused(shared_cache, step):
  plan = Plan.start(shared_cache.open(), batch_size=8)
  with open_stream(plan, shared_cache.root) as stream:
    for way in (plan.segment_at, plan.batch, plan.units, stream.batch, stream.seek, stream.rows_at):
      with pytest.raises(TypeError, match="step take whole numbers"):
        way(step)
    for way in (lambda: plan.change(step), lambda: plan.skip(0, step), lambda: plan.tombstone(step, [])):
      with pytest.raises(AnystepError) as refused:
        way()
      assert refused.value.code == (64 if refused.value.kind == "skip" else 78)
    assert len(next(stream)["number"]) == 8


@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_a_step_below_0_ends_no_loop_in_silence(shared_cache, prefetch_batches):
  plan = Plan.start(shared_cache.open(), batch_size=8)
  with open_stream(plan, shared_cache.root, prefetch_batches=prefetch_batches) as stream:
    for way in (plan.segment_at, plan.batch, plan.units, stream.batch, stream.seek, stream.rows_at):
      for step in (-1, -(10**30), np.int64(-1)):
        with pytest.raises(ValueError, match=f"at least 0, not {step}"):
          way(step)
    assert stream.step == 0
    assert len([batch for _, batch in zip(range(3), stream, strict=False)]) == 3


@pytest.mark.parametrize("step", WHOLE, ids=repr)
def test_a_step_may_be_of_any_integer_type(shared_cache, step):
  plan = Plan.start(shared_cache.open(), batch_size=8)
  with open_stream(plan, shared_cache.root) as stream:
    stream.seek(step)
    assert (type(stream.step), stream.get_state()["step"]) == (int, 1)
    assert np.array_equal(next(stream)["number"], stream.batch(step)["number"])
  assert plan.change(step, batch_size=4).to_json() == plan.change(1, batch_size=4).to_json()
  assert plan.skip(step, np.int64(3)).to_json() == plan.skip(1, 3).to_json()


# Rows


def rows_of(shared_cache, rows, **change):
  plan = Plan.start(shared_cache.open(), batch_size=4)
  plan = plan.change(3, **change) if change else plan
  with open_stream(plan, shared_cache.root, rows=rows, prefetch_batches=0) as stream:
    return stream.rows_at(0).tolist()


@pytest.mark.parametrize(
  "rows", [[False, True, False, True], np.array([0, 1, 0, 1], bool), [np.False_, True, np.False_, np.True_]]
)
def test_a_mask_names_the_rows_where_it_is_true(shared_cache, rows):
  assert rows_of(shared_cache, rows) == [1, 3]
  plan = Plan.start(shared_cache.open(), batch_size=4)
  assert plan.batch(2, rows).unit.tolist() == plan.batch(2, np.array([1, 3])).unit.tolist()


@pytest.mark.parametrize("rows", [[1, 3], [np.int32(1), 3], range(1, 4, 2), iter([1, 3]), slice(1, None, 2)])
def test_rows_may_be_any_whole_numbers(shared_cache, rows):
  assert rows_of(shared_cache, rows) == [1, 3]


def test_rows_keep_their_order_and_how_often_they_are_named(shared_cache):
  assert rows_of(shared_cache, [3, 0, 3]) == [3, 0, 3]


@pytest.mark.parametrize(
  "rows",
  [
    np.array([0, 1, 1, 0]),
    [True, False],
    [True] * 5,
    np.ones((4, 4), bool),
    np.ones((4, 1), bool),
    [True, 2],
    [1.7],
    [1.0],
    ["1"],
    [None],
    [[1]],
    np.array([[1, 2]]),
    None,
    1,
    True,
    "12",
    [2**70],
    (True, 2),
    (0.0, 2),
    (0, "2"),
    (0, 1, 2),
    (0,),
    slice("a"),
    slice(None, None, 0),
    slice(1.5),
  ],
  ids=repr,
)
def test_rows_that_are_anything_else_are_refused(shared_cache, rows):
  with pytest.raises(AnystepError) as refused:
    rows_of(shared_cache, rows)
  assert (refused.value.code, refused.value.kind) == (78, "rows")
  assert refused.value.fields.keys() >= {"expected", "got"}
  if not isinstance(rows, (slice, tuple)) and rows is not None:
    with pytest.raises(AnystepError) as refused:
      Plan.start(shared_cache.open(), batch_size=4).batch(0, rows)
    assert (refused.value.code, refused.value.kind) == (78, "rows")


def test_a_mask_of_one_batch_size_is_none_of_another(shared_cache):
  with pytest.raises(AnystepError) as refused:
    rows_of(shared_cache, [True] * 4, batch_size=8)
  assert (refused.value.code, refused.value.kind) == (78, "rows")
  assert "8" in refused.value.fields["expected"]


# Indices


@pytest.mark.parametrize("index", [value for value in NOT_WHOLE if not isinstance(value, list)], ids=repr)
def test_an_index_that_is_no_whole_number_is_refused(shared_cache, index):
  cache = shared_cache.open()
  zeros = np.zeros(1, np.int64)
  for way in (
    lambda: cache[index],
    lambda: cache.read([index]),
    lambda: cache.__getitems__([index]),
    lambda: cache.locate([index]),
    lambda: cache.source_of([index]),
    lambda: cache.read_records([index], zeros),
    lambda: cache.read_records(zeros, [index]),
  ):
    with pytest.raises(TypeError, match="take whole numbers"):
      way()


def test_a_mask_is_no_indices(shared_cache):
  for mask in (np.ones(50, bool), [True] * 50):
    with pytest.raises(TypeError, match="take whole numbers"):
      shared_cache.open().read(mask)


@pytest.mark.parametrize("index", WHOLE, ids=repr)
def test_an_index_may_be_of_any_integer_type(shared_cache, index):
  cache = shared_cache.open()
  assert cache[index]["number"] == cache[1]["number"]
  assert cache.read([index])["number"].tolist() == [cache[1]["number"]]


@pytest.mark.parametrize(("shard", "place"), [(-1, 0), (4, 0), (0, -1), (0, 13), (2, 12), (2**70, 0)])
def test_records_that_the_split_does_not_have_are_refused(shared_cache, shard, place):
  with pytest.raises(IndexError):
    shared_cache.open().read_records([0, shard], [0, place])


@pytest.mark.parametrize("n", [1.0, 10.5, True, "10", None])
def test_a_size_that_is_no_whole_number_is_refused(n):
  with pytest.raises(TypeError, match="sizes of permutations"):
    Permutation(n, "demo")


@pytest.mark.parametrize(
  "x",
  [True, 1.0, "1", None, np.ones(3, bool), np.array([1, 1.5], object), np.array([True], object)],
  ids=repr,
)
def test_a_permutation_takes_whole_numbers_alone(x):
  permutation = Permutation(10, "demo")
  for direction in (permutation, permutation.inverse):
    with pytest.raises(TypeError):
      direction(x)
