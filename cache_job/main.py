"""`anystep-cache`: registered SeqIO tasks to deterministic caches."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from absl import flags

from anystep.cache_job.options import CacheOptions, make_exclusive_error
from anystep.cache_job.planning.selection import select_tasks
from anystep.cache_job.runners.arguments import split_arguments
from anystep.cache_job.state.failures import report_full_disks
from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.files.json_files import canonical_json, parse_json
from anystep.limits import are_feature_lengths
from anystep.programs.command_line import parse_flags, run_program
from anystep.programs.module_names import check_modules
from anystep.tasks.registry.moved_functions import MODULE, accept_moved_functions

_DEFAULT_PIPELINE_OPTIONS = ("--runner=DirectRunner",)
_EXAMPLES = """Beam's own options may stand beside these, as --direct_num_workers=8.

examples:
  anystep-cache --tasks=my_task --module_import=my_tasks --output_cache_dir=cache --dry_run
  anystep-cache --tasks=my_mixture --excluded_tasks=my_eval --module_import=my_tasks --output_cache_dir=cache
  anystep-cache --tasks=my_task --module_import=my_tasks --output_cache_dir=/data --index_only
"""


def define_flags() -> flags.FlagValues:
  """Return the program's flags; those of `seqio_cache_tasks` keep their names."""
  values = flags.FlagValues()
  flags.DEFINE_list(
    "tasks",
    None,
    "tasks to cache: regular expressions of whole names, or names of mixtures, for their tasks",
    required=True,
    flag_values=values,
  )
  flags.DEFINE_list("excluded_tasks", [], "tasks to leave out, named likewise", flag_values=values)
  flags.DEFINE_list("splits", None, "splits to cache; all by default", flag_values=values)
  flags.DEFINE_string(
    "output_cache_dir",
    None,
    "the directory that caches are written below",
    required=True,
    flag_values=values,
  )
  flags.DEFINE_list(
    "tasks_additional_cache_dirs",
    [],
    "further roots of caches; a task with a complete cache in one of them is left out",
    flag_values=values,
  )
  flags.DEFINE_boolean(
    "ignore_other_caches",
    False,
    "cache tasks whatever --tasks_additional_cache_dirs have",
    flag_values=values,
  )
  flags.DEFINE_multi_string(
    "module_import",
    [],
    "modules to import, which register tasks; the current directory is looked in first",
    flag_values=values,
  )
  flags.DEFINE_list(
    "pipeline_options",
    list(_DEFAULT_PIPELINE_OPTIONS),
    "Beam's own options, joined by commas",
    flag_values=values,
  )
  flags.DEFINE_string(
    "tfds_data_dir",
    None,
    "where TensorFlow Datasets lie, whatever the tasks say",
    flag_values=values,
  )
  flags.DEFINE_boolean("overwrite", False, "make complete caches anew", flag_values=values)
  flags.DEFINE_multi_enum(
    "accept_change",
    [],
    [MODULE],
    "module: a complete cache is the task's though the task's functions stood in another module then",
    flag_values=values,
  )
  flags.DEFINE_boolean("dry_run", False, "print what would be done, and do nothing", flag_values=values)
  flags.DEFINE_enum(
    "format",
    "text",
    ["text", "json"],
    "what --dry_run prints: text for people, or one JSON document for programs",
    flag_values=values,
  )
  flags.DEFINE_boolean(
    "index_only",
    False,
    "describe the tasks' own ArrayRecord, TFRecord or Parquet files below --output_cache_dir; copy nothing",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "output_format",
    "array_record",
    ["array_record", "arrayrecord", "tfrecord"],
    "container of the records; stock SeqIO reads caches in tfrecord",
    flag_values=values,
  )
  flags.DEFINE_integer("seed", 0, "the preshuffle's seed", flag_values=values)
  flags.DEFINE_integer("base_seed", 0, "the preprocessors' seed", flag_values=values)
  flags.DEFINE_integer(
    "num_shards",
    None,
    "shards per split; by default the largest power of two up to 64 that leaves each 1 MiB and a block of"
    " records, and 1 below that",
    lower_bound=1,
    flag_values=values,
  )
  flags.DEFINE_integer(
    "min_shards",
    0,
    "the least number of shards where --num_shards is not given; 0 for no bound",
    lower_bound=0,
    flag_values=values,
  )
  flags.DEFINE_integer(
    "max_shards",
    0,
    "the greatest number of shards where --num_shards is not given; 0 for no bound",
    lower_bound=0,
    flag_values=values,
  )
  flags.DEFINE_integer(
    "block_records",
    32,
    "records per block: what is read at a time",
    lower_bound=1,
    flag_values=values,
  )
  flags.DEFINE_enum(
    "cache_at",
    "placeholder",
    ["placeholder", "end"],
    "cache what stands before CacheDatasetPlaceholder, or everything, for --task_feature_lengths",
    flag_values=values,
  )
  flags.DEFINE_string(
    "task_feature_lengths",
    None,
    "tokens per feature that --cache_at=end caches for, as JSON",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "range_examples",
    None,
    "cut source shards into ranges of so many source examples, which can be preprocessed at one time. It"
    " decides bytes",
    lower_bound=1,
    flag_values=values,
  )
  flags.DEFINE_integer(
    "max_bad_examples",
    0,
    "leave out and list so many examples of a split that cannot be cached; the job ends at one more",
    lower_bound=0,
    flag_values=values,
  )
  flags.DEFINE_float(
    "determinism_check",
    0.0,
    "percent of source shards to preprocess twice and compare, the first one always",
    lower_bound=0.0,
    upper_bound=100.0,
    flag_values=values,
  )
  flags.DEFINE_string(
    "from_seqio_cache",
    None,
    "a directory of caches by seqio_cache_tasks: reshuffle these, and run no preprocessor",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "worker_memory_mib",
    2048,
    "memory of a worker's process, in MiB. The more, the fewer ranges of files sorting and writing read",
    flag_values=values,
  )
  flags.DEFINE_boolean("resume", True, "go on with what an earlier job left unfinished", flag_values=values)
  flags.DEFINE_boolean(
    "enable_char_counts",
    False,
    "count characters too, for the stats; tokens are decoded one example at a time",
    flag_values=values,
  )
  flags.DEFINE_boolean(
    "preserve_random_access",
    False,
    "blocks of one record each, as --block_records=1: for other programs that read ArrayRecord",
    flag_values=values,
  )
  flags.DEFINE_boolean(
    "alsologtostderr",
    False,
    "accepted, without effect: progress and errors always go to stderr",
    flag_values=values,
  )
  return values


