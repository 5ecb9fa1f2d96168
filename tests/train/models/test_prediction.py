"""What models predict beside T5X's and Hugging Face's outputs, and beside decoding without a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from t5x_cases import FIXTURES, document, hugging_face_network, t5x_model

from anystep.train.decoding import (
  HuggingFaceBeams,
  T5XBeams,
  beam_search,
  example_keys,
  temperature_sample,
)
from anystep.train.decoding.truncation import keep_top_k, keep_top_p
from anystep.train.models.base import PredictingModel
from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.flax_modules import FlaxModel
from anystep.train.network.decoder_only import DecoderConfig, DecoderWrapper
from anystep.train.network.llama import Llama, LlamaConfig
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.partitioning import Partitioner

FAST = {("t5_1_1", "prompt_beam_alpha06"), ("decoder_only", "beam_alpha06")}
CASES = [
  (model, case)
  for model in ("t5_1_1", "decoder_only")
  for case in document(f"decoding/{model}", "cases")["cases"]
]


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


@functools.cache
def t5x_case(name):
  """Our model of T5X's case, its parameters, batches by name and T5X's outputs."""

  def load(file):
    with np.load(FIXTURES / "t5x" / "decoding" / name / f"{file}.npz") as loaded:
      return dict(loaded)

  arrays = load("batches")
  batch = {key.removeprefix("batch/"): array for key, array in arrays.items() if key.startswith("batch/")}
  prompts = {key.removeprefix("prompt/"): array for key, array in arrays.items() if key.startswith("prompt/")}
  model = t5x_model(name, **document(f"decoding/{name}", "cases")["config"])
  batches = {"batch": batch, "prompt": batch | prompts}
  return model, unflatten_dict(load("params"), sep="/"), batches, load("expected")


def name_of(value):
  """Part of a test's name."""
  return value["name"] if isinstance(value, dict) else value


def decode_fn_of(case):
  """The decoding function of a case, searched as T5X does: all rows until the last is done."""
  options = dict(case["decoder_params"])
  if case["decode_fn"] == "temperature_sample":
    if isinstance(options["temperature"], list):
      options["temperature"] = jnp.array(options["temperature"])
    return functools.partial(temperature_sample, **options)
  names = ("alpha", "min_log_prob")
  rules = {name: options.pop(name) for name in names if name in options}
  return functools.partial(beam_search, rules=T5XBeams(**rules, rows_together=True), **options)


