"""Jobs carry their options to workers, and find what earlier versions left under the same identity."""

import dataclasses
import pickle

import pytest

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.state.source_names import write_names
from anystep.cache_job.state.split_job import SplitJob
from anystep.errors import AnystepError

JOB = SplitJob(
  task="t",
  split="train",
  directory="d",
  source_shards=("a", "b"),
  seqio_cache=None,
  options=CacheOptions(
    cache_dir="cache",
    modules=("m",),
    range_examples=7,
    seed=1,
    base_seed=2,
    min_shards=3,
    max_shards=4,
    block_records=8,
    container="tfrecord",
    cache_at="end",
    task_feature_lengths={"targets": 5, "inputs": 6},
    char_counts=True,
    tfds_data_dir="/x",
    max_bad_examples=9,
    determinism_check=1.5,
  ),
)
OF_SEQIO = dataclasses.replace(
  JOB,
  seqio_cache="/old/t",
  options=CacheOptions(
    cache_dir="cache", seqio_cache_dir="/old", num_shards=5, block_records=8, container="tfrecord"
  ),
)
# Another value of each option: whether a job with it goes on in the same directory.
OTHER_VALUES = {
  "cache_dir": ("other", True),
  "other_cache_dirs": (("other",), True),
  "modules": (("other",), True),
  "splits": (("train",), True),
  "seed": (9, False),
  "base_seed": (9, False),
  "num_shards": (9, False),
  "min_shards": (9, False),
  "max_shards": (9, False),
  "block_records": (9, False),
  "container": ("tfrecord", False),
  "cache_at": ("end", False),
  "task_feature_lengths": ({"targets": 9}, False),
  "range_examples": (9, False),
  "char_counts": (True, False),
  # The job's own `seqio_cache` decides.
  "seqio_cache_dir": ("/other", True),
  "max_bad_examples": (9, True),
  "determinism_check": (9.0, True),
  "worker_memory_mib": (4096, True),
  "resume": (False, True),
  "index_only": (True, False),
  "overwrite": (True, True),
  "tfds_data_dir": ("/other", False),
  "pipeline_options": (("--runner=FlinkRunner",), True),
}


@pytest.mark.parametrize(
  ("job", "reader", "identity"), [(JOB, 1, "3606be4c02bc0f08"), (OF_SEQIO, [2], "a0e9e8ebe012d75e")]
)
def test_identities_are_those_of_version_0_1(job, reader, identity):
  assert job.identity({"reader": reader}) == identity


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CacheOptions)])
def test_an_identity_changes_with_the_options_that_decide_bytes_and_no_others(name):
  value, is_same = OTHER_VALUES[name]
  values = {"cache_at": "end"} if name == "task_feature_lengths" else {}
  jobs = [
    dataclasses.replace(JOB, options=CacheOptions(**{"cache_dir": "cache", **values, **changed}))
    for changed in ({}, {name: value})
  ]
  assert (jobs[0].identity({}) == jobs[1].identity({})) == is_same


def test_a_worker_gets_the_job_with_its_options():
  copy = pickle.loads(pickle.dumps(JOB))
  assert (copy.options, copy.identity({})) == (JOB.options, JOB.identity({}))


@pytest.mark.parametrize("names", [(), ("a",), tuple(f"/data/Zürich [0:{k}]" for k in range(5000))])
def test_what_travels_to_workers_does_not_grow_with_the_source_and_names_all_of_it(names, tmp_path):
  job = dataclasses.replace(JOB, directory=str(tmp_path), source_shards=names)
  write_names(tmp_path, names)
  sent = pickle.dumps(job.for_workers())
  assert len(sent) < 2000
  copy = pickle.loads(sent)
  assert (len(copy.source_shards), tuple(copy.source_shards)) == (len(names), names)
  assert copy.source_shards[1:3] == names[1:3]
  assert (copy.identity({}), copy.for_workers()) == (job.identity({}), copy)


def test_names_that_are_not_those_of_the_job_are_refused(tmp_path):
  job = dataclasses.replace(JOB, directory=str(tmp_path)).for_workers()
  (tmp_path / "source_shards.json").write_text('["a", "c"]')
  with pytest.raises(AnystepError, match=r"code=65 kind=job_state_invalid .*source_shards\.json"):
    _ = job.source_shards[0]
