"""What a command line says to Beam: options of its own, and the pipeline that its runner is given.

Beam takes seconds to import, and most command lines say nothing to it: what asks it imports it.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from anystep.errors import AnystepError, ExitCode, nearest
from anystep.tasks.registry.modules import import_modules
from anystep.tasks.startup import quiet_stderr

if TYPE_CHECKING:
  import apache_beam as beam
  from apache_beam.options.pipeline_options import PipelineOptions
  from apache_beam.runners.runner import PipelineRunner

_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_OPTIONS_FIX = "give Beam's options as --name=value, and one whose value has a comma as a flag of its own"
_SHIP_MODULES = (
  "give the workers the module: in their image (--sdk_container_image), with --setup_file or"
  " --extra_package, or on the PYTHONPATH that a worker pool is started with"
)


def split_arguments(argv: Sequence[str], known: flags.FlagValues) -> tuple[list[str], list[str]]:
  """Parts a command line into a program's own arguments and those that are Beam's options.

  An argument is Beam's where the program has no such flag and Beam has such an option, as `--name=value`,
  `--name value` or `--name`. Where both have it, it is the program's (of anystep-cache, --dry_run alone),
  and Beam's own comes through --pipeline_options. What follows `--` is the program's. Beam is imported
  only where something is not the program's.

  Args:
    argv: the program's name and its arguments.
    known: the program's flags, which are not parsed here.

  Returns:
    The program's name and arguments, and Beam's, in the order that they came in.

  Raises:
    AnystepError: 64 `flags` for what neither knows, and for values that Beam's options do not take.
  """
  if {"--help", "-h"} & set(argv):
    return list(argv), []
  own, beams = list(argv[:1]), list[str]()
  rest = list(argv[1:])
  while rest:
    argument = rest.pop(0)
    if argument == "--":
      own += [argument, *rest]
      break
    values = _values_apart(argument, known)
    if values is not None:
      own += [argument, *rest[:values]]
      del rest[:values]
    else:
      beams.append(argument)
      while rest and not rest[0].startswith("-"):
        beams.append(rest.pop(0))
  if beams:
    _check(beams, "flags", own_names=known, fix="--help lists the flags; give values as --name=value")
  return own, beams


def _values_apart(argument: str, known: flags.FlagValues) -> int | None:
  """How many further arguments belong to this one as absl parses them; None for no flag of the program."""
  if not argument.startswith("-"):
    return 0
  name, equals, _ = argument.lstrip("-").partition("=")
  if name in known:
    return 0 if equals or known[name].boolean else 1
  negated = name.removeprefix("no")
  return 0 if negated != name and negated in known and known[negated].boolean else None


def check_pipeline_options(arguments: Iterable[str]) -> None:
  """Refuses options that Beam does not know, which it would leave aside with a remark in its log.

  Raises:
    AnystepError: 64 `pipeline_options`.
  """
  _check(list(arguments), "pipeline_options", own_names=(), fix=_OPTIONS_FIX)


def _check(arguments: list[str], kind: str, *, own_names: Iterable[str], fix: str) -> None:
  parser = _beam_parser()
  try:
    _, unknown = parser.parse_known_args(arguments)
  except argparse.ArgumentError as error:
    raise AnystepError(ExitCode.USAGE, kind, got=_one_line(error), fix=fix) from error
  if unknown:
    name = unknown[0].lstrip("-").partition("=")[0]
    own_nearest = {"nearest": nearest(name, own_names)} if own_names else {}
    beams = vars(parser.parse_known_args([])[0])
    raise AnystepError(
      ExitCode.USAGE,
      kind,
      got=" ".join(unknown),
      **own_nearest,
      nearest_of_beam=nearest(name, beams),
      fix=fix,
    )


def _beam_parser() -> argparse.ArgumentParser:
  """A parser of every option that some class of Beam's pipeline options has."""
  with quiet_stderr():
    from apache_beam.options.pipeline_options import PipelineOptions

  parsers: list[argparse.ArgumentParser] = []
  PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
  parsers[0].exit_on_error = False
  return parsers[0]


def open_pipeline(arguments: Iterable[str]) -> beam.Pipeline:
  """An empty pipeline for the runner that options name, to be entered and filled.

  Args:
    arguments: as on Beam's command line.

  Raises:
    AnystepError: 64 `pipeline_options` for options that Beam does not know or that do not go together; 78
      `runner_missing` for a runner whose packages are not installed.
  """
  runner, options = _runner_and_options(arguments)
  if _is_dataflow(runner) and not _can_submit_to_dataflow():
    raise AnystepError(
      ExitCode.CONFIG,
      "runner_missing",
      expected="apache-beam[gcp], which submits to Dataflow",
      got="apache-beam without it",
      fix=_install_gcp(),
    )
  return _pipeline(runner, options)


