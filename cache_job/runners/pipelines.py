"""Pipelines for the runner that Beam's options name, and the graphs that a dry run builds."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from anystep.cache_job.runners.arguments import check_pipeline_options
from anystep.errors import AnystepError, ExitCode, find_nearest, one_line

if TYPE_CHECKING:
  import apache_beam as beam
  from apache_beam.options.pipeline_options import PipelineOptions
  from apache_beam.runners.runner import PipelineResult, PipelineRunner


def start_pipeline(
  fill: Callable[[beam.Pipeline], object], arguments: Iterable[str], *, name: str
) -> PipelineResult:
  """Start a pipeline on the runner that options name, or run it where the runner is in this process.

  Args:
    fill: applies transforms to the pipeline.
    arguments: as on Beam's command line.
    name: the job's, where the options give none.

  Returns:
    What tells the job's state, and waits for its end.

  Raises:
    AnystepError: 64 `pipeline_options` for options that Beam does not know or that do not go together; 78
      `runner_missing` for a runner whose packages are not installed.
  """
  from apache_beam.options.pipeline_options import GoogleCloudOptions

  runner, options = create_runner(arguments)
  if is_dataflow(runner) and not _can_submit_to_dataflow():
    raise AnystepError(
      ExitCode.CONFIG,
      "runner_missing",
      expected="apache-beam[gcp], which submits to Dataflow",
      got="apache-beam without it",
      fix=_format_gcp_install(),
    )
  # Of all engines.
  options.view_as(GoogleCloudOptions).job_name = options.view_as(GoogleCloudOptions).job_name or name
  pipeline = _make_pipeline(runner, options)
  fill(pipeline)
  return pipeline.run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerGraph:
  """The job's graph as its runner would be given it.

  Attributes:
    name: the runner's.
    num_transforms: transforms that have no others within.
    graph_bytes: its size as it is sent; Dataflow refuses 10 MB.
    stages: names of the stages.
    install: the command that installs packages without which nothing can be submitted; None where all are
      there.
  """

  name: str
  num_transforms: int
  graph_bytes: int
  stages: Sequence[str]
  install: str | None = None

  def lines(self) -> list[str]:
    """Return lines for people."""
    size = f"{self.graph_bytes / 2**10:,.1f} KiB"
    return [
      f"for {self.name}: {self.num_transforms} transforms in {len(self.stages)} stages, {size}",
      *(f"  {stage}" for stage in self.stages),
      *([f"  to submit it: {self.install}"] if self.install else []),
    ]


def build_graph(fill: Callable[[beam.Pipeline], object], arguments: Iterable[str]) -> RunnerGraph:
  """Build the job's graph as its runner would be given it, and submit nothing.

  Needs neither network nor credentials. Dataflow's own translation is taken where apache-beam[gcp] is
  installed, and Beam's portable one for all else.

  Args:
    fill: applies the job's transforms to a pipeline.
    arguments: as on Beam's command line.

  Raises:
    AnystepError: 64 `pipeline_options` and 78 `runner_missing`, as `start_pipeline`, but not where
      apache-beam[gcp] alone is missing.
  """
  from apache_beam.options.pipeline_options import StandardOptions, TestOptions

  runner, options = create_runner(arguments)
  options.view_as(TestOptions).dry_run = True
  missing = is_dataflow(runner) and not _can_submit_to_dataflow()
  pipeline = _make_pipeline(runner, options)
  try:
    fill(pipeline)
    graph = (
      _translate_for_dataflow(pipeline)
      if is_dataflow(runner) and not missing
      else _translate_to_proto(pipeline)
    )
  finally:
    # Where workers' packages would be built; a pipeline removes it when it runs.
    shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
  leaves = [one for one in graph.components.transforms.values() if not one.subtransforms]
  return RunnerGraph(
    name=options.view_as(StandardOptions).runner or StandardOptions.DEFAULT_RUNNER,
    num_transforms=len(leaves),
    graph_bytes=graph.ByteSize(),
    stages=[stage.full_label for stage in pipeline.transforms_stack[0].parts],
    install=_format_gcp_install() if missing else None,
  )


def _translate_for_dataflow(pipeline: beam.Pipeline) -> Any:
  """Return the pipeline as Dataflow's runner would submit it; its options must say that this is a dry run."""
  runner: Any = pipeline.runner
  pipeline.run()
  return runner.proto_pipeline


def _translate_to_proto(pipeline: beam.Pipeline) -> Any:
  """Return the pipeline as Beam's `Pipeline` message."""
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


def create_runner(arguments: Iterable[str]) -> tuple[PipelineRunner, PipelineOptions]:
  """Return the runner that options name, and Beam's form of the options.

  Raises:
    AnystepError: 64 `pipeline_options`; 78 `runner_missing`.
  """
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
      nearest=find_nearest(name, StandardOptions.KNOWN_RUNNER_NAMES),
      fix="name one of Beam's runners, or a runner's class with its module",
    ) from error
  except (ImportError, AttributeError) as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "runner_missing",
      got=one_line(error, with_type=False),
      fix=f"install what {name} needs, or name another --runner",
    ) from error
  if is_dataflow(runner):
    # Beam would make a bucket of its own where neither location is valid.
    cloud, validator = options.view_as(GoogleCloudOptions), PipelineOptionsValidator(options, runner)
    wrong = [validator.validate_gcs_path(cloud, option) for option in ("temp_location", "staging_location")]
    if all(wrong):
      raise AnystepError(
        ExitCode.USAGE,
        "pipeline_options",
        got=" ".join(wrong[0] + wrong[1]),
        fix="give --temp_location=gs://bucket/folder",
      )
  return runner, options


def _make_pipeline(runner: PipelineRunner, options: PipelineOptions) -> beam.Pipeline:
  import apache_beam as beam

  try:
    return beam.Pipeline(runner=runner, options=options)
  except ValueError as error:
    raise AnystepError(
      ExitCode.USAGE,
      "pipeline_options",
      got=one_line(error, with_type=False),
      fix="give the runner the options it asks for",
    ) from error


def is_dataflow(runner: object) -> bool:
  """Return whether a runner submits to Dataflow."""
  return type(runner).__name__ in ("DataflowRunner", "TestDataflowRunner")


def _can_submit_to_dataflow() -> bool:
  try:
    importlib.import_module("apache_beam.runners.dataflow.internal.apiclient")
  except ImportError:
    return False
  return True


def _format_gcp_install() -> str:
  import apache_beam as beam

  return f"pip install 'apache-beam[gcp]=={beam.__version__}'"
