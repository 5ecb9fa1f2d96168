"""Feature converters: from a task's features to a model's, in numpy.

A row is one example, or several if rows are packed (`counts`). Unpacked, names, dtypes and values are
exactly those of SeqIO's converters with `pack=False`. Packed, they are those with `pack=True` if no sequence
is empty or contains id 0. Otherwise they differ, because SeqIO goes by values and we go by lengths: an id 0
inside a packed sequence is a token like others, with a position, segment and loss weight, and segment j is a
row's j-th example in every feature. (Unpacked, a target of id 0 has no loss weight: SeqIO's rule.) Sequences
longer than their length are cut, as with `apply_length_check=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.features.packed_rows import Spans, number_segments, pack_spans
from anystep.features.ragged import Batch, Ragged, make_padding

Rows = dict[str, Any]
"""Features of several rows: arrays of shape `(rows, length, ...)` or `(rows,)`, or `Ragged` if not padded."""


class FeatureConverter(Protocol):
  """Converter from a task's features to a model's rows."""

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Converts rows.

    Args:
      batch: the task's features, of `sum(counts)` examples.
      feature_lengths: number of tokens that each task feature is cut or padded to.
      counts: `(rows,) int64`, number of examples in each row, in order. A packed row holds the sequences of
        its examples one after the other, each cut to its feature's length. None if each example is a row.
    """
    ...


class PassThroughConverter:
  """Converter that keeps features; sequences that have a length are cut or padded with zeros to it.

  Packed rows are as of `seqio.trim_and_pack_dataset`, but in the features' own dtypes. They have the
  sequences of rank 1 that have a length, each with `{feature}_segment_ids` and `{feature}_positions`. Other
  features are left out.
  """

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """See `FeatureConverter`; unpacked, a sequence without a length stays ragged."""
    rows: Rows = {}
    for name, feature in batch.items():
      if isinstance(feature, Ragged) and name in feature_lengths:
        if counts is None or feature.values.ndim == 1:
          tokens = _to_tokens(feature, feature_lengths[name], counts)
          rows |= {name: tokens.values, **tokens.segments(name)}
      elif counts is None:
        rows[name] = feature
    return rows


class EncoderDecoderConverter:
  """Converter of inputs and targets for an encoder-decoder, as `seqio.EncDecFeatureConverter`.

  Args:
    bos_id: the decoder's input before a sequence's first token.
  """

  def __init__(self, *, bos_id: int = 0):
    self.bos_id = bos_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Convert rows: `encoder_input_tokens`, and the decoder's targets, inputs and loss weights."""
    inputs = _to_tokens(*_get_sequence(batch, "inputs", feature_lengths, rank_1=counts is not None), counts)
    targets = _to_tokens(*_get_sequence(batch, "targets", feature_lengths, rank_1=counts is not None), counts)
    return {
      "encoder_input_tokens": inputs.values,
      **_decoder_features(targets, self.bos_id),
      **inputs.segments("encoder"),
    }


class LMConverter:
  """Converter of targets for a language model, as `seqio.LMFeatureConverter`.

  Args:
    bos_id: the decoder's input before a sequence's first token.
  """

  def __init__(self, *, bos_id: int = 0):
    self.bos_id = bos_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Convert rows: the decoder's targets, inputs and loss weights."""
    targets = _to_tokens(*_get_sequence(batch, "targets", feature_lengths, rank_1=counts is not None), counts)
    return _decoder_features(targets, self.bos_id)


