"""SIGTERM ends a run with a committed checkpoint and 75; run again, it is the run that nothing disturbed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from train_runs import ENVIRONMENT, program

from anystep.errors import AnystepError
from anystep.streams.stream import Stream
from anystep.train import main
from anystep.train.checkpoints import checkpoints
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.reports.evaluation import Evaluator
from anystep.train.reports.step_log import read_step_log
from anystep.train.runs import prepared_run, trainer
from anystep.train.runs.termination import Termination

EVALUATED = {"EVAL_DATASET": "@eval/datasets.DatasetConfig()"}


def terminate():
  os.kill(os.getpid(), signal.SIGTERM)


def at_batch(step):
  """Before a step's batch is there."""

  def patch(monkeypatch):
    def next_batch(stream, original=Stream.__next__):
      if stream.step == step:
        terminate()
      return original(stream)

    monkeypatch.setattr(Stream, "__next__", next_batch)

  return patch


def before(place, name):
  """When a function is called."""

  def patch(monkeypatch):
    original = getattr(place, name)

    def disturbed(*args, **kwargs):
      terminate()
      return original(*args, **kwargs)

    monkeypatch.setattr(place, name, disturbed)

  return patch


def within_the_first_save(monkeypatch):
  """While a thread writes the checkpoint of step 3, and the next step is about to begin."""
  at_batch(3)(monkeypatch)
  answered = threading.Event()

  def save(path, state, _original=checkpoints.save_arrays):
    assert answered.wait(60)
    _original(path, state)

  def handle(termination, *args, _original=Termination._handle):
    _original(termination, *args)
    answered.set()

  monkeypatch.setattr(Termination, "_handle", handle)
  monkeypatch.setattr(checkpoints, "save_arrays", save)


