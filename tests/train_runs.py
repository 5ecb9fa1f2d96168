"""Runs of the trainer that end before they are done, and what is left of a checkpoint when it is changed."""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

from anystep.streams.stream import Stream
from anystep.train import main
from anystep.train.checkpoints import integrity

TOTAL_STEPS, CHECKPOINT_PERIOD = 7, 3
# What a program's process needs to find the sources and the tests' tasks.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1::-1]))}


class Killed(BaseException):
  """Stands for the end of the process: nothing in the product catches it."""


def kill_at(monkeypatch, step):
  """The process ends when it asks for the batch of a step."""

  def next_batch(stream, original=Stream.__next__):
    if stream.step == step:
      raise Killed
    return original(stream)

  monkeypatch.setattr(Stream, "__next__", next_batch)


def train_until(step, arguments, monkeypatch):
  """Trains, and is killed when the batch of a step is asked for."""
  with monkeypatch.context() as patch:
    kill_at(patch, step)
    with pytest.raises(Killed):
      main.main(arguments)


def program(arguments):
  """The command line of the installed program."""
  return [str(Path(sys.executable).with_name("anystep-train")), *arguments[1:]]


def sign(directory):
  """Makes the integrity file and the marker of a checkpoint fit its files, as they are now."""
  path = directory / "integrity.json"
  document = json.loads(path.read_text())
  for name in document["files"]:
    document["files"][name] = integrity.fingerprint(directory / name)
  _write(directory, document)


def as_version_1(directory):
  """Makes a checkpoint what anystep 0.1 wrote."""
  (directory / "trained_with.json").unlink()
  files = {
    name: integrity.fingerprint(directory / name, algorithm="crc32c")
    for name in integrity.file_names(directory)
    if name not in ("integrity.json", "commit_success.txt")
  }
  _write(directory, {"version": 1, "files": files})


def _write(directory, document):
  text = json.dumps(document)
  (directory / "integrity.json").write_text(text)
  (directory / "commit_success.txt").write_text(hashlib.sha256(text.encode()).hexdigest())
