"""What a trainer's directory says of a run's data is read, or refused with its file's name."""

import json

import caches
import pytest

from anystep.errors import AnystepError
from anystep.features.converter_names import converter_to_json
from anystep.features.converters import LMConverter
from anystep.inspection.model_directory import (
  read_converter,
  read_model_dir,
  read_plan,
  read_plan_or_model_dir,
)
from anystep.plans.plan import Plan

PLAN = Plan.start(caches.cache_without_files(), batch_size=4)


def test_the_plan_of_a_directory_is_the_runs_else_that_of_its_newest_checkpoint(tmp_path):
  for step in (2, 10, 30):
    directory = tmp_path / f"checkpoint_{step}"
    directory.mkdir()
    (directory / "data_plan.json").write_text(PLAN.change(step, batch_size=8).to_json())
    if step < 30:
      (directory / "commit_success.txt").touch()
  assert read_model_dir(tmp_path) == (PLAN.change(10, batch_size=8), [], 10, 0)
  (tmp_path / "data_plan.json").write_text(PLAN.to_json())
  (tmp_path / "data_caches.json").write_text(json.dumps({"version": 1, "cache_dirs": ["cache"]}))
  assert read_model_dir(tmp_path) == (PLAN, ["cache"], 10, 0)
  assert read_plan_or_model_dir(tmp_path) == read_plan_or_model_dir(tmp_path / "data_plan.json") == PLAN
  # A run that began with a checkpoint of step 4.
  (tmp_path / "run.json").write_text(json.dumps({"version": 1, "run": "0" * 32, "first_step": 4}))
  assert read_model_dir(tmp_path) == (PLAN, ["cache"], 6, 4)


def test_a_plan_that_is_not_there_says_what_to_name(tmp_path):
  for read in (read_plan, read_plan_or_model_dir):
    with pytest.raises(AnystepError) as missing:
      read(tmp_path / "none")
    assert (missing.value.kind, "--model_dir" in missing.value.fix) == ("plan_missing", True)


def test_the_converter_of_a_run_is_the_recorded_one(tmp_path):
  (tmp_path / "data_converter.json").write_text(json.dumps(converter_to_json(LMConverter(bos_id=4))))
  converter, problem = read_converter(tmp_path)
  assert (type(converter), converter.bos_id, problem) == (LMConverter, 4, "")


def test_a_run_without_a_known_converter_says_so(tmp_path):
  converter, problem = read_converter(tmp_path)
  assert (converter, "data_converter.json" in problem) == (None, True)
  (tmp_path / "data_converter.json").write_text('{"version": 1, "model": null, "class": "mine.Converter"}')
  converter, problem = read_converter(tmp_path)
  assert (converter, "mine.Converter" in problem) == (None, True)


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1, "model": "mine", "arguments": {}}', "{"])
def test_a_damaged_converter_is_refused(tmp_path, content):
  path = tmp_path / "data_converter.json"
  path.write_text(content)
  with pytest.raises(AnystepError) as refused:
    read_converter(tmp_path)
  assert (refused.value.code, refused.value.kind) == (65, "converter_invalid")
  assert str(path) in str(refused.value)
