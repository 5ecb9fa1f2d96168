"""Training on mixtures, and on data that changes in the middle of a run, resumes exactly."""

import json
import shutil

import pytest
import seqio
import tiny_tasks
from job_runs import registered

from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.features.converters import EncoderDecoderConverter
from anystep.features.digest import batch_digest
from anystep.inspection.model_directory import read_converter
from anystep.plans.plan import Plan
from anystep.plans.tombstones import TombstoneList
from anystep.streams.stream import Stream
from anystep.train import main
from anystep.train.checkpoints import checkpoints
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.reports.step_log import read_step_log

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Where runs go that several tests begin with."""
  return tmp_path_factory.mktemp("runs")


@pytest.fixture
def changed_plan(command, runs):
  """Bindings for a plan file that begins as the command's mixture and changes at steps 4 and 5."""
  path = runs / "plan.json"
  if not path.exists():
    start = main.prepare(command(**MIXTURE)).data.plan
    changed = start.change(4, rates={tiny_tasks.OTHER_NAME: 1}).change(
      5, rates={tiny_tasks.NAME: 1, tiny_tasks.OTHER_NAME: 1}, batch_size=16
    )
    path.write_text(changed.to_json())
  return {**MIXTURE, "DATA_PLAN": repr(str(path))}


@pytest.fixture
def undisturbed(changed_plan, command, runs):
  """The directory of a run under that plan."""
  if not (runs / "undisturbed").exists():
    main.main(command(**changed_plan, MODEL_DIR=repr(str(runs / "undisturbed"))))
  return runs / "undisturbed"


@pytest.fixture
def killed(changed_plan, command, runs, tmp_path, monkeypatch):
  """`killed(step)`: a copy of the directory of such a run, killed at step 4, or again at 6, in `model`."""

  def of_step(step):
    bindings = {**changed_plan, "MODEL_DIR": repr(str(runs / "killed"))}
    for stop in (4, 6)[: 1 if step == 4 else 2]:
      if not (runs / f"killed_at_{stop}").exists():
        kill_at(monkeypatch, stop, command, **bindings)
        shutil.copytree(runs / "killed", runs / f"killed_at_{stop}")
    return shutil.copytree(runs / f"killed_at_{step}", tmp_path / "model")

  return of_step


def test_a_mixture_is_trained_at_its_own_rates(command):
  quotas = main.prepare(command(**MIXTURE)).data.plan.segments[0].quotas
  assert quotas == {tiny_tasks.NAME: 7, tiny_tasks.OTHER_NAME: 3}


def test_a_mixture_mixes_the_tasks_that_have_the_split(command):
  held_out = seqio.Task(
    "tiny_held_out",
    source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["validation"]),
    preprocessors=[seqio.CacheDatasetPlaceholder()],
    output_features=seqio.TaskRegistry.get(tiny_tasks.NAME).output_features,
  )
  with registered(held_out):
    seqio.MixtureRegistry.add("tiny_mixture_with_held_out", [(tiny_tasks.NAME, 3), (held_out.name, 1)])
    try:
      run = main.prepare(command(MIXTURE_OR_TASK_NAME=repr("tiny_mixture_with_held_out")))
    finally:
      seqio.MixtureRegistry.remove("tiny_mixture_with_held_out")
  assert list(run.data.plan.tasks) == [tiny_tasks.NAME]


def test_rates_that_are_functions_of_a_task_find_its_cache(command):
  run = main.prepare(command(MIXTURE_OR_TASK_NAME=repr(tiny_tasks.MIXTURE_BY_SIZE)))
  assert run.data.plan.segments[0].quotas == {tiny_tasks.NAME: 3, tiny_tasks.OTHER_NAME: 1}


@pytest.mark.long
def test_data_that_changes_in_the_middle_of_a_run_is_resumed_exactly(
  undisturbed, killed, changed_plan, command, tiny_cache
):
  model_dir = killed(6)
  main.main(command(**changed_plan))
  comparison = compare_runs(undisturbed, model_dir)
  assert comparison.identical, comparison.verdict
  assert [segment.batch_size for segment in plan_in(model_dir).segments] == [8, 8, 16]
  assert json.loads((model_dir / "data_caches.json").read_text()) == {
    "version": 1,
    "cache_dirs": [str(tiny_cache)],
  }


@pytest.mark.long
def test_a_run_goes_on_with_its_checkpoints_changes_where_no_plan_is_named(undisturbed, killed, command):
  model_dir = killed(6)
  converter, problem = read_converter(model_dir)
  assert (type(converter), problem) == (EncoderDecoderConverter, "")
  main.main(command(**MIXTURE))
  comparison = compare_runs(undisturbed, model_dir)
  assert comparison.identical, comparison.verdict


