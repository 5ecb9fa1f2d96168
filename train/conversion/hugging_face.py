"""Hugging Face's T5, mT5 and umT5: a `config.json` beside files of safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.files.json_files import MALFORMED, read_json
from anystep.train.conversion.anystep_format import left_over_error
from anystep.train.leaves import safetensors_files
from anystep.train.leaves.leaf import (
  PARAMETERS,
  Advance,
  Leaf,
  Leaves,
  Writer,
  merge_axes,
  split_axis,
  stack,
  transpose,
)
from anystep.train.leaves.orbax_trees import corrupt_error
from anystep.train.leaves.safetensors_files import INDEX_FILE, ONE_FILE, Names

CONFIG = "config.json"
_ARCHITECTURES = {
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
  "umt5": _GATED,
}


def is_one(path: str) -> bool:
  """Return whether a directory is a model in safetensors."""
  files = [os.path.exists(os.path.join(path, name)) for name in (ONE_FILE, INDEX_FILE)]
  return os.path.exists(os.path.join(path, CONFIG)) and any(files)


def read(path: str) -> dict[str, Leaf]:
  """Return the parameters of a model; Hugging Face keeps no step and no optimizer's state.

  umT5's, whose layers have position biases of their own, are those of scalable T5 with scanned layers.

  Raises:
    AnystepError: 78 `checkpoint_unsupported`; 65 `checkpoint_corrupt`; 76 `checkpoint_tree`.
  """
  config_path = os.path.join(path, CONFIG)
  try:
    config: dict[str, Any] = dict(read_json(config_path))
    config = _DEFAULTS.get(config["model_type"], {}) | config
    _check_config(config_path, config)
    num_layers = int(config["num_layers"])
    counts = {"encoder": num_layers, "decoder": int(config.get("num_decoder_layers") or num_layers)}
    num_heads = int(config["num_heads"])
  except MALFORMED as error:
    raise corrupt_error(config_path, error) from error
  tensors = safetensors_files.read_tensors(path)
  has_head = not config["tie_word_embeddings"]
  unread = {name for name in tensors if name not in _IGNORED and (has_head or name != _HEAD)}

  def read_tensor(name: str) -> Leaf:
    if name not in tensors:
      raise AnystepError(
        ExitCode.MISMATCH,
        "checkpoint_tree",
        path=path,
        leaf=name,
        expected=f"the tensors of {config_path}",
        got=f"no such tensor; the nearest are {find_nearest(name, tensors)}",
        fix="restore the directory from a copy: its files are of different models",
      )
    unread.discard(name)
    return tensors[name]

  leaves = {_EMBEDDING: read_tensor(_TABLE)}
  if has_head:
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
  for name in sorted(unread):
    fix = "convert a model of this type without further parts"
    raise left_over_error(f"the model of {config_path}", name, tensors[name], fix=fix)
  return leaves


def _check_config(path: str, config: Mapping[str, Any]) -> None:
  if config["model_type"] not in _ARCHITECTURES:
    raise _unsupported_error(path, f"a model of type {', '.join(_ARCHITECTURES)}", config["model_type"])
  for name, values in _FIXED.items():
    value = config.get(name, values[0])
    if value not in values:
      raise _unsupported_error(path, f"{name} {' or '.join(map(str, values))}", value)


def _unsupported_error(path: str | None, expected: str, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "checkpoint_unsupported",
    **({"path": path} if path else {}),
    expected=expected,
    got=got,
    fix="docs/checkpoints.md lists the models that can be converted",
  )


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


def plan_writing(leaves: Leaves, *, max_file_bytes: int = safetensors_files.MAX_FILE_BYTES) -> Writer:
  """Return what writes the parameters of a T5; Hugging Face's models have no step and no optimizer's state.

  Args:
    leaves: leaves by T5X's names.
    max_file_bytes: see `safetensors_files.write_tensors`.

  Raises:
    AnystepError: 78 `checkpoint_unsupported` for other models than T5s; 76 `checkpoint_tree` for parameters
      that none has.
  """
  tensors, config = _as_model({name: leaf for name, leaf in leaves.items() if name.startswith(PARAMETERS)})

  def write(path: str, advance: Advance) -> None:
    os.makedirs(path)
    safetensors_files.write_tensors(path, tensors, advance, max_file_bytes=max_file_bytes)
    with open(os.path.join(path, CONFIG), "w") as file:
      json.dump(config, file, indent=2, sort_keys=True)

  return write


def _as_model(parameters: Leaves) -> tuple[dict[Names, Leaf], dict[str, Any]]:
  """Return the tensors, those of stacked layers together, and the configuration of a model."""
  unread = set(parameters)

  def read_leaf(name: str) -> Leaf:
    if name not in parameters:
      nearest = find_nearest(name, parameters)
      expected = "a T5, mT5 or umT5, with an encoder and a decoder"
      raise _unsupported_error(None, expected, f"no {name}, but {nearest}")
    unread.discard(name)
    return parameters[name]

  table = read_leaf(_EMBEDDING)
  tensors: dict[Names, Leaf] = {_TABLE: table}
  if _LOGITS in parameters:
    tensors[_HEAD] = transpose(read_leaf(_LOGITS))
  num_gates = 2 if any(name.endswith("/mlp/wi_0/kernel") for name in parameters) else 1
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
    "architectures": [_ARCHITECTURES[model_type]],
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
