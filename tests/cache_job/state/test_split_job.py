"""Jobs carry their options to workers, and find what earlier versions left under the same identity."""

import dataclasses
import pickle

import pytest

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.state.split_job import SplitJob

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
