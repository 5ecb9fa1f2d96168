"""Every family beside T5X's and Hugging Face's numbers: names, shapes, axes, losses and logits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from t5x_cases import (
  FIXTURES,
  Variable,
  arrays,
  document,
  hugging_face_network,
  model_info,
  t5x_batches,
  t5x_model,
  t5x_params,
)

from anystep.train.learning_rates import learning_rate_schedule
from anystep.train.models.train_state import initialize
from anystep.train.optimizers import adafactor
from anystep.train.partitioning import Partitioner


def losses_by_step(model, case, *, steps, batch_size):
  """Losses of steps of T5X's Adafactor from a case's first parameters, and the last parameters."""
  rate = learning_rate_schedule(base_learning_rate=0.1, warmup_steps=10)
  optimizer = adafactor(rate)

  @jax.jit
  def train_step(params, state, batch):
    (loss, _), gradient = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = t5x_params(case)
  state = optimizer.init(params)
  losses = []
  for batch in itertools.islice(t5x_batches(case, batch_size), steps):
    params, state, loss = train_step(params, state, batch)
    losses.append(float(loss))
  return losses, params


@pytest.mark.parametrize("case", ["t5_1_1", "decoder_only", "scalable_t5", "factored", "microbatches"])
def test_every_variable_is_as_t5x_prints_it(case):
  """Names, shapes, logical axes and the split of parameters; shapes of the optimizer's state, and the split
  of all but the row and column means, which T5X keeps whole on every device."""
  model, partitioner = t5x_model(case), Partitioner(num_partitions=2)
  _, abstract = initialize(
    model, adafactor(0.1), root_key=jax.random.key(0), mesh=partitioner.mesh(8), partitioner=partitioner
  )

  def described(leaf, axes=None):
    spec = tuple(leaf.sharding.spec)
    return Variable(leaf.shape, axes, (*spec, *(None,) * (len(leaf.shape) - len(spec))))

  axes = flatten_dict(model.logical_axes()["params"], sep="/")
  params = flatten_dict(abstract.params, sep="/")
  assert {leaf.dtype for leaf in params.values()} == {jnp.dtype("float32")}
  expected = model_info(case)
  states = {name: expected.pop(name) for name in list(expected) if name.startswith(("param_states/", "step"))}
  assert {name: described(leaf, tuple(axes[name])) for name, leaf in params.items()} == expected
  if not states:
    return
  ours = {"step": described(abstract.step)}
  for slot in ("v_row", "v_col", "v"):
    leaves = flatten_dict(getattr(abstract.opt_state, slot), sep="/")
    ours |= {f"param_states/{path}/{slot}": described(leaf) for path, leaf in leaves.items()}
  # T5X keeps one zero for each momentum that there is not.
  assert {v.shape for name, v in states.items() if name.endswith("/m")} == {(1,)}
  states = {name: v._replace(axes=None) for name, v in states.items() if not name.endswith("/m")}
  for name, variable in states.items():
    if name.endswith(("/v_row", "/v_col")):
      assert not any(variable.spec)
      states[name] = variable._replace(spec=ours[name].spec)
  assert ours == states


@pytest.mark.parametrize("case", ["t5_1_1", "decoder_only", "scalable_t5"])
def test_the_first_loss_is_t5xs(case):
  metrics = document(case, "metrics")
  expected = metrics["loss_by_step"] if "loss_by_step" in metrics else metrics["loss"]
  loss, _ = jax.jit(t5x_model(case).loss_fn)(t5x_params(case), next(t5x_batches(case)))
  assert float(loss) == pytest.approx(expected["1"], rel=1e-6)


@pytest.mark.parametrize(
  "case",
  ["t5_1_1", *(pytest.param(case, marks=pytest.mark.long) for case in ("decoder_only", "scalable_t5"))],
)
def test_initial_parameters_have_the_spread_of_t5xs(case):
  ours = flatten_dict(t5x_model(case).initial_variables(jax.random.key(0))["params"], sep="/")
  for name, values in flatten_dict(t5x_params(case), sep="/").items():
    # Eight standard errors of the standard deviation of that many normal draws.
    tolerance = 8 / np.sqrt(2 * values.size)
    assert np.std(ours[name]) == pytest.approx(np.std(values), rel=tolerance), name
    if "/wi_" in name or "logits" in name:
      # Truncated at two standard deviations, then rescaled.
      assert np.abs(ours[name]).max() < 2.3 / np.sqrt(values.shape[0]), name


@pytest.mark.long
@pytest.mark.parametrize(
  ("case", "options"),
  [
    ("bfloat16", {"dtype": "bfloat16"}),
    ("bfloat16_float32_attention_logits", {"dtype": "bfloat16", "float32_attention_logits": True}),
    ("float32", {}),
  ],
)
def test_rounding_is_t5xs(case, options, optimized):
  """As near as T5X is to itself: looser than half of its distance from float32, so wrong places show."""
  expected, logits = document("bfloat16", "expected")[case], arrays("bfloat16", "logits")
  model = t5x_model("bfloat16", **options)
  batch = next(t5x_batches("bfloat16", 4))
  found = jax.jit(model.logits)(t5x_params("bfloat16"), batch)
  assert found.dtype == jnp.float32
  tolerance = 2e-5 if case == "float32" else 0.012
  np.testing.assert_allclose(found, logits[f"logits_0/{case}"], atol=tolerance)
  losses, params = losses_by_step(model, "bfloat16", steps=5, batch_size=4)
  found = [expected["loss_by_step"][str(step)] for step in range(1, 6)]
  np.testing.assert_allclose(losses, found, rtol=1e-5 if case == "float32" else 4e-4)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["hf_t5/t5_1_0", "hf_t5/t5_1_1", "hf_umt5/umt5"])
def test_logits_are_hugging_faces(name):
  network, params = hugging_face_network(name)
  with np.load(FIXTURES / name / "expected.npz") as expected:
    # Hugging Face's decoder has no mask but the causal one: to it no target is padding.
    targets = np.ones_like(expected["decoder_target_tokens"])
    logits = jax.jit(network.apply)(
      {"params": params},
      expected["encoder_input_tokens"],
      expected["decoder_input_tokens"],
      decoder_target_tokens=targets,
    )
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
