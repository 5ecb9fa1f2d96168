"""Every format read beside what its own program says, and written so that it reads back to the byte."""

import json
import os
import shutil

import ml_dtypes
import msgpack
import numpy as np
import pytest
from t5x_cases import FIXTURES, arrays, hugging_face_weights

from anystep.errors import AnystepError
from anystep.train.checkpoints.restore_config import RestoreConfig
from anystep.train.conversion import (
  anystep_format,
  formats,
  hugging_face,
  hugging_face_t5,
  mesh_tensorflow,
)
from anystep.train.conversion.restoring import open_start
from anystep.train.leaves import orbax_trees, safetensors_files
from anystep.train.leaves.leaf import SLOTS, Leaf, array_leaf

T5X = FIXTURES / "t5x" / "t5_1_1_checkpoints"
SOURCES = {
  "t5x": T5X / "checkpoint_20",
  "t5x version 3": T5X / "legacy",
  "mesh tensorflow 1.0": FIXTURES / "mesh_tf_t5" / "t5_1_0",
  "mesh tensorflow 1.1": FIXTURES / "mesh_tf_t5" / "t5_1_1",
  "hugging face 1.0": FIXTURES / "hf_t5" / "t5_1_0",
  "hugging face 1.1": FIXTURES / "hf_t5" / "t5_1_1",
  "umt5": FIXTURES / "hf_umt5" / "umt5",
  "llama": FIXTURES / "hf_llama" / "gqa",
  "llama, tied": FIXTURES / "hf_llama" / "tied",
}


ZERO = array_leaf(np.array(0, np.int32))


def open_source(name):
  return formats.open_checkpoint(str(SOURCES[name]))


def write(directory, format_name, leaves, settings=None):
  formats.plan_writing(format_name, leaves, source="a test", settings=settings)(
    str(directory), lambda _: None
  )
  return formats.open_checkpoint(str(directory))


def parameters_of(leaves):
  return {name: leaf for name, leaf in leaves.items() if name.startswith("target/")}


def assert_same(leaves, others):
  assert leaves.keys() == others.keys()
  for name, leaf in leaves.items():
    one, other = leaf.read_whole(), others[name].read_whole()
    assert (one.dtype, one.shape) == (other.dtype, other.shape), name
    assert one.tobytes() == other.tobytes(), name


@pytest.fixture
def small_blocks(monkeypatch):
  """Blocks of a few rows, as those of large leaves are."""
  for module in (orbax_trees, safetensors_files):
    original = module.block_shape
    monkeypatch.setattr(module, "block_shape", lambda leaf, original=original: original(leaf, 4096))


def test_t5xs_tree_has_its_parameters_moments_and_step():
  saved = open_source("t5x")
  assert (saved.format, saved.step, len(saved.leaves)) == ("t5x", 20, 331)
  expected = arrays("t5_1_1", "params_20")
  assert parameters_of(saved.leaves).keys() == {f"target/{name}" for name in expected}
  for name, array in expected.items():
    np.testing.assert_array_equal(saved.leaves[f"target/{name}"].read_whole(), array)
  for name, array in arrays("t5_1_1", "second_moments_20").items():
    np.testing.assert_array_equal(saved.leaves[f"state/param_states/{name}/v"].read_whole(), array)


def test_version_3_is_the_same_as_the_tree():
  saved = open_source("t5x version 3")
  assert (saved.format, saved.step) == ("t5x_version_3", 20)
  assert_same(saved.leaves, open_source("t5x").leaves)


@pytest.mark.parametrize("case", ["t5_1_0", "t5_1_1", "t5_1_1/two_shards"])
def test_mesh_tensorflow_is_what_t5xs_importer_makes_of_it(case):
  saved = formats.open_checkpoint(str(FIXTURES / "mesh_tf_t5" / case))
  folder = FIXTURES / "mesh_tf_t5" / case.partition("/")[0]
  types = json.loads((folder / "tensors.json").read_text())["imported_leaves"]
  with np.load(folder / "expected.npz") as expected:
    assert saved.leaves.keys() == set(expected.files)
    for name, leaf in saved.leaves.items():
      array = leaf.read_whole()
      assert [array.dtype.name, list(array.shape)] == types[name], name
      np.testing.assert_array_equal(array.astype(expected[name].dtype), expected[name])


