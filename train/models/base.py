"""Protocol of models: what the trainer, checkpoints and evaluation need of one, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from anystep.features.converters import FeatureConverter
from anystep.train.decoding.steps import DecodeFn

Tree = Any
"""Nested dicts of arrays."""
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
REPORTED_SUMS = ("loss", "z_loss", "weight_sum", "correct", "num_targets")


@runtime_checkable
class Model(Protocol):
  """A network with its loss, scores and optimizer."""

  @property
  def feature_converter(self) -> FeatureConverter:
    """Converter from tasks' features to this model's batches."""

  @property
  def optimizer_def(self) -> optax.GradientTransformation | None:
    """Optimizer of the parameters; the trainer runs it."""

  @property
  def vocabularies(self) -> Mapping[str, Any]:
    """Vocabulary by task feature, which the trainer compares with the tasks'; None for any."""

  @property
  def vocab_size(self) -> int | None:
    """Number of token ids that the network knows; None if it does not say."""

  def initial_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """Return initial values by collection: `params`, float32, and mutable collections such as `batch_stats`.

    Args:
      rng: JAX random key.
    """

  def logical_axes(self) -> dict[str, Tree]:
    """Return a PartitionSpec of logical axis names, such as ('embed', 'mlp'), for each initial variable."""

  def loss_fn(self, params: Tree, batch: Batch, rng: jax.Array | None = None) -> tuple[jax.Array, Metrics]:
    """Return the loss to minimise, and sums for reports.

    Args:
      params: the parameters.
      batch: arrays of shape (rows, length) by feature.
      rng: a JAX random key for dropout, or (rows,) of them, one for each row; None for no dropout.

    Returns:
      loss: () float32.
      metrics: sums over the batch's targets, all () float32. Each target times its weight: `loss` (before any
        division), `z_loss` (the part of it that is) and `weight_sum`. Each target of any weight but 0 once:
        `correct` (those that have the highest logit) and `num_targets`.
    """

  def score_batch(self, params: Tree, batch: Batch) -> dict[str, jax.Array]:
    """Return log-likelihoods of the targets, without dropout, z-loss or label smoothing.

    Args:
      params: the parameters.
      batch: as of `loss_fn`.

    Returns:
      scores: (rows,) float32, the sum of each row's token_scores.
      token_scores: (rows, length) float32, the log-likelihood of each target times its weight.
      predictions: (rows, length) int32, the likeliest token after the targets before it.
    """


def check_model(value: object) -> None:
  """Refuse what is no model, such as a class that was not called.

  Raises:
    ValueError: names what a model has and this lacks.
  """
  if isinstance(value, type):
    raise ValueError(
      f"model: expected a model, as @models.EncoderDecoderModel() with parentheses, got {value}"
    )
  names = [name for name in vars(Model) if not name.startswith("_")]
  missing = [name for name in names if inspect.getattr_static(value, name, names) is names]
  if missing:
    raise ValueError(f"model: expected a model, got {value!r:.200}, which has no {', '.join(missing)}")


@runtime_checkable
class PredictingModel(Model, Protocol):
  """A model that decodes sequences."""

  def predict_batch(self, params: Tree, batch: Batch, **options: Any) -> jax.Array:
    """Return the first of what `predict_batch_with_aux` returns."""

  def predict_batch_with_aux(
    self,
    params: Tree,
    batch: Batch,
    *,
    decode_fn: DecodeFn = ...,
    num_decodes: int = 1,
    keys: jax.Array | None = None,
    return_all_decodes: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return decoded sequences and their scores.

    Args:
      params: the parameters.
      batch: arrays of shape (rows, length) by feature, one example in each row.
      decode_fn: `decoding.temperature_sample` or `decoding.beam_search`, with `functools.partial` where it
        takes more than `decoding.steps.DecodeFn` names, or a function of one's own. By default decoding is
        greedy, and scores are log-likelihoods.
      num_decodes: number of beams or samples.
      keys: (rows,) JAX random keys, see `decoding.example_keys`, for functions that draw; else None.
      return_all_decodes: whether to return all decodes, by rising score, and not only the one with the
        highest.

    Returns:
      sequences: (rows, length) int32, or (rows, num_decodes, length); 0 after the end of sequence.
      aux: `scores`, (rows,) float32 or (rows, num_decodes).
    """


@runtime_checkable
class MutableModel(Model, Protocol):
  """A model with mutable collections, which the training state carries; they are given to every call."""

  def loss_and_mutables(
    self, params: Tree, batch: Batch, rng: jax.Array | None, mutables: Mapping[str, Tree]
  ) -> tuple[jax.Array, tuple[Metrics, dict[str, Tree]]]:
    """Return what `loss_fn` does, and the mutable collections after the step."""

  def score_batch(
    self, params: Tree, batch: Batch, mutables: Mapping[str, Tree] | None = None
  ) -> dict[str, jax.Array]:
    """Return what `Model.score_batch` does; the mutable collections stay as they are."""
