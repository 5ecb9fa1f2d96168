"""A batch in microbatches has the gradient of the whole, and T5X's own way has T5X's."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import t5x_cases
from flax.traverse_util import flatten_dict, unflatten_dict

from anystep.errors import AnystepError
from anystep.train.models.accumulation import T5XMicrobatches, WholeBatchGradients
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.train_state import TrainState, make_train_step
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.optimizers import adafactor, learning_rate_schedule

FOLDER = t5x_cases.FIXTURES / "t5x" / "microbatches"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
FACTORS = (None, 7.0, "NUM_REAL_TARGET_TOKENS", "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE")
WHOLE = WholeBatchGradients()

pytestmark = pytest.mark.long


def arrays(name):
  with np.load(FOLDER / f"{name}.npz") as loaded:
    return dict(loaded)


def model_of(factor, *, dropout_rate=0.0, **options):
  config = T5Config(
    vocab_size=384,
    emb_dim=32,
    num_heads=2,
    head_dim=16,
    mlp_dim=64,
    num_encoder_layers=1,
    num_decoder_layers=2,
    mlp_activations=("gelu", "linear"),
    dropout_rate=dropout_rate,
  )
  return EncoderDecoderModel(Transformer(config), loss_normalizing_factor=factor, **options)


PARAMS, LAST = unflatten_dict(arrays("params_0"), sep="/"), arrays("microbatches")


def batch_of(*, packed=False):
  """T5X's 8 rows, with fractional weights; packed, each row is two examples."""
  batch = {name: jnp.asarray(array) for name, array in arrays("batch").items()}
  weights = np.random.default_rng(0).integers(0, 4, (8, 12)) * 0.5
  batch["decoder_loss_weights"] = jnp.asarray(weights * np.asarray(batch["decoder_loss_weights"]))
  batch["decoder_loss_weights"] = batch["decoder_loss_weights"].astype(jnp.float32).at[3].set(0.0)
  if packed:
    for side, length, cut in (("encoder", 24, 9), ("decoder", 12, 5)):
      numbers = np.arange(length)
      batch[f"{side}_segment_ids"] = jnp.asarray(np.tile(1 + (numbers >= cut), (8, 1)), jnp.int32)
      positions = np.where(numbers >= cut, numbers - cut, numbers)
      batch[f"{side}_positions"] = jnp.asarray(np.tile(positions, (8, 1)), jnp.int32)
  return batch


def gradients_of(model, microbatches, batch, rng=None, params=PARAMS):
  def compute(params, batch):
    found = microbatches.gradients(model, params, batch, rng, {})
    return found.loss, found.metrics, found.gradients

  return jax.jit(compute)(params, batch)


def assert_near(found, expected, *, near=1e-6):
  """Every leaf's difference is small beside the leaf: rounding alone is up to 9e-7 here."""

  def compare(a, b):
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    assert np.linalg.norm(difference) <= near * max(np.linalg.norm(b), 1e-9)

  jax.tree.map(compare, found, expected)


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("factor", FACTORS)
def test_the_gradient_is_the_whole_batchs_with_dropout(factor, packed):
  """Rows, their masks and their weights are the same, however the batch is split."""
  model, rng = model_of(factor, dropout_rate=0.3, label_smoothing=0.1), jax.random.key(5)
  batch = batch_of(packed=packed)
  whole = gradients_of(model, WHOLE, batch, rng)
  split = gradients_of(model, WholeBatchGradients(num_microbatches=4), batch, rng)
  assert_near(split, whole)
  without_dropout = gradients_of(model, WHOLE, batch)
  assert abs(float(whole[0] / without_dropout[0]) - 1) > 1e-4


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_any_number_of_microbatches_gives_the_same(num_microbatches):
  model, rng = model_of("NUM_REAL_TARGET_TOKENS", dropout_rate=0.3), jax.random.key(5)
  split = WholeBatchGradients(num_microbatches=num_microbatches)
  assert_near(gradients_of(model, split, batch_of(), rng), gradients_of(model, WHOLE, batch_of(), rng))


def test_every_device_has_rows_of_each_microbatch():
  """Rows need not move between devices; the numbers do not depend on their count."""
  model, rng = model_of("AVERAGE_PER_SEQUENCE", dropout_rate=0.3), jax.random.key(5)
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.device_put(batch_of(), jax.NamedSharding(mesh, jax.P("data")))
  replicated = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
  split = WholeBatchGradients(num_microbatches=2)
  found = gradients_of(model, split, sharded, rng, replicated)
  assert_near(found, gradients_of(model, WHOLE, batch_of(), rng), near=2e-6)


