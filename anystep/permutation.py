"""Keyed permutations of [0, n): the arithmetic that replaces every shuffle (design section 3)."""

from __future__ import annotations

import hashlib
from typing import overload

import numpy as np

from anystep.errors import AnystepError, ExitCode

_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MAX_SIZE = 1 << 62
# Values worked on at a time: a chunk and its temporaries stay in the second-level cache.
_CHUNK_VALUES = 8192


def round_keys(*parts: object) -> np.ndarray:
  """Eight keys from a name made of parts: BLAKE2b of "anystep/1" and the parts, joined by 0x1F.

  Returns:
    `(8,) uint64`.

  >>> hex(round_keys("preshuffle", "demo", "train", 0)[0])
  '0xd8be4386703a9658'
  """
  text = "\x1f".join(["anystep/1", *map(str, parts)])
  return np.frombuffer(hashlib.blake2b(text.encode()).digest(), "<u8").astype(np.uint64)


def mix(z: np.ndarray) -> np.ndarray:
  """The finalizer of SplitMix64 (Steele, Lea & Flood 2014), on uint64 arrays."""
  z = z ^ (z >> np.uint64(30))
  z *= np.uint64(_MULTIPLIERS[0])
  z ^= z >> np.uint64(27)
  z *= np.uint64(_MULTIPLIERS[1])
  z ^= z >> np.uint64(31)
  return z


def sub_keys(keys: np.ndarray, x: np.ndarray | int) -> np.ndarray:
  """Keys for each number x, derived from a set of keys: k_j becomes mix(k_j ^ mix(x + 1)).

  Args:
    keys: `(..., 8) uint64`, broadcast against x.
    x: an int, or an integer array of shape `(...)`.

  Returns:
    `(..., 8) uint64`.

  >>> hex(sub_keys(round_keys("epoch", "demo", "train", 0, 1), 0)[0])
  '0x32381b9eb97196a9'
  """
  x = np.asarray(x).astype(np.uint64)[..., None]
  return mix(keys ^ mix(x + np.uint64(1)))


def permute(x: np.ndarray, n: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
  """permute(x, n, keys) of the order specification: a bijection of [0, n) for each set of keys.

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
  """The inverse of `permute`, with the same arguments."""
  return _walk(y, n, keys, forward=False)


def _walk(x: np.ndarray, n: np.ndarray | int, keys: np.ndarray, *, forward: bool) -> np.ndarray:
  x = np.asarray(x).astype(np.uint64)
  sizes = np.asarray(n, np.uint64)
  half_bits = _half_bits(sizes)
  network = _encrypt if forward else _decrypt
  key_columns = np.moveaxis(np.asarray(keys, np.uint64), -1, 0)
  result = network(x, half_bits, key_columns)
  outside = result >= sizes
  while outside.any():
    where = np.nonzero(outside)
    result[where] = network(
      result[where], _pick(half_bits, where, x.shape), _pick(key_columns, where, (8, *x.shape))
    )
    outside[where] = result[where] >= _pick(sizes, where, x.shape)
  return result.astype(np.int64)


def _pick(values: np.ndarray, where: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> np.ndarray:
  """values[where] after broadcasting to shape, whose last axes `where` indexes; constants stay."""
  if values.ndim + len(where) == len(shape):
    return values
  index: tuple = (..., *where)
  return np.broadcast_to(values, shape)[index]


def _half_bits(sizes: np.ndarray) -> np.ndarray:
  """w = ceil(bit_length(n - 1) / 2), uint64, exactly: frexp of an integer below 2**53 has its bit length."""
  top = sizes - np.uint64(1)
  high = top >> np.uint64(32)
  bits = np.where(high > 0, 32 + np.frexp(high.astype(np.float64))[1], np.frexp(top.astype(np.float64))[1])
  return ((bits + 1) // 2).astype(np.uint64)


def _encrypt(x: np.ndarray, half_bits: np.ndarray, key_columns: np.ndarray) -> np.ndarray:
  mask = (np.uint64(1) << half_bits) - np.uint64(1)
  left, right = x >> half_bits, x & mask
  for key in key_columns:
    left, right = right, left ^ (mix(right ^ key) & mask)
  return (left << half_bits) | right


def _decrypt(x: np.ndarray, half_bits: np.ndarray, key_columns: np.ndarray) -> np.ndarray:
  mask = (np.uint64(1) << half_bits) - np.uint64(1)
  left, right = x >> half_bits, x & mask
  for key in key_columns[::-1]:
    left, right = right ^ (mix(left ^ key) & mask), left
  return (left << half_bits) | right


class Permutation:
  """A permutation of [0, n) named by its key parts.

  >>> p = Permutation(10, "preshuffle", "demo", "train", 0)
  >>> [p(x) for x in range(8)]
  [4, 8, 9, 5, 6, 3, 2, 0]
  >>> p.inverse(p(3))
  3

  Args:
    n: size, 1 <= n <= 2**62.
    *key_parts: what `round_keys` takes.
  """

  def __init__(self, n: int, *key_parts: object):
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
    """The image of x: an int for an int, `int64` of the same shape for an integer array."""
    return self._map(x, permute)

  @overload
  def inverse(self, y: int) -> int: ...
  @overload
  def inverse(self, y: np.ndarray) -> np.ndarray: ...
  def inverse(self, y):
    """The x whose image is y."""
    return self._map(y, unpermute)

  def _map(self, x, function):
    values = np.asarray(x)
    # Of objects are ints that no integer type holds; they are out of range.
    if values.dtype.kind not in "iuO":
      raise TypeError(f"Permutation takes integers, not {values.dtype}.")
    if values.size and not (values.min() >= 0 and values.max() < self.n):
      raise IndexError(f"Permutation of [0, {self.n}) takes no {values.min()} to {values.max()}.")
    flat = values.reshape(-1)
    result = np.empty(flat.shape, np.int64)
    for start in range(0, flat.size, _CHUNK_VALUES):
      part = slice(start, start + _CHUNK_VALUES)
      result[part] = function(flat[part], self.n, self._keys)
    return result.reshape(values.shape) if values.ndim else int(result[0])
