"""`anystep-cache`: registered SeqIO tasks to deterministic caches."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

from absl import flags

from anystep.errors import AnystepError, ExitCode, nearest, run_program


def define_flags() -> flags.FlagValues:
  """The program's flags, those of `seqio_cache_tasks` under their names."""
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_list("tasks", None, "Regular expressions of tasks to cache.", required=True, **define)
  flags.DEFINE_list("excluded_tasks", [], "Regular expressions of tasks to leave out.", **define)
  flags.DEFINE_string(
    "output_cache_dir", None, "The directory that caches are written below.", required=True, **define
  )
  flags.DEFINE_multi_string(
    "module_import",
    [],
    "Modules to import, which register tasks; the current directory is looked in first.",
    **define,
  )
  flags.DEFINE_list(
    "pipeline_options", ["--runner=DirectRunner"], "Beam's own options, joined by commas.", **define
  )
  flags.DEFINE_boolean("overwrite", False, "Make complete caches anew.", **define)
  flags.DEFINE_integer("seed", 0, "The preshuffle's seed.", **define)
  flags.DEFINE_integer("base_seed", 0, "The preprocessors' seed.", **define)
  flags.DEFINE_integer(
    "num_shards", None, "Shards per split; 64 by default, 1 for small splits.", lower_bound=1, **define
  )
  flags.DEFINE_integer(
    "block_records", 32, "Records per block, what is read at a time.", lower_bound=1, **define
  )
  flags.DEFINE_enum(
    "cache_at",
    "placeholder",
    ["placeholder", "end"],
    "Cache what stands before CacheDatasetPlaceholder, or everything, for --task_feature_lengths.",
    **define,
  )
  flags.DEFINE_string(
    "task_feature_lengths", None, "Tokens per feature that --cache_at=end caches for, as JSON.", **define
  )
  return values


def main(argv: Sequence[str]) -> int:
  """Caches the tasks that the flags name; returns the exit status."""
  values = _parse(argv)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # What a worker hears of a GPU's absence is no news.
  from anystep.tasks.modules import import_modules

  import_modules(values.module_import)
  selected = select_tasks(values.tasks, values.excluded_tasks)

  from anystep.cache_job.job import CacheOptions, cache_tasks

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
    AnystepError: 64 `task_unknown` where a pattern matches none.
  """
  import seqio

  registered = sorted(seqio.TaskRegistry.names())
  for pattern in included:
    if not any(re.fullmatch(pattern, name) for name in registered):
      raise AnystepError(
        ExitCode.USAGE,
        "task_unknown",
        expected="a registered task",
        got=pattern,
        nearest=nearest(pattern, registered) or "none is registered",
        fix="correct --tasks, or name the module that registers it with --module_import",
      )
  return [
    name
    for name in registered
    if any(re.fullmatch(pattern, name) for pattern in included)
    and not any(re.fullmatch(pattern, name) for pattern in excluded)
  ]


def _parse(argv: Sequence[str]) -> flags.FlagValues:
  values = define_flags()
  try:
    if {"--help", "-h"} & set(argv):
      print(__doc__, values.main_module_help() or values.get_help(), sep="\n")
      sys.exit(0)
    rest = values(list(argv))[1:]
  except flags.Error as error:
    raise AnystepError(
      ExitCode.USAGE, "flags", got=str(error), fix="anystep-cache --help lists the flags"
    ) from error
  if rest:
    raise AnystepError(ExitCode.USAGE, "flags", got=" ".join(rest), fix="give values as --flag=value")
  return values


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
