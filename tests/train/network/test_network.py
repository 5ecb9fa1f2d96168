"""The network against T5X's numbers, and what its masks and its dropout promise."""

import doctest
import importlib
import re
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.network.attention import attention_mask
from anystep.train.network.dropout import draw_dropout
from anystep.train.network.relative_positions import relative_position_buckets
from anystep.train.network.t5 import T5Config, Transformer

T5X = Path(__file__).parents[2] / "fixtures" / "t5x_t5_1_1"
SIZES = {
  "vocab_size": 384,
  "emb_dim": 64,
  "num_heads": 4,
  "head_dim": 16,
  "mlp_dim": 128,
  "num_encoder_layers": 2,
  "num_decoder_layers": 3,
}
TINY = SIZES | {
  "vocab_size": 32,
  "emb_dim": 16,
  "mlp_dim": 32,
  "num_encoder_layers": 1,
  "num_decoder_layers": 1,
}


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def t5x_params(step):
  with np.load(T5X / f"params_{step}.npz") as arrays:
    return unflatten_dict(dict(arrays), sep="/")


def t5x_batch(step):
  with np.load(T5X / "batches.npz") as arrays:
    return {name: jnp.asarray(arrays[name][8 * step : 8 * step + 8]) for name in arrays}


def tiny_model(**overrides):
  return EncoderDecoderModel(Transformer(T5Config(**TINY | overrides)))


def tiny_batch():
  """Two rows, the second with padding in all features; targets are the inputs shifted left."""
  return {
    "encoder_input_tokens": jnp.array([[5, 6, 7, 8, 9, 1], [4, 3, 1, 0, 0, 0]]),
    "decoder_input_tokens": jnp.array([[0, 11, 12, 13], [0, 14, 0, 0]]),
    "decoder_target_tokens": jnp.array([[11, 12, 13, 1], [14, 1, 0, 0]]),
    "decoder_loss_weights": jnp.array([[1, 1, 1, 1], [1, 1, 0, 0]]),
  }


def logits(model, params, batch, **kwargs):
  def apply(params, batch):
    return model.module.apply(
      {"params": params},
      batch["encoder_input_tokens"],
      batch["decoder_input_tokens"],
      decoder_target_tokens=batch["decoder_target_tokens"],
      **kwargs,
    )

  return jax.jit(apply)(params, batch)


def test_parameters_have_t5x_names_shapes_and_axes():
  pattern = r"Variable (\S+) .* shape \((.*?)\) "
  t5x = {}
  for name, dims in re.findall(pattern, (T5X / "model-info.txt").read_text()):
    pairs = [dim.split("=") for dim in dims.split(", ")]
    t5x[name] = tuple((axis, int(size)) for axis, size in pairs)

  model = EncoderDecoderModel(Transformer(T5Config(**SIZES)))
  shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)), sep="/")
  axes = flatten_dict(model.logical_axes(), sep="/")
  ours = {name: tuple(zip(axes[name], shapes[name].shape, strict=True)) for name in shapes}
  assert ours == t5x


def test_the_first_loss_is_t5xs():
  model = EncoderDecoderModel(Transformer(T5Config(**SIZES)))
  loss, metrics = jax.jit(model.loss_fn)(t5x_params(0), t5x_batch(0))
  assert float(loss) == pytest.approx(935.1600341796875, rel=1e-6)
  assert int(metrics["weight_sum"]) == int(np.sum(t5x_batch(0)["decoder_loss_weights"]))


def test_initial_parameters_have_the_spread_of_t5xs():
  model = EncoderDecoderModel(Transformer(T5Config(**SIZES)))
  ours, t5x = (flatten_dict(tree, sep="/") for tree in (model.init(jax.random.key(0)), t5x_params(0)))
  for name, values in t5x.items():
    # Eight standard errors of the standard deviation of that many normal draws.
    tolerance = 8 / np.sqrt(2 * values.size)
    assert np.std(ours[name]) == pytest.approx(np.std(values), rel=tolerance), name
    assert ours[name].dtype == jnp.float32
  largest = {name: np.abs(ours[name]).max() for name in ours if "/wi_" in name or "logits" in name}
  assert max(largest.values()) < 2.3 / np.sqrt(64)  # truncated at two standard deviations, then rescaled


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (32, 100)])
def test_buckets_are_exact(num_buckets, max_distance):
  exact = num_buckets // 2
  far = num_buckets - exact

  def bucket(distance):
    if distance < exact:
      return distance
    steps = 0
    # Integers where the formula has logarithms: (distance / exact)^far >= (max_distance / exact)^steps.
    while steps < far - 1 and Fraction(distance, exact) ** far >= Fraction(max_distance, exact) ** (
      steps + 1
    ):
      steps += 1
    return exact + steps

  distances = np.arange(300)
  expected = [bucket(int(d)) for d in distances]
  options = {"max_distance": max_distance}
  causal = relative_position_buckets(-distances, bidirectional=False, num_buckets=num_buckets, **options)
  before = relative_position_buckets(-distances, bidirectional=True, num_buckets=2 * num_buckets, **options)
  after = relative_position_buckets(distances[1:], bidirectional=True, num_buckets=2 * num_buckets, **options)
  assert causal.tolist() == expected
  assert before.tolist() == expected
  assert after.tolist() == [num_buckets + b for b in expected[1:]]