@pytest.mark.parametrize(
  ("name", "case"),
  [
    pytest.param(
      name,
      case,
      id=f"{name}-{case['name']}",
      marks=[] if (name, case["name"]) in FAST else [pytest.mark.long],
    )
    for name, case in CASES
    if not case["name"].startswith("sampled")
  ],
)
def test_predictions_are_t5xs(name, case):
  model, params, batches, expected = t5x_case(name)
  if name == "decoder_only":
    bidirectional = case["name"].startswith("prefix_bidirectional")
    model = dataclasses.replace(model, inputs_bidirectional_attention=bidirectional)
  prompted = {"prompt_with_targets": True} if case.get("prompt_with_targets") else {}
  predict = functools.partial(
    model.predict_batch_with_aux,
    decode_fn=decode_fn_of(case),
    num_decodes=case["num_decodes"],
    return_all_decodes=case.get("return_all_decodes", False),
    keys=example_keys(0, "any", np.arange(6)),
    **prompted,
  )
  sequences, aux = jax.jit(predict)(params, batches[case["batch"]])
  np.testing.assert_array_equal(sequences, expected[f"{case['name']}/sequences"])
  np.testing.assert_allclose(aux["scores"], expected[f"{case['name']}/scores"], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
  ("name", "case"), [case for case in CASES if case[1]["name"].startswith("sampled")], ids=name_of
)
def test_what_t5x_sampled_is_scored_as_t5x_scores_it(name, case):
  """T5X's draws need its keys; which tokens may be drawn, and their scores, do not."""
  model, params, batches, expected = t5x_case(name)
  options, batch = case["decoder_params"], batches["batch"]
  score = jax.jit(model.logits)
  for sample in range(case["num_decodes"]):
    decoded = expected[f"{case['name']}/sequences"][:, sample]
    rows, length = decoded.shape
    begins = np.zeros(rows, int)
    sequences = np.concatenate([np.zeros((rows, 1), np.int32), decoded], axis=1)
    if name == "decoder_only":
      prefix = batch["decoder_input_tokens"] * batch["decoder_causal_attention"]
      begins = (prefix[:, 1:] != 0).sum(axis=1)
      sequences = np.zeros((rows, length + 1), np.int32)
      for row, begin in enumerate(begins):
        sequences[row, : begin + 1] = prefix[row, : begin + 1]
        sequences[row, begin + 1 :] = decoded[row, : length - begin]
    inputs, ones = sequences[:, :-1], np.ones((rows, length), np.int32)
    logits = score(params, batch | {"decoder_input_tokens": inputs, "decoder_target_tokens": ones})
    scaled = (logits / options["temperature"]).reshape(rows * length, -1)
    scaled = keep_top_k(scaled, options["topk"]) if options["topk"] else keep_top_p(scaled, options["topp"])
    drawn_from = logits if options.get("rescale_log_probs") is False else scaled.reshape(logits.shape)
    log_probs = jax.nn.log_softmax(drawn_from)
    targets = jnp.asarray(sequences[:, 1:])[:, :, None]
    allowed = np.asarray(jnp.take_along_axis(scaled.reshape(logits.shape), targets, axis=2)[:, :, 0]) > -1e6
    token_scores = np.asarray(jnp.take_along_axis(log_probs, targets, axis=2)[:, :, 0])
    for row, begin in enumerate(begins):
      ends = np.flatnonzero(sequences[row, begin + 1 :] == 1)
      end = begin + 1 + ends[0] if len(ends) else length
      assert allowed[row, begin:end].all()
      total = token_scores[row, begin:end].sum()
      assert total == pytest.approx(expected[f"{case['name']}/scores"][row, sample], abs=1e-4)


@pytest.mark.parametrize(
  ("name", "beams"),
  [
    ("hf_t5/t5_1_1", True),
    pytest.param("hf_t5/t5_1_0", True, marks=pytest.mark.long),
    pytest.param("hf_t5/t5_1_1", False, marks=pytest.mark.long),
    pytest.param("hf_t5/t5_1_0", False, marks=pytest.mark.long),
    pytest.param("hf_umt5/umt5", False, marks=pytest.mark.long),
  ],
)
def test_predictions_are_hugging_faces(name, beams):
  network, params = hugging_face_network(name)
  with np.load(FIXTURES / name / "expected.npz") as expected:
    inputs, tokens = expected["encoder_input_tokens"], expected["beam4_alpha06" if beams else "greedy"]
  options = {}
  if beams:
    options = {"num_decodes": 4}
    rules = HuggingFaceBeams(length_penalty=0.6)
    options["decode_fn"] = functools.partial(beam_search, rules=rules)
  predict = functools.partial(EncoderDecoderModel(network).predict_batch, **options)
  room = np.zeros((len(inputs), tokens.shape[1] - 1), np.int32)
  found = jax.jit(predict)(params, {"encoder_input_tokens": inputs, "decoder_input_tokens": room})
  np.testing.assert_array_equal(found, tokens[:, 1:])


