"""The examples in the library's docstrings are true; none of its modules needs TensorFlow."""

import doctest
import importlib

import pytest
from library_modules import MODULES


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_are_true(module):
  results = doctest.testmod(importlib.import_module(f"anystep.{module}"))
  assert results.failed == 0


def test_modules_whose_use_is_a_formula_have_examples():
  finder = doctest.DocTestFinder()
  with_examples = {
    module
    for module in MODULES
    if any(test.examples for test in finder.find(importlib.import_module(f"anystep.{module}")))
  }
  assert {
    "caches.manifest",
    "errors",
    "features.converters",
    "order.epochs",
    "order.permutation",
    "programs.progress",
    "records.parsing",
  } <= with_examples
