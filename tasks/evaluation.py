"""A task's own metrics, computed as SeqIO's Evaluator computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import seqio

from anystep.errors import AnystepError, ExitCode

ModelOutput = seqio.metrics.ModelOutputType


def check_metrics(task: seqio.Task, outputs: Collection[seqio.metrics.ModelOutputType]) -> None:
  """Refuses a task with metrics of what the model does not give.

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
) -> dict[str, Any]:
  """The task's metrics by name.

  Args:
    task: its metric functions and objects say what they take.
    examples: features of each example after all preprocessors, in order.
    outputs: `PREDICTION` `(examples, length)` token ids, `SCORE` `(examples,)`, in the same order.

  Raises:
    AnystepError: 78 `metric_output` where a metric takes what is not in outputs.
  """
  check_metrics(task, outputs)
  result: dict[str, Any] = {}
  for metric in task.metric_objs:
    kind = metric.model_output_type
    computed = metric.from_model_output(examples, outputs[kind], task.output_features, "targets")
    if isinstance(computed, seqio.metrics.CollectingMetric):
      values, _ = computed.actual_compute(examples, task.output_features, "targets")
    else:
      values = computed.compute()
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
