"""Feature converters: from a task's features to a model's, in numpy.

A row is one example, or several where rows are packed (`counts`). Names, dtypes and values are those of
SeqIO's converters of `pack=False`, to the bit, and of `pack=True` where sequences have no id 0 in them and
none is empty. There SeqIO goes by values and we by lengths: an id 0 inside a packed sequence is a token like
others, with its place, segment and loss weight, and segment j is a row's j-th example in every feature.
(Unpacked, a target of id 0 has no loss weight: SeqIO's rule.) Sequences longer than their length are cut,
as with `apply_length_check=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from anystep.errors import AnystepError, ExitCode, nearest
from anystep.features.packed_rows import Spans, packed_spans, segment_numbers
from anystep.features.ragged import Batch, Ragged, padding

Rows = dict[str, Any]
"""Features of several rows: arrays of shape `(rows, length, ...)` or `(rows,)`, `Ragged` where not padded."""


class FeatureConverter(Protocol):
  """Makes a model's rows of a task's features."""

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Converts rows.

    Args:
      batch: the task's features, of `sum(counts)` examples.
      feature_lengths: tokens per task feature that rows are cut and filled to.
      counts: `(rows,) int64`, examples of each row, in order: rows are packed, and hold their examples'
        sequences, each cut to its feature's length, one behind the other. None where each example is a row.
    """
    ...


class PassThroughConverter:
  """Leaves features as they are; sequences that have a length are cut and filled with zeros to it.

  Packed, as `seqio.trim_and_pack_dataset`, but in the features' own dtypes: sequences of rank 1 that have a
  length, each with `{feature}_segment_ids` and `{feature}_positions`; other features are left out.
  """

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """See `FeatureConverter`; unpacked, a sequence without a length stays ragged."""
    rows: Rows = {}
    for name, feature in batch.items():
      if isinstance(feature, Ragged) and name in feature_lengths:
        if counts is None or feature.values.ndim == 1:
          tokens = _tokens(feature, feature_lengths[name], counts)
          rows |= {name: tokens.values, **tokens.segments(name)}
      elif counts is None:
        rows[name] = feature
    return rows


class EncoderDecoderConverter:
  """inputs and targets to an encoder-decoder's features, as `seqio.EncDecFeatureConverter`.

  Args:
    bos_id: what the decoder reads before a sequence's first token.
  """

  def __init__(self, *, bos_id: int = 0):
    self.bos_id = bos_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Converts rows: `encoder_input_tokens`, and for the decoder targets, inputs and loss weights."""
    inputs = _tokens(*_sequence(batch, "inputs", feature_lengths, rank_1=counts is not None), counts)
    targets = _tokens(*_sequence(batch, "targets", feature_lengths, rank_1=counts is not None), counts)
    return {
      "encoder_input_tokens": inputs.values,
      **_decoder_features(targets, self.bos_id),
      **inputs.segments("encoder"),
    }


class LMConverter:
  """targets to a language model's features, as `seqio.LMFeatureConverter`.

  Args:
    bos_id: what the decoder reads before a sequence's first token.
  """

  def __init__(self, *, bos_id: int = 0):
    self.bos_id = bos_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Converts rows: the decoder's targets, inputs and loss weights."""
    targets = _tokens(*_sequence(batch, "targets", feature_lengths, rank_1=counts is not None), counts)
    return _decoder_features(targets, self.bos_id)


