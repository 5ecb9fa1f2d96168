"""Trees written in blocks are what Orbax reads, and the other way round."""

import json

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from anystep.errors import AnystepError
from anystep.train.leaves import orbax_trees
from anystep.train.leaves.leaf import array_leaf

RNG = np.random.default_rng(0)
TREE = {
  "a": {"kernel": RNG.normal(size=(40, 30)).astype(np.float32), "zeros": np.zeros((3, 4), np.float32)},
  "b": {"x.y": RNG.normal(size=(5, 6, 7)).astype(ml_dtypes.bfloat16)},
  "step": np.array(7, np.int32),
}
LEAVES = {
  ("a", "kernel"): TREE["a"]["kernel"],
  ("a", "zeros"): TREE["a"]["zeros"],
  ("b", "x.y"): TREE["b"]["x.y"],
  ("step",): TREE["step"],
}


def assert_equal(found, expected):
  assert found.dtype == expected.dtype
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("block_bytes", [256, 1 << 20])
def test_orbax_restores_what_is_written_in_blocks(block_bytes, tmp_path, monkeypatch):
  original = orbax_trees.block_shape
  monkeypatch.setattr(orbax_trees, "block_shape", lambda leaf: original(leaf, block_bytes))
  path, written = tmp_path / "tree", []
  leaves = {keys: array_leaf(array) for keys, array in LEAVES.items()}
  orbax_trees.write_tree(str(path), leaves, written.append)
  orbax_trees.write_checkpoint_metadata(str(path), orbax_trees.STANDARD_HANDLER)
  assert sum(written) == sum(array.nbytes for array in LEAVES.values())
  restored = ocp.StandardCheckpointer().restore(path, TREE)
  for keys, array in LEAVES.items():
    leaf = restored
    for key in keys:
      leaf = leaf[key]
    assert_equal(np.asarray(leaf), array)
  for keys, leaf in orbax_trees.read_tree(str(path)).items():
    assert_equal(leaf.read_whole(), LEAVES[keys])


def test_what_orbax_writes_is_read_in_parts(tmp_path):
  path = tmp_path / "tree"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, TREE)
  leaves = orbax_trees.read_tree(str(path))
  assert leaves.keys() == LEAVES.keys()
  for keys, leaf in leaves.items():
    assert_equal(leaf.read_whole(), LEAVES[keys])
  part = leaves["a", "kernel"].read((slice(3, 9), slice(10, 30)))
  assert_equal(part, TREE["a"]["kernel"][3:9, 10:30])


def test_a_chunk_larger_than_a_block_is_read_in_parts(tmp_path, monkeypatch):
  path = tmp_path / "tree"
  orbax_trees.write_tree(str(path), {("a",): array_leaf(TREE["a"]["kernel"])}, lambda _: None)
  monkeypatch.setattr(orbax_trees, "BLOCK_BYTES", 100)
  (leaf,) = orbax_trees.read_tree(str(path)).values()
  assert_equal(leaf.read((slice(0, 40), slice(7, 8))), TREE["a"]["kernel"][:, 7:8])


def test_trees_without_metadata_or_arrays_are_refused(tmp_path):
  path = tmp_path / "tree"
  orbax_trees.write_tree(str(path), {("a",): array_leaf(np.zeros((4, 4)))}, lambda _: None)
  document = json.loads((path / "_METADATA").read_text())
  for change in ({"tree_metadata": {"x": {}}}, None):
    (path / "_METADATA").write_text(json.dumps(document | change) if change else json.dumps(document))
    if change is None:
      (path / "manifest.ocdbt").unlink()
    with pytest.raises(AnystepError) as refused:
      orbax_trees.read_tree(str(path))
    assert (refused.value.code, refused.value.kind) == (65, "checkpoint_corrupt")
