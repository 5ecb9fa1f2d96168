"""Preprocessors after the cache: one example to one, drawn from the record alone."""

import itertools
import json

import caches
import numpy as np
import pytest
import seqio
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

import oracle
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.order.packing import PackingPolicy
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.tasks import preprocessors
from anystep.tasks.reading import task_reader as reading
from anystep.tasks.reading.task_reader import TaskReader, map_seeds, post_cache_preprocessors
from anystep.transforms.transform import Records

TASK, SPLIT, NUM_EXAMPLES = "reading", "train", 80
CHECKED_RECORDS = 8
VOCABULARY = seqio.ByteVocabulary(extra_ids=125)
# Few, for each makes every graph larger.
FEATURES = {"number": Feature(dtype="int64", shape=()), "targets": Feature(dtype="int32", shape=(None,))}


@pytest.fixture(scope="module", autouse=True)
def few_checked_records():
  """Each is run by itself, in milliseconds, whenever a reader is made."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reading, "_CHECKED_RECORDS", CHECKED_RECORDS)
    yield


def example_of(ordinal):
  generator = np.random.default_rng(ordinal)
  return {
    "number": np.int64(ordinal),
    "targets": generator.integers(3, 259, ordinal % 50).astype(np.int32),
  }


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  root = tmp_path_factory.mktemp("reading")
  return caches.build(
    root, task=TASK, num_examples=NUM_EXAMPLES, features=FEATURES, example_of=example_of
  ).open()


def task_of(preprocessors, outputs):
  return seqio.Task(
    TASK,
    source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=[SPLIT]),
    preprocessors=preprocessors,
    output_features={name: seqio.Feature(VOCABULARY) for name in outputs},
  )


def reader_of(cache, *after, outputs=("targets",), feature_lengths=None):
  """A reader with these preprocessors after the cache."""
  task = task_of([seqio.CacheDatasetPlaceholder(), *after], outputs)
  return TaskReader(task, cache, feature_lengths or {"targets": 16})


def records_of(indices, epochs=0, seed=0, task=TASK, split=SPLIT):
  indices = np.asarray(indices, np.int64)
  return Records(np.broadcast_to(np.asarray(epochs, np.int64), indices.shape), indices, task, split, seed)


def rows_of(batch):
  """A batch's features, row by row."""
  columns = {name: f.rows() if isinstance(f, Ragged) else list(f) for name, f in batch.items()}
  count = max(map(len, columns.values()))
  return [{name: np.asarray(column[row]) for name, column in columns.items()} for row in range(count)]


def read(reader, cache, indices, epochs=0, seed=0):
  """The read examples' features, row by row."""
  records = records_of(indices, epochs, seed)
  return rows_of(reader(cache.read(records.indices), records))


def survey(reader, cache, indices, epochs=0, seed=0):
  """The kept examples' features, by index; indices may not repeat."""
  records = records_of(indices, epochs, seed)
  batch, rows = reader.survey(cache.read(records.indices), records)
  assert (rows.dtype, rows.tolist()) == (np.int64, sorted(set(rows.tolist())))
  return dict(zip(records.indices[rows].tolist(), rows_of(batch), strict=True))


def assert_same_rows(got, expected):
  assert len(got) == len(expected)
  for one, other in zip(got, expected, strict=True):
    assert one.keys() == other.keys()
    for name in one:
      assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
      np.testing.assert_array_equal(one[name], other[name])


def show_seeds(name, num_seeds):
  """A random map that adds its seeds to the example, `(num_seeds, 2)`."""

  def show(example, seed=None, seeds=None):
    shown = [seed] if seeds is None else seeds
    return {**example, name: tf.stack([tf.stack(pair) for pair in shown])}

  if num_seeds == 1:
    return seqio.map_over_dataset(lambda example, seed: show(example, seed=seed), num_seeds=1)
  return seqio.map_over_dataset(lambda example, seeds: show(example, seeds=seeds), num_seeds=num_seeds)


