"""Checkpoints of other programs in our models: T5X's meaning of rules, what is fresh, and the same logits."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from t5x_cases import FIXTURES, hugging_face_sizes, t5x_model

from anystep.errors import AnystepError
from anystep.train.checkpoints.restore_config import RestoreConfig
from anystep.train.checkpoints.saved_arrays import as_tree
from anystep.train.conversion import formats, restoring
from anystep.train.conversion.anystep_format import leaf_names
from anystep.train.conversion.assignment import assign
from anystep.train.conversion.formats import SavedCheckpoint
from anystep.train.conversion.restoring import Start, open_start, restore_start, with_dtype
from anystep.train.learning_rates import learning_rate_schedule
from anystep.train.leaves.leaf import array_leaf
from anystep.train.models.train_state import initialize
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.optimizers import adafactor, with_average
from anystep.train.partitioning import Partitioner

CHECKPOINTS = FIXTURES / "t5x" / "t5_1_1_checkpoints"
CASES = json.loads((FIXTURES / "t5x" / "restore" / "restore.json").read_text())["cases"]
# Orbax's format shows rules that rename as not working (tests/fixtures/t5x/README.md); we have one meaning.
RENAMES = {"rename_deeper_model", "first_matching_rule_wins", "swap"}
# The others compile the initial state of another model, or only read the same in Orbax's format.
SHORT = {"plain", "drop_optimizer_moments", "rename", "swap", "unused_rule", "missing_source"}
CASE_NAMES = [
  pytest.param(
    case["name"],
    case["checkpoint_format"],
    marks=() if case["name"] in SHORT and case["checkpoint_format"] == "legacy" else pytest.mark.long,
  )
  for case in CASES
  if case["name"] not in RENAMES or case["checkpoint_format"] == "legacy"
]


def new_optimizer(**options):
  return adafactor(learning_rate_schedule(base_learning_rate=0.5, warmup_steps=10), **options)


@functools.cache
def initial(optimizer=new_optimizer, **sizes):
  """What makes the initial state of T5X's model, and the abstract state."""
  partitioner = Partitioner()
  model = t5x_model("t5_1_1", **sizes)
  make, abstract = initialize(
    model, optimizer(), root_key=jax.random.key(7), mesh=partitioner.mesh(8), partitioner=partitioner
  )
  return make, abstract


@functools.cache
def initial_leaves(**sizes):
  make, _ = initial(**sizes)
  return leaves_of(make())


def leaves_of(state):
  flat = {
    tuple(key.key for key in path): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(as_tree(state))[0]
  }
  names = leaf_names(flat)
  return {names[keys]: np.asarray(leaf) for keys, leaf in flat.items()}


def restore(config, make, abstract):
  start = open_start(config)
  return start, restore_start(start, with_dtype(abstract, config.dtype), make)


@functools.cache
def saved_arrays():
  leaves = formats.open_checkpoint(str(CHECKPOINTS / "checkpoint_20")).leaves
  return {name: leaf.read_whole() for name, leaf in leaves.items()}


def source_of(name, case):
  """The saved leaf that T5X reads: the fixture lists parameters, whose moments go the same way."""
  others = case["leaves_from_other_name"]
  if name in others:
    return others[name]
  parameter = name.replace("state/param_states/", "target/").rpartition("/")[0]
  if name.startswith("state/param_states/") and parameter in others:
    return others[parameter].replace("target/", "state/param_states/") + name[name.rindex("/") :]
  return name


@pytest.mark.parametrize(("name", "checkpoint_format"), CASE_NAMES)
def test_rules_mean_what_they_mean_to_t5x(name, checkpoint_format):
  (case,) = (one for one in CASES if (one["name"], one["checkpoint_format"]) == (name, checkpoint_format))
  path = CHECKPOINTS / ("legacy" if checkpoint_format == "legacy" else "") / "checkpoint_20"
  make, abstract = initial(**case["model_changes"])

  def run():
    config = RestoreConfig(
      path=str(path),
      assignment_map=[tuple(rule) for rule in case.get("assignment_map", ())],
      missing="initialize" if case.get("fallback_to_scratch") else "refuse",
      dtype=case.get("dtype"),
      optimizer_state=not case["inference_state_only"],
    )
    return restore(config, make, abstract)

  if "error" in case:
    with pytest.raises((AnystepError, ValueError)):
      run()
    return
  start, state = run()
  assert (start.step, int(state.step), int(state.opt_state.count)) == (case["step"],) * 3
  fresh = set(case["leaves_fresh"])
  from_scratch, saved = initial_leaves(**case["model_changes"]), saved_arrays()
  dtype = jnp.dtype(case["target_dtype"][0])
  for leaf_name, leaf in leaves_of(state).items():
    if leaf_name in ("state/step", "state/opt_state/count"):
      continue
    # The fixture does not list moments that are not kept.
    is_unused = leaf.shape == (1,) and source_of(leaf_name, case) not in saved
    is_fresh = (
      is_unused or leaf_name in fresh or (case["inference_state_only"] and "param_states" in leaf_name)
    )
    expected = from_scratch[leaf_name] if is_fresh else saved[source_of(leaf_name, case)]
    if leaf_name.startswith("target/"):
      expected = expected.astype(dtype)
    assert leaf.dtype == expected.dtype
    np.testing.assert_array_equal(leaf, expected, err_msg=leaf_name)


