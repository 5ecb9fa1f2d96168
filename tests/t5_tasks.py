"""T5's own tasks and mixtures, as the package t5 registers them, on small synthetic sources.

A source has its dataset's columns, dtypes and shapes as TensorFlow Datasets declares them, its splits, and
texts in which the task's preprocessors find what they look for. The vocabularies, whose model lies on a
server, are given one that is trained on such texts. All else of the tasks is t5's.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping

import sentencepiece
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from t5_examples import NAMES, NOUNS, columns, example, is_labelled, text

# At most so many, of which T5 has 32,000.
PIECES = 300
SHARD_SIZES = {"train": (21, 1, 24)}
OTHER_SHARD_SIZES = (13, 18)
SPLITS = {
  "c4": ("train", "validation"),
  "definite_pronoun_resolution": ("train", "test"),
  "glue/mnli": ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"),
  "glue/mnli_matched": ("validation", "test"),
  "glue/mnli_mismatched": ("validation", "test"),
  "squad": ("train", "validation"),
  "wikipedia": ("train",),
  "wmt19_translate": ("train", "validation"),
}
OTHER_SPLITS = ("train", "validation", "test")


class SyntheticSource(seqio.DataSource):
  """A dataset of TensorFlow Datasets with made-up examples.

  Args:
    dataset: its name, as `squad/v1.1`.
    splits: those that a task takes; none for all.
  """

  def __init__(self, dataset: str, splits: tuple[str, ...] = ()):
    self.dataset = dataset
    family = dataset.partition("/")[0]
    own = splits or SPLITS.get(dataset) or SPLITS.get(family) or OTHER_SPLITS
    super().__init__(own, {split: sum(shard_sizes(split)) for split in own})

  @property
  def supports_arbitrary_sharding(self):
    return False

  def list_shards(self, split):
    return [f"{self.dataset.replace('/', '-')}-{split}-{k}" for k in range(len(shard_sizes(split)))]

  def get_dataset(self, split="train", shuffle=False, seed=None, shard_info=None, num_epochs=1):
    del seed, num_epochs
    assert not shuffle, "a cache shuffles by itself"
    sizes = shard_sizes(split)
    shard, num_shards = (shard_info.index, shard_info.num_shards) if shard_info else (0, 1)
    assert num_shards in (1, len(sizes))
    start, stop = (0, sum(sizes)) if num_shards == 1 else (sum(sizes[:shard]), sum(sizes[: shard + 1]))

    def examples():
      return (example(self.dataset, split, number) for number in range(start, stop))

    return tf.data.Dataset.from_generator(examples, output_signature=columns(self.dataset).get_tensor_spec())


def shard_sizes(split: str) -> tuple[int, ...]:
  """How many examples each source shard of a split has."""
  return SHARD_SIZES.get(split, OTHER_SHARD_SIZES)


@contextlib.contextmanager
def registered() -> Iterator[tuple[list[str], list[str]]]:
  """Has T5's tasks and mixtures in SeqIO's registries; gives their names."""
  registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
  with contextlib.ExitStack() as stack:
    for registry, providers in zip(registries, _providers(), strict=True):
      for name, provider in providers.items():
        registry.add_provider(name, provider)
        stack.callback(registry.remove, name)
    tasks, mixtures = map(sorted, _providers())
    yield tasks, mixtures


@functools.cache
def _providers() -> tuple[Mapping[str, seqio.Task], Mapping[str, seqio.Mixture]]:
  """T5's tasks and mixtures by name, out of the registries that importing them filled."""
  assert "t5.data.tasks" not in sys.modules, "import t5's tasks by this module alone: it takes what is new"
  registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
  before = [set(registry.names()) for registry in registries]
  import t5.data.mixtures  # noqa: F401

  tasks, mixtures = (
    {name: registry.get(name) for name in sorted(set(registry.names()) - known)}
    for registry, known in zip(registries, before, strict=True)
  )
  for task in tasks.values():
    # In place: mixtures, and the postprocessors of tasks with sentinels, hold the tasks themselves.
    if isinstance(task.source, seqio.TfdsDataSource):
      dataset = task.source.tfds_dataset.name.partition(":")[0]
      task._source = SyntheticSource(dataset, tuple(task.source._splits))
    for feature in task.output_features.values():
      feature.vocabulary._sentencepiece_model_file = vocabulary_file()
  for registry, providers in zip(registries, (tasks, mixtures), strict=True):
    for name in providers:
      registry.remove(name)
  return tasks, mixtures


@functools.cache
def vocabulary_file() -> str:
  """A SentencePiece model of the synthetic texts, with T5's ids for padding, end and unknown."""
  texts = [text(random.Random(number), 40) for number in range(300)]
  texts += [
    " ".join([*NAMES, *NOUNS]),
    "0 1 2 3 4 5 6 7 8 9 . , : ? ! ; ' \" * # @ _ - ( ) < > /",
    *_labels(),
  ]
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts),
    model_writer=model,
    vocab_size=PIECES,
    hard_vocab_limit=False,
    character_coverage=1.0,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  path = pathlib.Path(_folder().name, "sentencepiece.model")
  path.write_bytes(model.getvalue())
  return str(path)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
  """It lasts as long as the process."""
  return tempfile.TemporaryDirectory(prefix="anystep-t5-")


def has_labels(task: seqio.Task, split: str) -> bool:
  """Whether a task's split has what is to be predicted."""
  return not isinstance(task.source, SyntheticSource) or is_labelled(task.source.dataset, split)


def _labels() -> list[str]:
  glue, super_glue = tfds.text.glue.Glue, tfds.text.super_glue.SuperGlue
  configs = [*glue.builder_configs.values(), *super_glue.builder_configs.values()]
  return [label for config in configs for label in config.label_classes or ()]
