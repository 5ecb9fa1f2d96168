"""The demo's conclusion: true for a run that was resumed, false for one that was not the same."""

import os

import pytest

from anystep.errors import AnystepError, ExitCode
from anystep.train import main
from anystep.train.demo import demo


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """Where a run goes that the others are compared with; the first test trains it."""
  return tmp_path_factory.mktemp("runs") / "undisturbed"


@pytest.mark.parametrize(("epoch_policy", "identical"), [("reshuffle", True), ("global", False)])
def test_two_runs_are_compared_and_shown(epoch_policy, identical, undisturbed, command, tmp_path, capsys):
  interrupted = command(
    "interrupted", TRAIN_STEPS=4, **{"datasets.DatasetConfig.epoch_policy": repr(epoch_policy)}
  )
  if not undisturbed.exists():
    main.main(command(TRAIN_STEPS=4, MODEL_DIR=repr(str(undisturbed))))
  main.main(interrupted)
  capsys.readouterr()
  found = demo._compare(interrupted, undisturbed, tmp_path / "interrupted", tmp_path / "report.html")
  assert found is identical
  printed = capsys.readouterr().out
  batches = 4 if identical else 0
  assert f"killed at step 4, resumed from 0: {batches}/4 batches identical" in printed
  page = (tmp_path / "report.html").read_text()
  assert page.count("Inputs:") == page.count("Targets:") == 3
  assert "&lt;0&gt;" in page


@pytest.mark.parametrize(("identical", "status"), [(True, 0), (False, 1)])
def test_the_demos_status_is_its_verdict(identical, status, monkeypatch, tmp_path):
  commands = []
  monkeypatch.setattr(demo, "_run", lambda command, environment: commands.append(command[0]))
  monkeypatch.setattr(demo, "_run_and_kill", lambda command, *rest: commands.append("killed"))
  monkeypatch.setattr(demo, "_compare", lambda *arguments: identical)
  assert demo.main(["demo", f"--output_dir={tmp_path}"]) == status
  assert commands == ["anystep-cache", "anystep-train", "killed", "anystep-train"]


@pytest.mark.parametrize(("status", "code"), [(ExitCode.DATA, ExitCode.DATA), (1, ExitCode.NUMERICS)])
def test_a_step_that_fails_ends_the_demo_with_its_status(status, code, tmp_path):
  command = ["python", "-c", f"raise SystemExit({int(status)})"]
  for run in (demo._run, lambda *arguments: demo._run_and_kill(*arguments, tmp_path, 55)):
    with pytest.raises(AnystepError) as failure:
      run(command, dict(os.environ))
    error = failure.value
    assert (error.code, error.kind, error.fields["got"]) == (
      code,
      "demo_step_failed",
      f"exit status {int(status)}",
    )


def test_kills_fall_between_checkpoints():
  steps = demo._kill_steps()
  assert steps == [step for step in range(55, 195) if 5 <= step % 50 < 45]
