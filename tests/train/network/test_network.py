"""Promises of the networks' masks, dropout and rounding; test_families.py has T5X's numbers."""

import doctest
import importlib
import itertools
import json
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.network.attention import attention_mask
from anystep.train.network.decoder_only import DecoderConfig, DecoderWrapper
from anystep.train.network.dropout import draw_dropout, layer_keys
from anystep.train.network.layers import RMSNorm
from anystep.train.network.relative_positions import relative_position_buckets
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer

FIXTURES = Path(__file__).parents[2] / "fixtures"
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


def tiny_model(**overrides):
  return EncoderDecoderModel(Transformer(T5Config(**TINY | overrides)))


TINY_MODELS = {
  "t5": lambda: tiny_model(dropout_rate=0.1),
  "scalable_t5": lambda: EncoderDecoderModel(
    ScalableTransformer(ScalableT5Config(**TINY, dropout_rate=0.1, scan_layers=False))
  ),
  "decoder_only": lambda: DecoderOnlyModel(
    DecoderWrapper(
      DecoderConfig(
        **{name: size for name, size in TINY.items() if "coder" not in name}, num_layers=1, dropout_rate=0.1
      )
    )
  ),
}
FAMILIES = tuple(TINY_MODELS)


def initial_params(model):
  return model.initial_variables(jax.random.key(0))["params"]


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
  params = initial_params(model)
  batch = tiny_batch() | {"decoder_loss_weights": jnp.array([[1, 1, 1, 1], [0, 0, 0, 0]])}
  other = {name: array.at[1].set(jnp.arange(array.shape[1]) + 2) for name, array in batch.items()}
  other["decoder_loss_weights"] = batch["decoder_loss_weights"]
  gradient = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))
  jax.tree.map(np.testing.assert_array_equal, gradient(params, batch), gradient(params, other))


def test_padding_does_not_touch_the_logits():
  model = tiny_model()
  params = initial_params(model)
  batch = tiny_batch()
  longer = {name: jnp.pad(array, ((0, 0), (0, 3))) for name, array in batch.items()}
  valid = batch["decoder_target_tokens"] > 0
  np.testing.assert_allclose(
    logits(model, params, longer)[:, :4][valid], logits(model, params, batch)[valid], atol=1e-5
  )


def test_a_logit_depends_on_no_later_input():
  model = tiny_model()
  params = initial_params(model)
  batch = tiny_batch()
  changed = batch | {"decoder_input_tokens": batch["decoder_input_tokens"].at[0, 2].set(20)}
  before, after = logits(model, params, batch)[0], logits(model, params, changed)[0]
  np.testing.assert_array_equal(before[:2], after[:2])
  assert np.all(np.any(before[2:] != after[2:], axis=-1))


def test_a_packed_row_has_the_logits_of_its_examples():
  model = tiny_model()
  params = initial_params(model)
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


def test_embeddings_are_products_as_in_t5x_unless_gathered():
  """A product's gradient is one too: no sum in whatever order threads come. Both look up the same."""
  tokens, weights = jnp.array([[5, 6, 5, 31], [4, 3, 1, 0]]), jnp.arange(8 * 16.0).reshape(2, 4, 16)
  found, programs = {}, {}
  for lookup in (T5Config(**TINY).embedding_lookup, "gather"):
    embedding = T5Config(**TINY, embedding_lookup=lookup).embedding()
    params = embedding.init(jax.random.key(0), tokens)

    def loss(params, embedding=embedding):
      return jnp.sum(embedding.apply(params, tokens) * weights)

    gradient = jax.jit(jax.grad(loss))
    programs[lookup] = gradient.lower(params).as_text()
    found[lookup] = embedding.apply(params, tokens), gradient(params)
  assert ("scatter" in programs["one_hot"], "scatter" in programs["gather"]) == (False, True)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found["one_hot"], found["gather"])


@pytest.mark.parametrize(("lookup", "expected"), [("one_hot", 0.0), ("gather", np.nan)])
def test_an_id_outside_the_vocabulary_has_no_embedding(lookup, expected):
  embedding = T5Config(**TINY, embedding_lookup=lookup).embedding()
  params = embedding.init(jax.random.key(0), jnp.array([[1]]))
  np.testing.assert_array_equal(embedding.apply(params, jnp.array([[32]])), np.full((1, 1, 16), expected))


def test_segments_of_one_side_alone_are_refused():
  valid = jnp.ones((1, 2), bool)
  with pytest.raises(ValueError, match="queries but not for the keys"):
    attention_mask(valid, valid, query_segments=jnp.ones((1, 2), jnp.int32))
  with pytest.raises(ValueError, match="keys but not for the queries"):
    attention_mask(valid, valid, key_segments=jnp.ones((1, 2), jnp.int32))


