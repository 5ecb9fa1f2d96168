"""What a command line selects: tasks, splits, caches elsewhere, numbers of shards."""

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil

import pytest
import seqio
import small_tasks
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from job_runs import digests_of, registered, run_job, stamps_of

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.dry_run import forecast_work
from anystep.cache_job.planning.selection import select_tasks
from anystep.cache_job.planning.task_work import plan_work
from anystep.caches.cache import open_cache, read_completed
from anystep.errors import AnystepError
from anystep.order.preshuffle import default_num_shards

SIZES = {
  "pick_a": {"train": (3, 2), "validation": (4,)},
  "pick_ab": {"train": (5,)},
  "pick_b:c": {"train": (3,), "test": (3,)},
}
TASKS = {name: small_tasks.task(name, after=(), sizes=sizes) for name, sizes in SIZES.items()}
MEMBERS = {"pick_some": {"pick_a", "pick_b:c"}, "pick_all": {"pick_a", "pick_ab", "pick_b:c"}}
_SOME = seqio.Mixture("pick_some", [(TASKS["pick_a"], 1), (TASKS["pick_b:c"], 1)])
MIXTURES = [_SOME, seqio.Mixture("pick_all", [(_SOME, 1), (TASKS["pick_ab"], 1)])]
PATTERNS = [
  *SIZES,
  *MEMBERS,
  "pick_.*",
  "pick_a",
  "pick_a.",
  ".*k_.:c",
  "pick_(a|b:c)",
  "ick_a",
  "pick_som.",
  "",
]


@pytest.fixture(autouse=True, scope="module")
def tasks():
  with registered(*TASKS.values(), *MIXTURES):
    yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  root = tmp_path_factory.mktemp("selected")
  run_job(root, tasks="pick_all")
  return root


def failure(function, *args):
  with pytest.raises(AnystepError) as caught:
    function(*args)
  return caught.value


@given(included=st.lists(st.sampled_from(PATTERNS), min_size=1), excluded=st.lists(st.sampled_from(PATTERNS)))
def test_patterns_name_whole_tasks_and_mixtures_stand_for_theirs(included, excluded):
  def named(pattern):
    return MEMBERS.get(pattern) or {name for name in SIZES if re.fullmatch(pattern, name)}

  expected = set().union(*map(named, included)) - set().union(*map(named, excluded))
  if expected and all(map(named, included)):
    assert select_tasks(included, excluded) == sorted(expected)
  else:
    error = failure(select_tasks, included, excluded)
    assert (error.code, error.kind) == (64, "task_unknown")


@pytest.mark.parametrize("wanted", ["pick_all", "pick_b:c"])
def test_an_unknown_name_is_told_the_nearest_task_or_mixture(wanted):
  error = failure(select_tasks, [wanted + "x"], [])
  assert (error.code, error.kind, error.fields["got"]) == (64, "task_unknown", wanted + "x")
  assert error.fields["nearest"].split(", ")[0] == wanted


def test_what_is_no_regular_expression_is_said_to_be_none():
  for included, excluded in ((["*"], []), (["pick_a"], ["(", "pick_a"])):
    error = failure(select_tasks, included, excluded)
    assert (error.kind, error.fields["got"]) == ("task_unknown", [*included, *excluded][len(excluded) > 0])
    assert "a regular expression" in error.fields["expected"]


def test_a_mixture_s_name_caches_its_tasks(built):
  for name, sizes in SIZES.items():
    for split in sizes:
      open_cache(built, name, split).verify()


