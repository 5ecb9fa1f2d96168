"""The trainer: a configuration, and the loop that it runs."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from clu import metric_writers
from etils import epath
from rich.console import Console
from rich.table import Table

from anystep.errors import AnystepError, ExitCode
from anystep.manifest import is_count
from anystep.packing import PackingPolicy
from anystep.progress import Progress
from anystep.tasks.evaluation import check_metrics
from anystep.train.checkpoints import (
  CheckpointConfig,
  remove_old_checkpoints,
  restore_data,
  restore_state,
  save_checkpoint,
  set_aside_later_checkpoints,
)
from anystep.train.dataset_config import DatasetConfig
from anystep.train.evaluation import EVALUATION_OUTPUTS, evaluate
from anystep.train.models import EncoderDecoderModel
from anystep.train.partitioning import (
  Partitioner,
  batch_sharding,
  global_batch,
  local_values,
)
from anystep.train.run_data import RunData, RunDataset
from anystep.train.run_datasets import find_datasets
from anystep.train.step_log import StepLog
from anystep.train.train_state import initialize, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """Trains a model on a task or mixture; gin files configure it.

  Attributes:
    model: network, loss and optimizer.
    model_dir: where checkpoints, TensorBoard events and the step log go; training resumes from there.
    train_dataset: what it learns from.
    eval_dataset: what it is evaluated on at the end; None for no evaluation.
    total_steps: how many steps in all, those before a restart included.
    checkpoints: when checkpoints are written.
    partitioner: how arrays are split over devices.
    random_seed: keys the initial parameters and dropout.
  """

  model: EncoderDecoderModel
  model_dir: str
  train_dataset: DatasetConfig
  total_steps: int
  checkpoints: CheckpointConfig
  eval_dataset: DatasetConfig | None = None
  partitioner: Partitioner = dataclasses.field(default_factory=Partitioner)
  random_seed: int = 0

  def __post_init__(self):
    if not is_count(self.total_steps, least=1):
      raise ValueError(f"total_steps is a whole number of at least 1, not {self.total_steps!r}")
    if not is_count(self.random_seed):
      raise ValueError(f"random_seed is a whole number, not {self.random_seed!r}")
    if not isinstance(self.model_dir, (str, os.PathLike)):
      raise ValueError(f"model_dir is a path, not {self.model_dir!r}")
    if self.model.optimizer_def is None:
      raise ValueError("the model has no optimizer_def")
    if self.eval_dataset is not None and self.eval_dataset.packing != PackingPolicy.NONE:
      raise ValueError(
        f"evaluation scores an example a row: expected packing none of eval_dataset, not"
        f" {self.eval_dataset.packing}"
      )

  def prepare(self) -> PreparedRun:
    """Finds and checks the data and where training stands, before any device is touched.

    Raises:
      AnystepError: 78, 66, 65 or 76 as `find_datasets`, `RunDataset.run_state` and `restore_data`;
        76 `resume_contract` where the configuration is not the one that training started with.
    """
    dataset, *evaluated = find_datasets(self.datasets, model_dir=self.model_dir)
    for other in evaluated:
      check_metrics(other.task, EVALUATION_OUTPUTS)
    _check_vocabulary(self.model, dataset)
    restored = restore_data(self.model_dir)
    state = dataset.run_state(restored)
    if restored is not None and restored[0] > self.total_steps:
      raise AnystepError(
        ExitCode.CONFIG,
        "total_steps",
        expected=f"at least {restored[0]}, the checkpoint's step",
        got=self.total_steps,
        fix="raise TRAIN_STEPS, or train in another MODEL_DIR",
      )
    if state.num_steps is not None and state.num_steps < self.total_steps:
      raise AnystepError(
        ExitCode.CONFIG,
        "data_ended",
        expected=f"at most {state.num_steps} steps in {self.train_dataset.num_epochs} epochs",
        got=self.total_steps,
        fix="train for fewer steps or for more epochs",
      )
    converter = self.model.FEATURE_CONVERTER
    data = dataset.under(state, converter)
    if data.caveat:
      print(f"WARNING: {data.caveat}", file=sys.stderr, flush=True)
    return PreparedRun(
      trainer=self,
      data=data,
      evaluation=next((other.under(other.run_state(), converter) for other in evaluated), None),
      restore_step=restored[0] if restored else None,
    )

  @property
  def datasets(self) -> list[DatasetConfig]:
    """What it learns from, and an epoch of what it is evaluated on, if anything."""
    evaluated = [dataclasses.replace(self.eval_dataset, num_epochs=1)] if self.eval_dataset else []
    return [self.train_dataset, *evaluated]

  def run(self) -> dict[str, float]:
    """Trains to the end, resuming where a checkpoint is; returns the evaluation's metrics."""
    return self.prepare().run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRun:
  """A run whose data and checkpoints were found and checked.

  Attributes:
    trainer: the configuration.
    data: what is trained on. evaluation: what is evaluated on at the end, if anything.
    restore_step: step of the checkpoint to resume from; None to start.
  """

  trainer: Trainer
  data: RunData
  evaluation: RunData | None
  restore_step: int | None

  def run(self) -> dict[str, float]:
    """Trains to the end; returns the evaluation's metrics."""
    trainer, data = self.trainer, self.data
    if jax.process_count() > 1:
      raise AnystepError(
        ExitCode.CONFIG,
        "process_count",
        expected="one process",
        got=jax.process_count(),
        fix="train on the devices of one process: checkpoints are not yet written by several",
      )
    for batch_size in data.batch_sizes:
      mesh = trainer.partitioner.mesh(batch_size)
    sharding = batch_sharding(mesh)
    root_key = jax.random.key(trainer.random_seed)
    optimizer = trainer.model.optimizer_def
    assert optimizer is not None, "Trainer refuses a model without one"
    make_initial, abstract = initialize(
      trainer.model, optimizer, root_key=root_key, mesh=mesh, partitioner=trainer.partitioner
    )
    if self.restore_step is None:
      start_step, state = 0, make_initial()
      print(f"training from step 0: no checkpoint in {trainer.model_dir}", flush=True)
    else:
      start_step, state = self.restore_step, restore_state(trainer.model_dir, self.restore_step, abstract)
      set_aside_later_checkpoints(trainer.model_dir, start_step)
      print(f"resumed from checkpoint_{start_step} in {trainer.model_dir}", flush=True)
    data.record(trainer.model_dir, start_step)
    train_step = make_train_step(trainer.model, optimizer, root_key=root_key)
    stream = data.open_stream((jax.process_index(), jax.process_count()))
    stream.seek(start_step)
    with stream, _Reporter(trainer, start_step) as reporter:
      for step in range(start_step, trainer.total_steps):
        rows = stream.rows_at(step)
        batch = global_batch(next(stream), sharding, rows, len(rows))
        state, metrics = train_step(state, batch)
        # A step is reported when the next one runs: reading its loss any sooner would leave the device idle.
        reporter.report_before(step, batch, metrics)
        if (step + 1) % trainer.checkpoints.period_steps == 0 or step + 1 == trainer.total_steps:
          # The log must say all that a checkpoint contains before the checkpoint counts.
          reporter.flush()
          save_checkpoint(trainer.model_dir, state, data.state)
          remove_old_checkpoints(trainer.model_dir, trainer.checkpoints.keep)
    if self.evaluation is None:
      return {}
    results = evaluate(trainer.model, state.params, self.evaluation, mesh)
    _show(results, self.evaluation.dataset, trainer)
    return results


