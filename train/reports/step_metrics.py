"""Metrics of training steps over a period, by T5X's names (docs/training.md#metrics)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Sums over a batch, as `Model.loss_fn` returns them; other metrics are averaged over the steps.
_SUMS = ("loss", "z_loss", "weight_sum", "correct", "num_targets")


class Waits(NamedTuple):
  """Seconds that a step waited on the host: for its batch, and for a save of the state before it."""

  input_seconds: float = 0.0
  save_seconds: float = 0.0


NO_WAITS = Waits()


class StepMetrics:
  """Metrics of the steps since the last report, with their rates by the clock.

  The first step does not count in rates: it waits for the compiler.

  Args:
    num_devices: number of devices, over all hosts.
  """

  def __init__(self, num_devices: int):
    self._num_devices = num_devices
    self._begin_seconds: float | None = None
    self._clear()

  def _clear(self) -> None:
    self._totals: dict[str, float] = defaultdict(float)
    self._others: dict[str, float] = defaultdict(float)
    self._num_steps = self._num_timed = self._num_rows = self._num_positions = 0
    self._input_seconds = self._save_seconds = 0.0

  def add(
    self, metrics: Mapping[str, np.ndarray], *, num_rows: int, num_positions: int, waits: Waits
  ) -> None:
    """Add a step.

    Args:
      metrics: what the training step returned, on the host.
      num_rows: rows of its batch.
      num_positions: target positions of its batch, padding included.
      waits: what the step waited for.
    """
    for name, value in metrics.items():
      (self._totals if name in _SUMS else self._others)[name] += float(value)
    self._num_steps += 1
    self._num_positions += num_positions
    if self._begin_seconds is None:
      self._begin_seconds = time.perf_counter()
      return
    self._num_timed += 1
    self._num_rows += num_rows
    self._input_seconds += waits.input_seconds
    self._save_seconds += waits.save_seconds

  def take(self) -> dict[str, float]:
    """Return the metrics of the steps since the last call, and begin anew."""
    if not self._num_steps:
      return {}
    totals, num_steps, num_positions = self._totals, self._num_steps, self._num_positions
    loss, z_loss, weight_sum = (totals[name] for name in ("loss", "z_loss", "weight_sum"))
    values = {
      "loss": loss / num_steps,
      # A batch without loss weights (of tombstones only) has averages of 0.
      "loss_per_nonpadding_target_token": loss / (weight_sum or 1.0),
      "loss_per_all_target_tokens": loss / (num_positions or 1),
      "z_loss": z_loss / num_steps,
      "z_loss_per_all_target_tokens": z_loss / (num_positions or 1),
      "cross_ent_loss": (loss - z_loss) / num_steps,
      "cross_ent_loss_per_all_target_tokens": (loss - z_loss) / (num_positions or 1),
      "accuracy": totals["correct"] / (totals["num_targets"] or 1.0),
      "non_padding_fraction/loss_weights": weight_sum / (num_positions or 1),
      **{name: total / num_steps for name, total in self._others.items()},
      **self._rates(),
    }
    self._clear()
    return values

  def _rates(self) -> dict[str, float]:
    """Return rates of the timed steps, and begin to time the next; nothing where no step was timed."""
    assert self._begin_seconds is not None, "a step was added"
    seconds = time.perf_counter() - self._begin_seconds
    self._begin_seconds += seconds
    if not self._num_timed:
      return {}
    # Positions of the first step, if it is among these, do not count either.
    num_positions = self._num_positions * self._num_timed / self._num_steps
    rates = {
      "timing/seconds": seconds,
      "timing/seqs": float(self._num_rows),
      "timing/steps_per_second": self._num_timed / seconds,
      "timing/seqs_per_second": self._num_rows / seconds,
      "timing/target_tokens_per_second": num_positions / seconds,
      "timing/input_wait_ms": 1000 * self._input_seconds / self._num_timed,
      "timing/input_wait_percent": 100 * self._input_seconds / seconds,
      "timing/save_wait_percent": 100 * self._save_seconds / seconds,
    }
    for name in ("seqs_per_second", "target_tokens_per_second"):
      rates[f"timing/{name}_per_core"] = rates[f"timing/{name}"] / self._num_devices
    return rates
