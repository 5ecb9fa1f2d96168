"""Tokens that preprocessors cut to fit lengths are counted alike, in numpy and in a graph."""

import functools

import caches
import numpy as np
import pytest
import seqio
import tensorflow as tf

from anystep.features.feature import Feature
from anystep.inspection.read_lengths import count_read_lengths
from anystep.tasks import preprocessors
from anystep.tasks.reading import task_reader
from anystep.tasks.reading.task_reader import TaskReader
from anystep.transforms.transform import Records

NUM_EXAMPLES = 40
LENGTHS = {"inputs": 12, "targets": 8}
FEATURES = {"number": Feature(dtype="int64", shape=()), "targets": Feature(dtype="int32", shape=(None,))}


@pytest.fixture(scope="module", autouse=True)
def few_checked_records():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(task_reader, "_CHECKED_RECORDS", 4)
    yield


def example_of(ordinal):
  tokens = np.random.default_rng(ordinal).integers(3, 259, ordinal).astype(np.int32)
  return {"number": np.int64(ordinal), "targets": tokens}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  root = tmp_path_factory.mktemp("cut")
  return caches.build(root, num_examples=NUM_EXAMPLES, features=FEATURES, example_of=example_of)


@pytest.fixture(scope="module")
def sizes(built):
  """Tokens of the cached examples, by index."""
  return np.array([len(example["targets"]) for example in built.examples])


def reader_of(built, *after, outputs=("targets",), extra_ids=10):
  vocabulary = seqio.ByteVocabulary(extra_ids=extra_ids)
  task = seqio.Task(
    "demo",
    source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"]),
    preprocessors=[seqio.CacheDatasetPlaceholder(), *after],
    output_features={name: seqio.Feature(vocabulary) for name in outputs},
  )
  return TaskReader(task, built.open(), LENGTHS)


def leave_alone(dataset):
  """No preprocessor that is known without TensorFlow."""
  return dataset


def count_cut(reader, built):
  indices = np.arange(NUM_EXAMPLES)
  records = Records(np.zeros_like(indices), indices, "demo", "train", 0)
  return reader.count_cut_tokens(built.open().read(indices), records)


append_eos = seqio.preprocessors.append_eos
# Of inputs 11 and targets 7, without their ends, the longest chunk: 2 of 12 corrupted, in 1 span.
SPAN_CHUNK = preprocessors.span_corruption_chunk(11, 7)


@pytest.mark.parametrize(
  ("after", "outputs", "cut"),
  [
    ([], ["targets"], lambda size: 0),
    ([append_eos], ["targets"], lambda size: 0),
    ([preprocessors.random_chunk], ["targets"], lambda size: max(size - 8, 0)),
    ([preprocessors.lm], ["targets"], lambda size: max(size - 8, 0)),
    ([seqio.utils.trim_dataset], ["targets"], lambda size: max(size - 8, 0)),
    ([seqio.preprocessors.append_eos_after_trim], ["targets"], lambda size: max(size - 7, 0)),
    (
      [seqio.utils.trim_dataset, append_eos, seqio.utils.trim_dataset],
      ["targets"],
      lambda s: max(s + 1 - 8, 0),
    ),
    (
      [functools.partial(seqio.utils.trim_dataset, sequence_length={"targets": 5}), append_eos],
      ["targets"],
      None,
    ),
  ],
)
def test_the_graph_counts_as_numpy_does(built, sizes, after, outputs, cut):
  native, graph = (reader_of(built, *more, *after, outputs=outputs) for more in ([], [leave_alone]))
  assert (native._native is not None, graph._native is None) == (True, True)
  if cut is None:
    # Lengths that a partial binds are the task's own: the plan's have no part in them, in the graph.
    assert count_cut(native, built).tolist() == [max(size - 5, 0) for size in sizes]
    assert not count_cut(graph, built).any()
    return
  for reader in (native, graph):
    assert count_cut(reader, built).tolist() == [cut(size) for size in sizes.tolist()]


