"""An optimizer for each group of parameters, by regular expressions over their paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from anystep.errors import AnystepError, ExitCode
from anystep.train.optimizers.logical_axes import Axes, AxesTransformation, bind, check_transformation
from anystep.train.optimizers.parameter_patterns import ParameterPatterns, parameter_path


def by_parameter(
  optimizers: Sequence[tuple[str, optax.GradientTransformation | None]],
) -> optax.GradientTransformation:
  """Update each parameter by the first optimizer whose regular expression is found in its path.

  Each optimizer sees its own parameters alone, so a norm of gradients in it is theirs. To clip by the norm of
  all, put `optax.clip_by_global_norm` before this in a `chain`.

  Args:
    optimizers: pairs of (regular expression, optimizer); None in place of an optimizer freezes parameters.

  Returns:
    An `optax.multi_transform`, with a state for each pair.

  Raises:
    AnystepError: 78 `optimizer`, `parameter_pattern`; 78 `parameter_pattern` from `init` and `update` if a
      parameter matches no expression, or an expression is the first of no parameter.

  >>> optimizer = by_parameter([("norm|bias", optax.sgd(1.0)), ("encoder", None), ("", optax.sgd(0.1))])
  >>> params = {"encoder": {"kernel": 1.0, "norm": 1.0}, "decoder": {"kernel": 1.0}}
  >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
  >>> jax.tree.map(lambda update: round(float(update), 3), updates)
  {'decoder': {'kernel': -0.1}, 'encoder': {'kernel': 0.0, 'norm': -1.0}}
  """
  patterns = ParameterPatterns("by_parameter", optimizers)
  for _, optimizer in optimizers:
    if optimizer is not None:
      check_transformation("by_parameter", optimizer)

  def numbers(params: Any) -> Any:
    tree = jax.tree_util.tree_map_with_path(lambda keys, _: _number(patterns, parameter_path(keys)), params)
    used = set(jax.tree.leaves(tree))
    # optax also calls this for a tree without parameters, to find those in a state.
    unused = [pattern for number, (pattern, _) in enumerate(optimizers) if str(number) not in used]
    if used and unused:
      raise AnystepError(
        ExitCode.CONFIG,
        "parameter_pattern",
        expected="an expression in by_parameter that is the first to match some parameter",
        got=unused[0],
        fix="correct it, put it before those that match the same parameters, or leave it out",
      )
    return tree

  transformations = {
    str(number): optax.set_to_zero() if optimizer is None else optimizer
    for number, (_, optimizer) in enumerate(optimizers)
  }

  def with_axes(axes: Axes) -> optax.GradientTransformation:
    return by_parameter([(pattern, optimizer and bind(optimizer, axes)) for pattern, optimizer in optimizers])

  return AxesTransformation.make(
    optax.multi_transform(transformations, numbers),
    made_by=by_parameter,
    arguments={"optimizers": [list(pair) for pair in optimizers]},
    with_axes=with_axes,
  )


def _number(patterns: ParameterPatterns, path: str) -> str:
  patterns.find(path)
  return str(patterns.index(path))
