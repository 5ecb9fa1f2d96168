"""Tasks whose every cached example can be checked by hand; importing this module registers them.

Environment variables steer `observe`, for they reach into other processes and no fingerprint knows them:
SMALL_TASKS_LOG names a file that gets the name of each example that is preprocessed,
SMALL_TASKS_SLEEP_SECONDS is how long each takes, SMALL_TASKS_RAISE_AT names one that cannot be preprocessed.
"""

import functools
import os
import time

import seqio
import tensorflow as tf

from anystep.tasks import preprocessors

VOCABULARY = seqio.ByteVocabulary(extra_ids=10)
SOURCE_SIZES = {"train": (24, 0, 33, 10), "validation": (0, 5)}
# What split_and_drop leaves of them: of example i, i mod 3.
CACHED_SIZES = {"train": (24, 0, 33, 9), "validation": (0, 4)}


class NumberedTexts(seqio.DataSource):
  """`{"name", "number", "targets"}`, where a name is the split, the source shard and the place in it."""

  def __init__(self, sizes=None):
    self._sizes = dict(SOURCE_SIZES if sizes is None else sizes)
    super().__init__(splits=tuple(self._sizes))

  @property
  def supports_arbitrary_sharding(self):
    return False

  def list_shards(self, split):
    return [f"{split} part {shard}" for shard in range(len(self._sizes[split]))]

  def get_dataset(self, split="train", shuffle=False, seed=None, shard_info=None, num_epochs=1):
    del seed, num_epochs
    assert not shuffle, "a cache shuffles by itself"
    size = self._sizes[split][shard_info.index]
    names = [f"{split}-{shard_info.index}-{place}" for place in range(size)]
    texts = [f"{name}: " + "wörter " * (1 + 5 * place % 7) for place, name in enumerate(names)]
    return tf.data.Dataset.from_tensor_slices(
      {
        "name": tf.constant(names, tf.string, [size]),
        "number": tf.range(size, dtype=tf.int64),
        "targets": tf.constant(texts, tf.string, [size]),
      }
    )


def observe(dataset):
  """Lets the environment see and disturb the preprocessing."""

  def look(name):
    text = name.numpy().decode()
    if path := os.environ.get("SMALL_TASKS_LOG"):
      with open(path, "a") as log:
        log.write(text + "\n")
    if text == os.environ.get("SMALL_TASKS_RAISE_AT"):
      raise ValueError(f"{text} is indigestible")
    time.sleep(float(os.environ.get("SMALL_TASKS_SLEEP_SECONDS", "0")))
    return name

  def through_python(example):
    name = tf.py_function(look, [example["name"]], tf.string)
    return {**example, "name": tf.ensure_shape(name, [])}

  return dataset.map(through_python)


def split_and_drop(dataset):
  """Of the source's example i, i mod 3 examples."""
  return dataset.flat_map(lambda example: tf.data.Dataset.from_tensors(example).repeat(example["number"] % 3))


@seqio.map_over_dataset(num_seeds=1)
def rotate(example, seed):
  """Moves the tokens on by a random number of places, and gives each a random pair of floats."""
  tokens = example["targets"]
  shift = tf.random.stateless_uniform([], seed, 0, 100, tf.int32)
  pairs = tf.random.stateless_uniform([tf.size(tokens), 2], seed)
  return {**example, "targets": tf.roll(tokens, shift, 0), "pairs": pairs}


def jitter(dataset):
  """Draws without a seed of its own, which TensorFlow's global seed decides."""
  return dataset.map(lambda example: {**example, "noise": tf.random.uniform([])})


def slow_to_build(dataset):
  """Leaves examples as they are, and lets the threads of a worker build their graphs at one time."""
  time.sleep(0.2)
  return dataset


def join_and_cut(dataset, sequence_length):
  """Cuts the tokens of all examples, end to end, into pieces of the feature's length."""
  return (
    dataset.map(lambda example: example["targets"]).unbatch().batch(sequence_length["targets"]).map(named)
  )


def named(tokens):
  return {"targets": tokens}


def without_names(dataset):
  """Leaves the tokens alone."""
  return dataset.map(lambda example: {"targets": example["targets"]})


def square(dataset):
  """Adds a feature whose second dimension varies."""
  return dataset.map(lambda example: {**example, "square": tf.ones([2, tf.size(example["targets"])])})


BEFORE_CACHE = (
  observe,
  split_and_drop,
  functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
  rotate,
)
AFTER_CACHE = (preprocessors.random_chunk, seqio.preprocessors.append_eos)


def task(name, *, before=BEFORE_CACHE, after=AFTER_CACHE, sizes=None, add_eos=True):
  """A task of this module's texts, not registered."""
  return seqio.Task(
    name,
    source=NumberedTexts(sizes),
    preprocessors=[*before, seqio.CacheDatasetPlaceholder(), *after],
    output_features={"targets": seqio.Feature(VOCABULARY, add_eos=add_eos)},
  )


for _task in (
  task("small"),
  task("small:inner", before=(*BEFORE_CACHE, jitter), sizes={"train": (6, 5), "validation": (3,)}),
  task("small_joined", before=(*BEFORE_CACHE, without_names), after=(join_and_cut, rotate)),
  task("small_slow_graph", before=(*BEFORE_CACHE, slow_to_build, rotate), sizes={"train": (5, 6, 7, 8)}),
  task("small_square", before=(*BEFORE_CACHE, square), sizes={"train": (5,)}),
):
  seqio.TaskRegistry.add_provider(_task.name, _task)
