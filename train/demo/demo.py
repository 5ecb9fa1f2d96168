"""The demo: cache a task, train on it, kill a second run, resume it, and compare the two runs.

`make demo` runs it. It starts the programs as a user would, and compares their output files.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from anystep.errors import AnystepError, ExitCode
from anystep.programs.command_line import parse_flags, run_program

_GIN_FILE = "gin_configs/examples/stdlib_tiny.gin"
_TASK = "stdlib_span_corruption"
_MODULE = "anystep.tasks.stdlib"
# As in the gin file. Kills keep this far from checkpoints, so that some steps are always lost.
_CHECKPOINT_PERIOD, _TOTAL_STEPS, _MARGIN_STEPS = 50, 200, 5
_SHOWN_EXAMPLES = 3
_POLL_SECONDS = 0.01


def main(argv: Sequence[str]) -> int:
  """Run the demo; return 0 if both runs are identical, else 1."""
  values = _parse(argv)
  begin_seconds = time.monotonic()
  output = Path(values.output_dir)
  cache_dir, undisturbed, interrupted = output / "cache", output / "undisturbed", output / "interrupted"
  _clear(output, [cache_dir, undisturbed, interrupted])
  # Runs share compiled programs: compiling takes the first seconds of each.
  environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str((output / "compiled").resolve())}

  def train_command(model_dir: Path) -> list[str]:
    bindings = [f"--gin.MODEL_DIR='{model_dir}'", f"--gin.CACHE_DIR='{cache_dir}'"]
    return ["anystep-train", f"--gin_file={_GIN_FILE}", *bindings]

  _title("1. Cache the task")
  _run(
    ["anystep-cache", f"--tasks={_TASK}", f"--output_cache_dir={cache_dir}", f"--module_import={_MODULE}"],
    environment,
  )
  _title("2. Train, undisturbed")
  _run(train_command(undisturbed), environment)
  _title("3. Train again, and kill it on the way")
  kill_step = random.SystemRandom().choice(_kill_steps()) if values.kill_step is None else values.kill_step
  _run_and_kill(train_command(interrupted), environment, interrupted, kill_step)
  _title("4. Run the same command again")
  _run(train_command(interrupted), environment)
  _title("5. Compare the two runs")
  identical = _compare(train_command(interrupted), undisturbed, interrupted, output / "report.html")
  print(f"The whole demo took {time.monotonic() - begin_seconds:.0f} s.")
  return 0 if identical else 1


def _parse(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_string("output_dir", "demo_output", "Where everything goes.", flag_values=values)
  flags.DEFINE_integer(
    "kill_step", None, "Kill when this step was taken; at random by default.", flag_values=values
  )
  parse_flags(values, argv, program="python -m anystep.train.demo", text=__doc__ or "")
  return values


def _clear(output: Path, directories: Sequence[Path]) -> None:
  """Remove the output of an earlier demo, and no other files."""
  marker = output / ".anystep_demo"
  present = [directory for directory in directories if directory.exists()]
  if present and not marker.exists():
    raise AnystepError(
      ExitCode.CANNOT_CREATE,
      "output_dir",
      path=present[0],
      expected="no such directory, or an earlier demo's",
      fix="choose another --output_dir",
    )
  for directory in present:
    shutil.rmtree(directory)
  output.mkdir(parents=True, exist_ok=True)
  marker.touch()


def _kill_steps() -> list[int]:
  return [
    step
    for step in range(_CHECKPOINT_PERIOD, _TOTAL_STEPS)
    if _MARGIN_STEPS <= step % _CHECKPOINT_PERIOD < _CHECKPOINT_PERIOD - _MARGIN_STEPS
  ]


def _title(text: str) -> None:
  print(f"\n== {text}", flush=True)


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
  print(f"$ {_format_command(command)}", flush=True)
  program = Path(sys.executable).with_name(command[0])
  return subprocess.Popen([str(program), *command[1:]], env=environment)


def _format_command(command: Sequence[str]) -> str:
  """The command as one would type it: gin's strings have quotes of their own."""
  return " ".join(f'"{word}"' if "'" in word else shlex.quote(word) for word in command)


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
  begin_seconds = time.monotonic()
  status = _start(command, environment).wait()
  if status:
    raise _failed(command, status)
  print(f"({time.monotonic() - begin_seconds:.0f} s)", flush=True)


