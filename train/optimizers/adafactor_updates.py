"""Adafactor with all that T5X's has: rules by logical axis, momentum, weight decay, limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from anystep.errors import AnystepError, ExitCode
from anystep.limits import is_number
from anystep.train.optimizers.factor_rules import STANDARD_FACTOR_RULES, Factoring, FactorRules
from anystep.train.optimizers.logical_axes import Axes, AxesTransformation
from anystep.train.optimizers.parameter_patterns import ParameterPatterns, parameter_path

# Arguments that version 0.1 did not record: at these values they change nothing for a run that it began.
_NOT_RECORDED: Mapping[str, Any] = {
  "factored": True,
  "beta1": None,
  "epsilon2": 1e-3,
  "dtype_momentum": "float32",
  "factor_map": None,
  "logical_factor_rules": STANDARD_FACTOR_RULES,
  "weight_decay_rate_lr_exponent": None,
  "global_norm_clip_threshold": None,
  "max_parameter_scale": None,
  "skip_nan_updates": False,
}
# Arguments with limits for which None is no value.
_NEVER_NONE = ("decay_rate", "min_dim_size_to_factor", "epsilon1", "epsilon2")


class AdafactorState(NamedTuple):
  """State of Adafactor; each of the trees is like the parameters'.

  Attributes:
    count: () int32, the number of updates done.
    v_row, v_col: means of squared gradients over the columns, and over the rows; (1,) zeros if not factored.
    v: means of squared gradients; (1,) zeros if factored.
    m: momentum; None without.
  """

  count: Any
  v_row: Any
  v_col: Any
  v: Any
  m: Any


def adafactor(
  learning_rate: float | optax.Schedule,
  *,
  factored: bool = True,
  multiply_by_parameter_scale: bool | Sequence[tuple[str, bool]] = True,
  beta1: float | None = None,
  decay_rate: float = 0.8,
  step_offset: int = 0,
  clipping_threshold: float | None = 1.0,
  weight_decay_rate: float | None = None,
  min_dim_size_to_factor: int = 128,
  epsilon1: float = 1e-30,
  epsilon2: float = 1e-3,
  dtype_momentum: str = "float32",
  factor_map: Sequence[tuple[str, str | Sequence[str | None] | None]] | None = None,
  logical_factor_rules: Mapping[str, str | None] | None = STANDARD_FACTOR_RULES,
  weight_decay_rate_lr_exponent: float | None = None,
  global_norm_clip_threshold: float | None = None,
  max_parameter_scale: float | None = None,
  skip_nan_updates: bool = False,
) -> optax.GradientTransformation:
  """Adafactor as T5X has it (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235, algorithms 4 and 5).

  For a parameter X with gradient G at step t = 0, 1, ... after `step_offset`:

    b = 1 - (t + 1)^-decay_rate
    V = b V + (1 - b) (G^2 + epsilon1)
    U = G / sqrt(V), then U / max(1, rms(U) / clipping_threshold)
    U = learning_rate(step) min(max_parameter_scale, max(epsilon2, rms(X))) U
    M = beta1 M + (1 - beta1) U, which takes the place of U
    X = (1 - weight_decay) X - U
    weight_decay = weight_decay_rate learning_rate(step)^weight_decay_rate_lr_exponent

  If a parameter is factored, only the means of V over its columns and over its rows are kept, and V is their
  outer product over their mean: memory for n + m numbers rather than n m.

  A parameter of at most two axes is factored if both sides are at least `min_dim_size_to_factor`; the larger
  side is the column. One of more axes, or with a batch axis (layers that are scanned, stacked parameters),
  goes by rules: factored if it has row and column axes, whatever their sizes, and not otherwise. Along a
  batch axis nothing is averaged: each layer has its own rms.

  Args:
    learning_rate: a number, or a function from the 0-based step to one, see `learning_rate_schedule`.
    factored: False keeps all second moments, and takes rms over whole parameters, batch axes too.
    multiply_by_parameter_scale: whether the learning rate is relative to the parameter's rms; pairs of
      (regular expression, bool) say so by parameter path, and the first that is found in it counts.
    beta1: momentum, of the update with the learning rate in it; None for none, and no memory for it.
    decay_rate: how fast the second moments' decay approaches 1.
    step_offset: for finetuning, the pretrained step: the decay of second moments restarts there. Only for an
      optimizer state that counts on from it; at steps before it every number is nan.
    clipping_threshold: largest rms of a parameter's update; None for no limit.
    weight_decay_rate: share of each parameter taken off at each step; None for none. It is not times the
      learning rate, unless an exponent is given.
    min_dim_size_to_factor: see above.
    epsilon1: added to squared gradients.
    epsilon2: least scale of a parameter.
    dtype_momentum: dtype that momentum is kept in, such as 'bfloat16'.
    factor_map: pairs of (regular expression, rule) by parameter path; the first that is found in it counts.
      A rule is a name for each axis, 'row', 'column', 'batch' or 'none'; or 'by_size'; or None for a
      parameter that is not factored. Where no expression matches, `logical_factor_rules` count.
    logical_factor_rules: one of these names by logical axis; None for none, which refuses parameters of more
      than two axes. The trainer tells the optimizer the logical axes, see `with_logical_axes`.
    weight_decay_rate_lr_exponent: see above; None or 0 for none. Without `weight_decay_rate` that is 1.
    global_norm_clip_threshold: gradients are scaled to at most this norm, of all parameters together; None or
      0 for no limit.
    max_parameter_scale: largest scale of a parameter; None for no limit.
    skip_nan_updates: whether to keep each number that the update would make nan.

  Returns:
    An optax transformation; its state is an `AdafactorState`, and `update` needs the parameters.

  Raises:
    AnystepError: 78 `optimizer`, `parameter_pattern`; 78 `factor_rule` from `init` and `update`.
  """
  # A run that resumes compares these values with its checkpoint's.
  arguments = dict(locals())
  settings = _Settings(**arguments)
  recorded = {
    name: value
    for name, value in arguments.items()
    if name not in _NOT_RECORDED or value != _NOT_RECORDED[name]
  }
  # Version 0.1 had one epsilon.
  recorded["epsilon"] = recorded.pop("epsilon1")

  def with_axes(axes: Axes) -> AxesTransformation:
    return AxesTransformation.make(
      optax.GradientTransformation(
        lambda params: _init(settings, axes, params),
        lambda updates, state, params=None: _update(settings, axes, updates, state, params),
      ),
      made_by=adafactor,
      arguments=recorded,
      with_axes=with_axes,
    )

  return with_axes({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
  """Arguments of `adafactor`, checked."""

  learning_rate: float | optax.Schedule
  factored: bool
  multiply_by_parameter_scale: bool | Sequence[tuple[str, bool]]
  beta1: float | None
  decay_rate: float
  step_offset: int
  clipping_threshold: float | None
  weight_decay_rate: float | None
  min_dim_size_to_factor: int
  epsilon1: float
  epsilon2: float
  dtype_momentum: str
  factor_map: Sequence[tuple[str, str | Sequence[str | None] | None]] | None
  logical_factor_rules: Mapping[str, str | None] | None
  weight_decay_rate_lr_exponent: float | None
  global_norm_clip_threshold: float | None
  max_parameter_scale: float | None
  skip_nan_updates: bool
  rules: FactorRules = dataclasses.field(init=False)

  def __post_init__(self):
    limits = {
      "decay_rate": (self.decay_rate, 0.0, math.inf),
      "weight_decay_rate": (self.weight_decay_rate, 0.0, 1.0),
      "min_dim_size_to_factor": (self.min_dim_size_to_factor, 0, math.inf),
      "epsilon1": (self.epsilon1, 0.0, math.inf),
      "epsilon2": (self.epsilon2, 0.0, math.inf),
      "weight_decay_rate_lr_exponent": (self.weight_decay_rate_lr_exponent, -math.inf, math.inf),
      "global_norm_clip_threshold": (self.global_norm_clip_threshold, 0.0, math.inf),
      "max_parameter_scale": (self.max_parameter_scale, 0.0, math.inf),
    }
    for name, (value, least, most) in limits.items():
      may_be_none = value is None and name not in _NEVER_NONE
      if not may_be_none and not is_number(value, least=least, most=most):
        bound = f" from {least} to {most}" if most < math.inf else f" of at least {least}"
        raise _bad_argument(name, f"a number{bound if least > -math.inf else ''}", value)
    # A beta1 of 1 or a threshold of 0 would let no parameter change.
    if self.beta1 is not None and not (is_number(self.beta1, least=0.0) and self.beta1 < 1.0):
      raise _bad_argument("beta1", "a number from 0 to below 1, or None", self.beta1)
    threshold = self.clipping_threshold
    if threshold is not None and not (is_number(threshold) and threshold > 0.0):
      raise _bad_argument("clipping_threshold", "a number above 0, or None for no limit", threshold)
    if not is_number(self.learning_rate, least=0.0) and not callable(self.learning_rate):
      expected = "a number of at least 0, or a function of the step"
      raise _bad_argument("learning_rate", expected, self.learning_rate)
    for name in ("factored", "skip_nan_updates"):
      if not isinstance(getattr(self, name), bool):
        raise _bad_argument(name, "True or False", getattr(self, name))
    if not is_number(self.step_offset):
      raise _bad_argument("step_offset", "a number of steps", self.step_offset)
    if self.dtype_momentum not in ("float32", "bfloat16", "float16"):
      raise _bad_argument("dtype_momentum", "float32, bfloat16 or float16", self.dtype_momentum)
    if not all(isinstance(scaled, bool) for _, scaled in self._scaled.pairs):
      expected = "True, False, or pairs of a regular expression and one of them"
      raise _bad_argument("multiply_by_parameter_scale", expected, self.multiply_by_parameter_scale)
    rules = FactorRules(
      factored=self.factored,
      min_dim_size_to_factor=self.min_dim_size_to_factor,
      factor_map=self.factor_map,
      logical_factor_rules=self.logical_factor_rules,
    )
    object.__setattr__(self, "rules", rules)

  @property
  def _scaled(self) -> ParameterPatterns:
    scaled = self.multiply_by_parameter_scale
    return ParameterPatterns(
      "multiply_by_parameter_scale", [("", scaled)] if isinstance(scaled, bool) else scaled
    )

  def is_scaled(self, path: str) -> bool:
    """Return whether a parameter's learning rate is relative to its size."""
    return bool(self._scaled.find(path))

  def rate(self, count: jax.Array) -> jax.Array:
    """Return the learning rate of the step after `count` updates: () float32."""
    value = self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
    return jnp.asarray(value, jnp.float32)

  def weight_decay(self, rate: jax.Array) -> float | jax.Array | None:
    """Return the share of a parameter that is taken off; None for none."""
    if not self.weight_decay_rate_lr_exponent:
      return self.weight_decay_rate
    # As in T5X, a rate of 0 is none here: the decay is then the power of the learning rate alone.
    return (self.weight_decay_rate or 1.0) * rate**self.weight_decay_rate_lr_exponent


