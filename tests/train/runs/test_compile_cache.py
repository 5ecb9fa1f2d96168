"""Compiled steps are kept where nobody else can write."""

import os
import subprocess
import sys

import jax
import pytest
from train_runs import ENVIRONMENT

from anystep.train.runs import compile_cache
from anystep.train.runs.compile_cache import keep_compiled


@pytest.fixture
def settings(tmp_path, monkeypatch):
  """JAX's settings as they are before anybody sets one, and a home of one's own; set back afterwards."""
  names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update("jax_compilation_cache_dir", None)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  yield tmp_path / "cache" / "anystep" / "compiled"
  for name, value in before.items():
    jax.config.update(name, value)


def test_the_folder_is_the_users_alone(settings, capsys):
  keep_compiled()
  folder = jax.config.jax_compilation_cache_dir
  assert os.path.dirname(folder) == str(settings)
  for path in (settings, folder):
    assert os.stat(path).st_mode & 0o777 == 0o700
  assert capsys.readouterr().err == ""
  # Another start has the same.
  jax.config.update("jax_compilation_cache_dir", None)
  keep_compiled()
  assert folder == jax.config.jax_compilation_cache_dir


def open_to_the_group(folder, tmp_path):
  folder.mkdir(parents=True)
  folder.chmod(0o770)


def a_link(folder, tmp_path):
  folder.parent.mkdir(parents=True)
  (tmp_path / "elsewhere").mkdir(mode=0o700)
  folder.symlink_to(tmp_path / "elsewhere")


def a_file(folder, tmp_path):
  folder.parent.mkdir(parents=True)
  folder.touch()


@pytest.mark.parametrize("make", [open_to_the_group, a_link, a_file])
def test_a_folder_that_others_could_write_is_not_used_and_a_line_says_so(make, settings, tmp_path, capsys):
  make(settings, tmp_path)
  keep_compiled()
  assert jax.config.jax_compilation_cache_dir is None
  assert capsys.readouterr().err.startswith("compiled steps are not kept for the next start: ")


def test_another_users_folder_is_not_used(settings, monkeypatch, capsys):
  monkeypatch.setattr(compile_cache.os, "geteuid", lambda: os.getuid() + 1)
  keep_compiled()
  assert jax.config.jax_compilation_cache_dir is None
  assert "another user's" in capsys.readouterr().err


def test_a_cache_that_jax_was_given_stays(settings, tmp_path):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
  keep_compiled()
  assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
  assert not settings.exists()


@pytest.mark.long
def test_what_one_process_compiled_the_next_one_reads(tmp_path):
  program = (
    "import jax; from anystep.train.runs.compile_cache import keep_compiled; keep_compiled();"
    "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0);"
    "print(float(jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.ones(9))))"
  )
  environment = {key: value for key, value in ENVIRONMENT.items() if "COMPILATION_CACHE" not in key}
  environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_LOGGING_LEVEL": "DEBUG"}
  runs = [
    subprocess.run(
      [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    for _ in range(2)
  ]
  assert runs[0].stdout == runs[1].stdout
  hits = ["Persistent compilation cache hit for 'jit__lambda" in run.stderr for run in runs]
  assert hits == [False, True]