def _run_and_kill(
  command: Sequence[str], environment: dict[str, str], model_dir: Path, kill_step: int
) -> None:
  """Kills the command, with no time to say goodbye, as soon as its log has the step."""
  begin_seconds = time.monotonic()
  process = _start(command, environment)
  print(f"SIGKILL comes after step {kill_step}, picked at random", flush=True)
  while _logged_steps(model_dir) <= kill_step:
    if process.poll() is not None:
      raise _failed(command, process.returncode)
    time.sleep(_POLL_SECONDS)
  process.kill()
  process.wait()
  print(f"killed ({time.monotonic() - begin_seconds:.0f} s)", flush=True)


def _logged_steps(model_dir: Path) -> int:
  return sum(path.read_bytes().count(b"\n") for path in model_dir.glob("step_log/*.jsonl"))


def _failed(command: Sequence[str], status: int) -> AnystepError:
  is_exit_code = status in [int(code) for code in ExitCode]
  return AnystepError(
    ExitCode(status) if is_exit_code else ExitCode.NUMERICS,
    "demo_step_failed",
    command=_format_command(command),
    got=f"exit status {status}",
    fix="see what the command printed above; a --kill_step has to come before the run's end",
  )


def _compare(command: Sequence[str], undisturbed: Path, interrupted: Path, report: Path) -> bool:
  from rich.console import Console
  from rich.table import Table

  from anystep.train.demo.report import write_report
  from anystep.train.demo.run_comparison import compare_runs
  from anystep.train.reports.step_log import read_step_log

  comparison = compare_runs(undisturbed, interrupted)
  losses = [record.loss for record in read_step_log(undisturbed)[-1]]
  first, last = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
  facts = {
    "batches identical": f"{comparison.identical_batches}/{comparison.total_steps}",
    "losses identical": f"{comparison.identical_losses}/{comparison.total_steps}",
    "parameters, undisturbed": comparison.parameters[0],
    "parameters, interrupted": comparison.parameters[1],
    "mean loss, first 20 steps": f"{first:.4f}",
    "mean loss, last 20 steps": f"{last:.4f} ({last / first:.2f} of the first)",
  }
  table = Table(show_header=False)
  for name, value in facts.items():
    table.add_row(name, value)
  Console().print(table)
  write_report(
    report,
    comparison=comparison,
    undisturbed=undisturbed,
    interrupted=interrupted,
    facts=facts,
    examples=_examples(command, comparison.resumed_from),
  )
  print(comparison.verdict)
  print(f"Loss curves and examples: {report}")
  return comparison.identical


def _examples(command: Sequence[str], step: int) -> list[dict[str, str]]:
  """Return the first rows of a step's batch as text, with their origins."""
  from anystep.inspection.rows import what_was_at
  from anystep.tasks.vocabularies.decoding import decode_readable
  from anystep.train.datasets.cached import Dataset
  from anystep.train.datasets.run_data import only_task
  from anystep.train.main import configure

  trainer = configure(["anystep-train", *command[1:]])
  dataset = Dataset.open(trainer.train_dataset)
  data = dataset.run_order().open(trainer.model.feature_converter)
  features = only_task(dataset).output_features
  origins = what_was_at(data.plan, dataset.cached.caches, step)
  with data.open_stream() as stream:
    batch = stream.batch(step)
  return [
    {
      f"step {step}, row {row}: from {origin['examples'][0]['source_name']}, place "
      f"{origin['examples'][0]['source_place']}. Inputs:": decode_readable(
        batch["encoder_input_tokens"][row], features["inputs"].vocabulary
      ),
      "Targets:": decode_readable(batch["decoder_target_tokens"][row], features["targets"].vocabulary),
    }
    for row, origin in zip(range(_SHOWN_EXAMPLES), origins, strict=False)
  ]


def run() -> None:
  """Run the program."""
  run_program(lambda: main(sys.argv))
