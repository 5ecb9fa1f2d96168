"""Beam search over tables of log-probabilities, beside all sequences and beside a search in plain Python."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anystep.train.decoding.beam_rules import NOTHING, HuggingFaceBeams, T5XBeams
from anystep.train.decoding.beams import beam_search

EOS, VOCAB, LENGTH = 1, 5, 4


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def tables(rows, seed=0, eos=0.0):
  """Log-probabilities of the next token by row, position and token."""
  logits = np.random.default_rng(seed).normal(size=(rows, 8, VOCAB, VOCAB)).astype(np.float32) * 1.5
  logits[..., EOS] += eos
  return np.asarray(jax.nn.log_softmax(logits))


def step(state):
  """Each row's cache is its table, so that beams that lose theirs are seen."""
  rows = jnp.arange(len(state.cur_index))
  return state.cache[rows, state.cur_index, state.cur_token[:, 0]], state.cache


def search(chain, prompts, *, initial_index=None, num_decodes=3, **options):
  searched = compiled(num_decodes=num_decodes, **options)(
    jnp.asarray(chain), jnp.asarray(prompts), initial_index
  )
  return tuple(map(np.asarray, searched))


@functools.cache
def compiled(**options):
  decode = functools.partial(beam_search, eos_id=EOS, **options)
  return jax.jit(lambda chain, prompts, index: decode(prompts, chain, step, initial_index=index))


def all_sequences(log_probs, length):
  """Every sequence that ends, padded, with its log-probability."""
  for size in range(1, length + 1):
    for head in itertools.product([token for token in range(VOCAB) if token != EOS], repeat=size - 1):
      tokens = (0, *head, EOS)
      yield (
        [*tokens[1:], *[0] * (length - size)],
        size,
        sum(log_probs[place, tokens[place], tokens[place + 1]] for place in range(size)),
      )


@pytest.mark.parametrize("alpha", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
def test_a_wide_search_finds_the_best_of_all_sequences(alpha):
  chain = tables(5)
  sequences, scores = search(
    chain, np.zeros((5, LENGTH), np.int32), num_decodes=64, rules=T5XBeams(alpha=alpha)
  )
  for row in range(5):
    ranked = sorted(
      (
        (total / ((5 + size) / 6) ** alpha, tokens)
        for tokens, size, total in all_sequences(chain[row], LENGTH)
      ),
      reverse=True,
    )
    best = ranked[:5]
    np.testing.assert_allclose(scores[row, ::-1][:5], [score for score, _ in best], rtol=1e-5)
    np.testing.assert_array_equal(sequences[row, ::-1][:5], [tokens for _, tokens in best])


def test_each_row_is_searched_as_alone():
  """Rows whose prompts differ in length, filled or forced, and that stop at different steps."""
  chain = tables(6, seed=4, eos=-1.0)
  prompts = np.zeros((6, 8), np.int32)
  for row, size in enumerate([0, 5, 2, 7, 1, 3]):
    prompts[row, 1 : size + 1] = np.arange(size) % 3 + 2
  lengths = (prompts != 0).sum(axis=1)
  alone_rules = T5XBeams(min_log_prob=-3.0, rows_together=True)
  for index in (None, lengths):
    together = search(chain, prompts, initial_index=index, rules=T5XBeams(min_log_prob=-3.0))
    alone = [
      search(
        chain[row : row + 1],
        prompts[row : row + 1],
        initial_index=None if index is None else index[row : row + 1],
        rules=alone_rules,
      )
      for row in range(6)
    ]
    np.testing.assert_array_equal(together[0], np.concatenate([sequences for sequences, _ in alone]))
    np.testing.assert_allclose(together[1], np.concatenate([scores for _, scores in alone]), rtol=1e-6)


def hugging_face_search(log_probs, *, beams, length, length_penalty, early_stopping):
  """A search by Hugging Face's rules, with lists: finished sequences and scores, the best first."""
  live, finished = [(0.0, [0])], []
  for size in range(1, length + 1):
    candidates = sorted(
      (
        (score + log_probs[size - 1, tokens[-1], token], [*tokens, token])
        for score, tokens in live
        for token in range(VOCAB)
      ),
      reverse=True,
    )[: 2 * beams]
    ends = [tokens[-1] == EOS or size == length for _, tokens in candidates]
    finished += [
      (score / size**length_penalty, tokens)
      for place, (score, tokens) in enumerate(candidates)
      if ends[place] and place < beams
    ]
    finished = sorted(finished, reverse=True)[:beams]
    live = [candidate for candidate, end in zip(candidates, ends, strict=True) if not end][:beams]
    if len(finished) == beams and (
      early_stopping or not live or live[0][0] / size**length_penalty <= finished[-1][0]
    ):
      break
  return finished


@pytest.mark.parametrize(
  ("length_penalty", "early_stopping"),
  [
    (0.6, False),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [(0.6, True), (2.0, False), (-1.0, False)]),
  ],
)
def test_hugging_faces_rules_are_those_of_a_search_with_lists(length_penalty, early_stopping):
  chain = tables(20, seed=7)
  rules = HuggingFaceBeams(length_penalty=length_penalty, early_stopping=early_stopping)
  sequences, scores = search(chain, np.zeros((20, 6), np.int32), rules=rules)
  for row in range(20):
    expected = hugging_face_search(
      chain[row], beams=3, length=6, length_penalty=length_penalty, early_stopping=early_stopping
    )
    padded = [[*tokens[1:], *[0] * (7 - len(tokens))] for _, tokens in expected]
    np.testing.assert_array_equal(sequences[row, ::-1], padded)
    np.testing.assert_allclose(scores[row, ::-1], [score for score, _ in expected], rtol=1e-5)


def test_empty_slots_and_rows_without_an_end():
  chain = tables(2).copy()
  chain[1, ..., EOS] = -1e8
  chain = np.asarray(jax.nn.log_softmax(chain))
  sequences, scores = search(chain, np.zeros((2, 3), np.int32), max_decode_len=2, num_decodes=6)
  # Row 0 has one sequence of one token and four of two that end, and six slots.
  is_filled = scores[0] > NOTHING / 2
  assert is_filled[-1]
  assert not is_filled[0]
  np.testing.assert_array_equal((sequences[0] == EOS).any(axis=1), is_filled)
  np.testing.assert_array_equal(scores[0, ~is_filled], NOTHING)
  assert not sequences[0, ~is_filled].any()
  # Row 1 has none that ends soon: its live sequences, with their log-probabilities.
  assert not (sequences[1] == EOS).any()
  totals = [chain[1, 0, 0, first] + chain[1, 1, first, second] for first, second in sequences[1]]
  np.testing.assert_allclose(scores[1], totals, rtol=1e-5)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: T5XBeams(alpha=-1.0), "T5XBeams.alpha"),
    (lambda: T5XBeams(min_log_prob="low"), "T5XBeams.min_log_prob"),
    (lambda: HuggingFaceBeams(length_penalty=None), "HuggingFaceBeams.length_penalty"),
    (lambda: HuggingFaceBeams(early_stopping="never"), "HuggingFaceBeams.early_stopping"),
    (lambda: search(tables(1), np.zeros((1, 3), np.int32), max_decode_len=0), "max_decode_len"),
    (lambda: search(tables(1), np.zeros((1, 3), np.int32), max_decode_step=-1), "max_decode_step"),
  ],
)
def test_bad_arguments_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
