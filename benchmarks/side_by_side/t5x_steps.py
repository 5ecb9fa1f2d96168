"""Training steps of T5X, run for `benchmarks/models.py` in a Python environment of T5X's own.

Reads a JSON object with `sizes`, `rows` and `lengths` from the first line of the standard input, and a number
of steps from each later one. Writes the processor's seconds to trace and to compile a step as one JSON line,
and then the clock's seconds of each number of steps. Nothing of anystep is imported.
"""

import json
import sys
import time
import types


def main() -> None:
  """Measure as the standard input says."""
  answers = sys.stdout
  # What T5X and its libraries print is no answer.
  sys.stdout = sys.stderr
  request = json.loads(sys.stdin.readline())
  _make_amos_importable()

  import jax
  import numpy as np
  from absl import logging
  from t5x import adafactor, models, partitioning, trainer, utils
  from t5x.examples.t5 import network

  # A line for each parameter whose rule Adafactor ignores.
  logging.set_verbosity(logging.ERROR)
  config = network.T5Config(
    **request["sizes"], dtype="float32", mlp_activations=("gelu", "linear"), dropout_rate=0.0
  )
  model = models.EncoderDecoderModel(
    module=network.Transformer(config),
    input_vocabulary=None,
    output_vocabulary=None,
    optimizer_def=adafactor.Adafactor(
      decay_rate=0.8, step_offset=0, logical_factor_rules=adafactor.standard_logical_factor_rules()
    ),
    z_loss=1e-4,
  )
  rng = np.random.default_rng(0)
  batch = {
    name: rng.integers(1, config.vocab_size, (request["rows"], length), np.int32)
    for name, length in request["lengths"].items()
  }
  batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
  batch["decoder_loss_weights"] = np.ones_like(batch["decoder_target_tokens"])

  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  initializer = utils.TrainStateInitializer(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes={name: array.shape for name, array in batch.items()},
    input_types={name: array.dtype for name, array in batch.items()},
    partitioner=partitioner,
  )
  state = initializer.from_scratch(jax.random.PRNGKey(0))
  t5x_trainer = trainer.Trainer(
    model,
    train_state=state,
    partitioner=partitioner,
    eval_names=[],
    summary_dir=None,
    train_state_axes=initializer.train_state_axes,
    rng=jax.random.PRNGKey(1),
    learning_rate_fn=lambda step: 0.01,
    num_microbatches=None,
  )
  begin = time.process_time()
  lowered = t5x_trainer._partitioned_train_step.lower(state, batch)
  traced = time.process_time()
  step = lowered.compile()
  compiled = time.process_time()
  state, _ = step(state, batch)
  print(json.dumps([traced - begin, compiled - traced]), file=answers, flush=True)
  for line in sys.stdin:
    begin = time.perf_counter()
    for _ in range(int(line)):
      state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    print(time.perf_counter() - begin, file=answers, flush=True)


def _make_amos_importable() -> None:
  """Stand in for an optimizer that T5X imports and the package index does not have."""
  try:
    import jestimator  # noqa: F401
  except ImportError:
    package = types.ModuleType("jestimator")
    package.amos = types.ModuleType("jestimator.amos")
    package.amos.ScaleByAmosState, package.amos.amos = type("ScaleByAmosState", (), {}), None
    package.amos_helper = types.ModuleType("jestimator.amos_helper")
    package.amos_helper.state_partition_rule = None
    for module in (package, package.amos, package.amos_helper):
      sys.modules[module.__name__] = module


if __name__ == "__main__":
  main()
