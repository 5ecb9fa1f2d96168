"""Beam's options on our command line, and the graph that a dry run builds of a pipeline."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import apache_beam as beam
import grpc
import pytest

from anystep.cache_job.beam_options import (
  build_graph,
  check_pipeline_options,
  import_in_worker,
  open_pipeline,
  runner_failure,
  split_arguments,
)
from anystep.cache_job.main import define_flags
from anystep.errors import AnystepError, ExitCode

OURS = ["--tasks=a", "--output_cache_dir", "-x", "--nodry_run", "--overwrite", "-seed=3", "--seed", "4"]
BEAMS = [
  "--runner=PortableRunner",
  "--job_endpoint",
  "localhost:8099",
  "--streaming",
  "--no_save_main_session",
  "--experiments=a,b",
  "--update_compatibility_version",
]
ON_DATAFLOW = [
  "--runner=DataflowRunner",
  "--project=my-project",
  "--region=us-central1",
  "--temp_location=gs://bucket/temp",
  "--sdk_container_image=example.org/anystep:1",
]


def split(*arguments):
  own, beams = split_arguments(["anystep-cache", *arguments], define_flags())
  assert own[0] == "anystep-cache"
  return own[1:], beams


def test_what_we_do_not_know_and_beam_does_is_beams():
  for arguments in ([*OURS, *BEAMS], [*BEAMS, *OURS]):
    assert split(*arguments) == (OURS, BEAMS)
  assert split("--tasks", "--runner=x", "--runner=DirectRunner") == (
    ["--tasks", "--runner=x"],
    ["--runner=DirectRunner"],
  )


def test_our_flags_are_those_that_absl_parses_of_what_is_left():
  own, _ = split(*BEAMS, *OURS)
  values = define_flags()
  assert values(["anystep-cache", *own]) == ["anystep-cache"]
  assert (values.tasks, values.output_cache_dir, values.dry_run, values.overwrite) == (
    ["a"],
    "-x",
    False,
    True,
  )
  assert values.seed == 4


def test_a_flag_that_both_have_is_ours():
  assert split("--dry_run", "--dry_run=true") == (["--dry_run", "--dry_run=true"], [])


def test_help_and_what_follows_two_dashes_are_ours():
  assert split("--runner=x", "--help") == (["--runner=x", "--help"], [])
  assert split("--", "--runner=x") == (["--", "--runner=x"], [])


def test_what_stands_alone_is_left_to_our_parser():
  assert split("stray", "--runner=DirectRunner") == (["stray"], ["--runner=DirectRunner"])


@pytest.mark.parametrize(
  ("arguments", "got", "ours", "beams"),
  [
    (["--output_cash_dir=x"], "--output_cash_dir=x", "output_cache_dir", ""),
    (["--job_endpont", "x"], "--job_endpont x", "", "job_endpoint"),
    (["--streaming", "x"], "x", "", ""),
    (["-runner=x"], "-runner=x", "", "runner"),
  ],
)
def test_what_neither_knows_is_refused_with_the_nearest_of_both(arguments, got, ours, beams):
  with pytest.raises(AnystepError) as caught:
    split("--tasks=a", *arguments)
  assert (caught.value.code, caught.value.kind) == (ExitCode.USAGE, "flags")
  assert caught.value.fields["got"] == got
  assert ours in caught.value.fields["nearest"]
  assert beams in caught.value.fields["nearest_of_beam"]


def test_a_value_that_beam_refuses_is_refused():
  for argument in ("--streaming=yes", "--direct_num_workers=many", "--pickle_library=shelve"):
    with pytest.raises(AnystepError, match=r"kind=flags got=.*" + argument.partition("=")[0]):
      split(argument)
    with pytest.raises(AnystepError, match="kind=pipeline_options"):
      check_pipeline_options([argument])


def test_pipeline_options_must_be_known_to_beam():
  check_pipeline_options(["--runner=DirectRunner", "--direct_num_workers=2", "--dry_run=true"])
  with pytest.raises(
    AnystepError, match=r"code=64 kind=pipeline_options.*nearest_of_beam=.*direct_num_workers"
  ):
    check_pipeline_options(["--direct_num_worker=2"])
  # As absl's list makes it of --pipeline_options=--experiments=a,b.
  with pytest.raises(AnystepError, match=r"got=b .*comma"):
    check_pipeline_options(["--experiments=a", "b"])


def test_beam_is_not_imported_where_nothing_is_said_to_it():
  program = """
