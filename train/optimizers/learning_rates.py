"""Learning rates by step, as products of named factors, and those that an optimizer has."""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.limits import is_number
from anystep.train.configuration.built_values import record_maker

_FACTORS_FIX = "correct factors; as a learning rate, write @learning_rates.learning_rate_schedule()"


def learning_rate_schedule(
  factors: str = "constant * rsqrt_decay",
  *,
  base_learning_rate: float = 1.0,
  warmup_steps: int = 10_000,
  decay_factor: float = 0.5,
  steps_per_decay: int = 20_000,
  steps_per_cycle: int = 100_000,
  step_offset: int = 0,
  min_learning_rate: float = 1e-8,
) -> optax.Schedule:
  """Return a schedule that is a product of factors of the step t, named as in T5X.

  | factor                 | value                                                                        |
  |------------------------|------------------------------------------------------------------------------|
  | constant               | base_learning_rate                                                           |
  | linear_warmup          | min(1, t / warmup_steps)                                                     |
  | linear_decay           | base_learning_rate * min(t / w, 1 + decay_factor * (w - t)), w = warmup_steps |
  | rsqrt_decay            | 1 / sqrt(max(t, warmup_steps))                                               |
  | rsqrt_normalized_decay | sqrt(warmup_steps / max(t, warmup_steps))                                    |
  | decay_every            | decay_factor ^ floor(t / steps_per_decay)                                    |
  | cosine_decay           | (1 + cos(pi * frac(max(0, t - warmup_steps) / steps_per_cycle))) / 2         |

  The default is T5's for pretraining (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.1.2);
  for finetuning, T5 uses "constant" with 1e-3.

  Args:
    factors: names from the table, with '*' between them.
    base_learning_rate: see the table.
    warmup_steps: see the table, at least 1.
    decay_factor: see the table.
    steps_per_decay: see the table.
    steps_per_cycle: see the table.
    step_offset: step that counts as t = 0; those before it do too. For finetuning, the pretrained step.
    min_learning_rate: the least the schedule ever gives.

  Returns:
    A function from a step (int or () int32) to a learning rate, () float32.

  Raises:
    AnystepError: 78 `learning_rate` if a factor is unknown, a number of steps is below 1, or a rate or factor
      below 0.

  >>> schedule = learning_rate_schedule(base_learning_rate=1.0, warmup_steps=100)
  >>> [round(float(schedule(step)), 4) for step in (0, 100, 400)]
  [0.1, 0.1, 0.05]
  """
  # A run that resumes compares these values with its checkpoint's.
  arguments = dict(locals())
  if not isinstance(factors, str):
    raise _bad_argument("factors", "names with '*' between them", factors, fix=_FACTORS_FIX)
  for name in ("warmup_steps", "steps_per_decay", "steps_per_cycle"):
    if not is_number(arguments[name], least=1):
      raise _bad_argument(name, "a number of at least 1", arguments[name])
  for name in ("base_learning_rate", "decay_factor", "min_learning_rate"):
    if not is_number(arguments[name], least=0):
      raise _bad_argument(name, "a number of at least 0", arguments[name])
  if not is_number(step_offset):
    raise _bad_argument("step_offset", "a number", step_offset)

  factor_functions: dict[str, Callable[[jax.Array], jax.Array | float]] = {
    "constant": lambda t: base_learning_rate,
    "linear_warmup": lambda t: jnp.minimum(1.0, t / warmup_steps),
    "linear_decay": lambda t: (
      base_learning_rate * jnp.minimum(t / warmup_steps, 1.0 + decay_factor * (warmup_steps - t))
    ),
    "rsqrt_decay": lambda t: jax.lax.rsqrt(jnp.maximum(t, warmup_steps)),
    "rsqrt_normalized_decay": lambda t: jnp.sqrt(warmup_steps / jnp.maximum(t, warmup_steps)),
    # Not floor(t / steps): XLA multiplies by the rounded reciprocal, which is below k at t = k * steps.
    "decay_every": lambda t: decay_factor ** (t // steps_per_decay),
    "cosine_decay": lambda t: (
      0.5 * (1.0 + jnp.cos(jnp.pi * (jnp.maximum(0.0, t - warmup_steps) / steps_per_cycle % 1.0)))
    ),
  }
  names = [name.strip() for name in factors.split("*")]
  for name in names:
    if name not in factor_functions:
      raise AnystepError(
        ExitCode.CONFIG,
        "learning_rate",
        expected=f"factors among {', '.join(factor_functions)}, with '*' between them",
        got=name,
        nearest=find_nearest(name, factor_functions, limit=1),
        fix=f"correct {name!r} in {factors!r}",
      )

  def schedule(step):
    t = jnp.maximum(0, jnp.asarray(step) - step_offset).astype(jnp.float32)
    rate = jnp.ones((), jnp.float32)
    for name in names:
      rate *= factor_functions[name](t)
    return jnp.maximum(rate, min_learning_rate)

  return record_maker(schedule, learning_rate_schedule, arguments)


def _bad_argument(name: str, expected: str, got: object, *, fix: str | None = None) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG, "learning_rate", expected=f"{name}: {expected}", got=got, fix=fix or f"correct {name}"
  )


def find_learning_rates(optimizer: optax.GradientTransformation) -> dict[str, optax.Schedule]:
  """Return an optimizer's learning rates, as functions of the 0-based step, by the names of their reports.

  A rate is found where an argument or a captured value is named `learning_rate`: all of `adafactor`'s, and
  optax's if they are schedules (a constant is part of another number there).

  Args:
    optimizer: any optax transformation.

  Returns:
    `learning_rate`; of an optimizer that has several, `learning_rate/0`, `learning_rate/1` and so on, in the
    order in which it was given them. Nothing if none is found.

  >>> groups = optax.chain(optax.sgd(lambda step: 0.1 * step), optax.adam(lambda step: 0.5))
  >>> {name: rate(3) for name, rate in find_learning_rates(groups).items()}
  {'learning_rate/0': 0.30000000000000004, 'learning_rate/1': 0.5}
  """
  rates: list[Any] = []
  for rate in _walk(optimizer, {}):
    if not any(rate is other for other in rates):
      rates.append(rate)
  names = ["learning_rate"] if len(rates) == 1 else [f"learning_rate/{i}" for i in range(len(rates))]
  return {name: _as_schedule(rate) for name, rate in zip(names, rates, strict=True)}


def _as_schedule(rate: float | optax.Schedule) -> optax.Schedule:
  return rate if callable(rate) else lambda step: rate


def _walk(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
  """Yield what is named `learning_rate` among recorded arguments and captured values, in order."""
  if id(value) in seen:
    return
  # Held, so that no later object gets its id.
  seen[id(value)] = value
  if isinstance(value, Mapping) or hasattr(value, "arguments"):
    members = dict(getattr(value, "arguments", value))
    rate = members.pop("learning_rate", None)
    if isinstance(rate, (int, float)) or callable(rate):
      yield rate
    inner = list(members.values())
  elif isinstance(value, optax.GradientTransformation):
    inner = [value.update]
  elif isinstance(value, (list, tuple)):
    inner = list(value)
  elif isinstance(value, types.FunctionType):
    inner = [dict(inspect.getclosurevars(value).nonlocals)] if value.__closure__ else []
  else:
    inner = []
  for member in inner:
    yield from _walk(member, seen)
