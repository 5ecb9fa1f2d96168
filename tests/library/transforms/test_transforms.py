"""Python transforms: each example as its function makes it, with draws that follow from its record alone."""

import functools
import io
import pickle
import random

import caches
import grain
import numpy as np
import pytest
from absl import flags
from expected_rows import ExpectedRows
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import oracle
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.plans.plan import Plan
from anystep.streams.grain import StreamDataset
from anystep.streams.stream import open_stream
from anystep.transforms.functions import Filter, Map, MapBatch, RandomMap
from anystep.transforms.identity import describe
from anystep.transforms.transform import (
  Chain,
  Records,
  Transform,
  as_transform,
  random_keys,
  transforms_by_task,
)

# Records by (epoch, index), and in which order they come.
RECORDS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**40)), min_size=1, max_size=9, unique=True)


def records_of(pairs, **fields):
  epochs, indices = np.array(pairs, np.int64).reshape(-1, 2).T
  return Records(epochs, indices, **{"task": "demo", "split": "train", "seed": 0, **fields})


def example_of(index):
  """An example with features of every kind, which the index decides."""
  rng = np.random.default_rng(index)
  return {
    "number": np.int64(index),
    "share": np.float32(rng.random()),
    "text": rng.bytes(index % 3) + b"\0",
    "tokens": rng.integers(0, 99, index % 4, np.int32),
    "image": rng.integers(0, 255, (index % 3, 2, 3), np.uint8),
    "words": np.array([rng.bytes(2) for _ in range(index % 3)], object),
  }


def batch_of(examples):
  return {
    "number": np.array([example["number"] for example in examples]),
    "share": np.array([example["share"] for example in examples]),
    "text": np.array([example["text"] for example in examples], object),
    "tokens": Ragged.of_rows([example["tokens"] for example in examples], np.dtype(np.int32)),
    "image": Ragged.of_rows([example["image"] for example in examples], np.dtype(np.uint8), (2, 3)),
    "words": Ragged.of_rows([example["words"] for example in examples], np.dtype(object)),
  }


def rows_of(batch):
  columns = {name: f.rows() if isinstance(f, Ragged) else list(f) for name, f in batch.items()}
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def assert_same_rows(found, expected):
  assert len(found) == len(expected)
  for one, other in zip(found, expected, strict=True):
    assert one.keys() == other.keys()
    for name in one:
      assert caches.same_array(np.asarray(one[name]), np.asarray(other[name])), name


def run(transform, pairs, **fields):
  """The rows that a transform makes of records, and of the batch that it was given what it was before."""
  examples = [example_of(index) for _, index in pairs]
  batch = batch_of(examples)
  made = transform(batch, records_of(pairs, **fields))
  assert_same_rows(rows_of(batch), examples)
  return rows_of(made)


def generator_of(*, epoch, index, task="demo", split="train", seed=0, place=0):
  """What an example's draws come from, as the order specification says."""
  key = oracle.transform_keys(task, split, seed, epoch, place, index)
  return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))


def refusal_of(function, *arguments):
  with pytest.raises(AnystepError) as refused:
    function(*arguments)
  return refused.value


# Functions of the module, as worker processes need them.


def change_everything(example):
  """Changes arrays in place, adds, removes and renames features."""
  example["tokens"] += 1
  example["image"][:, 0] = 7
  example["words"][:1] = b"word"
  share, number = example.pop("share"), example.pop("number")
  return {**example, "half": number / 2, "more": share + 1, "name": "a b", "pair": [1, 2], "yes": True}


def draw(example, rng):
  """Draws, some more for some, and changes what it was given."""
  example["image"] += rng.integers(0, 255, example["image"].shape, np.uint8)
  return {**example, "noise": rng.normal(size=example["tokens"].shape), "seen": rng.permutation(5)}


def first_words(example, rng):
  return {"words": rng.bit_generator.random_raw(9)}


def is_even(example):
  return example["number"] % 2 == 0


