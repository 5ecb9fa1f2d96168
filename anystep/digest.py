"""The digest of a batch: what two runs compare to know that they saw the same rows (design section 6)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np


def row_digests(features: Mapping[str, np.ndarray]) -> list[bytes]:
  """sha256 of each row: name, dtype, shape and little-endian bytes of its features in name order.

  Args:
    features: arrays of numbers whose first axis counts rows.

  Raises:
    ValueError: features of other kinds, or of different numbers of rows.
  """
  columns = []
  if len({len(array) for array in features.values()}) > 1:
    raise ValueError(f"rows differ: { {name: len(array) for name, array in features.items()} }")
  for name in sorted(features):
    array = np.ascontiguousarray(features[name])
    if array.dtype.hasobject:
      raise ValueError(f"{name} holds objects: only numbers have bytes to digest")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    shape = ",".join(map(str, array.shape[1:]))
    columns.append((f"{name}\x1f{array.dtype.name}\x1f{shape}\x1f".encode(), array))
  digests = []
  for row in range(len(columns[0][1]) if columns else 0):
    row_hash = hashlib.sha256()
    for header, array in columns:
      row_hash.update(header)
      row_hash.update(array[row].tobytes())
    digests.append(row_hash.digest())
  return digests


def batch_digest(features: Mapping[str, np.ndarray]) -> str:
  """sha256 over the rows' digests in order, in hex: hosts' row digests join to the whole batch's."""
  return hashlib.sha256(b"".join(row_digests(features))).hexdigest()
