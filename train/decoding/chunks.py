"""Fixed chunks that examples are answered in.

The last bits of an answer's numbers depend on the shape of the arrays that it is computed in. So every
example has its chunk, of as many rows and as much padding as the data alone decide: who computes the chunk,
and what else they compute, does not change the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from anystep.cached import cached_property
from anystep.limits import is_count


def bucket_length(length: int) -> int:
  """Return the padded length of rows: 8, or the next of eight steps to a power of two.

  At most an eighth of a row, and not 8 tokens or more of a short one, is padding; and there are few shapes
  to compile.

  >>> [bucket_length(length) for length in (0, 8, 9, 33, 37, 500, 513)]
  [8, 8, 9, 36, 40, 512, 576]
  """
  if length <= 8:
    return 8
  step = 1 << (length - 1).bit_length() - 4
  return -(-length // step) * step


class Chunk(NamedTuple):
  """Examples that are answered together.

  Attributes:
    indices: (examples,) int64, their indices; the last chunk may have fewer than others.
    lengths: padded length by feature.
  """

  indices: np.ndarray
  lengths: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPlan:
  """Split of examples into chunks of neighbours by length.

  Attributes:
    lengths: by feature, (examples,) int, the lengths that decide which examples share a chunk and its
      padding.
    max_lengths: the lengths that features are cut to; those that `lengths` does not name, such as targets
      that are to be predicted, are padded to it.
    chunk_examples: number of examples of a chunk.

  Raises:
    ValueError: the lengths' numbers of examples differ, or a name is not in max_lengths.
  """

  lengths: Mapping[str, np.ndarray]
  max_lengths: Mapping[str, int]
  chunk_examples: int

  def __post_init__(self):
    if not is_count(self.chunk_examples, least=1):
      raise ValueError(f"chunk_examples: expected a whole number of at least 1, got {self.chunk_examples!r}")
    if len({len(array) for array in self.lengths.values()}) != 1:
      sizes = {name: len(array) for name, array in self.lengths.items()}
      raise ValueError(f"lengths: expected the lengths of all examples for each feature, got {sizes}")
    unknown = self.lengths.keys() - self.max_lengths.keys()
    if unknown:
      raise ValueError(f"lengths: expected features of {sorted(self.max_lengths)}, got {sorted(unknown)}")

  def __len__(self) -> int:
    return -(-self.num_examples // self.chunk_examples)

  def __getitem__(self, number: int) -> Chunk:
    """Return a chunk by its number, from 0.

    Raises:
      IndexError: there is no such chunk.
    """
    if not 0 <= number < len(self):
      raise IndexError(f"chunk {number}: there are {len(self)}")
    indices = self._order[number * self.chunk_examples : (number + 1) * self.chunk_examples]
    padded = {name: int(buckets[indices].max()) for name, buckets in self._buckets.items()}
    return Chunk(indices, {**self.max_lengths, **padded})

  @property
  def num_examples(self) -> int:
    """Number of examples."""
    return len(next(iter(self.lengths.values())))

  @cached_property
  def _buckets(self) -> dict[str, np.ndarray]:
    buckets = {}
    for name, array in self.lengths.items():
      most = self.max_lengths[name]
      table = np.array([min(bucket_length(length), most) for length in range(most + 1)], np.int64)
      buckets[name] = table[np.minimum(array, most)]
    return buckets

  @cached_property
  def _order(self) -> np.ndarray:
    """The examples' indices by rising padded lengths, those of one shape in their own order."""
    buckets = self._buckets
    return np.lexsort([buckets[name] for name in sorted(buckets, reverse=True)])


def answer_chunks(
  plan: ChunkPlan,
  numbers: Iterable[int],
  *,
  make_batch: Callable[[np.ndarray, dict[str, int]], Any],
  answer: Callable[[Any, np.ndarray], Any],
) -> Iterator[tuple[Chunk, Any]]:
  """Yield the chunks of these numbers with their answers.

  An answer depends on the plan and on the two functions, not on which numbers are computed here.

  Args:
    plan: the chunks.
    numbers: numbers of chunks, from 0, in any order.
    make_batch: from (chunk_examples,) indices and padded lengths by feature to a batch with a row for each.
      Where a chunk has fewer examples than others, its last one is repeated.
    answer: from that batch and these indices, by which draws are keyed, to a tree of arrays with as many
      rows.

  Yields:
    The chunk, and its answers as numpy arrays with a row for each of its indices.
  """
  for number in numbers:
    chunk = plan[number]
    missing = plan.chunk_examples - len(chunk.indices)
    indices = np.concatenate([chunk.indices, np.repeat(chunk.indices[-1:], missing)])
    answers = answer(make_batch(indices, chunk.lengths), indices)
    yield chunk, _first_rows(answers, len(chunk.indices))


def _first_rows(tree: Any, count: int) -> Any:
  """Return a tree's arrays as numpy arrays of their first rows."""
  return jax.tree.map(lambda array: np.asarray(array)[:count], tree)
