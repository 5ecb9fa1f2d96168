"""Runs of the trainer that are killed for real, at moments that are picked by what they write."""

import random
import re
import signal

import pytest
from fault_cases import TRAINER
from fault_runs import AFTER, Fault, Run, zygote

from anystep.train import main
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.reports.step_log import read_step_log

TOTAL_STEPS, CHECKPOINT_PERIOD = 12, 3
SETTINGS = {"TRAIN_STEPS": TOTAL_STEPS, "CHECKPOINT_PERIOD": CHECKPOINT_PERIOD}
STEP_LOG, SAVE = "^step_log/", "^checkpoint_"


@pytest.fixture(scope="module")
def programs():
  with zygote(*TRAINER) as started:
    yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Where the run goes that the others are compared with; the first test that needs one trains it."""
  return tmp_path_factory.mktemp("runs")


@pytest.fixture
def reference(runs, command):
  """The directory of a run that nothing disturbs."""
  if not (runs / "undisturbed").exists():
    main.main(command(MODEL_DIR=repr(str(runs / "undisturbed")), **SETTINGS))
  return runs / "undisturbed"


def kill(programs, command, model_dir, fault):
  """Runs the trainer until the fault kills it; returns the path, in its directory, at which that struck."""
  run = Run(program="anystep.train.main", arguments=command(**SETTINGS)[1:], root=model_dir, fault=fault)
  ended = programs.run(run)
  assert (ended.status, bool(ended.struck)) == (-signal.SIGKILL, True), (fault, ended)
  assert re.search(fault.path, ended.struck[1])
  return ended.struck[1]


def steps_logged(model_dir):
  return [record.step for start in read_step_log(model_dir) for record in start]


@pytest.mark.long
def test_a_process_that_is_killed_for_real_goes_on_where_it_was(programs, reference, command, tmp_path):
  model_dir = tmp_path / "model"
  fault = Fault(kind="write", path=STEP_LOG, at=7, when=AFTER)
  assert kill(programs, command, model_dir, fault).startswith("step_log/")
  assert steps_logged(model_dir) == list(range(8))
  main.main(command(**SETTINGS))
  comparison = compare_runs(reference, model_dir)
  assert comparison.identical, comparison.verdict
  assert comparison.killed_at == 8
  # A save waits for the one before it, so a kill may take the last one alone.
  assert comparison.resumed_from in (3, 6)


@pytest.mark.soak
@pytest.mark.parametrize("attempt", range(10))
def test_a_run_killed_again_and_again_is_the_undisturbed_one(
  attempt, programs, reference, command, tmp_path, capsys
):
  """Killed soon after its first step, where nothing of it is seen; then within a save, and between steps."""
  chance = random.Random(attempt)
  model_dir = tmp_path / "model"
  some_time = Fault(kind="write", path=STEP_LOG, after_seconds=chance.uniform(0, 0.1))
  # A save has over forty operations, and a restart may remove what an unfinished one left.
  within_a_save = Fault(path=SAVE, at=chance.randrange(1, 40))
  between_steps = Fault(kind="write", path=STEP_LOG, at=chance.randrange(1, 4), when=AFTER)
  kill(programs, command, model_dir, some_time)
  assert steps_logged(model_dir)
  struck = []
  for fault in chance.sample([within_a_save, between_steps], 2):
    struck.append(kill(programs, command, model_dir, fault))
  main.main(command(**SETTINGS))
  comparison = compare_runs(reference, model_dir)
  assert comparison.identical, (struck, comparison.verdict)
  with capsys.disabled():
    print(f"\nkilled 3 times, at {' and '.join(struck)}: {comparison.verdict}")
