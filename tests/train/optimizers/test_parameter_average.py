"""The average of the parameters over steps, beside training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anystep.errors import AnystepError
from anystep.train.optimizers import by_parameter, chain, with_average
from anystep.train.optimizers.parameter_average import averaged_parameters

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": {"c": jnp.array(3.0)}}


def test_the_average_is_of_the_parameters_after_each_step_and_changes_no_step():
  plain, averaging = optax.sgd(0.1, momentum=0.9), with_average(optax.sgd(0.1, momentum=0.9), decay=0.75)
  params, same = PARAMS, PARAMS
  state, inner = averaging.init(PARAMS), plain.init(PARAMS)
  expected = jax.tree.map(lambda param: np.asarray(param, np.float64), PARAMS)
  for _ in range(5):
    updates, state = jax.jit(averaging.update)(params, state, params)
    params = optax.apply_updates(params, updates)
    updates, inner = jax.jit(plain.update)(same, inner, same)
    same = optax.apply_updates(same, updates)
    new = jax.tree.map(lambda param: np.asarray(param, np.float64), params)
    expected = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, expected, new)
  jax.tree.map(np.testing.assert_array_equal, params, same)
  average = averaged_parameters(state, params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), average, expected)


def test_the_average_is_kept_in_float32_and_read_in_the_parameters_dtype():
  params = {"a": jnp.array([1.0, 2.0], jnp.bfloat16)}
  state = with_average(optax.sgd(0.1), decay=0.9).init(params)
  assert state.average["a"].dtype == jnp.float32
  assert averaged_parameters(state, params)["a"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  "optimizer",
  [
    optax.sgd(0.1),
    by_parameter([("a", with_average(optax.sgd(0.1), decay=0.9)), ("", None)]),
    chain([with_average(optax.sgd(0.1), decay=0.9), optax.scale(0.5)]),
    optax.chain(with_average(optax.sgd(0.1), decay=0.9), optax.scale(0.5)),
  ],
  ids=["none", "of some", "before another", "before another of optax"],
)
def test_the_average_is_of_all_parameters_and_nothing_stands_after_it(optimizer):
  with pytest.raises(AnystepError) as refused:
    averaged_parameters(optimizer.init(PARAMS), PARAMS)
  assert refused.value.kind == "parameter_average"


def test_a_chain_may_end_with_the_average():
  state = chain([optax.clip(1.0), with_average(optax.sgd(0.1), decay=0.9)]).init(PARAMS)
  jax.tree.map(np.testing.assert_array_equal, averaged_parameters(state, PARAMS), PARAMS)