def leave_alone(dataset):
  return dataset


def two_random_maps(dataset):
  return show_seeds("second", 6)(leave_alone(show_seeds("first", 1)(dataset)))


class TestSeeds:
  def test_are_the_order_specification_s(self):
    epochs, indices = np.array([0, 3, 1, 3, 0, 70]), np.array([0, 7, 7, 8, 2**40, 7])
    for num_seeds in (1, 3, 4, 5, 9):
      for task, split, seed, preprocessor in itertools.product(["a:b", "c"], ["train"], [0, 5], [0, 2]):
        records = records_of(indices, epochs)
        pairs = map_seeds(task, split, seed, preprocessor, records, num_seeds)
        assert pairs.dtype == np.int64
        for row, epoch, index in zip(pairs.tolist(), epochs.tolist(), indices.tolist(), strict=True):
          assert [tuple(pair) for pair in row] == oracle.map_seeds(
            task, split, seed, epoch, preprocessor, index, num_seeds
          )

  def test_are_those_that_are_published(self):
    pairs = map_seeds("demo", "train", 0, 0, records_of([7], 1), 2)
    assert pairs.tolist() == [[[405977816, 631289882], [1826214654, 1455826295]]]

  def test_reach_each_random_map_of_each_preprocessor(self, cache):
    """A preprocessor's random maps share its pairs, in order; every preprocessor counts, random or not."""
    reader = reader_of(cache, show_seeds("alone", 5), leave_alone, two_random_maps)
    indices, epochs = [5, 70, 5, 0], [0, 0, 2, 1]
    for row, index, epoch in zip(read(reader, cache, indices, epochs, seed=9), indices, epochs, strict=True):
      given = {p: oracle.map_seeds(TASK, SPLIT, 9, epoch, p, index, n) for p, n in {0: 5, 2: 7}.items()}
      assert row["alone"].tolist() == [list(pair) for pair in given[0]]
      assert row["first"].tolist() == [list(pair) for pair in given[2][:1]]
      assert row["second"].tolist() == [list(pair) for pair in given[2][1:]]

  def test_differ_between_seeds_epochs_records_preprocessors_and_pairs(self, cache):
    reader = reader_of(cache, show_seeds("a", 5), show_seeds("b", 1))
    assert reader.is_random
    pairs = []
    for seed, epoch in itertools.product((0, 1), (0, 1, 2)):
      for row in read(reader, cache, range(40), epoch, seed):
        pairs += [*map(tuple, row["a"].tolist()), *map(tuple, row["b"].tolist())]
    assert len(set(pairs)) == len(pairs) == 2 * 3 * 40 * 6


def noised(example, seeds):
  noise = tf.random.stateless_uniform(tf.shape(example["targets"]), seeds[1], 0, 1000, tf.int32)
  return {**example, "targets": example["targets"] + noise}


add_noise = seqio.map_over_dataset(num_seeds=2)(noised)


@pytest.fixture(scope="module")
def noisy(cache):
  return reader_of(cache, leave_alone, add_noise)


@pytest.fixture(scope="module")
def reader(cache):
  return reader_of(cache, preprocessors.random_chunk, add_noise, seqio.preprocessors.append_eos)


