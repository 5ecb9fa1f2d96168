"""docs/tasks.md names every source."""

import re
from pathlib import Path

from anystep.tasks import sources

DOCUMENT = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_every_source_has_a_row():
  table = DOCUMENT[DOCUMENT.index("| source |") :].partition("\n\n")[0]
  named = set(re.findall(r"`(\w+)", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
  assert named - {"seqio"} == {name for name in sources.__all__ if name.endswith("DataSource")}
