"""Examples that are made, not read: a pair of texts is a function of its number."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode

NUM_SOURCE_SHARDS = 4
_MADE_AT_A_TIME = 1024


class NumberedSource(seqio.DataSource):
  """Pairs of texts, `{"inputs", "targets"}`, of which a split has a range of the numbers.

  Splits follow on each other: `train` has the first numbers, the next split the next. Where texts of
  different numbers differ, nothing of one split is in another. Shard k of n is the k-th of n stretches of a
  split.

  Args:
    sizes: examples by split.
    available: how many numbers there are.

  Raises:
    AnystepError: 78 `too_many_examples` where there are fewer.
  """

  def __init__(self, sizes: Mapping[str, int], *, available: int):
    if sum(sizes.values()) > available:
      raise AnystepError(
        ExitCode.CONFIG,
        "too_many_examples",
        expected=f"at most {available:,} examples, which is all that there are",
        got=f"{sum(sizes.values()):,} of {', '.join(sizes)}",
        fix="ask for fewer, or make the examples longer",
      )
    super().__init__(splits=tuple(sizes), num_input_examples=sizes)
    ends = np.cumsum(list(sizes.values())).tolist()
    self._first = {split: end - sizes[split] for split, end in zip(sizes, ends, strict=True)}

  @abc.abstractmethod
  def texts_of(self, numbers: np.ndarray) -> tuple[Sequence[str], Sequence[str]]:
    """Inputs and targets of the examples of some numbers, `(n,) int64`."""

  @property
  def supports_arbitrary_sharding(self) -> bool:
    """Any number of shards has the same examples."""
    return True

  def list_shards(self, split: str) -> list[str]:
    """Names of the shards that a cache is made of."""
    return [f"{split}-{k:05d}-of-{NUM_SOURCE_SHARDS:05d}" for k in range(NUM_SOURCE_SHARDS)]

  def get_dataset(
    self, split="train", shuffle=False, seed=None, shard_info=None, **unused
  ) -> tf.data.Dataset:
    """`{"inputs", "targets"}` of each number; see `seqio.DataSource.get_dataset`."""
    del unused
    shard, num_shards = (shard_info.index, shard_info.num_shards) if shard_info else (0, 1)
    size = self.num_input_examples(split)
    start, stop = (size * k // num_shards for k in (shard, shard + 1))
    texts = tf.TensorSpec([None], tf.string)
    batches = tf.data.Dataset.from_generator(
      lambda: self._batches(self._first[split] + start, self._first[split] + stop),
      output_signature={"inputs": texts, "targets": texts},
    )
    dataset = batches.unbatch().apply(tf.data.experimental.assert_cardinality(stop - start))
    return dataset.shuffle(max(stop - start, 1), seed=seed) if shuffle else dataset

  def _batches(self, start: int, stop: int) -> Iterator[dict[str, Sequence[str]]]:
    for first in range(start, stop, _MADE_AT_A_TIME):
      inputs, targets = self.texts_of(np.arange(first, min(first + _MADE_AT_A_TIME, stop)))
      yield {"inputs": inputs, "targets": targets}