def test_rows_without_weight_do_not_touch_the_loss():
  model = tiny_model()
  params = model.init(jax.random.key(0))
  batch = tiny_batch() | {"decoder_loss_weights": jnp.array([[1, 1, 1, 1], [0, 0, 0, 0]])}
  other = {name: array.at[1].set(jnp.arange(array.shape[1]) + 2) for name, array in batch.items()}
  other["decoder_loss_weights"] = batch["decoder_loss_weights"]
  gradient = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))
  jax.tree.map(np.testing.assert_array_equal, gradient(params, batch), gradient(params, other))


def test_padding_does_not_touch_the_logits():
  model = tiny_model()
  params = model.init(jax.random.key(0))
  batch = tiny_batch()
  longer = {name: jnp.pad(array, ((0, 0), (0, 3))) for name, array in batch.items()}
  valid = batch["decoder_target_tokens"] > 0
  np.testing.assert_allclose(
    logits(model, params, longer)[:, :4][valid], logits(model, params, batch)[valid], atol=1e-5
  )


def test_a_logit_depends_on_no_later_input():
  model = tiny_model()
  params = model.init(jax.random.key(0))
  batch = tiny_batch()
  changed = batch | {"decoder_input_tokens": batch["decoder_input_tokens"].at[0, 2].set(20)}
  before, after = logits(model, params, batch)[0], logits(model, params, changed)[0]
  np.testing.assert_array_equal(before[:2], after[:2])
  assert np.all(np.any(before[2:] != after[2:], axis=-1))


def test_a_packed_row_has_the_logits_of_its_examples():
  model = tiny_model()
  params = model.init(jax.random.key(0))
  batch = tiny_batch()
  packed = {
    "encoder_input_tokens": jnp.array([[5, 6, 7, 8, 9, 1, 4, 3, 1, 0]]),
    "encoder_segment_ids": jnp.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]]),
    "decoder_input_tokens": jnp.array([[0, 11, 12, 13, 0, 14, 0]]),
    "decoder_target_tokens": jnp.array([[11, 12, 13, 1, 14, 1, 0]]),
    "decoder_segment_ids": jnp.array([[1, 1, 1, 1, 2, 2, 0]]),
    "decoder_loss_weights": jnp.array([[1, 1, 1, 1, 1, 1, 0]]),
  }
  score = jax.jit(model.score_batch)
  apart = score(params, batch)["token_scores"]
  together = score(params, packed)["token_scores"][0]
  np.testing.assert_allclose(together[:6], jnp.concatenate([apart[0], apart[1, :2]]), atol=1e-5)


def test_segments_of_one_side_alone_are_refused():
  valid = jnp.ones((1, 2), bool)
  with pytest.raises(ValueError, match="queries but not for the keys"):
    attention_mask(valid, valid, query_segments=jnp.ones((1, 2), jnp.int32))
  with pytest.raises(ValueError, match="keys but not for the queries"):
    attention_mask(valid, valid, key_segments=jnp.ones((1, 2), jnp.int32))


def test_dropout_is_a_function_of_its_key():
  model = tiny_model(dropout_rate=0.5)
  params = model.init(jax.random.key(0))
  loss_fn = jax.jit(model.loss_fn)

  def loss(key):
    return float(loss_fn(params, tiny_batch(), key)[0])

  keys = [jax.random.key(1), jax.random.key(2), None]
  assert len({loss(key) for key in keys}) == 3
  assert [loss(key) for key in keys] == [loss(key) for key in keys]


def test_without_dropout_no_random_numbers_are_drawn():
  def program(rate, dropout_rng):
    model = tiny_model(dropout_rate=rate)
    params = jax.eval_shape(model.init, jax.random.key(0))
    return str(jax.make_jaxpr(model.loss_fn)(params, tiny_batch(), dropout_rng))

  assert "random_bits" in program(0.1, jax.random.key(0))
  for rate, rng in [(0.0, jax.random.key(0)), (0.1, None), (0.0, None)]:
    assert "random_" not in program(rate, rng), (rate, rng)


def test_dropout_scales_what_it_keeps_and_shares_masks_along_the_length():
  class Stream:
    """As much of a Linen module as `draw_dropout` uses."""

    def has_rng(self, name):
      return name == "dropout"

    def make_rng(self, name):
      return jax.random.key(7)

  shapes = {"weights": (4, 1, 50), "mlp": (1, 300)}
  factors = draw_dropout(Stream(), 0.25, rows=40, shapes=shapes, dtype=jnp.float32)
  assert {name: array.shape for name, array in factors.items()} == {
    "weights": (40, 4, 1, 50),
    "mlp": (40, 1, 300),
  }
  for array in factors.values():
    assert set(np.unique(array)) == {np.float32(0), np.float32(1 / 0.75)}
    assert np.mean(array) == pytest.approx(1.0, abs=0.05)


