"""`anystep-data` says of caches, plans and model directories what the order specification does."""

import html.parser
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import caches
import numpy as np
import pytest
from explained_rows import build_mixture, explained_rows
from unimportable import WITHOUT

import oracle
from anystep.errors import AnystepError
from anystep.inspection.history import history, totals
from anystep.inspection.stats import CacheStats, mixture_shares
from anystep.plans.plan import Plan
from anystep.programs.command_line import run_program
from anystep.tasks.data_program.main import main, make_parser

KEYS = ["step", "row", "task", "split", "epoch", "unit", "shard", "place", "examples"]
EXAMPLE_KEYS = ["index", "record", "source_shard", "source_name", "source_place"]
MIXTURE = ["--rates=a=2,b:inner=1", "--batch_size=6", "--seed=3"]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
  """50 examples in 4 shards; nobody changes it."""
  return caches.build(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def own_cache(shared_cache, tmp_path):
  """A copy of `shared_cache` to be changed."""
  shutil.copytree(shared_cache.root, tmp_path / "own")
  return shared_cache.at(tmp_path / "own")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """Where the caches of a mixture are; nobody changes them."""
  path = tmp_path_factory.mktemp("mixture")
  build_mixture(path)
  return path


@pytest.fixture(scope="module")
def built(root):
  """The caches below `root` by task name."""
  known = {"a": 23, "b:inner": 10, "c": 15}
  examples = {name: [caches.example_of(k) for k in range(size)] for name, size in known.items()}
  return {
    name: caches.SmallCache(root=root, task=name, split="train", examples=examples[name]) for name in known
  }


@pytest.fixture(scope="module")
def started(built):
  """The plan that the arguments in MIXTURE describe."""
  opened = [built[name].open() for name in ("a", "b:inner")]
  return Plan.start(opened, rates={"a": "2", "b:inner": "1"}, batch_size=6, seed=3)


@pytest.fixture(scope="module")
def plan(started, built):
  """Two tasks, then one of them and the third."""
  return started.change(5, rates={"a": 1, "c": 2}, caches=[built["c"].open()], reason="c has come")


@pytest.fixture(scope="module")
def plan_file(plan, tmp_path_factory):
  """A file of `plan`."""
  path = tmp_path_factory.mktemp("plans") / "plan.json"
  path.write_text(plan.to_json())
  return path


@pytest.fixture
def model_dir(plan, root, tmp_path):
  """What a trainer leaves of a run under `plan`: checkpoints of steps 4 and 8, and an unfinished one."""
  directory = tmp_path / "model"
  for step in (4, 8, 12):
    checkpoint = directory / f"checkpoint_{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "data_plan.json").write_text(plan.to_json())
    if step < 12:
      (checkpoint / "commit_success.txt").write_text("")
  (directory / "data_plan.json").write_text(plan.to_json())
  (directory / "data_caches.json").write_text(json.dumps({"version": 1, "cache_dirs": [str(root)]}))
  return directory


def what_was_at(cache, *arguments, steps="0:3", batch_size=12):
  return [
    "what-was-at",
    f"--cache_dir={cache.root}",
    f"--task={cache.task}",
    f"--batch_size={batch_size}",
    f"--steps={steps}",
    *arguments,
  ]


def printed(capsys, *arguments, status=0):
  """The lines on stdout of a run that ends well; on stderr is progress alone, where the machine is slow."""
  assert main([str(argument) for argument in arguments]) == status
  captured = capsys.readouterr()
  assert all(
    re.match(r"(verify|stats) \S+ \S+: |token ids are|\S+: a page of ", line)
    for line in captured.err.splitlines()
  )
  return captured.out.splitlines()


def objects(capsys, *arguments, status=0):
  """The JSON objects that a run prints."""
  return [json.loads(line) for line in printed(capsys, *arguments, "--format=jsonl", status=status)]


def status_and_line(capsys, arguments):
  """The exit status of a run that fails, and its one line on stderr."""
  with pytest.raises(SystemExit) as ended:
    run_program(lambda: main([str(argument) for argument in arguments]))
  captured = capsys.readouterr()
  (line,) = captured.err.splitlines()
  assert line.startswith(f"ERROR code={ended.value.code} kind=")
  return ended.value.code, line


def cells(lines, title):
  """The cells of a plain table below its title, without its header, columns split at two spaces."""
  start = lines.index(title)
  rows = lines[start + 2 : lines.index("", start)]
  return [re.split(r" {2,}", row.strip()) for row in rows]


@pytest.fixture(params=["cache", "plan", "model directory"])
def source(request, root, plan_file, model_dir):
  """Arguments that name a plan over the mixture's caches, one for each kind of source."""
  return {
    "cache": [f"--cache_dir={root}", *MIXTURE],
    "plan": [f"--plan={plan_file}", f"--cache_dir={root}"],
    "model directory": [f"--model_dir={model_dir}"],
  }[request.param]


@pytest.fixture
def source_plan(source, plan, started):
  """The plan that `source` names."""
  return started if MIXTURE[0] in source else plan


# What was at


@pytest.mark.parametrize(
  ("arguments", "order"),
  [
    ([], {}),
    (["--seed=7"], {"seed": 7}),
    (["--epoch_policy=same"], {"epoch_policy": "same"}),
    (["--epoch_policy=global", "--seed=3"], {"epoch_policy": "global", "seed": 3}),
    (["--lanes=1"], {"lanes": 1}),
    (["--lanes=6", "--num_epochs=3"], {"lanes": 6, "num_epochs": 3}),
  ],
)
@pytest.mark.parametrize("steps", [(0, 2), (3, 6), (11, 13)])
def test_json_lines_are_the_oracles(shared_cache, capsys, arguments, order, steps):
  start, stop = steps
  rows = objects(capsys, *what_was_at(shared_cache, *arguments, steps=f"{start}:{stop}"))
  assert rows == oracle.what_was_at(shared_cache.manifest, 12, start, stop, **order)
  for row in rows:
    assert list(row) == KEYS
    assert [list(example) for example in row["examples"]] == [EXAMPLE_KEYS]


def test_rows_are_the_oracles_from_every_kind_of_source(source, source_plan, built, capsys):
  found = objects(capsys, "what-was-at", *source, "--steps=2:8")
  assert found == explained_rows(source_plan, built, range(2, 8))


def test_rows_of_the_named_tasks_alone_are_printed(source, built, plan, capsys):
  expected = [row for row in explained_rows(plan, built, range(4)) if row["task"] == "b:inner"]
  assert objects(capsys, "what-was-at", *source, "--task=b:inner", "--steps=0:4") == expected


def test_several_roots_are_looked_through(built, plan, capsys, tmp_path):
  shutil.copytree(built["b:inner"].directory, tmp_path / "b" / "inner")
  (tmp_path / "empty").mkdir()
  arguments = [f"--cache_dir={tmp_path / 'empty'},{tmp_path}", f"--cache_dir={built['a'].root}"]
  rows = objects(
    capsys, "what-was-at", *arguments, "--rates=a=2", "--rates=b:inner=1", *MIXTURE[1:], "--steps=0:2"
  )
  assert rows == explained_rows(plan, built, range(2))


def test_the_last_batchs_padding_is_left_out(shared_cache, capsys):
  rows = objects(capsys, *what_was_at(shared_cache, "--num_epochs=1", steps="4:5"))
  assert sorted(row["unit"] for row in rows) == [48, 49]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_any_batch_size_is_explained(shared_cache, capsys, batch_size):
  rows = objects(capsys, *what_was_at(shared_cache, steps="1:2", batch_size=batch_size))
  assert rows == oracle.what_was_at(shared_cache.manifest, batch_size, 1, 2)


@pytest.mark.parametrize("row", [0, 5, 11])
def test_one_row_is_that_of_the_batch(shared_cache, capsys, row):
  whole = objects(capsys, *what_was_at(shared_cache))
  alone = objects(capsys, *what_was_at(shared_cache, f"--row={row}"))
  assert alone == [found for found in whole if found["row"] == row]
  assert len(alone) == 3


def test_a_row_is_left_out_of_batches_that_are_too_small(plan, root, tmp_path, capsys):
  path = tmp_path / "larger.json"
  path.write_text(plan.change(7, batch_size=12).to_json())
  rows = objects(capsys, "what-was-at", f"--plan={path}", f"--cache_dir={root}", "--steps=5:9", "--row=8")
  assert [row["step"] for row in rows] == [7, 8]


def test_another_split_is_read_where_it_is_named(tmp_path, capsys):
  caches.build(tmp_path, num_examples=10, num_shards=2)
  validation = caches.build(tmp_path, split="validation", num_examples=20, num_shards=2)
  rows = objects(capsys, *what_was_at(validation, "--split=validation", batch_size=4))
  assert rows == oracle.what_was_at(validation.manifest, 4, 0, 3)
  assert {row["split"] for row in rows} == {"validation"}


def test_text_says_the_same_in_words(shared_cache, capsys):
  lines = printed(capsys, *what_was_at(shared_cache, "--seed=7", steps="4:6"))
  pattern = re.compile(
    r"step (\d+) row (\d+): (\S+) (\S+) epoch (\d+) unit (\d+) = shard (\d+) place (\d+), "
    r"example (\d+) from (.+) place (\d+)"
  )
  found = [pattern.fullmatch(line).groups() for line in lines]
  expected = []
  for row in oracle.what_was_at(shared_cache.manifest, 12, 4, 6, seed=7):
    (example,) = row["examples"]
    facts = [row[key] for key in KEYS[:-1]] + [
      example[key] for key in ("index", "source_name", "source_place")
    ]
    expected.append(tuple(map(str, facts)))
  assert found == expected


# When was


@pytest.mark.parametrize("index", [0, 4, 9])
def test_every_row_with_an_example_is_printed(source, built, plan, capsys, index):
  rows = explained_rows(plan, built, range(5))
  expected = [r for r in rows if (r["task"], r["examples"][0]["index"]) == ("b:inner", index)]
  found = objects(capsys, "when-was", *source, "--task=b:inner", f"--index={index}", "--steps=0:5")
  assert found == expected
  assert all(list(row) == KEYS for row in found)


def test_a_source_shard_goes_by_name_or_number(built, plan_file, root, capsys):
  arguments = ["when-was", f"--plan={plan_file}", f"--cache_dir={root}", "--task=c", "--steps=0:50"]
  index = 3 + 0 + 2
  by_index = objects(capsys, *arguments, f"--index={index}")
  assert len(by_index) > 3
  assert objects(capsys, *arguments, "--source=2", "--place=2") == by_index
  name = built["c"].manifest["source_shards"][2]["name"]
  assert objects(capsys, *arguments, f"--source={name}", "--place=2") == by_index


def test_without_steps_all_of_a_plan_that_ends_are_meant(shared_cache, capsys):
  arguments = [f"--cache_dir={shared_cache.root}", "--task=demo", "--batch_size=12", "--num_epochs=3"]
  lines = printed(capsys, "when-was", *arguments, "--index=7")
  expected = oracle.what_was_at(shared_cache.manifest, 12, 0, 13, num_epochs=3)
  steps = [row["step"] for row in expected if row["examples"][0]["index"] == 7]
  assert [int(line.split()[1]) for line in lines] == steps
  assert len(steps) == 3


def test_without_steps_all_trained_ones_of_a_model_directory_are_meant(model_dir, built, plan, capsys):
  rows = explained_rows(plan, built, range(8))
  expected = [r for r in rows if (r["task"], r["examples"][0]["index"]) == ("a", 1)]
  assert objects(capsys, "when-was", f"--model_dir={model_dir}", "--task=a", "--index=1") == expected


def test_hits_in_packed_rows_are_a_line_each_with_their_number(root, capsys):
  where = [f"--cache_dir={root}", *MIXTURE, "--packing=greedy", '--feature_lengths={"inputs": 9}']
  command = ["when-was", *where, "--task=a", "--index=8", "--index=4", "--index=7", "--steps=0:20"]
  rows = objects(capsys, *command)
  places = [(row["step"], row["row"]) for row in rows]
  assert places == sorted(set(places)), "each row once"
  hits = [
    (row, number, example)
    for row in rows
    for number, example in enumerate(row["examples"], 1)
    if example["index"] in (4, 7, 8)
  ]
  shared = [row for row in rows if {4, 8} <= {example["index"] for example in row["examples"]}]
  assert shared, "two of them share a row"
  assert len(hits) == len(rows) + len(shared)
  lines = printed(capsys, *command)
  for line, (row, number, example) in zip(lines, hits, strict=True):
    assert line.startswith(f"step {row['step']} row {row['row']}: a train ")
    assert f", example {example['index']} from " in line
    assert line.endswith(f", number {number} of {len(row['examples'])} in the row")


# Show


def test_rows_are_shown_with_their_features_as_they_were_cached(source, built, plan, capsys):
  rows = objects(capsys, "show", *source, "--steps=2:4", "--cached")
  for row, expected in zip(rows, explained_rows(plan, built, range(2, 4)), strict=True):
    (example,), (origin,) = row["examples"], expected["examples"]
    assert {name: example[name] for name in EXAMPLE_KEYS} == origin
    cached = built[row["task"]].open()[origin["index"]]
    assert list(example["features"]) == sorted(cached)
    for name, values in cached.items():
      feature = example["features"][name]
      assert np.array_equal(np.array(feature["values"]).reshape(values.shape), values)
      assert feature.get("length") == (len(values) if values.ndim else None)


def test_shown_rows_in_words_have_a_line_for_each_feature(root, capsys):
  command = ["show", f"--cache_dir={root}", *MIXTURE, "--steps=0:1", "--row=2", "--cached"]
  lines = printed(capsys, *command)
  (row,) = objects(capsys, *command)
  features = row["examples"][0]["features"]
  assert lines[0].startswith("step 0 row 2: ")
  lengths = {name: f" ({feature['length']})" for name, feature in features.items() if "length" in feature}
  assert lines[1:] == [
    f"  {name}{lengths.get(name, '')}: {feature['values']}" for name, feature in features.items()
  ]
  assert len(lines) == 5


def test_ids_without_a_vocabulary_come_with_a_word_on_how_to_get_text(root, capsys):
  assert main(["show", f"--cache_dir={root}", *MIXTURE, "--steps=0:1", "--row=0", "--cached"]) == 0
  (line,) = capsys.readouterr().err.splitlines()
  assert line == "token ids are shown as numbers: --module_import=MODULE_OF_THE_TASK makes text of them"


SHOWN_TASK = """
import seqio

vocabulary = seqio.ByteVocabulary(extra_ids=10)
seqio.TaskRegistry.add(
  "shown",
  source=seqio.TextLineDataSource({"train": "nowhere.txt"}),
  preprocessors=[seqio.preprocessors.tokenize],
  output_features={"inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)},
)
"""


def test_token_ids_are_decoded_with_the_registered_tasks_vocabularies(tmp_path, monkeypatch, capsys):
  import seqio

  from anystep.tasks.registry.fingerprint import reader_part

  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  pathlib.Path("shown_tasks.py").write_text(SHOWN_TASK)
  vocabulary = seqio.ByteVocabulary(extra_ids=10)

  def example_of(ordinal):
    targets = np.array([*vocabulary.encode(f"größer\n{ordinal}"), 268, 1], np.int32)
    return {"inputs": np.zeros(0, np.int32), "targets": targets, "id": np.array(b"line", object)}

  ids = caches.FEATURES["inputs"]
  features = {"inputs": ids, "targets": ids, "id": caches.LARGE_FEATURES["blob"]}
  built = caches.build(
    tmp_path, task="shown", num_examples=3, num_shards=1, features=features, example_of=example_of
  )
  arguments = ["show", f"--cache_dir={tmp_path}", "--task=shown", "--batch_size=3", "--steps=0:1", "--cached"]
  decoded = [*arguments, "--module_import=shown_tasks"]
  # The cache says that another task made it.
  status, line = status_and_line(capsys, decoded)
  assert (status, "kind=task_changed" in line) == (76, True)

  def sign(document):
    task = seqio.TaskRegistry.get("shown")
    reader = reader_part(task, cache_at="placeholder", task_feature_lengths=None)
    fingerprint = caches.Fingerprint(reader=reader, provenance={})
    described = {"reader_sha256": fingerprint.reader_sha256, "reader": reader, "provenance": {}}
    document["fingerprint"] = described

  caches.tamper(built, sign)
  for row in objects(capsys, *decoded):
    (example,) = row["examples"]
    ordinal = [0, 1, 2][sum([1, 0, 2, 0][: example["source_shard"]]) + example["source_place"]]
    text = f"größer\n{ordinal}<0></s>"
    assert example["features"] == {
      "id": {"text": "line"},
      "inputs": {"length": 0, "text": ""},
      "targets": {"length": len(text.encode()) - 5, "text": text},
    }
  lines = printed(capsys, *decoded)
  assert sum(re.fullmatch(r"  targets \(12\): größer\\n\d<0></s>", line) is not None for line in lines) == 3
  monkeypatch.setattr(seqio.TaskRegistry, "names", lambda: ["showm"])
  status, line = status_and_line(capsys, decoded)
  assert (status, "kind=task_unknown" in line, "nearest=showm" in line) == (64, True, True)


# Plans


def test_a_plans_history_is_shown_from_every_kind_of_source(source, source_plan, capsys):
  trained = 8 if source[0].startswith("--model_dir") else None
  segments = [{"kind": "segment", **segment} for segment in history(source_plan)]
  assert objects(capsys, "plan", "show", *source) == [
    *segments,
    {"kind": "plan", **totals(source_plan, trained)},
  ]


def test_a_plans_history_is_a_table_for_people(plan_file, plan, capsys):
  lines = printed(capsys, "plan", "show", f"--plan={plan_file}")
  assert cells(lines, "History") == [
    ["0", "6", "1", "a", "2", "66.6667%", "0", "0", "start"],
    ["b:inner", "1", "33.3333%", "0", "0"],
    ["5", "6", "1", "a", "1", "33.3333%", "20", "0", "c has come"],
    ["c", "2", "66.6667%", "0", "0"],
  ]
  assert cells(lines, "Tasks") == [
    ["a", "23", "4", "4", "preshuffled"],
    ["b:inner", "10", "2", "2", "preshuffled"],
    ["c", "15", "4", "1", "as_is"],
  ]
  facts = dict(row for row in cells(lines, "Plan") if len(row) == 2)
  assert facts["sha256"] == plan.sha256
  assert facts["num steps"] == "the data never ends"


def test_tables_are_whole_and_plain_where_no_terminal_shows_them(plan, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("COLUMNS", "20")
  monkeypatch.setenv("FORCE_COLOR", "1")
  path, reason = tmp_path / "plan.json", f"[bold]why[/bold] :smile: {'so ' * 100}much"
  path.write_text(plan.change(6, batch_size=12, reason=reason).to_json())
  lines = printed(capsys, "plan", "show", f"--plan={path}")
  assert any(line.endswith(f"  {reason}") for line in lines)
  assert "\x1b" not in "".join(lines)


def test_tables_fit_into_a_terminal(plan_file, plan, monkeypatch, capsys):
  monkeypatch.setenv("COLUMNS", "60")
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  text = "\n".join(printed(capsys, "plan", "show", f"--plan={plan_file}"))
  assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())) <= 60
  assert plan.sha256[-10:] in text


