"""What a run's plan knows of what its examples go through after the cache, from one start to the next."""

import dataclasses

import pytest
import tiny_tasks

from anystep.errors import AnystepError
from anystep.plans.plan import Plan
from anystep.train import main

OTHER = "0" * 64


@pytest.fixture
def run(command):
  return main.prepare(command())


@pytest.fixture
def dataset(run):
  return run.data.dataset


@pytest.fixture
def converter(run):
  return run.data.converter


def with_transforms(plan, transforms):
  tasks = {name: dataclasses.replace(task, transforms=transforms) for name, task in plan.tasks.items()}
  return Plan.from_json(dataclasses.replace(plan, tasks=tasks).to_json())


def with_file(dataset, plan, path):
  path.write_text(plan.to_json())
  return dataclasses.replace(dataset, config=dataclasses.replace(dataset.config, plan=str(path)))


def test_a_run_that_starts_knows_them(run, capfd):
  assert run.data.plan.unknown_transforms == []
  assert len(run.data.plan.tasks[tiny_tasks.NAME].transforms) == 64
  assert "go through after the cache" not in capfd.readouterr().err


def test_a_run_whose_plan_does_not_know_them_goes_on_with_a_line_and_knows(run, dataset, converter, capfd):
  before = with_transforms(run.data.plan, None)
  capfd.readouterr()
  order = dataset.run_order((3, before))
  assert order.state == before
  again = order.open(converter)
  assert again.plan.to_json() == run.data.plan.to_json()
  (line,) = [line for line in capfd.readouterr().err.splitlines() if "go through" in line]
  assert line.startswith(f"the plan does not say what examples of {tiny_tasks.NAME} go through")


def test_a_run_that_resumes_with_others_is_refused(run, dataset, converter):
  order = dataset.run_order((3, with_transforms(run.data.plan, OTHER)))
  with pytest.raises(AnystepError) as refused:
    order.open(converter)
  assert (refused.value.code, refused.value.kind) == (76, "plan_transforms")
  assert refused.value.fields["expected"] == OTHER
  assert refused.value.fields["got"] == run.data.plan.tasks[tiny_tasks.NAME].transforms


@pytest.mark.parametrize("known", [None, OTHER])
def test_a_plan_that_is_named_and_does_not_know_them_takes_them_of_the_checkpoint(
  run, dataset, tmp_path, known
):
  named = with_file(dataset, with_transforms(run.data.plan, None), tmp_path / "plan.json")
  order = named.run_order((3, with_transforms(run.data.plan, known)))
  assert order.state.tasks[tiny_tasks.NAME].transforms == known


def test_a_plan_that_is_named_and_knows_others_than_the_checkpoint_is_refused(run, dataset, tmp_path):
  named = with_file(dataset, run.data.plan, tmp_path / "plan.json")
  with pytest.raises(AnystepError) as refused:
    named.run_order((3, with_transforms(run.data.plan, OTHER)))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  field = f"tasks.{tiny_tasks.NAME}.transforms"
  assert refused.value.fields["field"] == field
  assert refused.value.fields["got"].startswith(f'{field}: "{OTHER}" → ')


@pytest.mark.parametrize(
  ("changed", "differences"),
  [
    ({"batch_size": 16}, ["batch_size: 8 → 16"]),
    ({"seed": 3}, ["seed: 0 → 3"]),
    ({"num_epochs": 3}, ["num_epochs: null → 3"]),
  ],
)
def test_data_that_changed_is_told_value_by_value(run, dataset, changed, differences):
  changed_dataset = dataclasses.replace(dataset, config=dataclasses.replace(dataset.config, **changed))
  with pytest.raises(AnystepError) as refused:
    changed_dataset.run_order((3, run.data.plan))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  assert refused.value.fields["expected"] == "what the run began with"
  assert refused.value.fields["got"].split("; ") == differences