@pytest.mark.long
def test_leaves_that_are_not_read_or_not_restored_are_named(capsys):
  from anystep.programs.progress import show_library_work

  make, abstract = initial(num_decoder_layers=2)
  rules = [(".*relpos_bias.*", None)]
  config = RestoreConfig(
    path=str(CHECKPOINTS), mode="step", step=20, assignment_map=rules, missing="initialize"
  )
  with show_library_work():
    restore(config, make, abstract)
  printed = capsys.readouterr().err
  assert "leaves are initialized, not restored: state/param_states/decoder/relpos_bias" in printed
  assert "leaves of the checkpoint are not in the model: state/param_states/decoder/layers_2" in printed


def test_a_missing_leaf_and_one_of_another_shape_are_named_with_the_other_sides():
  make, abstract = initial(num_decoder_layers=4)
  with pytest.raises(AnystepError) as refused:
    restore(RestoreConfig(path=str(CHECKPOINTS), optimizer_state=False), make, abstract)
  assert (refused.value.code, refused.value.kind) == (76, "checkpoint_tree")
  missing = "target/decoder/layers_3/encoder_decoder_attention/key/kernel"
  assert refused.value.fields["leaf"] == missing
  assert "layers_2/encoder_decoder_attention/key/kernel" in refused.value.fields["got"]
  make, abstract = initial(mlp_dim=96)
  with pytest.raises(AnystepError, match=r"\(64, 96\).*float32 \(64, 128\) of target/"):
    restore(RestoreConfig(path=str(CHECKPOINTS), optimizer_state=False), make, abstract)


def test_one_checkpoint_of_several_must_be_chosen(tmp_path):
  for step in (3, 20):
    (tmp_path / f"checkpoint_{step}").symlink_to(CHECKPOINTS / "checkpoint_20")
  assert open_start(RestoreConfig(path=str(tmp_path))).saved.path.endswith("checkpoint_20")
  assert open_start(RestoreConfig(path=str(tmp_path), mode="step", step=3)).saved.path.endswith(
    "checkpoint_3"
  )
  assert open_start(RestoreConfig(path=str(CHECKPOINTS), mode="all")).step == 20
  with pytest.raises(AnystepError) as refused:
    open_start(RestoreConfig(path=str(tmp_path), mode="all"))
  assert (refused.value.code, refused.value.kind) == (78, "restore_mode")


def adam():
  return optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda step: -0.1))


@pytest.mark.parametrize("optimizer_state", [True, False])
def test_another_optimizer_begins_anew_and_its_schedule_sees_the_step(optimizer_state):
  make, abstract = initial(adam)
  config = RestoreConfig(path=str(CHECKPOINTS), optimizer_state=optimizer_state)
  if optimizer_state:
    with pytest.raises(AnystepError, match="optimizer_state=False"):
      restore(config, make, abstract)
    return
  _, state = restore(config, make, abstract)
  corrected, scheduled = state.opt_state
  # Adam corrects its means by the steps that they are of.
  assert (int(state.step), int(corrected.count), int(scheduled.count)) == (20, 0, 20)


def averaged():
  return with_average(adam(), decay=0.9)


def test_an_average_begins_as_the_restored_parameters():
  make, abstract = initial(averaged)
  _, state = restore(RestoreConfig(path=str(CHECKPOINTS), optimizer_state=False), make, abstract)
  jax.tree.map(np.testing.assert_array_equal, state.opt_state.average, state.params)


@pytest.mark.parametrize(
  ("siblings", "restored", "count"),
  [
    ((), (), 20),
    (("0.mu.w",), (), 0),
    (("0.mu.w",), ("0.mu.w",), 20),
    (("0.v_row.w", "0.v.w"), (), 20),
  ],
)
def test_a_count_is_the_step_but_where_means_begin_anew_that_it_corrects(siblings, restored, count):
  start = "state/opt_state/"
  names = [f"{start}0.count", *(start + name for name in siblings)]
  assert restoring._count(names[0], 20, {start + name for name in restored}, names) == count