def is_short(example):
  return np.array(len(example["tokens"]) < 2)


def add_epochs(batch, records):
  return {**batch, "number": batch["number"] + records.epochs}


class TestDraws:
  @given(RECORDS, st.integers(0, 2**63), st.sampled_from(["a:b", "c"]), st.integers(0, 3))
  @settings(max_examples=50, deadline=None)
  def test_are_keyed_as_the_order_specification_says(self, pairs, seed, task, place):
    records = records_of(pairs, seed=seed, task=task, place=place)
    expected = [oracle.transform_keys(task, "train", seed, epoch, place, index) for epoch, index in pairs]
    assert random_keys(records).dtype == np.uint64
    assert random_keys(records).tolist() == [list(key) for key in expected]
    rows = rows_of(RandomMap(first_words)(batch_of([example_of(i) for _, i in pairs]), records))
    assert [row["words"].tolist() for row in rows] == [oracle.philox(key, 9) for key in expected]

  @given(RECORDS, st.randoms(use_true_random=False))
  @settings(max_examples=30, deadline=None)
  def test_are_the_same_alone_and_beside_others_in_any_order(self, pairs, shuffler):
    expected = [
      draw(example_of(index), generator_of(epoch=epoch, index=index, seed=5)) for epoch, index in pairs
    ]
    transform = RandomMap(draw)
    assert_same_rows(run(transform, pairs, seed=5), expected)
    order = shuffler.sample(range(len(pairs)), len(pairs))
    assert_same_rows(run(transform, [pairs[k] for k in order], seed=5), [expected[k] for k in order])
    for pair, row in zip(pairs, expected, strict=True):
      assert_same_rows(run(transform, [pair], seed=5), [row])

  def test_differ_between_epochs_records_seeds_tasks_splits_and_places(self):
    pairs = [(epoch, index) for epoch in range(3) for index in range(20)]
    drawn = [
      tuple(row["words"].tolist())
      for fields in ({}, {"seed": 1}, {"task": "demo2"}, {"split": "test"}, {"place": 1})
      for row in run(RandomMap(first_words), pairs, **fields)
    ]
    assert len(set(drawn)) == len(drawn) == 5 * len(pairs)

  def test_of_two_in_a_chain_differ_wherever_they_stand(self):
    def noted(name):
      return RandomMap(lambda example, rng: {**example, name: rng.bit_generator.random_raw(9)})

    leave = Map(lambda example: example)
    flat = run(Chain([noted("a"), leave, noted("b"), noted("c")]), [(1, 7)])
    nested = run(Chain([noted("a"), Chain([leave, Chain([noted("b")])]), noted("c")]), [(1, 7)])
    assert_same_rows(nested, flat)
    for name, place in {"a": 0, "b": 2, "c": 3}.items():
      key = oracle.transform_keys("demo", "train", 0, 1, place, 7)
      assert flat[0][name].tolist() == oracle.philox(key, 9)


