"""Reports of steps: each to the step log and the progress bar, each period's metrics to their writers."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.programs.progress import Progress
from anystep.train.partitioning.batches import local_values
from anystep.train.reports.metric_writers import TRAIN, MetricWriter
from anystep.train.reports.step_log import StepLog
from anystep.train.reports.step_metrics import NO_WAITS, StepMetrics, Waits


class _Step(NamedTuple):
  step: int
  batch: Mapping[str, jax.Array]
  metrics: Mapping[str, Any]
  waits: Waits


class StepReporter:
  """Reporter of steps, one step late. A context manager, within which Python collects no garbage by itself.

  Args:
    model_dir: the run's directory.
    writers: where metrics go.
    start_step, total_steps: first and last step of this start, by the model's count.
    first_step: step that the run began at, with the first step of its data.
    period_steps: metrics are written after each multiple of it, over the steps since the last.
  """

  def __init__(
    self,
    model_dir: epath.PathLike,
    writers: MetricWriter,
    *,
    start_step: int,
    total_steps: int,
    first_step: int = 0,
    period_steps: int = 1,
  ):
    self._first_step, self._period_steps, self._writers = first_step, period_steps, writers
    self._log = StepLog(model_dir, start_step=start_step, first_step=first_step, process=jax.process_index())
    unit = "model steps" if first_step else "steps"
    self._progress = Progress("train", total=total_steps, unit=unit, start=start_step)
    self._metrics = StepMetrics(jax.device_count())
    self._pending: _Step | None = None
    self._target_tokens = 0
    self._begin_seconds = time.monotonic()

  def __enter__(self) -> StepReporter:
    # A collection in the middle of a step would hold back the next; what is there now stays there.
    gc.collect()
    gc.freeze()
    gc.disable()
    return self

  def __exit__(self, *exc_info: object) -> None:
    gc.enable()
    gc.unfreeze()
    if exc_info[0] is None:
      self.flush()
    self._progress.close()
    self._log.close()

  def report_before(
    self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping[str, Any], waits: Waits = NO_WAITS
  ) -> None:
    """Report the step before this one, and keep this one for the next call.

    Args:
      step: number of the step.
      batch: its batch.
      metrics: what the training step returned; it may still be computed.
      waits: what the step waited for.
    """
    self.flush()
    self._pending = _Step(step, batch, metrics, waits)

  def flush(self) -> None:
    """Report the step that was kept.

    Raises:
      AnystepError: 70 `loss_not_finite`.
    """
    if self._pending is None:
      return
    (step, batch, metrics, waits), self._pending = self._pending, None
    values = {name: np.asarray(value) for name, value in metrics.items()}
    # A batch without loss weights (of tombstones only) has averages of 0.
    loss = float(values["loss"] / (values["weight_sum"] or 1))
    self._log.write(step, local_values(batch), loss)
    if not math.isfinite(loss):
      raise AnystepError(
        ExitCode.NUMERICS,
        "loss_not_finite",
        **self._name_step(step),
        got=loss,
        fix="lower the learning rate, or look at the step's rows with anystep-data what-was-at",
      )
    targets = batch["decoder_target_tokens"]
    self._metrics.add(values, num_rows=targets.shape[0], num_positions=math.prod(targets.shape), waits=waits)
    self._target_tokens += int(values["weight_sum"])
    done = step + 1
    if done % self._period_steps == 0:
      self._writers.write(done, TRAIN, self._metrics.take())
      gc.collect()
    data_steps = {"data_steps": f"{done - self._first_step:,}"} if self._first_step else {}
    rate = self._target_tokens / (time.monotonic() - self._begin_seconds)
    self._progress.update(done, **data_steps, loss=f"{loss:.4f}", target_tokens_per_second=f"{rate:,.0f}")

  def _name_step(self, step: int) -> dict[str, int]:
    """Return a step for an error: one number, or the model's and the data's."""
    if not self._first_step:
      return {"step": step}
    return {"model_step": step, "data_step": step - self._first_step}
