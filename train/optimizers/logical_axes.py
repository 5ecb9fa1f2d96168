"""Transformations that depend on the logical axes of the parameters, which optax does not pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from anystep.errors import AnystepError, ExitCode
from anystep.train.configuration.built_values import Transformation
from anystep.train.optimizers.parameter_patterns import parameter_path

# Names of the axes of each parameter, by its path.
Axes = Mapping[str, Sequence[str | None]]


class AxesTransformation(Transformation):
  """Optax transformation that can be made again with the parameters' logical axes.

  Attributes:
    with_axes: function from the axes to the transformation that knows them.
  """

  with_axes: Callable[[Axes], optax.GradientTransformation]

  @classmethod
  def make(
    cls,
    transformation: optax.GradientTransformation,
    *,
    made_by: Callable,
    arguments: Mapping[str, Any],
    with_axes: Callable[[Axes], optax.GradientTransformation],
  ) -> AxesTransformation:
    """Return the same transformation, with what made it."""
    made = cls.of(optax.with_extra_args_support(transformation), made_by, arguments)
    assert isinstance(made, cls)
    made.with_axes = with_axes
    return made


def with_logical_axes(optimizer: optax.GradientTransformation, logical_axes: Any) -> Any:
  """Return an optimizer that knows the parameters' logical axes, for updates that depend on them.

  Args:
    optimizer: any; one of optax itself is returned as it is.
    logical_axes: tree of PartitionSpecs or tuples of names, like the parameters; None for one without names.
  """

  def is_spec(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, tuple))

  leaves = jax.tree_util.tree_flatten_with_path(logical_axes, is_leaf=is_spec)[0]
  # A parameter without a box has an empty PartitionSpec: its axes have no names.
  return bind(optimizer, {parameter_path(keys): tuple(spec) for keys, spec in leaves if spec})


def bind(optimizer: optax.GradientTransformation, axes: Axes) -> optax.GradientTransformation:
  """Return an optimizer that knows the axes, if it depends on them; else itself."""
  return optimizer.with_axes(axes) if isinstance(optimizer, AxesTransformation) else optimizer


def chain(transformations: Sequence[optax.GradientTransformation]) -> optax.GradientTransformation:
  """Apply transformations of gradients one after another, as `optax.chain` does, for gin files.

  Args:
    transformations: the first one gets the gradients, the last one's results are added to the parameters.

  Returns:
    An optax transformation.

  Raises:
    AnystepError: 78 `optimizer` if there is none, or one is no transformation.
  """
  arguments = {"transformations": list(transformations)}
  for transformation in arguments["transformations"]:
    check_transformation("chain", transformation)
  if not transformations:
    raise AnystepError(
      ExitCode.CONFIG, "optimizer", expected="a transformation", got="none", fix="list some in chain"
    )
  return AxesTransformation.make(
    optax.chain(*transformations),
    made_by=chain,
    arguments=arguments,
    with_axes=lambda axes: chain([bind(transformation, axes) for transformation in transformations]),
  )


def check_transformation(where: str, value: object) -> None:
  """Refuse what is no optax transformation, such as a class or function that was not called.

  Raises:
    AnystepError: 78 `optimizer`.
  """
  if not isinstance(value, optax.GradientTransformation):
    raise AnystepError(
      ExitCode.CONFIG,
      "optimizer",
      expected=f"optax transformations in {where}",
      got=repr(value)[:200],
      fix="call what makes it: @optax.adamw() in a gin file, with parentheses",
    )
