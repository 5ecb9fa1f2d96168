"""HighwayHash, the keyed hash of Riegeli files (Alakuijala, Cox and Wassenberg 2016, arXiv:1612.06257)."""

from __future__ import annotations

from typing import Any

import numpy as np

from anystep.compiled import compiled

# The published initial state.
_INIT = np.array(
  [
    [0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3],
    [0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377],
  ],
  np.uint64,
)


def highway_hash(content: np.ndarray, key: np.ndarray) -> int:
  """The hash of some bytes, `(bytes,) uint8`, under a key of four words, `(4,) uint64`.

  >>> hex(highway_hash(np.zeros(0, np.uint8), np.frombuffer(bytes(range(32)), np.uint64)))
  '0x907a56de22c26e53'
  """
  return int(_hash(content, key, _INIT))


@compiled
def _hash(content: np.ndarray, key: np.ndarray, init: np.ndarray) -> Any:
  def zipped_low(low: Any, high: Any) -> Any:
    """The bytes of two words in the order that spreads them best: the first half."""
    return (
      (((low & np.uint64(0xFF000000)) | (high & np.uint64(0xFF00000000))) >> np.uint64(24))
      | (((low & np.uint64(0xFF0000000000)) | (high & np.uint64(0xFF000000000000))) >> np.uint64(16))
      | (low & np.uint64(0xFF0000))
      | ((low & np.uint64(0xFF00)) << np.uint64(32))
      | ((high & np.uint64(0xFF00000000000000)) >> np.uint64(8))
      | (low << np.uint64(56))
    )

  def zipped_high(low: Any, high: Any) -> Any:
    """The second half."""
    return (
      (((high & np.uint64(0xFF000000)) | (low & np.uint64(0xFF00000000))) >> np.uint64(24))
      | (high & np.uint64(0xFF0000))
      | ((high & np.uint64(0xFF0000000000)) >> np.uint64(16))
      | ((high & np.uint64(0xFF00)) << np.uint64(24))
      | ((low & np.uint64(0xFF000000000000)) >> np.uint64(8))
      | ((high & np.uint64(0xFF)) << np.uint64(48))
      | (low & np.uint64(0xFF00000000000000))
    )

  def mixed(v: Any, w: Any, mul_v: Any, mul_w: Any, word: Any) -> Any:
    """One lane's words after a word of the packet."""
    w += mul_v + word
    mul_v ^= (w & np.uint64(0xFFFFFFFF)) * (v >> np.uint64(32))
    v += mul_w
    mul_w ^= (v & np.uint64(0xFFFFFFFF)) * (w >> np.uint64(32))
    return v, w, mul_v, mul_w

  def turned(word: Any, bits: Any) -> Any:
    """A word whose halves are each rotated to the left."""
    low, high = word & np.uint64(0xFFFFFFFF), word >> np.uint64(32)
    low = ((low << bits) | (low >> (np.uint64(32) - bits))) & np.uint64(0xFFFFFFFF)
    high = ((high << bits) | (high >> (np.uint64(32) - bits))) & np.uint64(0xFFFFFFFF)
    return low | (high << np.uint64(32))

  def swapped(word: Any) -> Any:
    return (word >> np.uint64(32)) | (word << np.uint64(32))

  num_packets, rest = len(content) // 32, len(content) % 32
  packets = content[: 32 * num_packets].view(np.uint64)
  padded = np.zeros(32, np.uint8)
  if rest:
    tail = content[32 * num_packets :]
    words_end = rest // 4 * 4
    padded[:words_end] = tail[:words_end]
    if rest & 16:
      padded[28:] = tail[rest - 4 :]
    elif rest % 4:
      padded[16] = tail[words_end]
      padded[17] = tail[words_end + rest % 4 // 2]
      padded[18] = tail[rest - 1]
  last = padded.view(np.uint64)
  # The state is not an array: in variables it stays in the processor's registers.
  m0, m1, m2, m3 = init[0, 0], init[0, 1], init[0, 2], init[0, 3]
  n0, n1, n2, n3 = init[1, 0], init[1, 1], init[1, 2], init[1, 3]
  v0, v1, v2, v3 = m0 ^ key[0], m1 ^ key[1], m2 ^ key[2], m3 ^ key[3]
  w0, w1 = n0 ^ swapped(key[0]), n1 ^ swapped(key[1])
  w2, w3 = n2 ^ swapped(key[2]), n3 ^ swapped(key[3])
  has_rest = 1 if rest else 0
  for number in range(num_packets + has_rest + 4):
    if number < num_packets:
      p0, p1, p2, p3 = (
        packets[4 * number],
        packets[4 * number + 1],
        packets[4 * number + 2],
        packets[4 * number + 3],
      )
    elif number < num_packets + has_rest:
      bits = np.uint64(rest)
      both = (bits << np.uint64(32)) + bits
      v0, v1, v2, v3 = v0 + both, v1 + both, v2 + both, v3 + both
      w0, w1, w2, w3 = turned(w0, bits), turned(w1, bits), turned(w2, bits), turned(w3, bits)
      p0, p1, p2, p3 = last[0], last[1], last[2], last[3]
    else:
      p0, p1, p2, p3 = swapped(v2), swapped(v3), swapped(v0), swapped(v1)
    v0, w0, m0, n0 = mixed(v0, w0, m0, n0, p0)
    v1, w1, m1, n1 = mixed(v1, w1, m1, n1, p1)
    v2, w2, m2, n2 = mixed(v2, w2, m2, n2, p2)
    v3, w3, m3, n3 = mixed(v3, w3, m3, n3, p3)
    v0, v1 = v0 + zipped_low(w0, w1), v1 + zipped_high(w0, w1)
    v2, v3 = v2 + zipped_low(w2, w3), v3 + zipped_high(w2, w3)
    w0, w1 = w0 + zipped_low(v0, v1), w1 + zipped_high(v0, v1)
    w2, w3 = w2 + zipped_low(v2, v3), w3 + zipped_high(v2, v3)
  return v0 + w0 + m0 + n0
