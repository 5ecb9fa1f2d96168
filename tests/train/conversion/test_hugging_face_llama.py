"""Llamas of Hugging Face, imported by the program: the same logits, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from t5x_cases import FIXTURES, hugging_face_weights

from anystep.errors import AnystepError
from anystep.train import convert
from anystep.train.checkpoints.restore_config import RestoreConfig
from anystep.train.configuration.built_values import built_values
from anystep.train.conversion import anystep_format, formats, hugging_face
from anystep.train.conversion.restoring import open_start, restore_start
from anystep.train.leaves import safetensors_files
from anystep.train.leaves.leaf import array_leaf
from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.train_state import initialize
from anystep.train.network.llama import Llama, LlamaConfig
from anystep.train.optimizers import adafactor
from anystep.train.partitioning import Partitioner

FOLDER = FIXTURES / "hf_llama"
LLAMA_3_1 = {
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
  "rope_type": "llama3",
}


def run(source, target, *flags):
  assert convert.main([f"--from={source}", f"--to={target}", *flags]) == 0


def config_of(case):
  config = json.loads((FOLDER / case / "config.json").read_text())
  return LlamaConfig(
    vocab_size=config["vocab_size"],
    emb_dim=config["hidden_size"],
    num_heads=config["num_attention_heads"],
    num_kv_heads=config["num_key_value_heads"],
    head_dim=config["head_dim"],
    mlp_dim=config["intermediate_size"],
    num_layers=config["num_hidden_layers"],
    logits_via_embedding=config["tie_word_embeddings"],
    rope_theta=config["rope_theta"],
    norm_epsilon=config["rms_norm_eps"],
  )


def open_for(config, path):
  """The start of a run with this network, whose settings are compared."""
  values = built_values({"model": DecoderOnlyModel(Llama(config))})
  return open_start(RestoreConfig(path=str(path), optimizer_state=False), values)


def changed(tmp_path, case="gqa", *, tensors=None, **changes):
  """A copy of a model in one file, with changes of its configuration; None removes."""
  config = json.loads((FOLDER / case / "config.json").read_text()) | changes
  config = {name: value for name, value in config.items() if value is not None}
  tmp_path.mkdir(exist_ok=True)
  tensors = safetensors_files.read_tensors(str(FOLDER / case)) | (tensors or {})
  safetensors_files.write_tensors(str(tmp_path), tensors, lambda _: None)
  (tmp_path / "config.json").write_text(json.dumps(config))
  return tmp_path


@pytest.mark.parametrize("case", ["gqa", pytest.param("tied", marks=pytest.mark.long)])
def test_logits_and_greedy_continuations_are_hugging_faces(case, tmp_path):
  run(FOLDER / case, tmp_path / "ours")
  config, partitioner = config_of(case), Partitioner()
  network = Llama(config)
  make, abstract = initialize(
    DecoderOnlyModel(network),
    adafactor(0.1),
    root_key=jax.random.key(0),
    mesh=partitioner.mesh(8),
    partitioner=partitioner,
  )
  state = restore_start(open_for(config, tmp_path / "ours"), abstract, make)

  @jax.jit
  def apply(tokens, valid):
    return network.apply({"params": state.params}, tokens, decoder_target_tokens=valid)

  with np.load(FOLDER / case / "expected.npz") as expected:
    valid = expected["attention_mask"].astype(np.int32)
    logits = np.asarray(apply(expected["input_ids"].astype(np.int32), valid))
    np.testing.assert_allclose(logits[valid > 0], expected["logits"][valid > 0], atol=1e-4)
    prompts, lengths, greedy = (expected[name] for name in ("prompts", "prompt_lengths", "greedy"))
  tokens = np.zeros((len(prompts), prompts.shape[1] + greedy.shape[1]), np.int32)
  tokens[:, : prompts.shape[1]] = prompts
  rows = np.arange(len(prompts))
  # Tokens behind the place that is looked at are not seen from it.
  for number in range(greedy.shape[1]):
    logits = np.asarray(apply(tokens, np.ones_like(tokens)))
    tokens[rows, lengths + number] = logits[rows, lengths + number - 1].argmax(-1)
  continued = np.stack([tokens[rows, lengths + number] for number in range(greedy.shape[1])], axis=1)
  np.testing.assert_array_equal(continued, greedy)


@pytest.mark.parametrize("case", ["gqa", "tied"])
def test_the_program_gives_back_what_it_took(case, tmp_path):
  run(FOLDER / case, tmp_path / "ours")
  run(tmp_path / "ours", tmp_path / "theirs", "--format=huggingface")
  run(tmp_path / "theirs", tmp_path / "again")
  expected, written = hugging_face_weights(FOLDER / case), hugging_face_weights(tmp_path / "theirs")
  assert expected.keys() == written.keys()
  for name, array in expected.items():
    assert (array.dtype, array.shape) == (written[name].dtype, written[name].shape)
    assert array.tobytes() == written[name].tobytes(), name
  first, last = (formats.open_checkpoint(str(tmp_path / name)) for name in ("ours", "again"))
  assert first.settings == last.settings
  assert first.settings["rope_theta"] == config_of(case).rope_theta
  for name, leaf in first.leaves.items():
    assert leaf.read_whole().tobytes() == last.leaves[name].read_whole().tobytes(), name


def test_unscanned_layers_are_the_same_model(tmp_path):
  saved = formats.open_checkpoint(str(FOLDER / "gqa"))
  unscanned = {}
  for name, leaf in saved.leaves.items():
    start, stacked, inner = name.partition("/layers/")
    for number in range(leaf.shape[1] if stacked else 0):
      part = np.ascontiguousarray(leaf.read_whole()[:, number])
      unscanned[f"{start}/layers_{number}/{inner}"] = array_leaf(part)
    if not stacked:
      unscanned[name] = leaf
  written = hugging_face.plan_writing(unscanned, saved.settings, max_file_bytes=100_000)
  written(str(tmp_path / "model"), lambda _: None)
  again = formats.open_checkpoint(str(tmp_path / "model"))
  assert again.settings == saved.settings
  assert again.leaves.keys() == saved.leaves.keys()
  for name, leaf in saved.leaves.items():
    np.testing.assert_array_equal(again.leaves[name].read_whole(), leaf.read_whole())


def test_scaling_of_llama_3_1_goes_to_the_settings_and_back(tmp_path):
  older = {name: value for name, value in LLAMA_3_1.items() if name != "rope_type"} | {"type": "llama3"}
  newer = {"rope_parameters": LLAMA_3_1 | {"rope_theta": 50000.0}, "rope_theta": None}
  for number, changes in enumerate([{"rope_scaling": LLAMA_3_1}, {"rope_scaling": older}, newer]):
    saved = formats.open_checkpoint(str(changed(tmp_path / str(number), **changes)))
    assert saved.settings["rope_theta"] == 50000.0
    assert (saved.settings["rope_scaling_factor"], saved.settings["rope_original_length"]) == (8.0, 8192)
  target = tmp_path / "written"
  formats.plan_writing("huggingface", saved.leaves, source="a test", settings=saved.settings)(
    str(target), lambda _: None
  )
  assert json.loads((target / "config.json").read_text())["rope_scaling"] == LLAMA_3_1
  config = config_of("gqa")
  scaled = dataclasses.replace(config, rope_scaling_factor=8.0)
  assert open_for(scaled, target).step == 0
  with pytest.raises(AnystepError, match=r"expected=\"rope_scaling_factor = 8.0\""):
    open_for(config, target)


def test_what_a_configuration_leaves_out_has_its_defaults(tmp_path):
  frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": array_leaf(np.ones(8)) for i in range(2)}
  names = (
    "rope_theta",
    "rms_norm_eps",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "rope_scaling",
  )
  path = changed(tmp_path / "model", "tied", tensors=frequencies, **dict.fromkeys(names))
  saved = formats.open_checkpoint(str(path))
  assert saved.leaves.keys() == formats.open_checkpoint(str(FOLDER / "tied")).leaves.keys()
  assert (saved.settings["rope_theta"], saved.settings["norm_epsilon"]) == (10000.0, 1e-6)


def test_ids_of_tokens_go_along_as_hugging_face_has_them(tmp_path):
  names = ("bos_token_id", "eos_token_id", "pad_token_id")
  path = changed(tmp_path / "model", "tied", **dict.fromkeys(names))
  saved = formats.open_checkpoint(str(path))
  run(path, tmp_path / "ours")
  run(tmp_path / "ours", tmp_path / "theirs", "--format=huggingface")
  # A run's own has none of them: padding has no id, since id 0 begins rows.
  of_a_run = {name: value for name, value in saved.settings.items() if name not in names}
  formats.plan_writing("huggingface", saved.leaves, source="a test", settings=of_a_run)(
    str(tmp_path / "trained"), lambda _: None
  )
  for directory, expected in [("theirs", [1, 2, None]), ("trained", [0, 1, None])]:
    config = json.loads((tmp_path / directory / "config.json").read_text())
    assert [config[name] for name in names] == expected


@pytest.mark.parametrize(
  ("changes", "kind", "text"),
  [
    ({"hidden_act": "gelu"}, "checkpoint_unsupported", "hidden_act silu"),
    ({"attention_bias": True}, "checkpoint_unsupported", "attention_bias False"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "checkpoint_unsupported", "rope_type default or llama3"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "checkpoint_corrupt", "low_freq_factor"),
    ({"num_attention_heads": 3}, "checkpoint_tree", "(24, 48), by the sizes"),
    ({"num_key_value_heads": None}, "checkpoint_tree", "(48, 48), by the sizes"),
    ({"vocab_size": 100}, "checkpoint_tree", "model.embed_tokens.weight"),
    (
      {"num_attention_heads": 0, "head_dim": None},
      "checkpoint_corrupt",
      "num_attention_heads 0, not a whole",
    ),
    ({"head_dim": 0}, "checkpoint_corrupt", "head_dim 0, not a whole"),
    ({"num_hidden_layers": None}, "checkpoint_corrupt", "num_hidden_layers"),
    ({"num_hidden_layers": 0}, "checkpoint_corrupt", "num_hidden_layers 0, not a whole"),
    ({"num_hidden_layers": 2.9}, "checkpoint_corrupt", "num_hidden_layers 2.9, not a whole"),
    ({"tie_word_embeddings": "false"}, "checkpoint_corrupt", "not true or false"),
    ({"rms_norm_eps": -1}, "checkpoint_corrupt", "rms_norm_eps -1, not a number above 0"),
    ({"rope_theta": 0}, "checkpoint_corrupt", "rope_theta 0, not a number above 0"),
    ({"quantization_config": {"bits": 8}}, "checkpoint_unsupported", "not quantized"),
    ({"num_hidden_layers": 4}, "checkpoint_tree", "model.layers.3."),
    ({"num_hidden_layers": 2}, "checkpoint_tree", "model.layers.2."),
    ({"model_type": "mistral"}, "checkpoint_unsupported", "llama"),
  ],
)
def test_other_models_are_refused(changes, kind, text, tmp_path):
  with pytest.raises(AnystepError) as refused:
    formats.open_checkpoint(str(changed(tmp_path, **changes)))
  assert refused.value.kind == kind
  assert text in str(refused.value)


def test_a_run_with_other_settings_does_not_start():
  for changes, expected, got in [
    (
      {"rope_theta": 10000.0, "norm_epsilon": 1e-6},
      "norm_epsilon = 1e-05, rope_theta = 50000.0",
      "norm_epsilon = 1e-06, rope_theta = 10000.0",
    ),
    (
      {"mlp_activations": ("gelu", "linear")},
      "mlp_activations = ['silu', 'linear']",
      "mlp_activations = ['gelu', 'linear']",
    ),
  ]:
    with pytest.raises(AnystepError) as refused:
      open_for(dataclasses.replace(config_of("gqa"), **changes), FOLDER / "gqa")
    assert (refused.value.code, refused.value.kind) == (76, "checkpoint_settings")
    assert (refused.value.fields["expected"], refused.value.fields["got"]) == (expected, got)


def test_a_decoder_that_does_not_say_its_settings_is_not_written(tmp_path):
  run(FOLDER / "tied", tmp_path / "t5x", "--format=t5x")
  saved = formats.open_checkpoint(str(tmp_path / "t5x"))
  for leaves, text in [
    (saved.leaves, "rope_theta"),
    ({"target/decoder/x": array_leaf(np.ones(1))}, "a Llama"),
  ]:
    with pytest.raises(AnystepError) as refused:
      formats.plan_writing("huggingface", leaves, source="a test")
    assert (refused.value.code, refused.value.kind) == (78, "checkpoint_unsupported")
    assert text in str(refused.value)


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_a_runs_checkpoint_says_its_settings(factor, tmp_path):
  config = dataclasses.replace(config_of("gqa"), rope_scaling_factor=factor)
  values = built_values({"model": DecoderOnlyModel(Llama(config)), "random_seed": 0})
  (tmp_path / "trained_with.json").write_text(json.dumps({"version": 1, "values": values}))
  scaling = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_length": 8192}
  settings = {"norm_epsilon": 1e-5, "rope_theta": 50000.0, "rope_scaling_factor": factor}
  settings["mlp_activations"] = ["silu", "linear"]
  assert anystep_format.read_settings(str(tmp_path)) == settings | (scaling if factor > 1.0 else {})
  (tmp_path / "trained_with.json").write_text("{}")
  with pytest.raises(AnystepError, match="checkpoint_corrupt"):
    anystep_format.read_settings(str(tmp_path))
