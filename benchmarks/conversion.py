"""Peak memory and speed of converting synthetic checkpoints of T5's sizes, whose layers are stacked.

  python benchmarks/conversion.py --sizes=base,large,xl --folder=/tmp/conversion

Prints number of parameters and size of the largest leaf; then, for each conversion, the peak of the process's
memory above that after its imports, and megabytes per second. Parameters are random bfloat16; the xl has 3
billion and needs 18 GB in the folder, which is removed.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

_SIZES = {
  "base": {
    "emb_dim": 768,
    "num_heads": 12,
    "mlp_dim": 2048,
    "num_encoder_layers": 12,
    "num_decoder_layers": 12,
  },
  "large": {
    "emb_dim": 1024,
    "num_heads": 16,
    "mlp_dim": 2816,
    "num_encoder_layers": 24,
    "num_decoder_layers": 24,
  },
  "xl": {
    "emb_dim": 2048,
    "num_heads": 32,
    "mlp_dim": 5120,
    "num_encoder_layers": 24,
    "num_decoder_layers": 24,
  },
}
_MEGABYTE = 10**6


def write_source(size: str, path: str) -> None:
  """Write a checkpoint of T5X's with random parameters."""
  import jax
  import ml_dtypes
  import numpy as np
  from flax.traverse_util import flatten_dict

  from anystep.train.conversion import formats
  from anystep.train.leaves.leaf import Leaf
  from anystep.train.models.encoder_decoder import EncoderDecoderModel
  from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer

  config = ScalableT5Config(vocab_size=32128, head_dim=64, **_SIZES[size])
  model = EncoderDecoderModel(ScalableTransformer(config))
  shapes = flatten_dict(jax.eval_shape(model.initial_variables, jax.random.key(0))["params"], sep="/")
  rng = np.random.default_rng(0)

  def read(index):
    part = [axis.stop - axis.start for axis in index]
    return rng.integers(0, 1 << 14, part, np.uint16).view(ml_dtypes.bfloat16)

  leaves = {
    f"target/{name}": Leaf(
      shape=leaf.shape, dtype=np.dtype(ml_dtypes.bfloat16), chunk=(1,) * len(leaf.shape), read=read
    )
    for name, leaf in shapes.items()
  }
  formats.plan_writing("t5x", leaves, source="random")(path, lambda _: None)
  num_parameters = sum(math.prod(leaf.shape) for leaf in leaves.values())
  largest = max(leaf.num_bytes for leaf in leaves.values())
  print(
    f"{size}: {num_parameters / 1e9:.2f}e9 parameters, largest leaf {largest / _MEGABYTE:,.0f} MB", flush=True
  )


def convert_measured(source: str, target: str, format_name: str) -> None:
  """Convert, and print the peak of this process's memory above that of the imports."""
  from anystep.train import convert
  from anystep.train.conversion import formats

  leaves = formats.open_checkpoint(formats.find_checkpoints(source)[-1]).leaves
  num_bytes = sum(leaf.num_bytes for leaf in leaves.values())
  before, begin = _peak_bytes(), time.perf_counter()
  convert.main([f"--from={source}", f"--to={target}", f"--format={format_name}"])
  seconds = time.perf_counter() - begin
  print(
    f"  to {format_name}: {(_peak_bytes() - before) / _MEGABYTE:,.0f} MB above"
    f" {before / _MEGABYTE:,.0f} MB, {num_bytes / _MEGABYTE / seconds:,.0f} MB/s",
    flush=True,
  )


def _peak_bytes() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
  """Measure each size, each conversion in a process of its own."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--sizes", default="base,large,xl", help="of base, large, xl")
  parser.add_argument("--folder", help="where checkpoints are written; default a temporary one")
  parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.step:
    name, *rest = arguments.step
    {"source": write_source, "convert": convert_measured}[name](*rest)
    return
  for size in arguments.sizes.split(","):
    folder = tempfile.mkdtemp(dir=arguments.folder)
    try:
      places = [os.path.join(folder, name) for name in ("checkpoint_0", "ours", "hugging_face")]
      _run("source", size, places[0])
      _run("convert", places[0], places[1], "anystep")
      shutil.rmtree(places[0])
      _run("convert", places[1], places[2], "huggingface")
    finally:
      shutil.rmtree(folder)


def _run(*step: str) -> None:
  subprocess.run([sys.executable, __file__, "--step", *step], check=True)


if __name__ == "__main__":
  main()