def test_the_newest_committed_checkpoint_has_the_plan_where_the_run_has_none(model_dir, plan, capsys):
  (model_dir / "data_plan.json").unlink()
  changed = plan.change(8, batch_size=12)
  (model_dir / "checkpoint_8" / "data_plan.json").write_text(changed.to_json())
  *_, whole = objects(capsys, "plan", "show", f"--model_dir={model_dir}")
  assert (whole["sha256"], whole["trained_steps"]) == (changed.sha256, 8)


def test_a_started_plan_is_pythons(root, plan, built, tmp_path, capsys):
  path = tmp_path / "start.json"
  line, unknown = printed(
    capsys,
    *("plan", "start", f"--cache_dir={root}", *MIXTURE, "--num_epochs=2", "--lanes=2", "--epoch_policy=same"),
    *('--feature_lengths={"inputs": 5}', f"--output={path}"),
  )
  opened = [built[name].open() for name in ("a", "b:inner")]
  expected = Plan.start(
    opened,
    rates={"a": "2", "b:inner": "1"},
    batch_size=6,
    seed=3,
    num_epochs=2,
    lanes=2,
    epoch_policy="same",
    feature_lengths={"inputs": 5},
  )
  assert path.read_text() == expected.to_json()
  assert expected.sha256 in line
  assert unknown.startswith("what the lengths cut is not known: ")
  assert unknown.endswith("add --module_import=MODULE_OF_THE_TASK")


