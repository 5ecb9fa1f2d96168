"""Compile time and steps per second of a T5.1.1 of each form, beside the machine's rate of matrix products.

  python benchmarks/models.py

Prints one line for each model: seconds to trace and compile a training step, in seconds of the processor's
time (others on the machine change them little), and steps per second by the clock. Compare numbers of one
machine by the rate of products that stands above them.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.train_state import initialize, make_train_step
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.optimizers import adafactor
from anystep.train.partitioning import Partitioner

SIZES = {
  "vocab_size": 384,
  "emb_dim": 256,
  "num_heads": 4,
  "head_dim": 64,
  "mlp_dim": 1024,
  "num_encoder_layers": 4,
  "num_decoder_layers": 4,
}
ROWS, LENGTHS = 8, {"encoder_input_tokens": 64, "decoder_input_tokens": 32}


def networks():
  """Return networks by name."""
  return {
    "T5.1.1": Transformer(T5Config(**SIZES)),
    "T5.1.1, dropout": Transformer(T5Config(**SIZES, dropout_rate=0.1)),
    "T5.1.1, attention by xla": Transformer(T5Config(**SIZES, attention_implementation="xla")),
    "scalable T5, scanned": ScalableTransformer(ScalableT5Config(**SIZES)),
    "scalable T5, not scanned": ScalableTransformer(ScalableT5Config(**SIZES, scan_layers=False)),
  }


def matmul_rate(size: int = 1024, seconds: float = 2.0) -> float:
  """Return floating-point operations per second of float32 matrix products."""
  x = jnp.ones((size, size))
  multiply = jax.jit(lambda x: x @ x / size)
  multiply(x).block_until_ready()
  count, begin = 0, time.perf_counter()
  while time.perf_counter() - begin < seconds:
    multiply(x).block_until_ready()
    count += 1
  return 2 * size**3 * count / (time.perf_counter() - begin)


def measure(network, *, steps: int) -> tuple[float, float, float]:
  """Return the seconds to trace and to compile a step, and steps per second."""
  model = EncoderDecoderModel(network, optimizer_def=adafactor(0.01))
  mesh, root_key = Partitioner().mesh(ROWS), jax.random.key(0)
  make_initial, abstract = initialize(
    model, model.optimizer_def, root_key=root_key, mesh=mesh, partitioner=Partitioner()
  )
  rng = np.random.default_rng(0)
  batch = {name: rng.integers(1, 384, (ROWS, length), np.int32) for name, length in LENGTHS.items()}
  batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
  batch["decoder_loss_weights"] = np.ones_like(batch["decoder_target_tokens"])
  begin = time.process_time()
  lowered = make_train_step(model, model.optimizer_def, root_key=root_key).lower(abstract, batch)
  traced = time.process_time()
  step = lowered.compile()
  compiled = time.process_time()
  state, _ = step(make_initial(), batch)
  begin_clock = time.perf_counter()
  for _ in range(steps):
    state, metrics = step(state, batch)
  jax.block_until_ready(metrics)
  return traced - begin, compiled - traced, steps / (time.perf_counter() - begin_clock)


def main() -> None:
  """Measure and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=40, help="Steps that are timed.")
  steps = parser.parse_args().steps
  print(f"{jax.devices()[0].device_kind}: products at {matmul_rate() / 1e9:,.0f} GFLOP/s")
  print(f"{'model, 4 + 4 layers, emb 256':30} {'trace s':>8} {'compile s':>9} {'steps/s':>8}")
  for name, network in networks().items():
    trace, compile_, rate = measure(network, steps=steps)
    print(f"{name:30} {trace:8.2f} {compile_:9.2f} {rate:8.1f}", flush=True)


if __name__ == "__main__":
  main()
