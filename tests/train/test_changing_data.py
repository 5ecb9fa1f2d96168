"""Training on mixtures, and on data that changes in the middle of a run, resumes exactly."""

import json

import pytest
import tiny_tasks

from anystep.cache import open_cache
from anystep.errors import AnystepError
from anystep.plan import Plan
from anystep.stream import Stream
from anystep.train import checkpoints, main
from anystep.train.run_comparison import compare_runs

MIXTURE = {"MIXTURE_OR_TASK_NAME": repr(tiny_tasks.MIXTURE)}


class Killed(BaseException):
  """Stands for the end of the process."""


def kill_at(monkeypatch, step, command, **bindings):
  """Trains until the batch of a step is asked for."""

  def next_batch(stream, original=Stream.__next__):
    if stream.step == step:
      raise Killed
    return original(stream)

  with monkeypatch.context() as patch:
    patch.setattr(Stream, "__next__", next_batch)
    with pytest.raises(Killed):
      main.main(command(**bindings))


def plan_in(model_dir):
  return Plan.from_json((model_dir / "data_plan.json").read_text())


@pytest.fixture
def changed_plan(command, tiny_cache, tmp_path):
  """A plan file that begins as the command's mixture and changes at steps 4 and 5."""
  start = main.prepare(command(**MIXTURE)).data.plan
  plan = start.change(4, rates={tiny_tasks.OTHER_NAME: 1}).change(
    5, rates={tiny_tasks.NAME: 1, tiny_tasks.OTHER_NAME: 1}, batch_size=16
  )
  path = tmp_path / "plan.json"
  path.write_text(plan.to_json())
  return {**MIXTURE, "DATA_PLAN": repr(str(path))}


def test_a_mixture_is_trained_at_its_own_rates_and_resumed_exactly(command, tmp_path, monkeypatch):
  main.main(command(model_dir="undisturbed", **MIXTURE))
  kill_at(monkeypatch, 5, command, **MIXTURE)
  main.main(command(**MIXTURE))
  comparison = compare_runs(tmp_path / "undisturbed", tmp_path / "model")
  assert comparison.identical, comparison.verdict
  quotas = plan_in(tmp_path / "model").segments[0].quotas
  assert quotas == {tiny_tasks.NAME: 7, tiny_tasks.OTHER_NAME: 3}


def test_rates_that_are_functions_of_a_task_find_its_cache(command):
  run = main.prepare(command(MIXTURE_OR_TASK_NAME=repr(tiny_tasks.MIXTURE_BY_SIZE)))
  assert run.data.plan.segments[0].quotas == {tiny_tasks.NAME: 3, tiny_tasks.OTHER_NAME: 1}


def test_data_that_changes_in_the_middle_of_a_run_is_resumed_exactly(
  changed_plan, command, tmp_path, tiny_cache, monkeypatch
):
  main.main(command(model_dir="undisturbed", **changed_plan))
  for step in (4, 6):
    kill_at(monkeypatch, step, command, **changed_plan)
  main.main(command(**changed_plan))
  comparison = compare_runs(tmp_path / "undisturbed", tmp_path / "model")
  assert comparison.identical, comparison.verdict
  model_dir = tmp_path / "model"
  assert [segment.batch_size for segment in plan_in(model_dir).segments] == [8, 8, 16]
  assert json.loads((model_dir / "data_caches.json").read_text()) == {
    "version": 1,
    "cache_dirs": [str(tiny_cache)],
  }


def test_a_run_goes_on_with_its_checkpoints_changes_where_no_plan_is_named(
  changed_plan, command, tmp_path, monkeypatch
):
  main.main(command(model_dir="undisturbed", **changed_plan))
  kill_at(monkeypatch, 6, command, **changed_plan)
  main.main(command(**MIXTURE))
  comparison = compare_runs(tmp_path / "undisturbed", tmp_path / "model")
  assert comparison.identical, comparison.verdict


def test_a_plan_may_change_what_is_not_trained_and_the_one_before_is_kept(
  changed_plan, command, tmp_path, monkeypatch
):
  kill_at(monkeypatch, 4, command, **changed_plan)
  before = plan_in(tmp_path / "model")
  (tmp_path / "plan.json").write_text(before.skip(3, 6, trained_steps=3).to_json())
  main.main(command(**changed_plan))
  assert (tmp_path / "model" / "data_plan_until_step_3.json").read_text() == before.to_json()
  directory = checkpoints.checkpoint_directory(tmp_path / "model", 7)
  assert "skip of [3, 6)" in Plan.from_json((directory / "data_plan.json").read_text()).segments[-1].reason


def test_a_plan_that_changes_trained_steps_is_refused(changed_plan, command, tmp_path, monkeypatch):
  kill_at(monkeypatch, 4, command, **changed_plan)
  plan = plan_in(tmp_path / "model").change(2, rates={tiny_tasks.NAME: 1, tiny_tasks.OTHER_NAME: 1})
  (tmp_path / "plan.json").write_text(plan.to_json())
  with pytest.raises(AnystepError) as refused:
    main.main(command(**changed_plan))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  assert refused.value.fields["field"] == "segments"


def test_a_plan_of_another_seed_than_the_configurations_is_refused(changed_plan, command):
  with pytest.raises(AnystepError) as refused:
    main.main(command(**changed_plan, RANDOM_SEED=5))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  assert (refused.value.fields["field"], refused.value.fields["expected"]) == ("seed", 5)


def test_a_plan_that_is_not_there_or_is_none_is_refused(command, tmp_path):
  for content, status in ((None, (66, "plan_missing")), ("{}", (65, "plan_invalid"))):
    path = tmp_path / "plan.json"
    if content is not None:
      path.write_text(content)
    with pytest.raises(AnystepError) as refused:
      main.main(command(DATA_PLAN=repr(str(path))))
    assert (refused.value.code, refused.value.kind) == status


def test_a_plan_of_another_cache_is_refused(changed_plan, command, own_cache, tmp_path):
  cache = open_cache(own_cache, tiny_tasks.NAME, "train")
  text = (tmp_path / "plan.json").read_text()
  (tmp_path / "plan.json").write_text(text.replace(cache.manifest_sha256, "0" * 64))
  with pytest.raises(AnystepError) as refused:
    main.main(command(**changed_plan))
  assert (refused.value.code, refused.value.kind) == (76, "plan_cache")
  assert refused.value.fields["expected"] == "0" * 64
  assert refused.value.fields["got"] == cache.manifest_sha256


def test_only_one_task_is_evaluated(command):
  evaluation = {"EVAL_DATASET": "@eval/datasets.DatasetConfig()"}
  with pytest.raises(AnystepError) as refused:
    main.main(command(**MIXTURE, **evaluation))
  assert (refused.value.code, refused.value.kind) == (78, "mixture")
  assert tiny_tasks.NAME in refused.value.fields["expected"] or refused.value.fields["expected"]