class TestDraws:
  def test_are_the_same_alone_and_in_any_batch_in_any_order(self, cache, reader):
    places = [(index, epoch) for epoch in (0, 1, 7) for index in range(NUM_EXAMPLES)]
    alone = {place: read(reader, cache, [place[0]], place[1])[0] for place in places[::7]}
    generator = np.random.default_rng(0)
    for size in (1, 2, 37, len(places)):
      batch = [places[k] for k in generator.permutation(len(places))[:size]]
      batch += list(alone)
      rows = read(reader, cache, *zip(*batch, strict=True))
      assert_same_rows(rows[size:], list(alone.values()))
      again = read(reader, cache, *zip(*reversed(batch), strict=True))
      assert_same_rows(again[::-1], rows)

  def test_are_the_same_twice_in_a_batch(self, cache, reader):
    rows = read(reader, cache, [49, 3, 49, 49], [2, 2, 2, 3])
    assert_same_rows(rows[2:3], rows[:1])
    assert rows[3]["targets"].tobytes() != rows[0]["targets"].tobytes()

  def test_are_the_same_of_another_reader(self, cache, reader):
    other = reader_of(cache, preprocessors.random_chunk, add_noise, seqio.preprocessors.append_eos)
    assert_same_rows(read(other, cache, range(80), 3), read(reader, cache, range(80), 3))

  def test_differ_between_epochs_and_between_seeds(self, cache, reader):
    long = [index for index in range(NUM_EXAMPLES) if len(cache[index]["targets"]) > 2]
    first, second, seeded = (
      [row["targets"].tobytes() for row in rows]
      for rows in (read(reader, cache, long), read(reader, cache, long, 1), read(reader, cache, long, seed=1))
    )
    assert len({*first, *second, *seeded}) == 3 * len(long)


def undecorated(monkeypatch, preprocessor, *args):
  """The map function that a preprocessor hands to `seqio.map_over_dataset`."""
  found = []

  def keep(*, num_seeds):
    return lambda map_fn: lambda dataset: found.append((map_fn, num_seeds))

  with monkeypatch.context() as patch:
    patch.setattr(seqio, "map_over_dataset", keep)
    preprocessor(None, *args)
  ((map_fn, num_seeds),) = found
  return map_fn, num_seeds


def constants(pairs):
  return [tf.constant(pair, tf.int64) for pair in pairs]


class TestResults:
  def test_are_those_of_the_map_functions_with_these_seeds(self, cache, monkeypatch):
    """Of a chunk with noise and an end token, each record by itself and without tf.data."""
    chunk, chunk_seeds = undecorated(monkeypatch, preprocessors.random_chunk, {"targets": 14})
    reader = reader_of(
      cache,
      leave_alone,
      preprocessors.random_chunk,
      add_noise,
      seqio.preprocessors.append_eos,
      feature_lengths={"targets": 14},
    )
    for index, row in enumerate(read(reader, cache, range(NUM_EXAMPLES), 6, seed=4)):
      (pair,) = constants(oracle.map_seeds(TASK, SPLIT, 4, 6, 1, index, chunk_seeds))
      expected = chunk({"targets": tf.constant(cache[index]["targets"])}, pair)
      expected = noised(expected, constants(oracle.map_seeds(TASK, SPLIT, 4, 6, 2, index, 2)))
      np.testing.assert_array_equal(row["targets"], [*expected["targets"].numpy(), VOCABULARY.eos_id])
      assert row["targets"].dtype == np.int32

  def test_are_the_cache_s_own_where_nothing_stands_after_it(self, cache):
    rows = read(reader_of(cache), cache, [3, 79, 0])
    assert_same_rows(rows, [{k: np.asarray(v) for k, v in cache[index].items()} for index in (3, 79, 0)])

  def test_pass_on_features_that_no_preprocessor_touches(self, tmp_path):
    untouched = {
      "share": Feature(dtype="float32", shape=()),
      "text": Feature(dtype="string", shape=()),
      "weights": Feature(dtype="float32", shape=(None, 2)),
    }
    cache = caches.build(
      tmp_path,
      task=TASK,
      num_examples=20,
      features={**FEATURES, **untouched},
      example_of=lambda ordinal: {
        **example_of(ordinal),
        "share": np.float32(ordinal / 7),
        "text": f"text {ordinal}".encode(),
        "weights": np.random.default_rng(ordinal).random((ordinal % 3, 2), np.float32),
      },
    ).open()
    originals = rows_of(cache.read(np.arange(20)))
    for row, original in zip(read(reader_of(cache, add_noise), cache, range(20)), originals, strict=True):
      assert_same_rows([{name: row[name] for name in untouched}], [{n: original[n] for n in untouched}])

  def test_are_given_the_plan_s_lengths_and_the_task_s_features(self, cache):
    def mark(dataset, sequence_length, output_features):
      size = sequence_length["targets"] * 1000 + output_features["targets"].vocabulary.extra_ids
      return dataset.map(lambda example: {**example, "number": tf.constant(size, tf.int64)})

    (row,) = read(reader_of(cache, mark, feature_lengths={"targets": 21}), cache, [0])
    assert row["number"] == 21125

  def test_of_no_record_are_no_rows(self, cache, noisy):
    assert read(noisy, cache, []) == []
    assert read(reader_of(cache, preprocessors.random_chunk), cache, []) == []


