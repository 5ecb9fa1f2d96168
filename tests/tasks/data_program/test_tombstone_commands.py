"""`anystep-data tombstone` lists examples, `plan tombstone` takes them up, `when-was` tells the steps."""

import json

import pytest
from explained_rows import build_mixture

from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.inspection.rows import index_of_source
from anystep.plans.plan import Plan
from anystep.tasks.data_program.main import main

TASK = "b:inner"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """Where the caches of a mixture are; nobody changes them."""
  path = tmp_path_factory.mktemp("mixture")
  build_mixture(path)
  return path


@pytest.fixture
def plan_file(root, tmp_path):
  """A file of a plan of two of the tasks, from step 0 to the end of an epoch."""
  opened = [open_cache(root, name, "train") for name in ("a", TASK)]
  plan = Plan.start(opened, rates={"a": 2, TASK: 1}, batch_size=6, seed=3, num_epochs=2)
  (tmp_path / "plan.json").write_text(plan.to_json())
  return tmp_path / "plan.json"


def printed(capsys, *arguments):
  assert main([str(argument) for argument in arguments]) == 0
  return capsys.readouterr().out.splitlines()


def objects(capsys, *arguments):
  return [json.loads(line) for line in printed(capsys, *arguments, "--format=jsonl")]


def refusal_of(*arguments):
  with pytest.raises(AnystepError) as refused:
    main([str(argument) for argument in arguments])
  return refused.value


def listed(root, path, *which):
  """The list that the command writes."""
  where = ["--cache_dir", root, "--task", TASK]
  assert main([str(argument) for argument in ("tombstone", *where, *which, "--output", path)]) == 0
  return json.loads(path.read_text())


def test_examples_are_listed_by_index_or_by_source_and_place(root, tmp_path, capsys):
  cache = open_cache(root, TASK, "train")
  by_index = listed(root, tmp_path / "one.json", "--index=7", "--index=2", "--reason=leaked")
  assert by_index["indices"] == [2, 7]
  assert (by_index["task"], by_index["split"], by_index["reason"]) == (TASK, "train", "leaked")
  assert by_index["manifest_sha256"] == cache.manifest_sha256
  shard = next(k for k, shard in enumerate(cache.manifest.source_shards) if shard.examples > 1)
  by_source = listed(root, tmp_path / "two.json", f"--source={shard}", "--place=0", "--place=1")
  assert by_source["indices"] == sorted(index_of_source(cache, shard, place) for place in (0, 1))
  assert capsys.readouterr().out.endswith("two.json: 2 examples of b:inner train\n")


def test_a_plan_takes_lists_up_and_rows_tell_of_it(root, tmp_path, plan_file, capsys):
  listed(root, tmp_path / "list.json", "--index=4", "--index=1")
  changed = tmp_path / "changed.json"
  capsys.readouterr()
  lines = printed(
    capsys,
    "plan",
    "tombstone",
    "--plan",
    plan_file,
    "--list",
    tmp_path / "list.json",
    "--step=3",
    "--output",
    changed,
  )
  plan = Plan.from_json(changed.read_text())
  assert lines == [f"{changed}: from step 3 on no loss on 2 examples, sha256 {plan.sha256}"]
  assert plan.segments == Plan.from_json(plan_file.read_text()).segments
  where = ["--plan", changed, "--cache_dir", root]
  seen = objects(capsys, "when-was", *where, "--tombstones", tmp_path / "list.json")
  one_by_one = [
    row for i in (1, 4) for row in objects(capsys, "when-was", *where, "--task", TASK, f"--index={i}")
  ]
  assert seen == sorted(one_by_one, key=lambda row: (row["step"], row["row"]))
  assert seen == objects(capsys, "when-was", *where, "--task", TASK, "--index=4", "--index=1")
  silent = {(row["step"], row["examples"][0]["index"]): "tombstone" in row["examples"][0] for row in seen}
  assert silent == {(step, index): step >= 3 for step, index in silent}
  assert set(silent.values()) == {True, False}
  text = printed(capsys, "what-was-at", *where, f"--steps={max(silent)[0]}:{max(silent)[0] + 1}")
  assert [", a tombstone: no loss" in line for line in text].count(True) >= 1
  shown = printed(capsys, "plan", "show", *where)
  assert shown[shown.index("Tombstones") + 2].split() == ["3", TASK, "2", "tombstone"]


def test_steps_that_are_trained_are_past(root, tmp_path, plan_file):
  listed(root, tmp_path / "list.json", "--index=4")
  model_dir = tmp_path / "model"
  (model_dir / "checkpoint_5").mkdir(parents=True)
  (model_dir / "checkpoint_5" / "commit_success.txt").touch()
  (model_dir / "data_plan.json").write_text(plan_file.read_text())
  command = ["plan", "tombstone", "--model_dir", model_dir, "--list", tmp_path / "list.json", "--output"]
  assert refusal_of(*command, tmp_path / "new.json", "--step=4").kind == "step_trained"
  assert not (tmp_path / "new.json").exists()
  assert refusal_of(*command, plan_file, "--step=5").kind == "output_exists"
  assert (
    refusal_of(*command, tmp_path / "new.json", "--step=5", "--list=none.json").kind == "tombstones_missing"
  )


def test_a_list_of_another_cache_is_refused(root, tmp_path, plan_file):
  document = listed(root, tmp_path / "list.json", "--index=4") | {"manifest_sha256": "0" * 64}
  (tmp_path / "list.json").write_text(json.dumps(document))
  error = refusal_of(
    "when-was", "--plan", plan_file, "--cache_dir", root, "--tombstones", tmp_path / "list.json"
  )
  assert (error.kind, error.fields["got"]) == ("plan_cache", "0" * 64)


@pytest.mark.parametrize(
  ("which", "kind"),
  [
    (["--index=10"], "index"),
    (["--source=9", "--place=0"], "source"),
    (["--source=0"], "arguments"),
    (["--index=1", "--place=0"], "arguments"),
    ([], "arguments"),
    (["--index=1", "--split=validation"], "split_missing"),
  ],
  ids=str,
)
def test_examples_that_are_not_there_make_no_list(root, tmp_path, which, kind):
  output = tmp_path / "list.json"
  error = refusal_of("tombstone", "--cache_dir", root, "--task", TASK, *which, "--output", output)
  assert error.kind == kind
  assert error.fix
  assert not output.exists()


def test_a_list_replaces_no_file_unasked(root, tmp_path):
  listed(root, tmp_path / "list.json", "--index=1")
  again = ["tombstone", "--cache_dir", root, "--task", TASK, "--index=2", "--output", tmp_path / "list.json"]
  assert refusal_of(*again).kind == "output_exists"
  assert listed(root, tmp_path / "list.json", "--index=2", "--overwrite")["indices"] == [2]
