"""Feature converters: from a task's features to a model's, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from anystep.errors import AnystepError, ExitCode, nearest
from anystep.examples import Batch, Ragged

Rows = dict[str, Any]
"""Features of several rows: arrays of shape `(rows, length, ...)` or `(rows,)`, `Ragged` where not padded."""


class FeatureConverter(Protocol):
  """Makes a model's rows of a task's features."""

  def __call__(self, batch: Batch, feature_lengths: Mapping[str, int]) -> Rows:
    """Converts rows.

    Args:
      batch: the task's features.
      feature_lengths: tokens per task feature that rows are cut and filled to.
    """
    ...


class PassThroughConverter:
  """Leaves features as they are; sequences that have a length are cut and filled with zeros to it."""

  def __call__(self, batch: Batch, feature_lengths: Mapping[str, int]) -> Rows:
    """See `FeatureConverter`; a sequence without a length stays ragged."""
    return {
      name: feature.to_padded(feature_lengths[name])
      if isinstance(feature, Ragged) and name in feature_lengths
      else feature
      for name, feature in batch.items()
    }


class EncoderDecoderConverter:
  """inputs and targets to an encoder-decoder's features, one example a row.

  Names, dtypes and values are those of `seqio.EncDecFeatureConverter(pack=False)`.
  """

  TASK_FEATURES: ClassVar[tuple[str, ...]] = ("inputs", "targets")

  def __call__(self, batch: Batch, feature_lengths: Mapping[str, int]) -> Rows:
    """Converts rows: `encoder_input_tokens`, and for the decoder targets, inputs and loss weights."""
    targets = padded(batch, "targets", feature_lengths)
    return {
      "encoder_input_tokens": padded(batch, "inputs", feature_lengths),
      "decoder_target_tokens": targets,
      "decoder_input_tokens": shifted_right(targets),
      "decoder_loss_weights": (targets != 0).astype(np.int32),
    }


def padded(batch: Batch, name: str, feature_lengths: Mapping[str, int]) -> np.ndarray:
  """A feature as `(rows, length, ...)`.

  Raises:
    AnystepError: 78 `feature_missing`, `feature_length`.
  """
  feature = batch.get(name)
  if not isinstance(feature, Ragged):
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_missing",
      expected=name,
      got=", ".join(sorted(batch)),
      fix="choose the model's feature converter for a task that has the features it takes",
    )
  if name not in feature_lengths:
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_length",
      expected=f"a length for {name}",
      got=dict(feature_lengths),
      fix=f"add {name!r} to TASK_FEATURE_LENGTHS (named there now: {nearest(name, feature_lengths)})",
    )
  return feature.to_padded(feature_lengths[name])


def shifted_right(targets: np.ndarray) -> np.ndarray:
  """A decoder's inputs: targets one place later, id 0 first; `(rows, length)`.

  >>> shifted_right(np.array([[5, 6, 1, 0]]))
  array([[0, 5, 6, 1]])
  """
  inputs = np.empty_like(targets)
  inputs[:, :1] = 0
  inputs[:, 1:] = targets[:, :-1]
  return inputs
