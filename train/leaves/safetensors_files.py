"""Files of safetensors: a length, a JSON header, and the bytes of each tensor in C order.

https://huggingface.co/docs/safetensors. The package of that name gives numpy no bfloat16, and writes whole
tensors only; these are read and written in blocks.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anystep.files.json_files import MALFORMED, parse_json, read_json
from anystep.train.leaves.leaf import Advance, Index, Leaf, block_shape, find_dtype, iterate_blocks
from anystep.train.leaves.orbax_trees import corrupt_error

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20
_ALIGNMENT = 8
# Hugging Face's own limit is 5 GB.
MAX_FILE_BYTES = 5 * 10**9

Names = str | tuple[str, ...]
_DTYPES = {
  "BOOL": "bool",
  "U8": "uint8",
  "I8": "int8",
  "I16": "int16",
  "I32": "int32",
  "I64": "int64",
  "F16": "float16",
  "BF16": "bfloat16",
  "F32": "float32",
  "F64": "float64",
  "F8_E4M3": "float8_e4m3fn",
  "F8_E5M2": "float8_e5m2",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_tensors(directory: str) -> dict[str, Leaf]:
  """Return the tensors of a directory's file, or else of those that its index names.

  Raises:
    AnystepError: 65 `checkpoint_corrupt`.
  """
  path, index_path = (os.path.join(directory, name) for name in (ONE_FILE, INDEX_FILE))
  # Of both Hugging Face reads the one file.
  if os.path.exists(path) or not os.path.exists(index_path):
    return _read_file(path)
  try:
    file_of = dict(read_json(index_path)["weight_map"])
    if any(os.path.basename(name) != name for name in file_of.values()):
      raise ValueError("a file outside of the directory")
  except (*MALFORMED, FileNotFoundError) as error:
    raise corrupt_error(index_path, error) from error
  files = {name: _read_file(os.path.join(directory, name)) for name in sorted(set(file_of.values()))}
  missing = [name for name, file in file_of.items() if name not in files[file]]
  if missing:
    raise corrupt_error(index_path, ValueError(f"no {missing[0]} in {file_of[missing[0]]}"))
  return {name: files[file][name] for name, file in file_of.items()}


def _read_file(path: str) -> dict[str, Leaf]:
  try:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
      header_bytes = int.from_bytes(file.read(8), "little")
      if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
      header = parse_json(file.read(header_bytes))
    begin = 8 + header_bytes
    return {
      name: _leaf_of(path, entry, begin, size) for name, entry in header.items() if name != "__metadata__"
    }
  except (*MALFORMED, FileNotFoundError, IsADirectoryError) as error:
    raise corrupt_error(path, error) from error


def _leaf_of(path: str, entry: dict[str, Any], begin: int, size: int) -> Leaf:
  dtype, shape = find_dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
  first, last = entry["data_offsets"]
  if any(type(number) is not int or number < 0 for number in (*shape, first, last)):
    raise ValueError(f"{list(shape)} from {first} to {last}, not all whole numbers")
  if last - first != math.prod(shape) * dtype.itemsize or not 0 <= first <= last <= size - begin:
    raise ValueError(f"{last - first} bytes for {dtype} {shape} in a file of {size}")
  read = functools.partial(_read_part, path, dtype, shape, begin + first)
  return Leaf(shape=shape, dtype=dtype, chunk=(1,) * len(shape), read=read)


def _read_part(path: str, dtype: np.dtype, shape: tuple[int, ...], offset: int, index: Index) -> np.ndarray:
  part = np.empty([axis.stop - axis.start for axis in index], dtype)
  with open(path, "rb", buffering=0) as file:
    for place, run in _runs(part, shape, index):
      file.seek(offset + place * dtype.itemsize)
      view = run.view(np.uint8).data
      while view:
        count = file.readinto(view)
        if not count:
          raise corrupt_error(path, ValueError("the file ends early"))
        view = view[count:]
  return part


def _runs(part: np.ndarray, shape: tuple[int, ...], index: Index) -> Iterator[tuple[int, np.ndarray]]:
  """Yield the runs of a part that are contiguous in the whole array, each flat, with their places in it."""
  # Axes of which the part has all join the axis before.
  joined = len(shape)
  while joined and index[joined - 1] == slice(0, shape[joined - 1]):
    joined -= 1
  outer = max(joined - 1, 0)
  strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
  for corner in np.ndindex(*part.shape[:outer]):
    places = [index[axis].start + number for axis, number in enumerate(corner)]
    place = sum(number * stride for number, stride in zip(places, strides, strict=False))
    if outer < len(shape):
      place += index[outer].start * strides[outer]
    # The ellipsis keeps a view of an array without axes.
    yield place, part[(*corner, ...)].reshape(-1)


def write_tensors(
  directory: str,
  leaves: Mapping[Names, Leaf],
  advance: Advance,
  *,
  max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
  """Write tensors in blocks to one file, or to several with an index where they are large.

  Args:
    directory: an existing directory.
    leaves: leaves by name; or by several names, which the leaf's first axis counts.
    advance: called with the number of bytes of each block written.
    max_file_bytes: bytes of tensors in each file; a larger tensor has a file of its own.
  """
  leaf_of = {name: leaf for names, leaf in leaves.items() for name in _as_tuple(names)}
  shapes = {name: leaf.shape for name, leaf in leaves.items() if isinstance(name, str)}
  shapes = {name: shapes.get(name, leaf.shape[1:]) for name, leaf in leaf_of.items()}
  sizes = {name: math.prod(shapes[name]) * leaf.dtype.itemsize for name, leaf in leaf_of.items()}
  groups: list[list[str]] = [[]]
  for name in sorted(leaf_of):
    if groups[-1] and sum(sizes[other] for other in (*groups[-1], name)) > max_file_bytes:
      groups.append([])
    groups[-1].append(name)
  count = len(groups)
  places: dict[str, tuple[str, int]] = {}
  for number, group in enumerate(groups, start=1):
    file_name = ONE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
    path = os.path.join(directory, file_name)
    entries = {name: (_NAMES[leaf_of[name].dtype.name], shapes[name], sizes[name]) for name in group}
    places |= {name: (path, offset) for name, offset in _begin_file(path, entries).items()}
  for names, leaf in leaves.items():
    for index in iterate_blocks(leaf, block_shape(leaf)):
      part = np.ascontiguousarray(leaf.read(index))
      if isinstance(names, str):
        _write_part(places[names], part, leaf.shape, index)
      else:
        for name, tensor in zip(names[index[0]], part, strict=True):
          _write_part(places[name], tensor, leaf.shape[1:], index[1:])
      advance(part.nbytes)
  if count > 1:
    document = {
      "metadata": {"total_size": sum(sizes.values())},
      "weight_map": {name: os.path.basename(places[name][0]) for name in sorted(places)},
    }
    with open(os.path.join(directory, INDEX_FILE), "w") as file:
      json.dump(document, file, indent=2)


def _as_tuple(names: Names) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else names


def _begin_file(path: str, entries: Mapping[str, tuple[str, tuple[int, ...], int]]) -> dict[str, int]:
  """Write a file's header and make room for its tensors, of a dtype, shape and size; return their offsets."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, (dtype, shape, size) in entries.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
    end += size
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  begin = 8 + len(text)
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    # Blocks, not a hole: on a full disk a write through a map would kill the program.
    file.flush()
    os.posix_fallocate(file.fileno(), 0, begin + end)
  return {name: begin + header[name]["data_offsets"][0] for name in entries}


def _write_part(place: tuple[str, int], part: np.ndarray, shape: tuple[int, ...], index: Index) -> None:
  """Write a part of the tensor of this shape that begins at an offset of a file."""
  path, offset = place
  raw = part.view(f"u{part.dtype.itemsize}")
  if part.size == math.prod(shape):
    with open(path, "r+b") as file:
      file.seek(offset)
      file.write(raw.data)
    return
  # Many short runs are faster through a map, which is closed at once, since its pages count as memory.
  mapped = np.memmap(path, raw.dtype, "r+", offset, shape)
  mapped[index] = raw
  del mapped
