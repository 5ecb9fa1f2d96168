"""MaxText's mixtures name caches: by a JSON file, or in one string."""

import json
from fractions import Fraction

import caches
import pytest

from anystep.errors import AnystepError
from anystep.plans.plan import Plan
from anystep.tasks.data_program import main as data_main
from anystep.tasks.registry.mixture_files import is_mixture_text, read_mixture

WEIGHTS = {"a": "0.3", "b:inner": "0.7"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A root with caches of the tasks a and b:inner, of two splits each."""
  directory = tmp_path_factory.mktemp("mixed") / "cache"
  for task in WEIGHTS:
    for split in ("train", "validation"):
      caches.build(directory, task=task, split=split)
  return directory


@pytest.fixture
def written(tmp_path):
  """`written(text)`: the path of a mixture's file."""

  def write(content):
    path = tmp_path / "mixture.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)

  return write


def file_of(root, weights=WEIGHTS):
  """A file's text; MaxText's names of its parts need not be the tasks'."""
  parts = [
    f'"part {k}": {{"path": "{root}/{task.replace(":", "/")}", "weight": {weight}}}'
    for k, (task, weight) in enumerate(weights.items())
  ]
  return "{" + ", ".join(parts) + "}"


def string_of(root):
  return f"{root}/a,0.3;{root}/b/inner/ , 0.7"


def test_both_forms_say_the_tasks_their_root_and_exact_rates(root, written):
  for text in (written(file_of(root)), string_of(root)):
    assert is_mixture_text(text)
    mixture = read_mixture(text)
    assert mixture.rates == {"a": Fraction(3, 10), "b:inner": Fraction(7, 10)}
    assert mixture.roots == (str(root),)


def test_weights_are_as_exact_as_they_are_written(root, written):
  weights = {"a": "0.1000000000000000000000001", "b:inner": "12345678901234567890"}
  rates = read_mixture(written(file_of(root, weights))).rates
  assert rates == {task: Fraction(weight) for task, weight in weights.items()}
  assert rates["a"] != Fraction("0.1")


def test_a_path_may_be_relative_to_the_current_directory(root, monkeypatch):
  monkeypatch.chdir(root)
  mixture = read_mixture("a,1;b/inner,1")
  assert (list(mixture.rates), mixture.roots) == (["a", "b:inner"], (".",))


def test_caches_of_several_roots_are_looked_for_in_their_own(root, tmp_path):
  caches.build(tmp_path / "other", task="c")
  mixture = read_mixture(f"{tmp_path}/other/c,1;{root}/a,2")
  assert mixture.roots == (str(tmp_path / "other"), str(root))
  caches.build(tmp_path / "other", task="a")
  with pytest.raises(AnystepError) as refused:
    read_mixture(f"{tmp_path}/other/c,1;{root}/a,2")
  assert (refused.value.code, refused.value.kind) == (78, "mixture_roots")
  assert refused.value.fields["task"] == "a"
  assert str(root) in refused.value.fields["expected"]
  # The other way about, the first root that has the task's cache is its own.
  assert read_mixture(f"{root}/a,2;{tmp_path}/other/c,1").roots[0] == str(root)


@pytest.mark.parametrize(
  ("content", "kind", "said"),
  [
    ('{"x": {"path": "ROOT/a", "weight": 1}, "x": 1}', "mixture_invalid", "'x' stands there twice"),
    ('{"x": {"path": "ROOT/a", "weight": 1, "path": "b"}}', "mixture_invalid", "'path' stands there"),
    ('{"x": {"path": "ROOT/a", "wieght": 1}}', "mixture_invalid", "nearest=weight"),
    ('{"x": {"path": "ROOT/a"}}', "mixture_invalid", "weight"),
    (
      '{"x": {"path": "ROOT/a", "weight": 1}, "y": {"path": "ROOT/a/", "weight": 2}}',
      "mixture_invalid",
      "a again",
    ),
    ('{"x": {"path": "ROOT/a", "weight": "1"}}', "mixture_invalid", "a number"),
    ('{"x": {"path": "ROOT/a", "weight": true}}', "mixture_invalid", "a number"),
    ('{"x": {"path": 1, "weight": 1}}', "mixture_invalid", "a text"),
    ('{"x": {"path": "ROOT/a", "weight": -0.5}}', "rates", "-0.5"),
    ('{"x": {"path": "ROOT/a", "weight": NaN}}', "rates", "NaN"),
    ('{"x": {"path": "ROOT/a", "weight": Infinity}}', "rates", "Infinity"),
    ('{"x": 0.5}', "mixture_invalid", "0.5"),
    ("[1]", "mixture_invalid", "an object"),
    ("{}", "mixture_invalid", "none"),
    ("{", "mixture_invalid", "JSON"),
  ],
)
def test_a_file_that_says_something_else_is_refused(content, kind, said, root, written):
  with pytest.raises(AnystepError) as refused:
    read_mixture(written(content.replace("ROOT", str(root))))
  assert (refused.value.code, refused.value.kind) == (78, kind)
  assert said in str(refused.value)


@pytest.mark.parametrize("text", ["ROOT/a,1;", "ROOT/a,1;ROOT/b/inner", ";ROOT/a,1", "ROOT/a,", ",1"])
def test_a_string_that_is_not_of_paths_and_weights_is_refused(text, root):
  with pytest.raises(AnystepError) as refused:
    read_mixture(text.replace("ROOT", str(root)))
  assert (refused.value.code, refused.value.kind) == (78, "mixture_invalid")
  assert refused.value.fields["expected"] == "path,weight joined by ;"


def test_a_file_that_is_not_there_is_missing(tmp_path):
  with pytest.raises(AnystepError) as refused:
    read_mixture(str(tmp_path / "mixture.json"))
  assert (refused.value.code, refused.value.kind) == (66, "mixture_missing")


@pytest.mark.parametrize("place", ["files/c4-train.array_record-*", "files", "files/c4-train.array_record-0"])
def test_data_files_in_the_place_of_a_cache_are_refused_with_the_way_to_one(place, tmp_path):
  (tmp_path / "files").mkdir()
  (tmp_path / "files" / "c4-train.array_record-0").write_bytes(b"")
  with pytest.raises(AnystepError) as refused:
    read_mixture(f"{tmp_path}/{place},1")
  assert (refused.value.code, refused.value.kind) == (78, "mixture_path")
  assert refused.value.fields["path"] == f"{tmp_path}/{place}"
  assert "anystep.tasks.text_task('" in refused.value.fix
  assert "anystep-cache --tasks=" in refused.value.fix


def test_a_cache_that_is_not_there_or_lies_under_another_name_is_refused(root, tmp_path):
  with pytest.raises(AnystepError) as refused:
    read_mixture(f"{root}/nothing,1")
  assert (refused.value.code, refused.value.kind) == (66, "cache_missing")
  (tmp_path / "renamed").symlink_to(root / "a")
  with pytest.raises(AnystepError) as refused:
    read_mixture(f"{tmp_path}/renamed,1")
  assert (refused.value.code, refused.value.kind) == (78, "mixture_path")
  assert refused.value.fields["expected"] == "the directory of a, <root>/a"


@pytest.mark.parametrize("form", [file_of, string_of])
def test_anystep_data_takes_a_mixture_of_caches_in_the_place_of_rates(form, root, written, tmp_path, capsys):
  text = form(root)
  rates = written(text) if form is file_of else text
  flags = ["--batch_size=8", "--format=jsonl", "--steps=0:3"]
  assert data_main.main(["what-was-at", f"--rates={rates}", *flags]) == 0
  printed = capsys.readouterr().out
  assert data_main.main(["what-was-at", f"--cache_dir={root}", "--rates=a=0.3,b:inner=0.7", *flags]) == 0
  assert printed == capsys.readouterr().out
  output = tmp_path / "plan.json"
  assert data_main.main(["plan", "start", f"--rates={rates}", "--batch_size=8", f"--output={output}"]) == 0
  assert Plan.read(output, fix="").segments[0].quotas == {"a": 3, "b:inner": 7}


def test_a_run_s_plan_is_changed_to_a_mixture_of_caches(root, tmp_path):
  caches.build(tmp_path / "old", task="c")
  model_dir, output = tmp_path / "model", tmp_path / "plan.json"
  model_dir.mkdir()
  start = ["plan", "start", f"--cache_dir={tmp_path}/old", "--task=c", "--batch_size=8"]
  data_main.main([*start, f"--output={model_dir}/data_plan.json"])
  (model_dir / "data_caches.json").write_text(json.dumps({"version": 1, "cache_dirs": [f"{tmp_path}/old"]}))
  change = [
    "plan",
    "change",
    f"--model_dir={model_dir}",
    "--step=5",
    f"--rates={root}/a,1;{tmp_path}/old/c,2",
  ]
  assert data_main.main([*change, f"--output={output}"]) == 0
  assert Plan.read(output, fix="").segments[-1].quotas == {"a": 1, "c": 2}
