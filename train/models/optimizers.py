"""Optimizers, built from optax's."""

import optax

from anystep.train.configuration.built_values import Transformation


def adafactor(
  learning_rate: float | optax.Schedule,
  *,
  decay_rate: float = 0.8,
  step_offset: int = 0,
  multiply_by_parameter_scale: bool = True,
  clipping_threshold: float | None = 1.0,
  weight_decay_rate: float | None = None,
  min_dim_size_to_factor: int = 128,
  epsilon: float = 1e-30,
) -> optax.GradientTransformation:
  """Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235, algorithms 4 and 5), no momentum.

  For a parameter X with gradient G at step t = 0, 1, ... after `step_offset`:

    b = 1 - (t + 1)^-decay_rate
    V = b V + (1 - b) (G^2 + epsilon)
    U = G / sqrt(V), then U / max(1, rms(U) / clipping_threshold)
    X = X - learning_rate(t) max(1e-3, rms(X)) U - weight_decay_rate X

  For a matrix with both sides of at least `min_dim_size_to_factor` only the means of V over its rows and
  over its columns are kept, and V is their outer product over their mean: memory for n + m numbers rather
  than n m. optax's Adafactor computes this as T5X's does with its standard factor rules, which for
  parameters of one or two axes, all that our networks have, are optax's too.

  Args:
    learning_rate: a number, or a function from the step to one, see `learning_rates`.
    decay_rate: how fast the second moments' decay approaches 1.
    step_offset: for finetuning, the pretrained step: the decay restarts there. Only for an optimizer state
      that counts on from it; a new state counts from 0, and needs 0 here.
    multiply_by_parameter_scale: whether the learning rate is relative to the parameter's size.
    clipping_threshold: largest root mean square of a parameter's update; None for no limit.
    weight_decay_rate: share of each parameter taken off at each step; None for none.
    min_dim_size_to_factor: see above.
    epsilon: see above.

  Returns:
    An optax transformation; its state is a pytree of arrays, and `update` needs the parameters.
  """
  # A run that resumes compares these values with its checkpoint's.
  arguments = dict(locals())
  transformation = optax.adafactor(
    learning_rate,
    min_dim_size_to_factor=min_dim_size_to_factor,
    decay_rate=decay_rate,
    decay_offset=step_offset,
    multiply_by_parameter_scale=multiply_by_parameter_scale,
    clipping_threshold=clipping_threshold,
    momentum=None,
    weight_decay_rate=weight_decay_rate,
    eps=epsilon,
  )
  return Transformation.of(transformation, adafactor, arguments)