def repeat(dataset):
  return dataset.flat_map(lambda example: tf.data.Dataset.from_tensors(example).repeat(2))


def repeat_then_chunk(dataset):
  """As many examples as came in: the seeds run out first."""
  return preprocessors.random_chunk(repeat(dataset), {"targets": 16})


def drop_every_third(dataset):
  return dataset.filter(lambda example: example["number"] % 3 > 0)


def drop_all(dataset):
  return dataset.filter(lambda example: example["number"] < 0)


def take_five(dataset):
  return dataset.take(5)


def take_a_hundred(dataset):
  """More than are looked at."""
  return dataset.take(100)


def skip_one(dataset):
  return dataset.skip(1)


def every_other(dataset):
  return dataset.shard(2, 0)


def first_of_each_window(dataset):
  return dataset.window(3).flat_map(lambda window: tf.data.Dataset.zip(window).take(1))


def hundreds(dataset):
  return dataset.ragged_batch(100, drop_remainder=True)


def drop_after_the_neighbour(dataset):
  """Drops what follows a multiple of three."""

  def look(before, example):
    return example["number"], (before, example)

  dataset = dataset.scan(tf.constant(1, tf.int64), look).filter(lambda before, example: before % 3 > 0)
  return dataset.map(lambda before, example: example)


def join_neighbours(dataset):
  return dataset.ragged_batch(2).map(lambda pair: {"targets": pair["targets"].values})


def look_at_the_neighbour(dataset):
  """Appends the number of the example before."""

  def append(before, example):
    targets = tf.concat([example["targets"], [tf.cast(before, tf.int32)]], 0)
    return example["number"], {**example, "targets": targets}

  return dataset.scan(tf.constant(0, tf.int64), append)


def shuffle(dataset):
  return dataset.shuffle(100, seed=3)


def add(example, noise):
  return {**example, "targets": example["targets"] + noise}


def draw_without_a_seed(dataset):
  return dataset.map(lambda example: add(example, tf.random.uniform([], 0, 10**6, tf.int32)))


def draw_with_a_seed_of_its_own(dataset):
  return dataset.map(
    lambda example: add(example, tf.random.uniform([], maxval=10**6, dtype=tf.int32, seed=1))
  )


def drop_without_a_seed(dataset):
  return dataset.filter(lambda example: tf.random.uniform([]) < 0.5)


def draw_when_built(dataset):
  noise = int(np.random.default_rng().integers(10**6))
  return dataset.map(lambda example: add(example, noise))


NOT_ONE_TO_ONE = [
  repeat,
  repeat_then_chunk,
  take_five,
  take_a_hundred,
  skip_one,
  every_other,
  first_of_each_window,
  hundreds,
  drop_after_the_neighbour,
  join_neighbours,
  look_at_the_neighbour,
  shuffle,
]
UNSEEDED = [draw_without_a_seed, drop_without_a_seed, draw_when_built]


