"""Random preprocessors without TensorFlow: what the graph makes, to the bit."""

import collections
import functools
import types
import warnings

import numpy as np
import pytest
import seqio
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.tasks import preprocessors as reference
from anystep.tasks.reading import span_corruption
from anystep.tasks.reading import task_reader as reading
from anystep.tasks.reading.native_preprocessors import NativePreprocessors
from anystep.tasks.reading.span_corruption import corrupt_spans, count_noise, cut_random_chunks
from anystep.tasks.reading.task_reader import TaskReader
from anystep.transforms.transform import Records

VOCABULARY = seqio.ByteVocabulary(extra_ids=125)
FIRST_SENTINEL = VOCABULARY.vocab_size - 1
LONG = {"inputs": 512, "targets": 114}
append_eos = seqio.preprocessors.append_eos
WIDE = functools.partial(reference.span_corruption, noise_density=0.4, mean_span_tokens=1.5)
CHUNK_OF_INPUTS = functools.partial(reference.random_chunk, feature="inputs", sequence_length={"inputs": 4})
TWO_TOKENS = {"inputs": 3, "targets": 3}
# Preprocessors, feature lengths, the dtype of targets, and what the longest chunk is.
CASES = {
  "corrupt": ([reference.span_corruption, append_eos], {"inputs": 60, "targets": 24}, "int32", 66),
  "corrupt_two_tokens": ([reference.span_corruption], TWO_TOKENS, "int64", 2),
  "corrupt_more_of_a_chunk": (
    [reference.random_chunk, WIDE, append_eos, seqio.utils.trim_dataset],
    {"inputs": 18, "targets": 30},
    "int64",
    20,
  ),
  "corrupt_what_has_an_end": (
    [append_eos, WIDE, CHUNK_OF_INPUTS],
    {"inputs": 9, "targets": 5},
    "int32",
    6,
  ),
  "corrupt_twice": ([WIDE, reference.span_corruption], {"inputs": 40, "targets": 40}, "int32", 45),
  "chunk": (
    [append_eos, functools.partial(reference.random_chunk, feature="words"), reference.random_chunk],
    {"targets": 7, "words": 2},
    "int32",
    7,
  ),
  "lm": ([append_eos, reference.lm], {"targets": 7}, "int32", 7),
}


def task_of(chain, dtype):
  # A task with inputs gets them empty of lm.
  outputs = ["targets"] if reference.lm in chain else LONG
  return seqio.Task(
    "corrupted",
    source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"]),
    preprocessors=[seqio.CacheDatasetPlaceholder(), *chain],
    output_features={name: seqio.Feature(VOCABULARY, dtype=tf.as_dtype(dtype)) for name in outputs},
  )


def features_of(dtype):
  return {
    "inputs": Feature(dtype=dtype, shape=(None,)),
    "number": Feature(dtype="int64", shape=()),
    "targets": Feature(dtype=dtype, shape=(None,)),
    "words": Feature(dtype="string", shape=(None,)),
  }


def reader_of(chain, lengths, dtype, *, native):
  """A reader that has no other way than numpy, or none but the graph."""
  manifest = types.SimpleNamespace(
    features=features_of(dtype), cache_at="placeholder", task="corrupted", split="train"
  )
  with pytest.MonkeyPatch.context() as patch:
    if native:
      patch.setattr(reading, "PreprocessorGraph", None)
    else:
      patch.setattr(NativePreprocessors, "of", lambda *args: None)
      # It runs the graph in several ways, for which there is no cache.
      patch.setattr(TaskReader, "_check_preprocessors", lambda self, cache: None)
    return TaskReader(task_of(chain, dtype), types.SimpleNamespace(manifest=manifest), lengths)


@pytest.fixture(scope="module", params=CASES)
def case(request):
  *how, chunk_tokens = CASES[request.param]
  return reader_of(*how, native=True), reader_of(*how, native=False), how[-1], chunk_tokens


