"""Stats of a split: SeqIO's own counts, and how long sequences are."""

import json
import pathlib

import apache_beam as beam
import numpy as np
import seqio
import small_tasks
import tensorflow as tf
from apache_beam.testing.util import assert_that, equal_to
from job_runs import registered, run_job
from seqio import beam_utils

from anystep.cache_job.state.split_stats import SplitStats, merge_stats
from anystep.caches.cache import open_cache
from anystep.tasks.tensors import from_tensors

PIECES = seqio.SentencePieceVocabulary(
  str(pathlib.Path(seqio.__file__).parent / "test_data/sentencepiece/sentencepiece.model"), extra_ids=4
)
BYTES = small_tasks.VOCABULARY
OUTPUT_FEATURES = {
  "pieces": seqio.Feature(PIECES),
  "bytes": seqio.Feature(BYTES),
  "text": seqio.Feature(BYTES, dtype=tf.string, rank=0),
  "label": seqio.Feature(seqio.PassThroughVocabulary(10), dtype=tf.int64, rank=0),
  "table": seqio.Feature(BYTES, rank=2),
  "decoded_table": seqio.Feature(PIECES, rank=2),
  "ragged": seqio.Feature(BYTES, rank=2),
  "weights": seqio.Feature(seqio.PassThroughVocabulary(10), dtype=tf.float32),
  "tokens": seqio.Feature(PIECES),
}
TEXTS = ["", "this is a test", "wörter über wörter", "the same, again and again and again", "日本語 and more"]


def example_of(number):
  """An example with every kind of feature; ends, padding and sentinels stand within its tokens."""
  text = TEXTS[number % len(TEXTS)]
  pieces = [*PIECES.encode(text), PIECES.eos_id, PIECES.pad_id, *PIECES.encode("not counted")]
  sentinels = [PIECES.vocab_size - 1, *PIECES.encode(text)]
  return {
    "pieces": tf.constant(pieces[: 3 * number], tf.int32),
    "bytes": tf.constant([*BYTES.encode(text), BYTES.eos_id, BYTES.pad_id], tf.int64),
    "text": tf.constant(text),
    "label": tf.constant(number % 3, tf.int64),
    "table": tf.reshape(tf.range(6 * (number % 4), dtype=tf.int32), [-1, 2, 3]),
    "decoded_table": tf.fill([number % 2, 3], 5),
    "ragged": tf.ragged.constant([[3] * number, [1, 4, 5]], dtype=tf.int32),
    "weights": tf.ones([number]),
    "tokens": tf.constant(sentinels, tf.int32),
    "not_of_the_task": tf.constant([7, 8, 9]),
  }


def dataset_of(numbers):
  examples = [example_of(number) for number in numbers]
  signature = {
    name: tf.RaggedTensorSpec([2, None], tf.int32, 1)
    if name == "ragged"
    else tf.TensorSpec([None, *value.shape[1:]] if value.shape.rank else [], value.dtype)
    for name, value in example_of(0).items()
  }
  return tf.data.Dataset.from_generator(lambda: examples, output_signature=signature)


def ours(batches, *, char_counts):
  """Stats of batches, each counted by another worker; without what SeqIO does not count."""
  documents = []
  for numbers in batches:
    stats = SplitStats(OUTPUT_FEATURES, char_counts=char_counts)
    for tensors in dataset_of(numbers).ragged_batch(3):
      stats.add(from_tensors(tensors))
    documents.append(json.loads(json.dumps(stats.document())))
  return {name: count for name, count in merge_stats(documents).items() if not name.endswith("_lengths")}


