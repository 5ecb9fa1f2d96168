"""Kinds of errors: one table, which the sources, the tests and the documents agree with."""

import pathlib
import re

import error_raises
import pytest

from anystep.error_kinds.exit_codes import ExitCode
from anystep.error_kinds.table import ERROR_KINDS, SUBJECTS
from anystep.errors import AnystepError, require

ROOT = pathlib.Path(__file__).parents[1]
# Raises of a kind that a variable holds, with all that it can hold.
RUN_TIME_KINDS = {
  # What a worker left as JSON: any kind that another line raises.
  "cache_job/state/failures.py": set(),
  # Kinds of `Problem`, which are found where one is made.
  "cache_job/preprocessing/bad_examples.py": set(),
  "tasks/reading/task_reader.py": {"preprocessor_not_one_to_one", "preprocessor_unseeded"},
}
DOCUMENTS = ["docs/caching.md", "docs/errors.md", "docs/reliability.md"]
TABLE = re.compile(r"(<!-- error kinds: (\w+) -->\n)(.*?)(<!-- end of error kinds -->)", re.DOTALL)


@pytest.fixture(scope="module")
def raised():
  return error_raises.raised_kinds()


def test_every_raise_is_in_the_table(raised):
  unknown = {one.path for one in raised if one.kind is None}
  assert unknown == RUN_TIME_KINDS.keys()
  kinds = {one.kind for one in raised if one.kind} | set().union(*RUN_TIME_KINDS.values())
  assert kinds == ERROR_KINDS.keys(), "the table has neither more nor less"


def test_a_kind_has_the_tables_code_wherever_it_is_raised(raised):
  for one in raised:
    if one.kind and one.code:
      assert ERROR_KINDS[one.kind].code in (None, ExitCode[one.code]), f"{one.path}: {one.kind} {one.code}"


def test_few_codes_are_told_by_a_run_alone(raised):
  without = {one.path for one in raised if one.kind and one.code is None}
  assert without <= {
    # The code is the table's.
    "anystep/errors.py",
    # That of a program which failed.
    "train/datasets/cache_program.py",
    "train/demo/demo.py",
  }


def test_every_kind_is_named_in_a_test():
  tests = [
    path for path in (ROOT / "tests").rglob("*.py") if path.stem not in ("error_raises", "test_error_kinds")
  ]
  named = set(re.findall(r"[\"'`=]([a-z0-9_]+)[\"'`\s]", "\n".join(path.read_text() for path in tests)))
  assert not ERROR_KINDS.keys() - named


def test_an_error_that_the_table_does_not_have_is_a_warning_and_still_an_error():
  for code, kind in [(ExitCode.DATA, "no_such_kind"), (ExitCode.USAGE, "file_size")]:
    with pytest.warns(RuntimeWarning, match=f"{kind} .* table of error kinds"):
      error = AnystepError(code, kind, fix="do this")
    assert (error.code, error.kind) == (code, kind)


def test_what_is_required_fails_with_the_tables_code():
  require(True, "skip", expected=1, got=2, fix="give 1")
  with pytest.raises(AnystepError) as caught:
    require(False, "skip", expected=1, got=2, fix="give 1")
  assert str(caught.value) == 'ERROR code=64 kind=skip expected=1 got=2 fix="give 1"'


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_a_kind_is_a_word_and_has_one_sentence(kind):
  entry = ERROR_KINDS[kind]
  assert re.fullmatch(r"[a-z][a-z0-9_]*", kind)
  assert entry.sentence.endswith(".")
  assert "|" not in entry.sentence, "it stands in a table"
  assert entry.subject in SUBJECTS


def table_of(subject):
  """The table of a subject's kinds in Markdown, by code and kind."""
  entries = [(kind, entry) for kind, entry in ERROR_KINDS.items() if entry.subject == subject]
  rows = sorted(
    (str(int(entry.code)) if entry.code else "its own", kind, entry.sentence) for kind, entry in entries
  )
  return "".join(
    [
      "| code | kind | |\n|---|---|---|\n",
      *(f"| {code} | `{kind}` | {text} |\n" for code, kind, text in rows),
    ]
  )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_have_the_tables(document, request):
  path = ROOT / document
  text = path.read_text()
  assert TABLE.search(text)
  anew = TABLE.sub(lambda found: found[1] + table_of(found[2]) + found[4], text)
  if request.config.getoption("--update"):
    path.write_text(anew)
  assert path.read_text() == anew, f"{path} differs; `pytest --update` where the change is meant"


def test_one_document_has_the_whole_table():
  found = [match[2] for match in TABLE.finditer((ROOT / "docs/errors.md").read_text())]
  assert found == list(SUBJECTS)


CODE_AND_KINDS = re.compile(r"\b(6[4-9]|7[0-8]) ((?:`[a-z0-9_…]+`(?:, | or | and )?)+)")


@pytest.mark.parametrize(
  "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_documents_name_kinds_with_their_codes(path):
  if path.name == "LOG.md":
    return
  for code, kinds in CODE_AND_KINDS.findall(" ".join(path.read_text().split())):
    for kind in re.findall(r"`(\w+)`", kinds):
      assert ERROR_KINDS[kind].code in (None, int(code)), f"{code} `{kind}`"


@pytest.mark.parametrize("path", error_raises.source_paths(), ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings_name_kinds_with_their_codes(path):
  for code, kinds in CODE_AND_KINDS.findall(" ".join(path.read_text().split())):
    for kind in re.findall(r"`(\w+)`", kinds):
      if kind in ERROR_KINDS:
        assert ERROR_KINDS[kind].code in (None, int(code)), f"{code} `{kind}`"
