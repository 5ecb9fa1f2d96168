"""What the documents about data show works, in their order, over small caches of the names that they use."""

import os
import re
from pathlib import Path

import caches
import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(("document", "least_blocks"), [("data.md", 8), ("features.md", 3)])
def test_the_documents_python_runs(tmp_path, monkeypatch, document, least_blocks):
  for task, num_examples in (("c4", 1000), ("code", 300), ("wiki", 200)):
    caches.build(tmp_path / "cache", task=task, num_examples=num_examples, num_shards=4)
  monkeypatch.chdir(tmp_path)
  text = (DOCS / document).read_text(encoding="utf-8")
  blocks = re.findall(r"^```python[ a-z]*\n(.*?)^```$", text, re.M | re.S)
  assert len(blocks) >= least_blocks
  scope: dict = {}
  for number, block in enumerate(blocks):
    exec(compile(block, f"{document}, block {number}", "exec"), scope)
  if document == "data.md":
    assert scope["steps"][3]["inputs"].shape == (16, 16)
  assert os.listdir(tmp_path) == ["cache"]
