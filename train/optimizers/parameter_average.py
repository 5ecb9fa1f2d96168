"""Exponential moving average of the parameters, kept in the optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from anystep.errors import AnystepError, ExitCode
from anystep.limits import is_number
from anystep.train.optimizers.logical_axes import AxesTransformation, bind, check_transformation


class AverageState(NamedTuple):
  """State of an optimizer with an average.

  Attributes:
    inner: the optimizer's own state.
    average: the averaged parameters, float32.
  """

  inner: Any
  average: Any


def with_average(optimizer: optax.GradientTransformation, *, decay: float) -> optax.GradientTransformation:
  """Keep an exponential moving average of the parameters beside an optimizer.

  After each update: average = decay average + (1 - decay) parameters. It begins as the initial parameters.
  Training does not depend on it; `averaged_parameters` reads it from the optimizer's state.

  Args:
    optimizer: updates the parameters; the outermost one, so that nothing changes its updates afterwards.
    decay: share of the average that is kept at each step, in [0, 1); 0.999 averages about 1,000 steps.

  Returns:
    An optax transformation; its state is an `AverageState`, and `update` needs the parameters.

  Raises:
    AnystepError: 78 `optimizer`.
  """
  check_transformation("with_average", optimizer)
  if not is_number(decay, least=0.0) or decay >= 1.0:
    raise AnystepError(
      ExitCode.CONFIG,
      "optimizer",
      expected="with_average's decay: a number from 0 to below 1",
      got=decay,
      fix="choose a decay such as 0.999",
    )
  inner = optax.with_extra_args_support(optimizer)

  def init(params: Any) -> AverageState:
    # A copy: the step may reuse the memory of the parameters.
    average = jax.tree.map(lambda param: jnp.array(param, jnp.float32), params)
    return AverageState(inner.init(params), average)

  def update(updates: Any, state: AverageState, params: Any = None, **extra: Any) -> tuple[Any, AverageState]:
    if params is None:
      raise ValueError("with_average: expected the parameters as update's third argument, got none")
    updates, inner_state = inner.update(updates, state.inner, params, **extra)
    average = jax.tree.map(
      lambda old, new: decay * old + (1.0 - decay) * new.astype(jnp.float32),
      state.average,
      optax.apply_updates(params, updates),
    )
    return updates, AverageState(inner_state, average)

  return AxesTransformation.make(
    optax.GradientTransformationExtraArgs(init, update),
    made_by=with_average,
    arguments={"optimizer": optimizer, "decay": decay},
    with_axes=lambda axes: with_average(bind(optimizer, axes), decay=decay),
  )


def averaged_parameters(opt_state: Any, params: Any) -> Any:
  """Return the average in an optimizer's state, in the parameters' dtypes.

  Raises:
    AnystepError: as `find_average`.
  """
  average = find_average(opt_state, params)
  return jax.tree.map(lambda averaged, param: averaged.astype(param.dtype), average, params)


def find_average(opt_state: Any, params: Any) -> Any:
  """Return the average in an optimizer's state: a tree of float32 arrays, or of their shapes.

  Args:
    opt_state: state of an optimizer that `with_average` made, or of a chain that ends with one; it may be
      abstract.
    params: the parameters; they may be abstract.

  Raises:
    AnystepError: 78 `parameter_average` if there is none of all parameters, or something stands after it that
      could change the updates that it knows.
  """
  while type(opt_state) is tuple and opt_state:
    # The state of a chain.
    opt_state = opt_state[-1]
  average = opt_state.average if isinstance(opt_state, AverageState) else None
  structures: list[Any] = [jax.tree.structure(average), jax.tree.structure(params)]
  if average is None or structures[0] != structures[1]:
    raise AnystepError(
      ExitCode.CONFIG,
      "parameter_average",
      expected="with_average as the outermost optimizer, or the last one of a chain",
      got=f"a state of {type(opt_state).__name__}" if average is None else "an average of other parameters",
      fix="make with_average the outermost optimizer, or set EVALUATE_AVERAGE = False",
    )
  return average
