"""A user's own Flax module as a model: Linen modules, and NNX modules through `nnx.bridge.to_linen`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import unfreeze
from flax.linen import partitioning
from jax.sharding import PartitionSpec

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.features.converters import DecoderConverter, EncoderDecoderConverter, FeatureConverter
from anystep.limits import is_count
from anystep.train.decoding.steps import DecodeFn
from anystep.train.models.accumulation import average_mutables
from anystep.train.models.base import Batch, Metrics, Tree
from anystep.train.models.prediction import GREEDY, find_eos_id, predict_without_cache
from anystep.train.models.teacher_forcing import (
  TeacherForcedModel,
  make_row_keys,
  scores_of_logits,
)
from anystep.train.optimizers.parameter_patterns import ParameterPatterns, parameter_path

# Flax's name for the logical axes of the parameters, from `flax.linen.partitioning.param_with_axes`.
_AXES = "params_axes"
# What the converters make of `inputs` and `targets`; encoder_* of encoder-decoders alone.
_FEATURES = (
  "encoder_input_tokens",
  "decoder_input_tokens",
  "decoder_target_tokens",
  "decoder_loss_weights",
  "decoder_causal_attention",
  *(f"{side}_{name}" for side in ("encoder", "decoder") for name in ("segment_ids", "positions")),
)
_FLAGS = {"train": True, "deterministic": False, "enable_dropout": True, "use_running_average": False}


@dataclasses.dataclass(frozen=True, eq=False)
class FlaxModel(TeacherForcedModel):
  """A module from token features to logits, trained by teacher forcing.

  The module is called with the features that its `__call__` names as arguments, such as
  `decoder_input_tokens`; and with `train`, `deterministic`, `enable_dropout` or `use_running_average`, where
  it names one, as training or scoring needs. It returns logits, (rows, length, vocab_size).

  Collections other than `params`, such as `batch_stats`, are carried in the training state: a training step
  changes them, scoring does not.

  A module takes one key of dropout, and draws one mask for all rows that it is given. In training it is given
  `rows_per_key` rows at a time, each such group with a key of its own: masks depend on no split of the batch.
  Mutable collections are averaged over the groups.

  Logical axes come from `logical_axes_by_path`; else from the boxes of `nn.with_logical_partitioning`, NNX's
  metadata or a collection `params_axes`. A variable without any is not split.

  Attributes:
    module: a Linen module; `nnx.bridge.to_linen(...)` makes one of an NNX module.
    vocabulary: vocabulary of inputs and targets; the trainer compares it with the tasks'.
    feature_converter: converter from the task's features; None for `EncoderDecoderConverter` where the module
      names `encoder_input_tokens`, else `DecoderConverter`.
    input_shapes: shapes of features that the module names, for one whose parameters depend on the length;
      (1, 1) for others.
    logical_axes_by_path: pairs of a regular expression and the axes' names, such as ('.*/kernel',
      ('embed', 'mlp')); the first expression that matches the whole path of a variable counts, as in
      'params/dense/kernel'.
    rows_per_key: number of neighbouring rows that share a key, a divisor of the batch's rows. None for 1, but
      for a module with mutable collections all rows of a batch, whose statistics are then the batch's.

  Raises:
    ValueError: the module is no Linen module, or input_shapes are not shapes of its features.
    AnystepError: 78 `rows_per_key`, `parameter_pattern`; from methods 78 `module`, if what the module takes,
      returns or has as parameters is not what a model needs.
  """

  module: nn.Module
  vocabulary: Any = None
  feature_converter: FeatureConverter | None = None
  input_shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
  logical_axes_by_path: Sequence[tuple[str, Sequence[str | None]]] = ()
  rows_per_key: int | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.rows_per_key is not None and not is_count(self.rows_per_key, least=1):
      raise _bad_rows("a whole number of at least 1, or None", self.rows_per_key)
    # Refuses what is no list of pairs with regular expressions.
    ParameterPatterns("logical_axes_by_path", self.logical_axes_by_path)
    for pattern, axes in self.logical_axes_by_path:
      _check_axes_form(pattern, axes)
    if not isinstance(self.module, nn.Module):
      raise ValueError(f"FlaxModel.module: expected a Linen module, got {self.module!r}")
    if not isinstance(self.input_shapes, Mapping):
      raise ValueError(f"FlaxModel.input_shapes: expected shapes by feature, got {self.input_shapes!r}")
    for name, shape in self.input_shapes.items():
      if name not in self._arguments or not _is_shape(shape):
        names = ", ".join(name for name in self._arguments if name != "self")
        expected = f"shapes, as (1, 512), of features among {names}"
        raise ValueError(f"FlaxModel.input_shapes: expected {expected}; got {name}: {shape!r}")
    if self.feature_converter is None:
      both = "encoder_input_tokens" in self._arguments
      converter = EncoderDecoderConverter() if both else DecoderConverter()
      object.__setattr__(self, "feature_converter", converter)

  @property
  def vocabularies(self) -> Mapping[str, Any]:
    """See `base.Model`."""
    return {"inputs": self.vocabulary, "targets": self.vocabulary}

  @functools.cached_property
  def vocab_size(self) -> int:
    """See `base.Model`.

    Raises:
      AnystepError: 78 `module` if the module does not return logits.
    """
    logits = jax.eval_shape(lambda: self._initialize(jax.random.key(0))[0])
    if not isinstance(logits, jax.ShapeDtypeStruct) or len(logits.shape) != 3:
      raise self._unfit(
        expected="that it returns logits, (rows, length, vocab_size)",
        got=logits,
        fix="let its __call__ return the logits alone",
      )
    return logits.shape[2]

  def initial_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """See `base.Model`."""
    variables = nn.unbox(_without_axes(self._boxed_variables(rng)))
    if "params" not in variables:
      raise self._unfit(expected="a module with parameters", got="none", fix="train another module")
    return variables

  def logical_axes(self) -> dict[str, Tree]:
    """See `base.Model`."""
    boxed = jax.eval_shape(lambda: self._boxed_variables(jax.random.key(0)))
    specs = nn.get_partition_spec(_without_axes(boxed))
    if _AXES in boxed:
      specs["params"] = unfreeze(partitioning.get_axis_names(boxed[_AXES]))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
      specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )
    paths = [parameter_path(keys) for keys, _ in leaves]
    for pattern, _ in self.logical_axes_by_path:
      if not any(re.fullmatch(pattern, path) for path in paths):
        raise AnystepError(
          ExitCode.CONFIG,
          "parameter_pattern",
          expected="in logical_axes_by_path, expressions that match the whole path of some variable",
          got=pattern,
          nearest=find_nearest(pattern, paths),
          fix="correct it, or leave it out",
        )
    named = [self._axes_of(path, spec) for path, (_, spec) in zip(paths, leaves, strict=True)]
    variables = jax.tree.leaves(nn.unbox(_without_axes(boxed)))
    for path, axes, variable in zip(paths, named, variables, strict=True):
      if len(axes) not in (0, variable.ndim):
        raise self._unfit(
          variable=path,
          shape=variable.shape,
          expected=f"names of {variable.ndim} logical axes",
          got=tuple(axes),
          fix="correct logical_axes_by_path, or the names that the module gives",
        )
    return jax.tree.unflatten(treedef, named)

  def logits(self, params: Tree, batch: Batch, row_keys: jax.Array | None = None) -> jax.Array:
    """See `TeacherForcedModel`: for modules without mutable collections."""
    logits, _ = self._apply({"params": params}, batch, row_keys, mutable=())
    return logits

  def loss_and_mutables(
    self, params: Tree, batch: Batch, rng: jax.Array | None, mutables: Mapping[str, Tree]
  ) -> tuple[jax.Array, tuple[Metrics, dict[str, Tree]]]:
    """See `base.MutableModel`."""
    variables = {"params": params, **mutables}
    logits, changed = self._apply(variables, batch, make_row_keys(rng, batch), mutable=tuple(mutables))
    loss, metrics = self.loss_of_logits(logits, batch)
    return loss, (metrics, {name: changed.get(name, mutables[name]) for name in mutables})

  def score_batch(
    self, params: Tree, batch: Batch, mutables: Mapping[str, Tree] | None = None
  ) -> dict[str, jax.Array]:
    """See `base.MutableModel`."""
    logits, _ = self._apply({"params": params, **(mutables or {})}, batch, None, mutable=())
    return scores_of_logits(logits, batch)

  def predict_batch_with_aux(
    self,
    params: Tree,
    batch: Batch,
    *,
    decode_fn: DecodeFn = GREEDY,
    num_decodes: int = 1,
    keys: jax.Array | None = None,
    return_all_decodes: bool = False,
    mutables: Mapping[str, Tree] | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """See `base.PredictingModel` and `prediction.predict_without_cache`."""
    variables = {"params": params, **(mutables or {})}
    return predict_without_cache(
      lambda features: self._apply(variables, features, None, mutable=())[0],
      batch,
      decode_fn=decode_fn,
      eos_id=find_eos_id(self.vocabulary),
      num_decodes=num_decodes,
      keys=keys,
      return_all_decodes=return_all_decodes,
    )

  def rows_together(self, num_rows: int) -> int:
    """Return the number of neighbouring rows that share a key, in a batch of `num_rows`.

    Raises:
      AnystepError: 78 `rows_per_key` if it does not divide them.
    """
    if self.rows_per_key is None:
      return num_rows if self._has_mutables else 1
    if num_rows % self.rows_per_key:
      raise _bad_rows(f"a divisor of the {num_rows} rows that are computed at once", self.rows_per_key)
    return self.rows_per_key

  @functools.cached_property
  def _has_mutables(self) -> bool:
    return len(jax.eval_shape(lambda: self.initial_variables(jax.random.key(0)))) > 1

  @property
  def _arguments(self) -> Mapping[str, inspect.Parameter]:
    """Arguments of the module's call; an NNX module's where it is bridged."""
    module: Any = self.module
    called: Any = module.nnx_class if isinstance(module, nnx.bridge.ToLinen) else type(module)
    return inspect.signature(called.__call__).parameters

  def _apply(
    self, variables: dict[str, Tree], batch: Batch, row_keys: jax.Array | None, *, mutable: tuple[str, ...]
  ) -> tuple[jax.Array, Mapping[str, Tree]]:
    """Return logits and the changed collections; dropout is on if there are keys."""
    if row_keys is None:
      return self._call(variables, batch, {}, training=False, mutable=mutable)
    num_rows = row_keys.shape[0]
    rows = self.rows_together(num_rows)
    if rows == num_rows:
      return self._call(variables, batch, {"dropout": row_keys[0]}, training=True, mutable=mutable)

    def apply_group(group: Batch, key: jax.Array) -> tuple[jax.Array, Mapping[str, Tree]]:
      return self._call(variables, group, {"dropout": key}, training=True, mutable=mutable)

    groups = {name: array.reshape(-1, rows, *array.shape[1:]) for name, array in batch.items()}
    logits, changed = jax.vmap(apply_group)(groups, row_keys[::rows])
    return logits.reshape(num_rows, *logits.shape[2:]), average_mutables(changed)

  def _call(
    self,
    variables: dict[str, Tree],
    batch: Batch,
    rngs: Mapping[str, jax.Array],
    *,
    training: bool,
    mutable: tuple[str, ...],
  ) -> tuple[jax.Array, Mapping[str, Tree]]:
    """Return the module's logits for all rows at once, and the changed collections."""
    with _unsharded(), nn.intercept_methods(functools.partial(_set_mode, training)):
      logits, changed = self.module.apply(
        variables, **self._keywords(batch, training=training), rngs=dict(rngs), mutable=list(mutable)
      )
    return logits, nn.unbox(changed)

  def _keywords(self, batch: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    """Return the module's arguments: features and the flags of training.

    Raises:
      AnystepError: 78 `module` if an argument without a default is no feature of the batch.
    """
    keywords: dict[str, Any] = {}
    for name, parameter in self._arguments.items():
      if name in batch:
        keywords[name] = batch[name]
      elif name in _FLAGS:
        keywords[name] = _FLAGS[name] is training
      elif name != "self" and parameter.default is parameter.empty and parameter.kind in _REQUIRED:
        raise self._unfit(
          expected="arguments that are features of its batches, or have defaults",
          got=name,
          fix=f"name some of {', '.join(_FEATURES)}; segment ids and positions are in packed rows alone",
        )
    return keywords

  def _boxed_variables(self, rng: jax.Array) -> dict[str, Tree]:
    """Return initial variables in the boxes that name their axes."""
    return dict(self._initialize(rng)[1])

  def _initialize(self, rng: jax.Array) -> tuple[Any, Mapping[str, Tree]]:
    """Return what the module returns for a batch of zeros, and its initial variables."""
    features = [*self._arguments, "decoder_target_tokens"]
    names = [name for name in features if name.endswith(("_tokens", "_ids", "_positions", "_attention"))]
    batch = {name: jnp.zeros(tuple(self.input_shapes.get(name, (1, 1))), jnp.int32) for name in names}
    rngs = dict(zip(("params", "dropout"), jax.random.split(rng), strict=True))
    with _unsharded(), nn.intercept_methods(functools.partial(_set_mode, False)):
      return self.module.init_with_output(rngs, **self._keywords(batch, training=False))

  def _axes_of(self, path: str, spec: PartitionSpec) -> PartitionSpec:
    for pattern, axes in self.logical_axes_by_path:
      if re.fullmatch(pattern, path):
        return PartitionSpec(*axes)
    return spec

  def _unfit(self, *, fix: str, **fields: object) -> AnystepError:
    module: Any = self.module
    kind = module.nnx_class if isinstance(module, nnx.bridge.ToLinen) else type(module)
    name = getattr(kind, "__name__", repr(kind))
    return AnystepError(ExitCode.CONFIG, "module", module=name, **fields, fix=fix)


_REQUIRED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _bad_rows(expected: str, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "rows_per_key",
    expected=expected,
    got=got,
    fix="choose another models.FlaxModel.rows_per_key, BATCH_SIZE or NUM_MICROBATCHES",
  )


def _without_axes(variables: dict[str, Tree]) -> dict[str, Tree]:
  return {name: tree for name, tree in variables.items() if name != _AXES}


def _check_axes_form(pattern: str, axes: object) -> None:
  """Refuse what is no tuple of names; a text alone would be taken for as many names as it has letters."""
  if not (isinstance(axes, (list, tuple)) and all(isinstance(axis, str | None) for axis in axes)):
    raise AnystepError(
      ExitCode.CONFIG,
      "parameter_pattern",
      expected=f"in logical_axes_by_path, a tuple of axes' names or None for {pattern!r}",
      got=repr(axes),
      fix="write ('.*/kernel', ('embed', 'mlp'))",
    )


def _is_shape(value: object) -> bool:
  return isinstance(value, (list, tuple)) and all(is_count(size, least=1) for size in value)


def _set_mode(training: bool, call: Any, args: tuple, keywords: dict[str, Any], context: Any) -> Any:
  """Let a bridged NNX module train or score: its dropout and batch norms go by attributes."""
  is_call = isinstance(context.module, nnx.bridge.ToLinen) and context.method_name == "__call__"
  if is_call and keywords.get("nnx_method") is None:

    def call_in_mode(module: nnx.Module, *args: Any, **keywords: Any) -> Any:
      module.train() if training else module.eval()
      return module(*args, **keywords)

    keywords = {**keywords, "nnx_method": call_in_mode}
  return call(*args, **keywords)


def _unsharded() -> contextlib.AbstractContextManager:
  """NNX would place each new variable on a mesh by its axes; the trainer does so."""
  return nnx.use_eager_sharding(False)