def test_moments_of_square_parameters_are_turned():
  kernel = "decoder/block_000/layer_000/SelfAttention/q"
  tensors = {"": np.zeros((3, 3)), "_slot_vr": np.ones(3), "_slot_vc": np.zeros(3)}
  leaves = {mesh_tensorflow.leaf_name("", kernel + end): array_leaf(array) for end, array in tensors.items()}
  turned = mesh_tensorflow._right_square_slots(leaves)
  moments = "state/param_states/decoder/layers_0/self_attention/query/kernel"
  assert turned[f"{moments}/v_col"].read_whole().tolist() == [1, 1, 1]
  assert turned[f"{moments}/v_row"].read_whole().tolist() == [0, 0, 0]


def test_a_decoder_of_mesh_tensorflow_has_our_decoders_names():
  names = {
    "transformer/block_001/layer_001/rms_norm/scale": "target/decoder/layers_1/pre_mlp_layer_norm/scale",
    "transformer/logits/kernel_slot_vc": "state/param_states/decoder/logits_dense/kernel/v_col",
    "transformer/rms_norm/scale": "target/decoder/decoder_norm/scale",
  }
  assert {name: mesh_tensorflow.leaf_name("", name) for name in names} == names
  with pytest.raises(AnystepError) as refused:
    mesh_tensorflow.leaf_name("", "image/block_000/kernel")
  assert (refused.value.code, refused.value.kind) == (76, "checkpoint_tree")


# Of each source, the formats that hold all of it.
ROUND_TRIPS = [
  *((name, format_name, False) for name in SOURCES for format_name in ("anystep", "t5x")),
  *((name, "huggingface", True) for name in SOURCES),
]


@pytest.mark.parametrize(("source", "format_name", "only_parameters"), ROUND_TRIPS)
def test_leaves_are_the_same_bytes_after_another_format(
  source, format_name, only_parameters, tmp_path, small_blocks
):
  opened = open_source(source)
  leaves = dict(opened.leaves)
  leaves = parameters_of(leaves) if only_parameters else {"state/step": ZERO} | leaves
  saved = write(tmp_path / "checkpoint_20", format_name, leaves, opened.settings)
  assert saved.format == format_name
  assert_same(saved.leaves, leaves)


def test_our_tree_is_the_one_that_t5x_writes(tmp_path):
  ours = write(tmp_path / "ours", "anystep", open_source("t5x").leaves)
  write(tmp_path / "checkpoint_20", "t5x", ours.leaves)
  states = [path / "state" for path in (SOURCES["t5x"], tmp_path / "checkpoint_20")]
  theirs, written = ({path.name for path in state.iterdir()} for state in states)
  # Orbax writes through a database of its process's own.
  assert theirs - {"ocdbt.process_0"} == written
  documents = [json.loads((state / "_METADATA").read_text()) for state in states]
  assert documents[0] == documents[1]
  for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
    assert (tmp_path / "checkpoint_20" / name).exists()
  assert (tmp_path / "checkpoint_20/commit_success.txt").read_text() == (
    SOURCES["t5x"] / "commit_success.txt"
  ).read_text()
  trees = [orbax_trees.read_tree(str(state)) for state in states]
  assert_same(*trees)
  chunks = [{keys: leaf.chunk for keys, leaf in tree.items()} for tree in trees]
  assert chunks[0] == chunks[1]