class PrefixLMConverter:
  """inputs and targets to one sequence each for a decoder, as `seqio.PrefixLMFeatureConverter`.

  Rows are as long as the lengths of inputs and targets together. Unpacked, an example's inputs and targets
  are joined and then cut, so that long inputs push targets out; packed, each is cut to its own length first,
  which is what rows were packed for. Unpacked with loss on targets only, an id 0 inside the inputs has loss
  weight 1: SeqIO's rule.

  Args:
    loss_on_targets_only: whether inputs have loss weight 0.
    bos_id: what the decoder reads before a sequence's first token.
  """

  def __init__(self, *, loss_on_targets_only: bool = True, bos_id: int = 0):
    self.loss_on_targets_only = loss_on_targets_only
    self.bos_id = bos_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Converts rows: the decoder's targets, inputs, loss weights, and `decoder_causal_attention`.

    The latter is 1 where attention sees all of an example's inputs: on these and on the first target.
    """
    inputs, inputs_length = _sequence(batch, "inputs", feature_lengths, rank_1=True)
    targets, targets_length = _sequence(batch, "targets", feature_lengths, rank_1=True)
    length = inputs_length + targets_length
    if counts is None:
      num_inputs = np.minimum(inputs.lengths, length)
      num_targets = np.minimum(targets.lengths, length - num_inputs)
      # SeqIO takes a target of padding where there is none.
      num_visible = np.minimum(num_inputs + 1, length)
    else:
      num_inputs = np.minimum(inputs.lengths, inputs_length)
      num_targets = np.minimum(targets.lengths, targets_length)
      num_visible = np.minimum(num_inputs + 1, num_inputs + num_targets)

    whole = packed_spans(num_inputs + num_targets, _counts_or_ones(counts, inputs), length)
    starts = whole.starts

    def part(part_starts: np.ndarray, lengths: np.ndarray) -> Spans:
      return Spans(rows=whole.rows, starts=part_starts, lengths=lengths, shape=whole.shape)

    inputs_part, targets_part = part(starts, num_inputs), part(starts + num_inputs, num_targets)
    values = padding(whole.shape, targets.values.dtype)
    inputs_part.write(inputs, values)
    targets_part.write(targets, values)
    tokens = Tokens(values) if counts is None else Tokens(values, *_numbers(whole, counts))
    features = _decoder_features(tokens, self.bos_id)
    if self.loss_on_targets_only and counts is None:
      features["decoder_loss_weights"] ^= inputs_part.marked()
    elif self.loss_on_targets_only:
      features["decoder_loss_weights"] = targets_part.marked()
    return {**features, "decoder_causal_attention": part(starts, num_visible).marked()}


class DecoderConverter:
  """A decoder's features as `seqio.DecoderFeatureConverter`: a prefix LM's where inputs have a length.

  Args:
    loss_on_targets_only, bos_id: see `PrefixLMConverter`.
  """

  def __init__(self, *, loss_on_targets_only: bool = True, bos_id: int = 0):
    self._prefix_lm = PrefixLMConverter(loss_on_targets_only=loss_on_targets_only, bos_id=bos_id)
    self._lm = LMConverter(bos_id=bos_id)

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Converts rows as `PrefixLMConverter` or `LMConverter`.

    Raises:
      AnystepError: 78 `feature_unsupported` where suffixes have a length.
    """
    if "suffixes" in feature_lengths:
      raise AnystepError(
        ExitCode.CONFIG,
        "feature_unsupported",
        expected="lengths of inputs and targets",
        got=dict(feature_lengths),
        fix="use anystep.tasks.converters.SeqioConverter(seqio.PrefixSuffixLMFeatureConverter(...))",
      )
    convert = self._prefix_lm if "inputs" in feature_lengths else self._lm
    return convert(batch, feature_lengths, counts)


class EncoderConverter:
  """inputs and targets, aligned, to an encoder's features, as `seqio.EncoderFeatureConverter`.

  Args:
    mask_id: the id of inputs where the loss is taken. (Padding of a packed row has none, even for id 0.)
  """

  def __init__(self, *, mask_id: int):
    self.mask_id = mask_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Converts rows: the encoder's inputs, targets and loss weights."""
    inputs = _tokens(*_sequence(batch, "inputs", feature_lengths, rank_1=counts is not None), counts)
    targets = _tokens(*_sequence(batch, "targets", feature_lengths, rank_1=counts is not None), counts)
    masked = inputs.values == self.mask_id
    if inputs.segment_ids is not None:
      masked &= inputs.segment_ids > 0
    return {
      "encoder_input_tokens": inputs.values,
      "encoder_target_tokens": targets.values,
      "encoder_loss_weights": masked.astype(np.int32),
      **inputs.segments("encoder"),
    }