def test_span_corruption_cuts_what_its_chunk_leaves(built, sizes):
  after = [preprocessors.span_corruption, append_eos]
  native, graph = (
    reader_of(built, *more, *after, outputs=["inputs", "targets"]) for more in ([], [leave_alone])
  )
  assert count_cut(native, built).tolist() == np.maximum(sizes - SPAN_CHUNK, 0).tolist()
  # The graph counts in tokens of the results, of which longer chunks have more sentinels.
  in_graph = count_cut(graph, built)
  assert ((in_graph > 0) == (sizes > SPAN_CHUNK)).all()
  assert (in_graph >= np.maximum(sizes - SPAN_CHUNK, 0)).all()


def test_a_prefix_lm_cuts_what_neither_of_its_parts_has(built, sizes):
  reader = reader_of(built, preprocessors.prefix_lm, outputs=["inputs", "targets"])
  assert count_cut(reader, built).tolist() == np.maximum(sizes - 12, 0).tolist()


def test_examples_that_are_dropped_lose_nothing(built, sizes):
  def keep_even(dataset):
    return dataset.filter(lambda example: example["number"] % 2 == 0)

  reader = reader_of(built, keep_even, preprocessors.random_chunk)
  numbers = np.array([example["number"] for example in built.examples])
  expected = np.where(numbers % 2 == 0, np.maximum(sizes - 8, 0), 0)
  assert count_cut(reader, built).tolist() == expected.tolist()
  found = count_read_lengths(built.open(), reader, feature_lengths=LENGTHS)
  assert (found.dropped_examples, found.cut_tokens) == (20, expected.sum())


def test_texts_that_are_tokenized_at_reading_are_counted(tmp_path):
  def text_of(ordinal):
    return {"text": np.array(b"x" * ordinal, object)}

  features = {"text": Feature(dtype="string", shape=())}
  built = caches.build(tmp_path, num_examples=NUM_EXAMPLES, features=features, example_of=text_of)

  def tokenize(dataset, output_features):
    encode = output_features["targets"].vocabulary.encode_tf
    return dataset.map(lambda example: {"targets": encode(example["text"])})

  reader = reader_of(built, tokenize, seqio.utils.trim_dataset)
  sizes = np.array([len(example["text"].item()) for example in built.examples])
  assert count_cut(reader, built).tolist() == np.maximum(sizes - 8, 0).tolist()


def test_what_takes_no_longer_lengths_is_not_known(built):
  after = [leave_alone, preprocessors.span_corruption, append_eos]
  reader = reader_of(built, *after, outputs=["inputs", "targets"], extra_ids=1)
  assert count_cut(reader, built) is None

  def refuse_longer(dataset, sequence_length):
    return dataset.map(
      lambda example: (
        {**example, "targets": tf.ensure_shape(example["targets"][:8], [None])}
        if sequence_length["targets"] == 8
        else {**example, "targets": tf.ensure_shape(example["targets"], [3])}
      )
    )

  assert count_cut(reader_of(built, refuse_longer), built) is None


def test_span_corruption_of_pieces_that_fit_cuts_nothing(tmp_path):
  def piece_of(ordinal):
    return {"targets": np.full(SPAN_CHUNK, 7, np.int32)}

  features = {"targets": FEATURES["targets"]}
  built = caches.build(tmp_path, num_examples=5, features=features, example_of=piece_of)
  reader = reader_of(built, preprocessors.span_corruption, append_eos, outputs=["inputs", "targets"])
  found = count_read_lengths(built.open(), reader, feature_lengths=LENGTHS)
  # The pieces are longer than either of the lengths.
  assert LENGTHS["targets"] < SPAN_CHUNK
  assert found.describe_cut() == "demo train: no example is cut to inputs 12, targets 8"


def test_a_cut_by_preprocessors_is_said_to_be_theirs(tmp_path):
  def piece_of(ordinal):
    return {"targets": np.full(4 * SPAN_CHUNK, 7, np.int32)}

  features = {"targets": FEATURES["targets"]}
  built = caches.build(tmp_path, num_examples=5, features=features, example_of=piece_of)
  reader = reader_of(built, preprocessors.span_corruption, append_eos, outputs=["inputs", "targets"])
  found = count_read_lengths(built.open(), reader, feature_lengths=LENGTHS)
  assert found.cut_before_tokens == found.cut_tokens > 0
  assert found.describe_cut().endswith("cut to inputs 12, targets 8, by its preprocessors")
