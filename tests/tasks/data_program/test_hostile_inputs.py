"""Programs end with one line and the right code, whatever stands where a file or a number is expected."""

import json
import os
import shutil

import caches
import pytest

from anystep.files import storage
from anystep.plans.plan import Plan
from anystep.programs.command_line import run_program
from anystep.tasks.data_program import main as data_main
from anystep.tasks.vocab_program import main as vocabulary_main

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  return caches.build(tmp_path_factory.mktemp("hostile"), num_examples=20, num_shards=2)


@pytest.fixture
def plan_text(built):
  return Plan.start(built.open(), batch_size=4).to_json()


def ended(capsys, arguments, main=data_main.main):
  """The status of a program that fails, and the kind in its only line on stderr."""
  with pytest.raises(SystemExit) as end:
    run_program(lambda: main([str(argument) for argument in arguments]))
  captured = capsys.readouterr()
  (line,) = captured.err.splitlines()
  assert line.startswith(f"ERROR code={end.value.code} kind=")
  return end.value.code, line.split("kind=")[1].split()[0]


def of_text(text):
  return lambda path: path.write_text(text)


def endless(path):
  path.symlink_to("/dev/zero")


# What stands in a file's place, and whether it counts as none or as a wrong one.
PLACED = {
  "nothing": (lambda path: None, "missing"),
  "directory": (os.mkdir, "missing"),
  "dangling link": (lambda path: path.symlink_to("nowhere"), "missing"),
  "fifo": (os.mkfifo, "invalid"),
  "device": (endless, "invalid"),
  "empty": (of_text(""), "invalid"),
  "deep": (of_text(DEEP), "invalid"),
  "deep objects": (of_text('{"a":' * 100_000 + "1" + "}" * 100_000), "invalid"),
  "number of 5000 digits": (of_text('{"version": ' + "9" * 5000 + "}"), "invalid"),
  "NaN": (of_text('{"version": NaN}'), "invalid"),
  "twice the same name": (of_text('{"version": 1, "version": 1}'), "invalid"),
  "bytes": (lambda path: path.write_bytes(bytes(range(128, 256))), "invalid"),
  "4 GiB of nothing": (lambda path: (path.touch(), os.truncate(path, 1 << 32)), "invalid"),
}


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("file", ["plan", "tombstones", "mixture"])
def test_a_file_that_is_none_or_wrong_is_refused(built, plan_text, tmp_path, capsys, placed, file):
  place, what = PLACED[placed]
  path = tmp_path / "there.json"
  place(path)
  (tmp_path / "plan.json").write_text(plan_text)
  commands = {
    "plan": ["plan", "show", f"--plan={path}"],
    "tombstones": [
      *("plan", "tombstone", f"--plan={tmp_path / 'plan.json'}", "--step=1", f"--list={path}"),
      f"--output={tmp_path / 'new.json'}",
    ],
    "mixture": ["what-was-at", f"--rates={path}", "--batch_size=4", "--steps=0:1"],
  }
  wrong = {"plan": 65, "tombstones": 65, "mixture": 78}[file]
  expected = {"missing": (66, f"{file}_missing"), "invalid": (wrong, f"{file}_invalid")}
  assert ended(capsys, commands[file]) == expected[what]


@pytest.mark.parametrize("placed", [name for name in PLACED if name not in ("nothing", "dangling link")])
def test_the_list_of_a_runs_caches_is_read_as_carefully(built, plan_text, tmp_path, capsys, placed):
  (tmp_path / "data_plan.json").write_text(plan_text)
  PLACED[placed][0](tmp_path / "data_caches.json")
  command = ["what-was-at", f"--model_dir={tmp_path}", "--steps=0:1"]
  assert ended(capsys, command) == (65, "caches_invalid")


@pytest.mark.parametrize("root", ["a\0b", "a\nb", "\ud800", 3, None, ["x"]])
def test_a_root_that_no_directory_can_have_is_refused(plan_text, tmp_path, capsys, root):
  (tmp_path / "data_plan.json").write_text(plan_text)
  (tmp_path / "data_caches.json").write_text(json.dumps({"version": 1, "cache_dirs": [root]}))
  command = ["what-was-at", f"--model_dir={tmp_path}", "--steps=0:1"]
  assert ended(capsys, command) == (65, "caches_invalid")


@pytest.mark.parametrize(
  "lengths",
  [
    *(DEEP, '{"a":' * 100_000 + "1" + "}" * 100_000, "null", "[]", '{"a": {}}', '{"a": 1, "a": 2}'),
    *('{"a": -1}', '{"a": true}', '{"a": NaN}', '{"a": 1e400}', '{"a": 1000000000000}', '{"\\ud800": 1}'),
    '{"a": ' + "9" * 5000 + "}",
  ],
)
def test_lengths_that_no_row_has_are_refused(built, capsys, lengths):
  command = ["stats", f"--cache_dir={built.root}", "--task=demo", f"--feature_lengths={lengths}"]
  assert ended(capsys, command) == (64, "arguments")