class TestRefused:
  """Preprocessors that are no function of one record and its seeds."""

  @pytest.mark.parametrize("culprit", NOT_ONE_TO_ONE)
  def test_is_what_makes_or_joins_examples_with_the_way_to_cache_it(self, cache, culprit):
    with pytest.raises(AnystepError) as caught:
      reader_of(cache, leave_alone, culprit, preprocessors.random_chunk)
    assert (caught.value.code, caught.value.kind) == (78, "preprocessor_not_one_to_one")
    assert caught.value.fields["task"] == TASK
    assert caught.value.fields["preprocessor"] == culprit.__name__
    assert "--cache_at=end" in caught.value.fix

  @pytest.mark.parametrize("culprit", UNSEEDED)
  def test_is_what_draws_without_a_seed_with_the_way_to_take_one(self, cache, culprit):
    with pytest.raises(AnystepError) as caught:
      reader_of(cache, leave_alone, culprit, preprocessors.random_chunk)
    assert (caught.value.code, caught.value.kind) == (78, "preprocessor_unseeded")
    assert caught.value.fields["task"] == TASK
    assert caught.value.fields["preprocessor"] == culprit.__name__
    assert "seqio.map_over_dataset" in caught.value.fix

  @pytest.mark.parametrize("culprit", [repeat, repeat_then_chunk, draw_with_a_seed_of_its_own])
  def test_is_the_last_by_name(self, cache, culprit):
    with pytest.raises(AnystepError) as caught:
      reader_of(cache, leave_alone, culprit)
    assert caught.value.fields["preprocessor"] == culprit.__name__

  @pytest.mark.parametrize("culprit", [look_at_the_neighbour, draw_without_a_seed])
  def test_is_one_after_a_filter_by_name(self, cache, culprit):
    with pytest.raises(AnystepError) as caught:
      reader_of(cache, drop_every_third, add_noise, culprit)
    assert caught.value.fields["preprocessor"] == culprit.__name__

  def test_is_a_task_whose_output_features_are_not_made(self, cache):
    with pytest.raises(AnystepError) as caught:
      reader_of(cache, leave_alone, outputs=("targets", "summary"))
    assert (caught.value.code, caught.value.kind) == (78, "output_features")
    assert "summary" in caught.value.fields["got"]

  @pytest.mark.parametrize("indices", [[CHECKED_RECORDS - 1, CHECKED_RECORDS], [CHECKED_RECORDS]])
  def test_is_a_dropped_record_when_it_is_read(self, cache, indices):
    """Units have none but kept records: it is not taken in silence."""
    late = cache[CHECKED_RECORDS]["number"]
    reader = reader_of(cache, lambda dataset: dataset.filter(lambda example: example["number"] != late))
    assert len(read(reader, cache, [0, 1])) == 2
    with pytest.raises(AnystepError) as caught:
      read(reader, cache, indices)
    assert (caught.value.code, caught.value.kind) == (65, "example_dropped")
    assert caught.value.fields["task"] == TASK
    assert caught.value.fields["expected"] == f"{len(indices)} examples"
    assert caught.value.fields["got"] == str(len(indices) - 1)

  def test_is_a_record_that_gives_several_for_the_first_time_when_it_is_surveyed(self, cache):
    late = cache[CHECKED_RECORDS]["number"]

    def repeat_the_late(dataset):
      def copies(example):
        count = tf.where(example["number"] == late, tf.constant(2, tf.int64), 1)
        return tf.data.Dataset.from_tensors(example).repeat(count)

      return dataset.flat_map(copies)

    reader = reader_of(cache, leave_alone, repeat_the_late, add_noise)
    assert sorted(survey(reader, cache, range(CHECKED_RECORDS))) == list(range(CHECKED_RECORDS))
    with pytest.raises(AnystepError) as caught:
      read(reader, cache, [0, CHECKED_RECORDS])
    assert (caught.value.code, caught.value.fields["got"]) == (65, "3")
    with pytest.raises(AnystepError) as caught:
      survey(reader, cache, [0, CHECKED_RECORDS])
    assert (caught.value.code, caught.value.kind) == (78, "preprocessor_not_one_to_one")
    assert caught.value.fields["preprocessor"] == "repeat_the_late"
    assert "--cache_at=end" in caught.value.fix


