"""What T5X and Hugging Face computed, in tests/fixtures, and our models of the same sizes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.network.decoder_only import DecoderConfig, DecoderWrapper
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = {"t5_1_1": FIXTURES / "t5x_t5_1_1"}
_COMMON = {"vocab_size": 384, "head_dim": 16, "mlp_activations": ("gelu", "linear")}
_SIZES = {
  "t5_1_1": {"emb_dim": 64, "num_heads": 4, "mlp_dim": 128, "num_encoder_layers": 2, "num_decoder_layers": 3},
  "decoder_only": {
    "emb_dim": 64,
    "num_heads": 4,
    "mlp_dim": 128,
    "num_layers": 3,
    "logits_via_embedding": True,
  },
  "scalable_t5": {
    "emb_dim": 128,
    "num_heads": 4,
    "mlp_dim": 256,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "remat_policy": "minimal",
  },
  "factored": {
    "emb_dim": 192,
    "num_heads": 12,
    "mlp_dim": 256,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
  },
  "bfloat16": {
    "emb_dim": 32,
    "num_heads": 2,
    "mlp_dim": 64,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
  },
}
_SIZES["microbatches"] = _SIZES["bfloat16"]


def t5x_model(case: str, **options):
  """Our model of a case's sizes; options are the network's."""
  sizes = _COMMON | _SIZES[case] | options
  if case == "decoder_only":
    return DecoderOnlyModel(DecoderWrapper(DecoderConfig(**sizes)))
  if case == "scalable_t5":
    return EncoderDecoderModel(ScalableTransformer(ScalableT5Config(**sizes)))
  return EncoderDecoderModel(Transformer(T5Config(**sizes)))


def arrays(case: str, name: str) -> dict[str, np.ndarray]:
  """Arrays of a file, by name."""
  with np.load(_folder(case) / f"{name}.npz") as loaded:
    return dict(loaded)


def document(case: str, name: str):
  """A JSON file."""
  return json.loads((_folder(case) / f"{name}.json").read_text())


def t5x_params(case: str, step: int = 0):
  """Parameters that T5X had after a step."""
  return unflatten_dict(
    {name: jnp.asarray(value) for name, value in arrays(case, f"params_{step}").items()}, "/"
  )


def t5x_batches(case: str, batch_size: int = 8):
  """The batches of a case, step by step."""
  rows = arrays(case, "batches")
  for start in range(0, len(rows["decoder_target_tokens"]), batch_size):
    yield {name: jnp.asarray(values[start : start + batch_size]) for name, values in rows.items()}


class Variable(NamedTuple):
  """A line of T5X's model-info.txt: axes' sizes, their names if they have some, and the mesh's axes."""

  shape: tuple[int, ...]
  axes: tuple[str, ...] | None
  spec: tuple[str | None, ...]


def model_info(case: str) -> dict[str, Variable]:
  """Every variable that T5X prints: parameters, and below `param_states/` the optimizer's."""
  text = (_folder(case) / "model-info.txt").read_text()
  lines = re.findall(r"^Variable (\S+) +size +\d+ +shape \((.*?)\) +partition spec (.*)$", text, re.MULTILINE)
  variables = {}
  for name, axes, spec in lines:
    parts = [axis.rpartition("=") for axis in axes.split(", ") if axis]
    shape = tuple(int(size.strip(",")) for _, _, size in parts)
    names = tuple(axis for axis, _, _ in parts) if "=" in axes else None
    variables[name] = Variable(shape, names, ast.literal_eval(spec) or (None,) * len(shape))
  return variables


def hugging_face_weights(folder: Path) -> dict[str, np.ndarray]:
  """The arrays of a model's files of safetensors."""
  files = sorted(folder.glob("*.safetensors"))
  return {name: array for path in files for name, array in read_safetensors(path).items()}


def hugging_face_sizes(config):
  """Sizes of our network of a T5, mT5 or umT5 of Hugging Face."""
  return {
    "vocab_size": config["vocab_size"],
    "emb_dim": config["d_model"],
    "num_heads": config["num_heads"],
    "head_dim": config["d_kv"],
    "mlp_dim": config["d_ff"],
    "num_encoder_layers": config["num_layers"],
    "num_decoder_layers": config["num_decoder_layers"],
    "mlp_activations": ("gelu", "linear") if config["is_gated_act"] else ("relu",),
    "logits_via_embedding": config.get("tie_word_embeddings", True),
  }


def hugging_face_network(name: str):
  """Our network of a model that Hugging Face saved in the fixtures, and its parameters."""
  folder = FIXTURES / name
  config = json.loads((folder / "config.json").read_text())
  sizes = hugging_face_sizes(config)
  umt5 = config["model_type"] == "umt5"
  params = _hugging_face_params(hugging_face_weights(folder), own_biases=umt5)
  if umt5:
    network = ScalableTransformer(ScalableT5Config(**sizes, scan_layers=False))
    for path in params:
      if "attention/" in path and "/out/" not in path:
        params[path] = params[path].reshape(-1, config["num_heads"], config["d_kv"])
      elif "/out/" in path:
        params[path] = params[path].reshape(config["num_heads"], config["d_kv"], -1)
  else:
    network = Transformer(T5Config(**sizes))
  return network, unflatten_dict(params, sep="/")


def _hugging_face_params(weights, *, own_biases):
  """Parameters by our names; with `own_biases` every layer has its own, as in umT5."""
  params = {"token_embedder/embedding": weights["shared.weight"]}
  if "lm_head.weight" in weights:
    params["decoder/logits_dense/kernel"] = weights["lm_head.weight"].T
  blocks = {"encoder": ["attention", "mlp"]}
  blocks["decoder"] = ["self_attention", "encoder_decoder_attention", "mlp"]
  norms = {"attention": "attention", "self_attention": "self_attention", "mlp": "mlp"}
  norms["encoder_decoder_attention"] = "cross_attention"
  names = {"q": "query", "k": "key", "v": "value", "o": "out"}
  for stack, inner in blocks.items():
    params[f"{stack}/{stack}_norm/scale"] = weights[f"{stack}.final_layer_norm.weight"]
    for name, value in weights.items():
      parts = name.split(".")
      if parts[:2] != [stack, "block"]:
        continue
      layer, place = f"{stack}/layers_{parts[2]}", inner[int(parts[4])]
      match parts[5:]:
        case ["layer_norm", _]:
          params[f"{layer}/pre_{norms[place]}_layer_norm/scale"] = value
        case [_, "relative_attention_bias", _]:
          params[f"{layer if own_biases else stack}/relpos_bias/rel_embedding"] = value.T
        case [_, kernel, _]:
          params[f"{layer}/{place}/{names.get(kernel, kernel)}/kernel"] = value.T
  return params


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
  """The arrays of a file, by the format's definition."""
  dtypes = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64, "BF16": jnp.bfloat16}
  content = path.read_bytes()
  header_bytes = int.from_bytes(content[:8], "little")
  header, data = json.loads(content[8 : 8 + header_bytes]), content[8 + header_bytes :]
  return {
    name: np.frombuffer(data[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(entry["shape"])
    for name, entry in header.items()
    if name != "__metadata__"
  }


def _folder(case: str) -> Path:
  return FOLDERS.get(case, FIXTURES / "t5x" / case)
