"""GLUE in T5's text-to-text form, from TensorFlow Datasets (`glue/…:2.0.0`).

Importing this module registers a task `glue_…` for each of GLUE's datasets, with T5's vocabulary, and the
mixture `glue_proportional`. With another vocabulary: `glue.register(vocabulary, prefix="mine_")`.
About 950,000 training examples, 0.2 GB. Licence: each corpus has its own, https://gluebenchmark.com names
them. Source: Wang et al. 2019; texts after Raffel et al. 2020, appendix D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import seqio
import tensorflow as tf

from anystep.tasks import metrics
from anystep.tasks.catalogue.text_to_text import (
  T5_VOCABULARY,
  Example,
  add_task,
  classification,
  described,
  label_of,
)
from anystep.tasks.sources.tfds_source import TfdsSource

_ENTAILMENT = ("entailment", "not_entailment")
_ENTAILMENT_3 = ("entailment", "neutral", "contradiction")
_SPLITS = ("train", "validation", "test")
_MNLI_SPLITS = ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")


class _Dataset(NamedTuple):
  """One of GLUE's datasets.

  Attributes:
    columns: of texts, in the order of the inputs.
    labels: words of the labels 0, 1, ….
    metrics: what GLUE scores it with.
    examples: to train on; what the mixture's rates are made of.
    task: what the inputs begin with, where it is not the dataset's name.
  """

  columns: Sequence[str]
  labels: Sequence[str]
  metrics: Sequence[Callable]
  examples: int = 0
  splits: Sequence[str] = _SPLITS
  task: str | None = None


_SENTENCES = ("sentence1", "sentence2")
_PREMISE = ("hypothesis", "premise")
_HELD_OUT = ("validation", "test")
_DATASETS = {
  "cola": _Dataset(("sentence",), ("unacceptable", "acceptable"), [metrics.matthews_corrcoef], 8_551),
  "sst2": _Dataset(("sentence",), ("negative", "positive"), [metrics.accuracy], 67_349),
  "mrpc": _Dataset(_SENTENCES, ("not_equivalent", "equivalent"), [metrics.f1, metrics.accuracy], 3_668),
  "qqp": _Dataset(
    ("question1", "question2"), ("not_duplicate", "duplicate"), [metrics.f1, metrics.accuracy], 363_849
  ),
  "mnli": _Dataset(_PREMISE, _ENTAILMENT_3, [metrics.accuracy], 392_702, splits=_MNLI_SPLITS),
  "mnli_matched": _Dataset(_PREMISE, _ENTAILMENT_3, [metrics.accuracy], splits=_HELD_OUT, task="mnli"),
  "mnli_mismatched": _Dataset(_PREMISE, _ENTAILMENT_3, [metrics.accuracy], splits=_HELD_OUT, task="mnli"),
  "qnli": _Dataset(("question", "sentence"), _ENTAILMENT, [metrics.accuracy], 104_743),
  "rte": _Dataset(_SENTENCES, _ENTAILMENT, [metrics.accuracy], 2_490),
  "wnli": _Dataset(_SENTENCES, ("not_entailment", "entailment"), [metrics.accuracy], 635),
  "ax": _Dataset(_PREMISE, _ENTAILMENT_3, [], splits=("test",), task="mnli"),
}
_STSB_EXAMPLES = 5_749


@seqio.map_over_dataset
def similarity(example: Example) -> dict[str, tf.Tensor]:
  """STS-B: two sentences in `inputs`, in `targets` how alike they are, to the nearest fifth: "3.8"."""
  score = tf.strings.as_string(tf.round(5 * example["label"]) / 5, precision=1)
  inputs = described("stsb", [(name, example[name]) for name in _SENTENCES])
  return {"idx": example["idx"], "inputs": inputs, "targets": score}


def score_of(text: str, **unused: Any) -> float:
  """A postprocessor: the number that a text is, -1 where it is none.

  >>> score_of("3.8"), score_of("three")
  (3.8, -1.0)
  """
  del unused
  try:
    return float(text)
  except ValueError:
    return -1.0


def register(vocabulary: seqio.Vocabulary = T5_VOCABULARY, *, prefix: str = "", cap: int = 2**19) -> None:
  """Registers the tasks, and the mixture of them.

  Rates are in proportion to the examples to train on. As T5's, the mixture holds the tasks to evaluate on
  at a rate of zero, and not WNLI.

  Args:
    vocabulary: of inputs and targets.
    prefix: of all names.
    cap: examples above which a task's rate does not grow (Raffel et al. 2020, section 3.5.2).
  """
  for name, dataset in _DATASETS.items():
    columns = {column: column for column in dataset.columns}
    add_task(
      f"{prefix}glue_{name}",
      TfdsSource(f"glue/{name}:2.0.0", dataset.splits),
      preprocessors=[
        functools.partial(classification, task=dataset.task or name, columns=columns, labels=dataset.labels)
      ],
      vocabulary=vocabulary,
      metric_fns=dataset.metrics,
      postprocess_fn=functools.partial(label_of, labels=dataset.labels),
    )
  add_task(
    f"{prefix}glue_stsb",
    TfdsSource("glue/stsb:2.0.0", _SPLITS),
    preprocessors=[similarity],
    vocabulary=vocabulary,
    metric_fns=[metrics.pearson_corrcoef, metrics.spearman_corrcoef],
    postprocess_fn=score_of,
  )
  examples = {name: dataset.examples for name, dataset in _DATASETS.items()} | {"stsb": _STSB_EXAMPLES}
  del examples["wnli"]
  seqio.MixtureRegistry.add(
    f"{prefix}glue_proportional",
    [(f"{prefix}glue_{name}", min(count, cap)) for name, count in examples.items()],
  )


register()
