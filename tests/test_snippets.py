"""Every snippet of every document is run, in the document's order, as its reader would.

A fence names its language, and after it how the snippet is used:

- `python` is run, in one scope for each document; `python torch` only where PyTorch is installed.
- `sh` is run line by line, the programs in this process; of `sh elsewhere`, which needs a cluster, a store or
  data to download, the flags alone are checked. An ellipsis stands for the arguments in `ELLIPSES`.
- `gin` is bound; any snippet with `file=NAME` is written to that file, which later ones use.
- `pycon` stands in docs/order.md, which test_order_document.py runs; `text` and `json` are outputs and files.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import shutil
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import gin
import pyarrow.parquet
import pytest
import seqio
from absl import flags
from apache_beam.options.pipeline_options import PipelineOptions
from pictures import write_pictures
from seqio_caches import write_seqio_cache
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from anystep.cache_job import main as cache_main
from anystep.tasks.data_program import main as data_main
from anystep.tasks.vocab_program import main as vocabulary_main
from anystep.tasks.vocabularies import files
from anystep.train import convert
from anystep.train import main as train_main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LANGUAGES = {"python", "sh", "gin", "json", "pycon", "text"}
FENCE = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
  "anystep-cache": cache_main.main,
  "anystep-convert": lambda arguments: convert.main(arguments[1:]),
  "anystep-data": lambda arguments: data_main.main(arguments[1:]),
  "anystep-train": train_main.main,
  "anystep-vocab": lambda arguments: vocabulary_main.main(arguments[1:]),
}
ELLIPSES = {
  "anystep-cache": ["--tasks=my_task", "--module_import=my_tasks", "--output_cache_dir=cache"],
  "anystep-train": ["--gin_file=my_run.gin", "--gin.MODEL_DIR='model_of_ellipsis'"],
}
# Of Beam, gin and ruff, and of the benchmarks.
OTHER_FLAGS = {"--gin", "--fix", *(f"--{name}" for name in PipelineOptions([]).get_all_options())}.union(
  *(re.findall(r'"(--\w+)"', path.read_text()) for path in (ROOT / "benchmarks").glob("*.py"))
)
# A model that compiles in no time, and less of everything.
SHRUNKEN = [
  "--gin.TRAIN_STEPS=2",
  "--gin.BATCH_SIZE=8",
  "--gin.network.T5Config.emb_dim=8",
  "--gin.network.T5Config.mlp_dim=8",
  "--gin.network.T5Config.num_encoder_layers=1",
  "--gin.network.T5Config.num_decoder_layers=1",
]


def blocks(document):
  return FENCE.findall(document.read_text(encoding="utf-8"))


def commands(text):
  """The command lines of a snippet as lists of words, without comments."""
  lines = text.replace("\\\n", "").splitlines()
  return [
    words for line in lines for part in line.split(" && ") if (words := shlex.split(part, comments=True))
  ]


def run_command(words):
  program, *arguments = words
  if program in PROGRAMS:
    arguments = [word for argument in arguments for word in complete(program, argument)]
    if program == "anystep-train":
      arguments += SHRUNKEN
    if arguments[:1] == ["train"]:
      arguments += ["--size=300"]
    assert PROGRAMS[program]([program, *arguments]) == 0, words
  else:
    check_command(words)


def complete(program, argument):
  return ELLIPSES[program] if argument in ("...", "…") else [argument]


def check_command(words):
  """A command that is not run is one of known form, whose flags, target or module exist."""
  program, *arguments = words
  if program in PROGRAMS:
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    unknown = {flag for flag in flags if not flag.startswith("--gin.")} - flags_of(program)
    # Beam has flags of its own.
    assert not unknown or "--runner" in flags, words
  elif program == "make":
    assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
  elif program == "pip":
    extras = [extra for argument in arguments for extra in re.findall(r"\[([\w,]+)\]", argument)]
    declared = importlib.metadata.metadata("anystep").get_all("Provides-Extra")
    assert arguments[0] == "install", words
    assert {name for extra in extras for name in extra.split(",")} <= {*declared, "gcp"}, words
  elif program == "python":
    assert arguments[0] in ("-c", "-m"), words
    assert arguments[0] == "-c" or importlib.util.find_spec(arguments[1]), words
  elif program == ".venv/bin/pytest":
    paths = [argument.partition("::")[0] for argument in arguments if argument.startswith("tests/")]
    assert all((ROOT / path).exists() for path in paths), words
  else:
    assert program in ("git", "cd", "docker", "gcloud", "java"), words


def flags_of(program):
  """The names of a program's flags with their dashes, those of all its commands."""
  if program == "anystep-cache":
    values = cache_main.define_flags()
    return {f"--{name}" for flag in values for name in (flag, f"no{flag}")}
  if program == "anystep-train":
    names = (
      *("gin_file", "gin_search_paths", "dry_run"),
      *("cache_if_missing", "cache_if_missing_limit_bytes", "accept_change"),
    )
    return {f"--{name}" for name in names}
  programs = {"anystep-convert": convert, "anystep-data": data_main, "anystep-vocab": vocabulary_main}
  parsers = [programs[program].make_parser()]
  names = set()
  for parser in parsers:
    for action in parser._actions:
      names.update(action.option_strings)
      if isinstance(action.choices, dict):
        parsers += action.choices.values()
  return names


