"""The trainer's loop beside a bare one, and how long its steps wait for saves.

  python benchmarks/trainer.py loop
  python benchmarks/trainer.py saves --parameters=60

`loop` trains the arithmetic example with a step that waits 50 ms without a core, as for an accelerator,
and the same compiled step alone on one batch, in turns. It prints both medians, the loop's share above the
bare one with the upper end of its interval (95%, Student's t over the pairs), and the share of time that
steps waited for input.

`saves` prints how long the steps are blocked by a save in a thread, beside a save that they wait for; the
median step while one is written, beside the median step; and the process's memory after saves.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

_WAIT_SECONDS = 0.05
_ROUND_STEPS = 60
# Of Student's t with 4 to 15 degrees of freedom, two-sided 95%.
_T = (2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclasses.dataclass(frozen=True)
class WaitingModel:
  """A model whose training step takes at least `_WAIT_SECONDS`, without a core."""

  model: Any

  def __getattr__(self, name: str) -> Any:
    return getattr(self.model, name)

  def loss_fn(self, params: Any, batch: Any, rng: Any = None) -> Any:
    """Return the model's loss; its metrics come after a pause."""
    loss, metrics = self.model.loss_fn(params, batch, rng)
    total = metrics["loss"]
    waited = jax.pure_callback(_wait, jax.ShapeDtypeStruct(total.shape, total.dtype), total)
    return loss, metrics | {"loss": waited}


def _wait(value: np.ndarray) -> np.ndarray:
  time.sleep(_WAIT_SECONDS)
  return np.asarray(value)


class Kept:
  """Metric writer that keeps what it is given."""

  def __init__(self) -> None:
    self.values: dict[str, float] = {}

  def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
    """Keep the metrics of the last period."""
    del step, group
    self.values = dict(values)

  def close(self) -> None:
    """Do nothing."""


def make_trainer(folder: Path) -> Any:
  """Return the trainer of the arithmetic example, whose caches are made first."""
  from anystep.train.datasets.cache_program import cache_first
  from anystep.train.datasets.run_datasets import make_cache_commands
  from anystep.train.main import configure

  trainer = configure(
    [
      "anystep-train",
      "--gin_file=gin_configs/examples/arithmetic_tiny.gin",
      "--cache_if_missing",
      f"--gin.CACHE_DIR='{folder / 'cache'}'",
      f"--gin.MODEL_DIR='{folder / 'model'}'",
      "--gin.EVAL_DATASET=None",
    ]
  )
  cache_first(make_cache_commands(trainer.datasets), limit_bytes=10**9, dry_run=False)
  return dataclasses.replace(trainer, model=WaitingModel(trainer.model))


def bare_step(trainer: Any) -> Iterator[float]:
  """Yield seconds by step of the compiled step alone, each `_ROUND_STEPS` at a time."""
  from anystep.train.models.train_state import make_train_step
  from anystep.train.partitioning.batches import batch_sharding, global_batch

  prepared = trainer.prepare()
  mesh, make_initial, abstract = prepared.place()
  rows = np.arange(trainer.train_dataset.batch_size)
  with prepared.data.open_stream() as stream:
    batch = global_batch(next(stream), batch_sharding(mesh), rows, batch_size=len(rows))
  step = make_train_step(
    trainer.model, trainer.model.optimizer_def, root_key=jax.random.key(0), abstract=abstract
  )
  state, metrics = step(make_initial(), batch)
  while True:
    jax.block_until_ready((state, metrics))
    begin = time.perf_counter()
    for _ in range(_ROUND_STEPS):
      state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    yield (time.perf_counter() - begin) / _ROUND_STEPS


def measure_loop(pairs: int) -> None:
  """Print the loop beside the bare one."""
  with tempfile.TemporaryDirectory() as folder:
    trainer = make_trainer(Path(folder))
    bare = bare_step(trainer)
    next(bare)
    kept = Kept()
    seconds, input_percents = [], []
    for k in range(pairs):
      total = (k + 1) * (_ROUND_STEPS + 1)
      run = dataclasses.replace(
        trainer, total_steps=total, stats_period_steps=_ROUND_STEPS + 1, metric_writers=(lambda _: kept,)
      )
      run.run()
      seconds.append((1 / kept.values["timing/steps_per_second"], next(bare)))
      input_percents.append(kept.values["timing/input_wait_percent"])
  ratios = [ours / alone - 1 for ours, alone in seconds]
  half = _T[len(ratios) - 5] * statistics.stdev(ratios) / len(ratios) ** 0.5
  ours, alone = (statistics.median(column) for column in zip(*seconds, strict=True))
  print(f"step in the loop {1000 * ours:.2f} ms, alone {1000 * alone:.2f} ms")
  mean = statistics.mean(ratios)
  print(f"above: {mean:+.2%}, at the interval's upper end {mean + half:+.2%}")
  print(f"waited for input: {statistics.median(input_percents):.2f}% of the time")


