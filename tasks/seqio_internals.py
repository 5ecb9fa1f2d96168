"""The private parts of SeqIO that this package uses; no other module names them.

`tests/tasks/test_seqio_internals.py` pins the version of SeqIO, and what each function relies on.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import seqio
import tensorflow as tf

_random_map_lock = threading.Lock()

load_sentencepiece_model: Callable = seqio.vocabularies._load_model
"""SeqIO's own loader of SentencePiece models, as it was before `replace_model_loader`."""


def replace_model_loader(load: Callable) -> None:
  """Make SeqIO load every SentencePiece model with `load`, called as `load_sentencepiece_model` is."""
  seqio.vocabularies._load_model = load


def model_file(vocabulary: seqio.Vocabulary) -> str | None:
  """Return the file that one of SeqIO's own vocabularies names; None for one that is made of no file."""
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    path = vocabulary._sentencepiece_model_file
  elif isinstance(vocabulary, seqio.BertWordPieceVocabulary):
    path = vocabulary._vocab_lookup_table
  else:
    return None
  # A BERT vocabulary may hold a table instead.
  return path if isinstance(path, str) else None


def with_model_file(vocabulary: seqio.SentencePieceVocabulary, path: str) -> seqio.SentencePieceVocabulary:
  """Return a copy of a vocabulary, with what it has read, that names another file."""
  renamed = copy.copy(vocabulary)
  renamed._sentencepiece_model_file = path
  return renamed


def task_arguments(task: seqio.Task) -> dict[str, Any]:
  """Return the arguments that a task was made with and that its attributes do not give back unchanged."""
  return {
    "preprocessors": task._preprocessor_constructor_args,
    "metric_fns": task._metric_fn_constructor_args,
    "metric_objs": task._metric_objs_constructor_args,
  }


def validate_preprocessing(task: seqio.Task, dataset: Any) -> Any:
  """Return a dataset, or any object with an `element_spec`, that has the task's output features.

  Raises:
    ValueError: what differs.
  """
  return task._validate_preprocessing(dataset)


def dataset_function(source: seqio.FunctionDataSource) -> Callable:
  """Return the function that gives the source's datasets."""
  return source._dataset_fn


def file_reader(source: seqio.FileDataSource) -> Any:
  """Return what makes a dataset of the source's files."""
  return source._reader


def cached_source(directory: str, split: str) -> seqio.DataSource:
  """Return the source that reads a split of a cache by `seqio_cache_tasks`."""
  return seqio.dataset_providers._CachedDataSource(directory, split)


def next_map_seed() -> int:
  """Return the seed of the next random map, inside of `seqio.utils.map_seed_manager`."""
  return seqio.utils._NEXT_MAP_SEED


def packs(converter: seqio.FeatureConverter) -> bool:
  """Return whether the converter was made with `pack=True`."""
  return bool(getattr(converter, "_pack", False))


def passes_features_through(converter: seqio.FeatureConverter) -> bool:
  """Return whether the converter was made with `passthrough_features`."""
  return bool(getattr(converter, "_passthrough_features", None))


def loss_on_targets_only(converter: seqio.DecoderFeatureConverter) -> bool:
  """Return the argument of this name that the converter was made with."""
  return converter._loss_on_targets_only


@contextlib.contextmanager
def seeds_of_random_maps(take_seeds: Callable[[int], tf.data.Dataset]) -> Iterator[None]:
  """Let `seqio.map_over_dataset(num_seeds=n)` take its seeds from `take_seeds(n)` in the body.

  SeqIO draws them from stateful random datasets that follow the stream's position, fixed when the graph
  is built; it offers no other way in. One thread at a time is in the body.

  Args:
    take_seeds: returns a dataset of tuples of n seeds, `(2,) int64` each, one tuple an example.
  """
  random_map = seqio.utils._GrainRandomMapFn

  def call(self, dataset: tf.data.Dataset, *args: Any, **kwargs: Any) -> tf.data.Dataset:
    def apply(element, seeds):
      named = {"seed": seeds[0]} if self.num_seeds == 1 else {"seeds": seeds}
      return self._map_fn_with_special_kwargs(element, *args, **named, **kwargs)

    return tf.data.Dataset.zip((dataset, take_seeds(self.num_seeds))).map(
      apply, num_parallel_calls=self.num_parallel_calls
    )

  with _random_map_lock:
    original = random_map.__call__
    random_map.__call__ = call
    try:
      yield
    finally:
      random_map.__call__ = original
