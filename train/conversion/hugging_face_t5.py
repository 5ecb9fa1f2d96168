"""Hugging Face's T5, mT5 and umT5: their tensors and configurations beside our parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anystep.errors import find_nearest
from anystep.train.conversion.anystep_format import check_activations, left_over_error, unsupported_error
from anystep.train.leaves.leaf import PARAMETERS, Leaf, Leaves, merge_axes, split_axis, stack, transpose
from anystep.train.leaves.safetensors_files import Names

ARCHITECTURES = {
  "t5": "T5ForConditionalGeneration",
  "mt5": "MT5ForConditionalGeneration",
  "umt5": "UMT5ForConditionalGeneration",
}
_MT5_VOCAB_SIZE = 250112
# What our networks have, and Hugging Face's configurations may change.
_FIXED = {
  "layer_norm_epsilon": (1e-6,),
  "relative_attention_max_distance": (128,),
  "feed_forward_proj": ("relu", "gated-gelu"),
}
# By the configuration's names, the shapes of the tensors that an expression matches first.
SHAPES = [
  (r"(?:shared|lm_head)\.weight", ("vocab_size", "d_model")),
  (r".*\.relative_attention_bias\.weight", ("relative_attention_num_buckets", "num_heads")),
  (r".*\.[qkv]\.weight", ("num_heads * d_kv", "d_model")),
  (r".*\.o\.weight", ("d_model", "num_heads * d_kv")),
  (r".*\.wi(?:_\d)?\.weight", ("d_ff", "d_model")),
  (r".*\.wo\.weight", ("d_model", "d_ff")),
  (r".*", ("d_model",)),
]
COUNTS = {"num_layers", "num_decoder_layers"}
_BIAS, _MLP_NORM = "relpos_bias/rel_embedding", "pre_mlp_layer_norm"
# Of each stack, the blocks of a layer: our name, the name of its norm, and Hugging Face's name.
_BLOCKS = {
  "encoder": [
    ("attention", "pre_attention_layer_norm", "SelfAttention"),
    ("mlp", _MLP_NORM, "DenseReluDense"),
  ],
  "decoder": [
    ("self_attention", "pre_self_attention_layer_norm", "SelfAttention"),
    ("encoder_decoder_attention", "pre_cross_attention_layer_norm", "EncDecAttention"),
    ("mlp", _MLP_NORM, "DenseReluDense"),
  ],
}
_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_EMBEDDING, _LOGITS = f"{PARAMETERS}token_embedder/embedding", f"{PARAMETERS}decoder/logits_dense/kernel"
_TABLE, _HEAD = "shared.weight", "lm_head.weight"
# Tensors that Hugging Face does not load either: other names of the table, and one that the first files had.
_IGNORED = (
  "encoder.embed_tokens.weight",
  "decoder.embed_tokens.weight",
  "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
# Hugging Face's defaults of what a configuration may leave out, by type.
_GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_DEFAULTS: Mapping[str, dict[str, Any]] = {
  "t5": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
  "mt5": _GATED,
  "umt5": _GATED | {"tie_word_embeddings": True},
}
# By feed_forward_proj, the activation that Hugging Face derives from it, and our names of a block's.
_ACTIVATIONS = {"relu": ("relu", ["relu"]), "gated-gelu": ("gelu_new", ["gelu", "linear"])}


def with_defaults(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
  """Return a configuration with what it leaves out.

  Raises:
    AnystepError: 78 `checkpoint_unsupported` for settings that our networks do not have.
  """
  config = _DEFAULTS[config["model_type"]] | dict(config)
  for name, values in _FIXED.items():
    value = config.get(name, values[0])
    if value not in values:
      raise unsupported_error(f"{name} {' or '.join(map(str, values))}", value, path=path)
  activation = _ACTIVATIONS[config["feed_forward_proj"]][0]
  if config.get("dense_act_fn", activation) != activation:
    raise unsupported_error(f"dense_act_fn {activation}", config["dense_act_fn"], path=path)
  # Later versions say of every T5 that it is tied, and here whether its logits are those of a tied one.
  return config | {"tie_word_embeddings": config.get("scale_decoder_outputs", config["tie_word_embeddings"])}


def is_ignored(name: str, config: Mapping[str, Any]) -> bool:
  """Return whether a tensor is one that Hugging Face does not load either.

  A kernel of logits beside a configuration that says tied is ignored in a T5 alone: no tied mT5 or umT5 is
  known, and later versions say so of all.
  """
  is_tied = config["tie_word_embeddings"] and config["model_type"] == "t5"
  return name in _IGNORED or (name == _HEAD and is_tied)


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return what numbers depend on besides names and shapes, by the names of the network's configuration."""
  return {"mlp_activations": _ACTIVATIONS[config["feed_forward_proj"]][1]}


