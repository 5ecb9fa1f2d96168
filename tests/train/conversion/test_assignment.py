"""Rules for leaves: refusals. What they mean stands beside T5X's in test_restoring.py."""

import doctest

import pytest

from anystep.errors import AnystepError
from anystep.train.conversion import assignment
from anystep.train.conversion.assignment import assign, check_rules, parse_rules, rename


def test_the_examples_hold():
  assert doctest.testmod(assignment) == (0, 4)


@pytest.mark.parametrize(
  "attempt",
  [
    lambda: parse_rules("no arrow"),
    lambda: parse_rules("(=>x"),
    lambda: parse_rules(r"a=>\1"),
    lambda: check_rules(["ab"]),
    lambda: check_rules([("a", 1)]),
    lambda: assign(["a"], ["a"], [("b", None)]),
    lambda: assign(["a"], ["a"], [("a", "b")]),
    lambda: rename(["a"], [("b", "c")]),
    lambda: rename(["a", "b"], [("a|b", "c")]),
  ],
)
def test_rules_that_cannot_be_are_refused(attempt):
  with pytest.raises(AnystepError) as refused:
    attempt()
  assert (refused.value.code, refused.value.kind) == (78, "assignment")


def test_commas_of_expressions_are_no_ends_of_rules():
  assert parse_rules("a{1,2}=>b,c=>") == [("a{1,2}", "b"), ("c", None)]
