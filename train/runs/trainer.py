"""The trainer: its configuration and its loop."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Sequence

import jax

from anystep.errors import AnystepError, ExitCode
from anystep.limits import MAX_COUNT, is_count, is_name
from anystep.order.packing import PackingPolicy
from anystep.tasks.seqio_api.evaluation import check_metrics
from anystep.train.checkpoints.checkpoints import (
  Checkpoint,
  CheckpointConfig,
  find_checkpoint,
  report_unreadable,
  restore_state,
  set_aside_later_checkpoints,
)
from anystep.train.checkpoints.restore_config import RestoreConfig
from anystep.train.checkpoints.saver import CheckpointSaver
from anystep.train.configuration.built_values import Value, built_values
from anystep.train.configuration.resume_contract import (
  AcceptedChanges,
  Change,
  find_value_changes,
  record_accepted,
)
from anystep.train.conversion.restoring import Start, open_start, restore_start, with_dtype
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.configured_tasks import check_vocabularies
from anystep.train.datasets.run_data import RunData, only_task
from anystep.train.datasets.run_datasets import find_datasets
from anystep.train.models.accumulation import WHOLE_BATCH, Microbatches
from anystep.train.models.base import Model
from anystep.train.models.train_state import make_train_step
from anystep.train.optimizers.parameter_average import averaged_parameters, find_average
from anystep.train.partitioning.batches import batch_sharding, global_batch
from anystep.train.partitioning.mesh import process_share
from anystep.train.partitioning.partitioner import Partitioner
from anystep.train.runs.evaluation import EVALUATION_OUTPUTS, evaluate, report_evaluation
from anystep.train.runs.placement import Placement, place_state
from anystep.train.runs.run_identity import accept_run, new_run, read_run, write_run
from anystep.train.runs.run_lock import locked_run
from anystep.train.runs.step_reporter import StepReporter
from anystep.train.runs.termination import Termination, preempted

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

  def __post_init__(self):
    if not is_count(self.total_steps, least=1):
      raise ValueError(f"total_steps is a whole number from 1 to {MAX_COUNT}, not {self.total_steps!r}")
    if not is_count(self.random_seed):
      raise ValueError(f"random_seed is a whole number, not {self.random_seed!r}")
    if not isinstance(self.model_dir, (str, os.PathLike)):
      raise ValueError(f"model_dir is a path, not {self.model_dir!r}")
    if not is_name(os.fspath(self.model_dir)):
      raise ValueError(f"model_dir: expected no control characters, got {self.model_dir!r}")
    if getattr(self.model, "optimizer_def", None) is None:
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
    start = open_start(self.restore) if checkpoint is None and self.restore is not None else None
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
      evaluation=next((other.run_order().open(converter) for other in evaluated), None),
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
    """Return the data of training and, if there is an evaluation, one epoch of its data."""
    evaluated = [dataclasses.replace(self.eval_dataset, num_epochs=1)] if self.eval_dataset else []
    return [self.train_dataset, *evaluated]

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRun:
  """Run with its data and checkpoints found and checked.

  Attributes:
    trainer: the configuration.
    data: data of training. evaluation: data of the evaluation at the end, or None.
    restore_step: step of the run's checkpoint to resume from; None to start.
    start: another checkpoint to start with; None to start from initial parameters, or to resume.
    first_step: step that the run begins at, with the first step of its data.
    run_name: name of the run in model_dir.
    accept_changes: see `Trainer.prepare`.
    newly_accepted: changes that are accepted for the first time.
  """

  trainer: Trainer
  data: RunData
  evaluation: RunData | None
  restore_step: int | None
  run_name: str
  start: Start | None = None
  first_step: int = 0
  accept_changes: Collection[str] = ()
  newly_accepted: Sequence[Change] = ()

  def run(
    self, termination: Termination | None = None, *, started: Callable[[], None] = lambda: None
  ) -> dict[str, float]:
    """Train to the end; return the evaluation's metrics.

    Args:
      termination: read after each step; None if nothing handles signals.
      started: called before the first step, when the state is initialized or restored.

    Raises:
      AnystepError: 75 `preempted` after SIGTERM and a committed checkpoint.
    """
    trainer, data = self.trainer, self.data
    termination = termination or Termination()
    if jax.process_count() > 1:
      raise AnystepError(
        ExitCode.CONFIG,
        "process_count",
        expected="one process",
        got=jax.process_count(),
        fix="train on the devices of one process: checkpoints are not yet written by several",
      )
    optimizer = trainer.model.optimizer_def
    assert optimizer is not None, "Trainer refuses a model without one"
    root_key = jax.random.key(trainer.random_seed)
    mesh, make_initial, abstract = self.place()
    sharding = batch_sharding(mesh)
    if trainer.evaluate_average:
      find_average(abstract.opt_state, abstract.params)
    if trainer.restore is not None:
      abstract = with_dtype(abstract, trainer.restore.dtype)
    if self.restore_step is None:
      start_step = self.first_step
      state = restore_start(self.start, abstract, make_initial) if self.start else make_initial()
      print(f"training from {self.describe_start()}: no checkpoint in {trainer.model_dir}", flush=True)
    else:
      try:
        start_step, state = self.restore_step, restore_state(trainer.model_dir, self.restore_step, abstract)
      except AnystepError as error:
        if error.code != ExitCode.DATA:
          raise
        report_unreadable(self.restore_step, error)
        # An earlier checkpoint has another data state too.
        return self._before(self.restore_step).run(termination, started=started)
      set_aside_later_checkpoints(trainer.model_dir, start_step)
      print(f"resumed from {self.describe_start()} in {trainer.model_dir}", flush=True)
    self._record(start_step)
    started()
    saver = CheckpointSaver(
      trainer.model_dir,
      trainer.checkpoints,
      run=self.run_name,
      trained_with=trainer.deciding_values,
      first_step=self.first_step,
    )
    train_step = make_train_step(
      trainer.model,
      optimizer,
      root_key=root_key,
      microbatches=trainer.microbatches,
      abstract=abstract,
      partitioner=trainer.partitioner,
    )
    share = process_share(mesh)
    stream = data.open_stream(share)
    stream.seek(start_step - self.first_step)
    reporter = StepReporter(
      trainer.model_dir,
      start_step=start_step,
      total_steps=trainer.total_steps,
      first_step=self.first_step,
    )
    with stream, reporter, saver:
      if self.restore_step is None and trainer.checkpoints.saves_at(start_step):
        saver.save(state, data.state)
      for step in range(start_step, trainer.total_steps):
        rows = stream.rows_at(step - self.first_step)
        batch = global_batch(next(stream), sharding, rows, batch_size=len(rows) * share[1])
        state, metrics = train_step(state, batch)
        # After the first step there is something to save.
        termination.defer()
        # A step is reported while the next one runs: waiting for its loss would leave the device idle.
        reporter.report_before(step, batch, metrics)
        saver.raise_failure()
        done = step + 1
        if trainer.checkpoints.saves_at(done) or done == trainer.total_steps or termination.requested:
          # The log must contain all steps of a checkpoint before the checkpoint counts.
          reporter.flush()
          saver.save(state, data.state)
        if termination.requested:
          saver.wait()
          raise preempted(path=trainer.model_dir, checkpoint=f"checkpoint_{done}")
    termination.resume()
    if self.evaluation is None:
      return {}
    if trainer.evaluate_average:
      average = averaged_parameters(state.opt_state, state.params)
      state = dataclasses.replace(state, params=average)
    with trainer.partitioner.sharded_activations(mesh):
      results = evaluate(trainer.model, state, self.evaluation, mesh)
    scored = self.evaluation.dataset
    report_evaluation(results, scored, trainer.model_dir, trainer.total_steps, first_step=self.first_step)
    return results

  def place(self) -> Placement:
    """Return where the state goes; this touches the devices.

    Raises:
      AnystepError: 78 as `place_state`.
    """
    return place_state(
      self.trainer.model,
      partitioner=self.trainer.partitioner,
      batch_sizes=self.data.batch_sizes,
      microbatches=self.trainer.microbatches,
      root_key=jax.random.key(self.trainer.random_seed),
    )

  def describe_start(self) -> str:
    """Return the step that the run goes on from, with the step of its data where that is another."""
    step = self.first_step if self.restore_step is None else self.restore_step
    text = f"step {step}" if self.restore_step is None else f"checkpoint_{step}"
    if self.first_step:
      text += f", data step {step - self.first_step}"
    return text if self.start is None else f"{text}, of {self.start}"

  def _before(self, step: int) -> PreparedRun:
    """Return this run, prepared to resume from a checkpoint before `step`: that step's cannot be restored."""
    return self.trainer.prepare(accept_changes=self.accept_changes, before_step=step)

  def _record(self, start_step: int) -> None:
    """Record in model_dir the run's name, its newly accepted changes and its data."""
    model_dir = self.trainer.model_dir
    if read_run(model_dir) is None or self.restore_step is None:
      write_run(model_dir, self.run_name, first_step=self.first_step)
    record_accepted(model_dir, self.newly_accepted)
    self.data.record(model_dir, start_step - self.first_step)
