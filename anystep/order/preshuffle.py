"""The preshuffle: the order of a split's examples in its cache (docs/order.md#the-cache)."""

from __future__ import annotations

from anystep.order.permutation import Permutation


def preshuffle(num_examples: int, *, task: str, split: str, seed: int) -> Permutation:
  """Return the permutation from an example's ordinal in the source to its index in the cache.

  Args:
    num_examples: in the split.
    task: the task's registered name.
    split: the split's name.
    seed: the cache job's `--seed`.

  >>> preshuffle(10, task="demo", split="train", seed=0)(3)
  5
  """
  return Permutation(num_examples, "preshuffle", task, split, seed)
