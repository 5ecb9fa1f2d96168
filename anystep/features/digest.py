"""The digest of a batch: two runs whose digests are equal saw the same rows (docs/order.md#digests)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from anystep.features.ragged import Ragged


def row_digests(features: Mapping[str, np.ndarray | Ragged]) -> list[bytes]:
  """Return the sha256 of each row: name, dtype, shape and little-endian bytes of its features, by name.

  Args:
    features: ragged features, or arrays of numbers whose first axis counts rows.

  Raises:
    ValueError: for features of other kinds, or with different numbers of rows.
  """
  if len({len(feature) for feature in features.values()}) > 1:
    raise ValueError(f"rows differ: { {name: len(feature) for name, feature in features.items()} }")
  columns = [_iterate_row_bytes(name, features[name]) for name in sorted(features)]
  return [hashlib.sha256(b"".join(row)).digest() for row in zip(*columns, strict=True)]


def _iterate_row_bytes(name: str, feature: np.ndarray | Ragged) -> Iterator[bytes]:
  """Yield the bytes of one feature that go into each row's digest."""
  values = np.ascontiguousarray(feature.values if isinstance(feature, Ragged) else feature)
  if values.dtype.hasobject:
    raise ValueError(f"{name} holds objects: only numbers have bytes to digest")
  values = values.astype(values.dtype.newbyteorder("<"), copy=False)
  rows = Ragged(values, feature.lengths).rows() if isinstance(feature, Ragged) else values
  for row in rows:
    yield f"{name}\x1f{values.dtype.name}\x1f{','.join(map(str, row.shape))}\x1f".encode() + row.tobytes()


def batch_digest(features: Mapping[str, np.ndarray | Ragged]) -> str:
  """Return the sha256 of the rows' digests in order, in hex: hosts can join their row digests to one."""
  return hashlib.sha256(b"".join(row_digests(features))).hexdigest()