class TestSplits:
  def test_are_cached_alone_and_added_one_by_one_to_the_same_bytes(self, built, tmp_path):
    expected = {name: digest for name, digest in digests_of(built).items() if name.startswith("pick_a/")}
    for splits in (["validation"], ["train", "validation"]):
      run_job(tmp_path, "--splits=" + ",".join(splits), tasks="pick_a")
      assert set(read_completed(tmp_path / "pick_a")) == set(splits)
    assert digests_of(tmp_path) == expected

  def test_that_are_not_named_stay_even_where_others_are_made_anew(self, built, tmp_path):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    kept = {path: stamp for path, stamp in stamps_of(tmp_path).items() if "train" in path.name}
    run_job(tmp_path, "--splits=validation", "--overwrite", "--seed=1", tasks="pick_a")
    assert kept.items() <= stamps_of(tmp_path).items()
    seeds = {split: open_cache(tmp_path, "pick_a", split).manifest.seed for split in SIZES["pick_a"]}
    assert seeds == {"train": 0, "validation": 1}
    run_job(tmp_path, "--overwrite", tasks="pick_a")
    assert digests_of(tmp_path) == digests_of(built)

  def test_of_a_cache_are_readable_while_and_after_another_fails(self, tmp_path, monkeypatch):
    run_job(tmp_path, "--splits=train", tasks="pick_a")
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "validation-0-2")
    with pytest.raises(AnystepError, match="indigestible"):
      run_job(tmp_path, tasks="pick_a")
    open_cache(tmp_path, "pick_a", "train").verify()
    assert failure(open_cache, tmp_path, "pick_a", "validation").kind == "split_missing"

  def test_leave_what_another_split_s_job_has_begun(self, built, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-1-1")
    with pytest.raises(AnystepError, match="indigestible"):
      run_job(tmp_path / "c", "--splits=train", tasks="pick_a")
    monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
    (work,) = plan_work(["pick_a"], CacheOptions(cache_dir=str(tmp_path / "c")))
    begun = "1 of them preprocessed by an earlier run" in "\n".join(forecast_work(work).lines())
    run_job(tmp_path / "c", "--splits=validation", tasks="pick_a")
    monkeypatch.setenv("SMALL_TASKS_LOG", str(log))
    run_job(tmp_path / "c", tasks="pick_a")
    done_again = {name.rpartition("-")[0] for name in log.read_text().split()}
    assert done_again == ({"train-1"} if begun else {"train-0", "train-1"})
    expected = {name: digest for name, digest in digests_of(built).items() if name.startswith("pick_a/")}
    assert digests_of(tmp_path / "c") == expected

  def test_that_a_task_does_not_have_are_passed_over_and_said(self, tmp_path, capsys):
    run_job(tmp_path, "--splits=test", tasks="pick_all")
    assert capsys.readouterr().out.splitlines() == [
      "pick_a: it has none of the splits, left out",
      "pick_ab: it has none of the splits, left out",
      "pick_b:c: cached",
      "  test: 3 examples, 0.1 MiB in 1 shard",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["pick_b"]

  def test_that_no_task_has_are_refused(self, tmp_path):
    error = failure(lambda: run_job(tmp_path, "--splits=train,validatoin", tasks="pick_all"))
    assert (error.code, error.kind, error.fields["got"]) == (64, "split_unknown", "validatoin")
    assert error.fields["nearest"].split(", ")[0] == "validation"
    assert list(tmp_path.iterdir()) == []


class TestOtherCaches:
  def test_that_are_complete_stand_for_one_here(self, built, tmp_path, capsys):
    flag = f"--tasks_additional_cache_dirs={tmp_path / 'nothing'},{built}"
    for more in ((), ("--overwrite",)):
      run_job(tmp_path, flag, *more, tasks="pick_ab")
      assert capsys.readouterr().out == (
        f"pick_ab: a complete cache is in {built}, left out (not so with --ignore_other_caches)\n"
      )
    assert list(tmp_path.iterdir()) == []
    run_job(tmp_path, flag, "--ignore_other_caches", tasks="pick_ab")
    assert capsys.readouterr().out.startswith("pick_ab: cached\n")
    open_cache(tmp_path, "pick_ab", "train").verify()

  def test_do_not_count_where_a_split_is_missing_or_seqio_made_them(self, built, tmp_path):
    for name in ("partial", "seqio"):
      shutil.copytree(built, tmp_path / name)
    (tmp_path / "partial/pick_a/manifest.validation.json").unlink()
    for path in (tmp_path / "seqio/pick_a").glob("manifest.*"):
      path.unlink()
    (tmp_path / "seqio/pick_a/COMPLETED").write_text("")
    others = (str(tmp_path / "partial"), str(tmp_path / "seqio"))
    options = CacheOptions(cache_dir=str(tmp_path / "c"), other_cache_dirs=others)
    (work,) = plan_work(["pick_a"], options)
    assert [job.split for job in work.jobs] == ["train", "validation"]
    # Where the split that it lacks is not asked for, the other root is as good as any.
    (work,) = plan_work(["pick_a"], dataclasses.replace(options, splits=("train",)))
    assert (work.jobs, work.elsewhere) == ((), others[0])

  def test_of_what_the_task_was_are_refused_by_name(self, built, tmp_path):
    root = tmp_path / "other"
    shutil.copytree(built, root)
    path = root / "pick_ab" / "manifest.train.json"
    document = json.loads(path.read_text())
    reader = document["fingerprint"]["reader"] | {"version": 0}
    canonical = json.dumps(reader, sort_keys=True, separators=(",", ":"))
    document["fingerprint"] |= {
      "reader": reader,
      "reader_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
    }
    path.write_text(json.dumps(document))
    (root / "pick_ab/COMPLETED").write_text(f"train {hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    flag = f"--tasks_additional_cache_dirs={root}"
    error = failure(lambda: run_job(tmp_path / "c", flag, tasks="pick_ab"))
    assert (error.code, error.kind, error.fields["item"]) == (76, "task_changed", "version")
    assert str(root) in error.__notes__[0]


@given(
  examples=st.integers(0, 10**6),
  record_bytes=st.integers(0, 1 << 27),
  block=st.integers(1, 64),
  least=st.integers(0, 99),
  most=st.integers(0, 99),
)
def test_the_default_number_of_shards_is_bounded_as_seqio_bounds_its_own(
  examples, record_bytes, block, least, most
):
  expected = default_num_shards(examples, record_bytes, block)
  if least > 0:
    expected = max(expected, least)
  if most > 0:
    expected = min(expected, most)
  options = CacheOptions(cache_dir="cache", block_records=block, min_shards=least, max_shards=most)
  assert options.choose_num_shards(examples, record_bytes) == expected


def test_bounds_leave_a_cache_that_is_within_them_and_refuse_another(built, tmp_path):
  shutil.copytree(built, tmp_path, dirs_exist_ok=True)
  for flags in (
    ["--max_shards=1"],
    ["--min_shards=1", "--max_shards=9"],
    ["--min_shards=3", "--max_shards=1"],
  ):
    run_job(tmp_path, *flags, tasks="pick_ab")
  assert digests_of(tmp_path) == digests_of(built)
  error = failure(lambda: run_job(tmp_path, "--min_shards=2", tasks="pick_ab"))
  assert (error.code, error.kind, error.fields["option"]) == (76, "cache_options", "num_shards")
  assert (error.fields["expected"], error.fields["got"]) == (2, 1)


@pytest.mark.parametrize(
  "options",
  [
    {"num_shards": 2, "min_shards": 1},
    {"num_shards": 2, "max_shards": 4},
    {"index_only": True, "seed": 1},
    {"index_only": True, "num_shards": 2},
    {"index_only": True, "cache_at": "end"},
  ],
)
def test_options_that_contradict_each_other_are_refused(options):
  error = failure(lambda: CacheOptions(cache_dir="c", **options))
  assert (error.code, error.kind) == (64, "flags_exclusive")
  for name in options:
    assert name.split("_")[0] in error.fields["expected"]


@pytest.mark.parametrize("name", ["num_shards", "block_records", "max_bad_examples", "determinism_check"])
def test_a_number_that_no_cache_has_is_refused_with_its_flag(name):
  error = failure(lambda: CacheOptions(cache_dir="c", **{name: -1}))
  assert (error.code, error.kind, error.fields["got"]) == (64, "option_limit", -1)
  assert f"--{name}" in error.fields["expected"]
  assert f"--{name}" in error.fix


def test_a_flag_of_seqio_s_logging_is_accepted(built, capsys):
  run_job(built, "--alsologtostderr", tasks="pick_ab")
  assert capsys.readouterr().out == "pick_ab: the cache is complete, left as it is\n"


# Workers have other current directories.
PREPARED = str(pathlib.Path("prepared").absolute())


class PreparedTexts(small_tasks.NumberedTexts):
  """Gives texts only where TensorFlow Datasets would be read from a folder of this name."""

  def get_dataset(self, *args, **kwargs):
    folder = seqio.utils._TFDS_DATA_DIR_OVERRIDE
    return super().get_dataset(*args, **kwargs).filter(lambda example: tf.constant(folder == PREPARED))


def test_workers_are_told_where_tensorflow_datasets_lie(tmp_path, monkeypatch):
  monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", None)
  task = seqio.Task(
    "pick_prepared",
    source=PreparedTexts({"train": (5,)}),
    preprocessors=[*small_tasks.BEFORE_CACHE, seqio.CacheDatasetPlaceholder()],
    output_features={"targets": seqio.Feature(small_tasks.VOCABULARY)},
  )
  with registered(task):
    run_job(tmp_path, "--tfds_data_dir=prepared", tasks=task.name)
  assert len(open_cache(tmp_path, task.name, "train")) == 4
