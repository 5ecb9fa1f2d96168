"""Small pictures, encoded, and Parquet files of them."""

import io
import pathlib

import numpy as np
from PIL import Image


def pixels_of(number):
  """Pixels that no other number has, of a size of its own: `(height, width, 3) uint8`, at least 33 × 33."""
  rng = np.random.default_rng(number)
  return rng.integers(256, size=(*rng.integers(33, 60, 2), 3), dtype=np.uint8)


def encoded_picture(number):
  """A PNG of an even number's pixels, a JPEG of an odd one's."""
  out = io.BytesIO()
  Image.fromarray(pixels_of(number)).save(out, "JPEG" if number % 2 else "PNG")
  return out.getvalue()


def write_pictures(folder, num_pictures):
  """Writes three Parquet files with columns `image` and `label`, the number."""
  import pyarrow
  import pyarrow.parquet

  for part in range(3):
    numbers = list(range(part, num_pictures, 3))
    rows = pyarrow.table({"image": [encoded_picture(number) for number in numbers], "label": numbers})
    pyarrow.parquet.write_table(rows, pathlib.Path(folder, f"train-{part}.parquet"))