class _Moments(NamedTuple):
  """Moments of one parameter, see `AdafactorState`."""

  v_row: jax.Array
  v_col: jax.Array
  v: jax.Array
  m: jax.Array | None


def _init(settings: _Settings, axes: Axes, params: Any) -> AdafactorState:
  leaves, treedef = _flatten(params)
  moments = []
  for keys, param in leaves:
    path = parameter_path(keys)
    factoring = settings.rules.factoring(path, param.shape, axes.get(path))
    settings.is_scaled(path)
    v_row = v_col = v = jnp.zeros((1,), jnp.float32)
    if factoring.rows:
      v_row = jnp.zeros(_without(param.shape, factoring.columns), jnp.float32)
      v_col = jnp.zeros(_without(param.shape, factoring.rows), jnp.float32)
    else:
      v = jnp.zeros(param.shape, jnp.float32)
    m = None if settings.beta1 is None else jnp.zeros(param.shape, settings.dtype_momentum)
    moments.append(_Moments(v_row, v_col, v, m))
  return _state(settings, treedef, jnp.zeros((), jnp.int32), moments)


def _update(
  settings: _Settings, axes: Axes, gradients: Any, state: AdafactorState, params: Any
) -> tuple[Any, AdafactorState]:
  if params is None:
    raise ValueError("adafactor: expected the parameters as update's third argument, got none")
  leaves, treedef = _flatten(params)
  flat = [treedef.flatten_up_to(tree) for tree in (gradients, state.v_row, state.v_col, state.v)]
  momenta = [None] * len(leaves) if state.m is None else treedef.flatten_up_to(state.m)
  grads = [gradient.astype(jnp.float32) for gradient in flat[0]]
  if settings.global_norm_clip_threshold:
    grads = _clip_by_global_norm(grads, settings.global_norm_clip_threshold)
  updates, moments = [], []
  for (keys, param), gradient, v_row, v_col, v, m in zip(leaves, grads, *flat[1:], momenta, strict=True):
    path = parameter_path(keys)
    factoring = settings.rules.factoring(path, param.shape, axes.get(path))
    old = _Moments(v_row, v_col, v, m)
    update, new = _update_parameter(settings, path, factoring, state.count, param, gradient, old)
    if settings.skip_nan_updates:
      update = jnp.where(jnp.isnan(update), 0.0, update)
      new = jax.tree.map(lambda after, before: jnp.where(jnp.isnan(after), before, after), new, old)
    updates.append(update)
    moments.append(new)
  count = optax.safe_increment(state.count)
  return jax.tree.unflatten(treedef, updates), _state(settings, treedef, count, moments)


