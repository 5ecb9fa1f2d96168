"""Leaves of checkpoints: arrays that are read in blocks, and views of them.

They have T5X's names: `target/...` are parameters, `state/param_states/.../v` Adafactor's moments.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

BLOCK_BYTES = 64 << 20
PARAMETERS, STEP, MOMENTS = "target/", "state/step", "state/param_states/"
OTHER_OPTIMIZER, MUTABLES = "state/opt_state/", "flax_mutables/"
# Adafactor's moments of a parameter.
SLOTS = ("v_row", "v_col", "v", "m")

Index = tuple[slice, ...]
Leaves = Mapping[str, "Leaf"]
Advance = Callable[[int], None]
"""Told the number of bytes of each block that is written."""
Writer = Callable[[str, Advance], None]
"""Writes leaves into a new directory of this path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """An array that is read in parts.

  Attributes:
    shape: its shape.
    dtype: its dtype.
    chunk: shape of the parts that it is stored in, from index 0 on; ones where any part is as cheap.
    read: returns the part at slices of each axis, all with a start and a stop and no step.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  chunk: tuple[int, ...]
  read: Callable[[Index], np.ndarray]

  @property
  def num_bytes(self) -> int:
    """Size of the whole array."""
    return math.prod(self.shape) * self.dtype.itemsize

  def read_whole(self) -> np.ndarray:
    """Return the whole array."""
    return self.read(tuple(slice(0, size) for size in self.shape))

  def describe(self) -> str:
    """Return dtype and shape, as in `float32 (4, 8)`."""
    return f"{self.dtype} {self.shape}"


def array_leaf(array: np.ndarray) -> Leaf:
  """Return an array in memory as a leaf."""
  return Leaf(shape=array.shape, dtype=array.dtype, chunk=(1,) * array.ndim, read=lambda index: array[index])


def is_filler(name: str, leaf: Leaf) -> bool:
  """Return whether a leaf stands for a moment that is not kept."""
  return name.startswith(MOMENTS) and leaf.shape == (1,)


def with_fillers(leaves: Leaves) -> dict[str, Leaf]:
  """Return leaves with T5X's fillers, zeros of shape (1,), for moments that are not kept, if any are."""
  if not any(name.startswith(MOMENTS) for name in leaves):
    return dict(leaves)
  filler = array_leaf(np.zeros((1,), np.float32))
  parameters = [name.removeprefix(PARAMETERS) for name in leaves if name.startswith(PARAMETERS)]
  return {f"{MOMENTS}{name}/{slot}": filler for name in parameters for slot in SLOTS} | dict(leaves)


def find_dtype(name: str) -> np.dtype:
  """Return the dtype of a name; numpy alone does not know `bfloat16` and others.

  Raises:
    TypeError: there is none.
  """
  return np.dtype(getattr(ml_dtypes, name, name))


def is_floating(dtype: np.dtype) -> bool:
  """Return whether a dtype is one of floating point; numpy does not count bfloat16 among them."""
  return np.issubdtype(dtype, np.floating) or "float" in dtype.name


def cast(leaf: Leaf, dtype: np.dtype) -> Leaf:
  """Return a leaf rounded to another dtype."""
  return dataclasses.replace(leaf, dtype=dtype, read=lambda index: leaf.read(index).astype(dtype))


def transpose(leaf: Leaf, axes: Sequence[int] = (1, 0)) -> Leaf:
  """Return a leaf with its axes in another order: axis i is axis `axes[i]` of the leaf."""

  def read(index: Index) -> np.ndarray:
    inner = dict(zip(axes, index, strict=True))
    return leaf.read(tuple(inner[axis] for axis in range(len(axes)))).transpose(axes)

  shape, chunk = (tuple(sizes[axis] for axis in axes) for sizes in (leaf.shape, leaf.chunk))
  return dataclasses.replace(leaf, shape=shape, chunk=chunk, read=read)


