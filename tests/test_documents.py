"""What documents and code cite is there: sections, headings, files."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("anystep", "tasks", "cache_job", "train", "tests", "benchmarks", "gin_configs", "docs")
SUFFIXES = (".py", ".md", ".gin")
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Documents whose code spans are files of the repository.
MAPS = ("docs/architecture.md", "CONTRIBUTING.md")
# What stands right before the number of a section of somebody else's work.
ELSEWHERE = re.compile(r"et al\.|https?://")
ELSEWHERE_CHARACTERS = 300


def texts():
  paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
  return {path: path.read_text(encoding="utf-8") for path in [*paths, *DOCUMENTS]}


def anchor(heading):
  """The anchor that GitHub gives a heading."""
  return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(document):
  return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.M)}


def test_sections_are_cited_of_published_works_alone():
  cited = 0
  for path, text in texts().items():
    for match in re.finditer(r"\bsections? \d", text, re.IGNORECASE):
      before = text[max(0, match.start() - ELSEWHERE_CHARACTERS) : match.start()]
      assert ELSEWHERE.search(before), f"{path}: {text[match.start() - 40 : match.end() + 20]!r}"
      cited += 1
  assert cited > 5


def test_every_heading_that_is_cited_is_there():
  cited = {
    (path, document, heading)
    for path, text in texts().items()
    for document, heading in re.findall(r"\bdocs/(\w+\.md)(?:#([a-z\d-]+))?", text)
  }
  assert len(cited) > 30
  for path, document, heading in cited:
    assert (ROOT / "docs" / document).exists(), f"{path} cites docs/{document}"
    assert not heading or heading in anchors(ROOT / "docs" / document), f"{path} cites {document}#{heading}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_somewhere(document):
  for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", document.read_text(encoding="utf-8")):
    path, _, heading = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists(), link
    assert not heading or heading in anchors(target), link


@pytest.mark.parametrize("document", MAPS)
def test_every_path_that_a_map_of_the_repository_names_is_there(document):
  spans = re.findall(r"`([^`\s]+)`", (ROOT / document).read_text(encoding="utf-8"))
  top = {path.name for path in ROOT.iterdir()}
  paths = [span for span in spans if span.partition("/")[0] in top and ("/" in span or "." in span)]
  assert len(paths) > 5
  assert [path for path in paths if not (ROOT / path).exists()] == []
