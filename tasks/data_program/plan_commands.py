"""`anystep-data plan`: what decides a run's data, made, changed and looked at."""

from __future__ import annotations

import argparse
from typing import Any

from anystep.errors import AnystepError
from anystep.inspection.history import differences, first_different_step, history, totals
from anystep.inspection.model_directory import read_plan_or_model_dir
from anystep.inspection.read_lengths import count_read_lengths
from anystep.plans.plan import PADDING_TASK, Plan
from anystep.plans.tombstones import TombstoneList
from anystep.streams.stream import find_cache
from anystep.tasks.data_program.arguments import (
  Parser,
  add_accept_change_flag,
  add_cache_dir_flag,
  add_command,
  add_model_flag,
  add_module_import_flag,
  add_order_flags,
  add_plan_flags,
  add_rates_flag,
  add_step_flag,
  add_steps_flag,
  add_task_flags,
  check_output,
  find_rates,
  format_examples,
  unknown_task_error,
  usage_error,
  write_output,
)
from anystep.tasks.data_program.named_data import (
  AFTER_CACHE_UNKNOWN,
  NamedData,
  find_converter,
  find_named_plan,
  find_order,
  find_plan,
  find_transforms,
  make_task_readers,
  open_caches,
  open_named_cache,
  transforms_by_name,
)
from anystep.tasks.data_program.row_commands import ANY_DATA
from anystep.tasks.data_program.tables import (
  print_batch,
  print_differences,
  print_note,
  print_objects,
  print_plan,
)


