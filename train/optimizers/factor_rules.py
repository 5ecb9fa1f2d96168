"""Axes of Adafactor's second moments: rows, columns, and batches of parameters stacked in one array."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.train.optimizers.parameter_patterns import ParameterPatterns

AxisRule = Literal["row", "column", "batch", "none"]
BY_SIZE = "by_size"
_SPELLINGS: Mapping[str | None, AxisRule] = {
  "row": "row",
  "column": "column",
  "col": "column",
  "batch": "batch",
  "none": "none",
  "unfactorized": "none",
  None: "none",
}

# T5X's standard_logical_factor_rules.
STANDARD_FACTOR_RULES: Mapping[str, AxisRule] = {
  "vocab": "column",
  "embed": "row",
  "mlp": "column",
  "heads": "column",
  "kv": "column",
  "joined_kv": "column",
  "relpos_buckets": "none",
  "layers": "batch",
  "stack": "batch",
  "q_wi_fused": "column",
  "o_wo_fused": "column",
  "multiquery_heads": "column",
  "kv_fused": "column",
  "layer_norm_scale": "none",
  "mlp_activations": "column",
}


@dataclasses.dataclass(frozen=True)
class Factoring:
  """Axes of one parameter, by what Adafactor does along them.

  Attributes:
    averaged: axes over which the root mean squares of clipping and parameter scale run: all but batches.
    rows, columns: axes of which only means are kept of the second moments; both empty if it is not factored.
      Each place along the other axes has means of its own.
  """

  averaged: tuple[int, ...]
  rows: tuple[int, ...] = ()
  columns: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class FactorRules:
  """Rules for the second moments of all parameters; see `adafactor` for the arguments of these names.

  Raises:
    AnystepError: 78 `optimizer`, `parameter_pattern`.
  """

  factored: bool
  min_dim_size_to_factor: int
  factor_map: Sequence[tuple[str, str | Sequence[str | None] | None]] | None
  logical_factor_rules: Mapping[str, str | None] | None

  def __post_init__(self):
    for pattern, rule in self._map.pairs:
      if rule is not None and rule != BY_SIZE:
        _check_spelling(f"factor_map, {pattern!r}", rule)
    if not isinstance(self.logical_factor_rules, Mapping | None):
      raise AnystepError(
        ExitCode.CONFIG,
        "optimizer",
        expected="logical_factor_rules: a rule by logical axis",
        got=self.logical_factor_rules,
        fix="write {'embed': 'row', 'mlp': 'column'}",
      )
    _check_spelling("logical_factor_rules", (self.logical_factor_rules or {}).values())
    if self.factor_map is not None and not self.factored:
      raise AnystepError(
        ExitCode.CONFIG,
        "optimizer",
        expected="factored=True where a factor_map is given",
        got="factored=False",
        fix="leave one of the two out",
      )

  @property
  def _map(self) -> ParameterPatterns:
    return ParameterPatterns("factor_map", self.factor_map or ())

  def factoring(self, path: str, shape: tuple[int, ...], axes: Sequence[str | None] | None) -> Factoring:
    """Return what is averaged and factored of a parameter.

    Args:
      path: the parameter's path.
      shape: its shape.
      axes: names of its logical axes; None if they are not known.

    Raises:
      AnystepError: 78 `factor_rule`.
    """
    everything = Factoring(averaged=tuple(range(len(shape))))
    if not self.factored:
      return everything
    number = self._map.index(path)
    if number is not None:
      rule = self._map.pairs[number][1]
      if rule is None:
        return everything
      names = None if rule == BY_SIZE else [_SPELLINGS[_lower(name)] for name in rule]
    elif self.logical_factor_rules is not None and axes is not None:
      names = [self._of_axis(path, axis) for axis in axes]
      if {"row", "column", "none"} <= set(names):
        raise _bad_rule(
          path, shape, names, "row, column or batch for each axis of a parameter that is factored"
        )
    else:
      names = None
    if names is not None and len(names) != len(shape):
      raise _bad_rule(path, shape, names, f"a rule for each of its {len(shape)} axes")
    if names is not None and (len(shape) > 2 or "batch" in names):
      return _by_name(names)
    if len(shape) > 2:
      raise _bad_rule(path, shape, axes, "logical axes that logical_factor_rules name, or a factor_map")
    return self._by_size(shape)

  def _of_axis(self, path: str, axis: str | None) -> AxisRule:
    rules = self.logical_factor_rules or {}
    if axis is not None and axis not in rules:
      raise AnystepError(
        ExitCode.CONFIG,
        "factor_rule",
        parameter=path,
        expected=f"a logical axis among {', '.join(rules)}",
        got=axis,
        fix=f"give logical_factor_rules a rule for {axis!r}: row, column, batch or none",
      )
    return "none" if axis is None else _SPELLINGS[_lower(rules[axis])]

  def _by_size(self, shape: tuple[int, ...]) -> Factoring:
    """Return the factoring of a parameter of at most two axes: the larger side is the column."""
    averaged = tuple(range(len(shape)))
    if len(shape) < 2 or min(shape) < self.min_dim_size_to_factor:
      return Factoring(averaged)
    row, column = (int(axis) for axis in np.argsort(shape, kind="stable"))
    return Factoring(averaged, (row,), (column,))


def _by_name(names: Sequence[AxisRule]) -> Factoring:
  """Return the factoring of a parameter whose axes all have a rule."""
  axes = {rule: tuple(axis for axis, name in enumerate(names) if name == rule) for rule in set(names)}
  averaged = tuple(axis for axis, name in enumerate(names) if name != "batch")
  if "row" not in axes or "column" not in axes:
    return Factoring(averaged)
  return Factoring(averaged, axes["row"], axes["column"])


def _bad_rule(path: str, shape: tuple[int, ...], got: object, expected: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "factor_rule",
    parameter=path,
    shape=shape,
    expected=expected,
    got=got,
    fix="name the parameter's logical axes, or give its path in factor_map; optimizers.chain passes the axes"
    " on, optax.chain does not",
  )


def _lower(name: str | None) -> str | None:
  return name.lower() if isinstance(name, str) else name


def _check_spelling(where: str, names: object) -> None:
  names = list(names) if not isinstance(names, str) else [names]  # type: ignore[call-overload]
  for name in names:
    if _lower(name) not in _SPELLINGS:
      raise AnystepError(
        ExitCode.CONFIG,
        "optimizer",
        expected=f"{where}: row, column, batch or none for each axis, or {BY_SIZE!r}",
        got=name,
        fix="correct the rule",
      )
