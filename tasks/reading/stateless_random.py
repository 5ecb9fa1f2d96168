"""TensorFlow's stateless random numbers without TensorFlow, for many seed pairs at once."""

from __future__ import annotations

import numpy as np

from anystep.compiled import compiled
from anystep.features.ragged import Ragged

# All words are held in 64 bits, where nothing below overflows, compiled or not.
_WORD, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_SCRAMBLE_0, _SCRAMBLE_1 = np.uint64(0x3EC8F720), np.uint64(0x02461E29)
_ZERO = np.uint64(0)
_MANTISSA, _EXPONENT_OF_1 = np.uint32(0x7FFFFF), np.uint32(0x3F800000)


def uniform_floats(seeds: np.ndarray, counts: np.ndarray) -> Ragged:
  """`tf.random.stateless_uniform([count], seed)` of each seed pair: float32 in [0, 1), multiples of 2^-23.

  Args:
    seeds: `(rows, 2) int64`.
    counts: `(rows,) int64`.

  >>> uniform_floats(np.array([[1, 2], [3, 4]]), np.array([2, 0])).values
  array([0.8440604 , 0.19204533], dtype=float32)
  """
  words = random_words(seeds, counts)
  words &= _MANTISSA
  words |= _EXPONENT_OF_1
  values = words.view(np.float32)
  values -= np.float32(1)
  return Ragged(values, counts)


def uniform_ints(seeds: np.ndarray, limits: np.ndarray) -> np.ndarray:
  """`tf.random.stateless_uniform([], seed, maxval=limit, dtype=tf.int32)` of each seed pair.

  Args:
    seeds: `(rows, 2) int64`.
    limits: `(rows,) int64`, from 1 to 2^31 - 1.

  Returns:
    `(rows,) int64`, each below its limit.
  """
  return random_words(seeds, np.ones(len(seeds), np.int64)).astype(np.int64) % limits


def random_words(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Return the first words of each seed pair, pair after pair: `(sum of counts,) uint32`.

  Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") as TensorFlow runs it on
  a CPU: the generator of tsl/lib/random/philox_random.h, keyed by a function of the seed pair
  (`GenerateKey` in tensorflow/core/kernels/stateless_random_ops.cc).

  Args:
    seeds: `(rows, 2) int64`.
    counts: `(rows,) int64`, each at most 2^34.
  """
  words = np.empty(int(counts.sum()), np.uint32)
  _fill(np.ascontiguousarray(seeds, np.int64).view(np.uint64), counts, words)
  return words


@compiled
def _fill(seeds: np.ndarray, counts: np.ndarray, words: np.ndarray) -> None:
  """Write each row's words, `(rows, 2) uint64` seeds, seed_0 row after the seed_1."""

  def block(a, b, c, d, key_0, key_1):
    """The four words of a counter."""
    for _ in range(10):
      left, right = a * _MULTIPLIER_0, c * _MULTIPLIER_1
      a, b = (right >> _WORD_BITS) ^ b ^ key_0, right & _WORD
      c, d = (left >> _WORD_BITS) ^ d ^ key_1, left & _WORD
      key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD
    return a, b, c, d

  first = 0
  for row in range(len(counts)):
    seed_0, seed_1 = seeds[row, 0], seeds[row, 1]
    key_0, key_1, high_0, high_1 = block(
      seed_0 & _WORD, seed_0 >> _WORD_BITS, seed_1 & _WORD, seed_1 >> _WORD_BITS, _SCRAMBLE_0, _SCRAMBLE_1
    )
    whole = counts[row] >> 2
    for k in range(whole):
      a, b, c, d = block(np.uint64(k), _ZERO, high_0, high_1, key_0, key_1)
      at = first + 4 * k
      words[at], words[at + 1], words[at + 2], words[at + 3] = a, b, c, d
    last = block(np.uint64(whole), _ZERO, high_0, high_1, key_0, key_1)
    for k in range(counts[row] & 3):
      words[first + 4 * whole + k] = last[k]
    first += counts[row]