def test_changes_and_skips_are_pythons(plan_file, plan, built, root, tmp_path, capsys):
  changed, skipped = tmp_path / "changed.json", tmp_path / "skipped.json"
  printed(
    capsys,
    *("plan", "change", f"--plan={plan_file}", "--step=9", "--rates=a=1,b:inner=1/3", "--batch_size=12"),
    *("--lanes=3", "--reason=more of a", f"--output={changed}"),
  )
  expected = plan.change(9, rates={"a": "1", "b:inner": "1/3"}, batch_size=12, lanes=3, reason="more of a")
  assert changed.read_text() == expected.to_json()
  printed(capsys, "plan", "skip", f"--plan={changed}", "--steps=20:30", f"--output={skipped}")
  assert skipped.read_text() == expected.skip(20, 30).to_json()


@pytest.mark.parametrize("command", [["skip", "--steps=7:9"], ["change", "--step=7", "--batch_size=12"]])
def test_caches_that_are_named_are_compared_with_the_plan(plan_file, built, root, tmp_path, capsys, command):
  output = tmp_path / "plan.json"
  arguments = ["plan", *command, f"--plan={plan_file}", f"--output={output}"]
  printed(capsys, *arguments)
  without = output.read_text()
  # Roots need not have the caches of all tasks.
  shutil.copytree(built["a"].directory, tmp_path / "some" / "a")
  for directory in (root, tmp_path / "some"):
    printed(capsys, *arguments, f"--cache_dir={directory}", "--overwrite")
    assert output.read_text() == without
  caches.build(tmp_path / "others", task="a", num_examples=24)
  status, line = status_and_line(capsys, [*arguments, f"--cache_dir={tmp_path / 'others'}", "--overwrite"])
  assert (status, "kind=plan_cache task=a" in line) == (76, True)


