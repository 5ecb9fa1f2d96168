"""Limits on what files, flags and callers may ask for (docs/order.md, Limits).

They stand far above what anybody trains with and far below what would end a program for lack of memory or
time, so that a damaged or hostile number is one clear error before anything is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Sums of two counts, such as of units and what is added to them, stay within int64.
MAX_COUNT = (1 << 62) - 1
MAX_BATCH_ROWS = 1 << 24
MAX_SHARDS = 1 << 24
# Tables of lengths hold uint32; tokens of a row are also counted in int32.
MAX_FEATURE_LENGTH = (1 << 31) - 1
# Values of one example's fixed dimensions together: no serialized record holds more.
MAX_FIXED_VALUES = (1 << 31) - 1
MAX_RANK = 32
# Seeds become text before they are used, and so may be any 64-bit number, signed or not.
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1
# Every float of 64 bits has a smaller exponent. A larger one makes integers of as many digits.
MAX_RATE_EXPONENT = 400
MAX_RATE_CHARACTERS = 1000
# Of a block in an ArrayRecord file, compressed or not: it is decompressed as a whole.
MAX_CHUNK_BYTES = 1 << 31
MAX_CHUNK_RECORDS = 1 << 28
MAX_JSON_BYTES = 1 << 28
MAX_JSON_DEPTH = 200

_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def is_count(value: object, *, least: int = 0, most: int = MAX_COUNT) -> bool:
  """Whether a value is a whole number, no bool, and in [least, most]."""
  return type(value) is int and least <= value <= most


def is_seed(value: object) -> bool:
  """Whether a value is a whole number of 64 bits, signed or not, and no bool."""
  return is_count(value, least=MIN_SEED, most=MAX_SEED)


def is_text(value: object) -> bool:
  """Whether a value is a text that UTF-8 can hold: without halves of surrogate pairs, as JSON can have."""
  return isinstance(value, str) and not _SURROGATE.search(value)


def is_name(value: object) -> bool:
  """Whether a value is such a text without control characters, such as NUL and line breaks."""
  return is_text(value) and not _CONTROL.search(str(value))


def is_sha256(value: object) -> bool:
  """Whether a value is a sha256 in lower-case hexadecimal digits."""
  return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def are_feature_lengths(value: object, *, least: int = 0) -> bool:
  """Whether a value maps names to tokens of a row."""
  return isinstance(value, Mapping) and all(
    is_text(name) and is_count(length, least=least, most=MAX_FEATURE_LENGTH) for name, length in value.items()
  )


def refuse_wrong(**checks: bool) -> None:
  """Raises a ValueError that names the fields whose checks fail."""
  wrong = [name for name, right in checks.items() if not right]
  if wrong:
    raise ValueError(f"wrong {', '.join(wrong)}")
