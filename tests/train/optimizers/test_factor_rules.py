"""Axes that are averaged and factored, as T5X chooses them."""

import pytest

from anystep.errors import AnystepError
from anystep.train.optimizers.factor_rules import STANDARD_FACTOR_RULES, Factoring, FactorRules


def factoring(shape, axes=None, *, factored=True, least=128, factor_map=None, rules=STANDARD_FACTOR_RULES):
  made = FactorRules(
    factored=factored, min_dim_size_to_factor=least, factor_map=factor_map, logical_factor_rules=rules
  )
  return made.factoring("decoder/mlp/wi/kernel", shape, axes)


@pytest.mark.parametrize(
  ("shape", "axes", "expected"),
  [
    # By size, whatever the rules: the larger side is the column, of equal ones the last.
    ((130, 200), ("vocab", "embed"), Factoring((0, 1), (0,), (1,))),
    ((200, 130), ("embed", "vocab"), Factoring((0, 1), (1,), (0,))),
    ((128, 128), ("mlp", "embed"), Factoring((0, 1), (0,), (1,))),
    ((127, 500), ("embed", "mlp"), Factoring((0, 1))),
    ((500,), ("embed",), Factoring((0,))),
    ((), (), Factoring(())),
    # By rule, whatever the size, where there are more axes or a batch.
    ((4, 8, 6), ("embed", "heads", "kv"), Factoring((0, 1, 2), (0,), (1, 2))),
    ((6, 3, 2, 8), ("embed", "layers", "heads", "kv"), Factoring((0, 2, 3), (0,), (2, 3))),
    ((128, 2), ("embed", "layers"), Factoring((0,))),
    ((300, 300), ("layers", "embed"), Factoring((1,))),
    # Rows without columns are not factored, and layers stay apart.
    ((4, 3, 32), ("heads", "layers", "relpos_buckets"), Factoring((0, 2))),
    ((4, 3, 32), ("embed", "layers", "embed"), Factoring((0, 2))),
  ],
)
def test_axes_are_t5xs(shape, axes, expected):
  assert factoring(shape, axes) == expected


def test_nothing_is_factored_nor_kept_apart_where_factored_is_false():
  assert factoring((6, 3, 2, 8), ("embed", "layers", "heads", "kv"), factored=False) == Factoring(
    (0, 1, 2, 3)
  )


@pytest.mark.parametrize(
  ("rule", "shape", "expected"),
  [
    (("row", "BATCH", "col"), (4, 3, 5), Factoring((0, 2), (0,), (2,))),
    (("unfactorized", "batch", None), (4, 3, 5), Factoring((0, 2))),
    # Only logical rules must not leave an axis of a factored parameter out, as in T5X.
    (("row", "none", "column"), (4, 3, 5), Factoring((0, 1, 2), (0,), (2,))),
    (None, (300, 3, 300), Factoring((0, 1, 2))),
    ("by_size", (300, 300), Factoring((0, 1), (0,), (1,))),
    # As for logical rules, the sides decide of two axes.
    (("column", "row"), (300, 400), Factoring((0, 1), (0,), (1,))),
  ],
)
def test_a_factor_map_goes_before_logical_rules(rule, shape, expected):
  axes = ("embed", "layers", "mlp")[: len(shape)]
  assert factoring(shape, axes, factor_map=[("wi/", rule), ("", None)]) == expected
  assert factoring(shape, None, factor_map=[("wi/", rule)], rules=None) == expected
  assert factoring(shape, axes, factor_map=[("other", rule)]) == factoring(shape, axes)


@pytest.mark.parametrize(
  ("shape", "axes", "options", "fields"),
  [
    ((4, 3, 5), None, {}, {"shape": (4, 3, 5)}),
    ((4, 3, 5), ("embed", "layers", "mlp"), {"rules": None}, {"got": ("embed", "layers", "mlp")}),
    ((4, 3, 5), None, {"factor_map": [("", "by_size")]}, {"shape": (4, 3, 5)}),
    ((4, 3, 5), ("embed", "mlp"), {}, {"got": ["row", "column"]}),
    ((4, 3), ("embed", "width"), {}, {"got": "width"}),
    ((4, 3, 5), ("embed", "relpos_buckets", "mlp"), {}, {"got": ["row", "none", "column"]}),
  ],
)
def test_a_parameter_without_a_rule_is_refused(shape, axes, options, fields):
  with pytest.raises(AnystepError) as refused:
    factoring(shape, axes, **options)
  assert refused.value.kind == "factor_rule"
  assert refused.value.fields["parameter"] == "decoder/mlp/wi/kernel"
  assert refused.value.fields.items() >= fields.items()


@pytest.mark.parametrize(
  ("options", "kind"),
  [
    ({"factored": False, "factor_map": [("", None)]}, "optimizer"),
    ({"factor_map": [("", ("row", "colum"))]}, "optimizer"),
    ({"rules": {"embed": "rows"}}, "optimizer"),
    ({"factor_map": [("(", None)]}, "parameter_pattern"),
    ({"factor_map": {"embed": "row"}}, "parameter_pattern"),
  ],
)
def test_rules_that_cannot_be_are_refused(options, kind):
  with pytest.raises(AnystepError) as refused:
    factoring((4,), **options)
  assert refused.value.kind == kind
