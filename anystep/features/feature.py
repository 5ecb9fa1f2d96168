"""A cached feature: its dtype and shape."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from anystep.limits import MAX_FIXED_VALUES, MAX_RANK, is_count

# Texts have no dtype of numpy's, and bfloat16 is ml_dtypes'.
_DTYPES = frozenset(
  ["bool", "float16", "float32", "float64", "bfloat16", "string"]
  + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
  """A cached feature.

  Attributes:
    dtype: numpy's name, `bfloat16`, or `string`.
    shape: that of one example, with None in the first place for a sequence, and in the second as well for a
      sequence of rows whose lengths differ.
  """

  dtype: str
  shape: tuple[int | None, ...]

  def __post_init__(self):
    if not isinstance(self.dtype, str) or self.dtype not in _DTYPES:
      raise ValueError(f"wrong dtype {self.dtype!r}")
    for place, size in enumerate(self.shape):
      may_vary = place == 0 or (place == 1 and self.shape[0] is None)
      # Of rows of nothing, the values do not tell how many there are.
      if not (size is None and may_vary) and not is_count(size, least=int(self.ragged)):
        raise ValueError(f"wrong shape {self.shape}")
    if len(self.shape) > MAX_RANK or math.prod(filter(None, self.shape)) > MAX_FIXED_VALUES:
      raise ValueError(f"too large a shape {self.shape}")

  @property
  def sequence(self) -> bool:
    """Whether the feature's first dimension is its length in tokens."""
    return bool(self.shape)

  @property
  def ragged(self) -> bool:
    """Whether an example is a sequence of rows whose lengths differ."""
    return self.shape[1:2] == (None,)

  @property
  def numpy_dtype(self) -> np.dtype:
    """What numpy reads the values as: texts as objects."""
    if self.dtype == "bfloat16":
      # numpy knows it once this is imported, which only who has such features needs.
      import ml_dtypes

      return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(object if self.dtype == "string" else self.dtype)