def test_factored_moments_of_mesh_tensorflow_are_adafactors(tmp_path):
  sizes = {"vocab_size": 144, "emb_dim": 128, "num_heads": 2, "head_dim": 4, "mlp_dim": 12}
  sizes |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
  make, abstract = initial(**sizes)
  folder = FIXTURES / "mesh_tf_t5" / "t5_1_1"
  start, state = restore(RestoreConfig(path=str(folder)), make, abstract)
  assert (start.step, int(state.opt_state.count)) == (1100, 1100)
  leaves = leaves_of(state)
  with np.load(folder / "expected.npz") as expected:
    for name in set(expected.files) - {"state/step"}:
      if not name.endswith("/m"):
        assert leaves[name].dtype == np.float32
        np.testing.assert_array_equal(leaves[name], expected[name], err_msg=name)


def network_of(config):
  sizes = hugging_face_sizes(config)
  if config["model_type"] == "umt5":
    return ScalableTransformer(ScalableT5Config(**sizes))
  return Transformer(T5Config(**sizes))


@pytest.mark.parametrize(
  "name",
  [
    "hf_t5/t5_1_1",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("hf_t5/t5_1_0", "hf_umt5/umt5")),
  ],
)
def test_logits_and_greedy_continuations_are_hugging_faces(name):
  from anystep.train.models.encoder_decoder import EncoderDecoderModel

  folder = FIXTURES / name
  network = network_of(json.loads((folder / "config.json").read_text()))
  partitioner = Partitioner()
  make, abstract = initialize(
    EncoderDecoderModel(network),
    new_optimizer(),
    root_key=jax.random.key(0),
    mesh=partitioner.mesh(8),
    partitioner=partitioner,
  )
  _, state = restore(RestoreConfig(path=str(folder), optimizer_state=False), make, abstract)
  apply = jax.jit(
    lambda *arrays: network.apply({"params": state.params}, *arrays[:2], decoder_target_tokens=arrays[2])
  )
  with np.load(folder / "expected.npz") as expected:
    inputs, decoder_inputs = expected["encoder_input_tokens"], expected["decoder_input_tokens"]
    # Hugging Face's decoder has no mask but the causal one: to it no target is padding.
    logits = apply(inputs, decoder_inputs, np.ones_like(decoder_inputs))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    greedy = expected["greedy"]
    tokens = np.zeros_like(greedy)
    ended = np.zeros(len(tokens), bool)
    for place in range(1, greedy.shape[1]):
      logits = np.asarray(apply(inputs, tokens[:, :-1], np.ones_like(tokens[:, :-1])))
      tokens[:, place] = np.where(ended, 0, logits[:, place - 1].argmax(-1))
      ended |= tokens[:, place] == 1
    np.testing.assert_array_equal(tokens, greedy)


@pytest.mark.long
def test_every_device_gets_its_part():
  partitioner = Partitioner(num_partitions=2)
  model = t5x_model("t5_1_1")
  make, abstract = initialize(
    model, new_optimizer(), root_key=jax.random.key(7), mesh=partitioner.mesh(8), partitioner=partitioner
  )
  _, state = restore(RestoreConfig(path=str(CHECKPOINTS)), make, abstract)
  params = flatten_dict(state.params, sep="/")
  for name, leaf in params.items():
    np.testing.assert_array_equal(np.asarray(leaf), saved_arrays()[f"target/{name}"])
  shardings = [
    leaf.sharding == target.sharding
    for leaf, target in zip(jax.tree.leaves(state.params), jax.tree.leaves(abstract.params), strict=True)
  ]
  assert all(shardings)


@pytest.mark.parametrize(
  ("rules", "step"), [([], 20), ([("state/step", None)], 0), ([("state/step", "state/other")], 20)]
)
def test_a_run_begins_at_the_step_that_is_restored(rules, step):
  leaves = {"state/step": array_leaf(np.array(20)), "state/other": array_leaf(np.array(7))}
  saved = SavedCheckpoint(path="a test", format="t5x", leaves=leaves)
  start = Start(saved=saved, config=RestoreConfig(path="a test", assignment_map=rules))
  assert start.step == step
  # The leaf of its own name wins over a rule, where nothing else reads it.
  source = assign(["state/step"], leaves, rules).sources.get("state/step")
  assert step == (0 if source is None else int(leaves[source].read_whole()))
