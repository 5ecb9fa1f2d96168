"""The default number of shards grows with the data as the specification says."""

import pytest

import oracle
from anystep.order.preshuffle import default_num_shards


@pytest.mark.parametrize("block_records", [1, 7, 32])
def test_default_shards_are_the_oracles(block_records):
  for num_examples in (0, 1, *(k * block_records - d for k in (2, 4, 64) for d in (0, 1)), 10**12):
    for record_bytes in (0, *((k << 20) - d for k in (1, 2, 8, 32, 64, 128) for d in (0, 1)), 1 << 50):
      expected = oracle.default_num_shards(num_examples, record_bytes, block_records)
      assert default_num_shards(num_examples, record_bytes, block_records) == expected
