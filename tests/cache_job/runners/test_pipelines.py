"""Pipelines for the runner that options name, and the graph that a dry run builds of one."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import apache_beam as beam
import grpc
import pytest

from anystep.cache_job.runners.pipelines import build_graph, start_pipeline
from anystep.cache_job.runners.worker_failures import explain_runner_error
from anystep.errors import AnystepError, ExitCode

ON_DATAFLOW = [
  "--runner=DataflowRunner",
  "--project=my-project",
  "--region=us-central1",
  "--temp_location=gs://bucket/temp",
  "--sdk_container_image=example.org/anystep:1",
]


def fill(pipeline):
  numbers = pipeline | "numbers" >> beam.Create([1, 2, 3])
  _ = numbers | "spread" >> beam.Reshuffle() | "pairs" >> beam.Map(_pair, beam.pvalue.AsList(numbers))


def _pair(number, numbers):
  return number, numbers


STAGES = ["  numbers", "  spread", "  pairs"]


def test_a_graph_is_built_and_nothing_is_run(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

  def fill_with_what_must_not_run(pipeline):
    _ = pipeline | "start" >> beam.Create([1]) | "stop" >> beam.Map(_must_not_run)

  first, *stages = build_graph(fill_with_what_must_not_run, ["--runner=DirectRunner"]).lines()
  assert re.fullmatch(r"for DirectRunner: \d+ transforms in 2 stages, \d+\.\d KiB", first)
  assert stages == ["  start", "  stop"]
  assert list(tmp_path.iterdir()) == []


def _must_not_run(number):
  raise AssertionError


def test_a_graph_has_its_stages_whatever_the_runner():
  portable = ["--job_endpoint=localhost:1", "--environment_type=EXTERNAL", "--environment_config=localhost:2"]
  flink = ["--parallelism=4", "--setup_file=/nowhere/setup.py"]
  for runner, options in {"DirectRunner": [], "PortableRunner": portable, "FlinkRunner": flink}.items():
    first, *stages = build_graph(fill, [f"--runner={runner}", *options]).lines()
    assert re.fullmatch(rf"for {runner}: \d+ transforms in 3 stages, \d+\.\d KiB", first)
    assert stages == STAGES


def test_a_graph_is_refused_where_its_transforms_are():
  def twice(pipeline):
    fill(pipeline)
    fill(pipeline)

  with pytest.raises(RuntimeError, match="numbers"):
    build_graph(twice, [])


def test_a_graph_for_dataflow_is_built_without_what_submits_it():
  first, *lines = build_graph(fill, ON_DATAFLOW).lines()
  assert first.startswith("for DataflowRunner: ")
  assert lines == [*STAGES, f"  to submit it: pip install 'apache-beam[gcp]=={beam.__version__}'"]


def test_a_runner_that_is_not_installed_is_refused_with_what_installs_it():
  with pytest.raises(AnystepError, match=r"code=78 kind=runner_missing .*pip install 'apache-beam\[gcp\]"):
    start_pipeline(fill, ON_DATAFLOW, name="anystep")
  with pytest.raises(AnystepError, match=r"code=78 kind=runner_missing .*no_such_module"):
    start_pipeline(fill, ["--runner=no_such_module.Runner"], name="anystep")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--runner=DirctRunner"], r"option=runner got=DirctRunner nearest=.*DirectRunner"),
    ([*ON_DATAFLOW[:3]], r"temp_location.*fix=.*gs://"),
    ([*ON_DATAFLOW, "--project=No!"], r"No!"),
    ([*ON_DATAFLOW, "--job_nam=x"], r"nearest_of_beam=.*job_name"),
  ],
)
def test_options_that_the_runner_refuses_are_refused_before_there_is_a_pipeline(arguments, message):
  with pytest.raises(AnystepError, match=r"code=64 kind=pipeline_options.*" + message):
    build_graph(fill, arguments)


def test_a_pipeline_is_started_with_options_alone_that_its_runner_takes():
  with pytest.raises(AnystepError, match=r"code=64 kind=pipeline_options.*got=DirctRunner"):
    start_pipeline(fill, ["--runner=DirctRunner"], name="anystep")
  with pytest.raises(AnystepError, match=r"code=64 kind=pipeline_options.*external_service_address"):
    start_pipeline(fill, ["--runner=PortableRunner", "--environment_type=EXTERNAL"], name="anystep")


def test_a_pipeline_runs_what_it_is_filled_with(tmp_path):
  def touch_two(pipeline):
    _ = pipeline | beam.Create(["a", "b"]) | beam.Map(_touch, str(tmp_path))

  start_pipeline(touch_two, ["--runner=DirectRunner"], name="anystep").wait_until_finish()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def _touch(name, folder):
  Path(folder, name).touch()


def test_a_job_service_that_does_not_answer_is_a_foreseen_failure():
  options = ["--runner=PortableRunner", "--job_endpoint=localhost:1", "--job_server_timeout=1"]
  with pytest.raises(grpc.FutureTimeoutError) as caught:
    start_pipeline(fill, options, name="anystep")
  failure = explain_runner_error(caught.value)
  assert (failure.code, failure.kind) == (ExitCode.IO, "runner_unreachable")


@pytest.mark.soak
def test_dataflows_own_translation_has_the_same_stages(tmp_path):
  """With apache-beam[gcp], without network to Google and without credentials."""
  uv = Path(sys.executable).with_name("uv")
  root = Path(__file__).parents[3]
  packages = tmp_path / "packages"
  install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", packages]
  lock = root / "requirements.lock"
  subprocess.run([*install, "--constraint", lock, "apache-beam[gcp]"], check=True)
  program = f"""
import sys
sys.path.insert(0, {str(root / "tests" / "cache_job" / "runners")!r})
from test_pipelines import ON_DATAFLOW, fill
from anystep.cache_job.runners.pipelines import build_graph
print(*build_graph(fill, ON_DATAFLOW).lines(), sep="\\n")
"""
  environment = {**os.environ, "PYTHONPATH": str(packages)}
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  first, *stages = done.stdout.splitlines()
  assert first.startswith("for DataflowRunner: ")
  assert stages == STAGES