def test_a_packed_plan_goes_through_every_command(tmp_path, capsys):
  root = tmp_path / "caches"
  built = build_mixture(root)
  lengths = {"inputs": 9, "targets": 8}
  start, changed = tmp_path / "start.json", tmp_path / "changed.json"
  printed(
    capsys,
    *("plan", "start", f"--cache_dir={root}", *MIXTURE, "--packing=best_fit", "--num_epochs=2"),
    *(f"--feature_lengths={json.dumps(lengths)}", f"--output={start}"),
  )
  opened = {name: built[name].open() for name in ("a", "b:inner")}
  plan = Plan.start(
    opened.values(),
    rates={"a": "2", "b:inner": "1"},
    batch_size=6,
    seed=3,
    num_epochs=2,
    feature_lengths=lengths,
    packing="best_fit",
  )
  assert start.read_text() == plan.to_json()
  where = [f"--plan={start}", f"--cache_dir={root}"]
  expected = explained_rows(plan, built, range(plan.num_steps))
  assert max(len(row["examples"]) for row in expected) > 1
  assert objects(capsys, "what-was-at", *where, f"--steps=0:{plan.num_steps}") == expected
  found = objects(capsys, "when-was", *where, "--task=a", "--index=7")
  holds = [r for r in expected if r["task"] == "a" and 7 in [e["index"] for e in r["examples"]]]
  assert found == holds
  batch = objects(capsys, "plan", "batch", *where, "--step=1")
  assert [row["unit"] for row in batch] == plan.batch(1).unit.tolist()
  tasks = objects(capsys, "plan", "show", *where)[-1]["tasks"]
  assert {name: task["unit_table"] for name, task in tasks.items()} == {
    name: task.unit_table for name, task in plan.tasks.items()
  }
  printed(
    capsys,
    *("plan", "change", *where, "--step=2", "--rates=a=1,c=1", f"--output={changed}"),
  )
  rates, new = {"a": "1", "c": "1"}, [built["c"].open()]
  assert changed.read_text() == plan.change(2, rates=rates, caches=new).to_json()


