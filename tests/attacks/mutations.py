"""JSON documents with a value, a key or some text changed, as nobody writes them who means well."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

from attacks.attack import Chance

DEEP = 100_000
# In place of a value; those that are no JSON are written as text.
_VALUES: list[Any] = [
  None,
  True,
  False,
  0,
  1,
  -1,
  2,
  7,
  1.5,
  -0.0,
  1e308,
  2**31,
  2**32,
  2**53 + 1,
  2**62,
  2**63 - 1,
  2**63,
  2**64,
  10**12,
  10**18,
  10**30,
  -(2**63),
  float("nan"),
  float("inf"),
  "",
  "x",
  "0",
  "1e5000",
  "1e99999999",
  "a\0b",
  "../x",
  "/etc/passwd",
  "Zürich",
  "\ud800",
  "x" * 100_000,
  [],
  {},
  [None],
  [[]],
  {"": None},
  [0] * 1000,
]
_TEXTS = {
  "deep list": "[" * DEEP + "]" * DEEP,
  "deep object": '{"a":' * DEEP + "0" + "}" * DEEP,
  "unclosed list": "[" * DEEP,
  "many digits": "9" * 5000,
  "large exponent": "1e999999999",
  "negative zero": "-0",
}


def mutated(document: Any, chance: Chance) -> bytes:
  """The document as a file's content, changed in one place or two."""
  document = json.loads(json.dumps(document))
  marks: dict[str, str] = {}
  for _ in range(chance.choice([1, 1, 1, 2])):
    document = _change(document, chance, marks)
  text = json.dumps(document, indent=1, sort_keys=chance.random() < 0.9)
  for mark, replacement in marks.items():
    text = text.replace(json.dumps(mark), replacement)
  content = text.encode("utf-8", "surrogatepass")
  return _change_text(content, chance) if chance.random() < 0.1 else content


def _change(document: Any, chance: Chance, marks: dict[str, str]) -> Any:
  """Changes a value anywhere in it."""
  places = [*_places(document)]
  if not places:
    return _value(document, [], chance, marks)
  parent, key = chance.choice(places)
  kind = chance.choice(["value", "value", "value", "remove", "add", "rename", "near", "sibling"])
  shown = repr(key)
  if kind == "remove":
    del parent[key]
  elif kind == "add" and isinstance(parent, dict):
    parent[chance.choice(["x", "", "a\0b", "version", "task", "\ud800"])] = _any_value(chance)
  elif kind == "add":
    parent.insert(key, copy.deepcopy(parent[key]))
  elif kind == "rename" and isinstance(parent, dict):
    parent[chance.choice([key.upper(), f"{key} ", "../x", "a\0b"])] = parent.pop(key)
  elif kind == "near" and type(parent[key]) in (int, float):
    parent[key] += chance.choice([-1, 1, 2])
  elif kind == "sibling":
    other, name = chance.choice(places)
    parent[key] = json.loads(json.dumps(other[name]))
  else:
    kind = "value"
    parent[key] = _value(parent[key], parent, chance, marks)
    shown += f" = {parent[key]!r}"[:80]
  chance.note(f"{kind} of {shown}")
  return document


def _value(value: Any, parent: Any, chance: Chance, marks: dict[str, str]) -> Any:
  if chance.random() < 0.1:
    name = chance.choice(list(_TEXTS))
    marks[f"mark {name}"] = _TEXTS[name]
    return f"mark {name}"
  return _any_value(chance)


def _any_value(chance: Chance) -> Any:
  """One of the values, which nobody else has: a second change may be within it."""
  return copy.deepcopy(chance.choice(_VALUES))


def _places(document: Any) -> list[tuple[Any, Any]]:
  """Every parent with the key or index of a value in it."""
  found, pending = [], [document]
  while pending:
    parent = pending.pop()
    keys: list[Any] = list(parent) if isinstance(parent, dict) else []
    if isinstance(parent, list):
      keys = [*range(len(parent))]
    found += [(parent, key) for key in keys]
    pending += [parent[key] for key in keys]
  return found


def _change_text(content: bytes, chance: Chance) -> bytes:
  """Changes the bytes, whatever they say."""
  place = chance.randrange(len(content) + 1)
  kinds = {
    "byte order mark": b"\xef\xbb\xbf" + content,
    "utf-16": content.decode("utf-8", "replace").encode("utf-16"),
    "cut": content[:place],
    "no utf-8": content[:place] + b"\xff\xfe" + content[place:],
    "nul": content[:place] + b"\0" + content[place:],
    "twice": content + content,
    "empty": b"",
    "number": struct.pack("<d", 1.0),
    "deep": b"[" * DEEP,
    "null": b"null",
    "list": b"[]",
    "spaces": content + b" " * 100_000,
    "a key twice": content.replace(b"{", b'{"version": 1, ', 1),
  }
  kind = chance.choice(list(kinds))
  chance.note(kind)
  return kinds[kind]