class PrefixLMConverter:
  """Converter of inputs and targets to one sequence for a decoder, as `seqio.PrefixLMFeatureConverter`.

  A row is as long as the lengths of inputs and targets together. Unpacked, an example's inputs and targets
  are joined and then cut, so that long inputs push targets out. Packed, each is first cut to its own length,
  for which the rows were packed. Unpacked with loss on targets only, an id 0 inside the inputs has loss
  weight 1: SeqIO's rule.

  Args:
    loss_on_targets_only: whether inputs have loss weight 0.
    bos_id: the decoder's input before a sequence's first token.
  """

  def __init__(self, *, loss_on_targets_only: bool = True, bos_id: int = 0):
    self.loss_on_targets_only = loss_on_targets_only
    self.bos_id = bos_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Convert rows: the decoder's targets, inputs, loss weights, and `decoder_causal_attention`.

    The latter is 1 where attention sees all of an example's inputs: on the inputs and on the first target.
    """
    inputs, inputs_length = _get_sequence(batch, "inputs", feature_lengths, rank_1=True)
    targets, targets_length = _get_sequence(batch, "targets", feature_lengths, rank_1=True)
    length = inputs_length + targets_length
    if counts is None:
      num_inputs = np.minimum(inputs.lengths, length)
      num_targets = np.minimum(targets.lengths, length - num_inputs)
      # Without a target, SeqIO counts the first padding as one.
      num_visible = np.minimum(num_inputs + 1, length)
    else:
      num_inputs = np.minimum(inputs.lengths, inputs_length)
      num_targets = np.minimum(targets.lengths, targets_length)
      num_visible = np.minimum(num_inputs + 1, num_inputs + num_targets)

    whole = pack_spans(num_inputs + num_targets, _get_counts(counts, inputs), length)
    starts = whole.starts

    def part(part_starts: np.ndarray, lengths: np.ndarray) -> Spans:
      return Spans(rows=whole.rows, starts=part_starts, lengths=lengths, shape=whole.shape)

    inputs_part, targets_part = part(starts, num_inputs), part(starts + num_inputs, num_targets)
    values = make_padding(whole.shape, targets.values.dtype)
    inputs_part.write(inputs, values)
    targets_part.write(targets, values)
    tokens = Tokens(values) if counts is None else Tokens(values, *_number_tokens(whole, counts))
    features = _decoder_features(tokens, self.bos_id)
    if self.loss_on_targets_only and counts is None:
      features["decoder_loss_weights"] ^= inputs_part.mask()
    elif self.loss_on_targets_only:
      features["decoder_loss_weights"] = targets_part.mask()
    return {**features, "decoder_causal_attention": part(starts, num_visible).mask()}


class DecoderConverter:
  """Converter for a decoder, as `seqio.DecoderFeatureConverter`: a prefix LM's if inputs have a length.

  Args:
    loss_on_targets_only, bos_id: see `PrefixLMConverter`.
  """

  def __init__(self, *, loss_on_targets_only: bool = True, bos_id: int = 0):
    self.loss_on_targets_only = loss_on_targets_only
    self.bos_id = bos_id
    self._prefix_lm = PrefixLMConverter(loss_on_targets_only=loss_on_targets_only, bos_id=bos_id)
    self._lm = LMConverter(bos_id=bos_id)

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Convert rows as `PrefixLMConverter` or `LMConverter`.

    Raises:
      AnystepError: 78 `feature_unsupported` if suffixes have a length.
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
  """Converter of aligned inputs and targets for an encoder, as `seqio.EncoderFeatureConverter`.

  Args:
    mask_id: the id of masked inputs, which have loss weight 1. (Padding of a packed row has weight 0, even
      if mask_id is 0.)
  """

  def __init__(self, *, mask_id: int):
    self.mask_id = mask_id

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """Convert rows: the encoder's inputs, targets and loss weights."""
    inputs = _to_tokens(*_get_sequence(batch, "inputs", feature_lengths, rank_1=counts is not None), counts)
    targets = _to_tokens(*_get_sequence(batch, "targets", feature_lengths, rank_1=counts is not None), counts)
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
  """Converter of targets for a language model, with MaxText's names, packed or not.

  `targets` are the tokens, and `inputs` are the tokens one position later within each example, id 0 first.
  (MaxText's own pipeline once did this. Now it moves the targets one position forward instead, and so has no
  loss on an example's first token.) `{inputs,targets}_segmentation` number a row's examples from 1 and are 0
  on padding; `{inputs,targets}_position` count each example's tokens from 0.
  """

  def __call__(
    self, batch: Batch, feature_lengths: Mapping[str, int], counts: np.ndarray | None = None
  ) -> Rows:
    """See `FeatureConverter`."""
    feature, length = _get_sequence(batch, "targets", feature_lengths, rank_1=True)
    targets = _to_tokens(feature, length, _get_counts(counts, feature))
    rows: Rows = {
      "inputs": shift_right(targets.values, targets.segment_ids),
      "targets": targets.values,
    }
    for name in ("inputs", "targets"):
      # Copies, because MaxText changes some arrays in place.
      rows[f"{name}_segmentation"] = np.array(targets.segment_ids)
      rows[f"{name}_position"] = np.array(targets.positions)
    return rows


def joins_sequences(
  converter: FeatureConverter | None, feature_lengths: Mapping[str, int], *, packed: bool
) -> bool:
  """Return whether inputs and targets are joined before they are cut, as for a prefix LM without packing."""
  is_prefix_lm = isinstance(converter, PrefixLMConverter) or (
    isinstance(converter, DecoderConverter) and "inputs" in feature_lengths
  )
  return is_prefix_lm and not packed