def test_a_mixtures_tokens_are_those_of_its_packs(built, root, tmp_path, capsys):
  flags = [*MIXTURE, "--packing=greedy", '--feature_lengths={"inputs": 9}']
  shares = objects(capsys, "stats", f"--cache_dir={root}", *flags, "--steps=0:6")[2:]
  tables = {}
  for name in ("a", "b:inner"):
    plan = Plan.start(built[name].open(), batch_size=1, packing="greedy", feature_lengths={"inputs": 9})
    tables[name] = plan.unit_tables[name].real_tokens["inputs"] / plan.tasks[name].num_units
  tokens = {share["task"]: share["rows"] * tables[share["task"]] for share in shares}
  for share in shares:
    wanted = 100 * tokens[share["task"]] / sum(tokens.values())
    assert share["token_percent"] == pytest.approx(wanted)


def test_a_new_tasks_cache_is_found_below_the_roots(root, built, model_dir, tmp_path, capsys):
  start = Plan.start(built["a"].open(), batch_size=6)
  path, output = tmp_path / "start.json", tmp_path / "changed.json"
  path.write_text(start.to_json())
  arguments = ["plan", "change", "--step=2", "--rates=a=1,b:inner=2", f"--output={output}"]
  expected = start.change(2, rates={"a": "1", "b:inner": "2"}, caches=[built["b:inner"].open()])
  printed(capsys, *arguments, f"--plan={path}", f"--cache_dir={root}")
  assert output.read_text() == expected.to_json()
  # A model directory knows the roots itself.
  for place in (model_dir, model_dir / "checkpoint_8"):
    (place / "data_plan.json").write_text(start.to_json())
  arguments[2] = "--step=8"
  printed(capsys, *arguments, f"--model_dir={model_dir}", "--overwrite")
  expected = start.change(8, rates={"a": "1", "b:inner": "2"}, caches=[built["b:inner"].open()])
  assert output.read_text() == expected.to_json()


@pytest.mark.parametrize(
  "command", [["change", "--step=7", "--batch_size=12"], ["skip", "--steps=7:9"]], ids=lambda c: c[0]
)
def test_the_trained_past_of_a_model_directory_stays(model_dir, tmp_path, capsys, command):
  output = tmp_path / "plan.json"
  status, line = status_and_line(capsys, ["plan", *command, f"--model_dir={model_dir}", f"--output={output}"])
  assert status == 78
  assert 'kind=step_trained expected="a step not yet trained: 8 or later" got=7' in line
  assert not output.exists()


def test_an_output_is_replaced_where_that_is_asked_for_alone(plan_file, tmp_path, capsys):
  output = tmp_path / "plan.json"
  output.write_text("mine")
  arguments = ["plan", "skip", f"--plan={plan_file}", "--steps=7:9", f"--output={output}"]
  status, line = status_and_line(capsys, arguments)
  assert (status, output.read_text()) == (73, "mine")
  assert "kind=output_exists" in line
  printed(capsys, *arguments, "--overwrite")
  assert json.loads(output.read_text())["version"] == 1
  assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
  status, line = status_and_line(capsys, [*arguments[:-1], f"--output={tmp_path}/none/plan.json"])
  assert (status, "kind=output_directory" in line) == (73, True)


def test_plans_are_compared_by_field_and_by_row(plan_file, plan, model_dir, tmp_path, capsys):
  other = tmp_path / "other.json"
  other.write_text(plan.change(6, batch_size=12).to_json())
  (model_dir / "data_plan.json").write_text(plan.to_json())
  found = objects(capsys, "plan", "diff", model_dir, other, status=1)
  assert [line["field"] for line in found[:-1]] == ["segments[6]"]
  assert found[-1] == {"first_different_step": 6}
  lines = printed(capsys, "plan", "diff", plan_file, other, status=1)
  assert cells(lines, "Differences") == [["segments[6]", "-", "is there"]]
  assert lines[-1] == "The plans are not the same; their rows differ from step 6 on."
  lines = printed(capsys, "plan", "diff", plan_file, model_dir)
  assert lines == ["The plans are the same; their rows differ at no step."]
  assert objects(capsys, "plan", "diff", plan_file, plan_file) == [{"first_different_step": None}]


def test_a_planned_batch_has_a_row_for_each(source, plan, built, capsys):
  rows = objects(capsys, "plan", "batch", *source, "--step=3")
  names = ("step", "row", "task", "unit", "epoch", "shard", "place")
  assert rows == [{name: row[name] for name in names} for row in explained_rows(plan, built, range(3, 4))]
  lines = printed(capsys, "plan", "batch", *source, "--step=3")
  assert cells(lines, "Step 3") == [[str(row[name]) for name in names[1:]] for row in rows]


def test_a_planned_batch_needs_no_cache_and_shows_padding(shared_cache, tmp_path, capsys):
  path = tmp_path / "plan.json"
  path.write_text(Plan.start(shared_cache.open(), batch_size=12, num_epochs=1).to_json())
  rows = objects(capsys, "plan", "batch", f"--plan={path}", "--step=4")
  assert [row["unit"] for row in rows if row["task"]] == [48, 49]
  assert [row["place"] for row in rows if row["task"] is None] == [None] * 10
  assert cells(printed(capsys, "plan", "batch", f"--plan={path}", "--step=4"), "Step 4")[-1][1] == "padding"


# Stats


def test_all_tasks_and_splits_below_a_root_are_counted(root, built, capsys, tmp_path):
  shutil.copytree(root, tmp_path / "copy")
  validation = caches.build(
    tmp_path / "copy", task="b:inner", split="validation", num_examples=5, num_shards=1
  )
  (tmp_path / "copy" / "loop").symlink_to(tmp_path / "copy")
  found = objects(capsys, "stats", f"--cache_dir={tmp_path / 'copy'}", '--feature_lengths={"inputs": 3}')
  expected = [built["a"], built["b:inner"], validation, built["c"]]
  assert found == [CacheStats.of(cache.open()).to_json() | {"read": None} for cache in expected]
  lines = printed(capsys, "stats", f"--cache_dir={tmp_path / 'copy'}", "--split=train")
  assert [row[:3] for row in cells(lines, "Caches")] == [
    ["a", "train", "23"],
    ["b:inner", "train", "10"],
    ["c", "train", "15"],
  ]


