"""Hugging Face's Llama: its tensors and configuration beside our parameters, without any permutation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from anystep.errors import find_nearest
from anystep.train.conversion.anystep_format import check_activations, left_over_error, unsupported_error
from anystep.train.leaves.leaf import PARAMETERS, Leaf, Leaves, merge_axes, split_axis, stack, transpose
from anystep.train.leaves.safetensors_files import Names

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
# What our network has, and Hugging Face's configurations may change; their defaults are these.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_DEFAULTS = {
  "tie_word_embeddings": False,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": None,
}
_ACTIVATIONS = ["silu", "linear"]
# By the configuration's names, the shapes of the tensors that an expression matches first.
SHAPES = [
  (r"model\.embed_tokens\.weight|lm_head\.weight", ("vocab_size", "hidden_size")),
  (r".*\.q_proj\.weight", ("num_attention_heads * head_dim", "hidden_size")),
  (r".*\.[kv]_proj\.weight", ("num_key_value_heads * head_dim", "hidden_size")),
  (r".*\.o_proj\.weight", ("hidden_size", "num_attention_heads * head_dim")),
  (r".*\.(?:gate|up)_proj\.weight", ("intermediate_size", "hidden_size")),
  (r".*\.down_proj\.weight", ("hidden_size", "intermediate_size")),
  (r".*", ("hidden_size",)),
]
COUNTS = {"num_hidden_layers"}
# Our names in a layer and theirs.
_NORMS = {
  "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
  "pre_mlp_layer_norm/scale": "post_attention_layernorm.weight",
}
_PROJECTIONS = {
  "self_attention/query/kernel": "self_attn.q_proj.weight",
  "self_attention/key/kernel": "self_attn.k_proj.weight",
  "self_attention/value/kernel": "self_attn.v_proj.weight",
  "self_attention/out/kernel": "self_attn.o_proj.weight",
  "mlp/wi_0/kernel": "mlp.gate_proj.weight",
  "mlp/wi_1/kernel": "mlp.up_proj.weight",
  "mlp/wo/kernel": "mlp.down_proj.weight",
}
_IN_LAYERS = _NORMS | _PROJECTIONS
_DECODER = f"{PARAMETERS}decoder/"
_EMBEDDING, _LOGITS = f"{_DECODER}token_embedder/embedding", f"{_DECODER}logits_dense/kernel"
_NORM = f"{_DECODER}decoder_norm/scale"
_SCANNED, _UNSCANNED = f"{_DECODER}layers/", re.compile(rf"{_DECODER}layers_(\d+)/")
_TABLE, _HEAD, _THEIR_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# Files of early versions have the frequencies of each layer, which Hugging Face does not load.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# By the names of `LlamaConfig`, those of Llama 3.1's scaling.
_SCALING = {
  "rope_scaling_factor": "factor",
  "rope_low_freq_factor": "low_freq_factor",
  "rope_high_freq_factor": "high_freq_factor",
  "rope_original_length": "original_max_position_embeddings",
}
# What no logit depends on, for models of ours: rows begin with id 0, and rotary positions have no end. Were 0
# padding's id too, Hugging Face's `generate` would hide the first token, and its training never change it.
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_LENGTH = 8192


def with_defaults(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
  """Return a configuration with what it leaves out.

  Raises:
    AnystepError: 78 `checkpoint_unsupported` for settings that our network does not have.
  """
  # Later versions have all of the rotary positions in one place.
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
  config = _DEFAULTS | _FIXED | dict(config) | theta
  for name, value in _FIXED.items():
    if config[name] != value:
      raise unsupported_error(f"{name} {value}", config[name], path=path)
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ("default", "llama3"):
    raise unsupported_error("rotary positions of rope_type default or llama3", kind, path=path)
  num_heads: Any = config["num_attention_heads"]
  heads: dict[str, Any] = {"num_key_value_heads": config.get("num_key_value_heads") or num_heads}
  if config.get("head_dim") is None and num_heads != 0:
    hidden_size: Any = config["hidden_size"]
    heads["head_dim"] = hidden_size // num_heads
  return config | heads | {"rope_scaling": rope if kind == "llama3" else None}


def is_ignored(name: str, config: Mapping[str, Any]) -> bool:
  """Return whether a tensor is one that Hugging Face does not load either."""
  return _IGNORED.fullmatch(name) is not None or (name == _HEAD and config["tie_word_embeddings"])


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return what numbers depend on besides shapes, by the names of `LlamaConfig`; and what is given back."""
  settings: dict[str, Any] = {
    "mlp_activations": _ACTIVATIONS,
    "norm_epsilon": float(_positive(config, "rms_norm_eps")),
    "rope_theta": float(_positive(config, "rope_theta")),
    "rope_scaling_factor": 1.0,
  }
  if config["rope_scaling"]:
    settings |= {name: _positive(config["rope_scaling"], theirs) for name, theirs in _SCALING.items()}
  length = config.get("max_position_embeddings")
  settings |= {} if length is None else {"max_position_embeddings": length}
  return settings | {name: config[name] for name in _IDS}


def _positive(config: Mapping[str, Any], name: str) -> float:
  value: float = config[name]
  if type(value) not in (int, float) or value <= 0:
    raise ValueError(f"{name} {value!r}, not a number above 0")
  return value