def main(argv: Sequence[str]) -> int:
  """Cache the tasks that the flags name; return the exit status."""
  values = define_flags()
  own_arguments, beam_arguments = split_arguments(argv, values)
  parse_flags(values, own_arguments, program="anystep-cache", text=__doc__, examples=_EXAMPLES)
  if values.accept_change:
    accept_moved_functions()
  if values.format == "json":
    return _print_document(values, beam_arguments)
  options = _make_options(values, beam_arguments)
  selected = _select(values)
  _import_job()
  from anystep.cache_job.job import build_job_graph, cache_tasks
  from anystep.cache_job.planning.dry_run import forecast_work
  from anystep.cache_job.planning.task_work import plan_work

  if values.dry_run:
    works = plan_work(selected, options)
    lines = [line for work in works for line in forecast_work(work).lines()]
    if _names_runner(options):
      lines += build_job_graph(works, options).lines()
    print(*lines, sep="\n")
    return 0
  with report_full_disks():
    works = cache_tasks(selected, options)
  for work in works:
    print(*work.outcome(), sep="\n")
  return 0


def _print_document(values: flags.FlagValues, beam_arguments: Sequence[str]) -> int:
  """Print a dry run as a document, then raise the error that the job would end with."""
  if not values.dry_run:
    raise AnystepError(
      ExitCode.USAGE, "flags", expected="--format=json with --dry_run", got="it alone", fix="add --dry_run"
    )
  # What the tasks' modules print would spoil the document.
  with contextlib.redirect_stdout(sys.stderr):
    options = _make_options(values, beam_arguments)
    selected = _select(values)
    _import_job()
    from anystep.cache_job.job import build_job_graph
    from anystep.cache_job.planning.dry_run import first_refusal, forecast_tasks, make_document

    forecasts = forecast_tasks(selected, options)
    refusal = first_refusal(forecasts)
    graph = None
    if refusal is None and _names_runner(options):
      graph = build_job_graph([forecast.work for forecast in forecasts if forecast.work], options)
  print(canonical_json(make_document(forecasts, graph), indent=2))
  if refusal is not None:
    raise refusal
  return 0


