"""Programs find mistakes that need no TensorFlow before they import it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_TRAIN = ["--gin_file=gin_configs/examples/stdlib_tiny.gin", "--gin.MODEL_DIR='TMP/model'"]
_MISTAKES = {
  "anystep.train.main": [
    ([], "flags"),
    (["--gin_file=nowhere.gin"], "gin_file"),
    (["--gin_file=TMP/syntax.gin"], "gin_file"),
    (["--gin_file=TMP/import.gin"], "module_import"),
    ([*_TRAIN, "--dryrun"], "flags"),
    ([*_TRAIN, "--gin.BATCHSIZE=3"], "gin_unknown_macro"),
    ([*_TRAIN, "--gin_file=TMP/macro.gin"], "gin_unknown_macro"),
    ([*_TRAIN, "--gin.BATCH_SIZE=eight"], "gin_binding"),
    ([*_TRAIN, "--gin.MODEL_DIR=%gin.REQUIRED"], "gin_required"),
    ([*_TRAIN, "--gin.BATCH_SIZE=16.0"], "gin_value"),
    ([*_TRAIN, "--gin.MIXTURE_OR_TASK_MODULE='my_tasks'"], "module_import"),
    ([*_TRAIN, "--gin.CACHE_DIR=None"], "cache_dir"),
    ([*_TRAIN, "--gin.CACHE_DIR='TMP/none'"], "cache_missing"),
    ([*_TRAIN, "--gin.CACHE_DIR='TMP/damaged'"], "file_missing"),
    ([*_TRAIN, "--gin.MIXTURE_OR_TASK_NAME='TMP/none.json'"], "mixture_missing"),
    ([*_TRAIN, "--gin.DATA_PLAN='TMP/none.json'"], "plan_missing"),
    ([*_TRAIN, "--cache_if_missing", "--gin.MODEL_DIR='TMP/broken'"], "run_invalid"),
    ([*_TRAIN, "--cache_if_missing", "--gin.MODEL_DIR='TMP/running'"], "lock_invalid"),
  ],
  "anystep.cache_job.main": [
    (["--output_cache_dir=TMP/c"], "flags"),
    (["--tasks=a", "--output_cache_dir=TMP/c", "--num_shards=2", "--min_shards=3"], "flags_exclusive"),
    (["--tasks=a", "--output_cache_dir=TMP/c", "--module_import=my_tasks"], "module_import"),
    (["--tasks=a", "--output_cache_dir=TMP/syntax.gin"], "NotADirectoryError"),
  ],
  "anystep.tasks.data_program.main": [
    (["show"], "arguments"),
    (["show", "--cache_dir=TMP/none", "--task=a", "--batch_size=2", "--steps=0:1"], "cache_missing"),
    (["preview", "--task=a", "--module_import=my_tasks"], "module_import"),
  ],
  "anystep.tasks.vocab_program.main": [
    (["train", "--task=a", "--size=99"], "arguments"),
    (["train", "--task=a", "--size=99", "--output=TMP/v", "--module_import=my_tasks"], "module_import"),
  ],
}
_PROGRAM = """
import importlib, json, sys
kinds = []
for arguments in json.loads(sys.argv[2]):
  program = importlib.import_module(sys.argv[1])
  try:
    # absl takes the program's name first, argparse does not.
    program.main(["program", *arguments] if sys.argv[3] == "absl" else arguments)
  except Exception as error:
    kinds.append(getattr(error, "kind", type(error).__name__))
slow = [name for name in ("tensorflow", "seqio", "jax", "apache_beam") if name in sys.modules]
print(json.dumps([kinds, slow]))
"""


@pytest.mark.parametrize("module", _MISTAKES)
def test_mistakes_that_need_no_tensorflow_come_before_it_is_imported(module, tmp_path):
  (tmp_path / "syntax.gin").write_text("BATCH_SIZE = [8\n")
  (tmp_path / "import.gin").write_text("import my_tasks\n")
  (tmp_path / "macro.gin").write_text("BATCH_SZIE = 8\n")
  damaged = tmp_path / "damaged" / "stdlib_span_corruption"
  damaged.mkdir(parents=True)
  (damaged / "COMPLETED").write_text(f"train {'0' * 64}\n")
  (tmp_path / "broken").mkdir()
  (tmp_path / "broken" / "run.json").write_text("{}")
  (tmp_path / "running" / ".lock").mkdir(parents=True)
  cases = json.dumps([arguments for arguments, _ in _MISTAKES[module]]).replace("TMP", str(tmp_path))
  style = "absl" if module in ("anystep.train.main", "anystep.cache_job.main") else "argparse"
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM, module, cases, style],
    capture_output=True,
    text=True,
    cwd=_ROOT,
    env=os.environ | {"PYTHONPATH": ""},
    check=True,
  )
  kinds, slow_modules = json.loads(done.stdout.splitlines()[-1])
  assert kinds == [kind for _, kind in _MISTAKES[module]]
  assert slow_modules == []


@pytest.mark.parametrize("module", _MISTAKES)
def test_the_module_of_a_program_runs_it(module):
  done = subprocess.run(
    [sys.executable, "-m", module, "--nonsense"], capture_output=True, text=True, cwd=_ROOT, check=False
  )
  assert done.returncode == 64, done.stderr
  (line,) = done.stderr.splitlines()
  assert line.startswith("ERROR code=64 ")


_REMARKS = """WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795341713.187622   27737 port.cc:153] oneDNN custom operations are on.
E0000 00:00:1795341637.223323   24365 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error
E0000 00:00:1795341637.223323   24365 cuda_dnn.cc:8579] Unable to register cuDNN factory
2024-05-05 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.
2024-05-05 10:00:00.123456: E external/local_xla/cuda/cuda_fft.cc:485] Unable to register cuFFT
To enable the following instructions: AVX2 FMA, rebuild TensorFlow with the appropriate compiler flags.
"""
_OTHERS = """somebody's own line
E0000 00:00:1795341637.223323   24365 reader.cc:12] the disk fails
"""


@pytest.mark.parametrize("fails", [False, True])
def test_tensorflow_is_imported_without_remarks_and_what_else_is_said_is_shown(fails, tmp_path):
  """A package in TensorFlow's place says to stderr's file descriptor what TensorFlow says, and more."""
  (tmp_path / "tensorflow").mkdir()
  lines = "import os\n" + f"os.write(2, {(_REMARKS + _OTHERS).encode()!r})\n" + ("1 / 0" if fails else "")
  (tmp_path / "tensorflow" / "__init__.py").write_text(lines)
  done = subprocess.run(
    [sys.executable, "-c", "import anystep.tasks, sys, tensorflow; print('after', file=sys.stderr)"],
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])},
    check=False,
  )
  if fails:
    assert done.returncode == 1
    assert done.stderr.startswith(_REMARKS + _OTHERS)
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
  else:
    assert (done.returncode, done.stderr) == (0, _OTHERS + "after\n")


def test_tensorflow_is_imported_where_stderr_is_closed(tmp_path):
  (tmp_path / "tensorflow").mkdir()
  (tmp_path / "tensorflow" / "__init__.py").write_text("print('imported')\n")
  done = subprocess.run(
    ["sh", "-c", f"{sys.executable} -c 'import anystep.tasks, tensorflow' 2>&-"],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])},
    check=False,
  )
  assert (done.returncode, done.stdout) == (0, "imported\n")
