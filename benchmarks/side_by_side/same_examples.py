"""Whether caches hold the same examples as the bare preprocessors give, whatever their order and container.

`python -m side_by_side.same_examples DIRECTORY…` prints, as JSON by directory, the number of the task's
examples in each cache and a digest of all of them; under "" those of the preprocessors. Caches are read with
their containers' own readers and protocol buffers.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Values = Sequence[bytes] | np.ndarray
"""Of a feature: strings, or a flat array of int64 or float32."""


def digest(examples: Iterable[Mapping[str, Values]]) -> dict[str, Any]:
  """The number of examples and one digest of them: the same for the same examples in any order."""
  digests = sorted(map(_digest, examples))
  return {"examples": len(digests), "sha256": hashlib.sha256(b"".join(digests)).hexdigest()}


def _digest(example: Mapping[str, Values]) -> bytes:
  """32 bytes; a feature without values is the same in every type, for empty lists are not told apart."""
  hashed = hashlib.sha256()
  for name, values in sorted(example.items()):
    parts = [values.dtype.str.encode(), values.tobytes()] if isinstance(values, np.ndarray) else values
    hashed.update(f"{name} {len(values)} ".encode())
    for part in parts if len(values) else ():
      hashed.update(f"{len(part)} ".encode() + part)
  return hashed.digest()


def of_preprocessors() -> Iterator[dict[str, Values]]:
  """The examples that are to be cached."""
  from side_by_side import bare_preprocessors

  for example in bare_preprocessors.dataset().as_numpy_iterator():
    yield {name: _values(value) for name, value in example.items()}


def _values(value: Any) -> Values:
  values = np.asarray(value).reshape(-1)
  if values.dtype.kind in "OS":
    return [bytes(one) for one in values.tolist()] if not isinstance(value, bytes) else [value]
  return values.astype(np.int64 if values.dtype.kind in "iub" else np.float32)


def of_cache(directory: pathlib.Path) -> Iterator[dict[str, Values]]:
  """The examples in a cache's records."""
  import tensorflow as tf

  for record in _records(directory):
    features = tf.train.Example.FromString(record).features.feature
    yield {name: _listed(feature) for name, feature in features.items()}


def _listed(feature: Any) -> Values:
  if feature.bytes_list.value:
    return list(feature.bytes_list.value)
  if feature.float_list.value:
    return np.array(feature.float_list.value, np.float32)
  return np.array(feature.int64_list.value, np.int64)


def _records(directory: pathlib.Path) -> Iterator[bytes]:
  import tensorflow as tf
  from array_record.python import array_record_module

  for path in sorted(directory.glob("*.tfrecord-?????-of-?????")):
    yield from tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
  for path in sorted(directory.glob("*.array_record-?????-of-?????")):
    yield from array_record_module.ArrayRecordReader(str(path)).read_all()


def main() -> None:
  """Digests what the arguments name, and the preprocessors' examples."""
  digests = {"": digest(of_preprocessors())}
  for directory in sys.argv[1:]:
    digests[directory] = digest(of_cache(pathlib.Path(directory)))
  print(json.dumps(digests))


if __name__ == "__main__":
  main()
