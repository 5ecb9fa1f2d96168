"""The one reader of JSON from other programs, within limits (docs/order.md, Limits).

Unreadable JSON is a ValueError with the reason; callers raise the error of their kind of file from it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from etils import epath

from anystep.files.input_files import read_file
from anystep.limits import MAX_JSON_BYTES, MAX_JSON_DEPTH

# Exceptions that a reader raises on a document of an unexpected form.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def read_json(path: epath.PathLike) -> Any:
  """Return the value in a JSON file.

  Raises:
    ValueError: as `parse_json`; for a file that is not regular.
    AnystepError, OSError: as `input_files.open_file`.
  """
  return parse_json(read_file(path, limit_bytes=MAX_JSON_BYTES))


def parse_json(text: str | bytes, *, number: Callable[[str], Any] | None = None) -> Any:
  """Return the value of a JSON text.

  Args:
    text: bytes are UTF-8.
    number: converts each number from its text, NaN and infinities included. The default makes int and
      float, and refuses NaN and infinities.

  Raises:
    ValueError: for a text that is no JSON, too large or too deeply nested; for NaN and infinities; for an
      object with the same name twice.

  >>> parse_json('{"a": [1, 2.5]}')
  {'a': [1, 2.5]}
  """
  if len(text) > MAX_JSON_BYTES:
    raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes")
  decoded = text.decode() if isinstance(text, bytes) else text
  try:
    value = json.loads(
      decoded,
      object_pairs_hook=_refuse_equal_names,
      parse_constant=number or _refuse,
      parse_int=number,
      parse_float=number,
    )
  except RecursionError:
    raise _too_deep() from None
  _check_depth(value)
  return value


def _refuse_equal_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Return an object's pairs as a dict; Python's own reader would keep the last of equal names."""
  fields = dict(pairs)
  if len(fields) != len(pairs):
    (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
    raise ValueError(f"{twice!r} stands there twice")
  return fields


def _refuse(constant: str) -> NoReturn:
  raise ValueError(f"{constant} is no number of JSON")


def _check_depth(value: Any) -> None:
  """Refuse deeply nested values, so that later recursion over a value does not exhaust the stack."""
  level = [value]
  for _ in range(MAX_JSON_DEPTH):
    items = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, _NESTED))
    level = [item for several in items for item in several if isinstance(item, _NESTED)]
    if not level:
      return
  raise _too_deep()


_NESTED = (dict, list)


def _too_deep() -> ValueError:
  return ValueError(f"more than {MAX_JSON_DEPTH} values one within the other")


def canonical_json(value: object, *, indent: int | None = None) -> str:
  """Return JSON with sorted keys and plain ASCII, so that equal values give equal bytes."""
  separators = (",", ": ") if indent else (",", ":")
  return json.dumps(value, sort_keys=True, indent=indent, separators=separators, allow_nan=False)
