"""Numbers of parameters of every shipped size, beside public numbers; nothing is computed, only shapes."""

import math
import time
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import pytest

from anystep.train.configuration.configuration import load_configuration
from anystep.train.configuration.gin_files import GinFiles

ROOT = Path(__file__).parents[3] / "gin_configs" / "models"
_CARDS = "https://huggingface.co/google"
_WIKIPEDIA = "https://en.wikipedia.org/wiki/T5_(language_model), totals"
_ENCODERS = "the same, encoders: with the embedding, they have as many parameters as such a decoder"
_MT5 = "Xue et al. 2021, https://arxiv.org/abs/2010.11934, section 3"
_BYT5 = "Xue et al. 2022, https://arxiv.org/abs/2105.13626, table 1"
_LLAMA = "https://huggingface.co/meta-llama"
_MOBILE = "https://huggingface.co/facebook/MobileLLM-125M, table"
_UMT5 = f"{_CARDS}/umt5-*: bytes of model.safetensors, float32"
# By gin file, what is public: a number, with as many digits as are; and where.
PUBLIC = {
  "t5_1_0/small": (60_506_624, f"{_CARDS}-t5/t5-small"),
  "t5_1_0/base": (222_903_552, f"{_CARDS}-t5/t5-base"),
  "t5_1_0/large": (737_668_096, f"{_CARDS}-t5/t5-large"),
  "t5_1_0/3B": (2_851_598_336, f"{_CARDS}-t5/t5-3b"),
  "t5_1_0/11B": (11_307_321_344, f"{_CARDS}-t5/t5-11b"),
  "t5_1_1/small": (76_961_152, _WIKIPEDIA),
  "t5_1_1/base": (247_577_856, _WIKIPEDIA),
  "t5_1_1/large": (783_150_080, _WIKIPEDIA),
  "t5_1_1/xl": (2_849_757_184, _WIKIPEDIA),
  "t5_1_1/xxl": (11_135_332_352, _WIKIPEDIA),
  "decoder_only/base": (109_628_544, _ENCODERS),
  "decoder_only/large": (341_231_104, _ENCODERS),
  "decoder_only/xl": (1_223_527_424, _ENCODERS),
  "decoder_only/xxl": (4_762_310_656, _ENCODERS),
  "mt5/small": (300_176_768, f"{_CARDS}/mt5-small"),
  "mt5/base": ("580M", _MT5),
  "mt5/large": ("1.2B", _MT5),
  "mt5/xl": ("3.7B", _MT5),
  "mt5/xxl": ("13B", _MT5),
  "byt5/small": (299_637_760, f"{_CARDS}/byt5-small"),
  "byt5/base": ("582M", _BYT5),
  "byt5/large": ("1.23B", _BYT5),
  "byt5/xl": ("3.74B", _BYT5),
  "byt5/xxl": ("12.9B", _BYT5),
  "llama/125m": ("124.6M", _MOBILE),
  "llama/350m": (345_355_200, f"{_MOBILE}, which cuts it to 345.3M"),
  "llama/1b": (1_235_814_400, f"{_LLAMA}/Llama-3.2-1B: safetensors"),
  "llama/3b": (3_212_749_824, f"{_LLAMA}/Llama-3.2-3B: safetensors"),
  "llama/8b": (8_030_261_248, f"{_LLAMA}/Meta-Llama-3-8B: safetensors"),
  "umt5/small": ("1.23GB", _UMT5),
  "umt5/base": ("2.37GB", _UMT5),
}
_UNITS = {"M": 1e6, "B": 1e9, "GB": 1e9 / 4}
# What differs from another size: every layer's own biases, and the number of token ids.
_LAYERS_AND_HEADS = {"small": (8, 6), "base": (12, 12), "large": (24, 16), "xl": (24, 32), "xxl": (24, 64)}
_EMBEDDINGS = {"small": 512, "base": 768, "large": 1024, "xl": 2048, "xxl": 4096}
_SLOW = ("large", "xl", "xxl", "3B", "11B", "1b", "3b")
SIZES = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("*/*.gin"))


