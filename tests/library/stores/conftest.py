"""A store's server for the tests of this folder."""

import itertools

import pytest
from store_servers.fixtures import SCHEMES, store_root

_NUMBERS = itertools.count()


@pytest.fixture(scope="session", params=SCHEMES)
def bucket(request):
  with store_root(request.param) as path:
    yield path


@pytest.fixture
def folder(bucket):
  """An empty folder of the store, of each test's own."""
  return f"{bucket}/tests/{next(_NUMBERS)}"
