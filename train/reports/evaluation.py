"""Teacher-forced evaluation of every example of a split, once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from anystep.features.ragged import Batch, Ragged
from anystep.programs.progress import Progress
from anystep.tasks.seqio_api.evaluation import ModelOutput, compute_metrics
from anystep.train.datasets.run_data import RunData, only_task
from anystep.train.models.base import Model
from anystep.train.models.train_state import TrainState
from anystep.train.partitioning.batches import batch_sharding, global_batch, local_rows
from anystep.train.reports.metric_writers import MetricWriter

# A model that decodes has only its own tokens before each, and most often lower metrics.
TEACHER_FORCED = "teacher_forced/"
EVALUATION_OUTPUTS = (ModelOutput.SCORE, ModelOutput.PREDICTION)


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Results of a task, or of several together.

  Attributes:
    name, split: of the task or mixture.
    metrics: values by metric.
    sums: of `cross_entropy` in nats, `correct`, `weights` and `num_targets` over all targets, and of
      `examples`, from which the results of several tasks are joined.
  """

  name: str
  split: str
  metrics: Mapping[str, float]
  sums: Mapping[str, float]

  @classmethod
  def join(cls, name: str, results: Sequence[Evaluation]) -> Evaluation:
    """Return the cross entropy and accuracy over all targets of several tasks."""
    sums = {key: sum(result.sums[key] for result in results) for key in results[0].sums}
    return cls(name, results[0].split, _ratios(sums), sums)


class Evaluator:
  """Teacher-forced evaluation of tasks, each with its own metrics; compiled once.

  Cross entropy is in nats and token accuracy in percent per target token. Predictions are teacher-forced:
  each is the likeliest token, given the true targets before it. Metrics of predictions say so in their
  names, which begin with `teacher_forced/`.

  Args:
    model: computes scores and predictions.
    data: of each task one epoch of the examples to evaluate.
    mesh: the devices.
    name: of the mixture, if the tasks are its.
    num_batches: number of batches of each task that are evaluated; None for all.
  """

  def __init__(
    self,
    model: Model,
    data: Sequence[RunData],
    mesh: jax.sharding.Mesh,
    *,
    name: str | None = None,
    num_batches: int | None = None,
  ):
    self._data, self._mesh, self._name, self._num_batches = data, mesh, name, num_batches
    self._score = jax.jit(model.score_batch, out_shardings=NamedSharding(mesh, PartitionSpec()))

  def evaluate(
    self, state: TrainState, *, is_interrupted: Callable[[], bool] = lambda: False
  ) -> list[Evaluation]:
    """Return the results of each task, and of the mixture after them.

    Args:
      state: the model's parameters and mutable collections.
      is_interrupted: asked between batches; where it is true, nothing is returned.
    """
    results = []
    for data in self._data:
      result = self._evaluate_task(state, data, is_interrupted)
      if result is None:
        return []
      results.append(result)
    return results if len(results) == 1 else [*results, Evaluation.join(self._name or "all tasks", results)]

  def _evaluate_task(
    self, state: TrainState, data: RunData, is_interrupted: Callable[[], bool]
  ) -> Evaluation | None:
    config, task = data.dataset.config, only_task(data.dataset)
    sharding = batch_sharding(self._mesh)
    rows = local_rows(sharding, config.batch_size)
    mutables = (state.mutables,) if state.mutables else ()
    examples, outputs = [], []
    description = f"evaluate {task.name} {config.split}"
    total = data.num_examples
    if total is not None and self._num_batches is not None:
      total = min(total, self._num_batches * config.batch_size)
    with Progress(description, total=total, unit="examples") as progress:
      for features, batch, real in itertools.islice(data.evaluation_batches(), self._num_batches):
        if is_interrupted():
          return None
        local = {name: array[rows] for name, array in batch.items()}
        scored = self._score(state.params, global_batch(local, sharding, rows, config.batch_size), *mutables)
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
    sums = {name: float(joined[name].sum()) for name in ("weights", "correct", "num_targets")}
    sums |= {"cross_entropy": float(-joined["scores"].sum()), "examples": len(examples)}
    metrics = compute_metrics(
      task,
      examples,
      {ModelOutput.SCORE: joined["scores"], ModelOutput.PREDICTION: joined["predictions"]},
      prefixes={ModelOutput.PREDICTION: TEACHER_FORCED},
    )
    return Evaluation(task.name, config.split, {**_ratios(sums), **metrics}, sums)


def _ratios(sums: Mapping[str, float]) -> dict[str, float]:
  """Return the metrics that every evaluation has."""
  return {
    "examples": sums["examples"],
    "cross_entropy": sums["cross_entropy"] / sums["weights"],
    # In percent, as the metrics of T5's tasks.
    f"{TEACHER_FORCED}token_accuracy": 100 * sums["correct"] / sums["num_targets"],
  }


def _targets_first(predictions: np.ndarray, are_targets: np.ndarray) -> np.ndarray:
  """Return each row's predictions of targets at its beginning, and 0 after them: `(rows, length)`.

  Where inputs and targets share a row, the targets come after the inputs.
  """
  order = np.argsort(~are_targets, axis=1, kind="stable")
  return np.take_along_axis(np.where(are_targets, predictions, 0), order, axis=1)


def report_evaluation(result: Evaluation, writer: MetricWriter, step: int, *, first_step: int = 0) -> None:
  """Print results as a table, and write them.

  Args:
    result: of a task or mixture.
    writer: writes the metrics.
    step: the number of trained steps, by the model's count.
    first_step: step that the run began at, with the first step of its data.
  """
  steps = f"{step:,} {'model ' if first_step else ''}steps"
  print(f"{result.name}, {result.split}, teacher-forced, after {steps}:")
  table = Table()
  table.add_column("metric")
  table.add_column("value", justify="right")
  for metric, value in result.metrics.items():
    table.add_row(metric, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
  Console().print(table)
  writer.write(step, f"eval_{result.split}/{result.name}", result.metrics)


def _by_row(features: Batch, lengths: Any) -> list[dict[str, np.ndarray]]:
  """Return a dictionary for each example, with sequences cut to the model's lengths."""
  columns = {
    name: [row[: lengths.get(name)] for row in feature.rows()] if isinstance(feature, Ragged) else feature
    for name, feature in features.items()
  }
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