def test_counts_of_several_workers_are_those_of_seqio():
  # SeqIO's job counts tokens of tensors, and characters where they are numpy.
  tensors = list(dataset_of(range(12)))
  arrays = list(dataset_of(range(12)).as_numpy_iterator())
  batches = [range(5), [], range(5, 12)]
  found, tokens = ours(batches, char_counts=True), ours(batches, char_counts=False)
  characters = {name: count for name, count in found.items() if name.endswith("_chars")}
  assert found == tokens | characters
  assert set(characters) == {"pieces_chars", "text_chars", "tokens_chars"}
  assert {"pieces_tokens", "label_tokens", "table_tokens", "bytes_max_tokens"} < set(tokens)

  def only_characters(stats):
    return {name: count for name, count in stats.items() if name.endswith("_chars")}

  with beam.Pipeline() as pipeline:
    with_characters = beam_utils.GetStats(OUTPUT_FEATURES, enable_char_counts=True)
    by_seqio = pipeline | "arrays" >> beam.Create(arrays) | "all" >> with_characters
    assert_that(by_seqio | beam.Map(only_characters), equal_to([characters]), label="characters")
    by_seqio = pipeline | "tensors" >> beam.Create(tensors) | beam_utils.GetStats(OUTPUT_FEATURES)
    assert_that(by_seqio, equal_to([tokens]), label="tokens")


def test_lengths_fall_into_bins_by_their_number_of_binary_digits():
  lengths = [0, 0, 1, 2, 3, 4, 7, 8, 1 << 20, (1 << 21) - 1]
  stats = SplitStats({}, char_counts=False)
  for length in lengths:
    stats.add(from_tensors({"x": tf.ones([1, length], tf.uint8)}))
  assert merge_stats([stats.document()]) == {
    "examples": len(lengths),
    "x_lengths": {"0": 2, "1": 1, "2-3": 2, "4-7": 2, "8-15": 1, "1048576-2097151": 2},
  }


@seqio.map_over_dataset
def sentence_pieces(example):
  """Tokens by SentencePiece, beside the text's bytes."""
  text = tf.strings.unicode_encode(tf.cast(example["targets"], tf.int32) % 90 + 33, "UTF-8")
  return {**example, "inputs": PIECES.encode_tf(text), "name": text}


TASK = seqio.Task(
  "small_stats",
  source=small_tasks.NumberedTexts({"train": (7, 0, 30)}),
  preprocessors=[*small_tasks.BEFORE_CACHE[1:], sentence_pieces, seqio.CacheDatasetPlaceholder()],
  output_features={
    "inputs": seqio.Feature(PIECES, add_eos=False),
    "targets": seqio.Feature(BYTES, add_eos=False),
    "name": seqio.Feature(BYTES, dtype=tf.string, rank=0),
  },
)


def test_a_cache_s_stats_are_of_its_own_examples(tmp_path):
  with registered(TASK):
    run_job(tmp_path, "--enable_char_counts", "--num_shards=3", tasks=TASK.name)
  cache = open_cache(tmp_path, TASK.name, "train")
  stats = json.loads((tmp_path / TASK.name / "stats.train.json").read_text())
  examples = [cache[index] for index in range(len(cache))]
  expected = {"examples": len(examples)}
  expected["name_chars"] = sum(len(example["name"].item().decode()) for example in examples)
  decoded = [PIECES.decode_tf(example["inputs"]).numpy().decode() for example in examples]
  expected["inputs_chars"] = sum(map(len, decoded))
  for name in ("inputs", "targets"):
    tokens = [int(np.sum(~np.isin(example[name], [0, 1]))) for example in examples]
    expected |= {f"{name}_tokens": sum(tokens), f"{name}_max_tokens": max(tokens)}
  table = np.concatenate([cache.lengths(shard) for shard in range(3)])
  for column, name in enumerate(cache.manifest.sequence_features):
    edges = [0, *(1 << k for k in range(20))]
    counts, _ = np.histogram(table[:, column], edges)
    expected[f"{name}_lengths"] = {
      f"{first}-{last - 1}" if last - 1 > first else f"{first}": int(count)
      for first, last, count in zip(edges, edges[1:], counts, strict=False)
      if count
    }
  assert stats == expected
  assert set(cache.manifest.sequence_features) == {"inputs", "pairs", "targets"}
