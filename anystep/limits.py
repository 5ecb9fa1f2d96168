"""Limits on numbers in files, flags and calls (docs/order.md, Limits).

They are far above what anybody trains with, and far below what would exhaust memory or time. So a damaged
or hostile number gives one clear error before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

# Sums of two counts stay within int64.
MAX_COUNT = (1 << 62) - 1
MAX_BATCH_ROWS = 1 << 24
MAX_SHARDS = 1 << 24
# Tables of lengths hold uint32, but the tokens of a row are also counted in int32.
MAX_FEATURE_LENGTH = (1 << 31) - 1
# Values of one example's fixed dimensions together: no serialized record holds more.
MAX_FIXED_VALUES = (1 << 31) - 1
MAX_RANK = 32
# A seed becomes text before it is used, so it may be any 64-bit number, signed or not.
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1
# Every float of 64 bits has a smaller exponent. A larger one would make integers of as many digits.
MAX_RATE_EXPONENT = 400
MAX_RATE_CHARACTERS = 1000
# Size of a chunk of an ArrayRecord file, compressed or not: it is decompressed as a whole.
MAX_CHUNK_BYTES = 1 << 31
MAX_CHUNK_RECORDS = 1 << 28
MAX_JSON_BYTES = 1 << 28
MAX_JSON_DEPTH = 200

_SHA256 = re.compile("[0-9a-f]{64}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def is_count(value: object, *, least: int = 0, most: int = MAX_COUNT) -> bool:
  """Return whether a value is an int in [least, most]; a bool is none."""
  return type(value) is int and least <= value <= most


def is_number(value: object, *, least: float = -math.inf, most: float = math.inf) -> bool:
  """Return whether a value is an int or float in [least, most]; a bool is none, and neither is nan."""
  return isinstance(value, (int, float)) and not isinstance(value, bool) and bool(least <= value <= most)


def is_seed(value: object) -> bool:
  """Return whether a value is an int of 64 bits, signed or unsigned; a bool is none."""
  return is_count(value, least=MIN_SEED, most=MAX_SEED)


def is_text(value: object) -> bool:
  """Return whether a value is a text that UTF-8 can hold: JSON may have lone halves of surrogate pairs."""
  return isinstance(value, str) and not _SURROGATE.search(value)


def is_name(value: object) -> bool:
  """Return whether a value is such a text without control characters, such as NUL and line breaks."""
  return is_text(value) and not _CONTROL.search(str(value))


def is_sha256(value: object) -> bool:
  """Return whether a value is a sha256 in lower-case hexadecimal digits."""
  return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def are_feature_lengths(value: object, *, least: int = 0) -> bool:
  """Return whether a value maps feature names to numbers of tokens."""
  return isinstance(value, Mapping) and all(
    is_text(name) and is_count(length, least=least, most=MAX_FEATURE_LENGTH) for name, length in value.items()
  )


def refuse_wrong(**checks: bool) -> None:
  """Raise a ValueError that names the fields whose checks fail."""
  wrong = [name for name, right in checks.items() if not right]
  if wrong:
    raise ValueError(f"wrong {', '.join(wrong)}")
