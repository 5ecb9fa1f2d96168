"""`anystep-cache`: registered SeqIO tasks to deterministic caches."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from absl import flags

from anystep.command_line import parse_flags, run_program
from anystep.errors import AnystepError, ExitCode, nearest


def define_flags() -> flags.FlagValues:
  """The program's flags, those of `seqio_cache_tasks` under their names."""
  values = flags.FlagValues()
  flags.DEFINE_list(
    "tasks", None, "Regular expressions of tasks to cache.", required=True, flag_values=values
  )
  flags.DEFINE_list("excluded_tasks", [], "Regular expressions of tasks to leave out.", flag_values=values)
  flags.DEFINE_string(
    "output_cache_dir",
    None,
    "The directory that caches are written below.",
    required=True,
    flag_values=values,
  )
  flags.DEFINE_multi_string(
    "module_import",
    [],
    "Modules to import, which register tasks; the current directory is looked in first.",
    flag_values=values,
  )
  flags.DEFINE_list(
    "pipeline_options",
    ["--runner=DirectRunner"],
    "Beam's own options, joined by commas.",
    flag_values=values,
  )
  flags.DEFINE_boolean("overwrite", False, "Make complete caches anew.", flag_values=values)
  flags.DEFINE_integer("seed", 0, "The preshuffle's seed.", flag_values=values)
  flags.DEFINE_integer("base_seed", 0, "The preprocessors' seed.", flag_values=values)
  flags.DEFINE_integer(
    "num_shards",
    None,
    "Shards per split; 64 by default, 1 for small splits.",
    lower_bound=1,
    flag_values=values,
  )
  flags.DEFINE_integer(
    "block_records",
    32,
    "Records per block: what is read at a time.",
    lower_bound=1,
    flag_values=values,
  )
  flags.DEFINE_enum(
    "cache_at",
    "placeholder",
    ["placeholder", "end"],
    "Cache what stands before CacheDatasetPlaceholder, or everything, for --task_feature_lengths.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "task_feature_lengths",
    None,
    "Tokens per feature that --cache_at=end caches for, as JSON.",
    flag_values=values,
  )
  return values


def main(argv: Sequence[str]) -> int:
  """Caches the tasks that the flags name; returns the exit status."""
  values = define_flags()
  parse_flags(values, argv, program="anystep-cache", text=__doc__)
  from anystep.tasks.startup import quiet_stderr, start_tensorflow

  start_tensorflow()
  with quiet_stderr():
    from anystep.cache_job.job import CacheOptions, cache_tasks
  from anystep.tasks.modules import import_modules

  import_modules(values.module_import)
  selected = select_tasks(values.tasks, values.excluded_tasks)

  options = CacheOptions(
    cache_dir=values.output_cache_dir,
    modules=tuple(values.module_import),
    seed=values.seed,
    base_seed=values.base_seed,
    num_shards=values.num_shards,
    block_records=values.block_records,
    cache_at=values.cache_at,
    task_feature_lengths=_lengths(values.task_feature_lengths),
    overwrite=values.overwrite,
    pipeline_options=tuple(values.pipeline_options),
  )
  made = cache_tasks(selected, options)
  for name in selected:
    print(f"{name}: {'cached' if name in made else 'the cache is complete, left as it is'}")
  return 0


def select_tasks(included: Sequence[str], excluded: Sequence[str]) -> list[str]:
  """Registered tasks that match an included pattern and no excluded one, whole names.

  Raises:
    AnystepError: 64 `task_unknown` where a pattern is none or matches none, or nothing is left.
  """
  import seqio

  registered = sorted(seqio.TaskRegistry.names())
  for pattern in [*included, *excluded]:
    try:
      re.compile(pattern)
    except re.error as error:
      raise _unknown(pattern, registered, f"a regular expression ({error})") from error
  for pattern in included:
    if not any(re.fullmatch(pattern, name) for name in registered):
      raise _unknown(pattern, registered, "a registered task")
  selected = [
    name
    for name in registered
    if any(re.fullmatch(pattern, name) for pattern in included)
    and not any(re.fullmatch(pattern, name) for pattern in excluded)
  ]
  if not selected:
    raise _unknown(",".join(included), registered, "a task that --excluded_tasks leaves")
  return selected


def _unknown(pattern: str, registered: Sequence[str], expected: str) -> AnystepError:
  return AnystepError(
    ExitCode.USAGE,
    "task_unknown",
    expected=expected,
    got=pattern,
    nearest=nearest(pattern, registered) or "none is registered",
    fix="correct --tasks, or name the module that registers it with --module_import",
  )


def _lengths(text: str | None) -> dict[str, int] | None:
  if text is None:
    return None
  try:
    return {str(name): int(length) for name, length in json.loads(text).items()}
  except (ValueError, AttributeError, TypeError) as error:
    raise AnystepError(
      ExitCode.USAGE,
      "task_feature_lengths",
      expected='JSON like {"inputs": 512, "targets": 114}',
      got=text,
      fix="quote the value for the shell",
    ) from error


def run() -> None:
  """The console program."""
  run_program(lambda: main(sys.argv))