MODEL = Path(seqio.__file__).parent / "test_data" / "sentencepiece" / "sentencepiece.model"
MY_TASKS = """
import functools

import anystep
import seqio

from anystep.tasks import sources

vocabulary = seqio.ByteVocabulary(extra_ids=125)
features = {"inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)}


@seqio.map_over_dataset
def as_pair(line):
  return {"inputs": line, "targets": line}


tokenize = functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False)

for name in ("my_task", "my_task_eval", "c4", "code", "wiki"):
  seqio.TaskRegistry.add(
    name,
    source=seqio.TextLineDataSource({"train": "data/train-*.txt", "validation": "data/validation.txt"}),
    preprocessors=[as_pair, tokenize, seqio.CacheDatasetPlaceholder()],
    output_features=features,
    task_cls=anystep.DeterministicTask if name == "my_task" else seqio.Task,
  )
seqio.MixtureRegistry.add("my_mixture", [("my_task", 1.0), ("my_task_eval", 1.0)])
seqio.MixtureRegistry.add("c4_and_code", [("c4", 0.7), ("code", 0.3)])
seqio.TaskRegistry.add(
  "my_records",
  source=sources.ParquetDataSource({"train": "data/records-*.parquet"}),
  preprocessors=[seqio.CacheDatasetPlaceholder()],
  output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(99))},
)
"""
MY_RUN = """
from __gin__ import dynamic_registration
import seqio

include 'gin_configs/runs/pretrain.gin'
include 'gin_configs/models/t5_1_1_tiny.gin'

MIXTURE_OR_TASK_NAME = 'c4_and_code'
MIXTURE_OR_TASK_MODULE = 'my_tasks'
CACHE_DIR = 'cache'
MODEL_DIR = 'MODEL_DIR'
TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 16}
VOCABULARY = @seqio.ByteVocabulary()
seqio.ByteVocabulary.extra_ids = 125
TRAIN_STEPS = 2
BATCH_SIZE = 8
EVAL_DATASET = None
"""
CACHING = "anystep-cache --module_import=my_tasks --output_cache_dir=cache --splits=train --num_shards=4"


def train_a_run():
  run_command(shlex.split(f"{CACHING} --tasks=c4,code,wiki"))
  run_command(["anystep-train", "--gin_file=my_run.gin"])


def cache_a_task():
  run_command(shlex.split(f"{CACHING} --tasks=my_task,c4,code"))


def cache_the_demos_task():
  run_command(
    [
      "anystep-cache",
      "--tasks=stdlib_span_corruption",
      "--module_import=anystep.tasks.stdlib",
      "--output_cache_dir=demo_output/cache",
    ]
  )


def cache_by_seqio():
  importlib.import_module("my_tasks")
  write_seqio_cache(Path("old_caches"), ["my_task"])


def take_pictures():
  # Grain's worker processes take the flags of the program that starts them.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  write_pictures("data", 40)


# What a document's reader has done before.
BEFORE = {
  "caching.md": cache_by_seqio,
  "checkpoints.md": train_a_run,
  "data.md": train_a_run,
  "features.md": cache_a_task,
  "images.md": take_pictures,
  "order.md": cache_the_demos_task,
}


