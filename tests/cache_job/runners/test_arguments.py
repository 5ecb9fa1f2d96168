"""Beam's options on our command line."""

import subprocess
import sys

import pytest

from anystep.cache_job.main import define_flags
from anystep.cache_job.runners.arguments import check_pipeline_options, split_arguments
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
from anystep.cache_job.main import define_flags
from anystep.cache_job.runners.arguments import split_arguments
split_arguments(["anystep-cache", "--tasks=x", "--output_cache_dir", "y", "--dry_run"], define_flags())
assert not {"apache_beam", "tensorflow", "seqio"} & set(sys.modules)
split_arguments(["anystep-cache", "--tasks=x", "--runner=DirectRunner"], define_flags())
assert "apache_beam" in sys.modules
"""
  subprocess.run([sys.executable, "-c", program], check=True)
