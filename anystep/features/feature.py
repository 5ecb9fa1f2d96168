"""A cached feature: its dtype and shape."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from anystep.limits import MAX_FIXED_VALUES, MAX_RANK, is_count

# numpy has no dtype for texts, and bfloat16 is ml_dtypes'.
_DTYPES = frozenset(
  ["bool", "float16", "float32", "float64", "bfloat16", "string"]
  + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
  """Dtype and shape of a cached feature.

  Attributes:
    dtype: numpy's name, `bfloat16`, or `string`.
    shape: the shape of one example. The first size is None for a sequence; the second is None as well for a
      sequence of rows whose lengths differ.
  """

  dtype: str
  shape: tuple[int | None, ...]

  def __post_init__(self):
    if not isinstance(self.dtype, str) or self.dtype not in _DTYPES:
      raise ValueError(f"wrong dtype {self.dtype!r}")
    for axis, size in enumerate(self.shape):
      may_vary = axis == 0 or (axis == 1 and self.shape[0] is None)
      # Values do not tell the number of empty rows.
      if not (size is None and may_vary) and not is_count(size, least=int(self.ragged)):
        raise ValueError(f"wrong shape {self.shape}")
    if len(self.shape) > MAX_RANK or math.prod(filter(None, self.shape)) > MAX_FIXED_VALUES:
      raise ValueError(f"too large a shape {self.shape}")

  @property
  def sequence(self) -> bool:
    """True if the feature's first dimension is its length in tokens."""
    return bool(self.shape)

  @property
  def ragged(self) -> bool:
    """True if an example is a sequence of rows whose lengths differ."""
    return self.shape[1:2] == (None,)

  @property
  def numpy_dtype(self) -> np.dtype:
    """The dtype of the values in numpy; object for texts."""
    if self.dtype == "bfloat16":
      # The package gives numpy this dtype; other features do not need it.
      import ml_dtypes

      return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(object if self.dtype == "string" else self.dtype)
