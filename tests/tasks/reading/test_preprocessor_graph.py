"""What is seen of preprocessors from the graph that they build, without running it."""

import caches
import numpy as np
import pytest
import seqio
import tensorflow as tf

from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.tasks import preprocessors
from anystep.tasks.reading.preprocessor_graph import PreprocessorGraph

VOCABULARY = seqio.ByteVocabulary(extra_ids=125)
LENGTHS = {"inputs": 16, "targets": 16}
TASK = seqio.Task(
  "graph",
  source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"]),
  preprocessors=[],
  output_features={name: seqio.Feature(VOCABULARY) for name in LENGTHS},
)


def graph_of(*chain):
  return PreprocessorGraph(TASK, chain, caches.FEATURES, LENGTHS)


@seqio.map_over_dataset
def leave_alone(example):
  return example


@seqio.map_over_dataset(num_seeds=5)
def draw(example, seeds):
  return {**example, "draw": tf.random.stateless_uniform([], seeds[4])}


def keep_even(dataset):
  return dataset.filter(lambda example: example["number"] % 2 == 0)


def configured(dataset):
  options = tf.data.Options()
  options.deterministic = True
  return dataset.with_options(options)


def paired_with_itself(dataset):
  return tf.data.Dataset.zip((dataset, dataset)).map(lambda one, other: one)


def explode(dataset):
  return dataset.flat_map(lambda example: tf.data.Dataset.from_tensors(example))


KEEPS, MAY_DROP, JOINS = (False, False), (True, False), (True, True)


@pytest.mark.parametrize(
  ("preprocessor", "expected"),
  [
    (leave_alone, KEEPS),
    (draw, KEEPS),
    (preprocessors.random_chunk, KEEPS),
    (preprocessors.span_corruption, KEEPS),
    (seqio.preprocessors.append_eos, KEEPS),
    (configured, KEEPS),
    (paired_with_itself, KEEPS),
    (lambda dataset: dataset, KEEPS),
    (lambda dataset: dataset.map(lambda example: example), KEEPS),
    (lambda dataset: dataset.map(lambda e: e, num_parallel_calls=2, deterministic=True), KEEPS),
    (lambda dataset: dataset.prefetch(2), KEEPS),
    (keep_even, MAY_DROP),
    (explode, MAY_DROP),
    (lambda dataset: dataset.interleave(tf.data.Dataset.from_tensors), MAY_DROP),
    (lambda dataset: dataset.scan(0, lambda state, example: (state, example)), MAY_DROP),
    (lambda dataset: dataset.ignore_errors(), MAY_DROP),
    (lambda dataset: tf.data.Dataset.zip((dataset, keep_even(dataset))), MAY_DROP),
    (lambda dataset: dataset.enumerate().map(lambda number, example: example), MAY_DROP),
    (lambda dataset: dataset.take(10**9), JOINS),
    (lambda dataset: dataset.take_while(lambda example: example["number"] < 3), JOINS),
    (lambda dataset: dataset.skip(0), JOINS),
    (lambda dataset: dataset.shard(1, 0), JOINS),
    (lambda dataset: dataset.repeat(1), JOINS),
    (lambda dataset: dataset.repeat(), JOINS),
    (lambda dataset: dataset.shuffle(2), JOINS),
    (lambda dataset: dataset.ragged_batch(2), JOINS),
    (lambda dataset: dataset.ragged_batch(1).unbatch(), JOINS),
    (lambda dataset: dataset.padded_batch(2), JOINS),
    (lambda dataset: dataset.window(2), JOINS),
    (lambda dataset: dataset.group_by_window(lambda _: tf.constant(0, tf.int64), lambda _, d: d, 2), JOINS),
    (lambda dataset: dataset.concatenate(dataset), JOINS),
    (lambda dataset: dataset.cache(), JOINS),
  ],
)
def test_may_drop_and_joins_follow_from_the_operations(preprocessor, expected):
  graph = graph_of(preprocessor)
  assert (*graph.may_drop, *graph.joins) == expected


