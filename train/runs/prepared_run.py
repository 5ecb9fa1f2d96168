"""A run that is ready to start: its loop."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import jax

from anystep.errors import AnystepError, ExitCode
from anystep.train.checkpoints.checkpoints import (
  report_unreadable,
  restore_state,
  set_aside_later_checkpoints,
)
from anystep.train.checkpoints.saver import CheckpointSaver
from anystep.train.configuration.resume_contract import Change, record_accepted
from anystep.train.conversion.restoring import Start, restore_start, with_dtype
from anystep.train.datasets.run_data import RunData
from anystep.train.models.train_state import TrainState, make_train_step
from anystep.train.optimizers.parameter_average import averaged_parameters, find_average
from anystep.train.partitioning.batches import batch_sharding, global_batch
from anystep.train.partitioning.mesh import process_share
from anystep.train.reports.evaluation import Evaluator, report_evaluation
from anystep.train.reports.metric_writers import MetricWriters
from anystep.train.reports.profile import profiled
from anystep.train.reports.step_metrics import Waits
from anystep.train.reports.step_reporter import StepReporter
from anystep.train.runs.attempts import recorded_attempt
from anystep.train.runs.placement import Placement, place_state
from anystep.train.runs.run_identity import read_run, write_run
from anystep.train.runs.termination import Termination, preempted

if TYPE_CHECKING:
  from anystep.train.runs.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRun:
  """Run with its data and checkpoints found and checked.

  Attributes:
    trainer: the configuration.
    data: data of training. evaluation: data of each task that is evaluated.
    restore_step: step of the run's checkpoint to resume from; None to start.
    start: another checkpoint to start with; None to start from initial parameters, or to resume.
    first_step: step that the run begins at, with the first step of its data.
    run_name: name of the run in model_dir.
    accept_changes: see `Trainer.prepare`.
    newly_accepted: changes that are accepted for the first time.
  """

  trainer: Trainer
  data: RunData
  evaluation: Sequence[RunData]
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

    The order of a step: its batch is read; the step is given to the devices; the step before it is reported;
    at a checkpoint's step the state is copied, and written while the next steps run; at an evaluation's step
    the state is evaluated.

    Args:
      termination: read after each step; None if nothing handles signals.
      started: called before the first step, when the state is initialized or restored.

    Returns:
      The metrics of the last evaluation; where it is of several tasks, by `TASK/METRIC`.

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
    placement = self.place()
    mesh, abstract = placement.mesh, placement.abstract
    if trainer.restore is not None:
      placement = placement._replace(abstract=with_dtype(abstract, trainer.restore.dtype))
    try:
      start_step, state = self._start(placement)
    except AnystepError as error:
      if self.restore_step is None or error.code != ExitCode.DATA:
        raise
      report_unreadable(self.restore_step, error)
      # An earlier checkpoint has another data state too.
      return self._before(self.restore_step).run(termination, started=started)
    self._record(start_step)
    started()
    sharding = batch_sharding(mesh)
    share = process_share(mesh)
    stream = data.open_stream(share)
    stream.seek(start_step - self.first_step)
    train_step = make_train_step(
      trainer.model,
      optimizer,
      root_key=jax.random.key(trainer.random_seed),
      microbatches=trainer.microbatches,
      abstract=placement.abstract,
      partitioner=trainer.partitioner,
      norms_depth=trainer.norms_depth,
    )
    with (
      recorded_attempt(trainer.model_dir, start_step=start_step) as attempt,
      MetricWriters(trainer.metric_writers, trainer.model_dir) as writers,
    ):
      evaluations = Evaluations(self, mesh, writers)
      with (
        stream,
        self._reporter(writers, start_step) as reporter,
        self._saver() as saver,
        profiled(trainer.profile, trainer.model_dir) as profile,
      ):
        if self.restore_step is None and trainer.checkpoints.saves_at(start_step):
          saver.save(state, data.state)
        save_seconds = 0.0
        for step in range(start_step, trainer.total_steps):
          profile.before(step)
          with stopwatch() as input_wait:
            rows = stream.rows_at(step - self.first_step)
            batch = global_batch(next(stream), sharding, rows, batch_size=len(rows) * share[1])
          state, metrics = train_step(state, batch)
          # After the first step there is something to save.
          termination.defer()
          # A step is reported while the next one runs: waiting for its loss would leave the device idle.
          reporter.report_before(step, batch, metrics, Waits(input_wait.seconds, save_seconds))
          saver.raise_failure()
          attempt.last_step = done = step + 1
          evaluates = evaluations.are_due(done)
          saves = trainer.checkpoints.saves_at(done) or done == trainer.total_steps or termination.requested
          if saves or evaluates:
            # The log must contain all steps of a checkpoint before the checkpoint counts.
            reporter.flush()
          with stopwatch() as save_wait:
            if saves:
              saver.save(state, data.state)
          save_seconds = save_wait.seconds
          if evaluates:
            evaluations.run(state, done, is_interrupted=lambda: termination.requested)
          if termination.requested:
            if not saves:
              reporter.flush()
              saver.save(state, data.state)
            saver.wait()
            raise preempted(path=trainer.model_dir, checkpoint=f"checkpoint_{done}")
      # From here on there is nothing to save.
      termination.resume()
      return evaluations.run(state, trainer.total_steps)

  def _start(self, placement: Placement) -> tuple[int, TrainState]:
    """Return the step that the run goes on from, and its state."""
    model_dir = self.trainer.model_dir
    if self.restore_step is not None:
      state = restore_state(model_dir, self.restore_step, placement.abstract)
      set_aside_later_checkpoints(model_dir, self.restore_step)
      print(f"resumed from {self.describe_start()} in {model_dir}", flush=True)
      return self.restore_step, state
    initial = placement.make_initial
    state = restore_start(self.start, placement.abstract, initial) if self.start else initial()
    print(f"training from {self.describe_start()}: no checkpoint in {model_dir}", flush=True)
    return self.first_step, state

  def _reporter(self, writers: MetricWriters, start_step: int) -> StepReporter:
    return StepReporter(
      self.trainer.model_dir,
      writers,
      start_step=start_step,
      total_steps=self.trainer.total_steps,
      first_step=self.first_step,
      period_steps=self.trainer.stats_period_steps,
    )

  def _saver(self) -> CheckpointSaver:
    return CheckpointSaver(
      self.trainer.model_dir,
      self.trainer.checkpoints,
      run=self.run_name,
      trained_with=self.trainer.deciding_values,
      first_step=self.first_step,
    )

  def place(self) -> Placement:
    """Return where the state goes; this touches the devices.

    Raises:
      AnystepError: 78 as `place_state`; 78 `parameter_average` if there is none to evaluate.
    """
    placement = place_state(
      self.trainer.model,
      partitioner=self.trainer.partitioner,
      batch_sizes=self.data.batch_sizes,
      microbatches=self.trainer.microbatches,
      root_key=jax.random.key(self.trainer.random_seed),
    )
    if self.trainer.evaluate_average:
      find_average(placement.abstract.opt_state, placement.abstract.params)
    return placement

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


class Evaluations:
  """Evaluations of a run's state.

  Args:
    prepared: the run.
    mesh: the devices.
    writers: where results go.
  """

  def __init__(self, prepared: PreparedRun, mesh: jax.sharding.Mesh, writers: MetricWriters):
    trainer = prepared.trainer
    self._trainer, self._mesh, self._writers = trainer, mesh, writers
    self._first_step = prepared.first_step
    self._evaluator = None
    if prepared.evaluation:
      assert trainer.eval_dataset is not None, "its data is there"
      name = trainer.eval_dataset.mixture_or_task_name
      self._evaluator = Evaluator(
        trainer.model, prepared.evaluation, mesh, name=name, num_batches=trainer.eval_batches
      )

  def are_due(self, step: int) -> bool:
    """Return whether the state after a number of steps is evaluated, and training goes on."""
    period, is_last = self._trainer.eval_period_steps, step == self._trainer.total_steps
    return self._evaluator is not None and period is not None and step % period == 0 and not is_last

  def run(
    self, state: TrainState, step: int, *, is_interrupted: Callable[[], bool] = lambda: False
  ) -> dict[str, float]:
    """Evaluate a state, and report the results; return them as `PreparedRun.run` does."""
    if self._evaluator is None:
      return {}
    if self._trainer.evaluate_average:
      average = averaged_parameters(state.opt_state, state.params)
      state = dataclasses.replace(state, params=average)
    with self._trainer.partitioner.sharded_activations(self._mesh):
      results = self._evaluator.evaluate(state, is_interrupted=is_interrupted)
    for result in results:
      report_evaluation(result, self._writers, step, first_step=self._first_step)
    if len(results) == 1:
      return dict(results[0].metrics)
    return {f"{result.name}/{name}": value for result in results for name, value in result.metrics.items()}


class Stopwatch:
  """Seconds that the body of `stopwatch` took."""

  seconds = 0.0


@contextlib.contextmanager
def stopwatch() -> Iterator[Stopwatch]:
  """Time the body."""
  watch, begin_seconds = Stopwatch(), time.perf_counter()
  yield watch
  watch.seconds = time.perf_counter() - begin_seconds