def ragged(rows, dtype):
  return Ragged.of_rows([np.asarray(row, dtype) for row in rows], np.dtype(dtype))


def batch_of(sizes, dtype, seed=0):
  generator = np.random.default_rng(seed)
  words = [[b"%d" % word for word in range(size % 5)] for size in sizes]
  return {
    "inputs": ragged([generator.integers(3, 259, size % 4) for size in sizes], dtype),
    "number": generator.integers(100, size=len(sizes)),
    "targets": ragged([generator.integers(3, 259, size) for size in sizes], dtype),
    "words": ragged(words, object),
  }


def rows_of(feature):
  return feature.rows() if isinstance(feature, Ragged) else list(feature)


def assert_same(got, expected):
  assert got.keys() == expected.keys()
  for name in got:
    assert len(got[name]) == len(expected[name])
    for one, other in zip(rows_of(got[name]), rows_of(expected[name]), strict=True):
      assert (one.dtype, one.shape) == (other.dtype, other.shape)
      np.testing.assert_array_equal(one, other)


def records_of(indices, epochs=0, seed=0):
  indices = np.asarray(indices, np.int64)
  epochs = np.broadcast_to(np.asarray(epochs, np.int64), indices.shape)
  return Records(epochs, indices, "corrupted", "train", seed)


@settings(max_examples=20, deadline=None)
@given(
  rows=st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 2), st.integers(0, 2**40), st.integers(0, 99)), max_size=40
  ),
  seed=st.integers(0, 2**40),
)
def test_a_batch_is_the_graph_s(case, rows, seed):
  """Sizes of 0 to 3, of about the longest chunk, and any."""
  native, graph, dtype, chunk_tokens = case
  sizes = [(abs(near), max(chunk_tokens + near, 0), any_size)[kind] for (near, kind, _, any_size) in rows]
  batch = batch_of(sizes, dtype, seed)
  indices = [index for _, _, index, _ in rows]
  records = records_of(indices, [index % 3 for index in indices], seed)
  assert_same(native(batch, records), graph(batch, records))


def test_a_batch_is_the_graph_s_for_all_sizes(case):
  native, graph, dtype, chunk_tokens = case
  sizes = np.repeat(np.arange(2 * chunk_tokens + 4), 3)
  batch = batch_of(sizes, dtype)
  records = records_of(np.arange(len(sizes)), 7, 3)
  got = native(batch, records)
  assert_same(got, graph(batch, records))
  assert (native.is_random, native.may_drop, native.appended_tokens) == (True, False, None)
  assert (graph.is_random, graph.may_drop) == (True, False)
  assert native.identity == graph.identity
  kept, rows = native.survey(batch, records)
  assert_same(kept, got)
  np.testing.assert_array_equal(rows, np.arange(len(sizes)))


def test_a_record_is_the_same_alone_in_any_batch_and_in_any_order(case):
  native, _, dtype, chunk_tokens = case
  sizes = np.arange(2 * chunk_tokens + 4)
  batch = batch_of(sizes, dtype)
  whole = native(batch, records_of(sizes, 1))

  def part(rows):
    return {
      name: Ragged.of_rows([feature.rows()[row] for row in rows], feature.values.dtype)
      if isinstance(feature, Ragged)
      else feature[rows]
      for name, feature in batch.items()
    }

  order = np.random.default_rng(0).permutation(len(sizes))
  for rows in [order, *np.array_split(order, 3), *order[:9].reshape(-1, 1)]:
    got = native(part(rows), records_of(sizes[rows], 1))
    for name in got:
      for one, row in zip(rows_of(got[name]), rows, strict=True):
        np.testing.assert_array_equal(one, rows_of(whole[name])[row])


def test_draws_differ_between_epochs_seeds_and_records():
  native = reader_of([reference.span_corruption], {"inputs": 60, "targets": 24}, "int32", native=True)
  rows = np.tile(np.arange(200), (30, 1)) + 3
  batch = batch_of([0] * 30, "int32") | {"targets": ragged(rows, "int32")}
  results = [
    native(batch, records_of(range(30), epoch, seed))["inputs"].rows() for epoch in (0, 1) for seed in (0, 1)
  ]
  assert len({row.tobytes() for result in results for row in result}) == 4 * 30


