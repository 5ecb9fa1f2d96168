"""All implementations of attention are one function, in its gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anystep.errors import AnystepError
from anystep.train.network.attention import attend
from anystep.train.network.t5 import T5Config

ROWS, QUERIES, KEYS, HEADS, HEAD_DIM = 3, 5, 7, 2, 8


def inputs(dtype=jnp.float32):
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)

  mask = rng.random((ROWS, 1, QUERIES, KEYS)) < 0.6
  mask[0, 0, 0] = True
  mask[1, 0, 2] = False  # a query without any key
  return {
    "query": draw(ROWS, QUERIES, HEADS, HEAD_DIM),
    "key": draw(ROWS, KEYS, HEADS, HEAD_DIM),
    "value": draw(ROWS, KEYS, HEADS, HEAD_DIM),
    "bias": draw(1, HEADS, QUERIES, KEYS),
    "weight_dropout": jnp.asarray((rng.random((ROWS, HEADS, 1, KEYS)) < 0.8) / 0.8, dtype),
  }, jnp.asarray(mask)


def by_definition(arrays, mask):
  """In float64, element by element."""
  query, key, value, bias, dropout = (np.asarray(array, np.float64) for array in arrays.values())
  dropout = np.broadcast_to(dropout, (ROWS, HEADS, 1, KEYS))
  attended = np.zeros((ROWS, QUERIES, HEADS, HEAD_DIM))
  for row, head, at in np.ndindex(ROWS, HEADS, QUERIES):
    logits = key[row, :, head] @ query[row, at, head] + bias[0, head, at]
    allowed = np.asarray(mask)[row, 0, at]
    weights = np.where(allowed, np.exp(logits), 0.0) if allowed.any() else np.ones(KEYS)
    weights = weights / weights.sum() * dropout[row, head, 0]
    attended[row, at, head] = weights @ value[row, :, head]
  return attended


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("dropout", [{}, {"weight_dropout": 0.5}], ids=["by key", "one number"])
def test_attention_is_its_definition(implementation, dropout):
  arrays, mask = inputs()
  arrays |= dropout
  found = jax.jit(attend, static_argnames="implementation")(
    **arrays, mask=mask, implementation=implementation
  )
  np.testing.assert_allclose(found, by_definition(arrays, mask), atol=1e-5)


@pytest.mark.parametrize("float32_logits", [False, True])
def test_implementations_have_the_same_gradients_of_everything(float32_logits):
  """That of the bias of all rows too, which every row adds to."""
  arrays, mask = inputs()

  def gradients(implementation):
    def loss(arrays):
      out = attend(**arrays, mask=mask, implementation=implementation, float32_logits=float32_logits)
      return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return jax.jit(jax.grad(loss))(arrays)

  reference, xla = gradients("reference"), gradients("xla")
  for name, expected in reference.items():
    np.testing.assert_allclose(xla[name], expected, atol=1e-5, err_msg=name)
    assert np.abs(expected).max() > 0.1, name


@pytest.mark.parametrize("with_dropout", [True, False])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_grouped_heads_are_repeated_heads_and_a_scale_is_of_the_logits_alone(implementation, with_dropout):
  arrays, mask = inputs()
  if not with_dropout:
    arrays["weight_dropout"] = 1.0
  first_heads = {name: arrays[name][:, :, :1] for name in ("key", "value")}
  repeated = {name: jnp.repeat(heads, HEADS, axis=2) for name, heads in first_heads.items()}
  repeated["query"] = arrays["query"] / 4.0
  expected = attend(**arrays | repeated, mask=mask)
  found = attend(**arrays | first_heads, mask=mask, scale=0.25, implementation=implementation)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_float32_logits_round_less():
  arrays, mask = inputs(jnp.bfloat16)
  exact = by_definition(arrays, mask)

  def error(**options):
    return np.abs(np.asarray(attend(**arrays, mask=mask, **options), np.float64) - exact).mean()

  assert error(float32_logits=True) < 0.8 * error()
  assert error(implementation="xla") < 0.8 * error()


def test_cudnn_is_refused_with_a_bias():
  arrays, mask = inputs(jnp.bfloat16)
  with pytest.raises(AnystepError) as refused:
    attend(**arrays, mask=mask, implementation="cudnn")
  assert (refused.value.code, refused.value.kind) == (78, "attention_implementation")
  assert "no gradient" in refused.value.fields["expected"]


def test_cudnn_without_a_bias_is_jaxs(monkeypatch):
  """The mask goes to cuDNN as it is, and dropout into the values, which is the same."""
  arrays, mask = inputs()
  del arrays["bias"]
  called = []

  def dot_product_attention(
    query, key, value, *, mask, scale, implementation, original=jax.nn.dot_product_attention
  ):
    called.append(implementation)
    return original(query, key, value, mask=mask, scale=scale, implementation="xla")

  expected = attend(**arrays, mask=mask)
  monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
  np.testing.assert_allclose(attend(**arrays, mask=mask, implementation="cudnn"), expected, atol=1e-5)
  assert called == ["cudnn"]


def test_a_config_that_would_leave_biases_untrained_is_refused():
  with pytest.raises(AnystepError) as refused:
    T5Config(vocab_size=8, attention_implementation="cudnn")
  assert refused.value.kind == "attention_implementation"
  assert T5Config(vocab_size=8, cross_attention_implementation="cudnn", dtype="bfloat16")
  with pytest.raises(AnystepError, match="bfloat16 or float16 for cudnn"):
    T5Config(vocab_size=8, cross_attention_implementation="cudnn")
