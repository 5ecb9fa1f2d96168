"""A source's training examples without the first few of each shard, which become its validation split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode
from anystep.tasks.sources.huggingface_source import HuggingFaceDataSource
from anystep.tasks.sources.rows_source import FilesSource, make_shards_dataset

TRAIN, VALIDATION = "train", "validation"
# In the name of a shard: behind that of the source's own.
HELD_OUT_BEFORE = "#after="


class HeldOutDataSource(seqio.DataSource):
  """A source with split `train` as two: `validation` of a number of its examples, `train` of all others.

  The number is dealt to the source's shards as evenly as it goes, the first ones getting one more, and what
  a shard holds out are its first examples. So nothing is in both, nothing is lost, and which are held out
  depends on the files alone: not on a seed, nor on who reads. Files that are added move it.

  Args:
    source: a source of this package, with split `train`.
    examples: how many are held out, at least 1.

  Raises:
    AnystepError: when shards of `validation` are listed: 78 `validation_examples` where a shard has fewer
      than its part.
  """

  def __init__(self, source: FilesSource | HuggingFaceDataSource, examples: int):
    if examples < 1:
      raise ValueError(f"examples is {examples}, and has to be at least 1")
    self._source = source
    self._examples = examples
    self._checked = functools.cache(self._check)
    super().__init__(splits=(TRAIN, VALIDATION))

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return False

  def list_shards(self, split: str) -> list[str]:
    """Names of the shards: the source's, with what is held out of each."""
    mark = HELD_OUT_BEFORE if split == TRAIN else "#first="
    return [f"{name}{mark}{count}" for name, count in self._deal_examples(split)]

  def num_input_examples(self, split: str) -> int | None:
    """Number of examples of a split, if the source knows it."""
    if split == VALIDATION:
      return self._examples
    num_examples = self._source.num_input_examples(TRAIN)
    return None if num_examples is None else num_examples - self._examples

  def get_dataset(
    self, split=TRAIN, shuffle=True, seed=None, shard_info=None, **unused: Any
  ) -> tf.data.Dataset:
    """See `seqio.DataSource.get_dataset`."""
    del unused
    read = self._make_reader()

    # A graph made of Python's code would hide whose errors they are.
    @tf.autograph.experimental.do_not_convert
    def part(shard: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
      count = tf.cast(count, tf.int64)
      return read(shard).skip(count) if split == TRAIN else read(shard).take(count)

    return make_shards_dataset(
      self._deal_examples(split), part, shuffle=shuffle, seed=seed, shard_info=shard_info
    )

  def described(self) -> dict[str, Any]:
    """Description of the data that is read, for a cache's provenance."""
    return {
      "source": type(self._source).__name__,
      "source_arguments": self._source.described(),
      "validation_examples": self._examples,
    }

  def _deal_examples(self, split: str) -> list[tuple[str, int]]:
    """The source's shards, and how many examples are held out of each: those of validation that has some."""
    shards = self._source.list_shards(TRAIN)
    each, more = divmod(self._examples, len(shards))
    parts = [(name, each + (k < more)) for k, name in enumerate(shards)]
    if split == TRAIN:
      return parts
    parts = [(name, count) for name, count in parts if count]
    self._checked(tuple(parts))
    return parts

  def _make_reader(self) -> Callable[[tf.Tensor], tf.data.Dataset]:
    source = self._source
    return source.reader(TRAIN) if isinstance(source, HuggingFaceDataSource) else source.read_shard

  def _check(self, parts: Sequence[tuple[str, int]]) -> None:
    read = self._make_reader()
    for name, count in parts:
      num_examples = int(
        read(tf.constant(name)).take(count).reduce(np.int64(0), lambda number, _: number + 1)
      )
      if num_examples < count:
        raise AnystepError(
          ExitCode.CONFIG,
          "validation_examples",
          shard=name,
          expected=f"at least {count} examples, its part of {self._examples}",
          got=num_examples,
          fix="hold out fewer, or name files of their own with validation=",
        )
