"""Preprocessors for any SeqIO task."""

from __future__ import annotations

import math
from collections.abc import Mapping

import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode

Features = Mapping[str, tf.Tensor]

_CUT_EXAMPLES = 64


def cut_into_pieces(
  dataset: tf.data.Dataset, *, piece_bytes: int, feature: str = "text", output: str = "targets"
) -> tf.data.Dataset:
  """Cuts each text into pieces of whole lines; to stand before the cache.

  A line belongs to the piece in which it starts, pieces starting every `piece_bytes`: so pieces are
  about that long, and longer by what their last line runs over.

  Args:
    dataset: examples with a text.
    piece_bytes: how far pieces are apart.
    feature: the text's name.
    output: the pieces' name.

  Returns:
    A dataset of `{output: piece}`, empty pieces left out.
  """

  def pieces(example: Features) -> tf.data.Dataset:
    lines = tf.strings.split(example[feature], sep="\n")
    lines = tf.concat([lines[:-1] + "\n", lines[-1:]], axis=0)
    line_bytes = tf.strings.length(lines)
    piece_of_line = tf.cumsum(line_bytes, exclusive=True) // piece_bytes
    by_piece = tf.RaggedTensor.from_value_rowids(lines, tf.cast(piece_of_line, tf.int64))
    joined = tf.strings.reduce_join(by_piece, axis=1)
    return tf.data.Dataset.from_tensor_slices({output: tf.boolean_mask(joined, joined != "")})

  return dataset.flat_map(pieces)


