"""SuperGLUE in T5's text-to-text form, from TensorFlow Datasets (`super_glue/…:1.0.2`).

Importing this module registers a task `super_glue_…` for each of SuperGLUE's datasets, with T5's vocabulary,
and the mixture `super_glue_proportional`. With another vocabulary: `super_glue.register(vocabulary,
prefix="mine_")`. About 184,000 training examples, 0.25 GB. Licence: each corpus has its own,
https://super.gluebenchmark.com names them. Source: Wang et al. 2019; texts after Raffel et al. 2020,
appendix D and section 2.4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from anystep.tasks import metrics
from anystep.tasks.catalogue.text_to_text import (
  T5_VOCABULARY,
  UNKNOWN,
  Example,
  add_task,
  classification,
  described,
  label_of,
  label_text,
)
from anystep.tasks.catalogue.winograd import is_referent, wsc
from anystep.tasks.sources.tfds_source import TfdsSource

TRUTH = ("False", "True")

_SPLITS = ("train", "validation", "test")
_ENTAILMENT = ("entailment", "not_entailment")
_PREMISE = {"hypothesis": "hypothesis", "premise": "premise"}


class _Dataset(NamedTuple):
  """One of SuperGLUE's datasets of labelled texts.

  Attributes:
    columns: by the name that a text gets, its column; in the order of the inputs.
    labels: words of the labels 0, 1, ….
    metrics: what SuperGLUE scores it with.
    examples: to train on; what the mixture's rates are made of.
    task: what the inputs begin with, where it is not the dataset's name.
  """

  columns: Mapping[str, str]
  labels: Sequence[str]
  metrics: Sequence[Callable]
  examples: int = 0
  splits: Sequence[str] = _SPLITS
  task: str | None = None


def _own(*names: str) -> dict[str, str]:
  return {name: name for name in names}


_DATASETS = {
  "boolq": _Dataset(_own("passage", "question"), TRUTH, [metrics.accuracy], 9_427),
  "cb": _Dataset(
    _PREMISE,
    ("entailment", "contradiction", "neutral"),
    [functools.partial(metrics.mean_class_f1, num_classes=3), metrics.accuracy],
    250,
  ),
  "copa": _Dataset(
    _own("choice1", "choice2", "premise", "question"), ("choice1", "choice2"), [metrics.accuracy], 400
  ),
  "rte": _Dataset(_PREMISE, _ENTAILMENT, [metrics.accuracy], 2_490),
  "wic": _Dataset(_own("sentence1", "sentence2", "word"), TRUTH, [metrics.accuracy], 5_428),
  "axb": _Dataset(
    {"hypothesis": "sentence2", "premise": "sentence1"}, _ENTAILMENT, [], splits=("test",), task="rte"
  ),
  "axg": _Dataset(_PREMISE, _ENTAILMENT, [], splits=("test",), task="rte"),
}
# Of ReCoRD one for each right answer, of WSC those whose pronoun means the noun.
_OTHER_EXAMPLES = {"multirc": 27_243, "record": 138_854, "wsc_train": 259, "wsc_eval": 0}


@seqio.map_over_dataset
def multirc(example: Example) -> dict[str, tf.Tensor]:
  """MultiRC: whether an answer to a question on a paragraph is right; without the paragraph's markup."""
  inputs = described("multirc", [(name, example[name]) for name in ("question", "answer", "paragraph")])
  inputs = tf.strings.regex_replace(tf.strings.regex_replace(inputs, "<br>", " "), "</?b>", "")
  place = {f"idx/{name}": example["idx"][name] for name in ("paragraph", "question", "answer")}
  return {**place, "inputs": inputs, "targets": label_text(example["label"], TRUTH)}


def multirc_label(text: str, *, example: Mapping[str, Any], is_target: bool, **unused: Any) -> dict[str, Any]:
  """A postprocessor: the label, and of targets the question that it belongs to."""
  del unused
  label = {"label": label_of(text, labels=TRUTH)}
  return {**label, "question": int(example["idx/question"])} if is_target else label


def multirc_f1(targets: Sequence[Mapping], predictions: Sequence[Mapping]) -> Mapping[str, float]:
  """F1 of right answers over all answers of all questions, in percent."""
  return metrics.f1([t["label"] for t in targets], [p["label"] for p in predictions])


