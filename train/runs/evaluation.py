"""Teacher-forced evaluation: every example of a split once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anystep.features.ragged import Batch, Ragged
from anystep.programs.progress import Progress
from anystep.tasks.seqio_api.evaluation import ModelOutput, compute_metrics
from anystep.train.datasets.run_data import RunData
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.partitioning import batch_sharding, global_batch, local_rows

EVALUATION_OUTPUTS = (ModelOutput.SCORE, ModelOutput.PREDICTION)


def evaluate(
  model: EncoderDecoderModel, params: Any, data: RunData, mesh: jax.sharding.Mesh
) -> dict[str, float]:
  """The task's own metrics, with cross entropy and `token_accuracy` by target token.

  Predictions are teacher-forced: the likeliest token after the true targets before it.

  Args:
    model: gives scores and predictions.
    params: its parameters.
    data: what to evaluate, of one epoch.
    mesh: the devices.
  """
  config = data.dataset.config
  sharding = batch_sharding(mesh)
  rows = local_rows(sharding, config.batch_size)
  score = jax.jit(model.score_batch, out_shardings=NamedSharding(mesh, PartitionSpec()))
  examples, outputs = [], []
  with Progress(f"evaluate {config.split}", total=data.num_examples, unit="examples") as progress:
    for features, batch, real in data.evaluation_batches():
      local = {name: array[rows] for name, array in batch.items()}
      scored = score(params, global_batch(local, sharding, rows, config.batch_size))
      weights = batch["decoder_loss_weights"][real] > 0
      predictions = np.asarray(scored["predictions"])[real]
      correct = weights & (predictions == batch["decoder_target_tokens"][real])
      outputs.append(
        {
          "scores": np.asarray(scored["scores"])[real],
          "predictions": np.where(weights, predictions, 0),
          "tokens": weights.sum(axis=1),
          "correct": correct.sum(axis=1),
        }
      )
      examples.extend(_by_row(features, config.task_feature_lengths))
      progress.update(len(examples))
  joined = {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}
  num_tokens = joined["tokens"].sum()
  metrics = compute_metrics(
    data.dataset.task,
    examples,
    {ModelOutput.SCORE: joined["scores"], ModelOutput.PREDICTION: joined["predictions"]},
  )
  return {
    "examples": len(examples),
    "cross_entropy": float(-joined["scores"].sum() / num_tokens),
    # Tasks have an accuracy of their own, of whole examples.
    "token_accuracy": float(joined["correct"].sum() / num_tokens),
    **metrics,
  }


def _by_row(features: Batch, lengths: Any) -> list[dict[str, np.ndarray]]:
  """One dictionary an example, sequences cut to the lengths that the model saw."""
  columns = {
    name: [row[: lengths.get(name)] for row in feature.rows()] if isinstance(feature, Ragged) else feature
    for name, feature in features.items()
  }
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