class _Reporter:
  """Tells the step log, TensorBoard and the progress bar of each step, one step late."""

  def __init__(self, trainer: Trainer, start_step: int):
    self._log = StepLog(trainer.model_dir, start_step=start_step, process=jax.process_index())
    self._writer = metric_writers.SummaryWriter(str(epath.Path(trainer.model_dir) / "train"))
    self._progress = Progress("train", total=trainer.total_steps, unit="steps", start=start_step)
    self._pending: tuple[int, Mapping[str, jax.Array], Mapping[str, jax.Array]] | None = None
    self._tokens = 0
    self._begin_seconds = time.monotonic()

  def __enter__(self) -> _Reporter:
    return self

  def __exit__(self, *exc_info: object) -> None:
    if exc_info[0] is None:
      self.flush()
    self._progress.close()
    self._log.close()
    self._writer.close()

  def report_before(self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping[str, Any]) -> None:
    """Reports the step before this one, and keeps this one for the next call."""
    self.flush()
    self._pending = (step, batch, metrics)

  def flush(self) -> None:
    """Reports the step that was kept.

    Raises:
      AnystepError: 70 `loss_not_finite`.
    """
    if self._pending is None:
      return
    (step, batch, metrics), self._pending = self._pending, None
    sums = {name: np.asarray(value) for name, value in metrics.items()}
    # A batch without loss weights, as one of tombstones alone, has averages of 0.
    tokens = sums["weight_sum"] or 1
    loss = float(sums["loss"] / tokens)
    self._log.write(step, local_values(batch), loss)
    if not math.isfinite(loss):
      raise AnystepError(
        ExitCode.NUMERICS,
        "loss_not_finite",
        step=step,
        got=loss,
        fix="lower the learning rate, or look at the step's rows with anystep-data what-was-at",
      )
    self._tokens += int(sums["weight_sum"])
    tokens_per_second = self._tokens / (time.monotonic() - self._begin_seconds)
    self._writer.write_scalars(
      step + 1,
      {
        "loss": loss,
        "z_loss": float(sums["z_loss"] / tokens),
        "accuracy": float(sums["correct"] / tokens),
        "gradient_norm": float(sums["gradient_norm"]),
        "tokens_per_second": tokens_per_second,
      },
    )
    self._progress.update(step + 1, loss=f"{loss:.4f}", target_tokens_per_second=f"{tokens_per_second:,.0f}")


