"""Compiled loops over Riegeli chunks, their hash above all. Needs numba.

The hash is HighwayHash (Alakuijala, Cox and Wassenberg 2016, arXiv:1612.06257). Its state is four words in
each of four lanes, which the processor holds in four registers: numba has no type for them, so its innermost
loop is given in LLVM's own form. That hashes 4 GB/s; the same in plain numba, word by word, 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from anystep.compiled import compiled

# Faults of a chunk that `read_header` finds; 0 for none.
CUT_OFF, HEADER_HASH, DATA_HASH, SIZES = 1, 2, 3, 4
# Kinds of chunks, and compressions.
SIMPLE, UNCOMPRESSED, ZSTANDARD = ord("r"), 0, ord("z")
HEADER_BYTES = 40

_KEY = np.frombuffer(b"Riegeli/records\n" * 2, np.uint64)
# The published initial state.
_INIT = np.array(
  [
    [0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3],
    [0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377],
  ],
  np.uint64,
)
# The order of the bytes of two neighbouring words that spreads the products' good bits.
_ZIP_ORDER = (3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7)
_WORDS, _BYTES = ir.VectorType(ir.IntType(64), 4), ir.VectorType(ir.IntType(8), 32)


def _mix_packets_typed(typing_context: Any, packets: Any, num_packets: Any, state: Any) -> Any:
  """Mix packets, `(4 * num_packets,) uint64`, into the state, `(4, 4) uint64`."""
  signature = types.void(packets, num_packets, state)

  def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    def vectors(argument: int) -> Any:
      array = context.make_array(signature.args[argument])(context, builder, arguments[argument])
      return builder.bitcast(array.data, _WORDS.as_pointer())

    def element(pointer: Any, number: Any) -> Any:
      return builder.gep(pointer, [number])

    def load(pointer: Any) -> Any:
      loaded = builder.load(pointer)
      loaded.align = 8
      return loaded

    def zip_bytes(words: Any) -> Any:
      as_bytes = builder.bitcast(words, _BYTES)
      order = ir.Constant(ir.VectorType(ir.IntType(32), 32), [*_ZIP_ORDER, *(16 + k for k in _ZIP_ORDER)])
      return builder.bitcast(builder.shuffle_vector(as_bytes, as_bytes, order), _WORDS)

    def multiply_halves(a: Any, b: Any) -> Any:
      """Multiply the low half of a by the high half of b, lane by lane."""
      low, half = ir.Constant(_WORDS, [0xFFFFFFFF] * 4), ir.Constant(_WORDS, [32] * 4)
      return builder.mul(builder.and_(a, low), builder.lshr(b, half))

    index = ir.IntType(64)
    source, lanes = vectors(0), vectors(2)
    registers = [element(lanes, ir.Constant(index, number)) for number in range(4)]
    before = builder.block
    initial = [load(register) for register in registers]
    loop, body, end = (builder.append_basic_block(name) for name in ("packets", "packet", "end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(index)
    number.add_incoming(ir.Constant(index, 0), before)
    looped = [builder.phi(_WORDS) for _ in registers]
    for phi, value in zip(looped, initial, strict=True):
      phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", number, arguments[1]), body, end)
    builder.position_at_end(body)
    v, w, mul_v, mul_w = looped
    w = builder.add(w, builder.add(mul_v, load(element(source, number))))
    mul_v = builder.xor(mul_v, multiply_halves(w, v))
    v = builder.add(v, mul_w)
    mul_w = builder.xor(mul_w, multiply_halves(v, w))
    v = builder.add(v, zip_bytes(w))
    w = builder.add(w, zip_bytes(v))
    number.add_incoming(builder.add(number, ir.Constant(index, 1)), body)
    for phi, value in zip(looped, (v, w, mul_v, mul_w), strict=True):
      phi.add_incoming(value, body)
    builder.branch(loop)
    builder.position_at_end(end)
    for register, value in zip(registers, looped, strict=True):
      builder.store(value, register).align = 8
    return context.get_dummy_value()

  return signature, generate


# The decorator takes the first parameter away, which type checkers do not know.
_mix_packets: Any = intrinsic(_mix_packets_typed)


@register_jitable
def _hash(content: np.ndarray, key: np.ndarray) -> Any:
  half, low_half = np.uint64(32), np.uint64(0xFFFFFFFF)
  state = np.empty((4, 4), np.uint64)
  state[0] = _INIT[0] ^ key
  state[1] = _INIT[1] ^ ((key >> half) | (key << half))
  state[2:] = _INIT
  num_packets, tail_bytes = len(content) // 32, len(content) % 32
  _mix_packets(content[: 32 * num_packets].view(np.uint64), np.int64(num_packets), state)
  padded = np.zeros(32, np.uint8)
  packet = padded.view(np.uint64)
  if tail_bytes:
    tail = content[32 * num_packets :]
    words_end = tail_bytes // 4 * 4
    padded[:words_end] = tail[:words_end]
    if tail_bytes & 16:
      padded[28:] = tail[tail_bytes - 4 :]
    elif tail_bytes % 4:
      padded[16] = tail[words_end]
      padded[17] = tail[words_end + tail_bytes % 4 // 2]
      padded[18] = tail[tail_bytes - 1]
    bits = np.uint64(tail_bytes)
    for lane in range(4):
      state[0, lane] += (bits << half) + bits
      low, high = state[1, lane] & low_half, state[1, lane] >> half
      low = ((low << bits) | (low >> (half - bits))) & low_half
      high = ((high << bits) | (high >> (half - bits))) & low_half
      state[1, lane] = low | (high << half)
    _mix_packets(packet, np.int64(1), state)
  for _ in range(4):
    for lane in range(4):
      word = state[0, (lane + 2) % 4]
      packet[lane] = (word >> half) | (word << half)
    _mix_packets(packet, np.int64(1), state)
  return state[0, 0] + state[1, 0] + state[2, 0] + state[3, 0]


@compiled
def highway_hash(content: np.ndarray, key: np.ndarray) -> Any:
  """Return the hash of bytes, `(bytes,) uint8`, under a key of four words, `(4,) uint64`.

  >>> hex(highway_hash(np.zeros(0, np.uint8), np.frombuffer(bytes(range(32)), np.uint64)))
  '0x907a56de22c26e53'
  """
  return _hash(content, key)


@register_jitable
def _read_varint(content: np.ndarray, at: Any, stop: Any) -> Any:
  """Return the number that begins at `at`, and its end; the end is -1 if no number of 63 bits ends there."""
  value = np.int64(0)
  for shift in range(0, 63, 7):
    if at >= stop:
      break
    byte = np.int64(content[at])
    at += 1
    value |= (byte & 127) << shift
    if byte < 128:
      return value, at
  return np.int64(0), np.int64(-1)


@compiled
def read_header(content: np.ndarray) -> Any:
  """Check a chunk, `(bytes,) uint8`, which padding may follow, and find its buffers.

  Returns:
    The fault; the chunk's kind; its number of records and their bytes; its compression; and for the buffers
    of sizes and of values the begin, the end, and the decompressed size. The values after the kind have a
    meaning for simple chunks only.
  """

  nothing = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
  if len(content) < HEADER_BYTES:
    return CUT_OFF, *nothing
  header = content[:HEADER_BYTES].copy().view(np.uint64)
  if _hash(content[8:HEADER_BYTES], _KEY) != header[0]:
    return HEADER_HASH, *nothing
  if header[1] > np.uint64(len(content) - HEADER_BYTES):
    return CUT_OFF, *nothing
  stop = np.int64(HEADER_BYTES) + np.int64(header[1])
  if _hash(content[HEADER_BYTES:stop], _KEY) != header[2]:
    return DATA_HASH, *nothing
  kind, num_records = np.int64(header[3] & np.uint64(255)), np.int64(header[3] >> np.uint64(8))
  decoded_bytes = np.int64(header[4])
  if kind != SIMPLE:
    return 0, kind, num_records, decoded_bytes, 0, 0, 0, 0, 0, 0, 0
  if stop == HEADER_BYTES:
    return SIZES, *nothing
  compression = np.int64(content[HEADER_BYTES])
  sizes_bytes, sizes_begin = _read_varint(content, np.int64(HEADER_BYTES + 1), stop)
  if sizes_begin < 0 or sizes_bytes > stop - sizes_begin:
    return SIZES, *nothing
  values_begin = sizes_stop = sizes_begin + sizes_bytes
  sizes_size, values_size = sizes_bytes, stop - values_begin
  if compression != UNCOMPRESSED:
    sizes_size, sizes_begin = _read_varint(content, sizes_begin, sizes_stop)
    values_size, values_begin = _read_varint(content, values_begin, stop)
  if sizes_begin < 0 or values_begin < 0 or values_size != decoded_bytes:
    return SIZES, *nothing
  return (
    *(0, kind, num_records, decoded_bytes, compression),
    *(sizes_begin, sizes_stop, sizes_size, values_begin, stop, values_size),
  )


@compiled
def read_stops(sizes: np.ndarray, stops: np.ndarray) -> bool:
  """Add up encoded sizes, `(bytes,) uint8`, into `stops`, `(records,) int64`.

  Returns:
    True if there are exactly as many sizes as records.
  """
  at, stop = np.int64(0), np.int64(0)
  for record in range(len(stops)):
    size, at = _read_varint(sizes, at, len(sizes))
    stop += size
    if at < 0 or stop < 0:
      return False
    stops[record] = stop
  return at == len(sizes)


@compiled
def read_footers(values: np.ndarray, stops: np.ndarray, chunks: np.ndarray) -> bool:
  """Read `ArrayRecordFooter` messages, all records but the first, into `chunks`.

  Args:
    values: the records, `(bytes,) uint8`. stops: the end of each, `(records,) int64`.
    chunks: `(records - 1, 2) int64`, zeros; filled with the begin and the number of records of each chunk.

  Returns:
    True if each record is a message of numbers.
  """
  for record in range(1, len(stops)):
    at, stop = stops[record - 1], stops[record]
    while at < stop:
      tag = values[at]
      at += 1
      value, at = _read_varint(values, at, stop)
      if at < 0:
        return False
      if tag == 0x08:
        chunks[record - 1, 0] = value
      elif tag == 0x18:
        chunks[record - 1, 1] = value
      elif tag != 0x10:
        return False
  return True