@pytest.mark.parametrize("name", ["hugging face 1.0", "hugging face 1.1", "umt5", "llama", "llama, tied"])
def test_what_hugging_face_gave_is_given_back(name, tmp_path, small_blocks):
  source = open_source(name)
  ours = write(tmp_path / "ours", "anystep", source.leaves, source.settings)
  write(tmp_path / "model", "huggingface", ours.leaves, ours.settings)
  expected, written = hugging_face_weights(SOURCES[name]), hugging_face_weights(tmp_path / "model")
  assert expected.keys() == written.keys()
  for tensor, array in expected.items():
    np.testing.assert_array_equal(written[tensor], array)
  configs = [json.loads((path / "config.json").read_text()) for path in (SOURCES[name], tmp_path / "model")]
  # What decides no number, or only a training's.
  ignored = {
    *("classifier_dropout", "dropout_rate", "dtype", "initializer_factor", "tokenizer_class", "torch_dtype"),
    *("transformers_version", "use_cache", "pretraining_tp"),
  }
  theirs, written_config = ({key: config[key] for key in config.keys() - ignored} for config in configs)
  assert {"tie_word_embeddings": True} | theirs == written_config


def test_mt5_is_known_by_its_vocabulary_and_rounded_parameters_by_their_dtype(tmp_path, monkeypatch):
  monkeypatch.setattr(hugging_face_t5, "_MT5_VOCAB_SIZE", 256)
  leaves = formats.cast_parameters(open_source("hugging face 1.1").leaves, np.dtype(ml_dtypes.bfloat16))
  write(tmp_path / "model", "huggingface", leaves)
  config = json.loads((tmp_path / "model" / "config.json").read_text())
  assert (config["model_type"], config["torch_dtype"]) == ("mt5", "bfloat16")
  assert_same(formats.open_checkpoint(str(tmp_path / "model")).leaves, leaves)


def test_several_files_are_one_model(tmp_path):
  leaves = open_source("hugging face 1.1").leaves
  hugging_face.plan_writing(leaves, max_file_bytes=10_000)(str(tmp_path / "model"), lambda _: None)
  assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
  assert_same(formats.open_checkpoint(str(tmp_path / "model")).leaves, leaves)


def test_unscanned_layers_with_biases_of_their_own_are_a_umt5(tmp_path):
  scanned = open_source("umt5").leaves
  unscanned = {}
  for name, leaf in scanned.items():
    stack = name.split("/")[1]
    if f"/{stack}/{stack}/" in f"/{name}":
      inner = name.removeprefix(f"target/{stack}/{stack}/")
      for number in range(leaf.shape[1]):
        part = array_leaf(np.ascontiguousarray(leaf.read_whole()[:, number]))
        unscanned[f"target/{stack}/layers_{number}/{inner}"] = part
    else:
      unscanned[name] = leaf
  write(tmp_path / "model", "huggingface", unscanned)
  assert_same(formats.open_checkpoint(str(tmp_path / "model")).leaves, scanned)