import sys
from anystep.cache_job.beam_options import split_arguments
from anystep.cache_job.main import define_flags
split_arguments(["anystep-cache", "--tasks=x", "--output_cache_dir", "y", "--dry_run"], define_flags())
assert not {"apache_beam", "tensorflow", "seqio"} & set(sys.modules)
split_arguments(["anystep-cache", "--tasks=x", "--runner=DirectRunner"], define_flags())
assert "apache_beam" in sys.modules
"""
  subprocess.run([sys.executable, "-c", program], check=True)


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

  first, *stages = build_graph(fill_with_what_must_not_run, ["--runner=DirectRunner"])
  assert re.fullmatch(r"for DirectRunner: \d+ transforms in 2 stages", first)
  assert stages == ["  start", "  stop"]
  assert list(tmp_path.iterdir()) == []


def _must_not_run(number):
  raise AssertionError


def test_a_graph_has_its_stages_whatever_the_runner():
  portable = ["--job_endpoint=localhost:1", "--environment_type=EXTERNAL", "--environment_config=localhost:2"]
  flink = ["--parallelism=4", "--setup_file=/nowhere/setup.py"]
  for runner, options in {"DirectRunner": [], "PortableRunner": portable, "FlinkRunner": flink}.items():
    first, *stages = build_graph(fill, [f"--runner={runner}", *options])
    assert re.fullmatch(rf"for {runner}: \d+ transforms in 3 stages", first)
    assert stages == STAGES


def test_a_graph_is_refused_where_its_transforms_are():
  def twice(pipeline):
    fill(pipeline)
    fill(pipeline)

  with pytest.raises(RuntimeError, match="numbers"):
    build_graph(twice, [])


def test_a_graph_for_dataflow_is_built_without_what_submits_it():
  first, *lines = build_graph(fill, ON_DATAFLOW)
  assert first.startswith("for DataflowRunner: ")
  assert lines == [*STAGES, f"  to submit it: pip install 'apache-beam[gcp]=={beam.__version__}'"]


def test_a_runner_that_is_not_installed_is_refused_with_what_installs_it():
  with pytest.raises(AnystepError, match=r"code=78 kind=runner_missing .*pip install 'apache-beam\[gcp\]"):
    open_pipeline(ON_DATAFLOW)
  with pytest.raises(AnystepError, match=r"code=78 kind=runner_missing .*no_such_module"):
    open_pipeline(["--runner=no_such_module.Runner"])


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


def test_a_pipeline_is_opened_with_options_alone_that_its_runner_takes():
  with pytest.raises(AnystepError, match=r"code=64 kind=pipeline_options.*got=DirctRunner"):
    open_pipeline(["--runner=DirctRunner"])
  with pytest.raises(AnystepError, match=r"code=64 kind=pipeline_options.*external_service_address"):
    open_pipeline(["--runner=PortableRunner", "--environment_type=EXTERNAL"])


def test_an_opened_pipeline_runs_what_it_is_filled_with(tmp_path):
  with open_pipeline(["--runner=DirectRunner"]) as pipeline:
    _ = pipeline | beam.Create(["a", "b"]) | beam.Map(_touch, str(tmp_path))
  assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def _touch(name, folder):
  Path(folder, name).touch()


def test_a_worker_without_the_module_says_who_it_is_and_how_to_give_it_the_module():
  import_in_worker(["json"])
  with pytest.raises(AnystepError) as caught:
    import_in_worker(["json", "no_such_tasks"])
  error = caught.value
  assert (error.code, error.kind) == (ExitCode.CONFIG, "module_import")
  assert error.fields["module"] == "no_such_tasks"
  assert error.fields["host"] == socket.gethostname()
  assert error.fields["python"] == sys.executable
  assert all(way in error.fix for way in ("--sdk_container_image", "--setup_file", "PYTHONPATH"))


def test_a_module_that_workers_cannot_unpickle_from_is_named():
  """As Beam's runners pass on what a worker said."""
  trace = 'Traceback (most recent call last):\n  File "pickler.py", line 1, in loads\n'
  failure = runner_failure(RuntimeError(f"{trace}ModuleNotFoundError: No module named 'parents_own'\n\n"))
  assert (failure.code, failure.kind) == (ExitCode.CONFIG, "module_import")
  assert failure.fields["module"] == "parents_own"


def test_a_job_service_that_does_not_answer_is_a_foreseen_failure():
  options = ["--runner=PortableRunner", "--job_endpoint=localhost:1", "--job_server_timeout=1"]
  with pytest.raises(grpc.FutureTimeoutError) as caught, open_pipeline(options) as pipeline:
    fill(pipeline)
  failure = runner_failure(caught.value)
  assert (failure.code, failure.kind) == (ExitCode.IO, "runner_unreachable")


def test_other_failures_are_nothing_that_we_know_of():
  assert runner_failure(ValueError("No module is to blame")) is None


@pytest.mark.soak
def test_dataflows_own_translation_has_the_same_stages(tmp_path):
  """With apache-beam[gcp], without network to Google and without credentials."""
  uv = Path(sys.executable).with_name("uv")
  root = Path(__file__).parents[2]
  packages = tmp_path / "packages"
  install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", packages]
  lock = root / "requirements.lock"
  subprocess.run([*install, "--constraint", lock, "apache-beam[gcp]"], check=True)
  program = f"""
import sys
sys.path.insert(0, {str(root / "tests" / "cache_job")!r})
from test_beam_options import ON_DATAFLOW, fill
from anystep.cache_job.beam_options import build_graph
print(*build_graph(fill, ON_DATAFLOW), sep="\\n")
"""
  environment = {**os.environ, "PYTHONPATH": str(packages)}
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  first, *stages = done.stdout.splitlines()
  assert first.startswith("for DataflowRunner: ")
  assert stages == STAGES
