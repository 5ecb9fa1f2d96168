"""Llama: what its positions, grouped heads, loops and packed rows promise.

Hugging Face's numbers are those of tests/train/conversion/test_hugging_face_llama.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from anystep.errors import AnystepError
from anystep.features.converters import DecoderConverter
from anystep.features.ragged import Ragged
from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.network.llama import Llama, LlamaConfig
from anystep.train.network.relative_positions import make_rotation, rotary_frequencies

CONFIG = LlamaConfig(
  vocab_size=32, emb_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24, num_layers=2
)
LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def model_of(config=CONFIG, **choices):
  return DecoderOnlyModel(Llama(dataclasses.replace(config, **choices)))


def params_of(model):
  """Random values, larger than the initial ones, so that differences show."""
  shapes = jax.eval_shape(model.initial_variables, jax.random.key(0))["params"]
  leaves, tree = jax.tree.flatten(shapes)
  rng = np.random.default_rng(0)
  draws = [jnp.asarray(rng.normal(0.0, 0.5, leaf.shape), jnp.float32) for leaf in leaves]
  return jax.tree.unflatten(tree, draws)


def unscanned(params):
  flat = flatten_dict(params, sep="/")
  named = {}
  for name, leaf in flat.items():
    start, found, inner = name.partition("/layers/")
    if found:
      named |= {f"{start}/layers_{i}/{inner}": leaf[:, i] for i in range(leaf.shape[1])}
    else:
      named[name] = leaf
  return unflatten_dict(named, sep="/")


def ragged(*rows):
  return Ragged(np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows]))


def batch_of(counts=None, *, prefix=False):
  """Three texts, each a row, or in packed rows of as many as `counts` says."""
  rng = np.random.default_rng(1)
  features = {"targets": ragged(*(rng.integers(2, 32, size) for size in (4, 3, 5)))}
  lengths = {"targets": 8}
  if prefix:
    features["inputs"], lengths["inputs"] = ragged(*(rng.integers(2, 32, size) for size in (3, 2, 1))), 4
  return DecoderConverter()(features, lengths, None if counts is None else np.array(counts))


def loss_and_gradient(model, params, batch):
  (loss, _), gradient = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(params, batch)
  return loss, gradient


@pytest.fixture(scope="module")
def expected():
  """Parameters, a batch, and the loss and the gradient that others are compared with."""
  model, batch = model_of(), batch_of([2, 1])
  params = params_of(model)
  return params, batch, loss_and_gradient(model, params, batch)


def assert_near(tree, other, tolerance=1e-5):
  for (path, one), two in zip(
    jax.tree_util.tree_flatten_with_path(tree)[0], jax.tree.leaves(other), strict=True
  ):
    scale = max(1.0, float(np.abs(two).max()))
    np.testing.assert_allclose(
      np.asarray(one) / scale, np.asarray(two) / scale, atol=tolerance, err_msg=str(path)
    )


def test_parameters_have_the_decoders_names_and_the_logical_axes_of_scanned_layers():
  model = model_of()
  shapes = flatten_dict(jax.eval_shape(model.initial_variables, jax.random.key(0))["params"], sep="/")
  axes = flatten_dict(model.logical_axes()["params"], sep="/")
  described = {name: " ".join(map(str, (*axes[name], *leaf.shape))) for name, leaf in shapes.items()}
  layers = {
    "pre_self_attention_layer_norm/scale": "embed layers 16 2",
    "self_attention/query/kernel": "embed layers heads kv 16 2 4 4",
    "self_attention/key/kernel": "embed layers heads kv 16 2 2 4",
    "self_attention/value/kernel": "embed layers heads kv 16 2 2 4",
    "self_attention/out/kernel": "heads layers kv embed 4 2 4 16",
    "pre_mlp_layer_norm/scale": "embed layers 16 2",
    "mlp/wi_0/kernel": "embed layers mlp 16 2 24",
    "mlp/wi_1/kernel": "embed layers mlp 16 2 24",
    "mlp/wo/kernel": "mlp layers embed 24 2 16",
  }
  assert described == {
    "decoder/token_embedder/embedding": "vocab embed 32 16",
    "decoder/decoder_norm/scale": "embed 16",
    "decoder/logits_dense/kernel": "embed vocab 16 32",
    **{f"decoder/layers/{name}": text for name, text in layers.items()},
  }
  tied = jax.eval_shape(model_of(logits_via_embedding=True).initial_variables, jax.random.key(0))["params"]
  assert set(flatten_dict(tied, sep="/")) == set(shapes) - {"decoder/logits_dense/kernel"}


@LONG
@pytest.mark.parametrize("tied", [False, True])
def test_initial_logits_are_near_one(tied):
  model = model_of(logits_via_embedding=tied, vocab_size=512, emb_dim=128)
  params = model.initial_variables(jax.random.key(0))["params"]
  logits = model.logits(params, batch_of())
  assert 0.5 < float(jnp.std(logits)) < 2.0


def test_scanned_layers_are_layers_one_after_the_other(expected):
  params, batch, (loss, gradient) = expected
  one_by_one = loss_and_gradient(model_of(scan_layers=False), unscanned(params), batch)
  assert_near(one_by_one, (loss, unscanned(gradient)))


@pytest.mark.parametrize(
  ("policy", "scan_layers"),
  [("full", True), *(pytest.param(*case, marks=LONG) for case in [("minimal", True), ("full", False)])],
)
def test_what_is_computed_again_changes_nothing(policy, scan_layers, expected):
  params, batch, (loss, gradient) = expected
  if not scan_layers:
    params, gradient = unscanned(params), unscanned(gradient)
  again = loss_and_gradient(model_of(scan_layers=scan_layers, remat_policy=policy), params, batch)
  assert_near(again, (loss, gradient))


@pytest.mark.parametrize("prefix", [False, pytest.param(True, marks=LONG)])
def test_a_packed_row_has_the_scores_of_its_examples(prefix):
  model = dataclasses.replace(model_of(), inputs_bidirectional_attention=prefix)
  params = params_of(model)
  score = jax.jit(model.score_batch)
  apart, packed = batch_of(prefix=prefix), batch_of([2, 1], prefix=prefix)
  assert packed["decoder_positions"].max() < 8
  scores, together = (np.asarray(score(params, batch)["token_scores"]) for batch in (apart, packed))
  sizes = [int((row > 0).sum()) for row in apart["decoder_target_tokens"]]
  first = np.concatenate([scores[0, : sizes[0]], scores[1, : sizes[1]]])
  np.testing.assert_allclose(together[0, : len(first)], first, atol=1e-5)
  np.testing.assert_allclose(together[1, : sizes[2]], scores[2, : sizes[2]], atol=1e-5)


@LONG
def test_packed_rows_have_their_own_positions():
  """Rotary positions know distances alone, so only the numbers' last digits tell which were used."""
  model = model_of()
  params, packed = params_of(model), batch_of([2, 1])
  apply = jax.jit(model.logits)
  logits = apply(params, packed)
  moved = packed | {"decoder_positions": packed["decoder_positions"] + np.int32(1000)}
  np.testing.assert_allclose(apply(params, moved), logits, atol=1e-3)
  assert np.any(apply(params, moved) != logits)
  without = {name: value for name, value in packed.items() if name != "decoder_positions"}
  np.testing.assert_allclose(apply(params, without), logits, atol=1e-5)