SIZES = {"vocab_size": 32, "emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 2}


class Pooled(nn.Module):
  """A module of one's own, without a cache: each position sees the mean of the tokens up to it."""

  @nn.compact
  def __call__(self, decoder_input_tokens, decoder_target_tokens):
    valid = (decoder_target_tokens > 0)[:, :, None].astype(jnp.float32)
    x = nn.Embed(32, 16)(decoder_input_tokens) * valid
    counts = jnp.maximum(jnp.cumsum(valid, axis=1), 1.0)
    return nn.Dense(32)(jnp.concatenate([x, jnp.cumsum(x, axis=1) / counts], axis=-1))


FAMILIES = {
  "t5": lambda: EncoderDecoderModel(Transformer(T5Config(**SIZES, **LAYERS))),
  "bfloat16": lambda: EncoderDecoderModel(Transformer(T5Config(**SIZES, **LAYERS, dtype="bfloat16"))),
  "xla": lambda: EncoderDecoderModel(
    Transformer(
      T5Config(**SIZES, **LAYERS, attention_implementation="xla", cross_attention_implementation="xla")
    )
  ),
  "scanned": lambda: EncoderDecoderModel(
    ScalableTransformer(ScalableT5Config(**SIZES, **LAYERS, remat_policy="minimal"))
  ),
  "not scanned": lambda: EncoderDecoderModel(
    ScalableTransformer(ScalableT5Config(**SIZES, **LAYERS, scan_layers=False))
  ),
  "decoder only": lambda: DecoderOnlyModel(DecoderWrapper(DecoderConfig(**SIZES, num_layers=2))),
  "prefix": lambda: DecoderOnlyModel(
    DecoderWrapper(DecoderConfig(**SIZES, num_layers=2)), inputs_bidirectional_attention=True
  ),
  "llama": lambda: DecoderOnlyModel(Llama(LlamaConfig(**SIZES, num_layers=2, num_kv_heads=1))),
  "llama, not scanned": lambda: DecoderOnlyModel(
    Llama(LlamaConfig(**SIZES, num_layers=2, num_kv_heads=1, scan_layers=False)),
    inputs_bidirectional_attention=True,
  ),
  "own module": lambda: FlaxModel(Pooled()),
}


def make_model(family):
  """A model, and sharp parameters: no two logits are near each other."""
  model = FAMILIES[family]()
  params = jax.jit(model.initial_variables)(jax.random.key(1))["params"]
  return model, jax.tree.map(lambda leaf: leaf * jnp.float32(1.6), params)


def make_batch(model, rows=5, length=9):
  """Examples whose prompts differ in length."""
  numbers = np.random.default_rng(5)
  tokens = numbers.integers(2, 32, (rows, length)).astype(np.int32)
  tokens[:, 0] = 0
  if isinstance(model, EncoderDecoderModel):
    inputs = numbers.integers(2, 32, (rows, 7)).astype(np.int32) * (np.arange(7) < [[7], [3], [1], [5], [6]])
    return {"encoder_input_tokens": inputs.astype(np.int32), "decoder_input_tokens": np.zeros_like(tokens)}
  prefix = (np.arange(length) <= np.array([[3], [0], [1], [6], [2]])).astype(np.int32)
  return {"decoder_input_tokens": tokens, "decoder_causal_attention": prefix}


def predict_without_cache(model, params, batch):
  """The likeliest tokens one by one, each from all logits of the teacher-forced network."""
  rows, length = batch["decoder_input_tokens"].shape
  prefix = batch.get("decoder_causal_attention", np.zeros((rows, length), np.int32))
  begins = np.maximum(prefix.sum(axis=1) - 1, 0)
  sequences = np.pad(batch["decoder_input_tokens"] * prefix, ((0, 0), (0, 1)))
  ended = np.zeros(rows, bool)
  logits_of = jax.jit(model.logits)
  for place in range(length):
    seen = np.broadcast_to(np.arange(length) <= place, (rows, length)).astype(np.int32)
    features = {"decoder_input_tokens": sequences[:, :-1], "decoder_target_tokens": seen}
    features["decoder_loss_weights"] = seen
    likeliest = np.asarray(logits_of(params, batch | features))[:, place].argmax(axis=-1)
    free = place >= begins
    sequences[:, place + 1] = np.where(free, np.where(ended, 0, likeliest), sequences[:, place + 1])
    ended |= free & (likeliest == 1)
  return np.stack(
    [np.pad(row[begin + 1 :], (0, begin)) for row, begin in zip(sequences, begins, strict=True)]
  )


@pytest.mark.parametrize(
  "family",
  [
    name if name in ("scanned", "own module") else pytest.param(name, marks=pytest.mark.long)
    for name in FAMILIES
  ],
)
def test_predictions_with_a_cache_are_those_without(family):
  model, params = make_model(family)
  assert isinstance(model, PredictingModel)
  batch = make_batch(model)
  expected = predict_without_cache(model, params, batch)
  found, aux = jax.jit(model.predict_batch_with_aux)(params, batch)
  np.testing.assert_array_equal(found, expected)
  # The default's scores are log-likelihoods.
  assert np.all(np.asarray(aux["scores"]) < 0)
  assert len({tuple(row) for row in expected.tolist()}) > 1


@pytest.mark.long
@pytest.mark.parametrize("family", ["t5", "scanned", "prefix", "llama", "own module"])
@pytest.mark.parametrize("decoding", ["beams", "samples"])
def test_a_rows_answer_does_not_depend_on_the_rows_beside_it(family, decoding):
  model, params = make_model(family)
  batch = make_batch(model)
  fns = {"beams": beam_search, "samples": functools.partial(temperature_sample, temperature=1.5, topp=0.9)}

  @jax.jit
  def predict(batch, keys):
    return model.predict_batch_with_aux(
      params, batch, keys=keys, decode_fn=fns[decoding], num_decodes=3, return_all_decodes=True
    )

  keys = example_keys(0, "task", np.arange(5))
  together, together_aux = predict(batch, keys)
  for chosen in ([3], [4, 0, 2]):
    rows = np.array(chosen)
    found, aux = predict({name: array[rows] for name, array in batch.items()}, keys[rows])
    np.testing.assert_array_equal(found, together[rows])
    np.testing.assert_allclose(aux["scores"], together_aux["scores"][rows], rtol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("family", ["t5", "scanned", "prefix"])
def test_a_cache_is_split_over_devices_as_activations_are(family):
  model, params = make_model(family)
  batch = {name: np.concatenate([array[:4]] * 2) for name, array in make_batch(model).items()}
  partitioner = Partitioner(num_partitions=2)
  mesh = partitioner.mesh(8)
  shardings = partitioner.shardings(mesh, model.logical_axes())["params"]

  def predict(params, batch):
    return model.predict_batch(params, batch, decode_fn=beam_search, num_decodes=2, return_all_decodes=True)

  def predict_split(params, batch):
    with partitioner.sharded_activations(mesh):
      return predict(params, batch)

  compiled = jax.jit(predict_split).lower(jax.device_put(params, shardings), batch).compile()
  np.testing.assert_array_equal(
    compiled(jax.device_put(params, shardings), batch), jax.jit(predict)(params, batch)
  )
  # 8 rows of 2 beams over 4 devices, 2 heads over 2.
  layers = "2," if family == "scanned" else ""
  assert f"f32[4,{layers}9,1,8]" in compiled.as_text()
  assert f"f32[16,{layers}9,2,8]" not in compiled.as_text()


def test_batches_that_cannot_be_predicted_are_refused():
  model = FAMILIES["t5"]()
  batch = make_batch(model)
  with pytest.raises(ValueError, match="got packed rows with encoder_segment_ids"):
    model.predict_batch({}, batch | {"encoder_segment_ids": batch["encoder_input_tokens"]})
  with pytest.raises(ValueError, match=r"\['encoder_input_tokens'\] missing"):
    model.predict_batch({}, {"decoder_input_tokens": batch["decoder_input_tokens"]})
  model = FAMILIES["decoder only"]()
  with pytest.raises(ValueError, match=r"\['decoder_causal_attention'\] missing"):
    model.predict_batch({}, {"decoder_input_tokens": batch["decoder_input_tokens"]})
  with pytest.raises(ValueError, match="expected decoder_input_tokens"):
    FAMILIES["own module"]().predict_batch({}, {"decoder_causal_attention": batch["decoder_input_tokens"]})
