"""What docs/tasks.md says works as it says: its first part is run, what it names is there."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import seqio

from anystep.cache_job import main as cache_main
from anystep.tasks import sources
from anystep.tasks.data_program import main as data_main
from anystep.tasks.vocab_program import main as vocabulary_main
from anystep.train import main as train_main

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
WAY = DOCUMENT[DOCUMENT.index("## From a folder") : DOCUMENT.index("## Sources")]
HURRY = DOCUMENT[DOCUMENT.index("## In a hurry") : DOCUMENT.index("## Tasks that are there")]
PROGRAMS = {
  "anystep-cache": cache_main.main,
  "anystep-data": lambda arguments: data_main.main(arguments[1:]),
  "anystep-train": train_main.main,
  "anystep-vocab": lambda arguments: vocabulary_main.main(arguments[1:]),
}
# A model that compiles in no time, and less of everything.
SHRUNKEN = [
  "--gin.TRAIN_STEPS=2",
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}",
  "--gin.network.T5Config.emb_dim=8",
  "--gin.network.T5Config.mlp_dim=8",
  "--gin.network.T5Config.num_encoder_layers=1",
  "--gin.network.T5Config.num_decoder_layers=1",
]


def blocks(text, language=""):
  fences = re.findall(r"^```([\w ]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
  return [block for found, block in fences if found == language]


def commands(text):
  """The programs' command lines in the text, as lists of words."""
  lines = (line for block in blocks(text) for line in block.replace("\\\n", "").splitlines())
  return [shlex.split(line) for line in lines if line.startswith("anystep-")]


def run(command, *more):
  assert PROGRAMS[command[0]]([*command, *more]) == 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder with small files of the names that the document uses; what is registered there is forgotten."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  for name in ("web", "books"):
    (tmp_path / "data" / name).mkdir(parents=True)
  for number in range(2):
    rows = [{"text": f"page {number} {k}: {'words ' * (20 + k)}", "url": k} for k in range(40)]
    (tmp_path / f"data/web/{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  for name in ("train-0", "train-1", "validation"):
    lines = "".join(f"{name} line {k}: {'Wörter ' * (1 + k)}\n" for k in range(30))
    (tmp_path / f"data/books/{name}.txt").write_text(lines)
  (tmp_path / "my_tasks.py").write_text(blocks(WAY, "python")[0])
  # Another document's.
  sys.modules.pop("my_tasks", None)
  yield tmp_path
  sys.modules.pop("my_tasks", None)
  for registry, names in ((seqio.MixtureRegistry, ["web_and_books"]), (seqio.TaskRegistry, ["web", "books"])):
    for name in set(names) & set(registry.names()):
      registry.remove(name)


@pytest.mark.long
def test_the_way_from_a_folder_of_files_to_training_without_a_cache_and_with_one(folder, capsys):
  (gin_file,) = (block for block in blocks(WAY) if "MIXTURE_OR_TASK_NAME" in block)
  (folder / "my_run.gin").write_text(gin_file)
  previewing, caching, counting, training = commands(WAY)
  uncached, _, _, of_file, of_string, trained_on_file = commands(HURRY)

  run(previewing)
  shown = capsys.readouterr().out
  assert "books train" in shown
  assert "features of encoder_decoder" in shown

  run(uncached, "--dry_run")

  run(caching)
  run(counting)
  told = capsys.readouterr().out
  assert re.search(r"books +30% +30% +4,800 ", told)
  run(training, "--dry_run")
  run(training, *SHRUNKEN)
  assert (folder / "model" / "checkpoint_2").is_dir()

  (mixture,) = blocks(HURRY, "json")
  (folder / "mixture.json").write_text(mixture)
  capsys.readouterr()
  told = told[told.index("Mixture") :]
  for command in (of_file, of_string):
    run(command)
    assert capsys.readouterr().out.endswith(told)
  run(trained_on_file, "--gin.MODEL_DIR='other'", "--dry_run")


def flags_of(program, command=None):
  """The names of a program's flags, or of its command's."""
  if program == "anystep-cache":
    values = cache_main.define_flags()
    return {name for flag in values for name in (flag, f"no{flag}")}
  if program == "anystep-train":
    return {"gin_file", "gin_search_paths", "dry_run", "cache_if_missing", "cache_if_missing_limit_bytes"}
  parser = {"anystep-data": data_main, "anystep-vocab": vocabulary_main}[program]._parser()
  (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
  chosen = [found.choices[command]] if command else found.choices.values()
  return {name.removeprefix("--") for one in chosen for a in one._actions for name in a.option_strings}


def test_every_flag_is_one_of_the_programs_that_it_is_given():
  given = [
    (
      word.partition("=")[0].removeprefix("--"),
      command[:2] if command[0] in ("anystep-data",) else command[:1],
    )
    for command in commands(DOCUMENT)
    for word in command
    if word.startswith("--") and not word.startswith("--gin.")
  ]
  assert len(given) > 30
  assert [(flag, to) for flag, to in given if flag not in flags_of(*to)] == []


def test_every_flag_that_is_spoken_of_is_some_programs():
  known = set().union(*map(flags_of, PROGRAMS))
  text = re.sub(r"^```.*?^```$", "", DOCUMENT, flags=re.DOTALL | re.MULTILINE)
  spoken_of = set(re.findall(r"--(\w+)", text))
  assert len(spoken_of) >= 15
  assert spoken_of - known == set()


def test_every_file_that_is_linked_is_there():
  links = re.findall(r"\]\((?!https?:)([^)]*)\)", DOCUMENT)
  headings = {re.sub(r"\W+", "-", title.lower()) for title in re.findall(r"^#+ (.*)$", DOCUMENT, re.M)}
  assert len(links) > 3
  for link in links:
    path, _, anchor = link.partition("#")
    assert (ROOT / "docs" / path).exists(), link
    assert path or anchor in headings, link


def test_every_source_has_a_row():
  table = DOCUMENT[DOCUMENT.index("| source |") :].partition("\n\n")[0]
  named = set(re.findall(r"`(\w+)", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
  assert named - {"seqio"} == {name for name in sources.__all__ if name.endswith("DataSource")}
