"""Trees of arrays as Orbax writes them: an OCDBT database of Zarr arrays, and what describes it.

Orbax itself takes and gives whole arrays. TensorStore reads and writes them in blocks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files.json_files import MALFORMED, read_json
from anystep.train.leaves.leaf import BLOCK_BYTES, Advance, Index, Leaf, block_shape, iterate_blocks

METADATA = "_METADATA"
_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_HANDLERS = "orbax.checkpoint._src.handlers"
STANDARD_HANDLER = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
TREE_HANDLER = f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_COMPRESSOR = {"id": "zstd", "level": 1}
# Orbax's number for keys of dicts.
_DICT_KEY = 2

Keys = tuple[str, ...]


# Orbax's names for nodes without leaves.
_EMPTY = ("None", "Dict", "List", "NamedTuple", "Tuple")


def read_tree(path: str) -> dict[Keys, Leaf]:
  """Return the leaves of a tree by their keys.

  Raises:
    AnystepError: 65 `checkpoint_corrupt`.
  """
  try:
    metadata = read_json(os.path.join(path, METADATA))
    entries = [
      (tuple(key["key"] for key in entry["key_metadata"]), entry["value_metadata"]["value_type"])
      for entry in metadata["tree_metadata"].values()
    ]
    base: dict[str, Any] = {"driver": "file", "path": os.path.join(os.path.abspath(path), "")}
    if metadata.get("use_ocdbt", True):
      base = {"driver": "ocdbt", "base": base, "path": ""}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    names = {keys: ".".join(keys) for keys, value_type in entries if value_type not in _EMPTY}
    stores = {
      keys: {"driver": driver, "kvstore": {**base, "path": f"{base['path']}{name}/"}}
      for keys, name in names.items()
    }
  except (*MALFORMED, FileNotFoundError) as error:
    raise corrupt_error(os.path.join(path, METADATA), error) from error
  return open_arrays(path, stores)


def open_arrays(path: str, specs: Mapping[Any, dict[str, Any]]) -> dict[Any, Leaf]:
  """Return the arrays of TensorStore's specs as leaves.

  Raises:
    AnystepError: 65 `checkpoint_corrupt`.
  """
  try:
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    opened = {key: ts.open(spec, read=True, open=True, context=context) for key, spec in specs.items()}
    return {key: _leaf_of(path, future.result(), specs[key]) for key, future in opened.items()}
  except ValueError as error:
    raise corrupt_error(path, error) from error


def _leaf_of(path: str, array: ts.TensorStore, spec: dict[str, Any]) -> Leaf:
  dtype = array.dtype.numpy_dtype
  shape = tuple(int(size) for size in array.shape)
  read_chunk = array.chunk_layout.read_chunk.shape or shape
  chunk = tuple(size or whole for size, whole in zip(read_chunk, shape, strict=True))
  if math.prod(chunk) * dtype.itemsize > BLOCK_BYTES:
    # Blocks are parts of such a chunk, which is decoded once for all of them.
    limit = 2 * math.prod(chunk) * dtype.itemsize
    context = ts.Context({"cache_pool": {"total_bytes_limit": limit}})
    array = ts.open(spec, read=True, open=True, context=context).result()

  def read(index: Index) -> np.ndarray:
    try:
      return np.asarray(array[index].read().result())
    except ValueError as error:
      raise corrupt_error(path, error) from error

  return Leaf(shape=shape, dtype=dtype, chunk=chunk, read=read)


def write_tree(path: str, leaves: Mapping[Keys, Leaf], advance: Advance) -> None:
  """Write leaves into a new directory, in blocks.

  Args:
    path: the directory.
    leaves: leaves by their keys.
    advance: called with the number of bytes of each block written.
  """
  os.makedirs(path)
  # The caller flushes the whole directory to the disk.
  context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})
  base = {"driver": "file", "path": os.path.join(os.path.abspath(path), "")}
  blocks = {keys: block_shape(leaf) for keys, leaf in leaves.items()}
  chunks = {keys: tuple(max(1, size) for size in block) for keys, block in blocks.items()}
  opened = {}
  for keys, leaf in leaves.items():
    spec = {
      "driver": "zarr",
      "kvstore": {"driver": "ocdbt", "base": base, "path": f"{'.'.join(keys)}/"},
      "metadata": {"shape": leaf.shape, "chunks": chunks[keys], "compressor": _COMPRESSOR},
      "dtype": leaf.dtype.name,
      # Orbax's too: a chunk of zeros is no missing chunk.
      "store_data_equal_to_fill_value": True,
    }
    opened[keys] = ts.open(spec, create=True, open=False, context=context)
  pending: list[tuple[Any, int]] = []
  pending_bytes = 0
  for keys, leaf in leaves.items():
    array = opened[keys].result()
    for index in iterate_blocks(leaf, blocks[keys]):
      part = leaf.read(index)
      # Small leaves are written together, since each write by itself would be a new version of the tree.
      if pending_bytes + part.nbytes > BLOCK_BYTES:
        _await(pending, advance)
        pending_bytes = 0
      pending.append((array[index].write(part), part.nbytes))
      pending_bytes += part.nbytes
  _await(pending, advance)
  _write_json(os.path.join(path, METADATA), _describe_tree(leaves))
  _write_json(os.path.join(path, "_sharding"), {})
  os.mkdir(os.path.join(path, "array_metadatas"))
  _write_json(
    os.path.join(path, "array_metadatas", "process_0"),
    {
      "array_metadatas": [
        {
          "array_metadata": {
            "param_name": ".".join(keys),
            "write_shape": leaf.shape,
            "chunk_shape": chunks[keys],
            "ext_metadata": None,
          }
        }
        for keys, leaf in leaves.items()
      ]
    },
  )


def _await(pending: list[tuple[Any, int]], advance: Advance) -> None:
  for write, num_bytes in pending:
    write.result()
    advance(num_bytes)
  pending.clear()


def write_checkpoint_metadata(path: str, handlers: str | dict[str, str]) -> None:
  """Write the file that names Orbax's handlers of a directory, or of its items."""
  document = {
    "item_handlers": handlers,
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": None,
    "commit_timestamp_nsecs": None,
    "custom_metadata": {},
  }
  _write_json(os.path.join(path, _CHECKPOINT_METADATA), document)


def corrupt_error(path: object, error: Exception) -> AnystepError:
  """Return the error for a checkpoint of any format that cannot be read."""
  return AnystepError(
    ExitCode.DATA,
    "checkpoint_corrupt",
    path=path,
    got=one_line(error)[:300],
    fix="restore it from a copy: a file is missing or was cut short",
  )


def _describe_tree(leaves: Mapping[Keys, Leaf]) -> dict[str, Any]:
  entries = {
    str(keys): {
      "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
      "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": leaf.shape},
    }
    for keys, leaf in leaves.items()
  }
  return {
    "tree_metadata": entries,
    "use_ocdbt": True,
    "use_zarr3": False,
    "store_array_data_equal_to_fill_value": True,
    "custom_metadata": None,
  }


def _write_json(path: str, document: Any) -> None:
  with open(path, "w") as file:
    json.dump(document, file)
