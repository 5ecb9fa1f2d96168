"""Sampling from a table of logits by the token before, and what a draw depends on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anystep.train.decoding.keys import example_keys
from anystep.train.decoding.sampling import temperature_sample
from anystep.train.decoding.truncation import keep_top_k, keep_top_p

EOS, VOCAB, LENGTH = 1, 12, 6


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def table(seed=0, eos=-1.0):
  """Logits of the next token, by token; the end of sequence has `eos`."""
  logits = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
  logits[:, EOS] = eos
  return jnp.asarray(logits)


def step(logits, state):
  """The step of a first-order chain, whose cache counts the tokens that it was given."""
  return logits[state.cur_token[:, 0]], state.cache + jnp.ones((1,), jnp.int32)


def sample(logits, prompts, keys=None, *, num_decodes=1, initial_index=None, **options):
  static = {name: value for name, value in options.items() if name != "temperature"}
  temperature = options.get("temperature", 1.0)
  if keys is None:
    return compiled(num_decodes=num_decodes, temperature=temperature, **static)(
      logits, prompts, None, initial_index, None
    )
  return compiled(num_decodes=num_decodes, **static)(
    logits, prompts, keys, initial_index, jnp.asarray(temperature, jnp.float32)
  )


@functools.cache
def compiled(*, temperature=None, **options):
  def decode(logits, prompts, keys, index, temperatures):
    return temperature_sample(
      prompts,
      jnp.zeros(prompts.shape[:1], jnp.int32),
      functools.partial(step, logits),
      eos_id=EOS,
      keys=keys,
      initial_index=index,
      temperature=temperatures if temperature is None else temperature,
      **options,
    )

  return jax.jit(decode)


def keys_of(indices, seed=3):
  return example_keys(seed, "task", np.asarray(indices))


def greedy_chain(logits, prompt):
  """The likeliest tokens one by one, and the sum of their log-likelihoods."""
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  tokens, score, ended = [0], 0.0, False
  for forced in [*prompt[1:], 0]:
    likeliest = int(np.argmax(log_probs[tokens[-1]]))
    if not (forced or ended):
      score += log_probs[tokens[-1], likeliest]
    tokens.append(int(forced) or (0 if ended else likeliest))
    ended |= not forced and likeliest == EOS
  return tokens[1:], score


def test_greedy_tokens_are_the_likeliest_and_end_with_the_end_of_sequence():
  logits = table(eos=1.5)
  prompts = np.zeros((VOCAB, LENGTH), np.int32)
  prompts[:, 1] = range(VOCAB)
  prompts[3, 2] = 4
  sequences, scores = sample(logits, prompts, temperature=0.0, rescale_log_probs=False)
  expected = [greedy_chain(logits, prompt) for prompt in prompts]
  # A prompt with the end of sequence has one more than it before the row ends.
  rows = [row for row in range(VOCAB) if row != EOS]
  np.testing.assert_array_equal(np.asarray(sequences)[rows, 0], [expected[row][0] for row in rows])
  np.testing.assert_allclose(np.asarray(scores)[rows, 0], [expected[row][1] for row in rows], atol=1e-5)
  assert sequences[EOS, 0, 0] == EOS
  assert sequences[EOS, 0, 1] != 0
  assert any(EOS in tokens for tokens, _ in expected)


def test_rows_that_go_on_from_a_filled_cache_have_the_tokens_of_forced_prompts():
  prompts = np.array([[0, 5, 6, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 3, 4, 7, 9, 2]], np.int32)
  forced, scores = sample(table(), prompts, temperature=0.0, rescale_log_probs=False)
  index = jnp.array([2, 0, 5])
  after, after_scores = sample(
    table(), prompts, temperature=0.0, rescale_log_probs=False, initial_index=index
  )
  np.testing.assert_array_equal(after, forced)
  np.testing.assert_allclose(after_scores, scores, atol=1e-6)


@pytest.mark.long
def test_draws_have_the_distribution_of_the_logits_and_the_temperature():
  rows = 4000
  prompts = np.zeros((rows, 1), np.int32)
  temperatures = jnp.where(jnp.arange(rows) % 2 == 0, 0.7, 2.0)
  tokens, scores = sample(table(), prompts, keys_of(range(rows)), temperature=temperatures)
  for parity, temperature in ((0, 0.7), (1, 2.0)):
    probabilities = np.asarray(jax.nn.softmax(table()[0] / temperature), np.float64)
    counts = np.bincount(np.asarray(tokens)[parity::2, 0, 0], minlength=VOCAB)
    deviations = np.abs(counts - rows / 2 * probabilities)
    # Five standard deviations, of twelve counts.
    assert np.all(deviations <= 5 * np.sqrt(rows / 2 * probabilities * (1 - probabilities)) + 1)
    drawn = np.asarray(tokens)[parity::2, 0, 0]
    np.testing.assert_allclose(np.asarray(scores)[parity::2, 0], np.log(probabilities[drawn]), atol=1e-5)


def test_a_draw_depends_on_its_example_and_sample_alone():
  """Not on the rows beside it or their order."""
  prompts = np.zeros((7, LENGTH), np.int32)
  prompts[:, 1] = range(2, 9)
  options = {"temperature": 1.3, "topk": 5, "rescale_log_probs": False}
  together, scores = sample(table(), prompts, keys_of(range(7)), num_decodes=2, **options)
  order = np.array([5, 1, 6, 0, 3])
  some, some_scores = sample(table(), prompts[order], keys_of(order), num_decodes=2, **options)
  np.testing.assert_array_equal(some, together[order])
  np.testing.assert_array_equal(some_scores, scores[order])
  samples = np.asarray(together)
  assert (samples[:, 0] != samples[:, 1]).any()
  assert np.all(np.diff(scores, axis=1) >= 0)
  other, _ = sample(table(), prompts, keys_of(range(7), seed=4), num_decodes=2, **options)
  assert (np.asarray(other) != samples).any()


@pytest.mark.long
def test_a_draw_does_not_depend_on_the_number_of_samples():
  prompts = np.zeros((7, LENGTH), np.int32)
  two, one = (
    np.asarray(sample(table(), prompts, keys_of(range(7)), num_decodes=number)[0]) for number in (2, 1)
  )
  assert all((two[row] == one[row, 0]).all(axis=1).any() for row in range(7))


@pytest.mark.long
def test_a_temperature_of_zero_in_a_row_is_greedy():
  prompts = np.zeros((2, LENGTH), np.int32)
  sequences, scores = sample(table(), prompts, keys_of([0, 1]), temperature=jnp.array([0.0, 1.0]))
  greedy, _ = sample(table(), prompts, temperature=0.0)
  np.testing.assert_array_equal(sequences[0], greedy[0])
  assert scores[0, 0] == 0.0
  assert scores[1, 0] < 0.0


@pytest.mark.long
def test_a_callback_changes_the_logits_that_are_drawn_from():
  forbidden = jnp.arange(VOCAB) % 2 == 0

  def odd_after_the_first(logits, state):
    hidden = forbidden[None, :] & (state.cur_index > 0)[:, None]
    return jnp.where(hidden, -1e7, logits)

  prompts = np.zeros((64, LENGTH), np.int32)
  tokens, _ = sample(table(eos=-9.0), prompts, keys_of(range(64)), logit_callback=odd_after_the_first)
  assert np.all(np.asarray(tokens)[:, 0, 1:] % 2 == 1)
  assert np.any(np.asarray(tokens)[:, 0, 0] % 2 == 0)


@pytest.mark.parametrize("k", [1, 3, VOCAB])
def test_top_k_keeps_the_largest_and_what_equals_the_last_of_them(k):
  rows = np.random.default_rng(1).integers(0, 6, (50, VOCAB)).astype(np.float32)
  kept = np.asarray(keep_top_k(jnp.asarray(rows), k)) > -1e6
  expected = [[value >= sorted(row, reverse=True)[k - 1] for value in row] for row in rows]
  np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("p", [0.001, 0.5, 0.9, 1.0])
def test_top_p_keeps_the_fewest_that_have_the_probability(p):
  rows = np.asarray(np.random.default_rng(2).normal(size=(50, VOCAB)) * 2, np.float32)
  kept = np.asarray(keep_top_p(jnp.asarray(rows), p)) > -1e6
  for row, chosen in zip(rows, kept, strict=True):
    probabilities = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
    falling = np.argsort(-probabilities)
    count = 1 + int(np.searchsorted(np.cumsum(probabilities[falling]), min(p, 1 - 1e-7)))
    assert set(np.flatnonzero(chosen)) == set(falling[: min(count, VOCAB)])


@pytest.mark.long
def test_top_p_is_of_what_top_k_leaves():
  logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
  prompts = np.zeros((500, 1), np.int32)
  # Of the first two, 0.4 / 0.7 is 0.57: above 0.5 the second is needed.
  for topp, support in ((0.5, {0}), (0.6, {0, 1})):
    tokens, _ = sample(jnp.broadcast_to(logits, (4, 4)), prompts, keys_of(range(500)), topk=2, topp=topp)
    assert set(np.asarray(tokens).ravel().tolist()) == support


def test_keys_are_as_the_order_document_says():
  (key,) = example_keys(3, "demo", np.array([(5 << 32) + 7]))
  number = np.uint32(int.from_bytes(bytes.fromhex("5be1ef79"), "little"))
  expected = jax.random.key(3)
  for word in (number, 5, 7):
    expected = jax.random.fold_in(expected, word)
  np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": 0.5}, "keys: expected a key for each row"),
    ({"temperature": 0.0, "topk": -1}, "topk: expected a whole number"),
    ({"temperature": 0.0, "topp": 1.5}, "topp: expected a probability"),
    ({"temperature": 0.0, "max_decode_steps": LENGTH + 1}, "max_decode_steps: expected 1 to 6"),
  ],
)
def test_bad_arguments_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    sample(table(), np.zeros((1, LENGTH), np.int32), **options)