@seqio.map_over_dataset(num_seeds=1)
def draw_share(example, seed):
  return {**example, "share": tf.random.stateless_uniform([], seed)}


def drop_below_half(dataset):
  return dataset.filter(lambda example: example["share"] >= 0.5)


@pytest.fixture(scope="module")
def filtering(cache):
  return reader_of(cache, drop_every_third, add_noise)


class TestFilters:
  def test_may_drop_is_told(self, filtering, noisy):
    assert filtering.may_drop
    assert filtering.appended_tokens is None
    assert not noisy.may_drop

  def test_keep_what_seqio_keeps(self, cache, filtering):
    assert sorted(survey(filtering, cache, range(NUM_EXAMPLES))) == [
      index for index in range(NUM_EXAMPLES) if cache[index]["number"] % 3
    ]

  def test_leave_the_draws_of_what_they_keep_as_they_are(self, cache, filtering, noisy):
    for epoch, seed in ((0, 0), (2, 5)):
      for index, row in survey(filtering, cache, range(NUM_EXAMPLES), epoch, seed).items():
        assert_same_rows([row], read(noisy, cache, [index], epoch, seed))

  def test_give_the_same_at_survey_and_at_reading_whatever_stands_beside(self, cache, filtering):
    surveyed = survey(filtering, cache, range(NUM_EXAMPLES), 3)
    order = np.random.default_rng(1).permutation(NUM_EXAMPLES)
    for part in np.array_split(order, 3):
      for index, row in survey(filtering, cache, part, 3).items():
        assert_same_rows([row], [surveyed[index]])
    kept = [index for index in order.tolist() if index in surveyed]
    assert_same_rows(read(filtering, cache, kept, 3), [surveyed[index] for index in kept])

  def test_may_follow_from_a_record_s_draws(self, cache):
    reader = reader_of(cache, draw_share, drop_below_half, add_noise, drop_every_third)
    kept = []
    for epoch in (0, 1):
      pairs = [oracle.map_seeds(TASK, SPLIT, 0, epoch, 0, index, 1)[0] for index in range(NUM_EXAMPLES)]
      shares = [tf.random.stateless_uniform([], pair).numpy() for pair in pairs]
      numbers = [cache[index]["number"] for index in range(NUM_EXAMPLES)]
      expected = [k for k in range(NUM_EXAMPLES) if shares[k] >= 0.5 and numbers[k] % 3]
      surveyed = survey(reader, cache, range(NUM_EXAMPLES), epoch)
      assert sorted(surveyed) == expected
      assert_same_rows(read(reader, cache, expected, epoch), list(surveyed.values()))
      kept.append(expected)
    assert kept[0] != kept[1]

  def test_may_drop_all(self, cache):
    assert survey(reader_of(cache, drop_all, add_noise), cache, range(NUM_EXAMPLES)) == {}

  def test_that_are_none_keep_every_row_at_survey(self, cache, noisy):
    surveyed = survey(noisy, cache, range(NUM_EXAMPLES), 1)
    assert_same_rows(list(surveyed.values()), read(noisy, cache, range(NUM_EXAMPLES), 1))