def test_what_hugging_face_leaves_out_has_its_defaults_and_what_it_ignores_is_ignored(tmp_path):
  leaves = open_source("hugging face 1.0").leaves
  tensors = safetensors_files.read_tensors(str(SOURCES["hugging face 1.0"]))
  bias = tensors["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
  tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = bias
  tensors |= dict.fromkeys(("encoder.embed_tokens.weight", "lm_head.weight"), tensors["shared.weight"])
  safetensors_files.write_tensors(str(tmp_path), tensors, lambda _: None)
  config = json.loads((SOURCES["hugging face 1.0"] / "config.json").read_text())
  for name in ("feed_forward_proj", "is_gated_act", "dense_act_fn", "layer_norm_epsilon"):
    del config[name]
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert_same(formats.open_checkpoint(str(tmp_path)).leaves, leaves)


def changed_config(tmp_path, source="hugging face 1.1", **changes):
  """A copy of a model with changes of its configuration; None removes."""
  shutil.copytree(SOURCES[source], tmp_path / "model")
  path = tmp_path / "model" / "config.json"
  config = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
  return str(tmp_path / "model")


@pytest.mark.parametrize(("source", "is_scaled"), [("hugging face 1.0", True), ("hugging face 1.1", False)])
def test_later_versions_say_of_every_t5_that_it_is_tied(source, is_scaled, tmp_path):
  path = changed_config(tmp_path, source, tie_word_embeddings=True, scale_decoder_outputs=is_scaled)
  assert_same(formats.open_checkpoint(path).leaves, open_source(source).leaves)


def test_a_umt5_that_does_not_say_whether_it_is_tied_and_has_logits_is_refused(tmp_path):
  with pytest.raises(AnystepError, match=r"lm_head\.weight"):
    formats.open_checkpoint(changed_config(tmp_path, "umt5", tie_word_embeddings=None))


@pytest.mark.parametrize(
  ("source", "activations"), [("hugging face 1.0", ["relu"]), ("hugging face 1.1", ["gelu", "linear"])]
)
def test_a_t5_with_other_activations_is_another_model(source, activations, tmp_path):
  saved = open_source(source)
  assert saved.settings == {"mlp_activations": activations}
  others = {"mlp_activations": ["silu", *activations[1:]]}
  with pytest.raises(AnystepError, match=r"checkpoint_unsupported.*silu"):
    formats.plan_writing("huggingface", saved.leaves, source="a test", settings=others)
  with pytest.raises(AnystepError, match=r"checkpoint_settings.*silu"):
    open_start(
      RestoreConfig(path=saved.path), {"model.module.config.mlp_activations": others["mlp_activations"]}
    )


@pytest.mark.parametrize(
  ("changes", "code", "kind", "text"),
  [
    ({"model_type": "mistral"}, 78, "checkpoint_unsupported", "got=mistral"),
    ({"layer_norm_epsilon": 1e-5}, 78, "checkpoint_unsupported", "layer_norm_epsilon"),
    ({"feed_forward_proj": "gated-silu"}, 78, "checkpoint_unsupported", "gated-gelu"),
    ({"dense_act_fn": "gelu"}, 78, "checkpoint_unsupported", "dense_act_fn gelu_new"),
    ({"model_type": "mt5", "tie_word_embeddings": True}, 76, "checkpoint_tree", "leaf=lm_head.weight"),
    ({"num_layers": 3}, 76, "checkpoint_tree", "leaf=encoder.block.2.layer.0.layer_norm.weight"),
    ({"num_layers": 1}, 76, "checkpoint_tree", "leaf=encoder.block.1"),
    ({"num_heads": "x"}, 65, "checkpoint_corrupt", "config.json"),
    ({"num_heads": 8}, 76, "checkpoint_tree", "by the sizes of config.json"),
    ({"num_layers": 0}, 65, "checkpoint_corrupt", "num_layers 0, not a whole number"),
  ],
)
def test_a_model_that_is_not_ours_is_refused_by_name(changes, code, kind, text, tmp_path):
  with pytest.raises(AnystepError) as refused:
    formats.open_checkpoint(changed_config(tmp_path, **changes))
  assert (refused.value.code, refused.value.kind) == (code, kind)
  assert text in str(refused.value)


@pytest.mark.parametrize(
  ("format_name", "name", "kind"),
  [
    ("t5x", "state/opt_state/0.mu.x", "checkpoint_tree"),
    ("anystep", "elsewhere/x", "checkpoint_tree"),
    ("huggingface", "target/encoder/extra/kernel", "checkpoint_tree"),
  ],
)
def test_a_leaf_without_a_place_is_named(format_name, name, kind):
  leaves = open_source("hugging face 1.1").leaves | {name: array_leaf(np.zeros((2, 3), np.float32))}
  with pytest.raises(AnystepError) as refused:
    formats.plan_writing(format_name, leaves, source="a test")
  assert (refused.value.kind, refused.value.fields["leaf"]) == (kind, name)
  assert "float32 (2, 3)" in str(refused.value)


def test_a_model_without_encoder_is_no_hugging_face_t5():
  leaves = {"target/token_embedder/embedding": array_leaf(np.zeros((4, 4)))}
  with pytest.raises(AnystepError) as refused:
    formats.plan_writing("huggingface", leaves, source="a test")
  assert (refused.value.code, refused.value.kind) == (78, "checkpoint_unsupported")


def test_momentum_and_other_optimizers_leaves_stay_ours(tmp_path):
  parameter = array_leaf(np.ones((3, 4), np.float32))
  filler = array_leaf(np.zeros(1, np.float32))
  moments = {f"state/param_states/w/{slot}": filler for slot in ("v_row", "v_col")}
  moments |= {f"state/param_states/w/{slot}": parameter for slot in ("v", "m")}
  step = {"state/step": array_leaf(np.array(5, np.int32))}
  leaves = {"target/w": parameter, **moments, **step}
  assert_same(write(tmp_path / "adafactor", "anystep", leaves).leaves, leaves)
  adam = {"state/opt_state/0.mu.w": parameter, "flax_mutables/batch_stats/mean": parameter}
  leaves = {"target/w": parameter, **adam, **step}
  assert_same(write(tmp_path / "adam", "anystep", leaves).leaves, leaves)


def test_counts_of_an_average_around_adafactor_are_the_step():
  tree = [("step",), ("params", "a", "w"), ("opt_state", "inner.count"), ("opt_state", "average.a.w")]
  tree += [("opt_state", f"inner.{slot}.a.w") for slot in ("v_row", "v_col", "v")]
  names = anystep_format.leaf_names(tree)
  assert names["opt_state", "inner.v_row.a.w"] == "state/param_states/a/w/v_row"
  assert names["opt_state", "average.a.w"] == "state/opt_state/average.a.w"
  assert anystep_format.is_count(names["opt_state", "inner.count"], array_leaf(np.array(3)))


def test_a_checkpoint_of_version_0_1_has_the_same_leaves():
  saved = formats.open_checkpoint(str(FIXTURES / "version_0_1" / "model"))
  assert (saved.format, saved.step) == ("anystep", 2)
  parameters = {name.removeprefix("target/") for name in parameters_of(saved.leaves)}
  moments = {f"state/param_states/{name}/{slot}" for name in parameters for slot in SLOTS}
  assert saved.leaves.keys() == {f"target/{name}" for name in parameters} | moments | {"state/step"}


def test_the_newest_of_several_is_found_and_any_by_its_step(tmp_path):
  for step in (3, 20, 100):
    shutil.copytree(SOURCES["t5x"], tmp_path / f"checkpoint_{step}")
  (tmp_path / "checkpoint_7").mkdir()
  paths = formats.find_checkpoints(str(tmp_path))
  assert [formats.step_of(path) for path in paths] == [3, 20, 100]
  assert formats.find_step(paths, 20) == paths[1]
  with pytest.raises(AnystepError, match=r"checkpoint_missing.*those of 3, 20, 100"):
    formats.find_step(paths, 7)


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
  for path, kind in [(str(tmp_path), "checkpoint_missing"), ("gs://bucket/x", "store_unsupported")]:
    with pytest.raises(AnystepError) as refused:
      formats.find_checkpoints(path)
    assert refused.value.kind == kind


def remove_array(directory):
  shutil.rmtree(directory / "target.token_embedder.embedding")


def cut_file(directory):
  path = directory / "checkpoint"
  path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("damage", [remove_array, cut_file])
def test_a_damaged_version_3_is_refused(damage, tmp_path):
  shutil.copytree(T5X / "legacy" / "checkpoint_20", tmp_path / "checkpoint_20")
  damage(tmp_path / "checkpoint_20")
  with pytest.raises(AnystepError) as refused:
    formats.open_checkpoint(str(tmp_path))
  assert (refused.value.code, refused.value.kind) == (65, "checkpoint_corrupt")


def test_chunks_that_a_version_3_lacks_are_reported(tmp_path, caplog):
  path = shutil.copytree(T5X / "legacy" / "checkpoint_20", tmp_path / "source")
  chunk = sorted(path.glob("*/0*"))[0]
  chunk.unlink()
  formats.open_checkpoint(str(path))
  assert f"{chunk.parent}/ lacks 1 of 1 chunks of " in caplog.text


@pytest.mark.parametrize(
  "state",
  [{"target": {"a": "text"}}, {"target": {"a": [1, [2]]}}, {"target": {"a": 1.5}, "state": {"step": -1}}],
)
def test_a_version_3_of_other_things_than_numbers_is_refused(state, tmp_path):
  (tmp_path / "checkpoint").write_bytes(msgpack.packb({"version": 3, "optimizer": state}))
  with pytest.raises(AnystepError, match="checkpoint_corrupt"):
    assert formats.open_checkpoint(str(tmp_path)).step < 0


@pytest.mark.parametrize(
  ("changes", "kind"),
  [
    ({"dtype": "I8"}, "checkpoint_unsupported"),
    ({"shape": [1024]}, "checkpoint_tree"),
    ({"shape": [32, 32, 1]}, "checkpoint_tree"),
    ({"shape": [-32, -32]}, "checkpoint_corrupt"),
    ({"shape": [32.0, 32.0]}, "checkpoint_corrupt"),
  ],
)
def test_a_tensor_that_does_not_fit_the_configuration_is_refused(changes, kind, tmp_path):
  changed_config(tmp_path)
  path = tmp_path / "model"
  file = path / "model.safetensors"
  raw = file.read_bytes()
  begin = 8 + int.from_bytes(raw[:8], "little")
  header = json.loads(raw[8:begin])
  entry = header["decoder.block.0.layer.0.SelfAttention.q.weight"]
  entry |= changes
  if "dtype" in changes:
    entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][0] + 32 * 32]
  text = json.dumps(header).encode()
  file.unlink()
  file.write_bytes(len(text).to_bytes(8, "little") + text + raw[begin:])
  with pytest.raises(AnystepError) as refused:
    formats.open_checkpoint(str(path))
  assert refused.value.kind == kind


