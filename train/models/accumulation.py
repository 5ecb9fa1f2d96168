"""Gradients of a batch in parts, for batches whose activations do not fit in memory at once."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from anystep.errors import AnystepError, ExitCode
from anystep.limits import is_count
from anystep.train.models.base import Batch, Metrics, Model, MutableModel, Tree
from anystep.train.models.teacher_forcing import make_row_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
  """Gradients of a batch, and what came with them.

  Attributes:
    loss: () float32, the loss that is minimised.
    metrics: sums for reports, see `base.Model.loss_fn`.
    gradients: tree of float32 arrays like the parameters.
    mutables: mutable collections of the model after the step; most models have none.
  """

  loss: jax.Array
  metrics: Metrics
  gradients: Tree
  mutables: dict[str, Tree]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatches(abc.ABC):
  """Split of a batch into microbatches, whose gradients are computed one after another and added in float32.

  Attributes:
    num_microbatches: their number, a divisor of the batch's rows; 1 computes all rows at once.

  Raises:
    AnystepError: 78 `num_microbatches`.
  """

  num_microbatches: int = 1

  def __post_init__(self):
    if not is_count(self.num_microbatches, least=1):
      raise AnystepError(
        ExitCode.CONFIG,
        "num_microbatches",
        expected="a whole number of at least 1",
        got=self.num_microbatches,
        fix="correct NUM_MICROBATCHES",
      )

  def gradients(
    self, model: Model, params: Tree, batch: Batch, rng: jax.Array | None, mutables: Mapping[str, Tree]
  ) -> Gradients:
    """Return the gradients of a batch.

    Args:
      model: computes the loss.
      params: the parameters.
      batch: arrays of shape (rows, ...) by feature.
      rng: a JAX random key for dropout; None for none.
      mutables: mutable collections of the model.

    Raises:
      AnystepError: 78 `num_microbatches` if they do not divide the rows, or the model has no `normalized`.
    """
    if self.num_microbatches == 1:
      return _gradients(model, params, batch, rng, mutables)
    num_rows = next(iter(batch.values())).shape[0]
    self.check(model, num_rows)
    unit = self.unit_rows(model, num_rows)
    before = dict(mutables)
    rows = {"batch": self.whole_batch(model, batch), "rng": make_row_keys(rng, batch)}
    parts = jax.tree.map(lambda array: _split(array, self.num_microbatches, unit), rows)

    def add(sums: tuple[Any, Any], part: dict[str, Any]) -> tuple[tuple[Any, Any], Any]:
      total, mutables = sums
      computed = _gradients(model, params, part["batch"], part["rng"], mutables)
      total = jax.tree.map(jnp.add, total, _sums(computed))
      return (total, computed.mutables if self.passes_mutables else before), computed.mutables

    first = jax.tree.map(lambda array: array[0], parts)
    shapes = jax.eval_shape(lambda: _sums(_gradients(model, params, first["batch"], first["rng"], before)))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    ((loss, metrics, gradients), last), after = jax.lax.scan(add, (zeros, before), parts)
    after = last if self.passes_mutables else average_mutables(after)
    return Gradients(loss=loss, metrics=metrics, gradients=gradients, mutables=after)

  def check(self, model: Model, num_rows: int) -> None:
    """Refuse a batch that cannot be split, or a model that cannot be trained in parts.

    Raises:
      AnystepError: 78 `num_microbatches`, `rows_per_key`.
    """
    unit = self.unit_rows(model, num_rows)
    if num_rows % (unit * self.num_microbatches):
      raise AnystepError(
        ExitCode.CONFIG,
        "num_microbatches",
        expected=_divisors(num_rows, unit),
        got=self.num_microbatches,
        fix="choose another NUM_MICROBATCHES or BATCH_SIZE, or another models.FlaxModel.rows_per_key",
      )

  @property
  @abc.abstractmethod
  def decides_numbers(self) -> bool:
    """Return whether their number decides gradients, and not only how sums are rounded."""

  @property
  @abc.abstractmethod
  def passes_mutables(self) -> bool:
    """Return whether a microbatch gets the mutable collections that the one before left."""

  @abc.abstractmethod
  def whole_batch(self, model: Model, batch: Batch) -> Batch:
    """Return the batch with what a microbatch needs of the whole."""

  @abc.abstractmethod
  def unit_rows(self, model: Model, num_rows: int) -> int:
    """Return the number of neighbouring rows that stay together: unit i is in microbatch i mod K."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeBatchGradients(Microbatches):
  """Microbatches that together give the gradient of the whole batch, whatever their number.

  Losses are divided by what the whole batch holds, and dropout is keyed by row. Row i is in microbatch i mod
  K, so that every device has rows of each; rows that share a key stay together. Mutable collections are
  averaged over the microbatches.
  """

  decides_numbers: ClassVar[bool] = False
  passes_mutables: ClassVar[bool] = False

  def check(self, model: Model, num_rows: int) -> None:
    super().check(model, num_rows)
    if self.num_microbatches > 1 and not hasattr(model, "normalized"):
      raise AnystepError(
        ExitCode.CONFIG,
        "num_microbatches",
        expected=f"1 for {type(model).__name__}, which has no method `normalized`",
        got=self.num_microbatches,
        fix="give the model one, which returns a batch whose rows' losses add up to the batch's",
      )

  def whole_batch(self, model: Model, batch: Batch) -> Batch:
    return model.normalized(batch)  # type: ignore[attr-defined]

  def unit_rows(self, model: Model, num_rows: int) -> int:
    return _rows_together(model, num_rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5XMicrobatches(Microbatches):
  """Microbatches as T5X has them, to repeat a run of T5X.

  Each is a slice of neighbouring rows, and divides its loss by what it holds itself; the sum is about K times
  the whole batch's loss under 'NUM_REAL_TARGET_TOKENS' and 'AVERAGE_PER_SEQUENCE', and weighs tokens by how
  many others are in their microbatch.
  """

  passes_mutables: ClassVar[bool] = True

  @property
  def decides_numbers(self) -> bool:
    return self.num_microbatches > 1

  def check(self, model: Model, num_rows: int) -> None:
    super().check(model, num_rows)
    _rows_together(model, num_rows // self.num_microbatches)

  def whole_batch(self, model: Model, batch: Batch) -> Batch:
    return batch

  def unit_rows(self, model: Model, num_rows: int) -> int:
    return num_rows // self.num_microbatches if num_rows % self.num_microbatches == 0 else 1


WHOLE_BATCH = WholeBatchGradients()


def average_mutables(stacked: Tree) -> Tree:
  """Return mutable collections of parts of a batch as those of the whole.

  Args:
    stacked: mutable collections with a first axis that counts the parts.

  Returns:
    The parts' mean; of what has none, such as counters and keys, the first part's.
  """

  def average(leaf: jax.Array) -> jax.Array:
    return jnp.mean(leaf, axis=0) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0]

  return jax.tree.map(average, stacked)


def _divisors(num_rows: int, unit: int) -> str:
  if unit == num_rows:
    return f"1, since the model computes all {num_rows} rows together"
  return f"a divisor of {num_rows // unit}, the batch's " + (
    "rows" if unit == 1 else f"groups of {unit} rows"
  )


def _rows_together(model: Model, num_rows: int) -> int:
  """Return the number of neighbouring rows that a model computes together, with one key."""
  rows_together = getattr(model, "rows_together", None)
  return 1 if rows_together is None else rows_together(num_rows)


def _gradients(
  model: Model, params: Tree, batch: Batch, rng: jax.Array | None, mutables: Mapping[str, Tree]
) -> Gradients:
  """Return the gradients of all rows at once."""
  if mutables:
    assert isinstance(model, MutableModel), "its state has mutable collections"
    loss_fn = jax.value_and_grad(model.loss_and_mutables, has_aux=True)
    (loss, (metrics, after)), gradients = loss_fn(params, batch, rng, mutables)
  else:
    (loss, metrics), gradients = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, rng)
    after = {}
  gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
  return Gradients(loss=loss, metrics=metrics, gradients=gradients, mutables=after)


def _sums(gradients: Gradients) -> tuple[jax.Array, Metrics, Tree]:
  return gradients.loss, gradients.metrics, gradients.gradients


def _split(array: jax.Array, num_microbatches: int, unit: int) -> jax.Array:
  """Return the microbatches of an array of rows: (num_microbatches, rows of one, ...)."""
  shape = array.shape[1:]
  units = array.reshape(-1, num_microbatches, unit, *shape)
  return jnp.moveaxis(units, 1, 0).reshape(num_microbatches, -1, *shape)