class TestMap:
  @given(RECORDS)
  @settings(max_examples=30, deadline=None)
  def test_makes_of_each_example_what_the_function_makes(self, pairs):
    expected = [change_everything(example_of(index)) for _, index in pairs]
    assert_same_rows(run(Map(change_everything), pairs), expected)

  def test_leaves_what_the_function_leaves(self):
    pairs = [(0, index) for index in range(9)]
    assert_same_rows(run(Map(lambda example: example), pairs), [example_of(index) for _, index in pairs])

  def test_gives_sequences_as_ragged_and_numbers_and_texts_as_arrays(self):
    batch = Map(change_everything)(batch_of([example_of(2), example_of(5)]), records_of([(0, 2), (0, 5)]))
    forms = {
      name: (type(f), f.values.dtype if isinstance(f, Ragged) else f.dtype) for name, f in batch.items()
    }
    assert forms == {
      "half": (np.ndarray, np.float64),
      "image": (Ragged, np.uint8),
      "more": (np.ndarray, np.float32),
      "name": (np.ndarray, object),
      "pair": (Ragged, np.int64),
      "text": (np.ndarray, object),
      "tokens": (Ragged, np.int32),
      "words": (Ragged, object),
      "yes": (np.ndarray, bool),
    }
    assert [type(text) for text in batch["text"]] == [bytes, bytes]

  def test_keeps_zero_bytes_at_the_end_of_texts(self):
    ends = Map(lambda example: {"one": b"a\0", "many": [b"b\0\0", b"c"]})
    assert run(ends, [(0, 0)])[0]["one"] == b"a\0"
    assert run(ends, [(0, 0)])[0]["many"].tolist() == [b"b\0\0", b"c"]

  def test_makes_nothing_of_nothing(self):
    nothing = {name: f[:0] if isinstance(f, np.ndarray) else f for name, f in batch_of([]).items()}
    for transform in (Map(change_everything), RandomMap(draw)):
      assert transform(nothing, records_of([])) == {}

  @pytest.mark.parametrize(
    ("feature", "other", "forms"),
    [
      (np.int32(1), np.int64(1), ("int32[]", "int64[]")),
      (1, 1.0, ("int64[]", "float64[]")),
      (1, [1], ("int64[]", "int64[n]")),
      ([1], [[1]], ("int64[n]", "int64[n,1]")),
      (np.zeros((4, 2, 3)), np.zeros((5, 3, 3)), ("float64[n,2,3]", "float64[n,3,3]")),
      (b"a", 1, ("object[]", "int64[]")),
    ],
  )
  @pytest.mark.parametrize("together", [True, False])
  def test_refuses_a_feature_that_changes_its_form(self, feature, other, forms, together):
    """Within a batch or from one batch to the next, whatever they are of in another task or split."""
    transform = Map(lambda example: {"same": 0, "it": feature if example["number"] == 4 else other})
    with_other = functools.partial(run, transform, [(1, 4), (1, 5)])
    if not together:
      run(transform, [(1, 5)], task="demo2")
      run(transform, [(1, 5)], split="test")
      run(transform, [(1, 5)], place=1)
      run(transform, [(1, 4)])
      with_other = functools.partial(run, transform, [(1, 5)])
    error = refusal_of(with_other)
    assert (error.code, error.kind) == (78, "transform_output")
    where = {"task": "demo", "split": "train", "epoch": 1, "index": 5, "place": 0}
    assert error.fields == {**where, "expected": {"it": forms[0]}, "got": {"it": forms[1]}}

  def test_refuses_a_feature_that_some_examples_lack(self):
    transform = Map(lambda example: {"it": 1} | ({"more": 2} if example["number"] else {}))
    error = refusal_of(run, transform, [(0, 1), (0, 0)])
    assert (error.code, error.kind) == (78, "transform_output")
    assert (error.fields["expected"], error.fields["got"]) == ({"more": "int64[]"}, {"more": None})

  @pytest.mark.parametrize(
    ("made", "got"),
    [
      (None, "NoneType"),
      ([1], "list"),
      ({"it": None}, "it: None"),
      ({"it": [{}]}, "it: [{}]"),
      ({"it": [[1], [2, 3]]}, "it: setting an array"),
    ],
  )
  @pytest.mark.parametrize("kind", [Map, RandomMap])
  def test_refuses_what_is_no_example(self, kind, made, got):
    error = refusal_of(run, kind(lambda example, *rng: made), [(2, 5)])
    assert (error.code, error.kind) == (78, "transform_output")
    assert error.fields["got"].startswith(got)
    assert "'epoch': 2, 'index': 5" in error.__notes__[0]

  @pytest.mark.parametrize("kind", [Map, RandomMap, Filter])
  def test_says_of_which_example_a_function_fails(self, kind):
    transform = kind(lambda example, *rng: 1 // (int(example["number"]) - 5) and example)
    with pytest.raises(ZeroDivisionError) as failed:
      run(Chain([Map(lambda example: example), transform]), [(2, 6), (3, 5)])
    (note,) = failed.value.__notes__
    assert note.endswith("{'task': 'demo', 'split': 'train', 'epoch': 3, 'index': 5, 'place': 1}")


class TestFilter:
  @given(RECORDS)
  @settings(max_examples=30, deadline=None)
  def test_keeps_the_examples_for_which_its_predicate_is_true(self, pairs):
    examples = [example_of(index) for _, index in pairs]
    for predicate in (is_even, is_short):
      batch, kept = Filter(predicate).survey(batch_of(examples), records_of(pairs))
      expected = [row for row, example in enumerate(examples) if predicate(example)]
      assert (kept.tolist(), kept.dtype) == (expected, np.int64)
      assert_same_rows(rows_of(batch), [examples[row] for row in expected])

  def test_passes_examples_on_that_are_all_kept(self):
    pairs = [(0, 4), (1, 2)]
    assert_same_rows(run(Filter(is_even), pairs), [example_of(4), example_of(2)])

  def test_refuses_to_drop_what_a_unit_table_keeps(self):
    error = refusal_of(run, Filter(is_even), [(0, 4), (3, 7), (3, 9)])
    assert (error.code, error.kind) == (65, "example_dropped")
    assert (error.fields["task"], error.fields["epoch"], error.fields["index"]) == ("demo", 3, 7)


class TestMapBatch:
  def test_makes_of_a_batch_what_the_function_makes(self):
    pairs = [(epoch, index) for epoch in range(3) for index in range(4)]
    expected = [
      {**example_of(index), "number": example_of(index)["number"] + epoch} for epoch, index in pairs
    ]
    assert_same_rows(run(MapBatch(add_epochs), pairs), expected)

  def test_may_draw_by_the_records_keys(self):
    transform = MapBatch(lambda batch, records: {"drawn": random_keys(records)[:, 0]}, is_random=True)
    (row,) = run(transform, [(1, 7)], place=2)
    assert row["drawn"] == oracle.transform_keys("demo", "train", 0, 1, 2, 7)[0]

  def test_refuses_another_number_of_rows(self):
    transform = MapBatch(lambda batch, records: {**batch, "number": batch["number"][1:]})
    error = refusal_of(run, transform, [(0, 1), (0, 2)])
    assert (error.code, error.kind) == (78, "transform_output")
    assert "2 rows" in error.fields["expected"]
    assert error.fields["got"] == {"number": 1}

  @pytest.mark.parametrize(
    ("made", "got"),
    [
      (None, {"batch": "NoneType"}),
      ({"x": [1, 2]}, {"x": "list"}),
      ({"x": 3, "y": np.arange(2)}, {"x": "int"}),
      ({"x": np.array(3)}, {"x": "ndarray"}),
    ],
  )
  def test_refuses_what_is_no_batch(self, made, got):
    error = refusal_of(run, MapBatch(lambda batch, records: made), [(0, 1), (0, 2)])
    assert (error.code, error.kind, error.fields["got"]) == (78, "transform_output", got)


class Appending(Transform):
  """Says that it appends tokens."""

  def __init__(self, **tokens):
    self.identity = tokens
    self.appended_tokens = tokens

  def __call__(self, batch, records):
    return batch


class TestChain:
  @given(RECORDS)
  @settings(max_examples=30, deadline=None)
  def test_runs_one_after_the_other_and_keeps_what_all_keep(self, pairs):
    chain = Chain([Filter(is_even), RandomMap(draw), MapBatch(add_epochs), Filter(is_short)])
    expected, kept = [], []
    for row, (epoch, index) in enumerate(pairs):
      example = example_of(index)
      if is_even(example) and is_short(example):
        drawn = draw(example, generator_of(epoch=epoch, index=index, place=1))
        expected.append({**drawn, "number": drawn["number"] + epoch})
        kept.append(row)
    batch, rows = chain.survey(batch_of([example_of(index) for _, index in pairs]), records_of(pairs))
    assert (rows.tolist(), rows.dtype) == (kept, np.int64)
    assert_same_rows(rows_of(batch), expected)
    if len(kept) == len(pairs):
      assert_same_rows(run(chain, pairs), expected)
    else:
      assert refusal_of(run, chain, pairs).kind == "example_dropped"

  @pytest.mark.parametrize(
    ("members", "appended", "may_drop", "is_random"),
    [
      ([Appending(a=1), Appending(a=1, b=2)], {"a": 2, "b": 2}, False, False),
      ([Appending(a=1), Map(dict)], None, False, False),
      ([Appending(), Filter(dict)], None, True, False),
      ([RandomMap(dict), Appending(a=1)], None, False, True),
      ([MapBatch(dict, is_random=True), Filter(dict)], None, True, True),
      ([MapBatch(dict)], None, False, False),
    ],
  )
  def test_is_what_its_members_are(self, members, appended, may_drop, is_random):
    chain = Chain(members)
    assert (chain.appended_tokens, chain.may_drop, chain.is_random) == (appended, may_drop, is_random)
    assert chain.identity == [member.identity for member in members]
    nested = Chain([Chain(members[:1]), Chain(members[1:])])
    assert nested.identity == chain.identity
    assert (nested.appended_tokens, nested.may_drop, nested.is_random) == (appended, may_drop, is_random)


def test_identities_tell_kinds_and_functions_apart_and_may_be_given():
  kinds = [Map, RandomMap, Filter, MapBatch]
  made = [kind(function) for kind in kinds for function in (is_even, is_short)]
  made += [kind(functools.partial(is_even, number)) for kind in kinds for number in (1, 2)]
  identities = [str(transform.identity) for transform in made]
  assert len(set(identities)) == len(identities)
  assert identities == [str(kind(f).identity) for kind in kinds for f in (is_even, is_short)] + identities[8:]
  assert Map(is_even).identity == {"Map": describe(is_even)}
  assert Map(is_even, identity=["mine", 1]).identity == {"Map": ["mine", 1]}
  assert Map(is_even, identity=0).identity == Map(is_short, identity=0).identity == {"Map": 0}


def test_what_a_task_is_given_becomes_one_transform():
  one, other = Map(is_even), Filter(is_even)
  assert as_transform(None) is as_transform([]) is as_transform(()) is None
  assert as_transform(one) is as_transform([one]) is one
  for several in ([one, other], (one, other), [one, Chain([other])]):
    assert as_transform(several).transforms == (one, other)


@pytest.mark.parametrize("value", [is_even, [Map(is_even), is_even], "map", [None]])
def test_what_is_no_transform_is_refused(value):
  error = refusal_of(as_transform, value)
  assert (error.code, error.kind) == (78, "transform")
  assert "MapBatch" in error.fix


@pytest.mark.parametrize("transforms", [Map(is_even), [Map(is_even)], is_even])
def test_transforms_without_tasks_are_refused(transforms):
  error = refusal_of(transforms_by_task, transforms, ["demo"])
  assert (error.code, error.kind) == (78, "transforms")
  assert "'demo'" in error.fix


def test_a_misspelled_task_is_refused_and_tasks_besides_are_not():
  one, other = Map(is_even), Filter(is_even)
  assert transforms_by_task(None, ["demo"]) == transforms_by_task({}, ["demo"]) == {}
  assert transforms_by_task({"demo": [one], "extra": other}, ["demo"]) == {"demo": one, "extra": other}
  assert transforms_by_task({"demo": [], "more": other}, ["demo", "c4"], others=["more"]) == {"more": other}
  error = refusal_of(transforms_by_task, {"dmo": one}, ["demo", "c4"])
  assert (error.code, error.kind, error.fields["got"]) == (64, "task_unknown", ["dmo"])


def test_a_plan_and_a_stream_refuse_a_misspelled_task(shared_cache, plan):
  misspelled = {"dmo": Map(dict)}
  new = Plan.start(shared_cache.open(), batch_size=8)
  for refusing in (
    lambda: Plan.start(shared_cache.open(), batch_size=8, transforms=misspelled),
    lambda: plan.on_caches({"demo": shared_cache.open()}, misspelled),
    lambda: open_stream(new, shared_cache.root, transforms=misspelled),
  ):
    assert refusal_of(refusing).kind == "task_unknown"


@pytest.mark.parametrize(
  "transform",
  [
    Map(change_everything),
    RandomMap(draw),
    Filter(is_even),
    MapBatch(add_epochs, is_random=True),
    Chain([RandomMap(draw), MapBatch(add_epochs), Filter(is_even)]),
  ],
  ids=lambda transform: type(transform).__name__,
)
def test_pickled_transforms_do_the_same(transform):
  pairs = [(0, 4), (2, 6)]
  expected = run(transform, pairs)
  copy = pickle.loads(pickle.dumps(transform))
  assert_same_rows(run(copy, pairs), expected)
  assert (copy.identity, copy.is_random, copy.may_drop) == (
    transform.identity,
    transform.is_random,
    transform.may_drop,
  )


# In streams


def jitter(example, rng):
  """Other tokens, and sometimes fewer."""
  kept = rng.random(len(example["inputs"])) < 0.7
  return {**example, "inputs": example["inputs"][kept] + rng.integers(100, dtype=np.int32)}


@pytest.fixture
def plan(shared_cache):
  return Plan.start(
    shared_cache.open(), batch_size=8, num_epochs=2, feature_lengths=caches.FEATURE_LENGTHS, seed=3
  )


def test_streams_draw_as_the_order_specification_says_however_they_read(shared_cache, plan):
  expected_rows = ExpectedRows(plan, [shared_cache])
  transforms = {"demo": [Map(dict), RandomMap(jitter)]}

  def made_of(row):
    if row is None:
      return {name: np.zeros_like(value) for name, value in caches.padded_row(caches.example_of(0)).items()}
    rng = generator_of(epoch=row.epoch, index=row.index, seed=3, place=1)
    return caches.padded_row(jitter(shared_cache.examples[row.index], rng))

  expected = [[made_of(row) for row in expected_rows.rows(step)] for step in range(plan.num_steps)]
  for prefetch_batches in (0, 4):
    with open_stream(
      plan, shared_cache.root, transforms=transforms, prefetch_batches=prefetch_batches
    ) as stream:
      for step, batch in enumerate(stream):
        assert_same_rows(rows_of(batch), expected[step])
  steps = list(range(plan.num_steps))
  random.Random(1).shuffle(steps)
  with open_stream(plan, shared_cache.root, transforms=transforms, rows=[5, 1]) as stream:
    for step in steps:
      assert_same_rows(rows_of(stream.batch(step)), [expected[step][5], expected[step][1]])


def test_worker_processes_draw_the_same(shared_cache, plan):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  transforms = {"demo": RandomMap(jitter)}
  dataset = StreamDataset(plan, str(shared_cache.root), transforms=transforms)
  options = grain.multiprocessing.MultiprocessingOptions(num_workers=1)
  here = [batch_digest(batch) for batch in dataset]
  assert [batch_digest(batch) for batch in dataset.mp_prefetch(options)] == here
  assert here != [batch_digest(batch) for batch in StreamDataset(plan, str(shared_cache.root))]


def image_of(ordinal):
  rng = np.random.default_rng(ordinal)
  return rng.integers(0, 256, (6 + ordinal % 3, 5 + ordinal % 4, 3), np.uint8)


def png_of(ordinal):
  buffer = io.BytesIO()
  Image.fromarray(image_of(ordinal)).save(buffer, "PNG")
  return buffer.getvalue()


def cropped(image, rng):
  """Four rows and columns of an image from anywhere, or their mirror image."""
  top, left = (int(rng.integers(size - 4 + 1)) for size in image.shape[:2])
  crop = image[top : top + 4, left : left + 4]
  return crop[:, ::-1] if rng.random() < 0.5 else crop


def decode_and_crop(example, rng):
  image = np.asarray(Image.open(io.BytesIO(example["png"])))
  return {"image": cropped(image, rng), "label": example["label"]}


@pytest.mark.parametrize("lengths", [{}, {"image": 4}], ids=["ragged", "filled"])
def test_images_are_decoded_cropped_and_flipped_at_reading(tmp_path, lengths):
  built = caches.build(
    tmp_path,
    task="images",
    features={"label": Feature(dtype="int32", shape=()), "png": Feature(dtype="string", shape=())},
    example_of=lambda ordinal: {"label": np.int32(ordinal), "png": np.array(png_of(ordinal), object)},
  )
  plan = Plan.start(built.open(), batch_size=10, num_epochs=2, feature_lengths=lengths)
  expected_rows = ExpectedRows(plan, [built])
  crops = set()
  with open_stream(plan, tmp_path, transforms={"images": RandomMap(decode_and_crop)}) as stream:
    for step, batch in enumerate(stream):
      images = batch["image"] if lengths else batch["image"].rows()
      assert np.shape(images) == (10, 4, 4, 3)
      for row, image, label in zip(expected_rows.rows(step), images, batch["label"], strict=True):
        assert label == built.examples[row.index]["label"]
        rng = generator_of(task="images", epoch=row.epoch, index=row.index)
        assert caches.same_array(image, cropped(image_of(int(label)), rng))
        crops.add(image.tobytes())
  assert len(crops) > 90  # Of 100, a few by chance the same in both epochs.


def sound_of(ordinal):
  return np.random.default_rng(ordinal).integers(-(2**15), 2**15, 30 + 9 * (ordinal % 5), np.int16)


def quieter(example, rng):
  return {**example, "sound": (example["sound"] * rng.uniform(0.1, 1)).astype(example["sound"].dtype)}


def log_spectrogram(sound):
  """`(frames, 9) float32`: frames of 16 samples, each 8 after the one before it."""
  starts = range(0, len(sound) - 16 + 1, 8)
  frames = np.stack([sound[start : start + 16].astype(np.float32) for start in starts])
  return np.log1p(np.abs(np.fft.rfft(frames * np.hanning(16).astype(np.float32)))).astype(np.float32)


def to_frames(example):
  return {"frames": log_spectrogram(example["sound"])}


@pytest.mark.parametrize("dtype", ["int16", "float32"])
@pytest.mark.parametrize("lengths", [{}, {"frames": 5}], ids=["ragged", "filled"])
def test_sounds_become_frames_at_reading(tmp_path, dtype, lengths):
  built = caches.build(
    tmp_path,
    task="sounds",
    features={"sound": Feature(dtype=dtype, shape=(None,))},
    example_of=lambda ordinal: {"sound": sound_of(ordinal).astype(dtype)},
  )
  plan = Plan.start(built.open(), batch_size=10, num_epochs=2, feature_lengths=lengths)
  expected_rows = ExpectedRows(plan, [built])
  transforms = {"sounds": [RandomMap(quieter), Map(to_frames)]}
  with open_stream(plan, tmp_path, transforms=transforms) as stream:
    for step, batch in enumerate(stream):
      expected = []
      for row in expected_rows.rows(step):
        rng = generator_of(task="sounds", epoch=row.epoch, index=row.index)
        frames = log_spectrogram(quieter(built.examples[row.index], rng)["sound"])
        expected.append(caches.padded_row({"frames": frames}, lengths))
      assert {len(row["frames"]) for row in expected} <= ({5} if lengths else {2, 3, 5, 6, 7})
      assert_same_rows(rows_of(batch), expected)