def cut_into_token_pieces(
  dataset: tf.data.Dataset, *, piece_tokens: int, feature: str = "targets"
) -> tf.data.Dataset:
  """Cuts each example's tokens into pieces of one length, the last one shorter; to stand before the cache.

  Args:
    dataset: examples with tokens, `(tokens,)`.
    piece_tokens: length of a piece.
    feature: the tokens' name.

  Returns:
    A dataset of `{feature: piece}`. No token is lost; an example without tokens gives no piece.
  """

  def pieces(examples: Features) -> Features:
    tokens = examples[feature]
    if not isinstance(tokens, tf.RaggedTensor):
      tokens = tf.RaggedTensor.from_tensor(tokens)
    lengths = tokens.row_lengths()
    counts = -(-lengths // piece_tokens)
    places = tf.range(tf.reduce_sum(counts)) - tf.repeat(tf.cumsum(counts, exclusive=True), counts)
    piece_lengths = tf.minimum(tf.repeat(lengths, counts) - places * piece_tokens, piece_tokens)
    return {feature: tf.RaggedTensor.from_row_lengths(tokens.flat_values, piece_lengths, validate=False)}

  # Some examples at a time: a dataset for each would take longer than the cutting.
  batches = dataset.map(lambda example: {feature: example[feature]}).ragged_batch(_CUT_EXAMPLES)
  return batches.map(pieces).unbatch().map(lambda piece: {feature: tf.ensure_shape(piece[feature], [None])})


def cut_into_balanced_pieces(
  dataset: tf.data.Dataset, *, piece_tokens: int, feature: str = "targets"
) -> tf.data.Dataset:
  """Cuts each example's tokens into as few pieces as `cut_into_token_pieces`, all nearly equally long.

  Lengths of an example's pieces differ by a token at most, the longer ones first; so none is a short tail.

  Args:
    dataset: examples with tokens, `(tokens,)`.
    piece_tokens: the greatest length of a piece.
    feature: the tokens' name.

  Returns:
    A dataset of `{feature: piece}`. No token is lost; an example without tokens gives no piece.
  """

  def pieces(examples: Features) -> Features:
    tokens = examples[feature]
    if not isinstance(tokens, tf.RaggedTensor):
      tokens = tf.RaggedTensor.from_tensor(tokens)
    lengths = tokens.row_lengths()
    counts = -(-lengths // piece_tokens)
    places = tf.range(tf.reduce_sum(counts)) - tf.repeat(tf.cumsum(counts, exclusive=True), counts)
    totals, parts = tf.repeat(lengths, counts), tf.repeat(counts, counts)
    piece_lengths = totals // parts + tf.cast(places < totals % parts, totals.dtype)
    return {feature: tf.RaggedTensor.from_row_lengths(tokens.flat_values, piece_lengths, validate=False)}

  batches = dataset.map(lambda example: {feature: example[feature]}).ragged_batch(_CUT_EXAMPLES)
  return batches.map(pieces).unbatch().map(lambda piece: {feature: tf.ensure_shape(piece[feature], [None])})


def without_empty_texts(dataset: tf.data.Dataset, *, feature: str = "targets") -> tf.data.Dataset:
  """Leaves out examples whose text is empty, or white space alone."""
  return dataset.filter(lambda example: tf.strings.length(tf.strings.strip(example[feature])) > 0)


def random_chunk(
  dataset: tf.data.Dataset, sequence_length: Mapping[str, int], *, feature: str = "targets"
) -> tf.data.Dataset:
  """Takes from each longer example a chunk of the feature's length, at a random place."""

  @seqio.map_over_dataset(num_seeds=1)
  def take(example: Features, seed):
    return {**example, feature: _random_chunk(example[feature], sequence_length[feature], seed)}

  return take(dataset)


def lm(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Language modelling, one example to one: `targets` are what `random_chunk` takes of them.

  Where the task has `inputs`, for an encoder, they are empty. No room is left for an end token: it ends the
  document, and so belongs before the cache.
  """
  chunks = random_chunk(dataset, sequence_length)
  if "inputs" not in output_features:
    return chunks
  return chunks.map(lambda example: {**example, "inputs": example["targets"][:0]})


def prefix_lm(dataset: tf.data.Dataset, sequence_length: Mapping[str, int]) -> tf.data.Dataset:
  """Continuing a text, one example to one (Raffel et al. 2020, section 3.2.3).

  Of each example's `targets` a random chunk is taken that is as long as the longer of the lengths, and cut at
  a random place: `inputs` are what stands before it, `targets` what follows. Both have a token where there
  are two, and every place at which both fit is equally likely. No room is left for an end token: it ends the
  document, and so belongs before the cache.

  Args:
    dataset: examples with `targets`, `(tokens,)`.
    sequence_length: tokens of `inputs` and `targets`.

  Raises:
    AnystepError: 78 `feature_length` where one of them has no room.
  """
  inputs_tokens, targets_tokens = (sequence_length[name] for name in ("inputs", "targets"))
  if min(inputs_tokens, targets_tokens) < 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_length",
      expected="room for a token each",
      got={"inputs": inputs_tokens, "targets": targets_tokens},
      fix="lengthen TASK_FEATURE_LENGTHS",
    )

  @seqio.map_over_dataset(num_seeds=2)
  def cut(example: Features, seeds):
    tokens = _random_chunk(example["targets"], max(inputs_tokens, targets_tokens), seeds[0])
    size = tf.size(tokens)
    first = tf.maximum(tf.maximum(size - targets_tokens, tf.minimum(size - 1, 1)), 0)
    last = tf.maximum(tf.minimum(size - 1, inputs_tokens), first)
    place = tf.random.stateless_uniform([], seeds[1], minval=first, maxval=last + 1, dtype=tf.int32)
    return {**example, "inputs": tokens[:place], "targets": tokens[place:]}

  return cut(dataset)


def span_corruption(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
  *,
  noise_density: float = 0.15,
  mean_span_tokens: float = 3.0,
) -> tf.data.Dataset:
  """T5's denoising objective, one example to one (Raffel et al. 2020, section 3.1.4).

  Of each example's `targets` a random chunk is taken that just fills the lengths. Random spans of it
  become one sentinel each in `inputs`; `targets` are the spans, each after its sentinel. The first
  sentinel is the vocabulary's last id, the next the one before it, and so on.

  Args:
    dataset: examples with `targets`, `(tokens,)`.
    sequence_length: tokens of `inputs` and `targets`; room for an end token is left where one is added.
    output_features: give the vocabulary and whether an end token is added.
    noise_density: share of tokens that are corrupted.
    mean_span_tokens: mean length of a corrupted span.

  Raises:
    AnystepError: 78 `sentinels` where the vocabulary has too few for the lengths.
  """
  room = {name: sequence_length[name] - int(output_features[name].add_eos) for name in ("inputs", "targets")}
  chunk_tokens = span_corruption_chunk(
    room["inputs"], room["targets"], noise_density=noise_density, mean_span_tokens=mean_span_tokens
  )
  vocabulary = output_features["inputs"].vocabulary
  num_spans = noise_and_spans(chunk_tokens, noise_density, mean_span_tokens)[1]
  if num_spans > (vocabulary.extra_ids or 0):
    raise AnystepError(
      ExitCode.CONFIG,
      "sentinels",
      expected=f"{num_spans} sentinels for {chunk_tokens} tokens",
      got=f"extra_ids={vocabulary.extra_ids}",
      fix="give the vocabulary more extra_ids or shorten TASK_FEATURE_LENGTHS",
    )
  first_sentinel = vocabulary.vocab_size - 1

  @seqio.map_over_dataset(num_seeds=3)
  def corrupt(example: Features, seeds):
    tokens = _random_chunk(example["targets"], chunk_tokens, seeds[0])
    noise = _noise_mask(tf.size(tokens), noise_density, mean_span_tokens, seeds[1], seeds[2])
    return {
      **example,
      "inputs": _spans_to_sentinels(tokens, noise, first_sentinel),
      "targets": _spans_to_sentinels(tokens, ~noise, first_sentinel),
    }

  return corrupt(dataset)


def span_corruption_chunk(
  inputs_tokens: int, targets_tokens: int, *, noise_density: float = 0.15, mean_span_tokens: float = 3.0
) -> int:
  """The longest chunk whose corrupted inputs and targets fit.

  Raises:
    AnystepError: 78 `feature_length` where none does.

  >>> span_corruption_chunk(511, 113)
  568
  """

  def fits(tokens: int) -> bool:
    num_noise, num_spans = noise_and_spans(tokens, noise_density, mean_span_tokens)
    return tokens - num_noise + num_spans <= inputs_tokens and num_noise + num_spans <= targets_tokens

  chunk = 2
  if not fits(chunk):
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_length",
      expected="room for two tokens, one of them corrupted, and their sentinels",
      got={"inputs": inputs_tokens, "targets": targets_tokens},
      fix="lengthen TASK_FEATURE_LENGTHS",
    )
  while fits(chunk + 1):
    chunk += 1
  return chunk


def noise_and_spans(tokens: int, noise_density: float, mean_span_tokens: float) -> tuple[int, int]:
  """Corrupted tokens and spans of at least two tokens; `_noise_mask` says the same in the graph."""
  num_noise = min(max(math.floor(tokens * noise_density + 0.5), 1), tokens - 1)
  num_spans = max(math.floor(num_noise / mean_span_tokens + 0.5), 1)
  return num_noise, min(num_spans, tokens - num_noise)


def _noise_mask(
  length: tf.Tensor, noise_density: float, mean_span_tokens: float, noise_seed, clean_seed
) -> tf.Tensor:
  """`(length,) bool`: clean and corrupted spans in turn, clean first, all splits equally likely."""
  tokens = tf.maximum(length, 2)
  num_noise = _round_half_up(tf.cast(tokens, tf.float64) * noise_density)
  num_noise = tf.clip_by_value(num_noise, 1, tokens - 1)
  num_clean = tokens - num_noise
  num_spans = _round_half_up(tf.cast(num_noise, tf.float64) / mean_span_tokens)
  num_spans = tf.minimum(tf.maximum(num_spans, 1), num_clean)
  span_tokens = tf.stack(
    [_random_split(num_clean, num_spans, clean_seed), _random_split(num_noise, num_spans, noise_seed)],
    axis=1,
  )
  kinds = tf.tile([False, True], [num_spans])
  return tf.repeat(kinds, tf.reshape(span_tokens, [-1]))[:length]


def _round_half_up(x: tf.Tensor) -> tf.Tensor:
  return tf.cast(tf.floor(x + 0.5), tf.int32)


def _random_split(total: tf.Tensor, parts: tf.Tensor, seed) -> tf.Tensor:
  """`(parts,) int32` of sizes >= 1 that add up to total: every such list equally likely."""
  cuts = tf.range(total - 1) < parts - 1
  cuts = tf.gather(cuts, tf.argsort(tf.random.stateless_uniform([total - 1], seed)))
  ends = tf.concat([tf.cast(tf.where(cuts)[:, 0], tf.int32) + 1, [total]], axis=0)
  return ends - tf.concat([[0], ends[:-1]], axis=0)


def _random_chunk(tokens: tf.Tensor, length: int, seed) -> tf.Tensor:
  spare = tf.maximum(tf.size(tokens) - length, 0)
  start = tf.random.stateless_uniform([], seed, maxval=spare + 1, dtype=tf.int32)
  return tokens[start : start + length]


def _spans_to_sentinels(tokens: tf.Tensor, replaced: tf.Tensor, first_sentinel: int) -> tf.Tensor:
  """Each run of replaced tokens becomes one sentinel, counting down from the first."""
  follows = tf.concat([[False], replaced[:-1]], axis=0)
  starts = replaced & ~follows
  sentinels = first_sentinel + 1 - tf.cumsum(tf.cast(starts, tokens.dtype))
  return tf.boolean_mask(tf.where(starts, sentinels, tokens), starts | ~replaced)