@LONG
def test_a_token_of_id_0_in_a_packed_row_is_a_token():
  model = model_of()
  params, packed = params_of(model), batch_of([2, 1])
  apply = jax.jit(model.logits)
  targets = np.array(packed["decoder_target_tokens"])
  targets[0, 1] = 0
  logits = apply(params, packed)
  np.testing.assert_array_equal(apply(params, packed | {"decoder_target_tokens": targets}), logits)


@LONG
def test_inputs_see_each_other_in_a_prefix_language_model():
  model, batch = model_of(), batch_of(prefix=True)
  params = params_of(model)
  both_ways = dataclasses.replace(model, inputs_bidirectional_attention=True)
  changed = dict(batch, decoder_input_tokens=np.array(batch["decoder_input_tokens"]))
  # The input at place 2 is the second of the first row's three, which the one before it sees or not.
  changed["decoder_input_tokens"][0, 2] ^= 1
  for network, sees in [(model, False), (both_ways, True)]:
    before, after = (np.asarray(jax.jit(network.logits)(params, one)) for one in (batch, changed))
    assert bool(np.any(before[0, 1] != after[0, 1])) is sees
    assert np.any(before[0, 2] != after[0, 2])


@LONG
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_grouped_heads_are_repeated_heads(implementation):
  grouped = model_of(attention_implementation=implementation, dropout_rate=0.5)
  plain = model_of(num_kv_heads=4, dropout_rate=0.5)
  params, batch = params_of(grouped), batch_of([2, 1])
  repeated = {
    name: jnp.repeat(leaf, 2, axis=-2) if "/key/" in name or "/value/" in name else leaf
    for name, leaf in flatten_dict(params, sep="/").items()
  }
  repeated = unflatten_dict(repeated, sep="/")
  # With dropout, whose masks are of every head.
  loss, _ = jax.jit(grouped.loss_fn)(params, batch, jax.random.key(3))
  expected, _ = jax.jit(plain.loss_fn)(repeated, batch, jax.random.key(3))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