def _read_all(path):
  return {name: leaf.read_whole() for name, leaf in formats.open_checkpoint(str(path)).leaves.items()}


def test_a_damaged_checkpoint_of_mesh_tensorflow_is_refused(tmp_path):
  shutil.copytree(SOURCES["mesh tensorflow 1.0"], tmp_path / "t5")
  (data,) = (tmp_path / "t5").glob("*.data-*")
  data.write_bytes(data.read_bytes()[:-1000])
  with pytest.raises(AnystepError) as refused:
    _read_all(tmp_path / "t5")
  assert (refused.value.code, refused.value.kind) == (65, "checkpoint_corrupt")


def test_a_changed_byte_of_ours_is_noticed(tmp_path):
  write(tmp_path / "ours", "anystep", open_source("hugging face 1.1").leaves)
  path = max((tmp_path / "ours" / "state").rglob("*"), key=os.path.getsize)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  with pytest.raises(AnystepError) as refused:
    formats.open_checkpoint(str(tmp_path / "ours"))
  assert (refused.value.code, refused.value.kind) == (65, "checkpoint_file")


def test_memory_holds_blocks_not_leaves(tmp_path, small_blocks):
  reads = []

  def watch(leaf):
    def read(index):
      part = leaf.read(index)
      reads.append(part.nbytes)
      return part

    return Leaf(shape=leaf.shape, dtype=leaf.dtype, chunk=leaf.chunk, read=read)

  leaves = {name: watch(leaf) for name, leaf in open_source("umt5").leaves.items()}
  for format_name in formats.WRITTEN:
    write(tmp_path / format_name, format_name, leaves)
  # A stacked leaf is a part of each of its layers.
  assert max(reads) <= 3 * 4096 < max(leaf.num_bytes for leaf in leaves.values())