def read_leaves(config: Mapping[str, Any], read_tensor: Callable[[str], Leaf]) -> dict[str, Leaf]:
  """Return the parameters of a model, those of scanned layers.

  Args:
    config: as of `with_defaults`.
    read_tensor: returns the tensor of a name, or refuses a name that there is not.
  """
  head_dim = config["head_dim"]
  leaves = {_EMBEDDING: read_tensor(_TABLE), _NORM: read_tensor(_THEIR_NORM)}
  if not config["tie_word_embeddings"]:
    leaves[_LOGITS] = transpose(read_tensor(_HEAD))
  numbers = range(config["num_hidden_layers"])
  for inner, theirs in _IN_LAYERS.items():
    layers = [_as_ours(inner, read_tensor(f"model.layers.{i}.{theirs}"), head_dim) for i in numbers]
    leaves[_SCANNED + inner] = stack(layers, axis=1)
  return leaves


def _as_ours(inner: str, leaf: Leaf, head_dim: int) -> Leaf:
  """Return a tensor of a layer as our leaf: kernels transposed, those of attention with an axis of heads."""
  if inner in _NORMS:
    return leaf
  kernel = transpose(leaf)
  if not inner.startswith("self_attention/"):
    return kernel
  return split_axis(kernel, 0 if "/out/" in inner else 1, head_dim)


def is_one(parameters: Leaves) -> bool:
  """Return whether parameters can only be a Llama's: those of a decoder without biases of positions."""
  names = [name for name in parameters if not name.startswith(_DECODER) or "/relpos_bias/" in name]
  return bool(parameters) and not names


def as_model(parameters: Leaves, settings: Mapping[str, Any]) -> tuple[dict[Names, Leaf], dict[str, Any]]:
  """Return the tensors, those of stacked layers together, and the configuration of a model.

  Args:
    parameters: leaves by T5X's names, those of scanned layers or not.
    settings: as of `read_settings`.

  Raises:
    AnystepError: 78 `checkpoint_unsupported` for other decoders, and where settings are not known; 76
      `checkpoint_tree` for parameters that a Llama has not.
  """
  unread = set(parameters)

  def read_leaf(name: str) -> Leaf:
    if name not in parameters:
      raise unsupported_error("a Llama", f"no {name}, but {find_nearest(name, parameters)}")
    unread.discard(name)
    return parameters[name]

  tensors: dict[Names, Leaf] = {_TABLE: read_leaf(_EMBEDDING), _THEIR_NORM: read_leaf(_NORM)}
  if _LOGITS in parameters:
    tensors[_HEAD] = transpose(read_leaf(_LOGITS))
  num_unscanned = len({match[1] for name in parameters if (match := _UNSCANNED.match(name))})
  shapes: dict[str, tuple[int, ...]] = {}
  for inner, theirs in _IN_LAYERS.items():
    for number in range(num_unscanned):
      leaf = read_leaf(f"{_DECODER}layers_{number}/{inner}")
      tensors[f"model.layers.{number}.{theirs}"] = _as_theirs(inner, leaf)
      shapes[inner] = leaf.shape
    if not num_unscanned:
      leaf = read_leaf(_SCANNED + inner)
      names = tuple(f"model.layers.{number}.{theirs}" for number in range(leaf.shape[1]))
      # The axis of layers comes first.
      tensors[names] = _as_theirs(inner, transpose(leaf, (1, 0, *range(2, len(leaf.shape)))), first=1)
      shapes[inner] = (leaf.shape[0], *leaf.shape[2:])
      num_layers = leaf.shape[1]
  for name in sorted(unread):
    raise left_over_error("Hugging Face's Llama", name, parameters[name])
  sizes = {
    "num_hidden_layers": num_unscanned or num_layers,
    "num_attention_heads": shapes["self_attention/query/kernel"][1],
    "num_key_value_heads": shapes["self_attention/key/kernel"][1],
    "head_dim": shapes["self_attention/query/kernel"][2],
    "intermediate_size": shapes["mlp/wo/kernel"][0],
  }
  return tensors, _describe(parameters[_EMBEDDING], settings, is_tied=_HEAD not in tensors) | sizes


def _as_theirs(inner: str, leaf: Leaf, *, first: int = 0) -> Leaf:
  """Return a leaf of a layer as a tensor; where layers are stacked, their axis stays the first."""
  if inner in _NORMS:
    return leaf
  if inner.startswith("self_attention/"):
    leaf = merge_axes(leaf, first if "/out/" in inner else first + 1)
  return transpose(leaf, (*range(first), first + 1, first))


def _describe(table: Leaf, settings: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
  missing = [name for name in ("norm_epsilon", "rope_theta", "rope_scaling_factor") if name not in settings]
  if missing:
    expected = "a Llama of Hugging Face's, a run's checkpoint, or one that was converted from these"
    raise unsupported_error(expected, f"one that does not say its {', '.join(missing)}")
  check_activations(settings, _ACTIVATIONS)
  is_scaled = settings["rope_scaling_factor"] != 1.0
  scaling = {theirs: settings[name] for name, theirs in _SCALING.items() if is_scaled}
  length = round(settings.get("rope_original_length", _LENGTH) * settings["rope_scaling_factor"])
  others = {"max_position_embeddings": length} | _IDS
  return {
    "architectures": [ARCHITECTURES["llama"]],
    "model_type": "llama",
    "vocab_size": table.shape[0],
    "hidden_size": table.shape[1],
    "rms_norm_eps": settings["norm_epsilon"],
    "rope_theta": settings["rope_theta"],
    "rope_scaling": {"rope_type": "llama3", **scaling} if is_scaled else None,
    "tie_word_embeddings": is_tied,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": table.dtype.name,
    **_FIXED,
    **{name: settings.get(name, value) for name, value in others.items()},
  }