def _check_vocabulary(model: EncoderDecoderModel, dataset: RunDataset) -> None:
  """Refuses a model whose vocabulary is not the tasks', or that has fewer ids than it."""
  vocabularies = {"inputs": model.input_vocabulary, "targets": model.output_vocabulary}
  features = [
    (task, name, task.output_features[name].vocabulary)
    for task in dataset.tasks.values()
    for name in vocabularies
    if name in task.output_features
  ]
  for task, name, vocabulary in features:
    if vocabularies[name] is not None and vocabulary != vocabularies[name]:
      raise AnystepError(
        ExitCode.CONFIG,
        "vocabulary",
        task=task.name,
        feature=name,
        expected=vocabulary,
        got=vocabularies[name],
        fix="set VOCABULARY to the task's",
      )
    vocab_size = model.module.config.vocab_size
    if vocabulary.vocab_size > vocab_size:
      raise AnystepError(
        ExitCode.CONFIG,
        "vocab_size",
        task=task.name,
        expected=f"at least {vocabulary.vocab_size}",
        got=vocab_size,
        fix="enlarge the network's vocab_size",
      )


def _show(results: Mapping[str, float], evaluation: RunDataset, trainer: Trainer) -> None:
  """Prints the evaluation as a table and hands it to TensorBoard."""
  name, split = evaluation.task.name, evaluation.config.split
  print(f"{name}, {split}, teacher-forced, after {trainer.total_steps:,} steps:")
  table = Table()
  table.add_column("metric")
  table.add_column("value", justify="right")
  for metric, value in results.items():
    table.add_row(metric, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
  Console().print(table)
  writer = metric_writers.SummaryWriter(str(epath.Path(trainer.model_dir) / f"eval_{split}" / name))
  writer.write_scalars(trainer.total_steps, results)
  writer.close()