@pytest.mark.parametrize(
  ("flag", "code", "kind"),
  [
    ("--batch_size=1000000000000", 78, "batch_size"),
    ("--batch_size=" + "9" * 5000, 64, "arguments"),
    ("--lanes=1000000000000", 78, "lanes"),
    ("--seed=" + "9" * 30, 78, "seed"),
    ("--num_epochs=" + "9" * 30, 78, "num_epochs"),
    ("--rates=demo=1e99999999", 78, "rates"),
    ("--rates=demo=1e-5000", 78, "rates"),
    ("--task=a\0b", 64, "arguments"),
    ("--task=a\nb", 77, "task_name"),
    ("--split=a\nb", 66, "split_missing"),
  ],
)
def test_a_flag_beyond_all_use_is_refused(built, capsys, tmp_path, flag, code, kind):
  flags = {"--task": "--task=demo", "--batch_size": "--batch_size=4", flag.partition("=")[0]: flag}
  if flag.startswith("--rates"):
    del flags["--task"]
  command = ["plan", "start", f"--cache_dir={built.root}", *flags.values(), f"--output={tmp_path / 'x'}"]
  assert ended(capsys, command) == (code, kind)
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_what_is_no_file_is_no_output_and_stays(built, capsys, tmp_path, overwrite):
  command = ["plan", "start", f"--cache_dir={built.root}", "--task=demo", "--batch_size=4"]
  os.mkfifo(tmp_path / "fifo")
  # A device of the machine must not be tried: whoever may do all would replace it.
  for path in (tmp_path, "", tmp_path / "fifo"):
    assert ended(capsys, [*command, f"--output={path}", *overwrite]) == (73, "output_exists")
  assert [path.name for path in tmp_path.iterdir() if path.is_fifo()] == ["fifo"]


def test_a_list_of_examples_that_its_cache_does_not_have_is_refused(built, plan_text, tmp_path, capsys):
  (tmp_path / "plan.json").write_text(plan_text)
  manifest_sha256 = built.open().manifest_sha256
  listed = {"version": 1, "task": "demo", "split": "train", "manifest_sha256": manifest_sha256}
  (tmp_path / "list.json").write_text(json.dumps({**listed, "indices": [3, 20], "reason": ""}))
  command = ["when-was", f"--plan={tmp_path / 'plan.json'}", f"--cache_dir={built.root}", "--steps=0:1"]
  assert ended(capsys, [*command, f"--tombstones={tmp_path / 'list.json'}"]) == (65, "tombstones_invalid")


@pytest.mark.parametrize("placed", ["nothing", "directory", "fifo", "device", "empty", "bytes"])
def test_a_vocabulary_that_is_none_is_refused(tmp_path, capfd, placed):
  PLACED[placed][0](tmp_path / "v.model")
  with pytest.raises(SystemExit) as end:
    run_program(lambda: vocabulary_main.main(["show", str(tmp_path / "v.model")]))
  assert end.value.code == (66 if placed in ("nothing", "directory") else 65)
  # SentencePiece has a word of its own to say.
  assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("ERROR")]


def packed(built, tmp_path):
  """A plan that needs a unit table, which a copy of the cache does not have."""
  root = tmp_path / "own"
  shutil.copytree(built.root, root, ignore=shutil.ignore_patterns("units"))
  command = ["plan", "start", f"--cache_dir={root}", "--task=demo", "--batch_size=4", "--packing=greedy"]
  return [*command, '--feature_lengths={"inputs": 5, "targets": 4}', f"--output={tmp_path / 'plan.json'}"]


def test_a_full_disk_is_the_last_thing_said_of_a_unit_table(built, tmp_path, capsys, monkeypatch):
  command = packed(built, tmp_path)
  # All work is long.
  monkeypatch.setattr("anystep.programs.progress._SHORT_SECONDS", 0.0)

  def full(path, content):
    raise OSError(28, "No space left on device", str(path))

  with monkeypatch.context() as on_a_full_disk:
    on_a_full_disk.setattr(storage, "put", full)
    with pytest.raises(SystemExit) as end:
      run_program(lambda: data_main.main(command))
  assert end.value.code == 74
  *progress, last = capsys.readouterr().err.splitlines()
  assert last.startswith(f"ERROR code=74 kind=disk_full path={tmp_path}")
  assert "No space left" in last
  assert len(progress) == 1
  assert progress[0].startswith("units of demo train: ")


def test_the_library_makes_a_unit_table_without_a_word(built, tmp_path, capfd, monkeypatch):
  monkeypatch.setattr("anystep.programs.progress._SHORT_SECONDS", 0.0)
  command = packed(built, tmp_path)
  cache = caches.SmallCache(root=tmp_path / "own", task="demo", split="train", examples=built.examples).open()
  Plan.start(cache, batch_size=4, packing="greedy", feature_lengths={"inputs": 5, "targets": 4})
  assert capfd.readouterr() == ("", "")
  shutil.rmtree(tmp_path / "own" / "demo" / "units")
  with pytest.raises(SystemExit) as end:
    run_program(lambda: data_main.main(command))
  assert end.value.code == 0
  assert capfd.readouterr().err.startswith("units of demo train: ")
