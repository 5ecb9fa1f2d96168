"""JAX as strict as it goes, on eight virtual CPU devices, and golden files."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

# A shell has what runs in the background ignore Ctrl-C, and so would every program that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports JAX or TensorFlow.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# Beam's gRPC runs in these processes, and its handlers of fork can crash a child that another test forks.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Many tests start the same training: it is compiled once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  _COMPILED = tempfile.TemporaryDirectory(prefix="anystep-compiled-")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# What tests run is small: it takes longer to optimize than to run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
# Tests start many programs, which import the same: where the environment keeps no bytecode (TensorFlow's
# alone takes 7 s to compile), they share it as long as the tests run.
if sys.dont_write_bytecode:
  _BYTECODE = tempfile.TemporaryDirectory(prefix="anystep-bytecode-")
  sys.dont_write_bytecode, sys.pycache_prefix = False, _BYTECODE.name
  os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
  os.environ["PYTHONPYCACHEPREFIX"] = _BYTECODE.name


def pytest_addoption(parser):
  parser.addoption("--update", action="store_true", help="write golden files anew")


@pytest.fixture
def golden(request):
  """Compares a text with a file beside the tests; `--update` writes it."""

  def compare(name: str, text: str) -> None:
    path = Path(request.fspath).parent / "golden" / name
    if request.config.getoption("--update"):
      path.parent.mkdir(exist_ok=True)
      path.write_text(text)
    assert path.read_text() == text, f"{path} differs; `pytest --update` where the change is meant"

  return compare