MOMENTS = {
  "while the data is looked for": (before(trainer, "find_datasets"), []),
  "while a checkpoint is looked for": (before(trainer, "find_checkpoint"), []),
  "while the model is built": (before(prepared_run, "place_state"), []),
  "before the first batch": (at_batch(0), []),
  "before the second batch": (at_batch(1), [2]),
  "before the last batch of a period": (at_batch(2), [3]),
  "within a save": (within_the_first_save, [3, 4]),
  "before the last batch": (at_batch(6), [3, 6, 7]),
  "while it evaluates at the end": (before(Evaluator, "evaluate"), [3, 6, 7]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_at_any_moment_ends_with_75_and_run_again_it_is_the_undisturbed_run(
  moment, reference, command, tmp_path, monkeypatch, capsys
):
  patch, saved = MOMENTS[moment]
  handler = signal.getsignal(signal.SIGTERM)
  with monkeypatch.context() as patched:
    patch(patched)
    with pytest.raises(AnystepError) as ended:
      main.main(command(**EVALUATED))
  assert (ended.value.code, ended.value.kind) == (75, "preempted")
  assert ended.value.fix == "run the same command again"
  assert signal.getsignal(signal.SIGTERM) is handler
  assert checkpoints.checkpoint_steps(tmp_path / "model") == saved
  assert not (tmp_path / "model" / ".lock").exists()
  # What a checkpoint contains is in the log, and no step beyond it was taken.
  logged = [record.step for start in read_step_log(tmp_path / "model") for record in start]
  assert logged == list(range(saved[-1] if saved else 0))
  capsys.readouterr()
  main.main(command(**EVALUATED))
  captured = capsys.readouterr()
  assert "teacher-forced, after 7 steps" in captured.out
  assert (f"resumed from checkpoint_{saved[-1]}" if saved else "training from step 0") in captured.out
  comparison = compare_runs(reference, tmp_path / "model")
  assert comparison.identical, comparison.verdict


@pytest.mark.long
def test_sigterm_at_step_after_step_still_trains_to_the_end(reference, command, tmp_path, monkeypatch):
  for step in range(1, 7):
    with monkeypatch.context() as patched:
      at_batch(step)(patched)
      # A run's first step is never saved by a signal that came before it.
      with pytest.raises(AnystepError, match="kind=preempted"):
        main.main(command())
  main.main(command())
  comparison = compare_runs(reference, tmp_path / "model")
  assert comparison.identical, comparison.verdict


def test_sigterm_while_it_caches_first_ends_the_cache_job_too(command, tmp_path, monkeypatch):
  processes = []

  class Watched(subprocess.Popen):
    def __init__(self, *args, **kwargs):
      super().__init__([sys.executable, "-c", "import time; time.sleep(600)"], **kwargs)
      processes.append(self)
      threading.Timer(0.3, terminate).start()

  monkeypatch.setattr(subprocess, "Popen", Watched)
  with pytest.raises(AnystepError) as ended:
    main.main([*command(cache_dir=tmp_path / "none"), "--cache_if_missing"])
  assert ended.value.kind == "preempted"
  assert [process.returncode for process in processes] == [-signal.SIGKILL]
  assert not (tmp_path / "model").exists()


def test_what_a_library_makes_of_the_interruption_does_not_matter():
  def swallow():
    try:
      terminate()
    except BaseException as error:
      raise ValueError("something failed") from error

  with pytest.raises(AnystepError, match="kind=preempted"), Termination():
    swallow()


def test_what_was_noted_ends_the_body_where_that_is_resumed():
  done = []

  def noted(termination):
    termination.defer()
    terminate()
    done.append(termination.requested)
    termination.resume()

  with pytest.raises(AnystepError, match="kind=preempted"), Termination() as termination:
    noted(termination)
  assert done == [True]


def test_an_interrupt_that_a_callback_loses_is_raised_again(capsys):
  """As one that comes within JAX's callback of the garbage collector."""

  class Deleted:
    def __del__(self):
      os.kill(os.getpid(), signal.SIGINT)

  lost = []

  def step():
    with Termination() as termination:
      Deleted()
      lost.append(True)
      termination.defer()
      lost.append(False)

  with pytest.raises(KeyboardInterrupt):
    step()
  assert lost == [True]
  assert capsys.readouterr().err == ""
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_library_makes_of_ctrl_c_is_an_interrupt():

  def step():
    with Termination():
      try:
        os.kill(os.getpid(), signal.SIGINT)
      except KeyboardInterrupt as error:
        raise ValueError("of a library") from error

  with pytest.raises(KeyboardInterrupt):
    step()


def test_other_failures_stay_what_they_are():
  def fail(termination):
    termination.defer()
    terminate()
    raise ValueError("own")

  with pytest.raises(ValueError, match="own"), Termination():
    raise ValueError("own")
  with pytest.raises(ValueError, match="own"), Termination() as termination:
    fail(termination)
  with pytest.raises(KeyboardInterrupt), Termination():
    raise KeyboardInterrupt


def test_a_thread_that_is_not_the_main_one_trains_without_it():
  found = []

  def work():
    with Termination() as termination:
      found.append((termination.requested, signal.getsignal(signal.SIGTERM)))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert found == [(False, signal.getsignal(signal.SIGTERM))]


def test_a_second_sigterm_ends_the_process_at_once():
  text = """
import time
from anystep.train.runs.termination import Termination
with Termination() as termination:
  termination.defer()
  print("ready", flush=True)
  while not termination.requested:
    time.sleep(0.01)
  print("noted", flush=True)
  time.sleep(600)
"""
  process = subprocess.Popen([sys.executable, "-c", text], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
  try:
    for line in ("ready", "noted"):
      assert process.stdout.readline() == f"{line}\n"
      process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


STEPS = {"TRAIN_STEPS": 300, "CHECKPOINT_PERIOD": 100, **EVALUATED}


@pytest.fixture
def long_reference(shared_runs, command):
  """The directory of a longer run that nothing disturbs."""
  directory = shared_runs / "undisturbed_300"
  if not directory.exists():
    main.main(command(MODEL_DIR=repr(str(directory)), **STEPS))
  return directory


def logged_steps(model_dir):
  return sum(path.read_bytes().count(b"\n") for path in model_dir.glob("step_log/*.jsonl"))


def is_locked(model_dir):
  """Whether the lock says who has it: before, whoever is ended may leave an empty file, which is nobody's."""
  return exists(model_dir, ".lock") and (model_dir / ".lock").stat().st_size > 0


def exists(model_dir, name):
  return (model_dir / name).exists()


REAL_MOMENTS = {
  "while it prepares": is_locked,
  "while it compiles": lambda model_dir: exists(model_dir, "data_plan.json"),
  "while it steps": lambda model_dir: logged_steps(model_dir) >= 3,
  "while it saves": lambda model_dir: exists(model_dir, "checkpoint_100"),
  "while it evaluates": lambda model_dir: exists(model_dir, "checkpoint_300/commit_success.txt"),
}


@pytest.mark.long
@pytest.mark.parametrize(
  ("moment", "number"),
  [*((moment, signal.SIGTERM) for moment in REAL_MOMENTS), ("while it steps", signal.SIGINT)],
)
def test_a_program_that_is_asked_to_end_goes_on_where_it_was(
  moment, number, long_reference, command, tmp_path
):
  arguments = command(**STEPS)
  model_dir = tmp_path / "model"
  process = subprocess.Popen(program(arguments), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
  deadline = time.monotonic() + 120
  while not REAL_MOMENTS[moment](model_dir):
    assert process.poll() is None, "it ended before the signal"
    assert time.monotonic() < deadline
    time.sleep(0.001)
  process.send_signal(number)
  said = process.communicate(timeout=120)[1].splitlines()
  steps = checkpoints.checkpoint_steps(model_dir)
  assert "Traceback" not in " ".join(said)
  if number == signal.SIGINT:
    assert (process.returncode, steps) == (130, [])
  else:
    assert process.returncode == 75
    assert re.match(r'ERROR code=75 kind=preempted .*fix="run the same command again"', said[-1])
    if moment in ("while it prepares", "while it compiles"):
      assert steps == []
    if moment in ("while it steps", "while it saves"):
      assert 3 <= steps[-1] < 300
    if moment == "while it evaluates":
      assert steps == [100, 200, 300]
  assert not exists(model_dir, ".lock")
  main.main(arguments)
  comparison = compare_runs(long_reference, model_dir)
  assert comparison.identical, comparison.verdict