class MaxTextConverter:
  """targets to a language model's features under MaxText's names, packed or not.

  `targets` are the tokens and `inputs` the same one place later within each example, id 0 first. (MaxText's
  own pipeline once did this; now it moves the targets one place forward instead, and so has no loss on an
  example's first token.) `{inputs,targets}_segmentation` number a row's examples from 1 and are 0 on
  padding, `{inputs,targets}_position` count each example's tokens from 0.
  """

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """See `FeatureConverter`."""
    feature, length = _sequence(batch, "targets", feature_lengths, rank_1=True)
    targets = _tokens(feature, length, _counts_or_ones(counts, feature))
    rows: Rows = {
      "inputs": shifted_right(targets.values, targets.segment_ids),
      "targets": targets.values,
    }
    for name in ("inputs", "targets"):
      # Arrays of their own: MaxText changes some in place.
      rows[f"{name}_segmentation"] = np.array(targets.segment_ids)
      rows[f"{name}_position"] = np.array(targets.positions)
    return rows


class Tokens(NamedTuple):
  """A feature's sequences in rows.

  Attributes:
    values: `(rows, length, ...)`, zeros behind the last token.
    segment_ids: `(rows, length) int32`, from 1 a row's examples, 0 on padding. None where not packed.
    positions: `(rows, length) int32`, from 0 each example's tokens, 0 on padding. None where not packed.
  """

  values: np.ndarray
  segment_ids: np.ndarray | None = None
  positions: np.ndarray | None = None

  def segments(self, name: str) -> Rows:
    """The packed features' own ids under a model feature's name."""
    if self.segment_ids is None:
      return {}
    return {f"{name}_segment_ids": self.segment_ids, f"{name}_positions": self.positions}


def shifted_right(
  targets: np.ndarray, segment_ids: np.ndarray | None = None, *, bos_id: int = 0
) -> np.ndarray:
  """A decoder's inputs: targets one place later, bos_id before each sequence's first; `(rows, length)`.

  >>> shifted_right(np.array([[5, 6, 1, 0]]))
  array([[0, 5, 6, 1]])
  >>> shifted_right(np.array([[5, 1, 7, 1, 0]]), np.array([[1, 1, 2, 2, 0]]), bos_id=3)
  array([[3, 5, 3, 7, 3]])
  """
  inputs = np.empty_like(targets)
  inputs[:, :1] = bos_id
  inputs[:, 1:] = targets[:, :-1]
  if segment_ids is not None:
    inputs[:, 1:][segment_ids[:, 1:] != segment_ids[:, :-1]] = bos_id
  return inputs


def _decoder_features(targets: Tokens, bos_id: int) -> Rows:
  weights = targets.values != 0 if targets.segment_ids is None else targets.segment_ids > 0
  return {
    "decoder_target_tokens": targets.values,
    "decoder_input_tokens": shifted_right(targets.values, targets.segment_ids, bos_id=bos_id),
    "decoder_loss_weights": weights.astype(np.int32),
    **targets.segments("decoder"),
  }


def _tokens(feature: Ragged, length: int, counts: np.ndarray | None) -> Tokens:
  if counts is None:
    return Tokens(feature.to_padded(length))
  spans = packed_spans(np.minimum(feature.lengths, length), counts, length)
  values = padding(spans.shape, feature.values.dtype)
  spans.write(feature, values)
  return Tokens(values, *_numbers(spans, counts))


def _numbers(spans: Spans, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Segment ids and positions."""
  return spans.filled(segment_numbers(counts)), spans.positions()


def _counts_or_ones(counts: np.ndarray | None, feature: Ragged) -> np.ndarray:
  return np.ones(len(feature), np.int64) if counts is None else counts


def _sequence(
  batch: Batch, name: str, feature_lengths: Mapping[str, int], *, rank_1: bool
) -> tuple[Ragged, int]:
  """A feature that the model needs, and its length.

  Raises:
    AnystepError: 78 `feature_missing`, `feature_length`; `feature_rank` where it has to be of rank 1.
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
  if rank_1 and feature.values.ndim != 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_rank",
      feature=name,
      expected="rank 1",
      got=feature.values.ndim,
      fix="choose a converter that takes the feature as it is, unpacked, or make it of rank 1",
    )
  return feature, feature_lengths[name]
