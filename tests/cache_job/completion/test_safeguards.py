"""What the job must not touch, and what it must not take for its own."""

import json

import pytest
import seqio
import small_tasks
import tensorflow as tf
from job_runs import registered, run_job, stamps_of

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.building_directories import prepare_directories
from anystep.cache_job.planning.task_work import plan_work
from anystep.cache_job.shuffle.sorted_spills import find_sorted, plan_final, sort_group
from anystep.cache_job.shuffle.spill import write_spill
from anystep.cache_job.shuffle.summaries import summarize_spills
from anystep.cache_job.state.split_job import list_source_ranges, read_plan
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.tasks.registry.fingerprint import provenance_part

NAME = "small_guarded"
NUMBER = {"number": tf.io.FixedLenFeature([], tf.int64)}


def record_files(directory, names):
  directory.mkdir(parents=True)
  for number, name in enumerate(names):
    with tf.io.TFRecordWriter(str(directory / name)) as writer:
      feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
      writer.write(
        tf.train.Example(features=tf.train.Features(feature={"number": feature})).SerializeToString()
      )


def reading(pattern, *steps, **changes):
  return seqio.Task(
    NAME,
    source=seqio.TFExampleDataSource({"train": str(pattern)}, NUMBER),
    preprocessors=[seqio.CacheDatasetPlaceholder(), *steps],
    output_features={},
    **changes,
  )


@pytest.mark.parametrize("flag", ["--index_only", "--output_format=tfrecord", "--output_format=array_record"])
def test_a_source_in_the_directory_of_its_cache_under_the_names_of_shards_is_not_touched(tmp_path, flag):
  record_files(tmp_path / NAME, [f"train.tfrecord-{k:05d}-of-00002" for k in range(2)])
  before = stamps_of(tmp_path)
  with registered(reading(tmp_path / NAME / "train.tfrecord-*")), pytest.raises(AnystepError) as caught:
    run_job(tmp_path, flag, tasks=NAME)
  assert (caught.value.code, caught.value.kind) == (77, "source_in_cache")
  assert caught.value.fields["path"].endswith("train.tfrecord-00000-of-00002")
  assert stamps_of(tmp_path) == before


def test_a_source_in_the_directory_of_its_cache_under_other_names_stays(tmp_path):
  record_files(tmp_path / NAME, ["part-0", "part-1"])
  with registered(reading(tmp_path / NAME / "part-*")):
    run_job(tmp_path, tasks=NAME)
    run_job(tmp_path, "--overwrite", tasks=NAME)
  assert {"part-0", "part-1"} <= {path.name for path in (tmp_path / NAME).iterdir()}
  open_cache(tmp_path, NAME, "train").verify()


def test_a_split_is_made_anew_beside_one_whose_name_goes_on_from_its_own(tmp_path):
  """Their files' names begin alike; an attempt at one must not be taken for the other."""
  task = small_tasks.task(NAME, sizes={"train": (3,), "train.json": (4,), "COMPLETED": (3,)})
  with registered(task):
    run_job(tmp_path, tasks=NAME)
    run_job(tmp_path, "--splits=train", "--overwrite", tasks=NAME)
  for split in task.splits:
    open_cache(tmp_path, NAME, split).verify()


def test_a_split_that_the_task_no_longer_has_stays_where_others_are_made_anew(tmp_path):
  with registered(small_tasks.task(NAME, sizes={"train": (3,), "old": (4,)})):
    run_job(tmp_path, tasks=NAME)
  with registered(small_tasks.task(NAME, sizes={"train": (5,)})):
    run_job(tmp_path, "--overwrite", tasks=NAME)
  open_cache(tmp_path, NAME, "old").verify()
  open_cache(tmp_path, NAME, "train").verify()


def test_another_way_to_read_the_same_files_is_another_source(tmp_path):
  """Or a job that goes on would mix the examples of both."""
  (tmp_path / "lines").touch()

  def provenance(*, plus):
    def read(path):
      return tf.data.TextLineDataset(path).map(lambda line: tf.strings.length(line) + plus)

    source = seqio.FileDataSource(read, {"train": str(tmp_path / "lines")})
    task = seqio.Task(NAME, source=source, preprocessors=[], output_features={})
    return json.dumps(provenance_part(task, seed=0, base_seed=0), sort_keys=True)

  assert provenance(plus=1) == provenance(plus=1)
  assert provenance(plus=1) != provenance(plus=2)


def test_sorted_spills_are_not_taken_for_those_of_others(tmp_path):
  task = small_tasks.task(NAME, sizes={"train": (5, 6)})
  options = CacheOptions(cache_dir=str(tmp_path), modules=("small_tasks",))
  with registered(task):
    works = plan_work([NAME], options)
    prepare_directories(works)
    (job,) = works[0].jobs
    for source in list_source_ranges(job):
      write_spill(job, source)
    summarize_spills(job, [0, 1])
    plan_final(job)
    sort_group(job, 0)
    assert find_sorted(job, read_plan(job), 0) is not None
    (spill,) = works[0].directory.glob(".building/*/spill-00001.json")
    spill.unlink()
    write_spill(job, list_source_ranges(job)[1])
    summarize_spills(job, [0, 1])
    plan_final(job)
    assert find_sorted(job, read_plan(job), 0) is None


def test_bad_examples_of_several_source_shards_end_the_job_at_one_more_than_are_borne(tmp_path, monkeypatch):
  """Not only when all the others are preprocessed too."""
  monkeypatch.setenv("SMALL_TASKS_LOG", str(tmp_path / "log"))

  def refuse_the_first(dataset):
    def look(example):
      with tf.control_dependencies(
        [tf.debugging.assert_greater(example["number"], tf.constant(0, tf.int64))]
      ):
        return {**example, "number": tf.identity(example["number"])}

    return dataset.map(look)

  steps = (small_tasks.observe, refuse_the_first, small_tasks.BEFORE_CACHE[2])
  task = small_tasks.task(NAME, before=steps, sizes={"train": (3,) * 6})
  with registered(task), pytest.raises(AnystepError) as caught:
    run_job(tmp_path / "c", "--max_bad_examples=2", tasks=NAME)
  assert (caught.value.code, caught.value.kind) == (65, "bad_examples")
  assert int(caught.value.fields["got"]) == 3
  assert {name.split("-")[1] for name in (tmp_path / "log").read_text().split()} == {"0", "1", "2"}


def test_what_no_worker_could_reach_is_refused():
  with pytest.raises(AnystepError) as caught:
    CacheOptions(cache_dir="ftp://host/caches")
  assert (caught.value.code, caught.value.kind) == (78, "store_unsupported")


def test_directories_are_the_same_from_wherever_workers_look(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  options = CacheOptions(cache_dir="caches", tfds_data_dir="data")
  assert (options.cache_dir, options.tfds_data_dir) == (str(tmp_path / "caches"), str(tmp_path / "data"))


def test_lengths_that_nothing_takes_are_refused():
  with pytest.raises(AnystepError) as caught:
    CacheOptions(cache_dir="c", task_feature_lengths={"targets": 8})
  assert (caught.value.code, caught.value.kind) == (64, "flags_exclusive")
