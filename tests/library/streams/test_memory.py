"""Freed memory is kept where nobody asked for anything else."""

import subprocess
import sys

import pytest

from anystep.streams import memory


@pytest.fixture(autouse=True)
def _forgets(monkeypatch):
  for name in memory._SET_BY_USERS:
    monkeypatch.delenv(name, raising=False)
  memory.keep_freed_memory.cache_clear()
  yield
  memory.keep_freed_memory.cache_clear()


@pytest.mark.parametrize("name", memory._SET_BY_USERS)
def test_what_users_set_stays(monkeypatch, name):
  monkeypatch.setenv(name, "1")
  assert not memory.keep_freed_memory()


def test_a_c_library_that_has_no_such_setting_is_left_alone(monkeypatch):
  monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
  assert not memory.keep_freed_memory()


FAULTS = """
import resource
import numpy as np
from anystep.streams.memory import keep_freed_memory

def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(50):
    np.ones(1 << 18)
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_arrays_of_a_batchs_size_come_without_page_faults():
  done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
  # 50 arrays of 512 pages each, which the system would be asked for anew.
  assert int(done.stdout) < 512
