"""Models of checkpoints in Python: what they predict and score beside the model's own batches."""

import jax
import numpy as np
import pytest
from t5x_cases import FIXTURES, hugging_face_network

from anystep.errors import AnystepError
from anystep.train import load_model
from anystep.train.conversion import formats
from anystep.train.leaves.leaf import array_leaf
from anystep.train.loading import infer_model
from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.network.decoder_only import DecoderConfig, DecoderWrapper
from anystep.train.network.llama import Llama, LlamaConfig
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer

SIZES = {"vocab_size": 32, "emb_dim": 16, "num_heads": 2, "head_dim": 4, "mlp_dim": 24}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 2}
NETWORKS = [
  Transformer(T5Config(**SIZES, **LAYERS)),
  Transformer(T5Config(**SIZES, **LAYERS, mlp_activations=("relu",), logits_via_embedding=True)),
  ScalableTransformer(ScalableT5Config(**SIZES, **LAYERS)),
  ScalableTransformer(ScalableT5Config(**SIZES, **LAYERS, scan_layers=False)),
  DecoderWrapper(DecoderConfig(**SIZES, num_layers=3, logits_via_embedding=True)),
]
INPUTS = [[5, 9, 200], [7] * 19, [30, 31, 3, 12, 44, 8, 7, 9, 2]]


def shapes_of(model):
  variables = jax.eval_shape(lambda: model.initial_variables(jax.random.key(0)))["params"]
  leaves, _ = jax.tree_util.tree_flatten_with_path(variables)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: type(network).__name__)
def test_a_network_is_told_by_its_parameters(network):
  model = (DecoderOnlyModel if isinstance(network, DecoderWrapper) else EncoderDecoderModel)(network)
  told = infer_model(shapes_of(model))
  assert (type(told), told.module) == (type(model), network)


@pytest.mark.long
def test_a_loaded_model_answers_each_input_as_alone():
  loaded = load_model(FIXTURES / "hf_t5" / "t5_1_1", chunk_examples=2)
  network, params = hugging_face_network("hf_t5/t5_1_1")
  model = EncoderDecoderModel(network)
  predict, score = jax.jit(model.predict_batch), jax.jit(model.score_batch)
  targets = [[4, 8], [], [9]]
  predictions, scores = loaded.predict(INPUTS, max_tokens=6), loaded.score(INPUTS, targets)
  for row, (inputs, target) in enumerate(zip(INPUTS, targets, strict=True)):
    encoder = np.array([[*inputs, 1, *[0] * (19 - len(inputs))]], np.int32)
    decoder = np.array([[*target, 1, *[0] * (5 - len(target))]], np.int32)
    batch = {"encoder_input_tokens": encoder, "decoder_target_tokens": decoder}
    batch["decoder_input_tokens"] = np.pad(decoder, ((0, 0), (1, 0)))[:, :-1]
    batch["decoder_loss_weights"] = (decoder > 0).astype(np.int32)
    alone = np.asarray(predict(params, batch))[0].tolist()
    assert predictions[row] == (alone[: alone.index(1)] if 1 in alone else alone)
    assert scores[row] == pytest.approx(float(score(params, batch)["scores"][0]), abs=1e-4)
  assert loaded.predict([]) == []
  with pytest.raises(ValueError, match="expected a target for each of the 3 inputs, got 1"):
    loaded.score(INPUTS, targets[:1])
  with pytest.raises(ValueError, match="vocabulary: expected one to encode texts"):
    loaded.predict(["text"])


@pytest.mark.long
def test_texts_are_encoded_and_decoded():
  import seqio

  loaded = load_model(FIXTURES / "t5x" / "t5_1_1_checkpoints", vocabulary=seqio.ByteVocabulary())
  assert loaded.step == 20
  (text,) = loaded.predict(["abc"], max_tokens=5)
  assert isinstance(text, str)
  assert loaded.score(["abc"], ["d"]) < 0
  ids = load_model(FIXTURES / "t5x" / "t5_1_1_checkpoints").predict([[100, 101, 102]], max_tokens=5)
  assert loaded.vocabulary.decode(ids[0]) == text


def test_other_parameters_are_refused(tmp_path):
  with pytest.raises(AnystepError, match="checkpoint_missing"):
    load_model(tmp_path)
  with pytest.raises(AnystepError) as other:
    load_model(FIXTURES / "hf_t5" / "t5_1_1", model=EncoderDecoderModel(NETWORKS[0]))
  assert (other.value.code, other.value.kind) == (76, "checkpoint_tree")
  saved = tmp_path / "checkpoint"
  leaves = {
    "target/weights": array_leaf(np.zeros(3, np.float32)),
    "state/step": array_leaf(np.array(0, np.int32)),
  }
  formats.plan_writing("t5x", leaves, source="here")(str(saved), lambda size: None)
  with pytest.raises(AnystepError) as unknown:
    load_model(saved)
  assert (unknown.value.code, unknown.value.kind) == (78, "checkpoint_unsupported")


def test_a_model_with_other_settings_than_the_checkpoints_is_refused():
  sizes = {"emb_dim": 48, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 104, "num_layers": 3}
  network = Llama(LlamaConfig(vocab_size=256, rope_theta=10_000.0, **sizes))
  with pytest.raises(AnystepError, match=r"checkpoint_settings.*rope_theta = 50000\.0"):
    load_model(FIXTURES / "hf_llama" / "gqa", model=DecoderOnlyModel(network))
