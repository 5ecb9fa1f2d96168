"""Schedules against T5X's numbers and the formulas written out."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anystep.errors import AnystepError
from anystep.train.optimizers import by_parameter, chain, with_average
from anystep.train.optimizers.adafactor_updates import adafactor
from anystep.train.optimizers.learning_rates import find_learning_rates, learning_rate_schedule

FIXTURES = Path(__file__).parents[2] / "fixtures"
T5X = FIXTURES / "t5x_t5_1_1"
SCHEDULES = json.loads((FIXTURES / "t5x" / "schedules" / "schedules.json").read_text())


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def test_rates_are_those_t5x_logged():
  schedule = learning_rate_schedule("constant * rsqrt_decay", base_learning_rate=0.5, warmup_steps=10)
  logged = json.loads((T5X / "metrics.json").read_text())["learning_rate_by_step"]
  # T5X logs after the update: what it calls step 1 used the rate of step 0.
  assert {step: float(schedule(int(step) - 1)) for step in logged} == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize("case", SCHEDULES["schedules"], ids=lambda case: case["settings"]["factors"])
def test_schedules_are_t5xs(case):
  """To 1e-6 of the base rate: near the zero of a cosine T5X's own values differ by that."""
  settings = dict(case["settings"])
  schedule = learning_rate_schedule(settings.pop("factors"), **settings)
  rates = jax.jit(jax.vmap(schedule))(jnp.asarray(SCHEDULES["steps"], jnp.int32))
  largest = max(settings["base_learning_rate"], max(case["values"]))
  np.testing.assert_allclose(rates, case["values"], rtol=1e-5, atol=1e-6 * largest)


def test_the_first_update_uses_the_rate_of_step_0_and_a_warmup_begins_at_the_floor():
  schedule = learning_rate_schedule("constant * linear_warmup", base_learning_rate=0.5, warmup_steps=10)
  assert float(schedule(0)) == pytest.approx(1e-8)
  param = {"w": jnp.ones((3,))}
  for optimizer in (
    optax.sgd(schedule),
    adafactor(schedule, multiply_by_parameter_scale=False, clipping_threshold=None),
  ):
    state = optimizer.init(param)
    for rate in (1e-8, 0.05, 0.1):
      updates, state = optimizer.update(param, state, param)
      np.testing.assert_allclose(updates["w"], -rate, rtol=1e-5)


@pytest.mark.parametrize(
  ("factors", "step", "expected"),
  [
    ("constant", 7, 2.0),
    ("constant*linear_warmup", 0, 1e-8),
    ("constant * linear_warmup", 5, 1.0),
    ("constant * linear_warmup", 50, 2.0),
    ("linear_decay", 5, 1.0),
    ("linear_decay", 10, 2.0),
    ("linear_decay", 15, 1.0),
    ("linear_decay", 99, 1e-8),
    ("rsqrt_decay", 5, 1 / math.sqrt(10)),
    ("rsqrt_decay", 40, 1 / math.sqrt(40)),
    ("rsqrt_normalized_decay", 5, 1.0),
    ("rsqrt_normalized_decay", 40, 0.5),
    ("constant * decay_every", 19, 2.0),
    ("constant * decay_every", 45, 2.0 * 0.1**2),
    ("cosine_decay", 10, 1.0),
    ("cosine_decay", 60, 0.5),
    ("cosine_decay", 110, 1e-8 + 1.0),
  ],
)
def test_factors_are_those_of_the_table(factors, step, expected):
  schedule = learning_rate_schedule(
    factors,
    base_learning_rate=2.0,
    warmup_steps=10,
    decay_factor=0.1,
    steps_per_decay=20,
    steps_per_cycle=100,
  )
  for t in (step, jnp.int32(step)):
    rate = jax.jit(schedule)(t)
    assert rate.dtype == jnp.float32
    assert float(rate) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("steps_per_decay", [1, 41, 49, 61, 1000])
def test_decay_every_decays_at_whole_multiples_of_its_steps(steps_per_decay):
  schedule = learning_rate_schedule("decay_every", steps_per_decay=steps_per_decay, decay_factor=0.5)
  steps = np.arange(20 * steps_per_decay)
  rates = jax.jit(jax.vmap(schedule))(jnp.asarray(steps, jnp.int32))
  np.testing.assert_allclose(rates, 0.5 ** (steps // steps_per_decay), rtol=1e-6)


def test_steps_are_counted_from_the_offset():
  options = {"base_learning_rate": 1.0, "warmup_steps": 4}
  shifted = learning_rate_schedule("rsqrt_decay", step_offset=100, **options)
  plain = learning_rate_schedule("rsqrt_decay", **options)
  assert [shifted(step) for step in (50, 100, 150)] == [plain(step) for step in (0, 0, 50)]


@pytest.mark.parametrize(
  ("options", "fields"),
  [
    ({"factors": "constant * rsqrt_decy"}, {"got": "rsqrt_decy", "nearest": "rsqrt_decay"}),
    ({"factors": "constant +"}, {"got": "constant +"}),
    (
      {"factors": "constant", "warmup_steps": 0},
      {"expected": "warmup_steps: a number of at least 1", "got": 0},
    ),
    ({"steps_per_decay": None}, {"expected": "steps_per_decay: a number of at least 1"}),
    ({"base_learning_rate": "0.1"}, {"expected": "base_learning_rate: a number of at least 0"}),
    ({"factors": None}, {"expected": "factors: names with '*' between them"}),
  ],
)
def test_a_schedule_that_cannot_be_is_refused(options, fields):
  with pytest.raises(AnystepError) as refused:
    learning_rate_schedule(**options)
  assert refused.value.kind == "learning_rate"
  assert refused.value.fields.items() >= fields.items()


WARMUP = learning_rate_schedule("constant * linear_warmup", base_learning_rate=0.5, warmup_steps=10)


@pytest.mark.parametrize(
  ("optimizer", "expected"),
  [
    (adafactor(WARMUP), {"learning_rate": 0.2}),
    (adafactor(0.1, beta1=0.9), {"learning_rate": 0.1}),
    (
      with_average(chain([optax.clip_by_global_norm(1.0), adafactor(WARMUP)]), decay=0.9),
      {"learning_rate": 0.2},
    ),
    (
      by_parameter([("a", adafactor(0.1)), ("b", None), ("", optax.adamw(WARMUP))]),
      {"learning_rate/0": 0.1, "learning_rate/1": 0.2},
    ),
    (by_parameter([("a", adafactor(WARMUP)), ("", adafactor(WARMUP))]), {"learning_rate": 0.2}),
    (optax.adamw(optax.linear_schedule(0.0, 0.4, 8)), {"learning_rate": 0.2}),
    (optax.MultiSteps(optax.sgd(WARMUP), 2).gradient_transformation(), {}),
    (optax.adam(0.1), {}),
  ],
)
def test_an_optimizers_rates_are_found_by_name(optimizer, expected):
  found = {name: float(rate(jnp.int32(4))) for name, rate in find_learning_rates(optimizer).items()}
  assert found == pytest.approx(expected)
