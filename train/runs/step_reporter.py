"""Reports of each step: to the step log, TensorBoard and the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from clu import metric_writers
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.programs.progress import Progress
from anystep.train.partitioning.batches import local_values
from anystep.train.runs.evaluation import TEACHER_FORCED
from anystep.train.runs.step_log import StepLog


class StepReporter:
  """Reporter of steps to the step log, TensorBoard and the progress bar, one step late.

  Args:
    model_dir: the run's directory.
    start_step, total_steps: first and last step of this start, by the model's count.
    first_step: step that the run began at, with the first step of its data.
  """

  def __init__(self, model_dir: epath.PathLike, *, start_step: int, total_steps: int, first_step: int = 0):
    self._first_step = first_step
    self._log = StepLog(model_dir, start_step=start_step, first_step=first_step, process=jax.process_index())
    self._writer = metric_writers.SummaryWriter(str(epath.Path(model_dir) / "train"))
    unit = "model steps" if first_step else "steps"
    self._progress = Progress("train", total=total_steps, unit=unit, start=start_step)
    self._pending: tuple[int, Mapping[str, jax.Array], Mapping[str, jax.Array]] | None = None
    self._tokens = 0
    self._begin_seconds = time.monotonic()

  def __enter__(self) -> StepReporter:
    return self

  def __exit__(self, *exc_info: object) -> None:
    if exc_info[0] is None:
      self.flush()
    self._progress.close()
    self._log.close()
    self._writer.close()

  def report_before(self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping[str, Any]) -> None:
    """Report the step before this one, and keep this one for the next call."""
    self.flush()
    self._pending = (step, batch, metrics)

  def flush(self) -> None:
    """Report the step that was kept.

    Raises:
      AnystepError: 70 `loss_not_finite`.
    """
    if self._pending is None:
      return
    (step, batch, metrics), self._pending = self._pending, None
    sums = {name: np.asarray(value) for name, value in metrics.items()}
    # A batch without loss weights (of tombstones only) has averages of 0.
    tokens = sums["weight_sum"] or 1
    loss = float(sums["loss"] / tokens)
    self._log.write(step, local_values(batch), loss)
    if not math.isfinite(loss):
      raise AnystepError(
        ExitCode.NUMERICS,
        "loss_not_finite",
        **self._name_step(step),
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
        f"{TEACHER_FORCED}token_accuracy": float(100 * sums["correct"] / (sums["num_targets"] or 1)),
        "gradient_norm": float(sums["gradient_norm"]),
        "tokens_per_second": tokens_per_second,
        **{name: float(sums[name]) for name in sums if name.startswith("learning_rate")},
      },
    )
    data_steps = {"data_steps": f"{step + 1 - self._first_step:,}"} if self._first_step else {}
    self._progress.update(
      step + 1,
      **data_steps,
      loss=f"{loss:.4f}",
      target_tokens_per_second=f"{tokens_per_second:,.0f}",
    )

  def _name_step(self, step: int) -> dict[str, int]:
    """Return a step for an error: one number, or the model's and the data's."""
    if not self._first_step:
      return {"step": step}
    return {"model_step": step, "data_step": step - self._first_step}