@gin.configurable
def configured_model(model):
  return model


@pytest.fixture
def model_of(tmp_path):
  """`model_of("t5_1_1/small")`: the model that a gin file configures."""

  def build(size):
    path = tmp_path / "model.gin"
    path.write_text(
      f"include 'gin_configs/models/{size}.gin'\n"
      "VOCABULARY = None\nDROPOUT_RATE = 0.1\nTRAIN_STEPS = 10000\nconfigured_model.model = %MODEL\n"
    )
    load_configuration(GinFiles.read([str(path)], {}))
    return gin.get_configurable(configured_model)()

  yield build
  gin.clear_config()


def num_params(model):
  shapes = jax.eval_shape(model.initial_variables, jax.random.key(0))["params"]
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
  "size",
  [pytest.param(name, marks=pytest.mark.long if name.endswith(_SLOW) else []) for name in PUBLIC],
)
def test_a_size_has_as_many_parameters_as_is_public(size, model_of):
  public, _ = PUBLIC[size]
  found = num_params(model_of(size))
  if isinstance(public, int):
    assert found == public
  else:
    digits = public.rstrip("MGB")
    decimals = len(digits.partition(".")[2])
    value = found / _UNITS[public.removeprefix(digits)]
    # mT5's paper has two digits: 580M are 582,401,280.
    shown = round(value, -1) if public == "580M" else round(value, decimals)
    assert shown == float(digits), f"{found:,}"


@pytest.mark.parametrize(
  "size",
  [pytest.param(name, marks=pytest.mark.long if name in _SLOW else []) for name in _LAYERS_AND_HEADS],
)
def test_scalable_sizes_differ_from_t5s_by_biases_and_token_ids(size, model_of):
  layers, heads = _LAYERS_AND_HEADS[size]
  biases = 2 * (layers - 1) * heads * 32
  scalable = num_params(model_of(f"scalable_t5/{size}"))
  assert scalable == PUBLIC[f"t5_1_1/{size}"][0] + biases
  more_ids = 2 * (256_384 - 32_128) * _EMBEDDINGS[size]
  assert num_params(model_of(f"umt5/{size}")) == scalable + more_ids


def test_every_size_is_counted_or_tiny():
  counted = PUBLIC.keys() | {f"{name}/{size}" for name in ("scalable_t5", "umt5") for size in _EMBEDDINGS}
  assert {size for size in SIZES if not size.endswith("/tiny")} == counted
  assert len([size for size in SIZES if size.endswith("/tiny")]) == len(
    {size.split("/")[0] for size in SIZES}
  )


@pytest.mark.parametrize("family", sorted({size.split("/")[0] for size in SIZES}))
def test_a_tiny_size_is_for_a_cpu(family, model_of):
  assert num_params(model_of(f"{family}/tiny")) < 300_000


@pytest.mark.long
@pytest.mark.parametrize("size", ["t5_1_1/xxl", "scalable_t5/xxl"])
def test_the_gradients_of_a_model_of_11_billion_parameters_are_lowered_in_a_minute(size, model_of):
  model = model_of(size)
  lengths = {"encoder_input_tokens": 512, "decoder_input_tokens": 114}
  lengths |= {"decoder_target_tokens": 114, "decoder_loss_weights": 114}
  batch = {name: jax.ShapeDtypeStruct((128, length), jnp.int32) for name, length in lengths.items()}
  begin = time.process_time()
  params = jax.eval_shape(model.initial_variables, jax.random.key(0))["params"]
  with jax.numpy_dtype_promotion("standard"):
    jax.jit(jax.grad(model.loss_fn, has_aux=True)).lower(params, batch, jax.random.key(0))
  assert time.process_time() - begin < 60
