"""Training state, and the training step that updates it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.train.models.accumulation import WHOLE_BATCH, Microbatches
from anystep.train.models.base import REPORTED_SUMS, Batch, Metrics, Model
from anystep.train.optimizers.learning_rates import find_learning_rates
from anystep.train.optimizers.logical_axes import with_logical_axes
from anystep.train.optimizers.parameter_patterns import parameter_path
from anystep.train.partitioning.partitioner import Partitioner, optimizer_shardings


@flax.struct.dataclass
class TrainState:
  """State of training.

  Attributes:
    step: number of steps done.
    params: the parameters.
    opt_state: the optimizer's state.
    mutables: mutable collections of the model, such as batch statistics; most models have none.
  """

  step: Any
  params: Any
  opt_state: Any
  mutables: dict[str, Any] = flax.struct.field(default_factory=dict)


def stream_key(root_key: jax.Array, stream: str, step: jax.Array | int) -> jax.Array:
  """Return the key of a named random stream at a step (docs/order.md#draws-after-the-cache)."""
  number = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=4).digest(), "little")
  return jax.random.fold_in(jax.random.fold_in(root_key, np.uint32(number)), step)


def initialize(
  model: Model,
  optimizer: optax.GradientTransformation,
  *,
  root_key: jax.Array,
  mesh: Mesh,
  partitioner: Partitioner,
) -> tuple[Callable[..., TrainState], TrainState]:
  """Return a function that makes the initial state, and the abstract state.

  Returns:
    The function places the state on the mesh. It takes arrays by parameter path, which stand in the place of
    initial parameters, and from which the optimizer's state begins. The abstract state has shapes, dtypes and
    shardings.
  """
  logical_axes = model.logical_axes()
  mutable_shardings = partitioner.shardings(mesh, logical_axes)
  optimizer = with_logical_axes(optimizer, logical_axes["params"])
  param_shardings = mutable_shardings.pop("params")

  def init(restored: Mapping[str, jax.Array] | None = None) -> TrainState:
    mutables = model.initial_variables(stream_key(root_key, "params", 0))
    params = jax.lax.with_sharding_constraint(mutables.pop("params"), param_shardings)
    if restored:
      params = jax.tree_util.tree_map_with_path(
        lambda keys, leaf: restored.get(parameter_path(keys), leaf), params
      )
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), mutables)

  shapes = jax.eval_shape(init)
  partitioner.check_divides(shapes.params, param_shardings)
  partitioner.check_divides(shapes.mutables, mutable_shardings)
  replicated = NamedSharding(mesh, PartitionSpec())
  opt_shardings = optimizer_shardings(mesh, optimizer.init, shapes.params, param_shardings)
  shardings = TrainState(replicated, param_shardings, opt_shardings, mutable_shardings)
  abstract = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
  )
  return jax.jit(init, out_shardings=shardings), abstract


def make_train_step(
  model: Model,
  optimizer: optax.GradientTransformation,
  *,
  root_key: jax.Array,
  microbatches: Microbatches = WHOLE_BATCH,
  abstract: TrainState | None = None,
  partitioner: Partitioner | None = None,
  norms_depth: int = 0,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Return the compiled training step. It reuses the memory of the state that it is given.

  Beside the model's metrics it returns `gradient_norm`, `update_norm` and `parameter_norm` (before the
  update), and the optimizer's learning rates as `find_learning_rates` names them.

  Args:
    model: computes the loss.
    optimizer: updates the parameters.
    root_key: JAX random key of the run.
    microbatches: split of a batch whose activations do not fit in memory at once.
    abstract: the state that `initialize` describes: the new state is split over devices as it is. None for
      what the compiler chooses.
    partitioner: splits activations over the devices of the abstract state; None for what the compiler
      chooses.
    norms_depth: number of a parameter's first names that make a module's; each has norms of its own, such as
      `gradient_norm/decoder/layers_0` for 2. 0 for none.
  """
  rates = find_learning_rates(optimizer)
  optimizer = with_logical_axes(optimizer, model.logical_axes()["params"])

  shardings = None if abstract is None else jax.tree.map(lambda leaf: leaf.sharding, abstract)
  split_activations: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
  if shardings is not None and partitioner is not None:
    split_activations = functools.partial(partitioner.sharded_activations, shardings.step.mesh)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    dropout_key = stream_key(root_key, "dropout", state.step)
    with split_activations():
      computed = microbatches.gradients(model, state.params, batch, dropout_key, state.mutables)
    _check_sums(model, computed.metrics)
    updates, opt_state = _update(optimizer, computed.gradients, state)
    params = optax.apply_updates(state.params, updates)
    metrics = dict(computed.metrics)
    trees = {"gradient_norm": computed.gradients, "update_norm": updates, "parameter_norm": state.params}
    for name, tree in trees.items():
      metrics |= norms_by_module(name, tree, norms_depth)
    # The rate of this update: as in T5X, that of the steps done before it.
    metrics |= {name: jnp.asarray(rate(state.step), jnp.float32) for name, rate in rates.items()}
    return TrainState(state.step + 1, params, opt_state, computed.mutables), metrics

  return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def norms_by_module(name: str, tree: Any, depth: int) -> Metrics:
  """Return the norm of all leaves under `name`, and of each module's under `name/MODULE`.

  Args:
    name: name of the norm of all leaves.
    tree: nested dicts of arrays.
    depth: number of a leaf's first names that make its module's; 0 for no modules.
  """
  squares: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    module = "/".join([name, *(jax.tree_util.keystr((key,), simple=True) for key in path[:-1][:depth])])
    squares[module] = squares.get(module, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
  norms = {module: jnp.sqrt(square) for module, square in squares.items()}
  return norms | {name: jnp.sqrt(sum(squares.values(), jnp.float32(0.0)))}


def _check_sums(model: Model, metrics: Metrics) -> None:
  """Refuse a model of one's own that does not return the sums for reports.

  Raises:
    AnystepError: 78 `module`.
  """
  missing = [name for name in REPORTED_SUMS if name not in metrics]
  if missing:
    raise AnystepError(
      ExitCode.CONFIG,
      "module",
      module=type(model).__name__,
      expected=f"the sums {', '.join(REPORTED_SUMS)} from its loss_fn",
      got=f"no {', '.join(missing)}",
      fix="return them as anystep.train.models.base.Model describes",
    )


def _update(optimizer: optax.GradientTransformation, gradients: Any, state: TrainState) -> tuple[Any, Any]:
  """Return the optimizer's updates of the parameters, and its new state.

  Raises:
    AnystepError: 78 `optimizer` if it takes more than gradients, state and parameters, or an argument that it
      was made with is none that it can compute with.
  """
  try:
    return optimizer.update(gradients, state.opt_state, state.params)
  except (TypeError, ValueError) as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "optimizer",
      expected="an optimizer whose updates follow from gradients, its state and the parameters",
      got=one_line(error),
      fix="correct its arguments, or choose one without a line search; a schedule is called where a gin file"
      " names it: @optax.cosine_decay_schedule()",
    ) from error
