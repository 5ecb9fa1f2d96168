"""Views of leaves beside numpy's own operations, and blocks."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from anystep.train.leaves.leaf import (
  Leaf,
  array_leaf,
  block_shape,
  cast,
  find_dtype,
  iterate_blocks,
  merge_axes,
  split_axis,
  stack,
  transpose,
)

ARRAY = np.arange(6 * 8 * 4, dtype=np.float32).reshape(6, 8, 4)
VIEWS = {
  "transpose": (lambda leaf: transpose(leaf, (2, 0, 1)), ARRAY.transpose(2, 0, 1)),
  "split": (lambda leaf: split_axis(leaf, 1, 2), ARRAY.reshape(6, 4, 2, 4)),
  "merge": (lambda leaf: merge_axes(leaf, 0), ARRAY.reshape(48, 4)),
  "stack": (lambda leaf: stack([leaf, leaf, leaf], 1), np.stack([ARRAY] * 3, 1)),
  "cast": (lambda leaf: cast(leaf, np.dtype(ml_dtypes.bfloat16)), ARRAY.astype(ml_dtypes.bfloat16)),
  "layers of kernels with heads": (
    lambda leaf: transpose(merge_axes(transpose(split_axis(leaf, 1, 4), (1, 0, 2, 3)), 1), (0, 2, 1)),
    ARRAY.reshape(6, 2, 4, 4).transpose(1, 0, 2, 3).reshape(2, 24, 4).transpose(0, 2, 1),
  ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_part_of_a_view_is_numpys(name):
  make, expected = VIEWS[name]
  view = make(array_leaf(ARRAY))
  assert (view.shape, view.dtype) == (expected.shape, expected.dtype)
  assert len(view.chunk) == expected.ndim
  ranges = [list(itertools.combinations(range(size + 1), 2)) for size in expected.shape]
  rng = np.random.default_rng(0)
  for _ in range(60):
    index = tuple(slice(*one[rng.integers(len(one))]) for one in ranges)
    np.testing.assert_array_equal(view.read(index), expected[index])


def test_only_leaves_of_one_shape_and_dtype_are_stacked():
  with pytest.raises(ValueError, match=r"float32 \(6, 8, 4\); float32 \(2,\)"):
    stack([array_leaf(ARRAY), array_leaf(np.zeros(2, np.float32))], 0)
  with pytest.raises(ValueError, match="has no parts of 3"):
    split_axis(array_leaf(ARRAY), 1, 3)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 1000), (1000, 5), (9, 40, 3, 8)])
@pytest.mark.parametrize("chunked", [False, True])
def test_blocks_cover_an_array_once_and_keep_to_the_limit(shape, chunked):
  array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
  leaf = array_leaf(array)
  if chunked:
    leaf = Leaf(shape=shape, dtype=array.dtype, chunk=tuple(min(size, 3) for size in shape), read=leaf.read)
  block = block_shape(leaf, 512)
  assert math.prod(block) * 4 <= 512
  copied, counts = np.full_like(array, -1), np.zeros(shape, int)
  for index in iterate_blocks(leaf, block):
    copied[index] = leaf.read(index)
    counts[index] += 1
  np.testing.assert_array_equal(copied, array)
  assert (counts == 1).all()


def test_a_chunk_that_is_larger_than_a_block_is_cut():
  leaf = Leaf(shape=(64, 64), dtype=np.dtype(np.float32), chunk=(64, 64), read=lambda index: np.zeros(()))
  assert block_shape(leaf, 4096) == (32, 32)


def test_names_of_dtypes_are_numpys_and_bfloat16():
  assert find_dtype("bfloat16").itemsize == 2
  assert find_dtype("float32") == np.float32
  with pytest.raises(TypeError):
    find_dtype("no_such_dtype")