def split_axis(leaf: Leaf, axis: int, inner_size: int) -> Leaf:
  """Return a leaf with an axis of size n as two, of sizes n / inner_size and inner_size.

  Raises:
    ValueError: inner_size does not divide the axis.
  """
  outer_size, rest = divmod(leaf.shape[axis], inner_size)
  if rest:
    raise ValueError(f"an axis of {leaf.shape[axis]} has no parts of {inner_size}")

  def read(index: Index) -> np.ndarray:
    outer, inner = index[axis : axis + 2]
    joined = slice(outer.start * inner_size, outer.stop * inner_size)
    part = leaf.read((*index[:axis], joined, *index[axis + 2 :]))
    split = part.reshape(*part.shape[:axis], -1, inner_size, *part.shape[axis + 1 :])
    return split[(slice(None),) * (axis + 1) + (inner,)]

  chunk_outer = max(1, leaf.chunk[axis] // inner_size)
  return dataclasses.replace(
    leaf,
    shape=(*leaf.shape[:axis], outer_size, inner_size, *leaf.shape[axis + 1 :]),
    chunk=(*leaf.chunk[:axis], chunk_outer, inner_size, *leaf.chunk[axis + 1 :]),
    read=read,
  )


def merge_axes(leaf: Leaf, axis: int) -> Leaf:
  """Return a leaf with an axis and the next one as one."""
  inner_size = leaf.shape[axis + 1]

  def read(index: Index) -> np.ndarray:
    joined = index[axis]
    outer = slice(joined.start // inner_size, -(-joined.stop // inner_size))
    part = leaf.read((*index[:axis], outer, slice(0, inner_size), *index[axis + 1 :]))
    merged = part.reshape(*part.shape[:axis], -1, *part.shape[axis + 2 :])
    first = outer.start * inner_size
    return merged[(slice(None),) * axis + (slice(joined.start - first, joined.stop - first),)]

  return dataclasses.replace(
    leaf,
    shape=(*leaf.shape[:axis], leaf.shape[axis] * inner_size, *leaf.shape[axis + 2 :]),
    chunk=(*leaf.chunk[:axis], leaf.chunk[axis] * inner_size, *leaf.chunk[axis + 2 :]),
    read=read,
  )


def stack(leaves: Sequence[Leaf], axis: int) -> Leaf:
  """Return leaves of one shape and dtype as one leaf with a new axis.

  Raises:
    ValueError: they differ.
  """
  first = leaves[0]
  if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
    raise ValueError("; ".join(leaf.describe() for leaf in leaves))

  def read(index: Index) -> np.ndarray:
    inner = (*index[:axis], *index[axis + 1 :])
    return np.stack([leaf.read(inner) for leaf in leaves[index[axis]]], axis)

  shape = (*first.shape[:axis], len(leaves), *first.shape[axis:])
  return dataclasses.replace(
    first, shape=shape, chunk=(*first.chunk[:axis], 1, *first.chunk[axis:]), read=read
  )


def block_shape(leaf: Leaf, block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
  """Return the shape of the blocks that a leaf is copied in: whole chunks, as many as block_bytes hold.

  A larger chunk is cut. Blocks grow along their shortest axis, so that transposed ones are as quick to write.

  >>> block_shape(array_leaf(np.zeros((4096, 10), np.float32)), 4096)
  (64, 10)
  """
  block = [min(chunk, size) for chunk, size in zip(leaf.chunk, leaf.shape, strict=True)]
  while math.prod(block) * leaf.dtype.itemsize > block_bytes:
    longest = max(range(len(block)), key=lambda axis: block[axis])
    block[longest] = -(-block[longest] // 2)
  while True:
    grown = None
    for axis in sorted(range(len(block)), key=lambda axis: (block[axis], -axis)):
      size = min(2 * block[axis], leaf.shape[axis])
      if size > block[axis]:
        larger = [*block[:axis], size, *block[axis + 1 :]]
        if math.prod(larger) * leaf.dtype.itemsize <= block_bytes:
          grown = larger
          break
    if grown is None:
      return tuple(block)
    block = grown


def iterate_blocks(leaf: Leaf, block: Sequence[int]) -> Iterator[Index]:
  """Yield the index of each block of this shape, the last axis first; none of an array without elements."""
  starts = [range(0, size, step or 1) for size, step in zip(leaf.shape, block, strict=True)]
  for corner in itertools.product(*starts):
    yield tuple(
      slice(start, min(start + step, size))
      for start, step, size in zip(corner, block, leaf.shape, strict=True)
    )
