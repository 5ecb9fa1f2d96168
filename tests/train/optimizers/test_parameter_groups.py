"""Optimizers by parameter path, chains, and what both pass on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anystep.errors import AnystepError
from anystep.train.optimizers import adafactor, by_parameter, chain, with_average
from anystep.train.optimizers.logical_axes import with_logical_axes

PARAMS = {
  "encoder": {"kernel": jnp.full((4,), 2.0), "norm": {"scale": jnp.ones((2,))}},
  "decoder": {"kernel": jnp.full((3,), 3.0), "bias": jnp.ones((2,))},
}
AXES = {"kernel": ("embed", "layers", "mlp"), "scale": ("embed",)}


def updated(optimizer, params=PARAMS, steps=1):
  state, gradients = optimizer.init(params), jax.tree.map(jnp.ones_like, params)
  update = jax.jit(optimizer.update)
  for _ in range(steps):
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


# optax's Adam relies on promotion.
@jax.numpy_dtype_promotion("standard")
def test_the_first_expression_that_is_found_counts():
  optimizer = by_parameter(
    [("norm/|bias$", optax.sgd(1.0)), ("^encoder/", None), ("", optax.adamw(0.1, weight_decay=0.5))]
  )
  params, _ = updated(optimizer)
  alone, _ = updated(optax.adamw(0.1, weight_decay=0.5), {"kernel": PARAMS["decoder"]["kernel"]})
  np.testing.assert_array_equal(params["encoder"]["norm"]["scale"], 0.0)
  np.testing.assert_array_equal(params["decoder"]["bias"], 0.0)
  np.testing.assert_array_equal(params["encoder"]["kernel"], PARAMS["encoder"]["kernel"])
  np.testing.assert_allclose(params["decoder"]["kernel"], alone["kernel"], rtol=1e-6)


@jax.numpy_dtype_promotion("standard")
def test_frozen_parameters_take_no_memory():
  _, state = updated(by_parameter([("decoder", None), ("", optax.adam(0.1))]))
  # Two moments of six numbers, and a count.
  assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * 6 + 1


def test_rates_of_their_own():
  fast = lambda step: jnp.where(step < 1, 0.5, 0.25)
  params, _ = updated(by_parameter([("encoder", optax.sgd(fast)), ("", optax.sgd(0.1))]), steps=2)
  np.testing.assert_allclose(params["encoder"]["kernel"], 2.0 - 0.75, rtol=1e-6)
  np.testing.assert_allclose(params["decoder"]["kernel"], 3.0 - 0.2, rtol=1e-6)


def test_a_chain_clips_by_the_norm_of_all_parameters():
  params, _ = updated(chain([optax.clip_by_global_norm(1.0), by_parameter([("", optax.sgd(1.0))])]))
  clipped = 1 / np.sqrt(11)
  np.testing.assert_allclose(params["encoder"]["kernel"], 2.0 - clipped, rtol=1e-6)
  np.testing.assert_allclose(params["decoder"]["bias"], 1.0 - clipped, rtol=1e-6)


@pytest.mark.parametrize(
  "wrap",
  [
    lambda optimizer: optimizer,
    lambda optimizer: chain([optax.clip_by_global_norm(1e9), optimizer]),
    lambda optimizer: by_parameter([("scale", optax.sgd(0.1)), ("kernel", optimizer)]),
    lambda optimizer: with_average(chain([by_parameter([("kernel", optimizer), ("", None)])]), decay=0.9),
  ],
  ids=["alone", "in a chain", "by parameter", "all three"],
)
def test_logical_axes_reach_adafactor(wrap):
  params = {"kernel": jnp.ones((4, 3, 5)), "scale": jnp.ones((4,))}
  optimizer = with_logical_axes(wrap(adafactor(0.1)), AXES)
  shapes = {leaf.shape for leaf in jax.tree.leaves(optimizer.init(params))}
  assert {(4, 3), (3, 5)} <= shapes, "rows and columns of each layer"
  updated(optimizer, params)
  with pytest.raises(AnystepError) as refused:
    wrap(adafactor(0.1)).init(params)
  assert refused.value.kind == "factor_rule"


@pytest.mark.parametrize(
  ("pairs", "fields"),
  [
    ([("encoder", optax.sgd(0.1))], {"got": "none for decoder/bias"}),
    ([("", optax.sgd(0.1)), ("decoder", None)], {"got": "decoder"}),
    ([("dekoder", None), ("", optax.sgd(0.1))], {"got": "dekoder"}),
  ],
)
def test_every_parameter_has_an_expression_and_every_expression_a_parameter(pairs, fields):
  with pytest.raises(AnystepError) as refused:
    by_parameter(pairs).init(PARAMS)
  assert refused.value.kind == "parameter_pattern"
  assert refused.value.fields.items() >= fields.items()


@pytest.mark.parametrize(
  ("make", "kind"),
  [
    (lambda: by_parameter([("[", None)]), "parameter_pattern"),
    (lambda: by_parameter(["encoder"]), "parameter_pattern"),
    (lambda: by_parameter([("", optax.sgd)]), "optimizer"),
    (lambda: chain([]), "optimizer"),
    (lambda: chain([0.1]), "optimizer"),
    (lambda: with_average(optax.sgd(0.1), decay=1.0), "optimizer"),
    (lambda: with_average(optax.sgd(0.1), decay="0.9"), "optimizer"),
    (lambda: with_average(optax.sgd, decay=0.9), "optimizer"),
    (lambda: adafactor(0.1, beta1=1.5), "optimizer"),
    (lambda: adafactor(0.1, decay_rate=None), "optimizer"),
    (lambda: adafactor(0.1, weight_decay_rate_lr_exponent="1"), "optimizer"),
    (lambda: adafactor("fast"), "optimizer"),
    (lambda: adafactor(0.1, dtype_momentum="int8"), "optimizer"),
    (lambda: adafactor(0.1, multiply_by_parameter_scale=[("(", True)]), "parameter_pattern"),
    (lambda: adafactor(0.1, multiply_by_parameter_scale=[("a", True)]).init(PARAMS), "parameter_pattern"),
  ],
)
def test_what_is_no_optimizer_is_refused(make, kind):
  with pytest.raises(AnystepError) as refused:
    make()
  assert refused.value.kind == kind
