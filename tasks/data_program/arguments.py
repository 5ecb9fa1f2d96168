"""The arguments of `anystep-data`: flags that several commands have, and what is said of wrong ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from etils import epath

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.features.converter_names import CONVERTERS
from anystep.files import storage
from anystep.files.json_files import parse_json
from anystep.inspection.rows import index_of_source
from anystep.limits import are_feature_lengths
from anystep.order.epochs import EpochPolicy
from anystep.order.packing import PackingPolicy
from anystep.plans.changes import Rate
from anystep.programs.command_line import check_arguments
from anystep.tasks.registry.mixture_files import is_mixture_text, read_mixture
from anystep.tasks.registry.modules import import_modules
from anystep.tasks.registry.moved_functions import MODULE
from anystep.tasks.startup import quiet_stderr, start_tensorflow

# Beyond, arithmetic on the units of large batches would leave int64.
_STEP_LIMIT = 1 << 48
# No number of a source shard has as many; Python refuses to read a number of thousands.
_NUMBER_DIGITS = 20


class Parser(argparse.ArgumentParser):
  """Wrong arguments end as every foreseen failure does."""

  def parse_known_args(self, args=None, namespace=None):
    """See `argparse.ArgumentParser`."""
    check_arguments(args or ())
    return super().parse_known_args(args, namespace)

  def error(self, message: str) -> NoReturn:
    raise AnystepError(ExitCode.USAGE, "arguments", got=message, fix=f"{self.prog} --help lists them")


def add_command(
  commands: Any, name: str, run: Callable, text: str, *add_flags: Callable, examples: Iterable[str]
) -> Parser:
  """Add a command that `run` runs, and return its parser.

  Args:
    commands: what `ArgumentParser.add_subparsers` returned.
    name: the command's name.
    run: called with the parsed arguments; returns the exit status, or None for 0.
    text: about the command.
    *add_flags: functions that add flags to its parser.
    examples: arguments of commands that help shows.
  """
  command = commands.add_parser(
    name,
    help=text,
    description=text,
    allow_abbrev=False,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  command.epilog = format_examples(command.prog, examples)
  command.set_defaults(run=run)
  for add in add_flags:
    add(command)
  return command


def format_examples(program: str, examples: Iterable[str]) -> str:
  """Return the end of a help text: commands of a program with these arguments."""
  return "\n".join(["examples:", *(f"  {program} {arguments}".rstrip() for arguments in examples)])


def add_cache_dir_flag(parser: argparse.ArgumentParser) -> None:
  """The flag that says where caches are."""
  text = "roots that the cache job wrote to; may be repeated"
  parser.add_argument("--cache_dir", action="append", type=_parse_names, metavar="ROOT", help=text)


def add_task_flags(parser: argparse.ArgumentParser) -> None:
  """Flags that say which caches."""
  parser.add_argument("--task", action="append", type=_parse_names, help="the tasks meant; may be repeated")
  parser.add_argument("--split", help="the split; a plan has its own")


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
  """Flags that say which plan."""
  parser.add_argument("--plan", metavar="FILE", help="a plan's JSON file")
  parser.add_argument("--model_dir", metavar="DIR", help="a trainer's directory, which has a plan")


def add_rates_flag(parser: Any, text: str) -> None:
  """The flag for a mixture's rates, which may name its caches too, as MaxText's mixtures do."""
  text += (
    "; or the name of a mixture that --module_import registers; or MaxText's: FILE.json, or"
    " CACHE_DIR/A,1;CACHE_DIR/B,0.5"
  )
  parser.add_argument("--rates", action=_AddRates, metavar="A=1,B=0.5", help=text)


def add_order_flags(parser: argparse.ArgumentParser) -> None:
  """Flags that make a plan of caches."""
  group = parser.add_argument_group("the plan, where caches are named and no plan")
  add_rates_flag(group, "the mixture's tasks and rates; one task needs none")
  group.add_argument("--batch_size", type=int, help="rows of a batch, over all hosts")
  group.add_argument("--seed", type=int, help="the plan's; default 0")
  group.add_argument("--num_epochs", type=int, help="where the data ends; default never")
  group.add_argument(
    "--epoch_policy",
    choices=[policy.value for policy in EpochPolicy],
    help="order of epochs after the first: each shard's blocks and their records anew, the same, or the whole"
    " split anew by single records",
  )
  group.add_argument("--lanes", type=int, help="default: as batch size and shards allow")
  group.add_argument("--rate_unit", choices=["examples", "units"], help="what rates count; default examples")
  text = 'tokens per feature, as JSON: {"inputs": 512}'
  group.add_argument("--feature_lengths", type=parse_feature_lengths, metavar="JSON", help=text)
  text = "how many examples share a row; default none"
  group.add_argument("--packing", choices=[policy.value for policy in PackingPolicy], help=text)
  add_module_import_flag(group)
  add_accept_change_flag(group)


def add_module_import_flag(parser: Any) -> None:
  """The flag for modules that register the tasks."""
  text = (
    "a module that registers the tasks and mixtures; may be repeated. With it, what tasks do after the cache"
    " is known: what their preprocessors drop, append and cut, what a model gets, and the text of token ids"
  )
  parser.add_argument("--module_import", action="append", default=[], metavar="MODULE", help=text)


def add_accept_change_flag(parser: Any) -> None:
  """The flag for changes of tasks that readers of their caches pass over."""
  text = "with --module_import, module: the task's functions stood in another module when it was cached"
  parser.add_argument("--accept_change", action="append", default=[], choices=[MODULE], help=text)


def add_model_flag(parser: Any, text: str) -> None:
  """The flag for the model whose features are made."""
  # The others need arguments, which a model directory knows.
  models = [name for name in CONVERTERS if name != "encoder"]
  parser.add_argument("--model", choices=models, help=text)


def add_steps_flag(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
  """The flags for a range of steps, by the data's count or the model's; `NamedData.find_steps` reads them."""
  group = parser.add_mutually_exclusive_group(required=required)
  text = "from A up to, not with, B" + ("" if required else "; default to the data's end, or all trained")
  group.add_argument("--steps", type=_parse_step_range, metavar="A:B", help=text)
  text = "the same by the model's count, for a --model_dir whose run began with a checkpoint's step"
  group.add_argument("--model_steps", type=_parse_step_range, metavar="A:B", help=text)


def add_step_flag(parser: argparse.ArgumentParser, text: str) -> None:
  """The flag for one step."""
  parser.add_argument("--step", type=_parse_step, required=True, help=text)


def add_example_flags(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
  """Flags that say which examples of a task; returns the group of those of which one is needed."""
  examples = parser.add_mutually_exclusive_group(required=True)
  text = "an example's index in its task's cache; may be repeated"
  examples.add_argument("--index", type=int, action="append", help=text)
  examples.add_argument("--source", metavar="NAME_OR_NUMBER", help="its source shard, with --place")
  text = "its place among its source shard's examples; may be repeated"
  parser.add_argument("--place", type=int, action="append", help=text)
  return examples


def find_example_indices(arguments: argparse.Namespace, cache: Cache) -> list[int]:
  """The indices of the examples that the flags name.

  Raises:
    AnystepError: 64 `index`, `source`, `place` where there is none; `arguments`.
  """
  m = cache.manifest
  if arguments.index is not None:
    if arguments.place is not None:
      raise usage_error("--place and --index", "leave one out: --place belongs to --source")
    return [check_within("index", index, m.num_examples) for index in arguments.index]
  if arguments.place is None:
    raise usage_error("--source without --place", "add --place, the example's number in its source shard")
  named = [k for k, shard in enumerate(m.source_shards) if shard.name == arguments.source]
  if len(named) > 1:
    raise wrong_value_error("source", f"one of the numbers {named} that have this name", arguments.source)
  if not named and not (arguments.source.isdecimal() and len(arguments.source) <= _NUMBER_DIGITS):
    raise wrong_value_error(
      "source", find_nearest(arguments.source, {shard.name for shard in m.source_shards}), arguments.source
    )
  source_shard = named[0] if named else check_within("source", int(arguments.source), len(m.source_shards))
  num_places = m.source_shards[source_shard].examples
  places = [check_within("place", place, num_places) for place in arguments.place]
  return [index_of_source(cache, source_shard, place) for place in places]


def usage_error(got: str, fix: str) -> AnystepError:
  """The error for a command line that does not say enough, or too much."""
  return AnystepError(ExitCode.USAGE, "arguments", got=got, fix=f"{fix}; anystep-data --help lists them")


def unknown_task_error(task: str, tasks: Iterable[str], fix: str = "correct the name") -> AnystepError:
  """The error for a task that nobody knows, with the names that come near."""
  return AnystepError(ExitCode.USAGE, "task_unknown", expected=find_nearest(task, tasks), got=task, fix=fix)


def find_rates(arguments: argparse.Namespace, roots: Sequence[str], split: str) -> dict[str, Rate] | None:
  """Return the rates of --rates by task name; None where the command line has none.

  A registered mixture's name stands for the rates of those of its tasks that have the split.

  Args:
    arguments: with the values of `add_rates_flag` and `add_module_import_flag`.
    roots: where caches are, of which SeqIO's rate functions count the examples.
    split: the plan's.

  Raises:
    AnystepError: 64 `arguments`, `task_unknown`; 78 `module_import`, `split`, `rates`.
  """
  rates: dict[str, Rate] = {}
  for value in getattr(arguments, "rates", None) or ():
    pairs = _compute_rates(value, arguments.module_import, roots, split) if isinstance(value, str) else value
    for name, rate in pairs.items():
      if name in rates:
        raise usage_error(f"--rates names a task twice: {name}", "name each task once")
      rates[name] = rate
  return rates or None


def _compute_rates(
  mixture: str, modules: Sequence[str], roots: Sequence[str], split: str
) -> Mapping[str, Rate]:
  """Return the rates of a registered mixture."""
  if not modules:
    raise usage_error(
      f"--rates={mixture} without --module_import",
      "give TASK=RATE joined by commas, or a mixture's name and --module_import=MODULE_OF_THE_MIXTURE",
    )
  start_tensorflow()
  with quiet_stderr():
    from anystep.tasks.registry.named_tasks import find_named_tasks

  import_modules(modules)
  named = find_named_tasks(mixture, split, fix="correct the name in --rates, or --module_import")
  return named.compute_rates(roots)


def join_values(values: Iterable[list[str]] | None) -> list[str]:
  """The values of a flag that may be repeated and that takes several at once."""
  return list(dict.fromkeys(value for several in values or () for value in several))


def write_output(path: str, text: str, overwrite: bool) -> None:
  """Writes a file, whole or not at all.

  Raises:
    AnystepError: as `check_output`.
  """
  check_output(path, overwrite)
  storage.put(path, text.encode())


def check_output(path: str, overwrite: bool) -> None:
  """Refuses an output that would replace a file, or that has no directory: before anything is made for it.

  Raises:
    AnystepError: 73 `output_exists`, `output_directory`.
  """
  target = epath.Path(path)
  # A file that is put in a device's place is its end, where that is allowed.
  if not storage.is_remote(path) and os.path.exists(path or ".") and not os.path.isfile(path):
    raise AnystepError(
      ExitCode.CANNOT_CREATE,
      "output_exists",
      path=path,
      expected="a file, or a name that is free",
      got="a directory" if target.is_dir() else "a FIFO, socket or device",
      fix="write to another place",
    )
  if target.exists() and not overwrite:
    raise AnystepError(
      ExitCode.CANNOT_CREATE, "output_exists", path=path, fix="write to another file, or add --overwrite"
    )
  if not storage.is_remote(path) and not target.parent.is_dir():
    raise AnystepError(
      ExitCode.CANNOT_CREATE,
      "output_directory",
      path=target.parent,
      fix="make the directory, or name another",
    )


def check_within(kind: str, number: int, stop: int) -> int:
  """A flag's number, refused where it is not in [0, stop)."""
  if not 0 <= number < stop:
    raise wrong_value_error(kind, f"0 to {stop - 1}", number)
  return number