def test_a_mixtures_real_shares_stand_beside_those_planned(source, source_plan, built, capsys):
  stats = {name: CacheStats.of(built[name].open()) for name in source_plan.tasks}
  shares = mixture_shares(source_plan, range(7), stats, feature_lengths={})
  found = objects(capsys, "stats", *source, "--steps=0:7")
  counts = [stats[name].to_json() | {"read": None} for name in source_plan.task_names]
  assert found == [*counts, *shares]
  table = cells(printed(capsys, "stats", *source, "--steps=0:7"), "Mixture in steps 0:7")
  assert [(row[0], int(row[3])) for row in table] == [(share["task"], share["rows"]) for share in shares]


def test_a_histogram_is_drawn_with_letters(shared_cache, capsys):
  lines = printed(capsys, "stats", f"--cache_dir={shared_cache.root}", "--task=demo")
  bars = cells(lines, "Tokens of demo train: inputs")
  lengths = [len(example["inputs"]) for example in shared_cache.examples]
  assert [(label, int(count)) for label, count, _ in bars] == [
    ("0", lengths.count(0)),
    ("1", lengths.count(1)),
    ("2 to 3", lengths.count(2) + lengths.count(3)),
    ("4 to 7", sum(length >= 4 for length in lengths)),
  ]
  assert len(bars[-1][2]) == 40


class PageReader(html.parser.HTMLParser):
  """The text and the tags of a page; refuses one whose tags do not close."""

  def __init__(self, text):
    super().__init__()
    self.texts, self.tags, self.open = [], [], []
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag != "meta":
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_startendtag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.texts.append(data.strip())


def test_the_page_has_the_numbers_and_needs_nothing_else(root, plan_file, plan, built, tmp_path, capsys):
  path = tmp_path / "page.html"
  arguments = ["stats", f"--plan={plan_file}", f"--cache_dir={root}", "--steps=0:9", f"--html={path}"]
  printed(capsys, *arguments, '--feature_lengths={"inputs": 3}')
  page = PageReader(path.read_text())
  stats = {name: CacheStats.of(cache.open()) for name, cache in built.items()}
  for name in ("a", "b:inner"):
    for counts in stats[name].features.values():
      assert f"{counts.tokens:,}" in page.texts
      assert all(f"{examples:,}" in page.texts for _, _, examples in counts.histogram())
  for share in mixture_shares(plan, range(9), stats, feature_lengths={"inputs": 3}):
    assert f"{share['planned_percent']:.6g}%" in page.texts
    assert f"{share['real_percent']:.6g}%" in page.texts
  assert sum(tag == "svg" for tag, _ in page.tags) == 1 + 2 * 3
  assert not any(name in ("src", "href") for _, attrs in page.tags for name in attrs)
  assert not any(tag in ("script", "link", "img") for tag, _ in page.tags)
  assert "prefers-color-scheme: dark" in path.read_text()
  status, line = status_and_line(capsys, arguments)
  assert (status, "kind=output_exists" in line) == (73, True)


# Verify


def test_a_cache_as_written_is_said_to_be_so_split_by_split(tmp_path, capsys):
  caches.build(tmp_path, num_examples=1500, num_shards=2)
  built = caches.build(tmp_path, split="validation", num_examples=20, num_shards=1)
  assert main(["verify", f"--cache_dir={tmp_path}", "--task=demo"]) == 0
  captured = capsys.readouterr()
  sizes = {
    split: sum(
      path.stat().st_size for path in built.directory.glob(f"*{split}.*") if "manifest" not in path.name
    )
    for split in ("train", "validation")
  }
  assert captured.out.splitlines() == [
    f"demo train: 1,500 examples in 6 files, {sizes['train']:,} bytes: as written",
    f"demo validation: 20 examples in 4 files, {sizes['validation']:,} bytes: as written",
  ]
  assert captured.err == ""


def test_the_caches_of_every_kind_of_source_are_verified(source, root, capsys):
  tasks = [
    line.split(" train: ")[0] for line in printed(capsys, "verify", *source[:1], f"--cache_dir={root}")
  ]
  assert tasks == ["a", "b:inner", "c"]


def test_one_split_is_verified_where_it_is_named(tmp_path, capsys):
  built = caches.build(tmp_path, num_examples=10, num_shards=2)
  caches.build(tmp_path, split="validation", num_examples=20, num_shards=1)
  (built.directory / "train.array_record-00000-of-00002").unlink()
  assert main(["verify", f"--cache_dir={tmp_path}", "--task=demo", "--split=validation"]) == 0
  assert capsys.readouterr().out.startswith("demo validation: 20 examples")


@pytest.mark.parametrize(
  "name", ["train.array_record-00002-of-00004", "train.lengths-00003-of-00004.npy", "stats.train.json"]
)
def test_a_changed_byte_ends_verify_with_the_file_that_has_it(own_cache, capsys, name):
  path = own_cache.directory / name
  caches.flip(path, path.stat().st_size // 2)
  with pytest.raises(SystemExit) as ended:
    run_program(lambda: main(["verify", f"--cache_dir={own_cache.root}", "--task=demo"]))
  assert ended.value.code == 65
  captured = capsys.readouterr()
  assert captured.out == ""
  line = captured.err.splitlines()[-1]
  assert line.startswith(f"ERROR code=65 kind=file_changed path={path} expected=")


# What is refused


@pytest.mark.parametrize(
  "arguments",
  [
    [],
    ["what-was-when"],
    ["verify"],
    ["stats"],
    ["plan"],
    ["plan", "show"],
    ["plan", "diff", "x"],
    ["verify", "--cache_dir=x", "--task=demo", "--unknown=1"],
    ["verify", "--cache=x"],
    ["verify", "--cache_dir="],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--steps=0:1"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8"],
    ["what-was-at", "--cache_dir=x", "--batch_size=8", "--steps=0:1"],
    *(
      ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", f"--steps={steps}"]
      for steps in ("", "3", "3:", ":3", "3:3", "4:3", "-1:3", "a:b", "0:1:2", "0:²", "0:1.5", f"0:{2**60}")
    ),
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=eight", "--steps=0:1"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", "--steps=0:1", "--epoch_policy=none"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", "--steps=0:1", "--format=xml"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", "--steps=0:1", "--row=first"],
    ["what-was-at", "--plan=x", "--model_dir=y", "--steps=0:1"],
    *(
      ["plan", "start", "--cache_dir=x", "--output=y", "--batch_size=8", f"--rates={rates}"]
      for rates in ("a", "a=", "=1", "a=1,", "a=1=2", "a=1,a=2")
    ),
    *(
      ["stats", "--cache_dir=x", f"--feature_lengths={text}"]
      for text in ("3", "{", '{"a": -1}', '{"a": "b"}')
    ),
    ["stats", "--cache_dir=x", "--seed=3"],
    ["when-was", "--cache_dir=x", "--task=demo", "--batch_size=8"],
    ["when-was", "--cache_dir=x", "--task=demo", "--batch_size=8", "--index=1", "--source=2"],
    ["plan", "skip", "--output=x", "--steps=0:1"],
    ["plan", "change", "--output=x", "--step=-1"],
    ["plan", "batch", "--plan=x", "--step=1.5"],
  ],
  ids=" ".join,
)
def test_wrong_arguments_end_with_64_and_where_to_look(capsys, arguments):
  status, line = status_and_line(capsys, arguments)
  assert status == 64
  assert "kind=arguments" in line
  assert "--help lists them" in line