@LONG
def test_implementations_of_attention_have_the_same_gradients(expected):
  params, batch, reference = expected
  assert_near(loss_and_gradient(model_of(attention_implementation="xla"), params, batch), reference)


def test_cudnn_is_allowed_in_bfloat16_where_no_bias_is_learned():
  model = model_of(attention_implementation="cudnn", dtype="bfloat16")
  assert model.module.config.attention_implementation == "cudnn"
  with pytest.raises(AnystepError, match=r"attention_implementation.*got=float32"):
    model_of(attention_implementation="cudnn")


def test_rotation_is_by_the_definition_and_knows_distances_alone():
  rng = np.random.default_rng(0)
  query, key = (rng.normal(size=(1, 1, 1, 8)).astype(np.float32) for _ in range(2))
  frequencies = rotary_frequencies(8, theta=100.0)

  def turned(x, position):
    return np.asarray(make_rotation(jnp.array([[position]]), frequencies)(jnp.asarray(x)))[0, 0, 0]

  for position in (0, 1, 7):
    values = query[0, 0, 0].astype(np.float64)
    pairs = (values[:4] + 1j * values[4:]) * np.exp(1j * position * 100.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(turned(query, position), [*pairs.real, *pairs.imag], atol=1e-6)
  logits = [turned(query, 9 + shift) @ turned(key, 4 + shift) for shift in (0, 5, 100)]
  np.testing.assert_allclose(logits, logits[0], atol=1e-5)


def test_scaled_frequencies_are_llama_3_1s():
  """By Hugging Face's definition, which has a case for each band of wave lengths."""
  scaled = rotary_frequencies(
    128,
    theta=500_000.0,
    scaling_factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_length=8192,
  )
  bands = set()
  for number, frequency in enumerate(500_000.0 ** (-np.arange(0, 128, 2) / 128)):
    wave_length = 2 * math.pi / frequency
    if wave_length < 8192 / 4.0:
      band, expected = "high", frequency
    elif wave_length > 8192 / 1.0:
      band, expected = "low", frequency / 8.0
    else:
      smooth = (8192 / wave_length - 1.0) / (4.0 - 1.0)
      band, expected = "between", (1 - smooth) * frequency / 8.0 + smooth * frequency
    bands.add(band)
    assert scaled[number] == pytest.approx(expected, rel=1e-6)
  assert bands == {"high", "low", "between"}
  same = rotary_frequencies(128, theta=500_000.0)
  np.testing.assert_array_equal(same, (500_000.0 ** (-np.arange(0, 128, 2) / 128)).astype(np.float32))


@LONG
def test_scaling_norms_and_theta_reach_the_network():
  model, batch = model_of(), batch_of()
  params = params_of(model)
  logits = model.logits(params, batch)
  scaling = {"rope_scaling_factor": 8.0, "rope_original_length": 8}
  for choices in ({"rope_theta": 100.0}, {"norm_epsilon": 0.1}, scaling):
    assert np.abs(model_of(**choices).logits(params, batch) - logits).max() > 1e-3, choices


@LONG
def test_bfloat16_logits_are_float32_and_as_exact_as_their_inputs():
  model, batch = model_of(dtype="bfloat16"), batch_of()
  params = params_of(model)
  logits = jax.jit(model.logits)(params, batch)
  assert logits.dtype == jnp.float32
  # Rounded logits would all be multiples of their own last bit.
  assert np.any(np.asarray(logits) != np.asarray(logits.astype(jnp.bfloat16).astype(jnp.float32)))
  np.testing.assert_allclose(logits, model_of().logits(params, batch), atol=0.5)


@pytest.mark.parametrize(
  ("choices", "message"),
  [
    ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of the 4 heads, got 3"),
    ({"head_dim": 5}, "head_dim: expected an even number, got 5"),
    ({"rope_theta": "large"}, "rope_theta: expected a number of at least 1.0, got 'large'"),
    ({"rope_scaling_factor": 0.5}, "rope_scaling_factor: expected a number of at least 1.0, got 0.5"),
    ({"norm_epsilon": -1.0}, "norm_epsilon: expected a number of at least 0.0, got -1.0"),
    ({"rope_high_freq_factor": 1.0}, "rope_high_freq_factor: expected more than the low one, got"),
    ({"remat_policy": "some"}, "remat_policy: expected one of none, minimal, full, got 'some'"),
  ],
)
def test_a_config_that_is_none_is_refused(choices, message):
  with pytest.raises(ValueError, match=f"LlamaConfig.{message}"):
    dataclasses.replace(CONFIG, **choices)