def wrong_value_error(kind: str, expected: str, got: object) -> AnystepError:
  """The error for a flag that names what is not there."""
  return AnystepError(
    ExitCode.USAGE, kind, expected=expected, got=got, fix=f"correct --{kind}: name one that is there"
  )


def parse_feature_lengths(text: str) -> dict[str, int]:
  """A flag's feature lengths, `{"inputs": 512}`."""
  try:
    lengths = parse_json(text)
  except ValueError:
    lengths = None
  if not are_feature_lengths(lengths):
    raise argparse.ArgumentTypeError(f'expected JSON such as {{"inputs": 512}}, got {text!r}')
  return lengths


def _parse_names(text: str) -> list[str]:
  # A mixture of caches has commas of its own.
  names = [text] if is_mixture_text(text) else text.split(",")
  if not all(names):
    raise argparse.ArgumentTypeError(f"expected names joined by commas, got {text!r}")
  return names


class _AddRates(argparse.Action):
  """Adds rates by task name, or a registered mixture's name, which says them once its module is imported.

  Where a mixture names caches, their roots come before those named otherwise.
  """

  def __call__(
    self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any
  ) -> None:
    rates: Mapping[str, Any] | str
    # A path with an equals sign may stand in a mixture's file.
    if is_mixture_text(values) and (values.endswith(".json") or "=" not in values):
      mixture = read_mixture(values)
      rates = {task: str(rate) for task, rate in mixture.rates.items()}
      namespace.cache_dir = [list(mixture.roots), *(namespace.cache_dir or [])]
    else:
      rates = _parse_rates(parser, values) if "=" in values else values
    namespace.rates = [*(namespace.rates or []), rates]


def _parse_rates(parser: argparse.ArgumentParser, text: str) -> dict[str, str]:
  rates: dict[str, str] = {}
  for part in text.split(","):
    name, _, rate = part.partition("=")
    if not (name and rate) or "=" in rate:
      parser.error(f"argument --rates: expected TASK=RATE joined by commas, got {text!r}")
    if name in rates:
      raise usage_error(f"--rates={text}, which names {name} twice", "name each task once")
    rates[name] = rate
  return rates


def _parse_step_range(text: str) -> range:
  start, separator, stop = text.partition(":")
  numbers = start.isdecimal() and stop.isdecimal()
  if not separator or not numbers or not int(start) < int(stop) <= _STEP_LIMIT:
    expected = f"A:B, the steps from A to before B <= {_STEP_LIMIT}, such as 5:6 for step 5 alone"
    raise argparse.ArgumentTypeError(f"expected {expected}; got {text!r}")
  return range(int(start), int(stop))


def _parse_step(text: str) -> int:
  if not text.isdecimal() or int(text) > _STEP_LIMIT:
    raise argparse.ArgumentTypeError(f"expected a step, a whole number >= 0, got {text!r}")
  return int(text)
