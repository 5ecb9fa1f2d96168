"""Compile time and steps per second of training steps, beside T5X's of the same model.

  python benchmarks/models.py
  python benchmarks/models.py --t5x ../t5x --t5x_python ../t5x_environment/bin/python
  python benchmarks/models.py --xxl

Prints one line for each model: seconds to trace and to compile a training step, in seconds of the processor's
time (others on the machine change them little), and steps per second by the clock, the median of rounds in
which all models take turns.

`--t5x` names a checkout of T5X, which takes turns with ours; the last line gives our share, at least 1.0 of
its steps and at most 1.1 of its time to trace and compile. T5X needs an environment of its own
(`--t5x_python`) with jax, flax, optax, orbax-checkpoint, seqio, clu, fiddle, cached_property, tensorstore and
gin-config, and a checkout of google/airio on the PYTHONPATH.

`--xxl` traces, lowers and compiles the training step of T5.1.1-xxl, with scanned layers and without, and
allocates none of its 11 billion parameters.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
XXL_SIZES = {
  "vocab_size": 32128,
  "emb_dim": 4096,
  "num_heads": 64,
  "head_dim": 64,
  "mlp_dim": 10240,
  "num_encoder_layers": 24,
  "num_decoder_layers": 24,
  "dtype": "bfloat16",
}
ROWS, LENGTHS = 8, {"encoder_input_tokens": 64, "decoder_input_tokens": 32}
XXL_ROWS, XXL_LENGTHS = 128, {"encoder_input_tokens": 512, "decoder_input_tokens": 114}
OURS, T5X = "T5.1.1", "T5.1.1 in T5X"


class Contender(NamedTuple):
  """A compiled training step.

  Attributes:
    trace_seconds, compile_seconds: the processor's seconds to trace and to compile it.
    run: function from a number of steps to the clock's seconds that they took.
  """

  trace_seconds: float
  compile_seconds: float
  run: Callable[[int], float]

  @property
  def seconds_before_steps(self) -> float:
    """Return the seconds to trace and to compile."""
    return self.trace_seconds + self.compile_seconds


def networks():
  """Return networks by name."""
  return {
    OURS: Transformer(T5Config(**SIZES)),
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


def lower(network, batch):
  """Return a lowered training step, what makes its initial state, and the seconds to trace it."""
  model, root_key = EncoderDecoderModel(network, optimizer_def=adafactor(0.01)), jax.random.key(0)
  mesh = Partitioner().mesh(batch["decoder_target_tokens"].shape[0])
  make_initial, abstract = initialize(
    model, model.optimizer_def, root_key=root_key, mesh=mesh, partitioner=Partitioner()
  )
  begin = time.process_time()
  lowered = make_train_step(model, model.optimizer_def, root_key=root_key).lower(abstract, batch)
  return lowered, make_initial, time.process_time() - begin


def ours(network) -> Contender:
  """Return the training step of a network, compiled."""
  rng = np.random.default_rng(0)
  batch = {name: rng.integers(1, 384, (ROWS, length), np.int32) for name, length in LENGTHS.items()}
  batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
  batch["decoder_loss_weights"] = np.ones_like(batch["decoder_target_tokens"])
  lowered, make_initial, trace_seconds = lower(network, batch)
  begin = time.process_time()
  step = lowered.compile()
  compile_seconds = time.process_time() - begin
  state, _ = step(make_initial(), batch)

  def run(steps: int) -> float:
    nonlocal state
    begin = time.perf_counter()
    for _ in range(steps):
      state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - begin

  return Contender(trace_seconds, compile_seconds, run)


def t5x(checkout: str, python: str) -> Contender:
  """Return T5X's training step of the same model, in a process of its own.

  Raises:
    subprocess.CalledProcessError: T5X does not run; what it printed stands above.
  """
  paths = [checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
  process = subprocess.Popen(
    [python, str(Path(__file__).parent / "side_by_side" / "t5x_steps.py")],
    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )

  def ask(line: str):
    try:
      print(line, file=process.stdin, flush=True)
      return json.loads(process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError) as error:
      raise subprocess.CalledProcessError(process.wait(), process.args) from error

  trace_seconds, compile_seconds = ask(json.dumps({"sizes": SIZES, "rows": ROWS, "lengths": LENGTHS}))
  return Contender(trace_seconds, compile_seconds, lambda steps: ask(str(steps)))


def steps_per_second(contenders: dict[str, Contender], *, steps: int, rounds: int) -> dict[str, float]:
  """Return each contender's median rate over rounds in which they take turns."""
  seconds: dict[str, list[float]] = {name: [] for name in contenders}
  for _ in range(rounds):
    for name, contender in contenders.items():
      seconds[name].append(contender.run(steps))
  return {name: steps / statistics.median(values) for name, values in seconds.items()}