def _update_parameter(
  settings: _Settings,
  path: str,
  factoring: Factoring,
  count: jax.Array,
  param: jax.Array,
  gradient: jax.Array,
  old: _Moments,
) -> tuple[jax.Array, _Moments]:
  """Return what is added to a parameter, and its new moments."""
  param = param.astype(jnp.float32)
  rate = settings.rate(count)
  step = (count - settings.step_offset).astype(jnp.float32)
  decay = 1.0 - (step + 1.0) ** -settings.decay_rate
  squares = jnp.square(gradient) + settings.epsilon1

  def mix(moment: jax.Array, squares: jax.Array) -> jax.Array:
    return decay * moment + (1.0 - decay) * squares

  if factoring.rows:
    v_row = mix(old.v_row, jnp.mean(squares, axis=factoring.columns))
    v_col = mix(old.v_col, jnp.mean(squares, axis=factoring.rows))
    moments = old._replace(v_row=v_row, v_col=v_col)
    row_factors = jnp.expand_dims(v_row, factoring.columns)
    row_factors = (row_factors / jnp.mean(row_factors, axis=factoring.rows, keepdims=True)) ** -0.5
    scaled = gradient * row_factors * jnp.expand_dims(v_col, factoring.rows) ** -0.5
  else:
    moments = old._replace(v=mix(old.v, squares))
    scaled = gradient * moments.v**-0.5
  if settings.clipping_threshold is not None:
    scaled /= jnp.maximum(1.0, _rms(scaled, factoring.averaged) / settings.clipping_threshold)

  if settings.is_scaled(path):
    scale = jnp.maximum(_rms(param, factoring.averaged), settings.epsilon2)
    if settings.max_parameter_scale is not None:
      scale = jnp.minimum(scale, settings.max_parameter_scale)
    change = rate * scale * scaled
  else:
    change = rate * scaled
  if settings.beta1 is not None:
    assert old.m is not None
    change = (settings.beta1 * old.m).astype(jnp.float32) + (1.0 - settings.beta1) * change
    moments = moments._replace(m=change.astype(old.m.dtype))
  weight_decay = settings.weight_decay(rate)
  return (-change if weight_decay is None else -change - weight_decay * param), moments


def _state(settings: _Settings, treedef: Any, count: jax.Array, moments: list[_Moments]) -> AdafactorState:
  def tree(slot: str) -> Any:
    return jax.tree.unflatten(treedef, [getattr(leaf, slot) for leaf in moments])

  m = None if settings.beta1 is None else tree("m")
  return AdafactorState(count, tree("v_row"), tree("v_col"), tree("v"), m)


def _flatten(params: Any) -> tuple[Any, Any]:
  """Return (path, parameter) of each parameter, and the tree's structure."""
  return jax.tree_util.tree_flatten_with_path(params)


def _clip_by_global_norm(gradients: list[jax.Array], threshold: float) -> list[jax.Array]:
  norm = jnp.sqrt(sum((jnp.sum(jnp.square(gradient)) for gradient in gradients), jnp.zeros(())))
  scale = threshold * jnp.minimum(1.0 / threshold, 1.0 / norm)
  return [gradient * scale for gradient in gradients]


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def _without(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _bad_argument(name: str, expected: str, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG, "optimizer", expected=f"adafactor's {name}: {expected}", got=got, fix=f"correct {name}"
  )
