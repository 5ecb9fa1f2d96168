"""Groups of spills cover all files in order, grow with the data, and stay within a worker's memory."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anystep.cache_job.state.group_sizes import choose_group_bytes, estimate_ranges, group_files
from anystep.cache_job.state.spill_files import FILE_BYTES

GIB = 1 << 30
FILES = st.lists(st.tuples(st.integers(0, 4 * FILE_BYTES), st.integers(0, 10**6)), min_size=1, max_size=40)


@given(FILES, st.sampled_from([1, 2, 4, 64]))
def test_groups_are_all_files_in_order_and_as_few_as_fit(files, memory_gib):
  raw_bytes, records = zip(*files, strict=True)
  groups = list(group_files(raw_bytes, records, memory_bytes=memory_gib * GIB))
  assert [file for group in groups for file in group] == list(range(len(files)))
  limit = choose_group_bytes(sum(raw_bytes), memory_bytes=memory_gib * GIB)

  def fits(members):
    size = sum(raw_bytes[file] for file in members)
    held = size + 72 * sum(records[file] for file in members)
    return size <= limit * (9 / 8 if limit > FILE_BYTES else 1) and held <= max(
      (memory_gib - 1) * GIB // 2, FILE_BYTES
    )

  assert all(len(group) == 1 or fits(group) for group in groups)
  assert not any(fits([*group, after[0]]) for group, after in itertools.pairwise(groups))


@pytest.mark.parametrize(("memory_gib", "most_mib"), [(1, 128), (2, 384), (8, 3328)])
def test_groups_grow_with_the_data_until_they_fill_the_memory(memory_gib, most_mib):
  def groups(gib):
    """Of a source shard for each GiB, of records of 1 KiB."""
    sizes, counts = [FILE_BYTES] * 8 * gib, [FILE_BYTES >> 10] * 8 * gib
    return list(group_files(sizes, counts, memory_bytes=memory_gib * GIB))

  assert {len(group) for group in groups(8)} == {1}
  for gib in (64, 256, 1024):
    expected_mib = min(max(gib << 2, 128), most_mib)
    (_, *whole, _) = [len(group) << 7 for group in groups(gib)]
    assert set(whole) <= {expected_mib, expected_mib + 128}
  ranges = estimate_ranges(
    num_files=1024, num_examples=1 << 30, record_bytes=1 << 40, num_shards=1024, memory_bytes=memory_gib * GIB
  )
  assert ranges == 8192 + 2 * 1024 * len(groups(1024))