def add_plan_commands(commands: Any) -> list[argparse.ArgumentParser]:
  """Add `plan` and its commands; return those that print tables."""
  text = "make, change and look at plans, which decide what every step trains on"
  plan = commands.add_parser(
    "plan",
    help=text,
    description=text,
    allow_abbrev=False,
    epilog=format_examples(
      "anystep-data plan",
      (
        "show --model_dir=MODEL_DIR",
        "change --model_dir=MODEL_DIR --step=2000 --rates=c4=0.5,code=0.5 --output=changed.json",
        "diff MODEL_DIR changed.json",
      ),
    ),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  plans = plan.add_subparsers(required=True, parser_class=Parser, metavar="COMMAND")
  show = add_command(
    plans,
    "show",
    _run_show,
    "print the history of the data",
    *ANY_DATA,
    examples=("--model_dir=MODEL_DIR", "--plan=plan.json --format=jsonl"),
  )
  diff = add_command(
    plans,
    "diff",
    _run_diff,
    "print in what two plans differ; exits with 1 where they do",
    examples=("plan.json changed.json", "MODEL_DIR changed.json"),
  )
  for name in ("one", "other"):
    diff.add_argument(name, help="a plan's file, or a model directory")
  batch = add_command(
    plans,
    "batch",
    _run_batch,
    "print the rows of a step, without reading a cache",
    *ANY_DATA,
    examples=("--plan=plan.json --step=1000000",),
  )
  add_step_flag(batch, "the step")
  _add_writing_commands(plans)
  return [show, diff, batch]


def _add_writing_commands(plans: Any) -> None:
  """Add the commands that write a plan."""
  start = add_command(
    plans,
    "start",
    _run_start,
    "write the plan of a run that starts",
    add_cache_dir_flag,
    add_task_flags,
    add_order_flags,
    examples=(
      """--cache_dir=cache --task=c4 --batch_size=128 --feature_lengths='{"inputs": 512, "targets": 114}' \\
      --module_import=my_tasks --output=plan.json""",
      "--cache_dir=cache --rates=my_mixture --module_import=my_tasks --batch_size=128 --output=plan.json",
    ),
  )
  add_model_flag(start, "the model that gets the rows, for what is cut; default one of single features")
  named_plan = (add_cache_dir_flag, add_plan_flags)
  change = add_command(
    plans,
    "change",
    _run_change,
    "write the plan with another mixture, batch size or lanes from a step on",
    *named_plan,
    examples=(
      "--model_dir=MODEL_DIR --step=2000 --rates=c4=0.5,code=0.5 --output=changed.json",
      "--model_dir=MODEL_DIR --step=2000 --rates=my_mixture --module_import=my_tasks --output=changed.json",
      "--plan=plan.json --step=2000 --batch_size=256 --output=changed.json",
    ),
  )
  add_step_flag(change, "the first step that is changed")
  add_rates_flag(change, "the whole new mixture: a task that is not named leaves; default as before")
  change.add_argument("--batch_size", type=int, help="default as before")
  change.add_argument("--lanes", type=int, help="default as before, where batch size and tasks are")
  change.add_argument("--reason", default="change", help="why, for people")
  add_module_import_flag(change)
  add_accept_change_flag(change)
  skip = add_command(
    plans,
    "skip",
    _run_skip,
    "write the plan that leaves out the data of some steps",
    *named_plan,
    examples=("--model_dir=MODEL_DIR --steps=1500:1520 --reason='loss spike' --output=changed.json",),
  )
  add_steps_flag(skip, required=True)
  skip.add_argument("--reason", help="why, for people")
  tombstone = add_command(
    plans,
    "tombstone",
    _run_tombstone,
    "write the plan in which listed examples have no loss weight from a step on",
    *named_plan,
    examples=("--model_dir=MODEL_DIR --step=2000 --list=leaked.json --output=changed.json",),
  )
  text = "a list that anystep-data tombstone wrote; may be repeated"
  tombstone.add_argument("--list", action="append", required=True, metavar="FILE", help=text)
  add_step_flag(tombstone, "the first step without their loss")
  for command in (start, change, skip, tombstone):
    command.add_argument("--output", required=True, metavar="FILE", help="where the plan goes")
    command.add_argument("--overwrite", action="store_true", help="replace the file that is there")


def _run_show(arguments: argparse.Namespace) -> None:
  data = find_plan(arguments)
  segments, whole = history(data.known_plan), totals(data.known_plan, data.trained_steps)
  if data.first_step:
    whole |= {"first_model_step": data.first_step}
  if arguments.format == "jsonl":
    print_objects([*({"kind": "segment", **segment} for segment in segments), {"kind": "plan", **whole}])
  else:
    print_plan(segments, whole)


def _run_diff(arguments: argparse.Namespace) -> int:
  one, other = (read_plan_or_model_dir(path) for path in (arguments.one, arguments.other))
  differing_fields, step = differences(one, other), first_different_step(one, other)
  if arguments.format == "jsonl":
    print_objects(
      [*(difference._asdict() for difference in differing_fields), {"first_different_step": step}]
    )
  else:
    print_differences(differing_fields, step)
  return int(bool(differing_fields))


def _run_start(arguments: argparse.Namespace) -> None:
  check_output(arguments.output, arguments.overwrite)
  data = find_plan(arguments)
  _write_plan(data.known_plan, arguments, data)
  if data.known_plan.feature_lengths:
    _print_cuts(data, arguments)


def _print_cuts(data: NamedData, arguments: argparse.Namespace) -> None:
  """Print what share of examples and tokens the lengths cut, with a warning where that is much."""
  plan = data.known_plan
  transforms = find_transforms(data, arguments.module_import, plan.feature_lengths)
  if transforms is None:
    print(f"what the lengths cut is not known: {AFTER_CACHE_UNKNOWN}")
    return
  converter, _ = find_converter(arguments)
  for cache, transform in zip(data.caches, transforms, strict=True):
    lengths = count_read_lengths(
      cache,
      transform,
      feature_lengths=plan.feature_lengths,
      converter=converter,
      packing=plan.packing,
    )
    if lengths.cuts_much:
      print_note(f"WARNING: {lengths.describe_cut()}")
    else:
      print(lengths.describe_cut())


def _run_change(arguments: argparse.Namespace) -> None:
  data = _find_named_plan(arguments)
  plan = data.known_plan
  rates = find_rates(arguments, data.roots, plan.split)
  if rates is None and arguments.batch_size is None and arguments.lanes is None:
    raise usage_error("nothing to change", "add --rates, --batch_size or --lanes")
  new = [name for name in rates or () if name not in plan.tasks]
  if new and not data.roots:
    raise unknown_task_error(
      new[0], plan.tasks, "correct the name, or add --cache_dir=ROOT where its cache is"
    )
  caches = [open_named_cache(data.roots, name, plan.split) for name in new]
  if any(task.unit_table for task in plan.tasks.values()):
    plan = open_caches(data).known_plan
  changed = plan.change(
    arguments.step,
    rates=rates,
    batch_size=arguments.batch_size,
    lanes=arguments.lanes,
    caches=caches,
    transforms=transforms_by_name(
      caches, make_task_readers(arguments.module_import, caches, plan.feature_lengths)
    ),
    trained_steps=data.trained_steps or 0,
    reason=arguments.reason,
  )
  _write_plan(changed, arguments, data)


def _run_skip(arguments: argparse.Namespace) -> None:
  data = _find_named_plan(arguments)
  steps, trained_steps = data.find_steps(arguments), data.trained_steps or 0
  assert steps is not None, "one of the flags is required"
  skipped = data.known_plan.skip(
    steps.start, steps.stop, trained_steps=trained_steps, reason=arguments.reason
  )
  _write_plan(skipped, arguments, data)


def _run_tombstone(arguments: argparse.Namespace) -> None:
  data = _find_named_plan(arguments)
  lists = [TombstoneList.read(path) for path in arguments.list]
  before = data.known_plan
  plan = before.tombstone(arguments.step, lists, trained_steps=data.trained_steps or 0)
  write_output(arguments.output, plan.to_json(), arguments.overwrite)
  new = plan.tombstones[len(before.tombstones) :]
  count = sum(len(indices) for entry in new for indices in entry.indices.values())
  step = data.describe_step(arguments.step)
  print(f"{arguments.output}: from {step} on no loss on {count:,} examples, sha256 {plan.sha256}")


def _find_named_plan(arguments: argparse.Namespace) -> NamedData:
  check_output(arguments.output, arguments.overwrite)
  data = find_named_plan(arguments)
  if data is None:
    raise usage_error("no plan", "add --plan=FILE or --model_dir=DIR")
  if arguments.cache_dir:
    _check_caches(data)
  return data


def _check_caches(data: NamedData) -> None:
  """Refuse roots with other caches of the plan's tasks than it was made for; they need not have all of them.

  Raises:
    AnystepError: as `Plan.on_caches`.
  """
  plan = data.known_plan
  for name in plan.task_names:
    try:
      cache = find_cache(data.roots, name, plan.split)
    except AnystepError as error:
      if error.kind not in ("cache_missing", "split_missing"):
        raise
    else:
      plan.tasks[name].check_manifest(name, cache.manifest_sha256)


def _run_batch(arguments: argparse.Namespace) -> None:
  plan = find_order(arguments)
  batch = plan.batch(arguments.step)
  names = [None if k == PADDING_TASK else plan.task_names[k] for k in batch.task.tolist()]
  fields = batch._fields[1:]
  columns = zip(names, *(column.tolist() for column in batch[1:]), strict=True)
  rows = []
  for row, (name, *numbers) in enumerate(columns):
    values = [None] * len(numbers) if name is None else numbers
    rows.append({"step": arguments.step, "row": row, "task": name, **dict(zip(fields, values, strict=True))})
  if arguments.format == "jsonl":
    print_objects(rows)
  else:
    print_batch(rows)


def _write_plan(plan: Plan, arguments: argparse.Namespace, data: NamedData) -> None:
  write_output(arguments.output, plan.to_json(), arguments.overwrite)
  last = plan.segments[-1]
  start = data.describe_step(last.start_step)
  print(f"{arguments.output}: from {start} on {last.reason!r}, sha256 {plan.sha256}")