@pytest.mark.parametrize(
  ("command", "added"),
  [
    (["what-was-at", "--plan={plan}", "--steps=0:1"], "--cache_dir=ROOT"),
    (["what-was-at", "--steps=0:1"], "--model_dir=DIR"),
    (["what-was-at", "--plan={plan}", "--cache_dir={root}", "--seed=3", "--steps=0:1"], "leave out --seed"),
    (["plan", "show", "--plan={plan}", "--split=train", "--lanes=2"], "leave out --split, --lanes"),
    (["plan", "show", "--plan={plan}", "--packing=greedy"], "leave out --packing"),
    (["plan", "show", "--plan={plan}", '--feature_lengths={{"inputs": 9}}'], "leave out --feature_lengths"),
    (["plan", "batch", "--plan={plan}", "--step=1"], "--cache_dir=ROOT"),
    (["plan", "change", "--plan={plan}", "--step=9", "--output={tmp}/x"], "--rates, --batch_size or --lanes"),
    (["when-was", "--plan={plan}", "--cache_dir={root}", "--index=1", "--steps=0:1"], "--task=NAME"),
    (["when-was", "--plan={plan}", "--cache_dir={root}", "--task=a", "--index=1"], "--steps=A:B"),
    (["when-was", "--plan={plan}", "--cache_dir={root}", "--task=a", "--source=1", "--steps=0:1"], "--place"),
    (["stats", "--cache_dir={root}", "--steps=0:3"], "--batch_size"),
  ],
  ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_missing_or_contradicts_is_said(plan_file, root, tmp_path, capsys, command, added):
  arguments = [
    text.format(plan=plan_file, root=root, tmp=tmp_path) if "{" in text else text for text in command
  ]
  status, line = status_and_line(capsys, arguments)
  assert status == 64
  assert "kind=arguments" in line
  assert added in line


@pytest.mark.parametrize("row", [-1, 12, 100])
def test_a_row_that_no_batch_has_ends_with_64(shared_cache, capsys, row):
  status, line = status_and_line(capsys, what_was_at(shared_cache, f"--row={row}"))
  assert status == 64
  assert f'kind=row expected="0 to 11" got={row} ' in line


@pytest.mark.parametrize(
  ("example", "kind", "expected"),
  [
    (["--index=50"], "index", "0 to 49"),
    (["--index=-1"], "index", "0 to 49"),
    (["--source=4", "--place=0"], "source", "0 to 3"),
    (["--source=source-9 of Zürich", "--place=0"], "source", "source-3 of Zürich"),
    (["--source=0", "--place=25"], "place", "0 to 24"),
    (["--source=1", "--place=0"], "place", "0 to -1"),
  ],
)
def test_an_example_that_is_not_there_ends_with_64(shared_cache, capsys, example, kind, expected):
  arguments = ["when-was", *what_was_at(shared_cache)[1:], *example]
  status, line = status_and_line(capsys, arguments)
  assert status == 64
  assert f"kind={kind} " in line
  assert expected in line


@pytest.mark.parametrize(
  ("arguments", "kind"),
  [
    (["--batch_size=0"], "batch_size"),
    (["--num_epochs=0"], "num_epochs"),
    (["--lanes=5"], "lanes"),
    (["--num_epochs=1", "--steps=5:6"], "data_ended"),
  ],
)
def test_a_plan_that_cannot_be_ends_with_78(shared_cache, capsys, arguments, kind):
  status, line = status_and_line(capsys, [*what_was_at(shared_cache), *arguments])
  assert status == 78
  assert f"kind={kind} " in line


def test_steps_after_the_end_have_no_shares(shared_cache, capsys):
  arguments = ["stats", *what_was_at(shared_cache, "--num_epochs=1", steps="5:6")[1:]]
  status, line = status_and_line(capsys, arguments)
  assert (status, "kind=data_ended" in line) == (78, True)


@pytest.mark.parametrize(
  "arguments", [["verify"], ["verify", "--split=train"], ["what-was-at", "--batch_size=8", "--steps=0:1"]]
)
def test_a_missing_cache_ends_with_66_and_the_command_that_makes_it(tmp_path, capsys, arguments):
  status, line = status_and_line(capsys, [*arguments, f"--cache_dir={tmp_path}", "--task=demo"])
  assert status == 66
  assert "kind=cache_missing" in line
  assert f'fix="anystep-cache --tasks=demo --output_cache_dir={tmp_path} ' in line


@pytest.mark.parametrize("command", ["verify", "stats"])
def test_a_root_without_caches_ends_with_66(tmp_path, capsys, command):
  (tmp_path / "file").write_text("no cache")
  status, line = status_and_line(capsys, [command, f"--cache_dir={tmp_path}"])
  assert (status, "kind=cache_missing" in line) == (66, True)


@pytest.mark.parametrize(
  "arguments",
  [
    ["what-was-at", "--cache_dir={root}", "--task=b:inmer", "--batch_size=8", "--steps=0:1"],
    ["what-was-at", "--cache_dir={root}", "--rates=a=1,b:inmer=1", "--batch_size=8", "--steps=0:1"],
    [
      "what-was-at",
      "--cache_dir={root}",
      "--rates=a=1,b:inner=1",
      "--batch_size=8",
      "--steps=0:1",
      "--task=b:inmer",
    ],
    ["when-was", "--plan={plan}", "--cache_dir={root}", "--task=b:inmer", "--index=0"],
    [
      "plan",
      "change",
      "--plan={plan}",
      "--cache_dir={root}",
      "--step=9",
      "--rates=b:inmer=1",
      "--output={tmp}/x",
    ],
    ["plan", "change", "--plan={plan}", "--step=9", "--rates=b:inmer=1", "--output={tmp}/x"],
    ["stats", "--cache_dir={root}", "--task=b:inmer"],
    ["verify", "--cache_dir={root}", "--task=b:inmer"],
  ],
  ids=" ".join,
)
def test_an_unknown_task_ends_with_64_and_the_names_that_come_near(
  root, plan_file, tmp_path, capsys, arguments
):
  filled = [text.format(root=root, plan=plan_file, tmp=tmp_path) for text in arguments]
  status, line = status_and_line(capsys, filled)
  assert status == 64
  assert "kind=task_unknown expected=b:inner got=b:inmer" in line


def test_a_missing_split_ends_with_66_and_those_that_are_there(shared_cache, capsys):
  status, line = status_and_line(
    capsys, ["verify", f"--cache_dir={shared_cache.root}", "--task=demo", "--split=test"]
  )
  assert status == 66
  assert "kind=split_missing" in line
  assert "expected=train got=test" in line


@pytest.mark.parametrize("command", [["verify"], ["what-was-at", "--batch_size=8", "--steps=0:1"]])
def test_a_task_that_is_a_path_ends_with_77(tmp_path, capsys, command):
  status, line = status_and_line(capsys, [*command, f"--cache_dir={tmp_path}", "--task=../x"])
  assert status == 77
  assert "kind=task_name" in line


@pytest.mark.parametrize("flag", ["plan", "model_dir"])
def test_a_plan_that_is_not_there_ends_with_66(tmp_path, capsys, flag):
  status, line = status_and_line(capsys, ["plan", "show", f"--{flag}={tmp_path / 'none'}"])
  assert (status, "kind=plan_missing" in line) == (66, True)
  status, line = status_and_line(capsys, ["plan", "show", f"--{flag}={tmp_path}"])
  assert (status, "kind=plan_missing" in line) == (66, True)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"version": 2}'])