def build_graph(fill: Callable[[beam.Pipeline], object], arguments: Iterable[str]) -> list[str]:
  """Builds the job's graph as its runner would be given it, and submits nothing.

  Needs neither network nor credentials. Dataflow's own translation is taken where apache-beam[gcp] is
  installed, and Beam's portable one for all else.

  Args:
    fill: applies the job's transforms to a pipeline.
    arguments: as on Beam's command line.

  Returns:
    Lines for people: the runner, how many transforms it is given, and the names of the stages.

  Raises:
    AnystepError: 64 `pipeline_options` and 78 `runner_missing`, as `open_pipeline`; but where
      apache-beam[gcp] alone is missing, the last line says it.
  """
  from apache_beam.options.pipeline_options import StandardOptions, TestOptions

  runner, options = _runner_and_options(arguments)
  options.view_as(TestOptions).dry_run = True
  missing = _is_dataflow(runner) and not _can_submit_to_dataflow()
  pipeline = _pipeline(runner, options)
  try:
    fill(pipeline)
    graph = _dataflow_graph(pipeline) if _is_dataflow(runner) and not missing else _portable_graph(pipeline)
  finally:
    # Where workers' packages would be built; a pipeline removes it when it runs.
    shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
  leaves = [one for one in graph.components.transforms.values() if not one.subtransforms]
  stages = [stage.full_label for stage in pipeline.transforms_stack[0].parts]
  name = options.view_as(StandardOptions).runner or StandardOptions.DEFAULT_RUNNER
  return [
    f"for {name}: {len(leaves)} transforms in {len(stages)} stages",
    *(f"  {stage}" for stage in stages),
    *([f"  to submit it: {_install_gcp()}"] if missing else []),
  ]


def _dataflow_graph(pipeline: beam.Pipeline) -> Any:
  """The pipeline as Dataflow's runner would submit it, where its options say that this is a dry run."""
  runner: Any = pipeline.runner
  pipeline.run()
  return runner.proto_pipeline


def _portable_graph(pipeline: beam.Pipeline) -> Any:
  """The pipeline as Beam's `Pipeline` message."""
  from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState
  from apache_beam.transforms.environments import EmbeddedPythonEnvironment

  graphs = []

  class GraphOnly(PipelineRunner):
    def default_environment(self, options):
      # What workers would be sent is neither built nor downloaded.
      return EmbeddedPythonEnvironment()

    def run_portable_pipeline(self, pipeline, options):
      graphs.append(pipeline)
      return PipelineResult(PipelineState.DONE)

  GraphOnly().run_pipeline(pipeline, pipeline.options)
  return graphs[0]


def _runner_and_options(arguments: Iterable[str]) -> tuple[PipelineRunner, PipelineOptions]:
  arguments = list(arguments)
  check_pipeline_options(arguments)
  from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions, StandardOptions
  from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
  from apache_beam.runners.runner import create_runner

  options = PipelineOptions(arguments)
  name = options.view_as(StandardOptions).runner or StandardOptions.DEFAULT_RUNNER
  try:
    runner = create_runner(name)
  except ValueError as error:
    raise AnystepError(
      ExitCode.USAGE,
      "pipeline_options",
      option="runner",
      got=name,
      nearest=nearest(name, StandardOptions.KNOWN_RUNNER_NAMES),
      fix="name one of Beam's runners, or a runner's class with its module",
    ) from error
  except (ImportError, AttributeError) as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "runner_missing",
      got=_one_line(error),
      fix=f"install what {name} needs, or name another --runner",
    ) from error
  if _is_dataflow(runner):
    # Beam would make a bucket of its own where neither location is valid.
    cloud, validator = options.view_as(GoogleCloudOptions), PipelineOptionsValidator(options, runner)
    wrong = [validator.validate_gcs_path(cloud, place) for place in ("temp_location", "staging_location")]
    if all(wrong):
      raise AnystepError(
        ExitCode.USAGE,
        "pipeline_options",
        got=" ".join(wrong[0] + wrong[1]),
        fix="give --temp_location=gs://bucket/folder",
      )
  return runner, options


def _pipeline(runner: PipelineRunner, options: PipelineOptions) -> beam.Pipeline:
  import apache_beam as beam

  try:
    return beam.Pipeline(runner=runner, options=options)
  except ValueError as error:
    raise AnystepError(
      ExitCode.USAGE, "pipeline_options", got=_one_line(error), fix="give the runner the options it asks for"
    ) from error


def _is_dataflow(runner: object) -> bool:
  return type(runner).__name__ in ("DataflowRunner", "TestDataflowRunner")


def _can_submit_to_dataflow() -> bool:
  try:
    importlib.import_module("apache_beam.runners.dataflow.internal.apiclient")
  except ImportError:
    return False
  return True


def _install_gcp() -> str:
  import apache_beam as beam

  return f"pip install 'apache-beam[gcp]=={beam.__version__}'"


def _one_line(error: BaseException) -> str:
  return " ".join(str(error).split())


def runner_failure(error: BaseException) -> AnystepError | None:
  """What a runner's exception says of its workers and its service; None where it says nothing of them.

  Workers unpickle the job's functions before any of them runs, so one without this package can leave
  nothing but a traceback, of which runners pass on the text.

  Returns:
    78 `module_import` for a module that a worker has not; 74 `runner_unreachable`.
  """
  import grpc

  if isinstance(error, grpc.FutureTimeoutError):
    return AnystepError(
      ExitCode.IO,
      "runner_unreachable",
      expected="a job service that answers within --job_server_timeout seconds",
      got="no answer",
      fix="start it, or give its address as --job_endpoint=host:port",
    )
  missing = _MISSING_MODULE.search(str(error))
  if missing is None:
    return None
  return AnystepError(
    ExitCode.CONFIG,
    "module_import",
    module=missing.group(1),
    got=missing.group(),
    fix="install anystep[cache], of the parent's version, and the tasks' modules where the workers run",
  )


def import_in_worker(modules: Iterable[str]) -> None:
  """Imports modules that register tasks where a runner has put the work.

  The parent has imported them before it started the job, so a module that fails here is one that the worker
  has not, or whose own imports it has not.

  Raises:
    AnystepError: 78 `module_import`, with the worker's host and Python.
  """
  try:
    import_modules(modules)
  except AnystepError as error:
    if error.kind == "module_import":
      error.fields = {**error.fields, "host": socket.gethostname(), "python": sys.executable}
      error.fix = _SHIP_MODULES
    raise
