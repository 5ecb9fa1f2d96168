"""Caches that several tests read; those that change one take a copy."""

import pathlib
import shutil

import caches
import pytest


@pytest.fixture(scope="session")
def checkout() -> pathlib.Path:
  """The folder that anystep/, tasks/, cache_job/ and train/ stand in."""
  return pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory) -> caches.SmallCache:
  """50 examples in 4 shards of 13, 13, 12, 12, by blocks of 4; nobody changes it."""
  return caches.build(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def own_cache(shared_cache, tmp_path) -> caches.SmallCache:
  """A copy of `shared_cache` to be changed."""
  shutil.copytree(shared_cache.root, tmp_path / "own")
  return shared_cache.at(tmp_path / "own")


@pytest.fixture(scope="session")
def shared_large_cache(tmp_path_factory) -> caches.SmallCache:
  """One shard of 100 records of 3 kB by blocks of 8, so several 64 KiB blocks of its file; nobody
  changes it."""
  return caches.build(
    tmp_path_factory.mktemp("large"),
    num_examples=100,
    num_shards=1,
    block_records=8,
    features=caches.LARGE_FEATURES,
    example_of=caches.large_example_of,
  )


@pytest.fixture
def own_large_cache(shared_large_cache, tmp_path) -> caches.SmallCache:
  """A copy of `shared_large_cache` to be changed."""
  shutil.copytree(shared_large_cache.root, tmp_path / "large")
  return shared_large_cache.at(tmp_path / "large")