class TestStreams:
  LENGTHS = {"targets": 64}  # noqa: RUF012

  def stream_of(self, cache, reader, packing):
    settings = {"transforms": {TASK: reader}}
    plan = Plan.start(
      cache,
      batch_size=6,
      feature_lengths=self.LENGTHS,
      seed=3,
      num_epochs=2,
      packing=packing,
      **settings,
    )
    return open_stream(plan, {TASK: cache}, **settings)

  @pytest.mark.parametrize("packing", PackingPolicy)
  def test_give_every_kept_record_what_it_is_given_alone(self, cache, filtering, packing):
    index_of = {int(cache[index]["number"]): index for index in range(NUM_EXAMPLES)}
    expected = [survey(filtering, cache, range(NUM_EXAMPLES), epoch, 3) for epoch in (0, 1)]
    seen = [[], []]
    with self.stream_of(cache, filtering, packing) as stream:
      for step in range(stream.plan.num_steps):
        planned = stream.plan.batch(step)
        epochs = planned.epoch[planned.task >= 0]
        examples, counts = stream.examples(planned)
        assert (counts is None) == (packing is PackingPolicy.NONE)
        epochs = epochs if counts is None else np.repeat(epochs, counts)
        for epoch, row in zip(epochs.tolist(), rows_of(examples), strict=True):
          index = index_of[int(row["number"])]
          assert_same_rows([row], [expected[epoch][index]])
          seen[epoch].append(index)
    assert [sorted(indices) for indices in seen] == [sorted(kept) for kept in expected]

  @pytest.mark.parametrize("packing", [PackingPolicy.NONE, PackingPolicy.BEST_FIT])
  def test_go_on_with_the_same_draws_after_a_resume(self, cache, filtering, packing):
    with self.stream_of(cache, filtering, packing) as stream:
      whole = [batch_digest(batch) for batch in stream]
    assert len(set(whole)) == len(whole)
    for step in range(0, len(whole), 3):
      with self.stream_of(cache, filtering, packing) as resumed:
        resumed.set_state({"version": 1, "step": step})
        assert [batch_digest(batch) for batch in resumed] == whole[step:]


class TestIdentity:
  def test_is_json_that_the_preprocessors_the_features_and_the_lengths_decide(self, cache):
    identities = [
      reader_of(cache, *after, outputs=outputs, feature_lengths=lengths).identity
      for after, outputs, lengths in [
        ([], ["targets"], {"targets": 16}),
        ([seqio.utils.trim_dataset], ["targets"], {"targets": 16}),
        ([seqio.preprocessors.append_eos], ["targets"], {"targets": 16}),
        ([seqio.utils.trim_dataset, seqio.preprocessors.append_eos], ["targets"], {"targets": 16}),
        ([seqio.preprocessors.append_eos, seqio.utils.trim_dataset], ["targets"], {"targets": 16}),
        ([], ["targets"], {"targets": 17}),
        ([], ["targets"], {"targets": 16, "weights": 3}),
        ([], [], {"targets": 16}),
      ]
    ]
    texts = [json.dumps(identity, sort_keys=True) for identity in identities]
    assert len(set(texts)) == len(texts)
    again = reader_of(cache, seqio.utils.trim_dataset).identity
    assert json.dumps(again, sort_keys=True) == texts[1]


def step_one(dataset):
  return dataset


def step_two(dataset):
  return dataset


@pytest.mark.parametrize(
  ("steps", "cache_at", "expected"),
  [
    ([step_one, seqio.CacheDatasetPlaceholder(), step_two], "placeholder", [step_two]),
    ([seqio.CacheDatasetPlaceholder(), step_one, step_two], "placeholder", [step_one, step_two]),
    ([step_one, step_two, seqio.CacheDatasetPlaceholder()], "placeholder", []),
    ([step_one, seqio.CacheDatasetPlaceholder(), step_two], "end", []),
    ([step_one, step_two], "end", []),
    ([step_one, step_two], "placeholder", []),
  ],
)
def test_what_runs_at_reading_stands_after_the_cache(steps, cache_at, expected):
  assert post_cache_preprocessors(task_of(steps, ["targets"]), cache_at) == expected


