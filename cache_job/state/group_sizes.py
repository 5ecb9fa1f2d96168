"""Sizes of the groups of spills that are sorted together, and of what that reads.

Each shard is gathered from a range of each group. Were groups of one size, the number of ranges would grow
with the square of the data. So groups grow with the data, up to what a worker's memory holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from anystep.cache_job.state.spill_files import FILE_BYTES

# A process with TensorFlow and Beam has so much of its memory for itself.
_PROCESS_BYTES = 1 << 30
# A group's records are held once, beside a file that is read and decompressed, and its frames.
_COPIES = 2
# Ordinals, indices, shards, order, sizes and their sums, of each record.
_RECORD_BYTES = 72
# Until they are as large as the memory allows, groups are about so many.
_GROUPS = 256
# A range of a sorted file is found in a table at its end, which is another one.
RANGES_PER_FRAME = 2


def choose_group_bytes(record_bytes: int, *, memory_bytes: int) -> int:
  """Return the bytes of records that a group is to have.

  Args:
    record_bytes: of all of the split's records.
    memory_bytes: of a worker's process.

  >>> [choose_group_bytes(size << 30, memory_bytes=2 << 30) >> 20 for size in (1, 32, 64, 128, 1024)]
  [128, 128, 256, 512, 512]
  """
  return min(max(record_bytes // _GROUPS, FILE_BYTES), _choose_held_bytes(memory_bytes))


def _choose_held_bytes(memory_bytes: int) -> int:
  """Return the bytes that a group may have in memory, with those that sorting needs of each record."""
  return max((memory_bytes - _PROCESS_BYTES) // _COPIES, FILE_BYTES)


def group_files(raw_bytes: Sequence[int], records: Sequence[int], *, memory_bytes: int) -> Iterator[range]:
  """Yield the files of each group, by their numbers, in order.

  Args:
    raw_bytes: bytes of records of each file. records: their number.
    memory_bytes: of a worker's process.
  """
  limit = choose_group_bytes(sum(raw_bytes), memory_bytes=memory_bytes)
  most = _choose_held_bytes(memory_bytes)
  # A large spill's file is a little larger than `FILE_BYTES`: two of them are to fit into two times as much.
  slack = limit // 8 if limit > FILE_BYTES else 0
  start, group_bytes, held_bytes = 0, 0, 0
  for file, (size, count) in enumerate(zip(raw_bytes, records, strict=True)):
    held = size + _RECORD_BYTES * count
    if file > start and (group_bytes + size > limit + slack or held_bytes + held > most):
      yield range(start, file)
      start, group_bytes, held_bytes = file, 0, 0
    group_bytes += size
    held_bytes += held
  yield range(start, len(raw_bytes))


def estimate_ranges(
  *, num_files: int, num_examples: int, record_bytes: int, num_shards: int, memory_bytes: int
) -> int:
  """Estimate the number of ranges of files that sorting and writing a split read.

  Args:
    num_files: source ranges, each of which becomes a spill.
    num_examples: N.
    record_bytes: of all records.
    num_shards: S.
    memory_bytes: of a worker's process.
  """
  parts = max(math.ceil(record_bytes / num_files / FILE_BYTES), 1)
  sizes = [record_bytes // (num_files * parts)] * (num_files * parts)
  counts = [num_examples // (num_files * parts)] * (num_files * parts)
  groups = list(group_files(sizes, counts, memory_bytes=memory_bytes))
  # A group of few examples has none for some shards.
  filled = 1 - math.exp(-num_examples / (len(groups) * num_shards)) if len(groups) > 1 else 1
  frames = round(len(groups) * min(num_shards, num_examples) * filled)
  return len(sizes) + RANGES_PER_FRAME * frames
