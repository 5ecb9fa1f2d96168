"""What the README says works as it says, in the order in which it says it."""

import re
import sys
from pathlib import Path

import numpy as np

from anystep.cache_job import main as cache_main
from anystep.tasks.data_program import main as data_main
from anystep.train import main as train_main

_README = (Path(__file__).parents[1] / "README.md").read_text()


def _blocks(language):
  fences = re.findall(r"^```(\w*)\n(.*?)^```", _README, re.DOTALL | re.MULTILINE)
  return [text for found, text in fences if found == language]


def test_the_way_of_a_users_task_from_registration_to_reading(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  register, read = _blocks("python")
  Path("my_tasks.py").write_text(register)
  monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
  Path("data").mkdir()
  for name in ("train-0", "train-1", "validation"):
    Path("data", f"{name}.txt").write_text("".join(f"{name} line {k}: {'words ' * 30}\n" for k in range(90)))
  commands = [
    line.split()
    for block in _blocks("")
    for line in block.replace("\\\n", "").splitlines()
    if line.startswith("anystep-")
  ]
  programs = {"anystep-cache": cache_main.main, "anystep-train": train_main.main}

  caching, verifying, training, asking = commands
  assert programs[caching[0]](caching) == 0
  assert data_main.main(verifying[1:]) == 0
  (gin_file,) = (block for block in _blocks("") if "MIXTURE_OR_TASK_NAME" in block)
  Path("my_run.gin").write_text(gin_file)
  training = [argument.replace("\"'", "'").replace("'\"", "'") for argument in training]
  assert "--dry_run" in training
  assert programs[training[0]](training) == 0
  assert data_main.main(asking[1:]) == 0
  assert "step 1000000 row 5: my_task train epoch 711111" in capsys.readouterr().out

  names: dict = {}
  exec(read, names)
  assert names["batch"]["targets"].shape == (128, 512)
  assert np.array_equal(names["cache"][123]["targets"], names["cache"].read([123])["targets"].values)


def test_the_demos_output_is_shown_as_it_was_printed():
  (output,) = (block for block in _blocks("") if "batches identical" in block)
  assert re.search(r"killed at step \d+, resumed from \d+: 200/200 batches identical", output)