def test_a_file_that_is_no_plan_ends_with_65(tmp_path, capsys, content):
  path = tmp_path / "plan.json"
  path.write_bytes(content)
  status, line = status_and_line(capsys, ["plan", "show", f"--plan={path}"])
  assert (status, "kind=plan_invalid" in line) == (65, True)


@pytest.mark.parametrize(
  "content", [b"", b"[]", b"\xff", b'{"version": 2, "cache_dirs": []}', b'{"version": 1, "cache_dirs": [3]}']
)
def test_roots_that_cannot_be_read_end_with_65_unless_others_are_named(model_dir, capsys, content):
  (model_dir / "data_caches.json").write_bytes(content)
  status, line = status_and_line(capsys, ["verify", f"--model_dir={model_dir}"])
  assert (status, "kind=caches_invalid" in line, "--cache_dir" in line) == (65, True, True)


def test_caches_that_a_plan_was_not_made_for_end_with_76(plan_file, tmp_path, capsys):
  build_mixture(tmp_path)
  caches.build(tmp_path, task="a", num_examples=24)
  status, line = status_and_line(
    capsys, ["what-was-at", f"--plan={plan_file}", f"--cache_dir={tmp_path}", "--steps=0:1"]
  )
  assert (status, "kind=plan_cache task=a" in line) == (76, True)


def test_help_explains_every_command(capsys):
  plans = [["plan", name] for name in ("show", "diff", "start", "change", "skip", "batch")]
  commands = [[], ["verify"], ["what-was-at"], ["when-was"], ["show"], ["stats"], ["plan"], *plans]
  for command in (*commands, ["preview"], ["tombstone"], ["plan", "tombstone"]):
    with pytest.raises(SystemExit) as ended:
      main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert " ".join(["usage: anystep-data", *command]) in text
    parse_examples(text, " ".join(["anystep-data", *command]))


def parse_examples(text, program):
  """Parses the commands at the end of a help text, of which there is at least one."""
  lines = text.split("\nexamples:\n")[1].replace("\\\n", " ").splitlines()
  assert lines
  for line in lines:
    assert line.startswith(f"  {program}")
    arguments = shlex.split(line)[1:]
    if arguments[-1] == "--help":
      arguments = arguments[:-1]
      with pytest.raises(AnystepError, match="required"):
        make_parser().parse_args(arguments)
    else:
      make_parser().parse_args(arguments)


LIGHT = (
  """
  import sys

"""
  + WITHOUT
  + """
  from anystep.tasks.data_program.main import main

  source = sys.argv[1:-1]
  output = sys.argv[-1]
  for command in (
    ["what-was-at", *source, "--steps=0:2"],
    ["when-was", *source, "--task=a", "--index=1", "--steps=0:9"],
    ["show", *source, "--steps=0:1", "--row=0"],
    ["stats", *source, "--steps=0:9", "--html=" + output + "/page.html"],
    ["plan", "start", *source, "--output=" + output + "/plan.json"],
    ["plan", "show", "--plan=" + output + "/plan.json"],
    ["plan", "batch", "--plan=" + output + "/plan.json", "--step=3"],
    ["verify", *source[:1]],
  ):
    assert main(command) == 0, command
"""
)


def test_everything_works_where_nothing_else_is_installed(root, tmp_path):
  heavy = {"tensorflow", "apache_beam", "jax", "jaxlib", "seqio", "flax"}
  done = subprocess.run(
    [
      sys.executable,
      "-c",
      textwrap.dedent(LIGHT) % {"heavy": heavy},
      f"--cache_dir={root}",
      *MIXTURE,
      tmp_path,
    ],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[3])},
    capture_output=True,
    text=True,
    check=False,
  )
  assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr
  assert "step 1 row 5: " in done.stdout
  assert {path.name for path in tmp_path.iterdir()} == {"page.html", "plan.json"}


def test_an_interrupted_write_leaves_nothing(plan_file, tmp_path, monkeypatch):
  monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
  with pytest.raises(OSError, match="full") as failed:
    main(["plan", "skip", f"--plan={plan_file}", "--steps=7:9", f"--output={tmp_path / 'x.json'}"])
  assert failed.value.filename == str(tmp_path / "x.json")
  assert list(tmp_path.iterdir()) == []