def read_leaves(config: Mapping[str, Any], read_tensor: Callable[[str], Leaf]) -> dict[str, Leaf]:
  """Return the parameters of a model.

  umT5's, whose layers have position biases of their own, are those of scalable T5 with scanned layers.

  Args:
    config: as of `with_defaults`.
    read_tensor: returns the tensor of a name, or refuses a name that there is not.
  """
  num_layers, num_heads = config["num_layers"], config["num_heads"]
  counts = {"encoder": num_layers, "decoder": config.get("num_decoder_layers") or num_layers}
  leaves = {_EMBEDDING: read_tensor(_TABLE)}
  if not config["tie_word_embeddings"]:
    leaves[_LOGITS] = transpose(read_tensor(_HEAD))
  is_scanned = config["model_type"] == "umt5"
  num_gates = 1 if config["feed_forward_proj"] == "relu" else 2
  for name, count in counts.items():
    start = PARAMETERS + name
    leaves[f"{start}/{name}_norm/scale"] = read_tensor(f"{name}.final_layer_norm.weight")
    layers = [
      {
        inner: _turned(read_tensor(f"{name}.block.{number}.{tensor}"))
        for inner, tensor in _layer_names(name, num_gates, has_bias=is_scanned or number == 0)
      }
      for number in range(count)
    ]
    if is_scanned:
      for inner in layers[0]:
        parts = [_with_heads(inner, layer[inner], num_heads) for layer in layers]
        leaves[f"{start}/{name}/{inner}"] = stack(parts, axis=1)
      continue
    leaves[f"{start}/{_BIAS}"] = layers[0].pop(_BIAS)
    for number, layer in enumerate(layers):
      leaves |= {f"{start}/layers_{number}/{inner}": leaf for inner, leaf in layer.items()}
  return leaves


def _layer_names(name: str, num_gates: int, *, has_bias: bool) -> Iterator[tuple[str, str]]:
  """Yield our name and Hugging Face's of each leaf of a layer."""
  for place, (block, norm, their_block) in enumerate(_BLOCKS[name]):
    yield f"{norm}/scale", f"layer.{place}.layer_norm.weight"
    if block == "mlp":
      gates = ["wi"] if num_gates == 1 else [f"wi_{number}" for number in range(num_gates)]
      kernels = {kernel: kernel for kernel in (*gates, "wo")}
    else:
      kernels = _KERNELS
    for kernel, their_kernel in kernels.items():
      yield f"{block}/{kernel}/kernel", f"layer.{place}.{their_block}.{their_kernel}.weight"
  if has_bias:
    yield _BIAS, "layer.0.SelfAttention.relative_attention_bias.weight"


def _turned(leaf: Leaf) -> Leaf:
  """Return a kernel with the order of axes of the other side; other leaves as they are."""
  return transpose(leaf) if len(leaf.shape) == 2 else leaf