def test_a_plan_may_change_what_is_not_trained_and_the_one_before_is_kept(killed, command, tmp_path):
  model_dir = killed(4)
  before = plan_in(model_dir)
  path = tmp_path / "skipped.json"
  path.write_text(before.skip(3, 6, trained_steps=3).to_json())
  main.main(command(**MIXTURE, DATA_PLAN=repr(str(path))))
  assert (model_dir / "data_plan_until_step_3.json").read_text() == before.to_json()
  directory = checkpoints.checkpoint_directory(model_dir, 7)
  assert "skip of [3, 6)" in Plan.from_json((directory / "data_plan.json").read_text()).segments[-1].reason


@pytest.mark.parametrize(
  ("field", "changed"),
  [
    ("segments", lambda plan, _: plan.change(2, rates={tiny_tasks.NAME: 1, tiny_tasks.OTHER_NAME: 1})),
    ("tombstones", lambda plan, listed: plan.tombstone(2, [listed])),
  ],
  ids=["segments", "tombstones"],
)
def test_a_plan_that_changes_trained_steps_is_refused(field, changed, killed, command, tiny_cache, tmp_path):
  listed = TombstoneList.of(open_cache(tiny_cache, tiny_tasks.NAME, "train"), [0])
  path = tmp_path / "changed.json"
  path.write_text(changed(plan_in(killed(4)), listed).to_json())
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**MIXTURE, DATA_PLAN=repr(str(path))))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  assert refused.value.fields["field"] == field


def test_a_run_goes_on_where_all_of_a_batch_are_tombstones(command, tiny_cache, tmp_path, monkeypatch):
  cache = open_cache(tiny_cache, tiny_tasks.NAME, "train")
  listed = TombstoneList.of(cache, range(cache.manifest.num_examples))
  path = tmp_path / "plan.json"
  path.write_text(main.prepare(command()).data.plan.tombstone(2, [listed]).to_json())
  kill_at(monkeypatch, 4, command, DATA_PLAN=repr(str(path)))
  # The checkpoint's plan has them too.
  main.main(command(TRAIN_STEPS=5))
  first, second = read_step_log(tmp_path / "model")
  assert [record.step for record in (*first, *second)] == [0, 1, 2, 3, 4]
  losses = [record.loss for record in (*first, *second)]
  assert min(losses[:2]) > 0
  assert losses[2:] == [0, 0, 0]
  with main.prepare(command(TRAIN_STEPS=5)).data.open_stream() as stream:
    batches = [stream.batch(step) for step in range(5)]
  assert [record.digest for record in (*first, *second)] == list(map(batch_digest, batches))
  assert [bool(batch["decoder_loss_weights"].any()) for batch in batches] == [True, True, False, False, False]


def test_a_plan_of_another_seed_than_the_configurations_is_refused(changed_plan, command):
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**changed_plan, RANDOM_SEED=5))
  assert (refused.value.code, refused.value.kind) == (76, "resume_contract")
  assert (refused.value.fields["field"], refused.value.fields["got"]) == ("seed", "seed: 5 → 0")


def test_a_plan_that_is_not_there_or_is_none_is_refused(command, tmp_path):
  for content, status in ((None, (66, "plan_missing")), ("{}", (65, "plan_invalid"))):
    path = tmp_path / "plan.json"
    if content is not None:
      path.write_text(content)
    with pytest.raises(AnystepError) as refused:
      main.prepare(command(DATA_PLAN=repr(str(path))))
    assert (refused.value.code, refused.value.kind) == status


def test_a_plan_of_another_cache_is_refused(changed_plan, command, tiny_cache, runs, tmp_path):
  sha256 = open_cache(tiny_cache, tiny_tasks.NAME, "train").manifest_sha256
  path = tmp_path / "plan.json"
  path.write_text((runs / "plan.json").read_text().replace(sha256, "0" * 64))
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**MIXTURE, DATA_PLAN=repr(str(path))))
  assert (refused.value.code, refused.value.kind) == (76, "plan_cache")
  assert (refused.value.fields["expected"], refused.value.fields["got"]) == ("0" * 64, sha256)


def test_of_a_mixture_of_caches_only_one_is_evaluated(command, tiny_cache):
  mixture = f"{tiny_cache}/{tiny_tasks.NAME},0.3;{tiny_cache}/{tiny_tasks.OTHER_NAME},0.1"
  names = {"eval/datasets.DatasetConfig.mixture_or_task_name": repr(mixture)}
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**MIXTURE, EVAL_DATASET="@eval/datasets.DatasetConfig()", **names))
  assert (refused.value.code, refused.value.kind) == (78, "mixture")
  assert tiny_tasks.OTHER_NAME in refused.value.fields["expected"]