@pytest.mark.long
@pytest.mark.parametrize(
  "case", EXPECTED, ids=lambda c: f"{c['num_microbatches']}-{c['loss_normalizing_factor']}"
)
def test_t5xs_own_way_has_t5xs_losses_gradients_and_parameters(case):
  schedule = learning_rate_schedule("constant * rsqrt_decay", base_learning_rate=0.1, warmup_steps=10)
  model = model_of(case["loss_normalizing_factor"], optimizer_def=adafactor(schedule))
  microbatches = T5XMicrobatches(num_microbatches=case["num_microbatches"] or 1)
  batch = {name: jnp.asarray(array) for name, array in arrays("batch").items()}

  @jax.jit
  def step(params, state):
    found = microbatches.gradients(model, params, batch, None, {})
    updates, state = model.optimizer_def.update(found.gradients, state, params)
    return optax.apply_updates(params, updates), state, found.loss, found.gradients

  params, state = PARAMS, model.optimizer_def.init(PARAMS)
  for logged, norms in zip(case["steps"], case["gradient_l2_by_step"], strict=True):
    params, state, loss, gradients = step(params, state)
    assert float(loss) == pytest.approx(logged["loss"], rel=5e-6)
    found = {path: float(jnp.linalg.norm(leaf)) for path, leaf in flatten_dict(gradients, sep="/").items()}
    assert found == pytest.approx(norms, rel=2e-5)
  found = flatten_dict(params, sep="/")
  norms = {path: float(jnp.linalg.norm(leaf)) for path, leaf in found.items()}
  assert norms == pytest.approx(case["params_3_l2"], rel=1e-5)
  if case["loss_normalizing_factor"] is None and case["num_microbatches"] in (None, 4):
    for path, leaf in found.items():
      expected = LAST[f"params_3/{case['num_microbatches']}/{path}"]
      np.testing.assert_allclose(leaf, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=path)


def test_the_step_does_not_depend_on_the_number_of_microbatches_but_t5xs_does():
  model = model_of("NUM_REAL_TARGET_TOKENS", dropout_rate=0.3)
  optimizer, batch = optax.sgd(0.01), batch_of()

  def trained(microbatches):
    step = make_train_step(model, optimizer, root_key=jax.random.key(0), microbatches=microbatches)
    params = jax.tree.map(jnp.array, PARAMS)
    state = TrainState(jnp.int32(3), params, optimizer.init(params))
    return step(state, batch)

  (state, metrics), (split, split_metrics) = trained(WHOLE), trained(WholeBatchGradients(num_microbatches=4))
  assert_near(split.params, state.params)
  assert_near(split_metrics, metrics, near=1e-5)
  _, summed = trained(T5XMicrobatches(num_microbatches=4))
  assert float(summed["gradient_norm"]) > 2 * float(metrics["gradient_norm"])
  assert_near(summed["loss"], metrics["loss"], near=1e-5)


class OneKeyForTwoRows:
  """A model around a module that takes one key, which it gives it for each two rows."""

  def rows_together(self, num_rows):
    return 2

  def normalized(self, batch):
    return batch

  def loss_fn(self, params, batch, rng):
    keys = rng if rng.ndim else jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(8))
    masks = jax.vmap(lambda key: jax.random.uniform(key, (2, 12)))(keys[::2]).reshape(-1, 12)
    products = params["w"][None, :] * masks * batch["decoder_target_tokens"].astype(jnp.float32)
    return jnp.sum(products), {"loss": jnp.sum(products)}


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_groups_of_rows_that_share_a_key_stay_together(num_microbatches):
  model, params = OneKeyForTwoRows(), {"w": jnp.ones((12,))}
  split = WholeBatchGradients(num_microbatches=num_microbatches)
  whole = gradients_of(model, WHOLE, batch_of(), jax.random.key(1), params)
  assert_near(gradients_of(model, split, batch_of(), jax.random.key(1), params), whole)
  with pytest.raises(AnystepError) as refused:
    gradients_of(model, WholeBatchGradients(num_microbatches=8), batch_of(), jax.random.key(1), params)
  assert refused.value.fields["expected"] == "a divisor of 4, the batch's groups of 2 rows"


class Unnormalized:
  """A model that cannot say what of its loss is a row's."""

  def loss_fn(self, params, batch, rng=None):
    raise NotImplementedError


@pytest.mark.parametrize(
  ("attempt", "expected"),
  [
    (lambda: WholeBatchGradients(num_microbatches=0), "a whole number of at least 1"),
    (
      lambda: gradients_of(model_of(None), WholeBatchGradients(num_microbatches=3), batch_of()),
      "a divisor of 8, the batch's rows",
    ),
    (
      lambda: gradients_of(model_of(None), T5XMicrobatches(num_microbatches=3), batch_of()),
      "a divisor of 8, the batch's rows",
    ),
    (
      lambda: gradients_of(Unnormalized(), WholeBatchGradients(num_microbatches=2), batch_of()),
      "1 for Unnormalized, which has no method `normalized`",
    ),
  ],
)
def test_microbatches_that_cannot_be_are_refused(attempt, expected):
  with pytest.raises(AnystepError) as refused:
    attempt()
  assert refused.value.kind == "num_microbatches"
  assert refused.value.fields["expected"] == expected
