"""Keyed permutations of [0, n), in place of every shuffle (docs/order.md#keys-and-permutations)."""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple, overload

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.whole_numbers import whole_number

_MAX_SIZE = 1 << 62
# Arrays without axes: a ufunc takes one in 0.25 us less than a numpy scalar.
_MULTIPLIERS = [np.array(m, np.uint64) for m in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
_SHIFTS = [np.array(s, np.uint64) for s in (30, 27, 31)]
_POWERS_OF_4 = np.array([4**w for w in range(31)], np.uint64)
# Up to w = 16 a round is a lookup in a table of 2**w, 0.9 ns a value; the arithmetic takes 1.6 ns. At w = 17
# a table leaves the second-level cache and gains nothing. Making a table pays from four values an entry on.
_TABLE_BITS = 16
_VALUES_PER_TABLE_ENTRY = 4
# Values of a chunk: four buffers of 128 KiB stay in the second-level cache.
_CHUNK_VALUES = 1 << 14
# Values of a block, which bounds the temporary arrays. The last few values of a block walk on alone, for up
# to 0.8 ms: 3 ns for each value of the block.
_BLOCK_VALUES = 1 << 18


def round_keys(*parts: object) -> np.ndarray:
  """Return eight keys for a name of several parts: BLAKE2b of "anystep/1" and the parts, joined by 0x1F.

  Returns:
    `(8,) uint64`.

  >>> hex(round_keys("preshuffle", "demo", "train", 0)[0])
  '0xd8be4386703a9658'
  """
  text = "\x1f".join(["anystep/1", *map(str, parts)])
  return np.frombuffer(hashlib.blake2b(text.encode()).digest(), "<u8").astype(np.uint64)


def mix(z: np.ndarray) -> np.ndarray:
  """The finalizer of SplitMix64 (Steele, Lea & Flood 2014), on uint64 arrays."""
  return _finish_mix(_start_mix(z))


def _start_mix(z: np.ndarray) -> np.ndarray:
  """The first step of `mix`. It is linear: _start_mix(a ^ b) = _start_mix(a) ^ _start_mix(b)."""
  return z ^ (z >> _SHIFTS[0])


def _finish_mix(z: np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
  """Do the steps of `mix` after the first, in place."""
  z *= _MULTIPLIERS[0]
  z ^= np.right_shift(z, _SHIFTS[1], out=scratch)
  z *= _MULTIPLIERS[1]
  z ^= np.right_shift(z, _SHIFTS[2], out=scratch)
  return z


def preprocess_seed(task: str, split: str, base_seed: int, source_shard: int) -> int:
  """The seed that SeqIO's preprocessors get for a source shard (docs/order.md#the-cache).

  >>> preprocess_seed("demo", "train", 0, 3)
  235544420
  """
  return int(round_keys("preprocess", task, split, base_seed, source_shard)[0] % np.uint64(1 << 31))


def sub_keys(keys: np.ndarray, x: np.ndarray | int) -> np.ndarray:
  """Derive keys for each number x from a set of keys: k_j becomes mix(k_j ^ mix(x + 1)).

  Args:
    keys: `(..., 8) uint64`, broadcast against x.
    x: an int, or an integer array of shape `(...)`.

  Returns:
    `(..., 8) uint64`.

  >>> hex(sub_keys(round_keys("epoch", "demo", "train", 0, 1), 0)[0])
  '0x32381b9eb97196a9'
  """
  x = np.asarray(x).astype(np.uint64)
  words = _start_mix(_words_first(keys, x.ndim)) ^ _start_mix(mix(x[None] + np.uint64(1)))
  words = _finish_mix(words, np.empty_like(words))
  return words.transpose(*range(1, words.ndim), 0)


def _words_first(keys: np.ndarray, ndim: int) -> np.ndarray:
  """Return keys as rows of words, `(8, ...)`, which broadcast against arrays of ndim axes.

  Permutations work in this layout. Results of `sub_keys` have it in memory, so they are not copied here.
  """
  keys = np.asarray(keys, np.uint64)
  words = np.ascontiguousarray(keys.transpose(-1, *range(keys.ndim - 1)))
  return words.reshape(8, *[1] * (ndim + 1 - words.ndim), *words.shape[1:])


def permute(x: np.ndarray, n: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
  """Return permute(x, n, keys) of the order specification: a bijection of [0, n) for each set of keys.

  An eight-round Feistel network on 2w bits, w = ceil(bit_length(n - 1) / 2), walked until the result
  is below n.

  Args:
    x: integer array of values below n.
    n: sizes, an int or an array that broadcasts against x, 1 <= n <= 2**62.
    keys: `(8,) uint64`, or `(..., 8)` with one set for each value.

  Returns:
    `int64`, the shape of x.
  """
  return _walk(x, n, keys, forward=True)


def unpermute(y: np.ndarray, n: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
  """Invert `permute`; the arguments are the same."""
  return _walk(y, n, keys, forward=False)


def _walk(x: np.ndarray, n: np.ndarray | int, keys: np.ndarray, *, forward: bool) -> np.ndarray:
  x = np.asarray(x)
  values, result = x.reshape(-1), np.empty(x.size, np.uint64)
  network = _Network.build(x.shape, n, keys, forward=forward)
  for start in range(0, x.size, _BLOCK_VALUES):
    block = slice(start, start + _BLOCK_VALUES)
    _walk_block(network.only(block), values[block], result[block])
  return result.view(np.int64).reshape(x.shape)


def _walk_block(network: _Network, values: np.ndarray, result: np.ndarray) -> None:
  network.apply(values, result)
  values = result
  outside = positions = network.find_outside(values)
  while outside.size:
    network, values = network.only(outside), values.take(outside)
    network.apply(values, values)
    result[positions] = values
    outside = network.find_outside(values)
    positions = positions.take(outside)


class _Network(NamedTuple):
  """Feistel network that all values share, or one network for each value.

  Attributes:
    columns: n, w, mask, and the first step of `mix` of the eight keys in the order of their use:
      `(11,) uint64` for all, or `(11, values)`.
    tables: a round's result for each half, `(2**w,) uint64` for each key; empty if tables do not pay.
    forward: True for the permutation, False for its inverse.
    wide: whether some w is 31.
  """

  columns: np.ndarray
  tables: list[np.ndarray]
  forward: bool
  wide: bool

  @classmethod
  def build(cls, shape: tuple[int, ...], n: np.ndarray | int, keys: np.ndarray, *, forward: bool) -> _Network:
    sizes = np.asarray(n, np.uint64)
    shared = sizes.ndim == 0 and np.ndim(keys) == 1
    columns = np.empty((11, *(() if shared else shape)), np.uint64)
    columns[0] = sizes
    columns[1] = _POWERS_OF_4.searchsorted(sizes)
    columns[2] = (np.uint64(1) << columns[1]) - np.uint64(1)
    columns[3:] = _start_mix(_words_first(keys, columns.ndim - 1))[:: 1 if forward else -1]
    if not shared:
      columns = columns.reshape(11, math.prod(shape))
    half_bits, tables = int(columns[1].max(initial=0)), []
    if shared and half_bits <= _TABLE_BITS and math.prod(shape) >= _VALUES_PER_TABLE_ENTRY << half_bits:
      halves = np.arange(1 << half_bits, dtype=np.uint64)
      tables = [_finish_mix(halves ^ key) & columns[2] for key in columns[3:]]
    return cls(columns, tables, forward, wide=half_bits > 30)

  def only(self, selection: slice | np.ndarray) -> _Network:
    """Return the networks of some of the values."""
    if self.columns.ndim == 1:
      return self
    # `take` needs half the time of an index by an array.
    if isinstance(selection, slice):
      return self._replace(columns=self.columns[:, selection])
    return self._replace(columns=self.columns.take(selection, axis=1))

  def find_outside(self, values: np.ndarray) -> np.ndarray:
    """Return the positions of values that are not below n, `(outside,) int64`."""
    return (values >= self.columns[0, ...]).nonzero()[0]

  def apply(self, values: np.ndarray, result: np.ndarray) -> None:
    for start in range(0, values.size, _CHUNK_VALUES):
      chunk = slice(start, start + _CHUNK_VALUES)
      self.only(chunk)._apply_chunk(values[chunk], result[chunk])

  def _apply_chunk(self, values: np.ndarray, result: np.ndarray) -> None:
    _, half_bits, mask, *keys = (self.columns[row, ...] for row in range(11))
    left, right, mixed, scratch = np.empty((4, values.size), np.uint64)
    np.copyto(right, values, casting="unsafe")
    np.right_shift(right, half_bits, out=left)
    right &= mask
    if not self.forward:
      left, right = right, left
    for k in range(8):
      if self.tables:
        # Nothing is out of range; the default mode would copy `mixed` in case something were.
        self.tables[k].take(right.view(np.int64), out=mixed, mode="clip")
      else:
        np.bitwise_xor(right, keys[k], out=mixed)
        if self.wide:  # A narrower half has no bit 30, so the first step of `mix` does not change it.
          mixed ^= np.right_shift(right, _SHIFTS[0], out=scratch)
        _finish_mix(mixed, scratch)
        mixed &= mask
      left ^= mixed
      left, right = right, left
    if not self.forward:
      left, right = right, left
    np.left_shift(left, half_bits, out=result)
    result |= right


class Permutation:
  """Permutation of [0, n) named by its key parts.

  >>> p = Permutation(10, "preshuffle", "demo", "train", 0)
  >>> [p(x) for x in range(8)]
  [4, 8, 9, 5, 6, 3, 2, 0]
  >>> p.inverse(p(3))
  3

  Args:
    n: size, 1 <= n <= 2**62.
    *key_parts: the arguments of `round_keys`.
  """

  def __init__(self, n: int, *key_parts: object):
    n = whole_number(n, "sizes of permutations")
    if not 1 <= n <= _MAX_SIZE:
      raise AnystepError(
        ExitCode.USAGE,
        "permutation_size",
        expected="1 <= n <= 2**62",
        got=n,
        fix="permute a set that is neither empty nor larger than 2**62",
      )
    self.n = n
    self.key_parts = key_parts
    self._keys = round_keys(*key_parts)

  def __repr__(self) -> str:
    return f"Permutation({', '.join(map(repr, (self.n, *self.key_parts)))})"

  @overload
  def __call__(self, x: int) -> int: ...
  @overload
  def __call__(self, x: np.ndarray) -> np.ndarray: ...
  def __call__(self, x):
    """Return the image of x: an int for an int, `int64` of the same shape for an integer array."""
    return self._map(x, permute)

  @overload
  def inverse(self, y: int) -> int: ...
  @overload
  def inverse(self, y: np.ndarray) -> np.ndarray: ...
  def inverse(self, y):
    """Return the x whose image is y."""
    return self._map(y, unpermute)

  def _map(self, x, function):
    values = np.asarray(x)
    if values.dtype.kind not in "iuO":
      raise TypeError(f"Permutation takes integers, not {values.dtype}.")
    if values.dtype == object:
      # numpy makes such an array of ints that no integer type holds; they are out of range.
      values = np.array([whole_number(v, "permutations") for v in values.flat], object).reshape(values.shape)
    if values.size and not (values.min() >= 0 and values.max() < self.n):
      raise IndexError(f"Permutation of [0, {self.n}) takes no {values.min()} to {values.max()}.")
    result = function(values, self.n, self._keys)
    return result if values.ndim else int(result)
