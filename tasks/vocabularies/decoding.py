"""Features of examples as text."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from anystep.caches.cache import Cache
from anystep.features.ragged import Ragged


def decode_readable(ids: np.ndarray, vocabulary: Any) -> str:
  """Decode token ids; sentinels become <0>, <1>, …, the end </s>, and padding at the end is left out."""
  first_sentinel = vocabulary.vocab_size - 1
  lowest_sentinel = vocabulary.vocab_size - (vocabulary.extra_ids or 0)
  parts: list[str] = []
  run: list[int] = []

  def close_run() -> None:
    if run:
      parts.append(vocabulary.decode(run))
      run.clear()

  tokens = np.asarray(ids)
  used = np.flatnonzero(tokens != vocabulary.pad_id)
  for token in tokens[: used[-1] + 1 if used.size else 0].tolist():
    if token in (vocabulary.pad_id, vocabulary.eos_id) or token >= lowest_sentinel:
      close_run()
      special = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>"}
      parts.append(special.get(token, f"<{first_sentinel - token}>"))
    else:
      run.append(token)
  close_run()
  return "".join(parts)


def describe_feature(values: np.ndarray | Ragged, vocabulary: Any = None) -> dict[str, Any]:
  """Describe a feature of one example as a JSON object: `text` or `values`, and the `length` of a sequence.

  For rows whose lengths differ, the values are those of each row.

  >>> describe_feature(np.array([3, 4], np.int32))
  {'length': 2, 'values': [3, 4]}
  >>> describe_feature(np.array(b"caf\\xc3\\xa9", object))
  {'text': 'café'}
  """
  if isinstance(values, Ragged):
    rows = [describe_feature(row, vocabulary) for row in values.rows()]
    return {"length": len(rows), "values": [row.get("text", row.get("values")) for row in rows]}
  length = {"length": len(values)} if values.ndim else {}
  if vocabulary is not None and values.ndim == 1 and values.dtype.kind in "iu":
    return {**length, "text": decode_readable(values, vocabulary)}
  content = _plain(values.tolist())
  return {**length, "text" if isinstance(content, str) else "values": content}


def vocabularies(tasks: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Return the vocabularies of features with token ids, by registered task and feature."""
  return {
    name: {key: f.vocabulary for key, f in task.output_features.items() if _has_text(f.vocabulary)}
    for name, task in tasks.items()
  }


def rebuild_vocabularies(caches: Mapping[str, Cache]) -> dict[str, dict[str, Any]]:
  """Return the vocabularies that can be made from caches without tasks (`cached_vocabularies`), by task.

  Imports SeqIO and TensorFlow if a cache describes its vocabularies; returns none if SeqIO is missing.
  """
  telling = [c for c in caches.values() if c.manifest.fingerprint.reader.get("output_features")]
  if not telling or importlib.util.find_spec("seqio") is None:
    return {}
  from anystep.tasks.startup import quiet_stderr, start_tensorflow

  start_tensorflow()
  with quiet_stderr():
    from anystep.tasks.vocabularies.copies import cached_vocabularies
  return {name: cached_vocabularies(cache) for name, cache in caches.items()}


def escape_unprintable(text: str) -> str:
  """Escape characters that are not printable, such as line breaks and a terminal's control characters."""
  return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def as_text(feature: Mapping[str, Any]) -> str:
  """Format the result of `describe_feature` on one line."""
  content = escape_unprintable(feature["text"]) if "text" in feature else str(feature["values"])
  return f" ({feature['length']}): {content}" if "length" in feature else f": {content}"


def _has_text(vocabulary: Any) -> bool:
  import seqio

  return not isinstance(vocabulary, seqio.PassThroughVocabulary)


def _plain(value: Any) -> Any:
  """Convert a value to JSON; numbers that JSON cannot hold become text."""
  if isinstance(value, list):
    return [_plain(item) for item in value]
  if isinstance(value, bytes):
    return value.decode(errors="backslashreplace")
  return str(value) if isinstance(value, float) and not math.isfinite(value) else value
