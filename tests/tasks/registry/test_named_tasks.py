"""From a name to registered tasks, their rates and their caches: one way for programs, trainer and SeqIO."""

import ast
import pathlib

import pytest
import seqio

from anystep.errors import AnystepError
from anystep.tasks.registry import named_tasks
from anystep.tasks.registry.named_tasks import find_all_tasks, find_named_tasks, find_task, match_names

ROOT = pathlib.Path(__file__).parents[3]
FIX = "correct the name"
SPLITS = {"named_one": ["train", "test"], "named_two": ["train"]}


def add_task(name):
  return seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=SPLITS[name]),
    preprocessors=[seqio.CacheDatasetPlaceholder()],
    output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
  )


TASKS = {name: add_task(name) for name in SPLITS}


def add_mixture(name, rates):
  return seqio.MixtureRegistry.add(name, rates)


MIXTURE = add_mixture("named_mixture", [("named_two", 3), ("named_one", 0.5)])
FAILING = add_mixture("named_failing", [("named_one", lambda task: {}["rate"])])


def test_a_task_is_itself_at_rate_one():
  for name in ("named_one", TASKS["named_one"]):
    named = find_named_tasks(name, "no_split_of_it", fix=FIX)
    assert (dict(named.tasks), named.cache_dirs) == ({"named_one": TASKS["named_one"]}, ())
    assert named.compute_rates([]) == {"named_one": 1}


@pytest.mark.parametrize("name", ["named_mixture", MIXTURE], ids=["name", "object"])
def test_a_mixture_is_its_tasks_that_have_the_split_at_its_rates(name):
  assert find_named_tasks(name, "train", fix=FIX).compute_rates([]) == {"named_two": 3, "named_one": 0.5}
  assert find_named_tasks(name, "test", fix=FIX).compute_rates([]) == {"named_one": 0.5}


def test_rates_are_computed_with_the_caches_of_these_directories_alone():
  seen = []

  def rate(task):
    seen.append(list(seqio.utils.get_global_cache_dirs()))
    return 2.0

  mixture = seqio.Mixture("named_seen", [("named_one", rate)])
  before = list(seqio.utils.get_global_cache_dirs())
  assert find_named_tasks(mixture, "train", fix=FIX).compute_rates(["a", "b"]) == {"named_one": 2.0}
  assert seen == [["a", "b"]]
  assert list(seqio.utils.get_global_cache_dirs()) == before


def test_rates_that_fail_are_refused():
  with pytest.raises(AnystepError) as refused:
    find_named_tasks(FAILING, "train", fix=FIX).compute_rates([])
  assert (refused.value.code, refused.value.kind) == (78, "rates")
  assert refused.value.fields["mixture"] == "named_failing"
  assert refused.value.fields["got"] == "KeyError: 'rate'"


def test_a_split_that_no_task_has_is_refused():
  with pytest.raises(AnystepError) as refused:
    find_named_tasks("named_mixture", "validation", fix=FIX)
  assert (refused.value.code, refused.value.kind) == (78, "split")
  assert refused.value.fields["expected"] == "test or train"


@pytest.mark.parametrize(
  "find", [find_task, find_all_tasks, lambda name, fix: find_named_tasks(name, "", fix=fix)]
)
def test_a_name_that_is_not_registered_is_refused_with_the_nearest(find):
  with pytest.raises(AnystepError) as refused:
    find("named_onne", fix=FIX)
  assert (refused.value.code, refused.value.kind, refused.value.fix) == (64, "task_unknown", FIX)
  assert refused.value.fields["got"] == "named_onne"
  assert refused.value.fields["nearest"].startswith("named_one")


def test_a_mixture_is_no_task_but_has_some():
  with pytest.raises(AnystepError, match="task_unknown"):
    find_task("named_mixture", fix=FIX)
  assert find_all_tasks("named_mixture", fix=FIX) == [TASKS["named_one"], TASKS["named_two"]]
  assert find_all_tasks("named_one", fix=FIX) == [TASKS["named_one"]]


def test_patterns_are_mixtures_or_expressions_of_whole_names():
  assert match_names("named_mixture") == match_names("named_(one|two)") == {"named_one", "named_two"}
  assert match_names("named_") == set()


def test_no_other_module_looks_into_seqio_s_registries():
  found = set()
  for folder in ("anystep", "tasks", "cache_job", "train"):
    for path in (ROOT / folder).rglob("*.py"):
      for node in ast.walk(ast.parse(path.read_text())):
        looks = isinstance(node, ast.Attribute) and node.attr in ("get", "names", "get_mixture_or_task")
        if looks and "seqio." in ast.unparse(node) and "Registry" in ast.unparse(node):
          found.add(path.resolve())
  assert found == {pathlib.Path(named_tasks.__file__).resolve()}
