"""Programs read their flags alike, and end with one line and the status of the failure that they met."""

import pytest
from absl import flags
from etils import epath

from anystep.error_kinds.table import ERROR_KINDS
from anystep.errors import AnystepError, ExitCode
from anystep.programs.command_line import parse_flags, run_program

# Of each exit code, one kind.
KINDS = {entry.code: kind for kind, entry in ERROR_KINDS.items() if entry.code}


@pytest.mark.parametrize("code", ExitCode)
def test_a_program_ends_with_the_errors_code_and_its_line_alone(code, capsys):
  def fail():
    raise AnystepError(code, KINDS[code], fix="do this", path="x")

  with pytest.raises(SystemExit) as ended:
    run_program(fail)
  assert ended.value.code == int(code)
  captured = capsys.readouterr()
  assert captured.out == ""
  assert captured.err == f'ERROR code={int(code)} kind={KINDS[code]} path=x fix="do this"\n'


def test_notes_stand_before_the_line(capsys):
  def fail():
    error = AnystepError(ExitCode.DATA, "plan_invalid", fix="do this")
    error.add_note("task=demo shard=3")
    raise error

  with pytest.raises(SystemExit):
    run_program(fail)
  assert capsys.readouterr().err.splitlines() == [
    "task=demo shard=3",
    'ERROR code=65 kind=plan_invalid fix="do this"',
  ]


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 3), (None, None)])
def test_a_program_that_does_not_fail_ends_with_its_own_status(status, code, capsys):
  with pytest.raises(SystemExit) as ended:
    run_program(lambda: status)
  assert ended.value.code == code
  assert capsys.readouterr() == ("", "")


def test_an_interrupted_program_ends_as_shells_expect():
  def interrupt():
    raise KeyboardInterrupt

  with pytest.raises(SystemExit) as ended:
    run_program(interrupt)
  assert ended.value.code == 130


def test_a_path_on_what_nobody_knows_is_one_line(capsys):
  with pytest.raises(SystemExit) as ended:
    run_program(lambda: epath.Path("ftp://somewhere/else"))
  assert ended.value.code == 78
  assert "kind=store_unsupported" in capsys.readouterr().err


def test_a_failure_that_nobody_foresaw_keeps_its_traceback():
  with pytest.raises(ZeroDivisionError):
    run_program(lambda: 1 // 0)


def parsed(*arguments):
  values = flags.FlagValues()
  flags.DEFINE_integer("seed", 0, "The seed.", flag_values=values)
  flags.DEFINE_string("output_dir", None, "Where to.", required=True, flag_values=values)
  parse_flags(values, ["anystep-demo", *arguments], program="anystep-demo", text="Demonstrates.")
  return values


@pytest.mark.parametrize("arguments", [["--output_dir=x", "--seed=3"], ["--seed", "3", "--output_dir", "x"]])
def test_flags_have_the_values_that_were_given(arguments):
  values = parsed(*arguments)
  assert (values.output_dir, values.seed) == ("x", 3)


@pytest.mark.parametrize(
  ("arguments", "named"),
  [
    ([], "output_dir"),
    (["--output_dir=x", "--sead=3"], "sead"),
    (["--output_dir=x", "--seed=three"], "three"),
    (["--output_dir=x", "--seed="], "seed"),
    (["--output_dir=x", "seed=3"], "seed=3"),
    (["--output_dir=x", "--", "more", "words"], "more words"),
  ],
)
def test_wrong_arguments_are_refused_by_name(arguments, named):
  with pytest.raises(AnystepError) as refused:
    parsed(*arguments)
  assert (refused.value.code, refused.value.kind) == (64, "flags")
  assert named in refused.value.fields["got"]
  assert "--" in refused.value.fix


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--output_dir=x", "--help"]])
def test_help_lists_the_flags_and_ends_well(arguments, capsys):
  with pytest.raises(SystemExit) as ended:
    parsed(*arguments)
  assert ended.value.code == 0
  shown = capsys.readouterr().out
  assert shown.startswith("usage: ")
  assert "\n\nDemonstrates.\n" in shown
  assert "--output_dir" in shown
  assert "The seed; default 0" in shown


def test_help_of_flags_reads_as_that_of_argparse(capsys):
  values = flags.FlagValues()
  flags.DEFINE_list("tasks", None, "Some tasks.", required=True, flag_values=values)
  flags.DEFINE_list("options", ["a", "b"], "some options", flag_values=values)
  flags.DEFINE_enum("format", "text", ["text", "json"], "what to print", flag_values=values)
  flags.DEFINE_multi_enum("accept", [], ["module"], "100% of changes", flag_values=values)
  flags.DEFINE_integer("seed", 0, "the seed", flag_values=values)
  flags.DEFINE_boolean("resume", True, "go on", flag_values=values)
  with pytest.raises(SystemExit):
    parse_flags(values, ["p", "--help"], program="p", text="Does it.", examples="examples:\n  p --tasks=a")
  shown = capsys.readouterr().out
  assert shown.startswith("usage: p [-h] --tasks A,B [--options A,B]")
  lines = [" ".join(line.split()) for line in shown.splitlines()]
  for line in (
    *("--tasks A,B Some tasks", "--options A,B some options; default a,b"),
    *("--accept {module} 100% of changes", "--seed N the seed; default 0", "--resume, --noresume"),
  ):
    assert any(shown_line.startswith(line) for shown_line in lines), line
  assert "what to print; default text" in shown
  assert shown.endswith("\n\nexamples:\n  p --tasks=a\n")


def test_required_flags_that_are_not_given_are_named():
  values = flags.FlagValues()
  for name in ("first", "second"):
    flags.DEFINE_string(name, None, "", required=True, flag_values=values)
  with pytest.raises(AnystepError) as caught:
    parse_flags(values, ["program"], program="program", text="")
  error = caught.value
  assert (error.code, error.kind) == (ExitCode.USAGE, "flags")
  assert error.fields["got"] == "no --first and no --second"
  assert error.fix == "add --first=… and --second=…; program --help lists the flags"


def _raised_from_itself():
  error = RuntimeError("a library's")
  raise error from error


def _interrupted_within():
  try:
    raise KeyboardInterrupt
  except KeyboardInterrupt as interrupt:
    error = RuntimeError("a library's")
    error.__cause__ = ValueError("what it was doing")
    error.__cause__.__context__ = interrupt
    interrupt.__context__ = error
    raise error from error.__cause__


def test_errors_that_lead_back_to_themselves_end_a_program():
  """As Ctrl-C in Beam once did: the program looked for an interrupt in its causes, and never ended."""
  with pytest.raises(RuntimeError, match="a library's"):
    run_program(_raised_from_itself)
  with pytest.raises(SystemExit) as ended:
    run_program(_interrupted_within)
  assert ended.value.code == 130
