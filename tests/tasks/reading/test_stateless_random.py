"""Random numbers without TensorFlow: TensorFlow's own, to the bit."""

import warnings

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.tasks.reading import stateless_random
from anystep.tasks.reading.stateless_random import random_words, uniform_floats, uniform_ints

SEEDS = st.tuples(*[st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**31 - 1)] * 2)


def tensorflow_floats(seed, count):
  return tf.random.stateless_uniform([count], tf.constant(seed, tf.int64)).numpy()


def assert_floats_are_tensorflow_s(seeds, counts):
  floats = uniform_floats(seeds, counts)
  np.testing.assert_array_equal(floats.lengths, counts)
  for seed, count, row in zip(seeds, counts, floats.rows(), strict=True):
    assert row.dtype == np.float32
    np.testing.assert_array_equal(row.view(np.uint32), tensorflow_floats(seed, count).view(np.uint32))


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(SEEDS, st.integers(0, 20) | st.integers(0, 2000)), min_size=1, max_size=8))
def test_floats_of_any_seeds_are_tensorflow_s(rows):
  seeds, counts = zip(*rows, strict=True)
  assert_floats_are_tensorflow_s(np.array(seeds, np.int64), np.array(counts, np.int64))


def test_floats_of_thousands_of_seeds_are_tensorflow_s():
  generator = np.random.default_rng(0)
  seeds = generator.integers(0, 2**31, (2000, 2))
  assert_floats_are_tensorflow_s(seeds, np.concatenate([np.arange(1000), np.arange(1000) % 9]))


def test_as_many_floats_as_tensorflow_makes_in_several_threads_are_the_same():
  assert_floats_are_tensorflow_s(np.array([[3, 2**31 - 1]]), np.array([1_000_003]))


def test_integers_are_tensorflow_s():
  generator = np.random.default_rng(1)
  seeds = generator.integers(0, 2**31, (2000, 2))
  limits = np.concatenate([generator.integers(1, 2**31, 1000), np.arange(1, 999), [2**31 - 1, 2**30 + 1]])
  drawn = uniform_ints(seeds, limits)
  for seed, limit, value in zip(seeds, limits.tolist(), drawn.tolist(), strict=True):
    assert value == tf.random.stateless_uniform([], seed, maxval=limit, dtype=tf.int32).numpy()


def test_no_seeds_give_nothing():
  nothing = np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
  assert len(uniform_floats(*nothing)) == len(uniform_ints(*nothing)) == 0


def test_loops_give_the_same_where_they_are_not_compiled():
  """And nothing overflows, of which numpy would warn."""
  generator = np.random.default_rng(2)
  seeds, counts = generator.integers(0, 2**63, (40, 2), np.uint64), np.arange(40)
  words = np.empty(counts.sum(), np.uint32)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    stateless_random._fill.plain(seeds, counts, words)
  np.testing.assert_array_equal(words, random_words(seeds.view(np.int64), counts))
