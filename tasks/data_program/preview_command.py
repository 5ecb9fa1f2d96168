"""`anystep-data preview`: examples of a task at every stage."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anystep.order.packing import PackingPolicy
from anystep.programs.module_names import check_modules
from anystep.tasks.data_program.arguments import (
  add_command,
  add_model_flag,
  add_module_import_flag,
  add_task_flags,
  check_output,
  join_values,
  parse_feature_lengths,
  usage_error,
  write_output,
)
from anystep.tasks.data_program.tables import print_note, print_objects
from anystep.tasks.registry.mixture_files import is_mixture_text, read_mixture

if TYPE_CHECKING:
  import seqio

  from anystep.tasks.preview.values import Preview


def add_preview_command(commands: Any) -> argparse.ArgumentParser:
  """Add `preview`, and return it."""
  command = add_command(
    commands,
    "preview",
    _run_preview,
    "print examples of a task after each preprocessor and as the model gets them; needs no cache",
    add_task_flags,
    examples=(
      "--task=my_task --module_import=my_tasks",
      """--task=my_task --module_import=my_tasks --feature_lengths='{"targets": 512}' --html=page.html""",
      "--task=my_task --module_import=my_tasks --source=part-00017.jsonl --skip=88 --n=1 --full",
    ),
  )
  command.add_argument("--n", type=int, default=3, help="so many examples of the source; default 3")
  text = "how many examples come before them: of the source shard, or of the split without --source"
  command.add_argument("--skip", type=int, default=0, help=text)
  command.add_argument("--source", metavar="NAME_OR_NUMBER", help="the source shard; default the first")
  text = "what random draws follow from, as anystep-cache --base_seed; default 0"
  command.add_argument("--seed", type=int, default=0, help=text)
  text = 'what preprocessors are told and features are cut to, as JSON: {"inputs": 512}'
  command.add_argument("--feature_lengths", type=parse_feature_lengths, metavar="JSON", help=text)
  add_model_flag(command, "the model whose features are made; default as the task's features are")
  text = "how the examples share the model's rows; default none"
  policies = [policy.value for policy in PackingPolicy]
  command.add_argument("--packing", choices=policies, default=PackingPolicy.NONE.value, help=text)
  add_module_import_flag(command)
  command.add_argument("--full", action="store_true", help="shorten nothing")
  command.add_argument("--html", metavar="FILE", help="also write a page")
  command.add_argument("--svg", metavar="FILE", help="also write the text as a picture")
  command.add_argument("--overwrite", action="store_true", help="replace the files that are there")
  return command


def _run_preview(arguments: argparse.Namespace) -> None:
  names = join_values(arguments.task)
  if not names:
    raise usage_error("no task", "add --task=NAME")
  if arguments.n < 1 or arguments.skip < 0:
    raise usage_error(f"--n={arguments.n} --skip={arguments.skip}", "--n is at least 1, --skip at least 0")
  for path in (arguments.html, arguments.svg):
    if path is not None:
      check_output(path, arguments.overwrite)
  split = arguments.split or "train"
  tasks = _find_registered(names, arguments.module_import, split)
  from anystep.tasks.preview.preview import check_previews, preview

  check_previews(tasks, split=split, feature_lengths=arguments.feature_lengths, model=arguments.model)
  previews = []
  for task in tasks:
    previews.append(
      preview(
        task,
        split=split,
        num_examples=arguments.n,
        source=arguments.source,
        skip=arguments.skip,
        base_seed=arguments.seed,
        feature_lengths=arguments.feature_lengths,
        model=arguments.model,
        packing=arguments.packing,
      )
    )
    _print(previews[-1], arguments)
  if arguments.html is not None:
    from anystep.tasks.preview.page import preview_page

    write_output(arguments.html, preview_page(previews, full=arguments.full), arguments.overwrite)
    print_note(f"{arguments.html}: a page of {', '.join(task.name for task in tasks)}")
  if arguments.svg is not None:
    from anystep.tasks.preview.text import preview_picture

    write_output(arguments.svg, preview_picture(previews, full=arguments.full), arguments.overwrite)
    print_note(f"{arguments.svg}: a picture of {', '.join(task.name for task in tasks)}")
  for task_preview in previews:
    if task_preview.error is not None:
      raise task_preview.error


def _find_registered(names: Sequence[str], modules: Sequence[str], split: str) -> list[seqio.Task]:
  """The tasks of these names, and of the mixtures of these names those that have the split, each once.

  Raises:
    AnystepError: 64 `task_unknown`; 66 `source_unreadable`; 78 `module_import`.
  """
  from anystep.tasks.registry.modules import import_modules
  from anystep.tasks.startup import quiet_stderr, start_tensorflow

  check_modules(modules)
  start_tensorflow()
  with quiet_stderr():
    from anystep.tasks.registry.named_tasks import find_all_tasks

  from anystep.tasks.preview.followed_examples import has_split

  import_modules(modules)
  fix = "correct the name, or add --module_import=MODULE_OF_THE_TASK"
  named = [[*read_mixture(name).rates] if is_mixture_text(name) else [name] for name in names]
  tasks: dict[str, seqio.Task] = {}
  for name in itertools.chain.from_iterable(named):
    mixed = find_all_tasks(name, fix=fix)
    # Where none has the split, the first task's error says so.
    with_split = [task for task in mixed if has_split(task, split)] or mixed[:1]
    tasks.update((task.name, task) for task in with_split)
  return list(tasks.values())


def _print(task_preview: Preview, arguments: argparse.Namespace) -> None:
  if arguments.format == "jsonl":
    print_objects(task_preview.to_json())
    return
  from anystep.tasks.preview.text import print_previews

  print_previews([task_preview], full=arguments.full)
