"""Metrics of a period are T5X's, of all its steps."""

import numpy as np
import pytest

from anystep.train.reports import step_metrics
from anystep.train.reports.step_metrics import StepMetrics, Waits


class Clock:
  def __init__(self, monkeypatch):
    self.seconds = 100.0
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: self.seconds)


def step(**values):
  sums = {"loss": 0.0, "z_loss": 0.0, "weight_sum": 0.0, "correct": 0.0, "num_targets": 0.0}
  return {name: np.float32(value) for name, value in (sums | values).items()}


def test_averages_are_over_all_targets_of_the_period(monkeypatch):
  clock = Clock(monkeypatch)
  metrics = StepMetrics(num_devices=4)
  for k in (1, 3):
    metrics.add(
      step(
        loss=12.0 * k, z_loss=2.0 * k, weight_sum=4.0 * k, correct=k, num_targets=5 * k, learning_rate=0.1 * k
      ),
      num_rows=2,
      num_positions=10,
      waits=Waits(),
    )
    clock.seconds += 1
  values = metrics.take()
  expected = {
    "loss": 24.0,
    "loss_per_nonpadding_target_token": 3.0,
    "loss_per_all_target_tokens": 2.4,
    "z_loss": 4.0,
    "z_loss_per_all_target_tokens": 0.4,
    "cross_ent_loss": 20.0,
    "cross_ent_loss_per_all_target_tokens": 2.0,
    "accuracy": 0.2,
    "non_padding_fraction/loss_weights": 0.8,
    "learning_rate": 0.2,
  }
  assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_rates_are_by_the_clock_without_the_first_step(monkeypatch):
  clock = Clock(monkeypatch)
  metrics = StepMetrics(num_devices=4)
  clock.seconds += 50  # The compiler's.
  metrics.add(step(), num_rows=8, num_positions=80, waits=Waits(9.0, 0.0))
  for _ in range(3):
    clock.seconds += 2
    metrics.add(step(), num_rows=8, num_positions=80, waits=Waits(0.5, 0.1))
  values = metrics.take()
  expected = {
    "timing/seconds": 6.0,
    "timing/seqs": 24.0,
    "timing/steps_per_second": 0.5,
    "timing/seqs_per_second": 4.0,
    "timing/seqs_per_second_per_core": 1.0,
    "timing/target_tokens_per_second": 40.0,
    "timing/target_tokens_per_second_per_core": 10.0,
    "timing/input_wait_ms": 500.0,
    "timing/input_wait_percent": 25.0,
    "timing/save_wait_percent": 5.0,
  }
  assert {name: values[name] for name in expected} == pytest.approx(expected)
  # The next period begins where this one ended.
  clock.seconds += 4
  metrics.add(step(), num_rows=8, num_positions=80, waits=Waits())
  assert metrics.take()["timing/steps_per_second"] == pytest.approx(0.25)


def test_a_period_of_the_first_step_alone_has_no_rates_and_one_of_no_steps_has_nothing():
  metrics = StepMetrics(num_devices=1)
  assert metrics.take() == {}
  metrics.add(step(loss=3.0), num_rows=8, num_positions=80, waits=Waits())
  values = metrics.take()
  assert values["loss"] == 3.0
  assert values["accuracy"] == values["loss_per_nonpadding_target_token"] - 3.0 == 0.0
  assert not [name for name in values if name.startswith("timing/")]
