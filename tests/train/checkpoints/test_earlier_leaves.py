"""The optimizer of a run that version 0.1 began goes on, with its state and under its name."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from anystep.errors import AnystepError
from anystep.train.checkpoints.saved_arrays import restore_arrays
from anystep.train.configuration.built_values import built_values
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.train_state import initialize
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.optimizers import adafactor, learning_rate_schedule
from anystep.train.partitioning import Partitioner

CHECKPOINT = Path(__file__).parents[2] / "fixtures" / "version_0_1" / "model" / "checkpoint_2"
SCHEDULE = learning_rate_schedule("constant * rsqrt_decay", base_learning_rate=1.0, warmup_steps=1000)


def initialized(optimizer):
  config = T5Config(
    vocab_size=384,
    emb_dim=8,
    num_heads=2,
    head_dim=4,
    mlp_dim=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.1,
  )
  model = EncoderDecoderModel(Transformer(config), optimizer_def=optimizer)
  partitioner = Partitioner()
  _, abstract = initialize(
    model, optimizer, root_key=jax.random.key(0), mesh=partitioner.mesh(8), partitioner=partitioner
  )
  return abstract


def test_its_adafactors_leaves_are_found_by_name():
  optimizer, earlier = adafactor(SCHEDULE), optax.adafactor(SCHEDULE)
  state = restore_arrays(CHECKPOINT / "state", initialized(optimizer))
  as_saved = restore_arrays(CHECKPOINT / "state", initialized(earlier))
  assert int(state.opt_state.count) == int(state.step) == 2
  for slot in ("v_row", "v_col", "v"):
    ours, optaxs = getattr(state.opt_state, slot), getattr(as_saved.opt_state[0], slot)
    jax.tree.map(np.testing.assert_array_equal, ours, optaxs)
  assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(state.opt_state.v))

  # And the next update is the one that optax's would have made.
  gradients = jax.tree.map(lambda param: 0.1 * param + 0.01, state.params)
  ours, _ = jax.jit(optimizer.update)(gradients, state.opt_state, state.params)
  optaxs, _ = jax.jit(earlier.update)(gradients, as_saved.opt_state, as_saved.params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), ours, optaxs)


def test_its_values_are_those_that_were_recorded():
  recorded = json.loads((CHECKPOINT / "trained_with.json").read_text())["values"]
  prefix = "model.optimizer_def"
  expected = {name: value for name, value in recorded.items() if name.startswith(prefix)}
  assert built_values({prefix: adafactor(SCHEDULE)}) == expected


@pytest.mark.parametrize(
  ("options", "name", "value"),
  [
    ({"beta1": 0.0}, "beta1", 0.0),
    ({"epsilon2": 0.01}, "epsilon2", 0.01),
    ({"logical_factor_rules": {"embed": "row"}}, "logical_factor_rules.embed", "row"),
    ({"skip_nan_updates": True}, "skip_nan_updates", True),
    ({"factored": False}, "factored", False),
  ],
)
def test_an_argument_that_changes_numbers_is_recorded(options, name, value):
  before, after = (built_values({"o": adafactor(SCHEDULE, **other)}) for other in ({}, options))
  assert {key: after[key] for key in after if after[key] != before.get(key)} == {f"o.{name}": value}


def test_another_optimizers_state_is_refused():
  with pytest.raises(AnystepError) as refused:
    restore_arrays(CHECKPOINT / "state", initialized(adafactor(SCHEDULE, beta1=0.9)))
  assert refused.value.kind == "checkpoint_tree"
  assert refused.value.fields["leaf"].startswith("opt_state/")
