"""The trainer: its configuration, and the checks before a run."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Sequence

import jax

from anystep.errors import AnystepError, ExitCode
from anystep.limits import MAX_COUNT, is_count, is_name
from anystep.order.packing import PackingPolicy
from anystep.tasks.seqio_api.evaluation import check_metrics
from anystep.train.checkpoints.checkpoints import Checkpoint, CheckpointConfig, find_checkpoint
from anystep.train.checkpoints.restore_config import RestoreConfig
from anystep.train.configuration.built_values import Value, built_values
from anystep.train.configuration.resume_contract import AcceptedChanges, Change, find_value_changes
from anystep.train.conversion.restoring import open_start
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.configured_tasks import check_vocabularies, split_by_task
from anystep.train.datasets.run_data import only_task
from anystep.train.datasets.run_datasets import find_datasets
from anystep.train.models.accumulation import WHOLE_BATCH, Microbatches
from anystep.train.models.base import Model, check_model
from anystep.train.partitioning.partitioner import Partitioner
from anystep.train.reports.evaluation import EVALUATION_OUTPUTS
from anystep.train.reports.metric_writers import JsonLinesWriter, TensorBoardWriter, WriterFactory
from anystep.train.reports.profile import Profile
from anystep.train.runs.prepared_run import PreparedRun
from anystep.train.runs.run_identity import accept_run, new_run, read_run
from anystep.train.runs.run_lock import locked_run

# Options of JAX that decide bits of parameters.
_JAX_OPTIONS = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_enable_x64",
  "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """Training of a model on a task or mixture, configured by gin files.

  Attributes:
    model: network, loss and optimizer.
    model_dir: where checkpoints, TensorBoard events and the step log go; training resumes from there.
    train_dataset: data of training.
    eval_dataset: data of the evaluation at the end; None for no evaluation.
    total_steps: number of steps, including those before a restart, and those of the checkpoint that the run
      starts with.
    checkpoints: period and number of checkpoints.
    partitioner: split of arrays over devices.
    random_seed: seed of the initial parameters and of dropout.
    microbatches: split of a batch whose activations do not fit in memory at once.
    evaluate_average: whether the average that `optimizers.with_average` keeps is evaluated.
    restore: checkpoint that the run starts with; None to start from initial parameters.
    stats_period_steps: metrics are written after each multiple of it.
    eval_period_steps: eval_dataset is evaluated after each multiple of it, and at the end; None for the end
      alone.
    eval_batches: number of batches of each task that are evaluated; None for all.
    metric_writers: classes that write metrics, called with model_dir.
    norms_depth: parts of a parameter's path that name a module, for norms by module; 0 for none.
    profile: steps whose profile is written to `profile/`, which TensorBoard and XProf show; None for none.
  """

  model: Model
  model_dir: str
  train_dataset: DatasetConfig
  total_steps: int
  checkpoints: CheckpointConfig
  eval_dataset: DatasetConfig | None = None
  partitioner: Partitioner = dataclasses.field(default_factory=Partitioner)
  random_seed: int = 0
  microbatches: Microbatches = WHOLE_BATCH
  evaluate_average: bool = False
  restore: RestoreConfig | None = None
  stats_period_steps: int = 1
  eval_period_steps: int | None = None
  eval_batches: int | None = None
  metric_writers: Sequence[WriterFactory] = (TensorBoardWriter, JsonLinesWriter)
  norms_depth: int = 0
  profile: Profile | None = None

  def __post_init__(self):
    if not is_count(self.total_steps, least=1):
      raise ValueError(f"total_steps is a whole number from 1 to {MAX_COUNT}, not {self.total_steps!r}")
    for name in ("stats_period_steps", "eval_period_steps", "eval_batches"):
      value = getattr(self, name)
      if not (is_count(value, least=1) or (value is None and name != "stats_period_steps")):
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if not is_count(self.norms_depth):
      raise ValueError(f"norms_depth is a whole number, not {self.norms_depth!r}")
    if not isinstance(self.metric_writers, Sequence) or not all(map(callable, self.metric_writers)):
      raise ValueError(
        f"metric_writers: expected classes such as @reports.TensorBoardWriter, got {self.metric_writers!r}"
      )
    if not is_count(self.random_seed):
      raise ValueError(f"random_seed is a whole number, not {self.random_seed!r}")
    if not isinstance(self.model_dir, (str, os.PathLike)):
      raise ValueError(f"model_dir is a path, not {self.model_dir!r}")
    if not is_name(os.fspath(self.model_dir)):
      raise ValueError(f"model_dir: expected no control characters, got {self.model_dir!r}")
    check_model(self.model)
    if self.model.optimizer_def is None:
      raise ValueError("the model has no optimizer_def")
    if not isinstance(self.evaluate_average, bool):
      raise ValueError(f"evaluate_average: expected True or False, got {self.evaluate_average!r}")
    self.microbatches.check(self.model, self.train_dataset.batch_size)
    if self.eval_dataset is not None and self.eval_dataset.packing != PackingPolicy.NONE:
      raise ValueError(
        f"evaluation scores an example a row: expected packing none of eval_dataset, not"
        f" {self.eval_dataset.packing}"
      )

  def prepare(self, *, accept_changes: Collection[str] = (), before_step: int | None = None) -> PreparedRun:
    """Find and check the data and the newest checkpoint, before any device is touched.

    Args:
      accept_changes: names of values that may differ from the checkpoint's.
      before_step: only checkpoints before this step are considered.

    Raises:
      AnystepError: 78, 66, 65 or 76 as `find_datasets`, `RunDataset.run_order`, `find_checkpoint` and, where
        there is no checkpoint yet, `open_start`;
        76 `resume_contract` if the data, or a value that decides parameters, differs from the checkpoint's;
        76 `checkpoint_run` if the newest checkpoint is another run's; 64 `accept_change`.
    """
    dataset, *evaluated = find_datasets(self.datasets, model_dir=self.model_dir)
    for other in evaluated:
      check_metrics(only_task(other), EVALUATION_OUTPUTS)
    check_vocabularies(dataset.tasks, self.model.vocabularies, self.model.vocab_size)
    checkpoint = find_checkpoint(self.model_dir, before_step=before_step)
    accepted = AcceptedChanges.read(self.model_dir, accept_changes)
    run = read_run(self.model_dir)
    run_name = run or new_run()
    newly_accepted = accept_run(checkpoint, run, run_name, accepted)
    # A run that has no checkpoint yet starts with another's, and then resumes its own.
    start = None
    if checkpoint is None and self.restore is not None:
      start = open_start(self.restore, self.deciding_values)
    if checkpoint is not None:
      start_step, first_step = checkpoint.step, checkpoint.first_step
      order = dataset.run_order((start_step - first_step, checkpoint.data))
    else:
      start_step = first_step = start.step if start else 0
      order = dataset.run_order()
    newly_accepted += self._accept_values(checkpoint, accepted)
    self._check_steps(start_step, first_step, order.state.num_steps)
    converter = self.model.feature_converter
    data = order.open(converter)
    if data.caveat:
      print(f"WARNING: {data.caveat}", file=sys.stderr, flush=True)
    return PreparedRun(
      trainer=self,
      data=data,
      evaluation=[other.run_order().open(converter) for other in evaluated],
      restore_step=checkpoint.step if checkpoint else None,
      start=start,
      first_step=first_step,
      run_name=run_name,
      accept_changes=accept_changes,
      newly_accepted=newly_accepted,
    )

  def _check_steps(self, start_step: int, first_step: int, num_data_steps: int | None) -> None:
    """Refuse a number of steps that is behind the start, or beyond the data's end."""
    if start_step > self.total_steps:
      raise AnystepError(
        ExitCode.CONFIG,
        "total_steps",
        expected=f"at least {start_step}, the checkpoint's step",
        got=self.total_steps,
        fix="raise TRAIN_STEPS, or train in another MODEL_DIR",
      )
    if num_data_steps is not None and first_step + num_data_steps < self.total_steps:
      after = f" after step {first_step}" if first_step else ""
      raise AnystepError(
        ExitCode.CONFIG,
        "data_ended",
        expected=f"at most {num_data_steps} steps{after} in {self.train_dataset.num_epochs} epochs",
        got=self.total_steps,
        fix="train for fewer steps or for more epochs",
      )

  @property
  def datasets(self) -> list[DatasetConfig]:
    """Return the data of training and, if there is an evaluation, one epoch of each of its tasks."""
    if self.eval_dataset is None:
      return [self.train_dataset]
    return [self.train_dataset, *split_by_task(dataclasses.replace(self.eval_dataset, num_epochs=1))]

  @property
  def deciding_values(self) -> dict[str, Value]:
    """Return the values, by name, that decide parameters and losses; the data is compared elsewhere.

    The split of arrays over devices is not among them: it only decides how sums are rounded.
    """
    options = {name.removeprefix("jax_"): getattr(jax.config, name) for name in _JAX_OPTIONS}
    values = {"model": self.model, "random_seed": self.random_seed, "jax": options}
    if self.microbatches.decides_numbers:
      values["microbatches"] = self.microbatches
    if self.restore is not None and self.restore.dtype is not None:
      values["parameter_dtype"] = self.restore.dtype
    return built_values(
      values,
      leave_out=("model.input_vocabulary", "model.output_vocabulary", "model.vocabulary"),
    )

  def run(self) -> dict[str, float]:
    """Train to the end, from the newest checkpoint if there is one; return the evaluation's metrics.

    Raises:
      AnystepError: 73 `run_active` if another process trains in model_dir.
    """
    with locked_run(self.model_dir):
      return self.prepare().run()

  def _accept_values(self, checkpoint: Checkpoint | None, accepted: AcceptedChanges) -> list[Change]:
    """Refuse values that the checkpoint was not trained with; return those accepted for the first time."""
    now = self.deciding_values
    was = checkpoint.trained_with if checkpoint else None
    accepted.check_names({*now, *(was or {})})
    if checkpoint is None or was is None:
      return []
    return accepted.require(
      find_value_changes(checkpoint.step, was, now),
      kind="resume_contract",
      expected=f"what checkpoint_{checkpoint.step} was trained with",
      fix="set them as they were, or train in another MODEL_DIR",
    )