def cut_lengths(
  converter: FeatureConverter | None,
  lengths: Mapping[str, np.ndarray],
  *,
  feature_lengths: Mapping[str, int],
  packed: bool,
) -> dict[str, np.ndarray]:
  """Return lengths of sequences after they are cut to rows, of the features that have a length there.

  >>> cut = cut_lengths(
  ...   PrefixLMConverter(),
  ...   {"inputs": np.array([3, 6, 9]), "targets": np.array([3, 3, 3])},
  ...   feature_lengths={"inputs": 4, "targets": 4},
  ...   packed=False,
  ... )
  >>> {name: column.tolist() for name, column in cut.items()}
  {'inputs': [3, 6, 8], 'targets': [3, 2, 0]}

  Args:
    converter: others than those of this module, and None, are taken to cut each feature to its own length.
    lengths: `(examples,) int64` by feature, before they are cut.
    feature_lengths: number of tokens that each task feature is cut to.
    packed: whether rows have several examples.
  """
  with_length = {name: column for name, column in lengths.items() if name in feature_lengths}
  if joins_sequences(converter, feature_lengths, packed=packed) and with_length.keys() >= {
    "inputs",
    "targets",
  }:
    length = feature_lengths["inputs"] + feature_lengths["targets"]
    inputs = np.minimum(lengths["inputs"], length)
    return {"inputs": inputs, "targets": np.minimum(lengths["targets"], length - inputs)}
  return {name: np.minimum(column, feature_lengths[name]) for name, column in with_length.items()}


class Tokens(NamedTuple):
  """Sequences of a feature in rows.

  Attributes:
    values: `(rows, length, ...)`, zeros after the last token.
    segment_ids: `(rows, length) int32`, a row's examples counted from 1, 0 on padding. None if not packed.
    positions: `(rows, length) int32`, an example's tokens counted from 0, 0 on padding. None if not packed.
  """

  values: np.ndarray
  segment_ids: np.ndarray | None = None
  positions: np.ndarray | None = None

  def segments(self, name: str) -> Rows:
    """The segment ids and positions under a model feature's name; nothing if not packed."""
    if self.segment_ids is None:
      return {}
    return {f"{name}_segment_ids": self.segment_ids, f"{name}_positions": self.positions}


def shift_right(targets: np.ndarray, segment_ids: np.ndarray | None = None, *, bos_id: int = 0) -> np.ndarray:
  """Return a decoder's inputs, `(rows, length)`: targets one position later, each sequence after bos_id.

  >>> shift_right(np.array([[5, 6, 1, 0]]))
  array([[0, 5, 6, 1]])
  >>> shift_right(np.array([[5, 1, 7, 1, 0]]), np.array([[1, 1, 2, 2, 0]]), bos_id=3)
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
    "decoder_input_tokens": shift_right(targets.values, targets.segment_ids, bos_id=bos_id),
    "decoder_loss_weights": weights.astype(np.int32),
    **targets.segments("decoder"),
  }


def _to_tokens(feature: Ragged, length: int, counts: np.ndarray | None) -> Tokens:
  if counts is None:
    return Tokens(feature.to_padded(length))
  spans = pack_spans(np.minimum(feature.lengths, length), counts, length)
  values = make_padding(spans.shape, feature.values.dtype)
  spans.write(feature, values)
  return Tokens(values, *_number_tokens(spans, counts))


def _number_tokens(spans: Spans, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return segment ids and positions, `(rows, length) int32` each."""
  return spans.fill(number_segments(counts)), spans.positions()


def _get_counts(counts: np.ndarray | None, feature: Ragged) -> np.ndarray:
  return np.ones(len(feature), np.int64) if counts is None else counts


def _get_sequence(
  batch: Batch, name: str, feature_lengths: Mapping[str, int], *, rank_1: bool
) -> tuple[Ragged, int]:
  """Return a feature that the model needs, and its length.

  Raises:
    AnystepError: 78 `feature_missing`, `feature_length`; 78 `feature_rank` if it must have rank 1.
  """
  feature = batch.get(name)
  if not isinstance(feature, Ragged):
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_missing",
      expected=name,
      got=", ".join(sorted(batch)),
      fix="train on a task with these output features, or rename its own in a preprocessor",
    )
  if name not in feature_lengths:
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_length",
      expected=f"a length for {name}",
      got=dict(feature_lengths),
      fix=f"add {name!r} to TASK_FEATURE_LENGTHS (named there now: {find_nearest(name, feature_lengths)})",
    )
  if rank_1 and feature.values.ndim != 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_rank",
      feature=name,
      expected="rank 1",
      got=feature.values.ndim,
      fix="choose a converter that takes features of this rank, without packing, or give the feature rank 1",
    )
  return feature, feature_lengths[name]