def test_dropout_is_a_function_of_its_key():
  model = tiny_model(dropout_rate=0.5)
  params = initial_params(model)
  loss_fn = jax.jit(model.loss_fn)

  def loss(key):
    return float(loss_fn(params, tiny_batch(), key)[0])

  keys = [jax.random.key(1), jax.random.key(2), None]
  assert len({loss(key) for key in keys}) == 3
  assert [loss(key) for key in keys] == [loss(key) for key in keys]


def test_without_dropout_no_random_numbers_are_drawn():
  def program(rate, dropout_rng):
    model = tiny_model(dropout_rate=rate)
    params = jax.eval_shape(model.initial_variables, jax.random.key(0))["params"]
    return str(jax.make_jaxpr(model.loss_fn)(params, tiny_batch(), dropout_rng))

  assert "random_bits" in program(0.1, jax.random.key(0))
  for rate, rng in [(0.0, jax.random.key(0)), (0.1, None), (0.0, None)]:
    assert "random_bits" not in program(rate, rng), (rate, rng)


def row_keys(num_rows, seed=7):
  return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(num_rows))


def test_dropout_scales_what_it_keeps_and_shares_masks_along_the_length():
  shapes = {"weights": (4, 1, 50), "mlp": (1, 300)}
  factors = draw_dropout(row_keys(40), 0.25, shapes=shapes, dtype=jnp.float32)
  assert {name: array.shape for name, array in factors.items()} == {
    "weights": (40, 4, 1, 50),
    "mlp": (40, 1, 300),
  }
  for array in factors.values():
    assert set(np.unique(array)) == {np.float32(0), np.float32(1 / 0.75)}
    assert np.mean(array) == pytest.approx(1.0, abs=0.05)
    assert len({row.tobytes() for row in np.asarray(array)}) == 40


def test_masks_of_a_row_depend_on_no_other_row():
  shapes = {"weights": (4, 1, 50), "mlp": (1, 300)}
  whole = draw_dropout(row_keys(8), 0.25, shapes=shapes, dtype=jnp.float32)
  part = draw_dropout(row_keys(8)[4:6], 0.25, shapes=shapes, dtype=jnp.float32)
  for name in shapes:
    np.testing.assert_array_equal(part[name], whole[name][4:6])


def test_each_layer_and_each_stack_draws_masks_of_its_own():
  keys = [layer_keys(row_keys(3), stack=stack, num_layers=4) for stack in (0, 1)]
  data = jax.random.key_data(jnp.stack([*keys[0], *keys[1]])).reshape(-1, 2)
  assert len({key.tobytes() for key in np.asarray(data)}) == 2 * 5 * 3


@pytest.fixture
def recorded_shapes(monkeypatch):
  """Shapes of the masks that each call of `draw_dropout` asks for, in order."""
  calls = []

  def record(row_keys, rate, *, shapes, dtype):
    calls.append(dict(shapes))
    return dict.fromkeys(shapes, 1.0)

  for module in FAMILIES:
    monkeypatch.setattr(f"anystep.train.network.{module}.draw_dropout", record)
  return calls


def test_masks_are_shared_where_t5xs_are(recorded_shapes):
  """dropout_shape.json is what T5X's own masks were read off as."""
  model = tiny_model()
  params = initial_params(model)
  recorded_shapes.clear()
  logits(model, params, tiny_batch())
  sizes = {"embed": TINY["emb_dim"], "mlp": TINY["mlp_dim"], "heads": TINY["num_heads"], "1 (shared)": 1}
  sizes |= {"encoder length": 6, "decoder length": 4}
  (t5x,) = json.loads((FIXTURES / "t5x" / "dropout_shape" / "dropout_shape.json").read_text())["models"]
  t5xs = [tuple(sizes[axis] for axis in mask["mask_axes"][1:]) for mask in t5x["masks"]]
  # T5X's are in the order of its program: its encoder's first, then its layers', then its last.
  encoder_ends, encoder_layer, decoder_ends, decoder_layer = (list(call.values()) for call in recorded_shapes)
  ours = [encoder_ends[0], *encoder_layer, encoder_ends[1], decoder_ends[0], *decoder_layer, decoder_ends[1]]
  assert ours == t5xs
  assert encoder_ends[1] == (6, TINY["emb_dim"])


