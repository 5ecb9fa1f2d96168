"""`anystep-data` says what the data was, as the oracle does, and whether a cache is still as written."""

import json
import re

import caches
import pytest

import oracle
from anystep.command_line import run_program
from anystep.data_main import main

KEYS = ["step", "row", "task", "split", "epoch", "unit", "shard", "place", "examples"]
EXAMPLE_KEYS = ["index", "record", "source_shard", "source_name", "source_place"]


def what_was_at(cache, *arguments, steps="0:3", batch_size=12):
  return [
    "what-was-at",
    f"--cache_dir={cache.root}",
    f"--task={cache.task}",
    f"--batch_size={batch_size}",
    f"--steps={steps}",
    *arguments,
  ]


def printed(capsys, arguments):
  """The lines on stdout of a run that ends well and says nothing else."""
  assert main(arguments) == 0
  captured = capsys.readouterr()
  assert captured.err == ""
  return captured.out.splitlines()


def status_and_line(capsys, arguments):
  """The exit status of a run that fails, and its one line on stderr."""
  with pytest.raises(SystemExit) as ended:
    run_program(lambda: main(arguments))
  captured = capsys.readouterr()
  (line,) = captured.err.splitlines()
  assert line.startswith(f"ERROR code={ended.value.code} kind=")
  return ended.value.code, line


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
  lines = printed(capsys, what_was_at(shared_cache, *arguments, "--format=jsonl", steps=f"{start}:{stop}"))
  rows = [json.loads(line) for line in lines]
  assert rows == oracle.what_was_at(shared_cache.manifest, 12, start, stop, **order)
  for row in rows:
    assert list(row) == KEYS
    assert [list(example) for example in row["examples"]] == [EXAMPLE_KEYS]


def test_the_last_batchs_padding_is_left_out(shared_cache, capsys):
  arguments = what_was_at(shared_cache, "--num_epochs=1", "--format=jsonl", steps="4:5")
  rows = [json.loads(line) for line in printed(capsys, arguments)]
  assert sorted(row["unit"] for row in rows) == [48, 49]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_any_batch_size_is_explained(shared_cache, capsys, batch_size):
  lines = printed(capsys, what_was_at(shared_cache, "--format=jsonl", steps="1:2", batch_size=batch_size))
  expected = oracle.what_was_at(shared_cache.manifest, batch_size, 1, 2)
  assert [json.loads(line) for line in lines] == expected


@pytest.mark.parametrize("row", [0, 5, 11])
def test_one_row_is_that_of_the_batch(shared_cache, capsys, row):
  whole = printed(capsys, what_was_at(shared_cache, "--format=jsonl"))
  alone = printed(capsys, what_was_at(shared_cache, f"--row={row}", "--format=jsonl"))
  assert alone == [line for line in whole if json.loads(line)["row"] == row]
  assert len(alone) == 3


def test_another_split_is_read_where_it_is_named(tmp_path, capsys):
  caches.build(tmp_path, num_examples=10, num_shards=2)
  validation = caches.build(tmp_path, split="validation", num_examples=20, num_shards=2)
  arguments = what_was_at(validation, "--split=validation", "--format=jsonl", batch_size=4)
  rows = [json.loads(line) for line in printed(capsys, arguments)]
  assert rows == oracle.what_was_at(validation.manifest, 4, 0, 3)
  assert {row["split"] for row in rows} == {"validation"}


def test_text_says_the_same_in_words(shared_cache, capsys):
  lines = printed(capsys, what_was_at(shared_cache, "--seed=7", steps="4:6"))
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
  assert [line.split(":")[0] for line in captured.err.splitlines()] == [
    "verify demo train",
    "verify demo validation",
  ]


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
    ["verify", "--cache_dir=x"],
    ["verify", "--cache_dir=x", "--task=demo", "--unknown=1"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--steps=0:1"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8"],
    *(
      ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", f"--steps={steps}"]
      for steps in ("", "3", "3:", ":3", "3:3", "4:3", "-1:3", "a:b", "0:1:2", "0:²", "0:1.5")
    ),
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=eight", "--steps=0:1"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", "--steps=0:1", "--epoch_policy=none"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", "--steps=0:1", "--format=xml"],
    ["what-was-at", "--cache_dir=x", "--task=demo", "--batch_size=8", "--steps=0:1", "--row=first"],
  ],
  ids=" ".join,
)
def test_wrong_arguments_end_with_64_and_where_to_look(capsys, arguments):
  status, line = status_and_line(capsys, arguments)
  assert status == 64
  assert "kind=arguments" in line
  assert "--help lists them" in line


@pytest.mark.parametrize("row", [-1, 12, 100])
def test_a_row_that_no_batch_has_ends_with_64(shared_cache, capsys, row):
  status, line = status_and_line(capsys, what_was_at(shared_cache, f"--row={row}"))
  assert status == 64
  assert f'kind=row expected="0 to 11" got={row} ' in line


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


@pytest.mark.parametrize(
  "arguments", [["verify"], ["verify", "--split=train"], ["what-was-at", "--batch_size=8", "--steps=0:1"]]
)
def test_a_missing_cache_ends_with_66_and_the_command_that_makes_it(tmp_path, capsys, arguments):
  status, line = status_and_line(capsys, [*arguments, f"--cache_dir={tmp_path}", "--task=demo"])
  assert status == 66
  assert "kind=cache_missing" in line
  assert f'fix="anystep-cache --tasks=demo --output_cache_dir={tmp_path} ' in line


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


def test_help_explains_every_command(capsys):
  for arguments in (["--help"], ["verify", "--help"], ["what-was-at", "--help"]):
    with pytest.raises(SystemExit) as ended:
      main(arguments)
    assert ended.value.code == 0
    assert "anystep-data" in capsys.readouterr().out
