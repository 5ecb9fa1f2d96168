"""Files of safetensors: written ones read by the format's definition, damaged ones refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from t5x_cases import read_safetensors

from anystep.errors import AnystepError
from anystep.train.leaves import safetensors_files
from anystep.train.leaves.leaf import array_leaf, transpose

RNG = np.random.default_rng(0)
ARRAYS = {
  "a": RNG.normal(size=(7, 30)).astype(np.float32),
  "b": RNG.normal(size=(4, 5, 6)).astype(ml_dtypes.bfloat16),
  "scalar": np.array(3.5, np.float32),
  "counts": RNG.integers(0, 9, (11,)),
}
LEAVES = {name: array_leaf(array) for name, array in ARRAYS.items()}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  """Blocks of a few rows, as those of large tensors are."""
  monkeypatch.setattr(
    safetensors_files, "block_shape", lambda leaf, original=safetensors_files.block_shape: original(leaf, 64)
  )


@pytest.mark.parametrize(("max_file_bytes", "num_files"), [(10**6, 1), (400, 2)])
def test_what_is_written_is_read_by_the_formats_definition(max_file_bytes, num_files, tmp_path):
  written = []
  turned = LEAVES | {"a": transpose(LEAVES["a"])}
  safetensors_files.write_tensors(str(tmp_path), turned, written.append, max_file_bytes=max_file_bytes)
  files = sorted(tmp_path.glob("*.safetensors"))
  assert len(files) == num_files
  tensors = {name: array for path in files for name, array in read_safetensors(path).items()}
  for name, array in (ARRAYS | {"a": ARRAYS["a"].T}).items():
    assert tensors[name].dtype == array.dtype
    np.testing.assert_array_equal(tensors[name], array)
  assert sum(written) == sum(array.nbytes for array in ARRAYS.values())
  if num_files > 1:
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(written)
    assert set(index["weight_map"].values()) == {path.name for path in files}
  leaves = safetensors_files.read_tensors(str(tmp_path))
  for name, leaf in leaves.items():
    np.testing.assert_array_equal(leaf.read_whole(), tensors[name])
  np.testing.assert_array_equal(
    leaves["b"].read((slice(1, 3), slice(2, 5), slice(0, 6))), ARRAYS["b"][1:3, 2:5]
  )


def damage_header(path):
  content = path.read_bytes()
  path.write_bytes((10**9).to_bytes(8, "little") + content[8:])


def cut(path):
  path.write_bytes(path.read_bytes()[:-5])


def remove(path):
  path.unlink()


def test_tensors_of_one_leaf_are_written_together(tmp_path):
  names = ("layer.0", "layer.1", "layer.2", "layer.3")
  leaves = {names: array_leaf(ARRAYS["b"]), "a": LEAVES["a"]}
  safetensors_files.write_tensors(str(tmp_path), leaves, lambda _: None, max_file_bytes=200)
  written = {name: leaf.read_whole() for name, leaf in safetensors_files.read_tensors(str(tmp_path)).items()}
  assert written.keys() == {*names, "a"}
  for name, array in zip(names, ARRAYS["b"], strict=True):
    np.testing.assert_array_equal(written[name], array)
  assert len(list(tmp_path.glob("*.safetensors"))) > 2


@pytest.mark.parametrize("damage", [damage_header, cut, remove])
def test_a_damaged_file_is_refused(damage, tmp_path):
  safetensors_files.write_tensors(str(tmp_path), LEAVES, lambda _: None, max_file_bytes=300)
  damage(sorted(tmp_path.glob("*.safetensors"))[1])
  with pytest.raises(AnystepError) as refused:
    safetensors_files.read_tensors(str(tmp_path))
  assert (refused.value.code, refused.value.kind) == (65, "checkpoint_corrupt")


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "model-00001-of-00002.safetensors"])
def test_an_index_that_does_not_fit_its_files_is_refused(file, tmp_path):
  safetensors_files.write_tensors(str(tmp_path), LEAVES, lambda _: None, max_file_bytes=300)
  index = tmp_path / "model.safetensors.index.json"
  document = json.loads(index.read_text())
  document["weight_map"]["scalar"] = file
  index.write_text(json.dumps(document))
  with pytest.raises(AnystepError, match="checkpoint_corrupt"):
    safetensors_files.read_tensors(str(tmp_path))


def test_of_one_file_and_an_index_the_file_is_read_as_hugging_face_does(tmp_path):
  first, second = ({"a": array_leaf(np.full((4, 4), value, np.float32))} for value in (1, 2))
  first["b"] = first["a"]
  safetensors_files.write_tensors(str(tmp_path), first, lambda _: None, max_file_bytes=64)
  safetensors_files.write_tensors(str(tmp_path), second, lambda _: None)
  tensors = safetensors_files.read_tensors(str(tmp_path))
  assert tensors.keys() == {"a"}
  np.testing.assert_array_equal(tensors["a"].read_whole(), second["a"].read_whole())


def test_room_for_tensors_is_taken_before_they_are_written(tmp_path):
  path = tmp_path / "model.safetensors"
  safetensors_files._begin_file(str(path), {"a": ("F32", (1 << 18,), 1 << 20)})
  assert path.stat().st_blocks * 512 >= path.stat().st_size > 1 << 20