@pytest.mark.parametrize(
  ("family", "decoder_layer"),
  [
    ("t5", ["weights", "attention", "cross_weights", "cross_attention", "hidden", "mlp"]),
    pytest.param(
      "scalable_t5",
      ["weights", "attention", "cross_weights", "cross_attention", "hidden", "mlp"],
      marks=pytest.mark.long,
    ),
    ("decoder_only", ["weights", "attention", "hidden", "mlp"]),
  ],
)
def test_every_place_where_t5_drops_out_does(family, decoder_layer, recorded_shapes, monkeypatch):
  model = TINY_MODELS[family]()
  params = initial_params(model)
  recorded_shapes.clear()
  kept = jax.jit(model.logits)(params, tiny_batch())
  encoder = [] if family == "decoder_only" else [["first", "last"], ["weights", "attention", "hidden", "mlp"]]
  assert [list(call) for call in recorded_shapes] == [*encoder, ["first", "last"], decoder_layer]

  factors = {(call, place): 1.0 for call, shapes in enumerate(recorded_shapes) for place in shapes}
  traced = {}

  def replay(row_keys, rate, *, shapes, dtype):
    call = next(calls)
    return {place: traced[call, place] for place in shapes}

  for module in FAMILIES:
    monkeypatch.setattr(f"anystep.train.network.{module}.draw_dropout", replay)

  @jax.jit
  def logits_with(factors):
    traced.update(factors)
    return model.logits(params, tiny_batch())

  for place in factors:
    calls = itertools.count()
    dropped = logits_with(factors | {place: 0.0})
    assert not np.allclose(dropped, kept, atol=1e-3), place
  np.testing.assert_allclose(logits_with(factors), kept, atol=1e-5)


@pytest.mark.parametrize("via_embedding", [False, True])
def test_final_logits_are_float32_products(via_embedding):
  """Of kernels that are not rounded; T5 1.0's are of the embedding, divided by sqrt(emb_dim)."""
  activations = ("relu",) if via_embedding else ("gelu", "linear")
  model = tiny_model(dtype="bfloat16", logits_via_embedding=via_embedding, mlp_activations=activations)
  params = initial_params(model)
  assert ("logits_dense" in params["decoder"]) is not via_embedding
  assert set(params["decoder"]["layers_0"]["mlp"]) == {"wo"} | ({"wi"} if via_embedding else {"wi_0", "wi_1"})

  def is_norm(module, method):
    return module.name == "decoder_norm"

  found, state = logits(model, params, tiny_batch(), capture_intermediates=is_norm)
  (normed,) = state["intermediates"]["decoder"]["decoder_norm"]["__call__"]
  if via_embedding:
    kernel = np.asarray(params["token_embedder"]["embedding"], np.float64).T / np.sqrt(16)
  else:
    kernel = np.asarray(params["decoder"]["logits_dense"]["kernel"], np.float64)
  assert (normed.dtype, found.dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(found, np.asarray(normed, np.float64) @ kernel, rtol=1e-5, atol=1e-5)


def test_a_norm_rounds_before_it_scales():
  """As T5X's does, and Linen's does not."""
  rng = np.random.default_rng(0)
  x, scale = rng.standard_normal((40, 64)), rng.standard_normal(64)
  normalized = (x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
  expected = normalized * scale.astype(jnp.bfloat16)
  params = {"params": {"scale": jnp.asarray(scale, jnp.float32)}}

  def share_of_others(norm):
    return np.mean(np.asarray(norm.apply(params, jnp.asarray(x, jnp.float32))) != expected)

  assert share_of_others(RMSNorm(dtype=jnp.bfloat16)) < 0.01
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    assert share_of_others(nn.RMSNorm(dtype=jnp.bfloat16)) > 0.1


@pytest.mark.parametrize("float32_logits", [pytest.param(False, marks=pytest.mark.long), True])
def test_bfloat16_keeps_parameters_and_logits_in_float32(float32_logits):
  model = tiny_model(dtype="bfloat16", float32_attention_logits=float32_logits, dropout_rate=0.1)
  params = initial_params(model)
  dropped = logits(model, params, tiny_batch(), row_keys=row_keys(2))
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
    ({"dropout_rate": None}, r"T5Config.dropout_rate: expected a rate in \[0, 1\), got None"),
    ({"logits_via_embedding": "no"}, "T5Config.logits_via_embedding: expected True or False, got 'no'"),
    ({"dtype": "int32"}, "T5Config.dtype: expected 'float32' or 'bfloat16', got 'int32'"),
    ({"dtype": "bfloat17"}, "T5Config.dtype: expected 'float32' or 'bfloat16', got 'bfloat17'"),
    ({"dtype": None}, "T5Config.dtype: expected 'float32' or 'bfloat16', got None"),
    ({"mlp_activations": (1,)}, "T5Config.mlp_activations: expected names"),
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
    "models.losses",
    *(f"optimizers.{name}" for name in ("learning_rates", "parameter_groups", "parameter_patterns")),
  ],
)
def test_the_examples_in_docstrings_hold(name):
  failures, _ = doctest.testmod(importlib.import_module(f"anystep.train.{name}"))
  assert failures == 0
