"""Order and shards of a split's examples in its cache (docs/order.md#the-cache)."""

from __future__ import annotations

from anystep.order.permutation import Permutation

_MAX_DEFAULT_SHARDS, _LEAST_SHARD_BYTES = 64, 1 << 20


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


def default_num_shards(num_examples: int, record_bytes: int, block_records: int) -> int:
  """Return the default S: the largest power of two up to 64 that leaves each shard 1 MiB and a block; else 1.

  Args:
    num_examples: N.
    record_bytes: bytes of all serialized records.
    block_records: g.

  >>> default_num_shards(10_000, 10_000 * 700, 32)
  4
  """
  most = min(_MAX_DEFAULT_SHARDS, record_bytes // _LEAST_SHARD_BYTES, num_examples // block_records)
  return 1 << max(most.bit_length() - 1, 0)
