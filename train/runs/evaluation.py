"""Teacher-forced evaluation of every example of a split, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from clu import metric_writers
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from anystep.features.ragged import Batch, Ragged
from anystep.programs.progress import Progress
from anystep.tasks.seqio_api.evaluation import ModelOutput, compute_metrics
from anystep.train.datasets.run_data import RunData, RunDataset, only_task
from anystep.train.models.base import Model
from anystep.train.models.train_state import TrainState
from anystep.train.partitioning.batches import batch_sharding, global_batch, local_rows

# A model that decodes has only its own tokens before each, and most often lower metrics.
TEACHER_FORCED = "teacher_forced/"
EVALUATION_OUTPUTS = (ModelOutput.SCORE, ModelOutput.PREDICTION)


def evaluate(model: Model, state: TrainState, data: RunData, mesh: jax.sharding.Mesh) -> dict[str, float]:
  """Return the task's own metrics, with cross entropy in nats and token accuracy in percent per target token.

  Predictions are teacher-forced: each is the likeliest token, given the true targets before it. Metrics of
  predictions say so in their names, which begin with `teacher_forced/`.

  Args:
    model: computes scores and predictions.
    state: the model's parameters and mutable collections.
    data: one epoch of the examples to evaluate.
    mesh: the devices.
  """
  config = data.dataset.config
  sharding = batch_sharding(mesh)
  rows = local_rows(sharding, config.batch_size)
  score = jax.jit(model.score_batch, out_shardings=NamedSharding(mesh, PartitionSpec()))
  mutables = (state.mutables,) if state.mutables else ()
  examples, outputs = [], []
  with Progress(f"evaluate {config.split}", total=data.num_examples, unit="examples") as progress:
    for features, batch, real in data.evaluation_batches():
      local = {name: array[rows] for name, array in batch.items()}
      scored = score(state.params, global_batch(local, sharding, rows, config.batch_size), *mutables)
      weights = batch["decoder_loss_weights"][real]
      predictions = np.asarray(scored["predictions"])[real]
      # As T5X measures accuracy, a target of any weight counts once.
      are_targets = weights != 0
      correct = are_targets & (predictions == batch["decoder_target_tokens"][real])
      outputs.append(
        {
          "scores": np.asarray(scored["scores"])[real],
          "predictions": _targets_first(predictions, are_targets),
          "weights": weights.sum(axis=1),
          "correct": correct.sum(axis=1),
          "num_targets": are_targets.sum(axis=1),
        }
      )
      examples.extend(_by_row(features, config.task_feature_lengths))
      progress.update(len(examples))
  joined = {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}
  weight_sum = joined["weights"].sum()
  metrics = compute_metrics(
    only_task(data.dataset),
    examples,
    {ModelOutput.SCORE: joined["scores"], ModelOutput.PREDICTION: joined["predictions"]},
    prefixes={ModelOutput.PREDICTION: TEACHER_FORCED},
  )
  return {
    "examples": len(examples),
    "cross_entropy": float(-joined["scores"].sum() / weight_sum),
    # In percent, as the metrics of T5's tasks.
    f"{TEACHER_FORCED}token_accuracy": float(100 * joined["correct"].sum() / joined["num_targets"].sum()),
    **metrics,
  }


def _targets_first(predictions: np.ndarray, are_targets: np.ndarray) -> np.ndarray:
  """Return each row's predictions of targets at its beginning, and 0 after them: `(rows, length)`.

  Where inputs and targets share a row, the targets come after the inputs.
  """
  order = np.argsort(~are_targets, axis=1, kind="stable")
  return np.take_along_axis(np.where(are_targets, predictions, 0), order, axis=1)


def report_evaluation(
  results: Mapping[str, float], dataset: RunDataset, model_dir: str, step: int, *, first_step: int = 0
) -> None:
  """Print results of `evaluate` as a table, and write them for TensorBoard.

  Args:
    results: values by metric.
    dataset: the evaluated task and split.
    model_dir: the run's directory.
    step: the number of trained steps, by the model's count.
    first_step: step that the run began at, with the first step of its data.
  """
  name, split = only_task(dataset).name, dataset.config.split
  print(f"{name}, {split}, teacher-forced, after {step:,} {'model ' if first_step else ''}steps:")
  table = Table()
  table.add_column("metric")
  table.add_column("value", justify="right")
  for metric, value in results.items():
    table.add_row(metric, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
  Console().print(table)
  writer = metric_writers.SummaryWriter(str(epath.Path(model_dir) / f"eval_{split}" / name))
  writer.write_scalars(step, results)
  writer.close()


def _by_row(features: Batch, lengths: Any) -> list[dict[str, np.ndarray]]:
  """Return a dictionary for each example, with sequences cut to the model's lengths."""
  columns = {
    name: [row[: lengths.get(name)] for row in feature.rows()] if isinstance(feature, Ragged) else feature
    for name, feature in features.items()
  }
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