def test_may_drop_holds_from_the_first_that_may_on():
  assert graph_of(leave_alone, keep_even, draw).may_drop == [False, True, True]


def test_seeds_are_counted_for_each_preprocessor():
  def twice(dataset):
    return draw(leave_alone(draw(dataset)))

  assert graph_of(leave_alone, draw, keep_even, twice).num_seeds == [0, 5, 0, 10]


def test_a_function_that_autograph_has_to_convert_works_on_one_example_as_on_many():
  @seqio.map_over_dataset
  def branch(example):
    number = example["number"]
    if number % 2 == 0:
      number += 100
    return {**example, "number": number}

  built = [caches.example_of(ordinal) for ordinal in range(6)]
  batch = {"number": np.array([example["number"] for example in built])}
  features = {"number": caches.FEATURES["number"]}
  graph = PreprocessorGraph(TASK, [branch, keep_even], features, LENGTHS)
  kept, rows = graph.one_by_one(2)(batch, {})
  np.testing.assert_array_equal(kept["number"], [100, 102, 104])
  np.testing.assert_array_equal(rows, [0, 2, 4])


RAGGED_FEATURES = {
  "number": Feature(dtype="int64", shape=()),
  "pairs": Feature(dtype="float32", shape=(None, None, 2)),
  "table": Feature(dtype="int32", shape=(None, None)),
}
LENGTHS_OF_ROWS = ([2, 0, 1], [], [0], [3, 1])


def ragged_example(number):
  lengths = np.array(LENGTHS_OF_ROWS[number], np.int64)
  values = np.arange(lengths.sum(), dtype=np.int32) + 10 * number
  pairs = np.stack([values, values], axis=1).astype(np.float32)
  return {"number": np.int64(number), "pairs": Ragged(pairs, lengths), "table": Ragged(values, lengths)}


@seqio.map_over_dataset
def use_rows(example):
  table = example["table"]
  assert isinstance(table, tf.RaggedTensor)
  assert isinstance(example["pairs"], tf.RaggedTensor)
  return {**example, "table": tf.concat([table, [[7, 7]]], 0), "sums": tf.reduce_sum(table, axis=1)}


def expected_of(number):
  example = ragged_example(number)
  rows = [row.tolist() for row in example["table"].rows()]
  pairs = [row.tolist() for row in example["pairs"].rows()]
  return {"number": number, "pairs": pairs, "table": [*rows, [7, 7]], "sums": [sum(row) for row in rows]}


def as_lists(value):
  return [as_lists(row) for row in value.rows()] if isinstance(value, Ragged) else value.tolist()


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [3, 1], [1], []])
def test_rows_whose_lengths_differ_are_a_ragged_tensor_to_preprocessors(numbers):
  examples = [ragged_example(number) for number in numbers]
  batch = {"number": np.array(numbers, np.int64)}
  for name, inner_shape in (("pairs", (None, 2)), ("table", (None,))):
    dtype = np.dtype(RAGGED_FEATURES[name].dtype)
    batch[name] = Ragged.of_rows([example[name] for example in examples], dtype, inner_shape)
  graph = PreprocessorGraph(TASK, [use_rows, keep_even], RAGGED_FEATURES, LENGTHS)
  made = graph.together(1)(batch, {})
  expected = [expected_of(number) for number in numbers]
  assert {name: as_lists(feature) for name, feature in made.items()} == {
    name: [example[name] for example in expected] for name in made
  }
  kept, rows = graph.one_by_one(2)(batch, {})
  assert [numbers[row] for row in rows] == [number for number in numbers if number % 2 == 0]
  assert as_lists(kept["table"]) == [example["table"] for example in expected if example["number"] % 2 == 0]
  assert (kept["pairs"].dtype, kept["pairs"].shape[1:]) == (np.float32, (None, None, 2))