def _with_heads(inner: str, leaf: Leaf, num_heads: int) -> Leaf:
  """Return a kernel of attention with an axis for heads."""
  kernel = inner.split("/")[-2]
  if kernel not in _KERNELS:
    return leaf
  axis = 0 if kernel == "out" else 1
  return split_axis(leaf, axis, leaf.shape[axis] // num_heads)


def as_model(parameters: Leaves, settings: Mapping[str, Any]) -> tuple[dict[Names, Leaf], dict[str, Any]]:
  """Return the tensors, those of stacked layers together, and the configuration of a model.

  Args:
    parameters: leaves by T5X's names.
    settings: as of `read_settings`; without them activations are T5's.

  Raises:
    AnystepError: 78 `checkpoint_unsupported` for other models than T5s; 76 `checkpoint_tree` for parameters
      that none has.
  """
  unread = set(parameters)

  def read_leaf(name: str) -> Leaf:
    if name not in parameters:
      nearest = find_nearest(name, parameters)
      expected = "a T5, mT5 or umT5, with an encoder and a decoder"
      raise unsupported_error(expected, f"no {name}, but {nearest}")
    unread.discard(name)
    return parameters[name]

  table = read_leaf(_EMBEDDING)
  tensors: dict[Names, Leaf] = {_TABLE: table}
  if _LOGITS in parameters:
    tensors[_HEAD] = transpose(read_leaf(_LOGITS))
  num_gates = 2 if any(name.endswith("/mlp/wi_0/kernel") for name in parameters) else 1
  check_activations(settings, _ACTIVATIONS["gated-gelu" if num_gates == 2 else "relu"][1])
  counts: dict[str, int] = {}
  biases: list[tuple[int, ...]] = []
  for name in _BLOCKS:
    start = PARAMETERS + name
    tensors[f"{name}.final_layer_norm.weight"] = read_leaf(f"{start}/{name}_norm/scale")
    if any(leaf.startswith(f"{start}/{name}/") for leaf in parameters):
      counts[name] = read_leaf(f"{start}/{name}/{_MLP_NORM}/scale").shape[1]
      for inner, tensor in _layer_names(name, num_gates, has_bias=True):
        leaf = read_leaf(f"{start}/{name}/{inner}")
        names = tuple(f"{name}.block.{number}.{tensor}" for number in range(counts[name]))
        tensors[names] = _as_theirs(inner, leaf, is_stacked=True)
        biases += [leaf.shape] if inner == _BIAS else []
      continue
    is_shared = f"{start}/{_BIAS}" in parameters
    counts[name] = len({key.split("/")[2] for key in parameters if key.startswith(f"{start}/layers_")})
    for number in range(counts[name]):
      for inner, tensor in _layer_names(name, num_gates, has_bias=not is_shared or number == 0):
        layer = "" if inner == _BIAS and is_shared else f"layers_{number}/"
        leaf = read_leaf(f"{start}/{layer}{inner}")
        tensors[f"{name}.block.{number}.{tensor}"] = _as_theirs(inner, leaf, is_stacked=False)
        biases += [leaf.shape] if inner == _BIAS else []
  for name in sorted(unread):
    raise left_over_error("Hugging Face's T5", name, parameters[name])
  shared = all(f"{PARAMETERS}{name}/{_BIAS}" in parameters for name in _BLOCKS)
  config = {
    "num_layers": counts["encoder"],
    "num_decoder_layers": counts["decoder"],
    "num_heads": biases[0][0],
    "relative_attention_num_buckets": biases[0][-1],
    "tie_word_embeddings": _HEAD not in tensors,
  }
  sizes = _describe_sizes(table, tensors, num_heads=biases[0][0], num_gates=num_gates, shared=shared)
  return tensors, config | sizes


def _describe_sizes(
  table: Leaf, tensors: Mapping[Names, Leaf], *, num_heads: int, num_gates: int, shared: bool
) -> dict[str, Any]:
  vocab_size, d_model = table.shape
  shapes = {names if isinstance(names, str) else names[0]: leaf.shape[-2:] for names, leaf in tensors.items()}
  model_type = "umt5" if not shared else "mt5" if vocab_size == _MT5_VOCAB_SIZE else "t5"
  return {
    "architectures": [ARCHITECTURES[model_type]],
    "model_type": model_type,
    "vocab_size": vocab_size,
    "d_model": d_model,
    "d_kv": shapes["encoder.block.0.layer.0.SelfAttention.q.weight"][0] // num_heads,
    "d_ff": shapes["encoder.block.0.layer.1.DenseReluDense.wo.weight"][1],
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu" if num_gates == 2 else "relu",
    "is_gated_act": num_gates == 2,
    "dense_act_fn": "gelu_new" if num_gates == 2 else "relu",
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.1,
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "torch_dtype": table.dtype.name,
  }


def _as_theirs(inner: str, leaf: Leaf, *, is_stacked: bool) -> Leaf:
  """Return a layer's leaf as a tensor, or those of stacked layers with the layers' axis first."""
  first = 0
  if is_stacked:
    leaf, first = transpose(leaf, (1, 0, *range(2, len(leaf.shape)))), 1
  if len(leaf.shape) - first == 3:
    leaf = merge_axes(leaf, first if inner.split("/")[-2] == "out" else first + 1)
  if len(leaf.shape) - first == 2:
    leaf = transpose(leaf, (*range(first), first + 1, first))
  return leaf
