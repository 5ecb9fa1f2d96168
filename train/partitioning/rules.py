"""Rules that give each logical axis of an array a mesh axis, and the four sets of them that T5X has."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding

from anystep.errors import AnystepError, ExitCode

MESH_AXES = ("data", "model")
LogicalAxisRules = Sequence[tuple[str, str | None]]

_SPLIT_BY_HEADS = (
  ("batch", "data"),
  ("vocab", "model"),
  ("mlp", "model"),
  ("heads", "model"),
  ("kv", None),
  ("joined_kv", "model"),
)
# By the numbers of mesh axes that activations and parameters are split over.
_EMBED: dict[tuple[int, int], tuple[tuple[str, str | None], ...]] = {
  (1, 1): (("embed", None),),
  (2, 1): (("embed", "model"),),
  (1, 2): (("embed", "data"),),
  (2, 2): (("embed", "model"), ("embed", "data")),
}
_NOT_SPLIT = tuple(
  (axis, None)
  for axis in ("relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations")
)


def standard_logical_axis_rules(
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules = (),
) -> LogicalAxisRules:
  """Return T5X's rules; the first rule of an axis counts whose mesh axis no other axis of the array has.

  With 1 and 1, layers are split over `model` as in Megatron-LM (Shoeybi et al. 2019). With 2 parameter
  dimensions, parameters and optimizer states are split over `data` too, and gathered for use (ZeRO stage 3,
  Rajbhandari et al. 2020). With 2 activation dimensions, activations between layers are split over `model`.

  Args:
    activation_partitioning_dims: number of mesh axes that activations are split over, 1 or 2.
    parameter_partitioning_dims: number of mesh axes that parameters are split over, 1 or 2.
    additional_rules: pairs of a logical axis and a mesh axis, or None for an axis that is not split; after
      the others.

  Raises:
    AnystepError: 78 `logical_axis_rules` for other numbers.

  >>> standard_logical_axis_rules(parameter_partitioning_dims=2)[6]
  ('embed', 'data')
  """
  dims = (activation_partitioning_dims, parameter_partitioning_dims)
  if dims not in _EMBED:
    raise AnystepError(
      ExitCode.CONFIG,
      "logical_axis_rules",
      expected="1 or 2 for activation_partitioning_dims and for parameter_partitioning_dims",
      got=dims,
      fix="correct the two numbers",
    )
  return (
    *_SPLIT_BY_HEADS,
    *_EMBED[dims],
    *_NOT_SPLIT,
    *((axis, mesh_axis) for axis, mesh_axis in additional_rules),
  )


STANDARD_RULES = standard_logical_axis_rules()


def check_rules(rules: object) -> None:
  """Refuse rules that are no pairs of a logical axis and a mesh axis.

  Raises:
    AnystepError: 78 `logical_axis_rules`.
  """
  for rule in rules if isinstance(rules, (list, tuple)) else [rules]:
    pair = tuple(rule) if isinstance(rule, (list, tuple)) else ()
    if len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in (*MESH_AXES, None):
      raise AnystepError(
        ExitCode.CONFIG,
        "logical_axis_rules",
        expected=f"pairs of a logical axis and {', '.join(map(repr, MESH_AXES))} or None",
        got=repr(rule)[:200],
        fix="correct the rule",
      )


_activation_sharding: contextvars.ContextVar[tuple[Mesh, LogicalAxisRules] | None] = contextvars.ContextVar(
  "activation_sharding", default=None
)


@contextlib.contextmanager
def sharded_activations(mesh: Mesh, rules: LogicalAxisRules) -> Iterator[None]:
  """Let `constrain` split activations over this mesh, in what is traced within the context."""
  token = _activation_sharding.set((mesh, rules))
  try:
    yield
  finally:
    _activation_sharding.reset(token)


def constrain(x: jax.Array, *axes: str) -> jax.Array:
  """Return an activation, split over the mesh as its logical axes say; outside of a run as it is.

  An axis whose size the devices do not divide is not split.

  Args:
    x: an array.
    axes: the names of its logical axes.
  """
  context = _activation_sharding.get()
  if context is None:
    return x
  mesh, rules = context
  spec = nn.logical_to_mesh_axes(axes, list(rules))
  assert spec is not None
  sizes = [1 if axis is None else mesh.shape[axis] for axis in spec]
  divided = [axis if n % size == 0 else None for axis, n, size in zip(spec, x.shape, sizes, strict=True)]
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, jax.sharding.PartitionSpec(*divided)))
