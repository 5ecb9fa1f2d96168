"""A task's own metrics, computed as SeqIO's Evaluator computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import seqio

from anystep.errors import AnystepError, ExitCode, one_line

ModelOutput = seqio.metrics.ModelOutputType


def check_metrics(task: seqio.Task, outputs: Collection[seqio.metrics.ModelOutputType]) -> None:
  """Refuse a task with a metric of an output that the model does not give.

  Raises:
    AnystepError: 78 `metric_output`.
  """
  for metric in task.metric_objs:
    if metric.model_output_type not in outputs:
      raise AnystepError(
        ExitCode.CONFIG,
        "metric_output",
        task=task.name,
        expected=" or ".join(ModelOutput.to_str(known) for known in outputs),
        got=ModelOutput.to_str(metric.model_output_type),
        fix="leave the metric out of the task, or evaluate nothing: --gin.EVAL_DATASET=None",
      )


def compute_metrics(
  task: seqio.Task,
  examples: Sequence[Mapping[str, np.ndarray]],
  outputs: Mapping[seqio.metrics.ModelOutputType, np.ndarray],
  *,
  prefixes: Mapping[seqio.metrics.ModelOutputType, str] | None = None,
) -> dict[str, Any]:
  """Compute the task's metrics, by name.

  Args:
    task: its metric functions and objects name the outputs that they take.
    examples: features of each example after all preprocessors, in order.
    outputs: `PREDICTION` `(examples, length)` token ids, `SCORE` `(examples,)`, in the same order.
    prefixes: texts before the names of metrics, by the output that they take.

  Raises:
    AnystepError: 78 `metric_output` where a metric takes what is not in outputs, `metric_failed` where it, or
      the task's postprocessor, raises, `metric_name` where two give one name.
  """
  check_metrics(task, outputs)
  result: dict[str, Any] = {}
  for place, metric in enumerate(task.metric_objs):
    try:
      values = _compute(metric, task, examples, outputs[metric.model_output_type])
    except Exception as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "metric_failed",
        task=task.name,
        metric=_metric_name(task, place),
        got=one_line(error),
        fix="evaluate a split that has targets, or mend the metric or the task's postprocess_fn",
      ) from error
    prefix = (prefixes or {}).get(metric.model_output_type, "")
    values = {f"{prefix}{name}": value for name, value in values.items()}
    repeated = result.keys() & values.keys()
    if repeated:
      raise AnystepError(
        ExitCode.CONFIG,
        "metric_name",
        task=task.name,
        got=sorted(repeated),
        fix="give each metric a name of its own",
      )
    result.update(values)
  return {name: getattr(value, "value", value) for name, value in result.items()}


def _compute(
  metric: Any, task: seqio.Task, examples: Sequence[Mapping[str, np.ndarray]], outputs: np.ndarray
) -> Mapping[str, Any]:
  """Compute a metric's values, by name."""
  computed = metric.from_model_output(examples, outputs, task.output_features, "targets")
  if isinstance(computed, seqio.metrics.CollectingMetric):
    values, _ = computed.actual_compute(examples, task.output_features, "targets")
    return values
  return computed.compute()


def _metric_name(task: seqio.Task, place: int) -> str:
  """Return the name of the task's metric at a place of its metric objects."""
  # Objects of metric functions have no name and come last.
  metric = [*task.metric_objs[: -len(task.metric_fns) or None], *task.metric_fns][place]
  return getattr(metric, "__name__", "") or seqio.utils.function_name(metric) or type(metric).__name__