def write_data():
  """Text and JSON lines, records, a tokenizer: of few words, with some that T5's own characters are not."""
  for name, lines in (("train-0", 2500), ("train-1", 2400), ("validation", 90)):
    text = "".join(f"{k}\n" if k % 3 else f"{name} {k}: {'Wörter ' * (k % 30)}\n" for k in range(lines))
    for directory in (Path("data"), Path("data/books")):
      directory.mkdir(parents=True, exist_ok=True)
      (directory / f"{name}.txt").write_text(text)
  Path("data/web").mkdir()
  for number in range(2):
    rows = [{"text": f"page {number} {k}: {'words ' * (20 + k)}", "url": k} for k in range(40)]
    Path(f"data/web/{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  records = [[k, k + 1] for k in range(40)]
  pyarrow.parquet.write_table(pyarrow.table({"targets": records}), "data/records-0.parquet")
  tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  special = ["<pad>", "</s>", "<unk>", "<|endoftext|>"]
  trainer = trainers.BpeTrainer(special_tokens=special, vocab_size=60, show_progress=False)
  tokenizer.train_from_iterator(["words of a tokenizer"], trainer)
  for name in ("tokenizer.json", "gpt2.json"):
    tokenizer.save(name)


def forget_tasks(names_before):
  """Removes what was registered since, and the module that did."""
  for module in ("my_tasks", "my_images", "my_pictures"):
    sys.modules.pop(module, None)
  for registry, names in names_before.items():
    for name in set(registry.names()) - names:
      registry.remove(name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder with the files that the documents' readers have; what is registered there is forgotten."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.setattr(files, "_stand_ins", dict(files._stand_ins))
  write_data()
  Path("models").mkdir()
  shutil.copyfile(MODEL, "models/t5.model")
  Path("my_tasks.py").write_text(MY_TASKS)
  Path("my_run.gin").write_text(MY_RUN)
  shutil.copyfile(ROOT / "gin_configs" / "examples" / "own_module.py", "my_networks.py")
  # The one name of T5X that a gin file of it binds.
  t5x = types.ModuleType("t5x.train")
  t5x.train = lambda get_dataset_fn=None: get_dataset_fn
  monkeypatch.setitem(sys.modules, "t5x", types.ModuleType("t5x"))
  monkeypatch.setitem(sys.modules, "t5x.train", t5x)
  sys.modules["t5x"].train = t5x
  return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_snippets_of_a_document_run_one_after_the_other(folder, document):
  names_before = {registry: set(registry.names()) for registry in (seqio.MixtureRegistry, seqio.TaskRegistry)}
  try:
    sys.path.insert(0, str(folder))
    BEFORE.get(document.name, lambda: None)()
    scope: dict = {}
    for number, (language, use, text) in enumerate(blocks(document)):
      run_snippet(language, use, text, scope, f"{document.name}, snippet {number}", names_before)
  finally:
    forget_tasks(names_before)


def run_snippet(language, use, text, scope, title, names_before):
  assert language in LANGUAGES, title
  if use.startswith("file="):
    name = use.removeprefix("file=")
    Path(name).write_text(text)
    if name == "my_tasks.py":
      forget_tasks(names_before)
  elif language == "python":
    if use != "torch" or importlib.util.find_spec("torch"):
      exec(compile(text, title, "exec"), scope)
  elif language == "gin":
    with gin.unlock_config():
      gin.parse_config(text)
    gin.clear_config()
  elif language == "sh":
    for words in commands(text):
      (check_command if use == "elsewhere" else run_command)(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_that_is_spoken_of_is_some_programs(document):
  text = FENCE.sub("", document.read_text(encoding="utf-8"))
  spoken_of = set(re.findall(r"(?<![\w-])--\w+", text))
  flags = set().union(*(flags_of(program) for program in PROGRAMS))
  assert spoken_of - flags - OTHER_FLAGS == set()


def test_the_recording_shows_a_run_that_came_out_as_the_one_that_was_not_killed():
  texts = "".join(ElementTree.parse(ROOT / "docs" / "images" / "demo.svg").getroot().itertext())
  assert re.search(
    r"killed at step \d+, resumed from \d+: 200/200 batches identical, losses identical,"
    r" parameters identical",
    texts,
  )
