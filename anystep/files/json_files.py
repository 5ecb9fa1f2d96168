"""JSON that others wrote: the one reader of it, within limits (docs/order.md, Limits).

What cannot be read is a ValueError that says why; who asked makes the file's own error of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from etils import epath

from anystep.files.input_files import read_file
from anystep.limits import MAX_JSON_BYTES, MAX_JSON_DEPTH

# What a document of another form than expected makes its reader raise.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def read_json(path: epath.PathLike) -> Any:
  """The value that a JSON file holds.

  Raises:
    ValueError: as `parse_json`; for what is no regular file.
    AnystepError, OSError: as `input_files.open_file`.
  """
  return parse_json(read_file(path, limit_bytes=MAX_JSON_BYTES))


def parse_json(text: str | bytes, *, number: Callable[[str], Any] | None = None) -> Any:
  """The value of a JSON text, in which no name stands twice in an object.

  Args:
    text: bytes are UTF-8.
    number: what makes a value of each number as it is written, of NaN and infinities too; int and float by
      default, which refuse those.

  Raises:
    ValueError: for what is no JSON, too large or too deep; NaN and infinities; a name that stands twice.

  >>> parse_json('{"a": [1, 2.5]}')
  {'a': [1, 2.5]}
  """
  if len(text) > MAX_JSON_BYTES:
    raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes")
  decoded = text.decode() if isinstance(text, bytes) else text
  try:
    value = json.loads(
      decoded, object_pairs_hook=_once, parse_constant=number or _refuse, parse_int=number, parse_float=number
    )
  except RecursionError:
    raise _too_deep() from None
  _check_depth(value)
  return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """An object whose names differ: Python's own reader would take the last of equal ones."""
  known = dict(pairs)
  if len(known) != len(pairs):
    (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
    raise ValueError(f"{twice!r} stands there twice")
  return known


def _refuse(constant: str) -> NoReturn:
  raise ValueError(f"{constant} is no number of JSON")


def _check_depth(value: Any) -> None:
  """Refuses deep values here, so that whoever walks through one later has room on the stack."""
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
  """JSON with sorted keys and plain ASCII, so that equal values are equal bytes."""
  separators = (",", ": ") if indent else (",", ":")
  return json.dumps(value, sort_keys=True, indent=indent, separators=separators, allow_nan=False)
