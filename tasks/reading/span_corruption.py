"""`random_chunk` and `span_corruption` on whole batches without TensorFlow, the same to the bit.

`anystep.tasks.preprocessors` describes them.
"""

from __future__ import annotations

import numpy as np

from anystep.compiled import compiled
from anystep.features.ragged import Ragged
from anystep.tasks.preprocessors import noise_and_spans
from anystep.tasks.reading.stateless_random import uniform_floats, uniform_ints


def cut_random_chunks(feature: Ragged, length: int, seeds: np.ndarray) -> Ragged:
  """Cut longer sequences to `length` tokens from a random position on, as `random_chunk`.

  Args:
    feature: of any dtype and inner shape `()`.
    length: tokens, 0 or more.
    seeds: `(rows, 1, 2) int64`.
  """
  starts = _draw_starts(feature, length, seeds[:, 0])
  positions = np.arange(len(feature.values))
  starts = np.repeat(starts + np.cumsum(feature.lengths) - feature.lengths, feature.lengths)
  is_kept = (positions >= starts) & (positions < starts + length)
  return Ragged(feature.values[is_kept], np.minimum(feature.lengths, length))


def count_noise(chunk_tokens: int, *, noise_density: float, mean_span_tokens: float) -> np.ndarray:
  """Count corrupted tokens and spans of chunks of 0 to chunk_tokens tokens: `(chunk_tokens + 1, 2) int64`.

  A chunk of fewer than two tokens has those of two, and is cut afterwards.
  """
  return np.array(
    [noise_and_spans(max(tokens, 2), noise_density, mean_span_tokens) for tokens in range(chunk_tokens + 1)]
  )


def corrupt_spans(
  feature: Ragged, counts: np.ndarray, seeds: np.ndarray, *, first_sentinel: int
) -> tuple[Ragged, Ragged]:
  """Return the inputs and targets of each sequence, as `span_corruption`.

  Args:
    feature: int32 or int64 of inner shape `()`.
    counts: from `count_noise`.
    seeds: `(rows, 3, 2) int64`: of the chunk, the corrupted spans, the others.
    first_sentinel: the token of a sequence's first span.
  """
  chunk_tokens = len(counts) - 1
  starts = _draw_starts(feature, chunk_tokens, seeds[:, 0])
  starts += np.cumsum(feature.lengths) - feature.lengths
  sizes = np.minimum(feature.lengths, chunk_tokens)
  noise, spans = counts[sizes].T
  clean = np.maximum(sizes, 2) - noise
  lengths = [np.where(sizes < 2, sizes, tokens + spans) for tokens in (clean, noise)]
  inputs, targets = (
    Ragged(np.empty(sequence_lengths.sum(), feature.values.dtype), sequence_lengths)
    for sequence_lengths in lengths
  )
  _corrupt(
    np.ascontiguousarray(feature.values),
    starts,
    sizes,
    clean,
    np.ascontiguousarray(noise),
    np.ascontiguousarray(spans),
    uniform_floats(seeds[:, 2], clean - 1).values,
    uniform_floats(seeds[:, 1], noise - 1).values,
    first_sentinel,
    inputs.values,
    targets.values,
  )
  return inputs, targets


def _draw_starts(feature: Ragged, length: int, seeds: np.ndarray) -> np.ndarray:
  """Draw the start of each sequence's chunk, `(rows,) int64`."""
  return uniform_ints(seeds, np.maximum(feature.lengths - length, 0) + 1)


@compiled
def _corrupt(
  tokens: np.ndarray,
  starts: np.ndarray,
  sizes: np.ndarray,
  clean: np.ndarray,
  noise: np.ndarray,
  spans: np.ndarray,
  clean_draws: np.ndarray,
  noise_draws: np.ndarray,
  first_sentinel: int,
  inputs: np.ndarray,
  targets: np.ndarray,
) -> None:
  """Write inputs and targets, example after example.

  Args:
    tokens: all examples'. starts, sizes: of each example, where its chunk begins, and its tokens.
    clean, noise, spans: of each example, how many tokens stay, how many are corrupted, and in how many spans.
    clean_draws, noise_draws: one for each position where tokens of a kind can be cut, all examples'.
    inputs, targets: the arrays written to.
  """
  longest = 2
  for row in range(len(sizes)):
    longest = max(longest, clean[row], noise[row])
  # By bucket: where its next draw goes in the order.
  nexts = np.empty(longest + 1, np.int64)
  order = np.empty(longest, np.int64)
  clean_ends, noise_ends = np.empty(longest, np.bool_), np.empty(longest, np.bool_)

  def mark_ends(draws, total, parts, ends):
    """Mark the last token of each part: the positions of the first parts - 1 draws after sorting all draws.

    They are sorted into as many buckets, then by insertion; of equal ones the earlier comes first.
    """
    count = total - 1
    for bucket in range(count + 1):
      nexts[bucket] = 0
    for k in range(count):
      nexts[int(draws[k] * count) + 1] += 1
    for bucket in range(count):
      nexts[bucket + 1] += nexts[bucket]
    for k in range(count):
      bucket = int(draws[k] * count)
      order[nexts[bucket]] = k
      nexts[bucket] += 1
    for position in range(1, count):
      k = order[position]
      while position > 0 and draws[order[position - 1]] > draws[k]:
        order[position] = order[position - 1]
        position -= 1
      order[position] = k
    for position in range(count):
      ends[position] = order[position] < parts - 1
    ends[count] = True

  to_input = to_target = clean_draw = noise_draw = 0
  for row in range(len(sizes)):
    at, clean_at, noise_at = starts[row], 0, 0
    if sizes[row] < 2:
      if sizes[row]:
        inputs[to_input], targets[to_target] = tokens[at], first_sentinel
      to_input, to_target = to_input + sizes[row], to_target + sizes[row]
    else:
      mark_ends(clean_draws[clean_draw:], clean[row], spans[row], clean_ends)
      mark_ends(noise_draws[noise_draw:], noise[row], spans[row], noise_ends)
      for span in range(spans[row]):
        ended = False
        while not ended:
          inputs[to_input] = tokens[at]
          ended = clean_ends[clean_at]
          at, to_input, clean_at = at + 1, to_input + 1, clean_at + 1
        inputs[to_input] = targets[to_target] = first_sentinel - span
        to_input, to_target, ended = to_input + 1, to_target + 1, False
        while not ended:
          targets[to_target] = tokens[at]
          ended = noise_ends[noise_at]
          at, to_target, noise_at = at + 1, to_target + 1, noise_at + 1
    clean_draw, noise_draw = clean_draw + clean[row] - 1, noise_draw + noise[row] - 1