def resident_megabytes() -> float:
  """Return the process's resident memory."""
  pages = int(Path("/proc/self/statm").read_text().split()[1])
  return pages * 4096 / 1e6


def measure_saves(millions: int, saves: int) -> None:
  """Print what a save costs the steps."""
  from anystep.train.checkpoints.checkpoints import CheckpointConfig, save_checkpoint
  from anystep.train.checkpoints.saver import CheckpointSaver
  from anystep.train.datasets.data_state import UncachedState
  from anystep.train.models.train_state import TrainState

  data = UncachedState(
    mixture_or_task_name="none",
    split="train",
    batch_size=1,
    seed=0,
    feature_lengths={"targets": 1},
    packing="none",
  )
  side = 1000

  @jax.jit
  def initial() -> TrainState:
    keys = jax.random.split(jax.random.key(0), millions)
    params = {f"kernel_{k}": jax.random.normal(key, (side, side)) for k, key in enumerate(keys)}
    return TrainState(jax.numpy.int32(0), params, {"moments": jax.tree.map(jax.numpy.square, params)})

  def step(state: TrainState) -> TrainState:
    count = jax.pure_callback(_wait, jax.ShapeDtypeStruct((), jax.numpy.int32), state.step)
    return dataclasses.replace(state, step=count + 1)

  step = jax.jit(step, donate_argnums=0)
  state = step(initial())

  def timed_step() -> float:
    nonlocal state
    begin = time.perf_counter()
    state = jax.block_until_ready(step(state))
    return time.perf_counter() - begin

  with tempfile.TemporaryDirectory() as folder:
    common = {"run": "0" * 32, "trained_with": {}}
    alone = statistics.median(timed_step() for _ in range(20))
    begin = time.perf_counter()
    save_checkpoint(Path(folder) / "waited_for", state, data=data, **common)
    waited_for = time.perf_counter() - begin
    blocked, meanwhile, memory = [], [], []
    with CheckpointSaver(Path(folder) / "saved", CheckpointConfig(period_steps=1, keep=1), **common) as saver:
      for _ in range(saves):
        begin = time.perf_counter()
        saver.save(state, data)
        # The next step has the state's memory when the copy is done.
        timed_step()
        blocked.append(time.perf_counter() - begin - alone)
        while True:
          seconds = timed_step()
          if saver.is_idle:
            break
          meanwhile.append(seconds)
        saver.wait()
        memory.append(resident_megabytes())
  megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6
  share = statistics.median(blocked) / waited_for
  print(f"state of {megabytes:,.0f} MB; a save that is waited for: {waited_for:.2f} s")
  print(f"blocked by a save in a thread: {statistics.median(blocked):.3f} s, {share:.0%}")
  beside = statistics.median(meanwhile)
  print(f"median step meanwhile {1000 * beside:.1f} ms, {beside / alone:.2f} of {1000 * alone:.1f} ms")
  marks = sorted({min(k, saves - 1) for k in (4, saves // 2, saves - 1)})
  print("memory after save " + ", ".join(f"{k + 1}: {memory[k]:,.0f} MB" for k in marks))


def main() -> None:
  """Measure and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("what", choices=["loop", "saves"])
  parser.add_argument("--pairs", type=int, default=8, help="rounds of each, from 5 to 16")
  parser.add_argument("--parameters", type=int, default=60, help="millions of parameters that are saved")
  parser.add_argument("--saves", type=int, default=10, help="saves, one after another")
  arguments = parser.parse_args()
  if arguments.what == "loop":
    measure_loop(arguments.pairs)
  else:
    measure_saves(arguments.parameters, arguments.saves)


if __name__ == "__main__":
  main()