def map_function(monkeypatch, preprocessor, *args, **kwargs):
  """What a preprocessor hands to `seqio.map_over_dataset`."""
  found = []
  with monkeypatch.context() as patch:
    patch.setattr(
      seqio, "map_over_dataset", lambda *, num_seeds: lambda function: lambda _: found.append(function)
    )
    preprocessor(None, *args, **kwargs)
  (function,) = found
  return function


@pytest.mark.parametrize("settings", [{}, {"noise_density": 0.5, "mean_span_tokens": 1.0}])
def test_long_sequences_are_those_of_the_map_functions_with_these_seeds(monkeypatch, settings):
  outputs = task_of([], "int32").output_features
  lengths = LONG if not settings else {"inputs": 230, "targets": 240}
  corrupt = map_function(monkeypatch, reference.span_corruption, lengths, outputs, **settings)
  chunk = map_function(monkeypatch, reference.random_chunk, lengths)
  settings = settings or {"noise_density": 0.15, "mean_span_tokens": 3.0}
  counts = count_noise(
    reference.span_corruption_chunk(lengths["inputs"] - 1, lengths["targets"] - 1, **settings), **settings
  )
  generator = np.random.default_rng(0)
  rows = [
    generator.integers(3, 259, size) for size in [*range(len(counts) - 3, len(counts) + 3), 400, 3000, 3000]
  ]
  seeds = generator.integers(0, 2**31, (len(rows), 3, 2))
  feature = ragged(rows, "int32")
  inputs, targets = corrupt_spans(feature, counts, seeds, first_sentinel=FIRST_SENTINEL)
  chunks = cut_random_chunks(feature, lengths["targets"], seeds[:, :1])
  for k, row in enumerate(rows):
    pairs = [tf.constant(pair) for pair in seeds[k]]
    example = {"targets": tf.constant(row, tf.int32)}
    expected = corrupt(example, pairs)
    np.testing.assert_array_equal(inputs.rows()[k], expected["inputs"])
    np.testing.assert_array_equal(targets.rows()[k], expected["targets"])
    np.testing.assert_array_equal(chunks.rows()[k], chunk(example, pairs[0])["targets"])


def split(draws, total, parts):
  """The parts' sizes, as the graph splits by draws."""
  order = tf.argsort(tf.constant(draws, tf.float32)).numpy()
  cuts = np.flatnonzero(order < parts - 1) + 1
  return np.diff([0, *cuts, total])


@settings(max_examples=40, deadline=None)
@given(
  size=st.integers(2, 60),
  num_noise=st.integers(1, 59),
  num_spans=st.integers(1, 30),
  levels=st.sampled_from([1, 2, 5, 2**23]),
  seed=st.integers(0, 2**32),
)
def test_equal_draws_cut_as_in_the_graph(size, num_noise, num_spans, levels, seed):
  """Of few levels, the highest just below 1, draws are equal more often than not."""
  num_noise = min(num_noise, size - 1)
  num_spans = min(num_spans, num_noise, size - num_noise)
  generator = np.random.default_rng(seed)
  clean_draws, noise_draws = (
    np.float32(1 - 2.0**-23) - generator.integers(levels, size=count).astype(np.float32) / np.float32(levels)
    for count in (size - num_noise - 1, num_noise - 1)
  )
  assert all(((draws >= 0) & (draws < 1)).all() for draws in (clean_draws, noise_draws))
  # Corrupted spans take the second seed pair, the others the third.
  draws = [clean_draws, noise_draws]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      span_corruption, "uniform_floats", lambda seeds, counts: Ragged(draws[2 - seeds[0, 0]], counts)
    )
    feature = ragged([np.arange(size)], "int64")
    counts = np.tile([num_noise, num_spans], (size + 1, 1))
    pairs = np.arange(3).repeat(2).reshape(1, 3, 2)
    inputs, targets = corrupt_spans(feature, counts, pairs, first_sentinel=1000)
  clean = split(clean_draws, size - num_noise, num_spans)
  noise = split(noise_draws, num_noise, num_spans)
  tokens, expected = iter(range(size)), ([], [])
  for span in range(num_spans):
    expected[0].extend([*(next(tokens) for _ in range(clean[span])), 1000 - span])
    expected[1].extend([1000 - span, *(next(tokens) for _ in range(noise[span]))])
  assert (inputs.values.tolist(), targets.values.tolist()) == expected


