"""docs/tasks.md names every source, and how gin names a tokenizer."""

import copy
import inspect
import re
from pathlib import Path

import gin
from tokenizers import Tokenizer, models

from anystep.tasks import sources
from anystep.tasks.vocabularies import HuggingFaceVocabulary

DOCUMENT = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_every_source_has_a_row():
  table = DOCUMENT[DOCUMENT.index("| source |") :].partition("\n\n")[0]
  named = set(re.findall(r"`(\w+)", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
  assert named - {"seqio"} == {name for name in sources.__all__ if name.endswith("DataSource")}


def test_the_gin_lines_of_a_tokenizer_make_the_vocabulary_that_python_makes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "def": 3}, unk_token="<unk>"))
  tokenizer.save("tokenizer.json")
  (lines,) = (
    text for text in re.findall(r"^```gin\n(.*?)^```$", DOCUMENT, re.M | re.S) if "tokenizer_file" in text
  )
  gin.clear_config()
  try:
    gin.parse_config(lines)
    # A copy of a reference is what it refers to.
    vocabulary = copy.deepcopy(gin.query_parameter("VOCABULARY/gin.macro.value"))
  finally:
    gin.clear_config()
  assert vocabulary == HuggingFaceVocabulary("tokenizer.json", extra_ids=100)
  assert vocabulary.encode("def") == [3]
  named = re.search(r"the class takes ((?:`\w+`[ ,and\n]*)+)", DOCUMENT)[1]
  assert re.findall(r"\w+(?=`)", named) == list(inspect.signature(HuggingFaceVocabulary).parameters)
