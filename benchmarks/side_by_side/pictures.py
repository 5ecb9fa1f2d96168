"""Pictures that readers decode: a task of JPEG files, and the same records as Grain wants them."""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

TASK = "benchmark_pictures"
SPLIT = "train"
# As usual in training on photographs.
CROP_PIXELS = 224
_SIDE_PIXELS = 256
_FILES = 8


def decode_and_crop(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
  """A random crop, half of them mirrored: `(224, 224, 3) uint8`."""
  from PIL import Image

  picture = Image.open(io.BytesIO(example["image"])).convert("RGB")
  left, top = rng.integers(picture.width - CROP_PIXELS + 1), rng.integers(picture.height - CROP_PIXELS + 1)
  pixels = np.asarray(picture.crop((left, top, left + CROP_PIXELS, top + CROP_PIXELS)))
  return {"image": pixels[:, ::-1] if rng.random() < 0.5 else pixels, "label": example["label"]}


def parse_record(example_class: Any, record: bytes) -> dict[str, Any]:
  """One record's bytes and label."""
  features = example_class.FromString(record).features.feature
  return {
    "image": features["image"].bytes_list.value[0],
    "label": np.int64(features["label"].int64_list.value[0]),
  }


def register(directory: pathlib.Path) -> None:
  """Adds the task to SeqIO's registry."""
  import seqio
  import tensorflow as tf

  from anystep.tasks.sources import ParquetDataSource

  seqio.TaskRegistry.add(
    TASK,
    source=ParquetDataSource({SPLIT: str(directory / "parquet" / "*.parquet")}),
    preprocessors=[seqio.CacheDatasetPlaceholder()],
    output_features={
      "image": seqio.ContinuousFeature(rank=0, dtype=tf.string),
      "label": seqio.Feature(seqio.PassThroughVocabulary(1), rank=0, dtype=tf.int64),
    },
  )


def make(directory: pathlib.Path, num_pictures: int) -> None:
  """Writes the pictures as Parquet, as a cache and as Grain's ArrayRecord files."""
  import pyarrow as pa
  import pyarrow.parquet as pq
  from array_record.python import array_record_module

  from anystep.caches.cache import open_cache
  from anystep.containers import containers

  (directory / "parquet").mkdir(parents=True)
  for part in range(_FILES):
    numbers = range(part, num_pictures, _FILES)
    rows = pa.table({"image": [_picture(number) for number in numbers], "label": list(numbers)})
    pq.write_table(rows, directory / "parquet" / f"{part}.parquet")
  module = directory / "picture_tasks.py"
  module.write_text(
    "import pathlib\nfrom side_by_side import pictures\npictures.register(pathlib.Path(__file__).parent)\n"
  )
  flags = [f"--tasks={TASK}", "--module_import=picture_tasks", "--output_cache_dir=anystep"]
  command = [sys.executable, "-m", "anystep.cache_job", *flags]
  subprocess.run(command, check=True, stdout=sys.stderr, cwd=directory)
  cache = open_cache(directory / "anystep", TASK, SPLIT)
  (directory / "grain").mkdir()
  for entry in cache.manifest.record_files:
    records = array_record_module.ArrayRecordReader(str(cache.directory / entry.name)).read_all()
    path = directory / "grain" / entry.name
    containers.write_array_record(path, records, options="group_size:1,uncompressed")


def _picture(number: int) -> bytes:
  """A JPEG of 256 × 256 pixels, 13 kB or so: blurred noise, which compresses as photographs do."""
  from PIL import Image

  noise = np.random.default_rng(number).integers(256, size=(32, 32, 3), dtype=np.uint8)
  out = io.BytesIO()
  Image.fromarray(noise).resize((_SIDE_PIXELS, _SIDE_PIXELS), Image.Resampling.BICUBIC).save(out, "JPEG")
  return out.getvalue()