class TestSeqio:
  """SeqIO's random maps: that reading replaces all of them, and leaves them as they were."""

  @pytest.mark.parametrize("num_seeds", [1, 2])
  def test_makes_every_random_map_through_the_class_that_reading_replaces(self, monkeypatch, num_seeds):
    calls = []
    monkeypatch.setattr(
      seqio.utils._GrainRandomMapFn, "__call__", lambda self, dataset: calls.append((self.num_seeds, dataset))
    )
    show_seeds("shown", num_seeds)("a dataset")
    assert calls == [(num_seeds, "a dataset")]

  def draws(self):
    dataset = tf.data.Dataset.from_tensor_slices({"targets": tf.zeros([50, 3], tf.int32)})
    with seqio.utils.map_seed_manager(7):
      dataset = add_noise(show_seeds("shown", 1)(dataset))
    return [example["targets"].tobytes() for example in dataset.as_numpy_iterator()]

  def test_draws_as_ever_outside_of_reading_and_finds_its_global_seed_as_it_was(self, cache):
    tf.random.set_seed(None)
    before, call = self.draws(), seqio.utils._GrainRandomMapFn.__call__
    tf.random.set_seed(12345)
    reader = reader_of(cache, add_noise)
    assert tf_context.global_seed() == 12345
    tf.random.set_seed(None)
    assert self.draws() == before
    read(reader, cache, [1, 2])
    assert self.draws() == before
    assert seqio.utils._GrainRandomMapFn.__call__ is call

  def test_draws_as_ever_after_a_preprocessor_that_raised(self, cache):
    before, call = self.draws(), seqio.utils._GrainRandomMapFn.__call__

    def fail(dataset):
      raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
      reader_of(cache, add_noise, fail)
    assert self.draws() == before
    assert seqio.utils._GrainRandomMapFn.__call__ is call


@pytest.fixture(scope="module")
def ragged_cache(tmp_path_factory):
  def example_of(ordinal):
    lengths = np.arange(ordinal % 4)
    values = np.arange(lengths.sum(), dtype=np.int32) + ordinal
    return {"number": np.int64(ordinal), "targets": Ragged(values, lengths)}

  features = FEATURES | {"targets": Feature(dtype="int32", shape=(None, None))}
  root = tmp_path_factory.mktemp("ragged")
  return caches.build(root, task=TASK, num_examples=20, features=features, example_of=example_of).open()


class TestRaggedRows:
  """A cached feature of rows whose lengths differ."""

  def test_are_a_preprocessor_s_ragged_tensor_and_drop_or_stay(self, ragged_cache):
    @seqio.map_over_dataset
    def flatten(example):
      return {"number": example["number"], "targets": example["targets"].flat_values}

    def keep_some(dataset):
      return dataset.filter(lambda example: example["number"] % 3 > 0)

    found = survey(reader_of(ragged_cache, flatten, keep_some), ragged_cache, range(20))
    examples = {index: ragged_cache[index] for index in range(20)}
    kept = [index for index, example in examples.items() if example["number"] % 3]
    assert {index: row["targets"].tolist() for index, row in found.items()} == {
      index: examples[index]["targets"].values.tolist() for index in kept
    }

  def test_stay_ragged_where_nothing_is_done_to_them(self, ragged_cache):
    task = seqio.Task(
      TASK,
      source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=[SPLIT]),
      preprocessors=[seqio.CacheDatasetPlaceholder(), seqio.utils.trim_dataset],
      output_features={"targets": seqio.Feature(VOCABULARY, rank=2, add_eos=False)},
    )
    indices = [3, 7, 7, 11]
    made = TaskReader(task, ragged_cache, {"targets": 2})(ragged_cache.read(indices), records_of(indices))
    expected = [[row.tolist() for row in ragged_cache[index]["targets"].rows()[:2]] for index in indices]
    assert [[row.tolist() for row in table.rows()] for table in made["targets"].rows()] == expected

  def test_with_unseeded_draws_in_them_are_refused(self, ragged_cache):
    @seqio.map_over_dataset
    def noisy(example):
      noise = tf.random.uniform(tf.shape(example["targets"].flat_values), 0, 100, tf.int32)
      targets = example["targets"]
      return {"noise": targets.with_flat_values(noise), "targets": targets.flat_values}

    with pytest.raises(AnystepError) as refused:
      reader_of(ragged_cache, noisy)
    assert refused.value.kind == "preprocessor_unseeded"