def test_every_place_where_t5_drops_out_does(monkeypatch):
  model = tiny_model(dropout_rate=0.1)
  params = model.init(jax.random.key(0))
  factors = {}

  def record(module, rate, *, shapes, **_):
    factors.update({(*module.path, place): 1.0 for place in shapes})
    return dict.fromkeys(shapes, 1.0)

  def replay(module, rate, *, shapes, **_):
    return {place: traced[(*module.path, place)] for place in shapes}

  monkeypatch.setattr("anystep.train.network.t5.draw_dropout", record)
  kept = logits(model, params, tiny_batch())
  layer = ["weights", "attention", "hidden", "mlp"]
  places = {
    ("encoder",): ["first", "last"],
    ("decoder",): ["first", "last"],
    ("encoder", "layers_0"): layer,
    ("decoder", "layers_0"): [*layer, "cross_weights", "cross_attention"],
  }
  assert set(factors) == {(*path, place) for path, names in places.items() for place in names}

  monkeypatch.setattr("anystep.train.network.t5.draw_dropout", replay)
  traced = {}

  @jax.jit
  def logits_with(factors):
    traced.update(factors)
    return logits(model, params, tiny_batch())

  for place in factors:
    dropped = logits_with(factors | {place: 0.0})
    assert not np.allclose(dropped, kept, atol=1e-3), place
  np.testing.assert_allclose(logits_with(factors), kept, atol=1e-5)


def test_t5_1_0_takes_its_logits_from_the_embedding():
  model = tiny_model(logits_via_embedding=True, mlp_activations=("relu",))
  params = model.init(jax.random.key(0))
  assert "logits_dense" not in params["decoder"]
  assert set(params["decoder"]["layers_0"]["mlp"]) == {"wi", "wo"}

  def is_norm(module, method):
    return module.name == "decoder_norm"

  found, state = logits(model, params, tiny_batch(), capture_intermediates=is_norm)
  (normed,) = state["intermediates"]["decoder"]["decoder_norm"]["__call__"]
  table = params["token_embedder"]["embedding"]
  np.testing.assert_allclose(
    found, jnp.einsum("ble,ve->blv", normed, table) / np.sqrt(16), rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize("float32_logits", [pytest.param(False, marks=pytest.mark.soak), True])
def test_bfloat16_keeps_parameters_and_logits_in_float32(float32_logits):
  model = tiny_model(dtype="bfloat16", float32_attention_logits=float32_logits, dropout_rate=0.1)
  with jax.numpy_dtype_promotion("standard"):  # Linen's RMSNorm promotes bfloat16 to float32 unasked
    params = model.init(jax.random.key(0))
    dropped = logits(model, params, tiny_batch(), rngs={"dropout": jax.random.key(0)})
    rounded = logits(model, params, tiny_batch())
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  assert dropped.dtype == rounded.dtype == jnp.float32
  exact = logits(tiny_model(), params, tiny_batch())
  np.testing.assert_allclose(rounded, exact, atol=0.1)
  assert not np.allclose(dropped, exact, atol=0.1)


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"emb_dim": 0}, "T5Config.emb_dim: expected a positive integer, got 0"),
    ({"num_heads": 2.0}, "T5Config.num_heads: expected a positive integer, got 2.0"),
    ({"dropout_rate": 1.0}, r"T5Config.dropout_rate: expected a rate in \[0, 1\), got 1.0"),
    ({"mlp_activations": "gelu"}, "T5Config.mlp_activations: expected names"),
    ({"mlp_activations": ("gellu",)}, "no activation 'gellu'"),
    ({"mlp_activations": ("Dense",)}, "no activation 'Dense'"),
  ],
)
def test_a_config_that_cannot_be_is_refused(overrides, message):
  with pytest.raises(ValueError, match=message):
    T5Config(**SIZES | overrides)


def test_configs_from_files_equal_those_from_code():
  from_file = T5Config(**SIZES, mlp_activations=["gelu", "linear"], dtype="bfloat16")
  from_code = T5Config(**SIZES, mlp_activations=("gelu", "linear"), dtype=jnp.bfloat16)
  assert from_file == from_code
  assert hash(from_file) == hash(from_code)


@pytest.mark.parametrize(
  "name",
  [
    *(f"network.{name}" for name in ("attention", "dropout", "layers", "t5", "relative_positions")),
    *("models.learning_rates", "models.losses"),
  ],
)
def test_the_examples_in_docstrings_hold(name):
  failures, _ = doctest.testmod(importlib.import_module(f"anystep.train.{name}"))
  assert failures == 0