def _select(values: flags.FlagValues) -> list[str]:
  """Return the names of the selected tasks, after importing TensorFlow, SeqIO and the tasks' modules."""
  if not storage.is_remote(values.output_cache_dir):
    # A file in the directory's place is found here.
    with contextlib.suppress(FileNotFoundError):
      os.stat(os.path.join(values.output_cache_dir, ""))
  check_modules(values.module_import)
  from anystep.tasks.startup import imports_without_collections, quiet_stderr, start_tensorflow

  with imports_without_collections():
    start_tensorflow()
    with quiet_stderr():
      importlib.import_module("seqio")
    from anystep.tasks.registry.modules import import_modules

    import_modules(values.module_import)
  return select_tasks(values.tasks, values.excluded_tasks)


def _import_job() -> None:
  """Import Beam without its remarks."""
  from anystep.tasks.startup import imports_without_collections, quiet_stderr

  with imports_without_collections(), quiet_stderr():
    importlib.import_module("anystep.cache_job.job")


def _names_runner(options: CacheOptions) -> bool:
  """Tell whether somebody chose a runner: a dry run then checks that it takes the job."""
  return options.pipeline_options != _DEFAULT_PIPELINE_OPTIONS


def _make_options(values: flags.FlagValues, beam_arguments: Sequence[str]) -> CacheOptions:
  if values.preserve_random_access and values["block_records"].present and values.block_records != 1:
    raise make_exclusive_error(
      "preserve_random_access", "block_records", "the first stands for --block_records=1"
    )
  return CacheOptions(
    cache_dir=values.output_cache_dir,
    other_cache_dirs=() if values.ignore_other_caches else tuple(values.tasks_additional_cache_dirs),
    modules=tuple(values.module_import),
    splits=None if values.splits is None else tuple(values.splits),
    seed=values.seed,
    base_seed=values.base_seed,
    num_shards=values.num_shards,
    min_shards=values.min_shards,
    max_shards=values.max_shards,
    block_records=1 if values.preserve_random_access else values.block_records,
    container=values.output_format.replace("arrayrecord", "array_record"),
    cache_at=values.cache_at,
    task_feature_lengths=_parse_lengths(values.task_feature_lengths),
    range_examples=values.range_examples,
    char_counts=values.enable_char_counts,
    seqio_cache_dir=values.from_seqio_cache,
    max_bad_examples=values.max_bad_examples,
    determinism_check=values.determinism_check,
    worker_memory_mib=values.worker_memory_mib,
    resume=values.resume,
    index_only=values.index_only,
    overwrite=values.overwrite,
    tfds_data_dir=values.tfds_data_dir,
    pipeline_options=(*values.pipeline_options, *beam_arguments),
  )


def _parse_lengths(text: str | None) -> dict[str, int] | None:
  if text is None:
    return None
  try:
    lengths = parse_json(text)
  except ValueError:
    lengths = None
  if not are_feature_lengths(lengths):
    raise AnystepError(
      ExitCode.USAGE,
      "task_feature_lengths",
      expected='JSON like {"inputs": 512, "targets": 114}',
      got=text,
      fix="quote the value for the shell",
    )
  return lengths


def run() -> None:
  """Run the console program."""
  run_program(lambda: main(sys.argv))


if __name__ == "__main__":
  run()
