"""docs/order.md says what the reference program does: each of its examples is run against it."""

import doctest
from pathlib import Path

import oracle

DOCUMENT = Path(__file__).parents[1] / "docs" / "order.md"


def test_the_documents_examples_are_the_reference_programs():
  text = DOCUMENT.read_text(encoding="utf-8")
  examples = doctest.DocTestParser().get_doctest(text, dict(vars(oracle)), "order.md", str(DOCUMENT), 0)
  assert len(examples.examples) > 30
  output = []
  results = doctest.DocTestRunner(verbose=False).run(examples, out=output.append)
  assert results.failed == 0, "".join(output)