def multirc_exact_match(targets: Sequence[Mapping], predictions: Sequence[Mapping]) -> Mapping[str, float]:
  """Percent of questions all of whose answers are judged right."""
  right: dict[int, bool] = {}
  for target, prediction in zip(targets, predictions, strict=True):
    question = target["question"]
    right[question] = right.get(question, True) and target["label"] == prediction["label"]
  return {"exact_match": 100 * float(np.mean(list(right.values())))}


def record(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """ReCoRD: a query with a gap, what could fill it, and a passage; an example for each right answer."""

  def one_for_each_answer(example: Example) -> tf.data.Dataset:
    # A highlight is a line of its own, and a sentence; most, not all, end with a mark.
    passage = tf.strings.regex_replace(example["passage"], r"([.?!\"'])\n@highlight\n", r"\1 ")
    passage = tf.strings.regex_replace(passage, r"\n@highlight\n", ". ")
    entities = tf.strings.reduce_join(example["entities"], separator=", ")
    columns = [("query", example["query"]), ("entities", entities), ("passage", passage)]
    made = {
      **{f"idx/{name}": example["idx"][name] for name in ("passage", "query")},
      "inputs": described("record", columns),
      "answers": example["answers"],
    }
    answers = example["answers"]
    answers = tf.cond(tf.size(answers) > 0, lambda: answers, lambda: tf.constant([UNKNOWN]))
    return tf.data.Dataset.from_tensor_slices(answers).map(lambda answer: {**made, "targets": answer})

  return dataset.flat_map(one_for_each_answer)


def record_answers(text: str, *, example: Mapping[str, Any], is_target: bool, **unused: Any) -> Any:
  """A postprocessor: the answer; of targets all right ones, and the query that they belong to."""
  del unused
  if not is_target:
    return text
  query = (int(example["idx/passage"]), int(example["idx/query"]))
  return {"query": query, "answers": [answer.decode() for answer in example["answers"]]}


def record_squad(targets: Sequence[Mapping], predictions: Sequence[str]) -> Mapping[str, float]:
  """`metrics.squad` of the first example of each query: the others ask the same."""
  first: dict[tuple[int, int], tuple[Sequence[str], str]] = {}
  for target, prediction in zip(targets, predictions, strict=True):
    first.setdefault(target["query"], (target["answers"], prediction))
  return metrics.squad(*zip(*first.values(), strict=True))


def register(vocabulary: seqio.Vocabulary = T5_VOCABULARY, *, prefix: str = "", cap: int = 2**19) -> None:
  """Registers the tasks, and the mixture of them.

  Rates are in proportion to the examples to train on. As T5's, the mixture holds the tasks to evaluate on
  at a rate of zero; the sentences of DPR, which T5 adds to WSC's, are not in it.

  Args:
    vocabulary: of inputs and targets.
    prefix: of all names.
    cap: examples above which a task's rate does not grow (Raffel et al. 2020, section 3.5.2).
  """

  def add(name: str, data: str, splits: Sequence[str], **arguments: Any) -> None:
    source = TfdsSource(f"super_glue/{data}:1.0.2", splits)
    add_task(f"{prefix}super_glue_{name}", source, vocabulary=vocabulary, **arguments)

  for name, dataset in _DATASETS.items():
    to_text = functools.partial(
      classification, task=dataset.task or name, columns=dataset.columns, labels=dataset.labels
    )
    add(
      name,
      name,
      dataset.splits,
      preprocessors=[to_text],
      metric_fns=dataset.metrics,
      postprocess_fn=functools.partial(label_of, labels=dataset.labels),
    )
  add(
    "multirc",
    "multirc",
    _SPLITS,
    preprocessors=[multirc],
    metric_fns=[multirc_f1, multirc_exact_match],
    postprocess_fn=multirc_label,
  )
  add(
    "record",
    "record",
    _SPLITS,
    preprocessors=[record],
    metric_fns=[record_squad],
    postprocess_fn=record_answers,
  )
  add(
    "wsc_train",
    "wsc.fixed",
    ("train",),
    preprocessors=[functools.partial(wsc, referents_only=True)],
    metric_fns=[],
  )
  add(
    "wsc_eval",
    "wsc.fixed",
    ("validation", "test"),
    preprocessors=[functools.partial(wsc, referents_only=False)],
    metric_fns=[metrics.accuracy],
    postprocess_fn=is_referent,
  )
  examples = {name: dataset.examples for name, dataset in _DATASETS.items()} | _OTHER_EXAMPLES
  seqio.MixtureRegistry.add(
    f"{prefix}super_glue_proportional",
    [(f"{prefix}super_glue_{name}", min(count, cap)) for name, count in examples.items()],
  )


register()