def test_loops_give_the_same_where_they_are_not_compiled(monkeypatch):
  counts = count_noise(26, noise_density=0.15, mean_span_tokens=3.0)
  feature = batch_of(np.arange(40), "int32")["targets"]
  seeds = np.random.default_rng(0).integers(0, 2**31, (40, 3, 2))
  compiled = corrupt_spans(feature, counts, seeds, first_sentinel=FIRST_SENTINEL)
  monkeypatch.setattr(span_corruption, "_corrupt", span_corruption._corrupt.plain)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    plain = corrupt_spans(feature, counts, seeds, first_sentinel=FIRST_SENTINEL)
  for one, other in zip(plain, compiled, strict=True):
    np.testing.assert_array_equal(one.values, other.values)
    np.testing.assert_array_equal(one.lengths, other.lengths)


def chi_square(counts):
  counts = np.array(list(counts))
  return ((counts - counts.mean()) ** 2 / counts.mean()).sum()


class TestDistribution:
  """Over 10^5 examples."""

  NUM_EXAMPLES = 100_000

  def corrupted(self, size, chunk_tokens, **settings):
    """Inputs, targets and where each chunk started."""
    tokens = np.tile(np.arange(size, dtype=np.int32), self.NUM_EXAMPLES)
    feature = Ragged(tokens, np.full(self.NUM_EXAMPLES, size))
    records = records_of(np.arange(self.NUM_EXAMPLES))
    seeds = reading.map_seeds("corrupted", "train", 0, 0, records, 3)
    counts = count_noise(chunk_tokens, **settings)
    return corrupt_spans(feature, counts, seeds, first_sentinel=10**6)

  def test_of_density_spans_and_chunk_starts_is_what_was_asked(self):
    inputs, targets = self.corrupted(208, 200, noise_density=0.15, mean_span_tokens=3.0)
    num_noise, num_spans = (targets.values < 1000).sum(), (targets.values > 1000).sum()
    assert num_noise / (200 * self.NUM_EXAMPLES) == pytest.approx(0.15, abs=1e-4)
    assert num_noise / num_spans == pytest.approx(3, abs=1e-3)
    starts = inputs.values[np.cumsum(inputs.lengths) - inputs.lengths]
    counts = np.bincount(starts)
    assert len(counts) == 9
    assert chi_square(counts) < 26.1  # 0.999 quantile with 8 degrees of freedom
    # Where a chunk starts has no part in where it is cut.
    second = targets.values[np.cumsum(targets.lengths) - targets.lengths + 1] - starts
    early = second < np.median(second)
    shares = [early[starts == start].mean() for start in range(9)]
    assert np.ptp(shares) < 0.03  # one is known to 0.005

  def test_of_spans_is_even_over_all_ways_to_place_them(self):
    """Ten tokens, four of them corrupted in two spans: 3 ways to part four tokens, 5 to part six."""
    inputs, _ = self.corrupted(10, 10, noise_density=0.4, mean_span_tokens=2.0)
    counts = collections.Counter(map(bytes, inputs.values.reshape(self.NUM_EXAMPLES, 8)))
    assert len(counts) == 15
    assert chi_square(counts.values()) < 36.1  # 0.999 quantile with 14 degrees of freedom