def compare_forms_of_xxl() -> None:
  """Print the seconds to lower and to compile T5.1.1-xxl, with scanned layers and without."""
  batch = {
    name: jax.ShapeDtypeStruct((XXL_ROWS, length), jnp.int32)
    for name, length in {
      **XXL_LENGTHS,
      "decoder_target_tokens": XXL_LENGTHS["decoder_input_tokens"],
      "decoder_loss_weights": XXL_LENGTHS["decoder_input_tokens"],
    }.items()
  }
  print(f"{'xxl, 24 + 24 layers, emb 4096':30} {'lower s':>8} {'compile s':>9}")
  for name, network in {
    "T5.1.1": Transformer(T5Config(**XXL_SIZES)),
    "scalable T5, scanned": ScalableTransformer(ScalableT5Config(**XXL_SIZES)),
    "scalable T5, not scanned": ScalableTransformer(ScalableT5Config(**XXL_SIZES, scan_layers=False)),
  }.items():
    begin = time.process_time()
    step, _, _ = lower(network, batch)
    lowered = time.process_time()
    step.compile()
    print(f"{name:30} {lowered - begin:8.2f} {time.process_time() - lowered:9.2f}", flush=True)


def main() -> None:
  """Measure and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=20, help="Steps in each round.")
  parser.add_argument("--rounds", type=int, default=5, help="Rounds, of which the median counts.")
  parser.add_argument("--t5x", metavar="CHECKOUT", help="T5X's checkout, to run beside ours.")
  parser.add_argument("--t5x_python", default=sys.executable, help="Python of T5X's environment.")
  parser.add_argument("--xxl", action="store_true", help="Lower and compile T5.1.1-xxl instead.")
  arguments = parser.parse_args()
  if arguments.xxl:
    compare_forms_of_xxl()
    return
  rate = matmul_rate()
  print(f"{jax.devices()[0].device_kind}: products at {rate / 1e9:,.0f} GFLOP/s")
  makers = {name: functools.partial(ours, network) for name, network in networks().items()}
  if arguments.t5x:
    makers[T5X] = functools.partial(t5x, arguments.t5x, arguments.t5x_python)
  contenders = {name: make() for name, make in makers.items()}
  rates = steps_per_second(contenders, steps=arguments.steps, rounds=arguments.rounds)
  print(f"{'model, 4 + 4 layers, emb 256':30} {'trace s':>8} {'compile s':>9} {'steps/s':>8}")
  for name, contender in contenders.items():
    trace, compile_, _ = contender
    print(f"{name:30} {trace:8.2f} {compile_:9.2f} {rates[name]:8.1f}")
  if T5X in contenders:
    seconds = contenders[OURS].seconds_before_steps / contenders[T5X].seconds_before_steps
    steps = rates[OURS] / rates[T5X]
    print(f"{OURS} of T5X's: {steps:.2f} of the steps/s, {seconds:.2f} of the time to trace and compile")


if __name__ == "__main__":
  main()
