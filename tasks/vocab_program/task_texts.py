"""The text of a task: its examples as they are before they become tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode, find_nearest, one_line
from anystep.order.permutation import preprocess_seed

_TOKENIZERS = (seqio.preprocessors.tokenize, seqio.preprocessors.tokenize_and_append_eos)


def read_task_texts(
  task: seqio.Task, split: str, *, features: Sequence[str] | None = None, max_examples: int | None = None
) -> Iterator[list[str]]:
  """The texts of each example of a split, as they come to `seqio.preprocessors.tokenize`.

  The same in every run: the source's shards in order, random preprocessors seeded as in the cache job. No
  vocabulary is read.

  Args:
    task: registered.
    split: the split's name.
    features: those whose texts are wanted; by default the output features that are text.
    max_examples: at most so many; then each source shard gives its first ones, as many as any other.

  Raises:
    AnystepError: 64 `split_unknown`, `feature_unknown`; 78 `tokenize_missing` where the task tokenizes in
      another way, or nothing; 66 `source_unreadable`.
  """
  if split not in task.splits:
    raise AnystepError(
      ExitCode.USAGE,
      "split_unknown",
      task=task.name,
      expected=", ".join(sorted(task.splits)),
      got=split,
      fix="name one of the task's splits",
    )
  shards = task.source.list_shards(split)
  quota = None if max_examples is None else -(-max_examples // max(len(shards), 1))
  num_done = 0
  before = _remove_tokenize(task)
  for number, shard in enumerate(shards):
    if num_done == max_examples:
      return
    try:
      dataset = _make_shard_dataset(before, split, number, len(shards))
      names = _choose_features(task, dataset.element_spec, features)
      texts = dataset.map(functools.partial(_select, names=names)).prefetch(tf.data.AUTOTUNE)
      count = -1 if max_examples is None or quota is None else min(quota, max_examples - num_done)
      for example in texts.take(count).as_numpy_iterator():
        num_done += 1
        yield [text for name in names for text in _decode(example[name])]
    except AnystepError:
      raise
    except Exception as error:
      raise AnystepError(
        ExitCode.NO_INPUT,
        "source_unreadable",
        task=task.name,
        split=split,
        source_shard=shard,
        got=one_line(error, without_graph=True),
        fix="see to the task's source and to its preprocessors before tokenize",
      ) from error


def _remove_tokenize(task: seqio.Task) -> seqio.Task:
  """The task up to the first preprocessor that makes tokens."""
  steps = [step for step in task.preprocessors if not isinstance(step, seqio.CacheDatasetPlaceholder)]
  places = [place for place, step in enumerate(steps) if _unwrap(step) in _TOKENIZERS]
  if not places:
    raise AnystepError(
      ExitCode.CONFIG,
      "tokenize_missing",
      task=task.name,
      expected="seqio.preprocessors.tokenize among its preprocessors",
      got=", ".join(map(seqio.utils.function_name, steps)) or "none",
      fix="name files of text with --files in place of the task",
    )
  return seqio.Task(
    task.name,
    source=task.source,
    preprocessors=steps[: places[0]],
    output_features=task.output_features,
  )


def _unwrap(step: Callable) -> Callable:
  while isinstance(step, functools.partial):
    step = step.func
  return step


def _make_shard_dataset(task: seqio.Task, split: str, number: int, num_shards: int) -> tf.data.Dataset:
  seed = preprocess_seed(task.name, split, 0, number)
  tf.random.set_seed(0)
  dataset = task.source.get_dataset(
    split=split,
    shuffle=False,
    seed=seed,
    shard_info=seqio.ShardInfo(index=number, num_shards=num_shards),
  )
  return task.preprocess_postcache(dataset, sequence_length=None, seed=seed)


def _choose_features(task: seqio.Task, spec: Any, features: Sequence[str] | None) -> list[str]:
  texts = [name for name, feature in spec.items() if getattr(feature, "dtype", None) == tf.string]
  if features is None:
    features = [name for name in task.output_features if name in texts]
  for name in features or ["any"]:
    if name not in texts:
      raise AnystepError(
        ExitCode.USAGE,
        "feature_unknown",
        task=task.name,
        expected=find_nearest(name, texts) or "a feature of text, of which there is none before tokenize",
        got=name if features else "no output feature that is text before tokenize",
        fix="name one with --feature",
      )
  return list(features)


def _select(example: dict[str, Any], *, names: Sequence[str]) -> dict[str, Any]:
  return {
    name: example[name].flat_values if isinstance(example[name], tf.RaggedTensor) else example[name]
    for name in names
  }


def _decode(value: Any) -> list[str]:
  return [text.decode(errors="replace") for text in np.asarray(value, object).reshape(-1).tolist()]
