"""The original T5's checkpoints: TensorFlow's, with the names that Mesh TensorFlow gave the variables."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.programs.progress import log_notice
from anystep.train.leaves.leaf import (
  MOMENTS,
  PARAMETERS,
  STEP,
  Index,
  Leaf,
  array_leaf,
  with_fillers,
)
from anystep.train.leaves.orbax_trees import corrupt_error

INDEX = ".index"
_STEP = "global_step"
_SLOTS = {"_slot_vr": "v_row", "_slot_vc": "v_col", "_slot_v": "v", "_slot_m": "m"}
_SLOT = re.compile(r"_slot_(?:vr|vc|v|m)\Z")
_STACK = r"(?P<stack>encoder|decoder|transformer)"
_LAYER = rf"{_STACK}/block_(?P<layer>\d+)/layer_(?P<place>\d+)"
_PATTERNS = [
  (r"shared/embedding", "token_embedder/embedding"),
  (rf"{_STACK}/embedding", "{stack}/token_embedder/embedding"),
  (rf"{_LAYER}/SelfAttention/relative_attention_bias", "{stack}/layers_{layer}/relpos_bias/rel_embedding"),
  (
    rf"{_LAYER}/(?P<block>SelfAttention|EncDecAttention)/(?P<kernel>[qkvo])",
    "{stack}/layers_{layer}/{block}/{kernel}/kernel",
  ),
  (
    rf"{_LAYER}/DenseReluDense/(?P<kernel>w[io](?:_\d+)?)/kernel",
    "{stack}/layers_{layer}/mlp/{kernel}/kernel",
  ),
  (rf"{_LAYER}/(?:layer|rms)_norm/scale", "{stack}/layers_{layer}/{norm}/scale"),
  (rf"{_STACK}/(?:final_layer|rms)_norm/scale", "{stack}/{stack}_norm/scale"),
  (r"(?:decoder|transformer)/logits/kernel", "decoder/logits_dense/kernel"),
]
_KERNELS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_SELF, _CROSS, _MLP = "pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"
_NORMS = {
  "encoder": ("pre_attention_layer_norm", _MLP),
  "decoder": (_SELF, _CROSS, _MLP),
  "transformer": (_SELF, _MLP),
}
_LAYER_BIAS = re.compile(r"/layers_(\d+)/relpos_bias/")


def is_one(path: str) -> bool:
  """Return whether a path is a prefix of a checkpoint's files, such as `model.ckpt-1000`."""
  return os.path.isfile(path + INDEX)


def read(path: str) -> dict[str, Leaf]:
  """Return the leaves of the checkpoint whose files begin with a path. TensorFlow reads whole tensors.

  Raises:
    AnystepError: 65 `checkpoint_corrupt`; 76 `checkpoint_tree` for a tensor that no T5 has.
  """
  from anystep.tasks.startup import start_tensorflow

  start_tensorflow()
  import tensorflow as tf

  try:
    reader = tf.train.load_checkpoint(path)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
  except (tf.errors.OpError, ValueError, RuntimeError) as error:
    raise corrupt_error(path, error) from error
  tensors = {
    name: Leaf(
      shape=tuple(shapes[name]),
      dtype=np.dtype(dtypes[name].as_numpy_dtype),
      chunk=tuple(shapes[name]),
      read=functools.partial(_read_part, path, reader, name),
    )
    for name in sorted(shapes)
  }
  leaves = {leaf_name(path, name): leaf for name, leaf in tensors.items()}
  step = leaves.pop(STEP, None)
  leaves = _right_square_slots(_with_shared_biases(leaves))
  if step is not None:
    leaves[STEP] = array_leaf(step.read_whole().astype(np.int32))
  return with_fillers(leaves)


def _read_part(path: str, reader: Any, name: str, index: Index) -> np.ndarray:
  try:
    return np.asarray(reader.get_tensor(name))[index]
  except Exception as error:
    # A data file that ends early; TensorFlow's reader raises errors of several kinds.
    raise corrupt_error(path, error) from error


def leaf_name(path: str, tensor: str) -> str:
  """Return T5X's name of a tensor.

  Raises:
    AnystepError: 76 `checkpoint_tree`.

  >>> leaf_name("", "decoder/block_002/layer_001/EncDecAttention/q_slot_v")
  'state/param_states/decoder/layers_2/encoder_decoder_attention/query/kernel/v'
  """
  if tensor == _STEP:
    return STEP
  slot = _SLOT.search(tensor)
  name = tensor[: slot.start()] if slot else tensor
  for pattern, template in _PATTERNS:
    match = re.fullmatch(pattern, name)
    if match:
      leaf = template.format(**_translate(match.groupdict()))
      return f"{MOMENTS}{leaf}/{_SLOTS[slot[0]]}" if slot else PARAMETERS + leaf
  raise AnystepError(
    ExitCode.MISMATCH,
    "checkpoint_tree",
    path=path,
    leaf=tensor,
    expected="tensors of Mesh TensorFlow's T5",
    got="a name that none of its variables has",
    fix="convert a checkpoint of a T5: other models have no counterpart here",
  )


def _translate(groups: dict[str, str]) -> dict[str, str]:
  """Return the parts of a name in T5X's words."""
  parts = dict(groups)
  stack = parts.get("stack", "")
  if "layer" in parts:
    parts["layer"] = str(int(parts["layer"]))
    norms, place = _NORMS[stack], int(parts["place"])
    parts["norm"] = norms[place] if place < len(norms) else f"layer_{place}"
  if "block" in parts:
    self_attention = "attention" if stack == "encoder" else "self_attention"
    parts["block"] = self_attention if parts["block"] == "SelfAttention" else "encoder_decoder_attention"
  parts["kernel"] = _KERNELS.get(parts.get("kernel", ""), parts.get("kernel", ""))
  parts["stack"] = "decoder" if stack == "transformer" else stack
  return parts


def _with_shared_biases(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
  """Return leaves with the stack's name for position biases that the first layer has for all."""
  if any(match and match[1] != "0" for match in map(_LAYER_BIAS.search, leaves)):
    return leaves
  return {_LAYER_BIAS.sub("/relpos_bias/", name): leaf for name, leaf in leaves.items()}


def _right_square_slots(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
  """Return leaves with the moments of square parameters by the axes that T5X keeps them along.

  Mesh TensorFlow's `vr` has the smaller side, as T5X's `v_row`. Of equal sides it keeps the second and T5X
  the first, so T5X's own importer, which goes by names, takes these moments in transposed.
  """
  leaves = dict(leaves)
  squares = []
  for name, leaf in list(leaves.items()):
    slots = [f"{MOMENTS}{name.removeprefix(PARAMETERS)}/{slot}" for slot in ("v_row", "v_col")]
    is_square = name.startswith(PARAMETERS) and len(leaf.shape) == 2 and leaf.shape[0] == leaf.shape[1]
    if is_square and set(slots) <= leaves.keys():
      leaves[slots[0]], leaves[slots[1]] = leaves[slots[1]], leaves[slots[0]]
      squares.append(name)
  if squares:
    log_notice(
      f"moments of {len(squares)} square parameters, such as {squares[0]}, are along the other axis than"
      " their names say: T5X's own importer takes them in transposed"
    )
  return leaves
