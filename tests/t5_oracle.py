"""What SeqIO alone makes of T5's tasks, in the order of their caches."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import seqio
import tensorflow as tf

import anystep
from anystep.cache_job.preprocessing.example_datasets import preprocess_seed

LENGTHS = {"inputs": 64, "targets": 32}
# Objectives that make a model's features themselves want one length for all.
MODEL_FEATURE_LENGTH = 64
# Tasks whose preprocessors join or split examples after the placeholder.
AT_END = (
  "c4_prefix_lm_objective_decoder_architecture",
  "c4_prefix_lm_objective_encoder_decoder_architecture",
  "c4_v220_full_lm",
  "c4_v220_iid_denoising",
  "c4_v220_prefix_lm",
  "c4_v220_span_corruption",
)


def lengths_of(task):
  if task.output_features.keys() <= LENGTHS.keys():
    return {name: LENGTHS[name] for name in task.output_features}
  return dict.fromkeys(task.output_features, MODEL_FEATURE_LENGTH)


def converter_of(task):
  """SeqIO's converter for the model that the task is for."""
  if task.output_features.keys() == LENGTHS.keys():
    return seqio.EncDecFeatureConverter(pack=False)
  if task.output_features.keys() == {"targets"}:
    return seqio.LMFeatureConverter(pack=False)
  return seqio.PassThroughFeatureConverter()


@functools.cache
def seqio_split(task_name, split):
  return SeqioSplit(seqio.TaskRegistry.get(task_name), split)


class SeqioSplit:
  """What SeqIO alone makes of a split of a task, in the order of the cache.

  Attributes:
    cached: examples as the cache has to hold them.
    read: those examples, fewer where some are dropped, after all preprocessors and cut to their lengths.
    rows: these as features of a model.
  """

  def __init__(self, task, split):
    made = []
    for shard in range(len(task.source.list_shards(split))):
      dataset = self._cached_dataset(task, split, shard)
      # The pieces left alone that FLAGS speaks of.
      with contextlib.suppress(tf.errors.InvalidArgumentError):
        made += dataset.as_numpy_iterator()
    permutation = anystep.Permutation(len(made), "preshuffle", task.name, split, 0)
    self.cached = [made[k] for k in permutation.inverse(np.arange(len(made), dtype=np.uint64)).tolist()]
    spec, lengths = dataset.element_spec, lengths_of(task)
    dataset = tf.data.Dataset.from_generator(lambda: iter(self.cached), output_signature=spec)
    if task.name not in AT_END:
      dataset = task.preprocess_postcache(dataset, sequence_length=lengths, seed=0)
    dataset = seqio.utils.trim_dataset(dataset, lengths, task.output_features)
    self.read = list(dataset.as_numpy_iterator())
    self.rows = list(converter_of(task)(dataset, task_feature_lengths=lengths).as_numpy_iterator())

  def _cached_dataset(self, task, split, shard):
    """A source shard's part of the cache, with the seeds that the job gives it."""
    seed = preprocess_seed(task.name, split, 0, shard)
    tf.random.set_seed(0)
    shard_info = seqio.ShardInfo(shard, len(task.source.list_shards(split)))
    dataset = task.source.get_dataset(split, shuffle=False, shard_info=shard_info)
    dataset = task.preprocess_precache(dataset, seed=seed)
    if task.name in AT_END:
      dataset = task.preprocess_postcache(dataset, sequence_length=lengths_of(task), seed=seed)
    return dataset
