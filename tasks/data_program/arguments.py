"""The arguments of `anystep-data`: flags that several commands have, and what is said of wrong ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any, NoReturn

from etils import epath

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.files import storage
from anystep.files.json_files import parse_json
from anystep.limits import are_feature_lengths
from anystep.order.epochs import EpochPolicy
from anystep.order.packing import PackingPolicy
from anystep.programs.command_line import check_arguments
from anystep.tasks.registry.mixture_files import is_mixture_text, read_mixture
from anystep.tasks.registry.moved_functions import MODULE

# Beyond, arithmetic on the units of large batches would leave int64.
_STEP_LIMIT = 1 << 48


class Parser(argparse.ArgumentParser):
  """Wrong arguments end as every foreseen failure does."""

  def parse_known_args(self, args=None, namespace=None):
    """See `argparse.ArgumentParser`."""
    check_arguments(args or ())
    return super().parse_known_args(args, namespace)

  def error(self, message: str) -> NoReturn:
    raise AnystepError(ExitCode.USAGE, "arguments", got=message, fix=f"{self.prog} --help lists them")


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
  text += "; or MaxText's: FILE.json, or CACHE_DIR/A,1;CACHE_DIR/B,0.5"
  parser.add_argument("--rates", action=_AddRates, metavar="A=1,B=0.5", help=text)


def add_order_flags(parser: argparse.ArgumentParser) -> None:
  """Flags that make a plan of caches."""
  group = parser.add_argument_group("the plan, where caches are named and no plan")
  add_rates_flag(group, "the mixture's tasks and rates; one task needs none")
  group.add_argument("--batch_size", type=int, help="rows of a batch, over all hosts")
  group.add_argument("--seed", type=int, help="the plan's; default 0")
  group.add_argument("--num_epochs", type=int, help="where the data ends; default never")
  group.add_argument("--epoch_policy", choices=[policy.value for policy in EpochPolicy])
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
    "a module that registers the tasks; may be repeated: then a plan that is made counts what their"
    " preprocessors after the cache drop or append, and show makes text of token ids"
  )
  parser.add_argument("--module_import", action="append", default=[], metavar="MODULE", help=text)


def add_accept_change_flag(parser: Any) -> None:
  """The flag for changes of tasks that readers of their caches pass over."""
  text = "with --module_import, module: the task's functions stood in another module when it was cached"
  parser.add_argument("--accept_change", action="append", default=[], choices=[MODULE], help=text)


def add_steps_flag(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
  """The flag for a range of steps."""
  text = "from A up to, not with, B" + ("" if required else "; default to the data's end, or all trained")
  parser.add_argument("--steps", type=_parse_step_range, required=required, metavar="A:B", help=text)


def add_step_flag(parser: argparse.ArgumentParser, text: str) -> None:
  """The flag for one step."""
  parser.add_argument("--step", type=_parse_step, required=True, help=text)


def usage_error(got: str, fix: str) -> AnystepError:
  """The error for a command line that does not say enough, or too much."""
  return AnystepError(ExitCode.USAGE, "arguments", got=got, fix=f"{fix}; anystep-data --help lists them")


def unknown_task_error(task: str, tasks: Iterable[str], fix: str = "correct the name") -> AnystepError:
  """The error for a task that nobody knows, with the names that come near."""
  return AnystepError(ExitCode.USAGE, "task_unknown", expected=find_nearest(task, tasks), got=task, fix=fix)


def join_rates(arguments: argparse.Namespace) -> dict[str, str] | None:
  """The rates of a command line; None where it has none."""
  pairs = [pair for pairs in getattr(arguments, "rates", None) or () for pair in pairs]
  if len(dict(pairs)) != len(pairs):
    raise usage_error(
      f"--rates names a task twice: {', '.join(name for name, _ in pairs)}", "name each task once"
    )
  return dict(pairs) or None


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
  if not target.parent.is_dir():
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
  """Adds pairs of a task and its rate; where a mixture names caches, their roots to those looked in first."""

  def __call__(
    self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any
  ) -> None:
    # A path with an equals sign may stand in a mixture's file.
    if is_mixture_text(values) and (values.endswith(".json") or "=" not in values):
      mixture = read_mixture(values)
      pairs = [(task, str(rate)) for task, rate in mixture.rates.items()]
      namespace.cache_dir = [list(mixture.roots), *(namespace.cache_dir or [])]
    else:
      pairs = _parse_rates(parser, values)
    namespace.rates = [*(namespace.rates or []), pairs]


def _parse_rates(parser: argparse.ArgumentParser, text: str) -> list[tuple[str, str]]:
  pairs = [tuple(part.split("=")) for part in text.split(",")]
  if not all(len(pair) == 2 and all(pair) for pair in pairs):
    parser.error(f"argument --rates: expected TASK=RATE joined by commas, got {text!r}")
  return pairs  # type: ignore[return-value]


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
