"""Whatever stands at the name of a file of MODEL_DIR's own, a run goes on or ends with one clear error."""

import os

import pytest

from anystep.errors import AnystepError
from anystep.train import main
from anystep.train.configuration import configuration
from anystep.train.configuration.resume_contract import AcceptedChanges, Change, record_accepted
from anystep.train.datasets.data_state import record_state

NO_TEXT = b"\xff\xfe"
NO_FILES = {"directory": os.mkdir, "fifo": os.mkfifo, "device": lambda path: os.symlink("/dev/zero", path)}


def refusal(do, *args):
  with pytest.raises(AnystepError) as refused:
    do(*args)
  assert len(str(refused.value).splitlines()) == 1
  return refused.value.code, refused.value.kind


@pytest.fixture
def state(command):
  return main.prepare(command("other")).data.state


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize(
  ("name", "kind"), [("data_plan.json", "plan_invalid"), ("data_uncached.json", "data_uncached_invalid")]
)
def test_what_is_no_file_in_the_place_of_a_data_state_is_refused(name, kind, what, state, tmp_path):
  NO_FILES[what](tmp_path / name)
  assert refusal(record_state, tmp_path, state, 0) == (65, kind)
  assert os.path.lexists(tmp_path / name)


def test_a_data_state_that_was_damaged_is_kept_aside(state, tmp_path):
  record_state(tmp_path, state, 0)
  content = (tmp_path / "data_plan.json").read_bytes()
  damaged = content.replace(b"v", b"\xf6", 1)
  (tmp_path / "data_plan.json").write_bytes(damaged)
  record_state(tmp_path, state, 3)
  assert (tmp_path / "data_plan.json").read_bytes() == content
  assert (tmp_path / "data_plan_until_step_3.json").read_bytes() == damaged


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_in_the_place_of_an_accepted_change_is_refused(what, tmp_path):
  (tmp_path / "accepted_changes").mkdir()
  NO_FILES[what](tmp_path / "accepted_changes" / "0000.json")
  assert refusal(AcceptedChanges.read, tmp_path) == (65, "accepted_change_invalid")


def test_an_accepted_change_that_is_no_text_is_refused(tmp_path):
  record_accepted(tmp_path, [Change(name="a", was=[1], now=[2], step=6)])
  path = tmp_path / "accepted_changes" / "0000.json"
  path.write_bytes(path.read_bytes() + NO_TEXT)
  assert refusal(AcceptedChanges.read, tmp_path) == (65, "accepted_change_invalid")


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_in_the_place_of_the_configuration_is_refused(what, tmp_path):
  NO_FILES[what](tmp_path / "config.gin")
  assert refusal(configuration.record_configuration, tmp_path) == (65, "configuration_invalid")
  assert not (tmp_path / "config.gin").is_file()


def test_a_configuration_that_is_no_text_is_refused(tmp_path):
  (tmp_path / "config.gin").write_bytes(NO_TEXT)
  assert refusal(configuration.record_configuration, tmp_path) == (65, "configuration_invalid")
  assert (tmp_path / "config.gin").read_bytes() == NO_TEXT


@pytest.mark.parametrize("name", ["config.gin", "data_plan.json", "accepted_changes/0000.json"])
def test_a_run_ends_with_one_error_where_a_fifo_stands(name, stopped, command):
  path = stopped / name
  path.parent.mkdir(exist_ok=True)
  path.unlink(missing_ok=True)
  os.mkfifo(path)
  code, kind = refusal(main.main, command())
  assert code == 65
  assert kind in ("configuration_invalid", "plan_invalid", "accepted_change_invalid")
