"""Writers of metrics: TensorBoard, files of JSON lines, Weights & Biases."""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files.input_files import open_file
from anystep.files.json_files import MALFORMED, parse_json
from anystep.limits import MAX_JSON_BYTES

TRAIN = "train"
"""Group of the metrics of training; those of an evaluation are `eval_SPLIT/TASK`."""

_FOLDER = "metrics"
_NAME = re.compile(r"start-(\d{5,})\.jsonl\Z")


class MetricWriter(Protocol):
  """Writer of metrics; each start of a run has its own."""

  def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
    """Write metrics after a number of steps.

    Args:
      step: number of steps done, by the model's count.
      group: `train`, or `eval_SPLIT/TASK`.
      values: by metric.
    """

  def close(self) -> None:
    """Write what is not yet written."""


WriterFactory = Callable[[str], MetricWriter]
"""A class of writers, or a function, which is called with MODEL_DIR when a run starts."""


class TensorBoardWriter:
  """Writer of events for TensorBoard, in a folder of MODEL_DIR for each group.

  Args:
    model_dir: the run's directory.
  """

  def __init__(self, model_dir: str):
    self._model_dir = epath.Path(model_dir)
    self._writers: dict[str, Any] = {}

  def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
    """See `MetricWriter`."""
    from clu import metric_writers

    if group not in self._writers:
      self._writers[group] = metric_writers.SummaryWriter(str(self._model_dir / group))
    self._writers[group].write_scalars(step, values)

  def close(self) -> None:
    """See `MetricWriter`."""
    for writer in self._writers.values():
      writer.close()


class JsonLinesWriter:
  """Writer of `metrics/`: a file for each start, with one JSON object a line; `read_metrics` joins them.

  Args:
    model_dir: the run's directory.
  """

  def __init__(self, model_dir: str):
    folder = epath.Path(model_dir) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    self._file = (folder / f"start-{max(numbers, default=-1) + 1:05d}.jsonl").open("w")

  def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
    """See `MetricWriter`."""
    record = {"step": step, "group": group, "unix_seconds": round(time.time(), 3), "values": dict(values)}
    self._file.write(json.dumps(record) + "\n")
    self._file.flush()

  def close(self) -> None:
    """See `MetricWriter`."""
    self._file.close()


def read_metrics(model_dir: epath.PathLike) -> Iterator[dict[str, Any]]:
  """Yield what every start of a run wrote by `JsonLinesWriter`, in that order.

  A last line that a kill cut short is left out.

  Raises:
    AnystepError: 65 `metrics_invalid` if a line is not one that a run writes.
  """
  for path in sorted((epath.Path(model_dir) / _FOLDER).glob("start-*.jsonl")):
    number = 0
    try:
      with open_file(path) as file:
        while (line := file.readline(MAX_JSON_BYTES)).endswith(b"\n"):
          number += 1
          record = parse_json(line, number=float)
          yield record | {"step": int(record["step"])}
    except (*MALFORMED, IsADirectoryError, FileNotFoundError) as error:
      raise make_file_error(
        "metrics_invalid",
        error,
        path=path,
        line=number,
        expected="a step, a group and its values in each line",
        fix="restore the file from a copy, or move it away",
      ) from error


class WandbWriter:
  """Writer of metrics to Weights & Biases, whose package `wandb` has to be installed.

  Metrics are named `GROUP/METRIC`. All starts of a MODEL_DIR go to one run there.

  Args:
    model_dir: the run's directory.
    project: the project's name.
    name: the run's name; the last part of model_dir by default.
    **options: passed to `wandb.init`.

  Raises:
    AnystepError: 78 `package_missing`.
  """

  def __init__(self, model_dir: str, project: str, name: str | None = None, **options: Any):
    try:
      wandb = importlib.import_module("wandb")
    except ImportError as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "package_missing",
        expected="wandb, which reports.WandbWriter needs",
        got=str(error),
        fix="pip install wandb, or leave reports.WandbWriter out of trainer.Trainer.metric_writers",
      ) from error
    name = name or epath.Path(model_dir).name
    defaults = {"dir": str(model_dir), "id": name, "resume": "allow"}
    self._run = wandb.init(project=project, name=name, **defaults | options)

  def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
    """See `MetricWriter`."""
    self._run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

  def close(self) -> None:
    """See `MetricWriter`."""
    self._run.finish()


class MetricWriters:
  """Several writers as one; a context manager, which closes them.

  Args:
    factories: makers of the writers.
    model_dir: the run's directory.
  """

  def __init__(self, factories: Sequence[WriterFactory], model_dir: str):
    self._writers: list[MetricWriter] = []
    try:
      for factory in factories:
        self._writers.append(factory(model_dir))
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> MetricWriters:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
    """See `MetricWriter`."""
    for writer in self._writers:
      writer.write(step, group, values)

  def close(self) -> None:
    """Close all writers."""
    for writer in self._writers:
      writer.close()
