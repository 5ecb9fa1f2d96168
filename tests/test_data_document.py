"""What docs/data.md shows works, in its order, over small caches of the names that it uses."""

import os
import re
from pathlib import Path

import caches

DOCUMENT = Path(__file__).parents[1] / "docs" / "data.md"


def test_the_documents_python_runs(tmp_path, monkeypatch):
  for task, num_examples in (("c4", 1000), ("code", 300), ("wiki", 200)):
    caches.build(tmp_path / "cache", task=task, num_examples=num_examples, num_shards=4)
  monkeypatch.chdir(tmp_path)
  blocks = re.findall(r"^```python[ a-z]*\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
  assert len(blocks) >= 8
  scope: dict = {}
  for number, block in enumerate(blocks):
    exec(compile(block, f"docs/data.md, block {number}", "exec"), scope)
  assert scope["steps"][3]["inputs"].shape == (16, 16)
  assert os.listdir(tmp_path) == ["cache"]
